"""Send errors between ranks as text and class name. Only classes of this package are rebuilt.

Texts of other ranks are shown to users, so they are shortened and escaped first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, NoReturn

from zarrckpt import _errors
from zarrckpt._errors import CheckpointError, printable
from zarrckpt._format.wire import checked_object, record

MAX_TEXT = 1 << 15
"""Maximum length of a text of another rank."""

_MAX_NOTES = 16
_MAX_KIND = 100


def escape_text(text: str, most: int = MAX_TEXT) -> str:
    """Return a text of another rank for display: shortened, with escaped invisible characters."""
    if len(text) > most:
        text = f"{text[:most]}... ({len(text) - most} more characters)"
    return printable(text)


class LostPeerError(Exception):
    """A piece was not sent or received because its peer failed or was lost. Never raised to users.

    It is only a consequence. If another rank has failed, that rank's error is raised instead.
    """


class StoppedError(Exception):
    """Work ended early because another rank failed. Never raised to users."""


class Failure(NamedTuple):
    """An error on a rank (global number), or an error of the ranks as a whole if ``rank`` is None."""

    rank: int | None
    kind: str
    text: str
    own: bool = True
    """Whether ``kind`` is an error class of this package."""
    lost: bool = False
    """Whether it is only a consequence of another rank's error (LostPeerError)."""
    notes: tuple[str, ...] = ()

    @classmethod
    def of_error(cls, error: BaseException, rank: int | None) -> Failure:
        """Return the Failure of an error, to send it to other ranks."""
        known = [kind.__name__ for kind in type(error).__mro__ if getattr(_errors, kind.__name__, None) is kind]
        if known:
            return cls(rank, known[0], str(error), notes=tuple(map(str, getattr(error, "__notes__", ()))))
        return cls(rank, type(error).__name__, str(error), own=False, lost=isinstance(error, LostPeerError))

    @classmethod
    def of_all_ranks(cls, text: str) -> Failure:
        """Return a failure of the ranks as a whole: a CheckpointError, the same on all ranks."""
        return cls(None, "CheckpointError", text)


def _received(*fields: Any) -> Failure:
    """Return another rank's failure with texts for display."""
    failure: Failure = checked_object(Failure, *fields)
    notes = tuple(map(escape_text, failure.notes[:_MAX_NOTES]))
    return failure._replace(kind=escape_text(failure.kind, _MAX_KIND), text=escape_text(failure.text), notes=notes)


record(Failure, make=_received)


def select_causes(failures: Sequence[Failure]) -> list[Failure]:
    """Return the failures that are not consequences of others, by rank."""
    ordered = sorted(failures, key=lambda failure: -1 if failure.rank is None else failure.rank)
    return [failure for failure in ordered if not failure.lost] or ordered


def raise_together(failures: Sequence[Failure], rank: int, mine: BaseException | None) -> NoReturn:
    """Raise the same error on every rank. The rank that failed raises its original error object.

    The message is that of the lowest rank that failed with an error of this package, and a note names all failed ranks.
    Otherwise a CheckpointError is raised with the text of the lowest rank's error, and on that rank with the error as
    its cause.
    """
    failed = ", ".join(str(failure.rank) for failure in failures)
    own = [failure for failure in failures if failure.own]
    if not own:
        first = failures[0]
        text = f"rank {first.rank} failed with {first.kind}: {first.text} (failed ranks: {failed})"
        raise CheckpointError(text) from (mine if first.rank == rank else None)
    first = own[0]
    error = mine if first.rank == rank and isinstance(mine, CheckpointError) else _rebuilt(first)
    if first.rank is not None:
        error.add_note(f"(failed on rank {failed})")
    raise error from error.__cause__


@contextmanager
def wrap_foreign_errors() -> Iterator[None]:
    """Raise a CheckpointError from any other error, as :func:`raise_together` does. For a single process."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as err:
        raise CheckpointError(f"{type(err).__name__}: {err}") from err


def _rebuilt(failure: Failure) -> CheckpointError:
    cls: Any = getattr(_errors, failure.kind, None)
    known = isinstance(cls, type) and issubclass(cls, CheckpointError)
    error: CheckpointError = (cls if known else CheckpointError)(failure.text)
    for note in failure.notes:
        error.add_note(note)
    return error
