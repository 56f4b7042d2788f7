"""Arithmetic of class prototypes: tensors in, tensors out, shared by both halves."""
