METHOD = "dense"
SHORT = {
    "rounds": 1,
    "local_epochs": 20,
    "check_every": 0,  # stacked clients take no checks
    "dense": {
        "server_epochs": 2,
        "generator_steps": 3,
        "generator_channels": 8,
        "noise_channels": 4,
        "batch": 12,
        "finetune_epochs": 2,
    },
}
WEIGHTED = {"adversarial_weight": 1.0}
DOWNLOAD_ACTION = "finetune"
NEEDED = {
    "dense": {
        **SHORT["dense"],  # type: ignore[dict-item]
        "generator_steps": 10,
        "generator_lr": 0.1,
        "batch": 60,
        "student_lr": 0.1,
        "finetune_epochs": 1,
    }
}
LOOKS_CLOSER = True
