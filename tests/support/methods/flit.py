METHOD = "flit"
SHORT = {"lr": 0.01, "batch_size": 0}
WEIGHTED = {"virtual_weight": 0.5}
NEEDED = {"flit": {"variant": "flit+"}}
