METHOD = "fedntd"
WEIGHTED = {"beta": 1.0}
