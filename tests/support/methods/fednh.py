METHOD = "fednh"
NETWORKS = [{}]
LOOKS_CLOSER = True
