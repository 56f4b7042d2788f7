"""Datasets: sources, graph files, transforms, partitions, splits and client graphs."""
