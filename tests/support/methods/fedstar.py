METHOD = "fedstar"
UNWEIGHTED = "cross-entropy only; both channels: tests/algorithms/test_fedstar.py"
