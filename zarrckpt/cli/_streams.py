"""The standard streams of a process of the command line: any encoding, a full disk, a closed end."""

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
"""ASCII by another name: click writes UTF-8 to a stream whose encoding is ASCII."""
_ESCAPE = "zarrckpt_escape"
_DRAWN = str.maketrans({"├": "|", "└": "`", "│": "|", "─": "-", "…": "..."})
"""Characters of trees and shortened names, in ASCII."""


class ReaderGoneError(Exception):
    """The reader of standard output has closed its end (``| head``)."""


class _Output(io.FileIO):
    """The file of a stream. The first failed write is an error, unless ``silent``; what follows is dropped.

    The interpreter flushes streams when it ends, and would replace the exit status by 120 if that failed.
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

    Files are named after entries, in UTF-8 whatever the locale of the process that saved them. The streams keep the
    encoding of the locale.
    """
    if sys.getfilesystemencoding() != "utf-8" and os.environ.get("PYTHONUTF8") != "1" and sys.executable:
        os.environ["PYTHONUTF8"] = "1"
        os.environ.setdefault("PYTHONIOENCODING", getattr(sys.stdout, "encoding", "utf-8"))
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def prepare_streams() -> None:
    """Make writes to the standard streams fail with errors of this package, and in no encoding for a character.

    A write to standard error never fails, so that the exit status is that of the command.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed: no file that is opened later is to get its number
            fd = os.open(os.devnull, os.O_RDWR)
            setattr(sys, name, open(fd, mode, encoding="utf-8", closefd=False))  # noqa: SIM115 - as long as the process
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
    """Replace characters that an encoding lacks."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text = error.object[error.start : error.end].translate(_DRAWN)
    return text.encode("ascii", "backslashreplace").decode(), error.end
