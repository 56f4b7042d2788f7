"""The papers' equations as pure tensor functions and modules, one folder per method.

Losses have the shape () unless their docstring states another one.
"""
