"""Experiment files, and the runs of their grids."""
