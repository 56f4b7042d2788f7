"""Server half of each method; this package never loads a dataset."""
