"""Client halves of the methods."""
