METHOD = "feddc"
WEIGHTED = {"alpha": 0.1}
UNWEIGHTED = "the correction's gradient: tests/algorithms/test_feddc.py"
