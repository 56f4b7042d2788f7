METHOD = "adafgl"
SHORT = {"adafgl": {"finetune_epochs": 3, "width": 8}}
NETWORKS = [{"steps": 2}]
