"""Sources, partitions, splits and the store of client graphs."""
