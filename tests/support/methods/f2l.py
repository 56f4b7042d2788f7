METHOD = "f2l"
SHORT = {"local_epochs": 1, "f2l": {"inner_steps": 2}}
WEIGHTED = {"contrast_weight": 0.1, "distillation_weight": 0.1}
