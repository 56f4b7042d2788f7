METHOD = "fedstar"
NETWORKS = [{"walks": 3}]
