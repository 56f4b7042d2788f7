"""Client half of each method."""
