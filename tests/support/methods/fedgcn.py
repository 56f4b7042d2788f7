METHOD = "fedgcn"
UNWEIGHTED = "cross-entropy only"
