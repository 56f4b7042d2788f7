METHOD = "fedsst"
UNWEIGHTED = "cross-entropy only"
