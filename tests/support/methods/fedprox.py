METHOD = "fedprox"
WEIGHTED = {"mu": 0.1}
