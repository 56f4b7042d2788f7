METHOD = "fedlog"
SHORT = {
    "fedlog": {
        "nodes_per_class": 2,
        "encoder_channels": 8,
        "prompt_epochs": 2,
        "prompt_networks": 2,
    }
}
WEIGHTED = {"beta": 0.5}
NETWORKS = [
    {},
    {"msg-input": "neighbor", "nodes-per-class": 2},
    {"alpha-fixed": 0.9, "classifier-update": False},
]
