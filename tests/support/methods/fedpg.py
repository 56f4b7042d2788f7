METHOD = "fedpg"
WEIGHTED = {"mu": 0.03}
NO_TERM = {"alpha": "mixes prototypes"}
