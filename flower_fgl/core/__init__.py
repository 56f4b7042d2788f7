"""Settings, errors, seeds, metrics and locks; every other package may import them."""
