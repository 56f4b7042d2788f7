METHOD = "fggp"
WEIGHTED = {"view_weight": 0.5, "edge_weight": 0.5, "contrast_weight": 0.5}
LOOKS_CLOSER = True
