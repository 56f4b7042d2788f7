METHOD = "fedpano"
SHORT = {"participants": 0}
