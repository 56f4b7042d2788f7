METHOD = "fediih"
UNWEIGHTED = "cross-entropy only"
NETWORKS = [{"factors": 3}]
