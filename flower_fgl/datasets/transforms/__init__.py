"""Transforms of a graph before or after partitioning."""
