"""Reading, validating and writing of a data owner's graph file."""
