METHOD = "fedlit"
NETWORKS = [{"types": 2}, {"edge": "symmetric", "em-steps": 2}]
