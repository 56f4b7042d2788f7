METHOD = "fednh"
UNWEIGHTED = "cross-entropy only, under the head of tests/algorithms/test_fednh.py"
