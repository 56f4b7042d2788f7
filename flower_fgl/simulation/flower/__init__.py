"""Flower's simulation, SuperLink and SuperNodes on this machine."""
