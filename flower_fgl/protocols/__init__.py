"""What both halves of a method agree on: hyper-parameters and payloads."""
