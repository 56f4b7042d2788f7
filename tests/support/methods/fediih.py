METHOD = "fediih"
NETWORKS = [{"factors": 3}]
