"""Backbones: each splits into an embedding network and a prediction head."""
