"""METHODS, and the row and settings of each method; loads no torch."""

from flower_fgl.methods.method import Method
from flower_fgl.methods.table import METHODS, drop_removed, parse_config

__all__ = ["METHODS", "Method", "drop_removed", "parse_config"]
