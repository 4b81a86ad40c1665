"""All errors that this package raises for a caller to handle, in one tree.

The classes are grouped by the next step of the caller. Errors are sent between ranks as text, or as pickles inside
DCP's ``CheckpointException``. So each error can be rebuilt from its message, and its message is complete.
"""

from __future__ import annotations

import logging
import re
import sys
import traceback
import warnings

log = logging.getLogger("zarrckpt")

_CONTROLS = re.compile(
    "[\x00-\x1f\x7f-\x9f\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u2028-\u202e\u2060-\u206f\u2800"
    "\u3164\ud800-\udfff\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb\U0001bca0-\U0001bca3\U0001d173-\U0001d17a"
    "\U000e0000-\U000e0fff]"
)
"""Characters that are not seen, or change the text around them.

These are controls, line separators, text directions, characters without a glyph (Unicode's Default_Ignorable_Code_Point
and the empty Braille pattern), and lone surrogates.
"""


def one_line(text: str) -> str:
    """Return a text with escaped invisible characters, because names, paths and servers' answers can contain any."""
    return _CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def printable(text: str) -> str:
    """Return a text like :func:`one_line`, but with its line breaks."""
    return "\n".join(map(one_line, text.split("\n")))


def _clean_record(record: logging.LogRecord) -> bool:
    record.msg, record.args = printable(record.getMessage()), ()
    return True


log.addFilter(_clean_record)


class CheckpointError(Exception):
    """Base of all errors of zarrckpt.

    Its text and notes contain no control characters except line breaks.
    """

    def __str__(self) -> str:
        # The plain message, because KeyError shows its repr and so escapes line breaks.
        return printable("".join(map(str, self.args[:1])))

    def add_note(self, note: str) -> None:
        super().add_note(printable(note))

    def _render_traceback_(self) -> list[str]:
        """Return the lines that IPython and Jupyter show: the message, then only the frames of the caller."""
        lines = [f"{type(self).__name__}: {self}", *getattr(self, "__notes__", ())]
        if frames := _frames_of_caller(self):
            lines += ["", *(line.rstrip("\n") for line in traceback.format_list(frames))]
        return [*lines, "", "import traceback; traceback.print_last() prints all frames."]


class CheckpointExistsError(CheckpointError):
    """The url has a committed checkpoint, or another save committed there first.

    Save to another url, or pass ``overwrite=True``.
    """


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """Nothing is committed at the url. The message names an unfinished save, if there is one."""


class CheckpointPinnedError(CheckpointError):
    """The checkpoint is pinned. It can be removed or replaced only after all its pins were removed."""


class CheckpointReplacedError(CheckpointError):
    """Another save replaced the checkpoint during the read. Open the url again."""


class CheckpointRemovedError(CheckpointError):
    """The checkpoint was removed during the read, or a removal at the url has begun and has not ended."""


class CorruptCheckpointError(CheckpointError):
    """The stored data differ from the saved data: an object is missing, short, altered or unreadable."""


class RunTakenOverError(CheckpointError):
    """Another job has taken over the run, so this job saves and deletes nothing there. Stop one of them."""


class UnsupportedFormatError(CheckpointError):
    """The checkpoint has a format that this version does not support. Most likely a newer version wrote it."""


class UnsafeValueError(CheckpointError):
    """A value is a pickle, which can run any code in the checkpoint when it is loaded."""


class KeyMismatchError(CheckpointError, KeyError):
    """Keys, shapes or dtypes of the target and of the checkpoint do not fit. The message lists all differences."""


class LoadMismatchError(CheckpointError):
    """After a load, objects of the state do not hold the data that was read. The message lists all differing entries.

    ``load_state_dict`` of an object ignored or changed a part of its argument. The state differs from the saved one.
    """


class UnsupportedValueError(CheckpointError, TypeError):
    """The state has an entry that cannot be saved, such as a sparse tensor or an unknown dtype."""


class UnsupportedLayoutError(CheckpointError, ValueError):
    """The pieces that the ranks hold do not fit a regular chunk grid."""


class ForeignObjectsError(CheckpointError):
    """The url has objects that no save of zarrckpt wrote, or has other checkpoints below it, or lies inside one.

    Nothing was changed.
    """


class IncompleteSaveError(CheckpointError):
    """A rank did not write its part of the plan. Nothing was committed. Save again."""


class StorageError(CheckpointError):
    """The store failed after retries: network, permission, space, credentials."""

    no_bucket = False
    """Whether a server answered that the bucket does not exist."""


class ObjectNotFoundError(StorageError, FileNotFoundError):
    """A requested object is not in the store."""


class ObjectExistsError(StorageError, FileExistsError):
    """A conditional put failed, because the object exists already or has another version than expected."""


def _frames_of_caller(error: BaseException) -> list[traceback.FrameSummary]:
    """Return the frames of an error down to the call of this package, without those of IPython."""
    frames = []
    for frame, line in traceback.walk_tb(error.__traceback__):
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if package == "zarrckpt":
            break
        if package not in ("IPython", "ipykernel"):
            frames.append((frame, line))
    return list(traceback.StackSummary.extract(iter(frames)))


def warn(text: str) -> None:
    """Issue a UserWarning at the user's line that called this package, directly or through torch."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("zarrckpt", "torch"):
        level, frame = level + 1, frame.f_back
    warnings.warn(printable(text), stacklevel=level)
