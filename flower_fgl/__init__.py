"""Federated graph learning methods as Flower apps."""
