"""What a save or a load did, or would do, for the caller to look at."""

from __future__ import annotations

import datetime
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class SaveReport:
    """One committed save, the same on every rank.

    ``nbytes`` counts the bytes of all chunk objects, ``objects`` these objects; ``rank_bytes`` holds the part that
    each rank wrote, by its rank in the process group; ``seconds`` is the coordinator's time from the reading of its
    state to the clean-up.
    """

    url: str
    save_id: str
    nbytes: int
    objects: int
    rank_bytes: tuple[int, ...]
    seconds: float = 0.0


@dataclass(frozen=True)
class CopyReport(SaveReport):
    """One committed copy, see ``Checkpoint.copy_to``.

    ``overflowed`` has the tensors of which finite values are beyond the range of the dtype that they were cast to, and
    how many. ``uncast`` names the floating tensors that ``dtype`` meant and that keep their dtype: counters, single
    numbers, and float8_e8m0fnu.
    """

    overflowed: Mapping[str, int] = field(default_factory=dict)
    uncast: tuple[str, ...] = ()


@dataclass(frozen=True)
class LoadReport:
    """One finished load, on this rank.

    ``loaded``, ``missing`` (in the target only) and ``unexpected`` (in the checkpoint only) are sorted fqns;
    ``changed`` has those of ``loaded`` that objects do not hold as they were read; ``nbytes`` is what this rank fetched
    for its tensors.
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
    """What a save would do, the same on every rank.

    ``nbytes`` counts the bytes of all tensors and ``objects`` their chunks; ``documents`` the objects beside them: Zarr
    documents, tables, and the chunks of values that are stored as blobs. ``rank_bytes`` holds the
    part that each rank would write, ``moved_bytes`` the bytes that would go from one rank to another before, in
    ``bundles`` bundles, ``host_bytes`` those that would leave a host (None where it is not known which ranks are on
    one); ``merged`` counts the chunks that span pieces of several ranks. ``rank_connections`` has the number of other
    ranks that each rank would be connected with; ``control_rounds`` counts how often all of them would wait for each
    other, to agree on the plan and on the commit.
    """

    ranks: int
    tensors: int
    nbytes: int
    objects: int
    documents: int
    rank_bytes: tuple[int, ...]
    moved_bytes: int
    merged: int
    bundles: int
    control_rounds: int = 0
    rank_connections: tuple[int, ...] = ()
    host_bytes: int | None = None

    @property
    def balance(self) -> float:
        """The largest part of a rank over the mean: 1.0 is even."""
        mean = sum(self.rank_bytes) / len(self.rank_bytes)
        return max(self.rank_bytes) / mean if mean else 1.0

    @property
    def puts(self) -> int:
        """Objects that are put, in an overwrite as well.

        A put is one request. Object stores take an object of 16 MiB or more in parts of 8 MiB, with a request for each
        part and two more. The first save of a process to a server also tests its conditional puts: one request, and in
        the first overwrite four, with an object that is deleted at once.
        """
        return self.objects + self.documents

    def put_cost(self, usd_per_1000: float = 0.005) -> float:
        """What the puts cost, in US dollars. The default is the price of S3 Standard in us-east-1 in 2026."""
        return self.puts * usd_per_1000 / 1000

    def put_seconds(self, per_second: float = 3500) -> float:
        """How long a store takes for the puts at least. The default is S3's rate for one prefix, from all ranks."""
        return self.puts / per_second

    def __str__(self) -> str:
        share = share_text(self.moved_bytes, self.nbytes or 1)
        hosts = "" if self.host_bytes is None else f", {self.host_bytes / 1e9:.3f} GB of them between hosts"
        return (
            f"{count_text(self.tensors, 'tensor')}, {self.nbytes / 1e9:.3f} GB from {count_text(self.ranks, 'rank')}: "
            f"{count_text(self.objects, 'chunk object')} ({self.merged:,} merged) and "
            f"{count_text(self.documents, 'document')}, ${self.put_cost():.4f} of puts at S3's price and "
            f"{self.put_seconds():.1f} s at its rate; {self.moved_bytes / 1e9:.3f} GB ({share}) move between "
            f"ranks{hosts}, in {count_text(self.bundles, 'bundle')}; the rank with most writes {self.balance:.2f} of "
            f"the mean, and the one with most connections has {max(self.rank_connections, default=0)}"
        )


_UNITS = ("B", "KB", "MB", "GB", "TB", "PB")


def size_text(nbytes: int) -> str:
    """Bytes for people, three digits: 1.23 GB is 1,230,000,000 bytes or so."""
    amount, unit = float(nbytes), 0
    while amount >= 999.5 and unit + 1 < len(_UNITS):
        amount, unit = amount / 1000, unit + 1
    return f"{nbytes} B" if not unit else f"{amount:.3g} {_UNITS[unit]}"


def count_text(number: int, noun: str, nouns: str | None = None) -> str:
    """A number of things for people: "1 rank", "2,048 ranks"; ``nouns`` where more than one take more than an s."""
    return f"{number:,} {noun if number == 1 else nouns or f'{noun}s'}"


def share_text(part: int, whole: int) -> str:
    """A part of a whole in percent, for people. Only nothing is 0%, and only the whole is 100%."""
    if not whole:
        return "-"
    percent = 100 * part / whole
    if part and percent < 0.01:
        return "< 0.01%"
    if part < whole and percent > 99.99:
        return "> 99.99%"
    return "> 100%" if part > whole else f"{percent:.{4 if percent > 99 else 3}g}%"


def value_text(value: object) -> str:
    """A value as Python writes it; not one with an integer of so many digits that Python refuses to write them."""
    try:
        return repr(value)
    except ValueError:
        return f"<{type(value).__name__} with an integer of more than {sys.get_int_max_str_digits():,} digits>"


def time_text(created: str) -> str:
    """When something was committed, for people: to the second."""
    return created.replace("T", " ").partition(".")[0].removesuffix("Z") + " UTC"


def age_text(created: str) -> str:
    """How long ago something was committed, for people: in the largest unit of which there is one at least."""
    try:
        age = datetime.datetime.now(datetime.UTC) - datetime.datetime.fromisoformat(created)
    except (ValueError, TypeError):  # a root may hold any text there
        return "unknown"
    seconds = max(0, int(age.total_seconds()))
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds // length:,} {unit}"
    return f"{seconds} s"


def software_text(software: Mapping[str, str]) -> str:
    """What wrote a checkpoint."""
    return ", ".join(f"{name} {version}" for name, version in software.items())


@dataclass(frozen=True)
class ExportReport:
    """What an export wrote: ``files`` are relative to ``folder``; ``nbytes`` are those of the tensors.

    ``overflowed`` and ``uncast`` are those of :class:`CopyReport`.
    """

    folder: str
    files: tuple[str, ...]
    tensors: int
    values: int
    nbytes: int
    overflowed: Mapping[str, int] = field(default_factory=dict)
    uncast: tuple[str, ...] = ()
