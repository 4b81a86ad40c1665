"""Errors that cross ranks: as text and type name. Only this package's own classes are rebuilt.

Texts of other ranks are shown, so they are cut and cleaned before.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

from zarrckpt import _errors
from zarrckpt._errors import CheckpointError
from zarrckpt._format.wire import record

MAX_TEXT = 1 << 15
"""The longest text of another rank that is shown."""

_MAX_NOTES = 16
_MAX_KIND = 100

# Characters that a terminal obeys, or that reorder the text around them; a line break and a tab are neither.
_UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def cleaned(text: str, most: int = MAX_TEXT) -> str:
    """Return a text of another rank as it may be shown: not too long, with escapes for control characters."""
    if len(text) > most:
        text = f"{text[:most]}... ({len(text) - most} more characters)"
    return _UNSEEN.sub(lambda found: ascii(found[0])[1:-1], text)


class PeerLost(Exception):
    """A piece does not come, or does not go, since its peer failed or is gone. Never raised to users.

    Its cause is elsewhere: where another rank has failed too, that rank's error is the one that is raised.
    """


class StoppedByOthers(Exception):
    """Work that ended early since another rank failed. Never raised to users."""


@record
class Failure(NamedTuple):
    """What went wrong on a rank (global number), or, without one, what is wrong with the ranks as a whole."""

    rank: int | None
    kind: str
    text: str
    own: bool = True
    """Whether ``kind`` is a class of this package's errors."""
    lost: bool = False
    """Whether it only follows from what went wrong elsewhere (PeerLost)."""
    notes: tuple[str, ...] = ()


def received(failure: Failure) -> Failure:
    """Return another rank's failure with texts that may be shown."""
    notes = tuple(map(cleaned, failure.notes[:_MAX_NOTES]))
    return failure._replace(kind=cleaned(failure.kind, _MAX_KIND), text=cleaned(failure.text), notes=notes)


def failure_of(error: BaseException, rank: int | None) -> Failure:
    """An error in the form in which it crosses ranks."""
    known = [cls.__name__ for cls in type(error).__mro__ if getattr(_errors, cls.__name__, None) is cls]
    if known:
        return Failure(rank, known[0], str(error), notes=tuple(map(str, getattr(error, "__notes__", ()))))
    return Failure(rank, type(error).__name__, str(error), own=False, lost=isinstance(error, PeerLost))


def common(text: str) -> Failure:
    """A failure of the ranks as a whole: a CheckpointError, the same on all of them."""
    return Failure(None, "CheckpointError", text)


def causes(failures: Sequence[Failure]) -> list[Failure]:
    """The failures that explain the others, by rank."""
    ordered = sorted(failures, key=lambda failure: -1 if failure.rank is None else failure.rank)
    return [failure for failure in ordered if not failure.lost] or ordered


def raise_together(failures: Sequence[Failure], rank: int, mine: BaseException | None) -> NoReturn:
    """Raise what failed, the same on every rank; the rank that it comes from raises its own object.

    The message is that of the lowest rank that failed with one of this package's errors, and a note names all that
    failed. Where there is none, the lowest rank's error becomes the text, and there the cause, of a CheckpointError.
    """
    failed = ", ".join(str(failure.rank) for failure in failures)
    own = [failure for failure in failures if failure.own]
    if not own:
        first = failures[0]
        said = f"rank {first.rank} failed with {first.kind}: {first.text} (failed ranks: {failed})"
        raise CheckpointError(said) from (mine if first.rank == rank else None)
    first = own[0]
    error = mine if first.rank == rank and isinstance(mine, CheckpointError) else _rebuilt(first)
    if first.rank is not None:
        error.add_note(f"(failed on rank {failed})")
    raise error from error.__cause__


def _rebuilt(failure: Failure) -> CheckpointError:
    cls: Any = getattr(_errors, failure.kind, None)
    known = isinstance(cls, type) and issubclass(cls, CheckpointError)
    error: CheckpointError = (cls if known else CheckpointError)(failure.text)
    for note in failure.notes:
        error.add_note(note)
    return error
