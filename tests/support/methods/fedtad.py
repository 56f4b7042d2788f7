METHOD = "fedtad"
UNWEIGHTED = "generator and distillation: tests/algorithms/test_fedtad.py"
