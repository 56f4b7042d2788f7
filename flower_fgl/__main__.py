"""Run the ``flower-fgl`` command as ``python -m flower_fgl``."""

from flower_fgl.cli.main import main

main()
