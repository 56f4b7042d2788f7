"""The parts of the round loop that all strategies share."""
