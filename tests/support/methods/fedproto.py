METHOD = "fedproto"
WEIGHTED = {"proto_weight": 1.0}
