"""Change a graph before or after it is partitioned."""
