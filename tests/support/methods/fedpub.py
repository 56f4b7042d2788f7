METHOD = "fed-pub"
WEIGHTED = {"l1": 1e-3, "l2": 1e-3}
