"""The machinery of a round that all strategies share."""
