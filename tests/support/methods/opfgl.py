METHOD = "opfgl"
SHORT = {
    "rounds": 1,
    "local_epochs": 20,
    "check_every": 10,
    "opfgl": {"server_steps": 60},
}
# the classes of small graphs have fewer nodes than the method's own min-class-count
LEAST = {"min_class_count": 1}
WEIGHTED = {"alignment_weight": 10.0, "smoothness_weight": 0.1, "beta": 0.2}
NO_TERM = {"propagation_share": "mixes labels"}
# a pseudo-graph changes a client's weights by its small learning rates only
NEEDED = {
    "opfgl": {
        "server_steps": 60,
        "gamma_max": 1.0,
        "lr_global": 1e-2,
        "lr_personal": 1e-2,
    }
}
DOWNLOAD_ACTION = "personalise"
