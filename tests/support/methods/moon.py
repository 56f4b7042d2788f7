METHOD = "moon"
WEIGHTED = {"mu": 1.0}
