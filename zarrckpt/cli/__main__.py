"""``python -m zarrckpt.cli``."""

from zarrckpt.cli import main

main(prog_name="zarrckpt")
