"""METHODS and the settings of every method; loads no torch."""

from flower_fgl.methods.table import METHODS, Method

__all__ = ["METHODS", "Method"]
