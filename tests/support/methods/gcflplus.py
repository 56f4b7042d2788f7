METHOD = "gcfl+"
# clusters split in the short runs too
SHORT = {"gcfl+": {"eps1": 100.0, "eps2": 0.0, "length": 1, "warmup": 0}}
