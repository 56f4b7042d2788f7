METHOD = "topfgl"
UNWEIGHTED = "cross-entropy of network and learner: tests/algorithms/test_topfgl.py"
