"""Every error that this package raises for a caller to handle, in one tree.

The classes are grouped by what the caller can do next. Errors cross ranks as text, or pickled inside
DCP's ``CheckpointException``, so each one is rebuilt from its message alone and makes sense alone.
"""

from __future__ import annotations

import logging
import re
import sys
import traceback
import warnings

log = logging.getLogger("zarrckpt")

_CONTROLS = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e007f]"
)
"""Characters that terminals and editors obey: controls, line separators, directions of text; and lone surrogates."""


def one_line(text: str) -> str:
    """Return a text with escapes in the place of control characters: names, paths and servers' answers may have any."""
    return _CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def printable(text: str) -> str:
    """Return a text as :func:`one_line` does, with its line breaks."""
    return "\n".join(map(one_line, text.split("\n")))


def _clean_record(record: logging.LogRecord) -> bool:
    record.msg, record.args = printable(record.getMessage()), ()
    return True


log.addFilter(_clean_record)


class CheckpointError(Exception):
    """Base of every error that zarrckpt raises on purpose.

    Its text and its notes hold no control characters but line breaks, whatever is in names, paths and servers' answers.
    """

    def __str__(self) -> str:
        # The bare message: KeyError would show its repr, and so escape the line breaks of a list.
        return printable("".join(map(str, self.args[:1])))

    def add_note(self, note: str) -> None:
        super().add_note(printable(note))

    def _render_traceback_(self) -> list[str]:
        """Return the lines that IPython and Jupyter show: the message, then the caller's frames alone."""
        lines = [f"{type(self).__name__}: {self}", *getattr(self, "__notes__", ())]
        if frames := _frames_of_caller(self):
            lines += ["", *(line.rstrip("\n") for line in traceback.format_list(frames))]
        return [*lines, "", "import traceback; traceback.print_last() prints all frames."]


class CheckpointExistsError(CheckpointError):
    """The path holds a committed checkpoint, or another save committed there first.

    Save to another path, or pass ``overwrite=True``.
    """


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """Nothing committed at the path: the message says whether nothing at all, or an unfinished save."""


class CheckpointPinnedError(CheckpointError):
    """The checkpoint is pinned: it is neither removed nor replaced before all its pins are gone."""


class CheckpointReplacedError(CheckpointError):
    """The checkpoint being read was replaced meanwhile. Open the path again."""


class CheckpointRemovedError(CheckpointError):
    """The checkpoint was removed while it was being read; or a removal was begun at the path, and has not ended."""


class CorruptCheckpointError(CheckpointError):
    """What is stored is not what was saved: an object is missing, short, altered or not readable."""


class RunTakenOverError(CheckpointError):
    """Another job goes on with the run: this one saves and deletes nothing there any more. Stop one of them."""


class UnsupportedFormatError(CheckpointError):
    """Written in a form that this version does not know, most likely by a newer one."""


class UnsafeValueError(CheckpointError):
    """A value could only be loaded by running code stored in the checkpoint (pickle)."""


class KeyMismatchError(CheckpointError, KeyError):
    """Keys, shapes or dtypes of the target and of the checkpoint do not fit; all of them are listed."""


class LoadMismatchError(CheckpointError):
    """After a load, objects of the state do not hold what was read; all of the differing entries are listed.

    ``load_state_dict`` of an object did not take, or changed, what it was given. The state is not that of the save.
    """


class UnsupportedValueError(CheckpointError, TypeError):
    """The state holds something that has no place in a checkpoint (a sparse tensor, an unknown dtype)."""


class UnsupportedLayoutError(CheckpointError, ValueError):
    """The pieces that the ranks hold do not fit a regular chunk grid."""


class ForeignObjectsError(CheckpointError):
    """The path is no place of a checkpoint's own; nothing was changed.

    It holds objects that no zarrckpt save wrote, or other checkpoints, or lies inside one.
    """


class IncompleteSaveError(CheckpointError):
    """Some rank did not write what was planned. Nothing was committed; save again."""


class StorageError(CheckpointError):
    """The store failed after retries: network, permission, space, credentials."""


class ObjectNotFoundError(StorageError, FileNotFoundError):
    """An object that was asked for is not in the store."""


class ObjectExistsError(StorageError, FileExistsError):
    """A conditional put met an object: it exists already, or it is not the version expected."""


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
    """A UserWarning at the line of the user's own that called this package, be it through torch."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("zarrckpt", "torch"):
        level, frame = level + 1, frame.f_back
    warnings.warn(printable(text), stacklevel=level)
