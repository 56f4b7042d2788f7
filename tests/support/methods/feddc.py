METHOD = "feddc"
WEIGHTED = {"alpha": 0.1}
