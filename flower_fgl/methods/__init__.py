"""The row and settings of each method, collected in ``METHODS``; does not import torch."""

from flower_fgl.methods.method import Method
from flower_fgl.methods.table import METHODS, drop_removed, parse_config

__all__ = ["METHODS", "Method", "drop_removed", "parse_config"]
