"""Checks that settings are known, and fit each other and the method."""
