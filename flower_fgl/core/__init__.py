"""Settings, errors, seeds, metrics and locks: what every other package may import."""
