METHOD = "fpl"
WEIGHTED = {"contrast_weight": 0.1, "consistency_weight": 1.0}
LOOKS_CLOSER = True
