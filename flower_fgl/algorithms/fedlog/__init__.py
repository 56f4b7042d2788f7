"""Learnable nodes that stand for classes: the arithmetic of FedLoG."""
