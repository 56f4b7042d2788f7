"""The run folder: write, read, checkpoint, compare, plot and report."""
