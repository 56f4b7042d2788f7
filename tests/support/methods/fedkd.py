METHOD = "fedkd"
UNWEIGHTED = "each term's gradient: tests/algorithms/test_fedkd.py"
