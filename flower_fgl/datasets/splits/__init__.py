"""Splits of a client's nodes or graphs into training, validation and test."""
