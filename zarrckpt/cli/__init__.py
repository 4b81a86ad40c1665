"""The command line: ``zarrckpt COMMAND URL``. Arguments -> calls -> text."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

import click

from zarrckpt._errors import CheckpointError
from zarrckpt._version import __version__

# Command -> its module, so that one command does not import what the others need.
_COMMANDS = {
    "ls": "look",
    "tree": "look",
    "info": "look",
    "cat": "look",
    "stats": "compare",
    "diff": "compare",
    "cp": "convert",
    "export": "convert",
    "import": "convert",
    "verify": "care",
    "doctor": "care",
    "recover": "care",
    "rm": "care",
}

EXAMPLES = """\b
Examples:
  zarrckpt ls s3://bucket/run/step-100 'model.layers.0.*'
  zarrckpt stats run/step-100 --sort nan
  zarrckpt diff run/step-100 run/step-200 'model.*'
  zarrckpt verify s3://bucket/run/step-100 --quick

\b
Exit codes: 0 all is well; 1 differences, damage or leftovers were found; 2 wrong
usage; 3 an error. `zarrckpt COMMAND -h` has each command's options."""


class _Commands(click.Group):
    """Loads a command's module when it is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module = importlib.import_module(f"zarrckpt.cli.{_COMMANDS[cmd_name]}")
        command: click.Command = getattr(module, f"{cmd_name}_" if cmd_name == "import" else cmd_name)
        return command

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except CheckpointError as err:
            click.echo(f"zarrckpt: {type(err).__name__}: {err}", err=True)
            ctx.exit(3)
        except ModuleNotFoundError as err:
            click.echo(f"zarrckpt: {err}", err=True)
            ctx.exit(3)
        except BrokenPipeError:
            # Whoever read our output has seen enough (`| head`); nothing more is flushed there at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            ctx.exit(0)


@click.group(cls=_Commands, epilog=EXAMPLES, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="zarrckpt")
def main() -> None:
    """Look at, check, convert and clean up zarrckpt checkpoints: on disk, in S3 and wherever fsspec goes.

    Only `import` needs PyTorch.
    """
