"""Partition the nodes of a graph, or a set of graphs, among clients."""
