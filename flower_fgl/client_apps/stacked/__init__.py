"""Training and evaluation of many clients of one process at once."""
