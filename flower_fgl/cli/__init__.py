"""The ``flower-fgl`` command line, one module per command.

Imports inside of functions load torch, pandas or matplotlib, which take seconds: a wrong
argument is reported before, and other commands do without.
"""
