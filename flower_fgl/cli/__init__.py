"""The ``flower-fgl`` command line, one module per command."""
