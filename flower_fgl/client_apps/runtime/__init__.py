"""A client's data, state, training and uploads, whatever its method."""
