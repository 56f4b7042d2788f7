METHOD = "fediih"
UNWEIGHTED = "cross-entropy only"
