"""Reports of saves, loads, copies, exports and plans, and texts of numbers for people."""

from __future__ import annotations

import datetime
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

GPU_HOURS_PER_FAILURE = 50_000
"""The training of Llama 3 had 419 unexpected interruptions in 54 days on 16,384 GPUs, see docs/how-to/how-often.md."""

COPIED_BYTES_PER_SECOND = 10e9
"""The rate at which a background save copies a rank's state to CPU memory, see docs/explanation/speed.md."""

RANK_BYTES_PER_SECOND = 0.6e9
"""The rate of one process that saves to a distant S3, see docs/explanation/speed.md."""


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

    ``nbytes`` is the number of bytes of all tensors, ``objects`` the number of their chunks, and ``documents`` that of
    other objects: Zarr documents, tables, and chunks of values that are stored as blobs. ``rank_bytes`` has the bytes
    that each rank would write. ``moved_bytes`` would move between ranks first, in ``bundles`` bundles. ``host_bytes``
    of them would move between hosts (None if the hosts of ranks are unknown). ``merged`` is the number of chunks that
    span pieces of several ranks. ``rank_connections`` has the number of other ranks that each rank would connect to.
    ``control_rounds`` is the number of times that all ranks would wait for each other, to agree on the plan and the
    commit. Of ``nbytes``, ``reused_bytes`` are in chunks that the base has. ``part_requests`` is the number of requests
    that uploads in parts need in addition to one per put.
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
    reused_bytes: int = 0
    part_requests: int = 0

    @property
    def sent_bytes(self) -> int:
        """The bytes of tensors that the ranks would write."""
        return self.nbytes - self.reused_bytes

    @property
    def balance(self) -> float:
        """The most bytes of a rank divided by the mean of all ranks. 1.0 means equal parts."""
        mean = sum(self.rank_bytes) / len(self.rank_bytes)
        return max(self.rank_bytes) / mean if mean else 1.0

    @property
    def puts(self) -> int:
        """The number of puts, also for an overwrite.

        The first save of a process to a server also tests its conditional puts with one request. The first overwrite
        tests them with four requests, for an object that is deleted immediately.
        """
        return self.objects + self.documents

    @property
    def put_requests(self) -> int:
        """The number of requests of the puts to S3.

        An object of 16 MiB or more is uploaded in parts: one request per part of 8 MiB, and two more. Compressed
        chunks count with their size before compression.
        """
        return self.puts + self.part_requests

    def put_cost(self, usd_per_1000: float = 0.005) -> float:
        """Return the cost of the puts in US dollars. The default is the price of S3 Standard in us-east-1 in 2026."""
        return self.put_requests * usd_per_1000 / 1000

    def put_seconds(self, per_second: float = 3500) -> float:
        """Return the minimum time of the puts in seconds. The default is S3's rate for one prefix, over all ranks."""
        return self.put_requests / per_second

    def save_interval(
        self,
        *,
        gpu_hours_per_failure: float = GPU_HOURS_PER_FAILURE,
        stall_seconds: float | None = None,
        bytes_per_second: float = RANK_BYTES_PER_SECOND,
    ) -> float:
        """Return the time between two saves in seconds that loses the least training time to saves and failures.

        It is Young's approximation, ``sqrt(2 * stall * time between failures)``, and at least the duration of a save,
        because saves do not overlap. It assumes that the stall is much shorter than the time between failures. See
        ``docs/how-to/how-often.md``. Raises ValueError that names the argument if one is negative, infinite or NaN, or
        if one but the stall is 0.

        Args:
            gpu_hours_per_failure: mean hours between failures of the job, times its ranks. The default is about the
                rate of the training of Llama 3, with one rank per GPU.
            stall_seconds: the time for which training waits at each save. The default is a copy of a rank's bytes with
                10 GB/s, as for a save in the background. For other saves pass their duration.
            bytes_per_second: the rate at which each rank writes, measured for a distant S3 by default.
        """
        most = max(self.rank_bytes, default=0)
        stall = most / COPIED_BYTES_PER_SECOND if stall_seconds is None else stall_seconds
        if not 0 <= stall < math.inf:
            raise ValueError(f"stall_seconds must be a number of at least 0, got {stall!r}")
        for name, value in (("gpu_hours_per_failure", gpu_hours_per_failure), ("bytes_per_second", bytes_per_second)):
            if not 0 < value < math.inf:
                raise ValueError(f"{name} must be a positive number, got {value!r}")
        between_failures = gpu_hours_per_failure * 3600 / self.ranks
        save_seconds = max(self.put_seconds(), most / bytes_per_second)
        return max(math.sqrt(2 * stall * between_failures), save_seconds)

    def __str__(self) -> str:
        share = share_text(self.moved_bytes, self.nbytes or 1)
        reused = f"{size_text(self.sent_bytes)} are sent and {size_text(self.reused_bytes)} reused; "
        reused = reused if self.reused_bytes else ""
        interval = (
            f"; save every {duration_text(self.save_interval())} if the job fails once in "
            f"{GPU_HOURS_PER_FAILURE / self.ranks:,.0f} hours, and a rank copies {COPIED_BYTES_PER_SECOND / 1e9:.0f} "
            f"GB/s and writes {RANK_BYTES_PER_SECOND / 1e9:.1f} GB/s"
        )
        hosts = "" if self.host_bytes is None else f", {self.host_bytes / 1e9:.3f} GB of them between hosts"
        return (
            f"{count_text(self.tensors, 'tensor')}, {self.nbytes / 1e9:.3f} GB from {count_text(self.ranks, 'rank')}: "
            f"{count_text(self.objects, 'chunk object')} ({self.merged:,} merged) and "
            f"{count_text(self.documents, 'document')}, ${self.put_cost():.4f} of puts at S3's price and "
            f"{self.put_seconds():.1f} s at its rate; {reused}{self.moved_bytes / 1e9:.3f} GB ({share}) move between "
            f"ranks{hosts}, in {count_text(self.bundles, 'bundle')}; the rank with most writes {self.balance:.2f} of "
            f"the mean, and the one with most connections has {max(self.rank_connections, default=0)}"
            f"{interval if self.nbytes else ''}"
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
