METHOD = "fedspray"
WEIGHTED = {"distill_weight": 1.0}
LOOKS_CLOSER = True
