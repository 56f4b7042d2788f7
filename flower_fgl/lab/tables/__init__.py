"""Results of many runs: cells, comparisons, statistics and tables."""
