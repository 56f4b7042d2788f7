METHOD = "fedgen"
SHORT = {"fedgen": {"generator_channels": 16, "server_steps": 5, "generated": 16}}
WEIGHTED = {"label_weight": 10.0, "latent_weight": 10.0, "diversity_weight": 1.0}
LOOKS_CLOSER = True
