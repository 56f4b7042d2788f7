METHOD = "fedtgp"
WEIGHTED = {"proto_weight": 1.0}
