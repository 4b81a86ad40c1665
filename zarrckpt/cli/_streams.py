"""Prepare the standard streams of the command line for any encoding, a full disk and a closed reader."""

from __future__ import annotations

import errno
import io
import os
import sys
from typing import TYPE_CHECKING

import click

from zarrckpt._errors import StorageError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class ReaderGoneError(Exception):
    """The reader of standard output has closed the pipe (``| head``)."""


class _Output(io.FileIO):
    """The file of a stream. The first failed write raises unless ``silent``, and later output is dropped.

    Later writes must not fail, because the interpreter flushes streams at its end and exits with 120 if this fails.
    """

    def __init__(self, fd: int, *, silent: bool) -> None:
        super().__init__(fd, "w", closefd=False)
        self._silent = silent
        self._failed = False

    def write(self, data: ReadableBuffer, /) -> int:
        if not self._failed:
            try:
                return super().write(data)
            except OSError as err:
                self._failed = True
                if not self._silent and err.errno == errno.EPIPE:
                    raise ReaderGoneError from err
                if not self._silent:
                    raise StorageError(f"writing to the standard output failed: {err.strerror}") from err
        return memoryview(data).nbytes


def use_utf8_names() -> None:
    """Start the program again in Python's UTF-8 mode if the locale has another encoding.

    Names of files contain names of entries, always in UTF-8, independent of the locale of the process that saved them.
    The streams keep the encoding of the locale.
    """
    if sys.getfilesystemencoding() != "utf-8" and os.environ.get("PYTHONUTF8") != "1" and sys.executable:
        os.environ["PYTHONUTF8"] = "1"
        os.environ.setdefault("PYTHONIOENCODING", getattr(sys.stdout, "encoding", "utf-8"))
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def prepare_streams() -> None:
    """Make failed writes to standard output raise errors of this package, and make any character printable.

    A write to standard error never fails, so that the exit status is the status of the command.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed, and a file that is opened later must not get its number
            fd = os.open(os.devnull, os.O_RDWR)
            setattr(sys, name, open(fd, mode, encoding="utf-8", closefd=False))  # noqa: SIM115 - open until the process ends
    for name, silent in (("stdout", False), ("stderr", True)):
        old = getattr(sys, name)
        file = io.BufferedWriter(_Output(old.fileno(), silent=silent))
        stream = io.TextIOWrapper(file, old.encoding, "backslashreplace", line_buffering=old.line_buffering)
        setattr(sys, name, stream)


def echo(text: str, err: bool = False) -> None:
    """Print a text. The stream is passed, because click prints UTF-8 if it finds that its encoding is ASCII."""
    click.echo(text, sys.stderr if err else sys.stdout)
