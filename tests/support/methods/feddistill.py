METHOD = "feddistill"
WEIGHTED = {"distill_weight": 1.0}
