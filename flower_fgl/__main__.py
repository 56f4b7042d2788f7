"""``python -m flower_fgl`` is ``flower-fgl``."""

from flower_fgl.cli.main import main

main()
