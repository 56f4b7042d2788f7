METHOD = "fgssl"
WEIGHTED = {"contrast_weight": 0.1, "structure_weight": 0.1}
