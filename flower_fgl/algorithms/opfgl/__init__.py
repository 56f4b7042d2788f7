"""Arithmetic of one-shot federated graph learning: tensors in, tensors out."""
