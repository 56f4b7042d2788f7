METHOD = "fedgta"
UNWEIGHTED = "cross-entropy only"
