"""Reports of saves, loads, copies, exports and plans, and texts of numbers for people."""

from __future__ import annotations

import datetime
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class SaveReport:
    """The report of a committed save, the same on every rank.

    ``nbytes`` is the number of bytes of all chunk objects, and ``objects`` the number of these objects. ``rank_bytes``
    has the bytes that each rank wrote, by rank in the process group. ``seconds`` is the coordinator's time from the
    first access to its state to the end of the clean-up. ``root_sha256`` is the SHA-256 of the root document
    (``zarr.json``) in hexadecimal, for trackers that refer to the checkpoint.

    Of ``nbytes``, the store copied ``copied_bytes`` from the checkpoint at ``base``, and the ranks sent ``sent_bytes``.
    ``linked_bytes`` are hard links to files of the base, or of this save if tensors share memory (tied weights).
    ``base`` is "" if no chunk was reused. Then ``base_problem`` is the reason if a base was given but cannot be used.
    """

    url: str
    save_id: str
    nbytes: int
    objects: int
    rank_bytes: tuple[int, ...]
    seconds: float = 0.0
    base: str = ""
    copied_bytes: int = 0
    linked_bytes: int = 0
    root_sha256: str = ""
    base_problem: str = ""

    @property
    def sent_bytes(self) -> int:
        """The bytes of chunk objects that the ranks wrote."""
        return self.nbytes - self.copied_bytes - self.linked_bytes


@dataclass(frozen=True)
class CopyReport(SaveReport):
    """The report of a committed copy, see :func:`zarrckpt.copy`.

    ``overflowed`` has the number of finite values beyond the range of the new dtype, by tensor. ``uncast`` has the
    names of floating tensors that ``dtype`` selects but that keep their dtype: counters, single numbers, and
    float8_e8m0fnu.
    """

    overflowed: Mapping[str, int] = field(default_factory=dict)
    uncast: tuple[str, ...] = ()


@dataclass(frozen=True)
class LoadReport:
    """The report of a finished load on this rank.

    ``loaded``, ``missing`` (in the target only) and ``unexpected`` (in the checkpoint only) are sorted fqns.
    ``changed`` has the fqns of ``loaded`` for which an object holds other data than were read: a module that converts
    entries of another version, or another Stateful. ``nbytes`` is the number of bytes that this rank read for its
    tensors.
    """

    url: str
    save_id: str
    loaded: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    nbytes: int = 0
    seconds: float = 0.0
    changed: tuple[str, ...] = ()


@dataclass(frozen=True)
class PlanReport:
    """The prediction of a save, the same on every rank.

    ``nbytes`` is the number of bytes of all tensors, ``objects`` the number of their chunks, and ``largest_rank_bytes``
    the most bytes that a rank would write. ``requests`` is the number of requests to S3 that write: those for chunks,
    values that are stored as blobs, Zarr documents and tables. An object of 16 MiB or more is uploaded in parts: one
    request per part of 8 MiB, and two more. Compressed chunks count with their size before compression. Overwrites need
    as many requests. The first save of a process to a server also tests its conditional puts with one request, and the
    first overwrite with four.
    """

    ranks: int
    nbytes: int
    objects: int
    requests: int
    largest_rank_bytes: int

    def __str__(self) -> str:
        mean = self.nbytes / self.ranks
        return (
            f"{size_text(self.nbytes)} from {count_text(self.ranks, 'rank')}: "
            f"{count_text(self.objects, 'chunk object')}, {count_text(self.requests, 'request')} to S3; the rank with "
            f"most writes {size_text(self.largest_rank_bytes)}, {self.largest_rank_bytes / mean if mean else 1:.2f} of "
            "the mean"
        )


_UNITS = ("B", "KB", "MB", "GB", "TB", "PB")


def size_text(nbytes: int) -> str:
    """Return a number of bytes with three digits and a decimal unit, such as "1.23 GB"."""
    amount, unit = float(nbytes), 0
    while amount >= 999.5 and unit + 1 < len(_UNITS):
        amount, unit = amount / 1000, unit + 1
    return f"{nbytes} B" if not unit else f"{amount:.3g} {_UNITS[unit]}"


def count_text(number: int, noun: str, nouns: str | None = None) -> str:
    """Return a number with its noun, such as "1 rank" or "2,048 ranks". ``nouns`` is an irregular plural."""
    return f"{number:,} {noun if number == 1 else nouns or f'{noun}s'}"


def share_text(part: int, whole: int) -> str:
    """Return a part of a whole in percent. Only an empty part is "0%", and only the whole is "100%"."""
    if not whole:
        return "-"
    percent = 100 * part / whole
    if part and percent < 0.01:
        return "< 0.01%"
    if part < whole and percent > 99.99:
        return "> 99.99%"
    return "> 100%" if part > whole else f"{percent:.{4 if percent > 99 else 3}g}%"


def value_text(value: object) -> str:
    """Return the repr of a value, or a placeholder if it has an integer that is too long for Python to print."""
    try:
        return repr(value)
    except ValueError:
        return f"<{type(value).__name__} with an integer of more than {sys.get_int_max_str_digits():,} digits>"


def time_text(created: str) -> str:
    """Return a time of commit for people, to the second."""
    return created.replace("T", " ").partition(".")[0].removesuffix("Z") + " UTC"


_TIME_UNITS = (("d", 86400), ("h", 3600), ("min", 60))


def age_text(created: str) -> str:
    """Return the time since a commit, in the largest unit of which it has at least one."""
    try:
        age = datetime.datetime.now(datetime.UTC) - datetime.datetime.fromisoformat(created)
    except (ValueError, TypeError):  # a root document can have any text here
        return "unknown"
    seconds = max(0, int(age.total_seconds()))
    for unit, length in _TIME_UNITS:
        if seconds >= length:
            return f"{seconds // length:,} {unit}"
    return f"{seconds} s"


def duration_text(seconds: float) -> str:
    """Return a duration in the largest unit of which it has at least one."""
    for unit, length in _TIME_UNITS:
        if seconds >= 0.999 * length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.1f} s"


def software_text(software: Mapping[str, str]) -> str:
    """Return the names and versions of the software that wrote a checkpoint."""
    return ", ".join(f"{name} {version}" for name, version in software.items())


@dataclass(frozen=True)
class ExportReport:
    """The report of an export. ``files`` are relative to ``folder``, and ``nbytes`` is the size of the tensors.

    ``overflowed`` and ``uncast`` are as in :class:`CopyReport`.
    """

    folder: str
    files: tuple[str, ...]
    tensors: int
    values: int
    nbytes: int
    overflowed: Mapping[str, int] = field(default_factory=dict)
    uncast: tuple[str, ...] = ()
