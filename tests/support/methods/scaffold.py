METHOD = "scaffold"
UNWEIGHTED = "the correction's gradient: tests/algorithms/test_scaffold.py"
