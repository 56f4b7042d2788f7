METHOD = "fedaux"
UNWEIGHTED = (
    "cross-entropy only, of weights and direction: tests/algorithms/test_fedaux.py"
)
