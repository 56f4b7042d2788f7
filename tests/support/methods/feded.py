METHOD = "feded"
WEIGHTED = {"distill_weight": 0.1, "suppress_weight": 0.005}
# clients lack classes: the distillation is that of absent classes
NEEDED = {"synthetic": {"nodes": 120, "classes": 6, "features": 8, "blocks": 6}}
