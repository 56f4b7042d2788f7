"""The flower-fgl command: one module per command."""
