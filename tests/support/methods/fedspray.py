METHOD = "fedspray"
WEIGHTED = {"distill_weight": 1.0}
UNWEIGHTED = "encoder and proxies: tests/algorithms/test_fedspray.py"
