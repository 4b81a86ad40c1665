"""Prepare the standard streams of the command line for any encoding, a full disk and a closed reader."""

from __future__ import annotations

import codecs
import errno
import io
import os
import sys
from typing import TYPE_CHECKING

from zarrckpt._errors import StorageError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_ASCII = "zarrckpt_ascii"
"""A second name of ASCII, because click writes UTF-8 to a stream with the encoding "ascii"."""
_ESCAPE = "zarrckpt_escape"
_DRAWN = str.maketrans({"├": "|", "└": "`", "│": "|", "─": "-", "…": "..."})
"""ASCII replacements for the characters of trees and shortened names."""


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
    codecs.register(_find_codec)
    codecs.register_error(_ESCAPE, _escape)
    for name, silent in (("stdout", False), ("stderr", True)):
        old = getattr(sys, name)
        if not isinstance(old, io.TextIOWrapper):
            continue
        encoding = _ASCII if codecs.lookup(old.encoding).name == "ascii" else old.encoding
        file = io.BufferedWriter(_Output(old.fileno(), silent=silent))
        setattr(sys, name, io.TextIOWrapper(file, encoding, _ESCAPE, line_buffering=old.line_buffering))


def _find_codec(name: str) -> codecs.CodecInfo | None:
    if name != _ASCII:
        return None
    known = codecs.lookup("ascii")
    return codecs.CodecInfo(
        known.encode,
        known.decode,
        incrementalencoder=known.incrementalencoder,
        incrementaldecoder=known.incrementaldecoder,
        name=_ASCII,
    )


def _escape(error: UnicodeError) -> tuple[str, int]:
    """Replace characters that an encoding does not have."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text = error.object[error.start : error.end].translate(_DRAWN)
    return text.encode("ascii", "backslashreplace").decode(), error.end
