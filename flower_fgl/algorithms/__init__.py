"""The papers' equations as pure tensor functions and modules, one folder per method."""
