"""Read, check and write a data owner's graph file."""
