"""Partition a graph, or a set of graphs, among clients."""
