METHOD = "fedaux"
NETWORKS = [{"score": "cosine"}, {"sigma": 2.0}]
LOOKS_CLOSER = True
