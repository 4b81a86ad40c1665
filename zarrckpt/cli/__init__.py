"""The command line: ``zarrckpt COMMAND URL``. Commands parse arguments, call the library and print the results."""

from __future__ import annotations

import difflib
import importlib
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from typing import Any, NoReturn

import click

from zarrckpt._errors import CheckpointError, printable
from zarrckpt._version import __version__
from zarrckpt.cli._streams import ReaderGoneError, echo, prepare_streams, use_utf8_names

# Command -> its module, so that a command does not import the modules of the others.
_COMMANDS = {
    "ls": "look",
    "tree": "look",
    "info": "look",
    "cat": "look",
    "stats": "compare",
    "diff": "compare",
    "report": "report",
    "cp": "copy",
    "export": "convert",
    "import": "convert",
    "verify": "care",
    "doctor": "care",
    "recover": "care",
    "rm": "care",
}

# Names of the commands in other tools, if they are not similar.
_OTHER_NAMES = {"remove": "rm", "delete": "rm", "compare": "diff", "show": "cat", "check": "verify"}

EXAMPLES = """\b
Examples:
  zarrckpt ls s3://bucket/run/step-100 'model.layers.0.*'
  zarrckpt stats run/step-100 --sort nan
  zarrckpt diff run/step-100 run/step-200 'model.*'
  zarrckpt verify s3://bucket/run/step-100 --quick

\b
Exit codes: 0 success; 1 differences, damage, NaN or leftovers were found; 2 wrong
usage; 3 an error; 70 an unexpected error, which is a bug; 130 Ctrl-C.
`zarrckpt COMMAND -h` lists the options of a command."""

_ERROR, _BUG, _INTERRUPTED = 3, 70, 130
"""Exit statuses. click exits with 2, and commands exit with 1."""

_TRACEBACK = "ZARRCKPT_TRACEBACK"
"""The environment variable that makes an unexpected error print its traceback."""

_INTERRUPT_SECONDS = 1.0
"""Seconds after Ctrl-C in which a command can end normally."""


def _leave_on_interrupt() -> None:
    """Let Ctrl-C end this process even if its main thread waits in a store's client, which blocks Python's signals."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer)

    def watch() -> None:
        while os.read(reader, 1) != bytes([signal.SIGINT]):
            pass
        time.sleep(_INTERRUPT_SECONDS)
        _leave()

    threading.Thread(target=watch, daemon=True).start()


def _leave() -> NoReturn:
    """End the process at once, without waiting for requests. An unfinished copy is not committed."""
    show_cursor = "\x1b[?25h" if sys.stderr.isatty() else ""  # progress bars hide it
    echo(f"{show_cursor}zarrckpt: interrupted", err=True)
    os._exit(_INTERRUPTED)


class _Commands(click.Group):
    """The group of commands. It imports a command's module when the command is used."""

    def main(self, args: Sequence[str] | None = None, *more: Any, **options: Any) -> Any:
        if args is not None:
            return super().main(args, *more, **options)
        # Without args, the command line is this process's own, so its streams and signals can be changed.
        use_utf8_names()
        prepare_streams()
        _leave_on_interrupt()
        try:
            status = super().main(None, *more, **{**options, "standalone_mode": False})
        except click.ClickException as err:
            err.show(sys.stderr)
            status = err.exit_code
        except (click.Abort, KeyboardInterrupt):  # before or after the command
            _leave()
        except SystemExit:
            raise
        except ReaderGoneError:
            status = 0
        except CheckpointError as err:
            status = _print_error(err)
        except BaseException as err:  # also panics of clients, which are not Exceptions
            status = _report_bug(err)
        sys.exit(status)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module = importlib.import_module(f"zarrckpt.cli.{_COMMANDS[cmd_name]}")
        command: click.Command = getattr(module, f"{cmd_name}_command")
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as err:
            near = difflib.get_close_matches(args[0], _COMMANDS, n=1)
            meant = _OTHER_NAMES.get(args[0]) or next(iter(near), None)
            if meant is None:
                raise
            raise click.UsageError(f"{err.message} Did you mean {meant}?", ctx) from err

    def invoke(self, ctx: click.Context) -> Any:
        if os.environ.get("NO_COLOR"):
            ctx.color = False
        try:
            return super().invoke(ctx)
        except CheckpointError as err:
            command = self.get_command(ctx, ctx.invoked_subcommand or "")
            ctx.exit(_print_error(err, command))
        except KeyboardInterrupt:
            _leave()
        except click.Abort as err:
            if isinstance(err.__context__, KeyboardInterrupt):
                _leave()
            echo("zarrckpt: not confirmed, so nothing was done. --yes confirms", err=True)
            ctx.exit(_ERROR)
        except (ModuleNotFoundError, MemoryError) as err:
            what = "not enough memory: " if isinstance(err, MemoryError) else ""
            echo(f"zarrckpt: {what}{printable(str(err))}", err=True)
            ctx.exit(_ERROR)


def _print_error(error: CheckpointError, command: click.Command | None = None) -> int:
    """Print an error of the package, with the command's options for argument names. Returns the exit status."""
    from zarrckpt.cli._wording import in_options

    echo(f"zarrckpt: {type(error).__name__}: {in_options(str(error), command)}", err=True)
    return _ERROR


def _report_bug(error: BaseException) -> int:
    """Print an unexpected error, and how to report it. Returns the exit status."""
    if os.environ.get(_TRACEBACK):
        traceback.print_exception(error)
    last = traceback.extract_tb(error.__traceback__)[-1]
    echo(
        f"zarrckpt: unexpected error, probably a bug in zarrckpt {__version__}: {type(error).__name__}: "
        f"{printable(str(error))} ({last.filename}, line {last.lineno}).\nPlease report it with the command and its "
        f"traceback, which is printed with {_TRACEBACK}=1 in the environment",
        err=True,
    )
    return _BUG


@click.group(cls=_Commands, epilog=EXAMPLES, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="zarrckpt")
def main() -> None:
    """Show, check, convert and clean up zarrckpt checkpoints on disk, in S3 and in any store of fsspec.

    Only `import`, and `export` to PyTorch's formats, need PyTorch.
    """
