"""``SaveOptions`` and ``LoadOptions``: the layout and the transfer of bytes, the same on all ranks. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeVar, get_args

from zarrckpt._events import OnEvent
from zarrckpt._format.compression import CompressionOption, parse_option
from zarrckpt._jobs import DEFAULT_MAX_INFLIGHT_BYTES, check_limits
from zarrckpt._plan.chunking import MAX_CHUNK_BYTES
from zarrckpt._plan.plan import PlanOptions

OptionsT = TypeVar("OptionsT", "SaveOptions", "LoadOptions")

ReuseMode = Literal["auto", "on", "off"]

CheckAfter = Literal["sample", "full", "off"]

TIMEOUT = 1800.0
"""Default time in seconds without an arrival or progress of a rank after which all ranks fail."""

MAX_TIMEOUT = 10_000_000

MIN_FITTING_BYTES = 16 << 20
"""Chunks of this size are always allowed, even with a smaller memory bound. Otherwise there would be too many."""


@dataclass(frozen=True, kw_only=True)
class SaveOptions:
    """The layout and the transfer of a save's bytes.

    For :func:`save`, :func:`async_save`, :func:`plan_report`, :func:`import_checkpoint` and :class:`ZarrStorageWriter`.
    All ranks pass equal options. An instance is immutable, so that one serves a whole run. It can be pickled if
    ``on_event`` can. ``dataclasses.replace`` returns a changed copy.

    Args:
        compression: None (default), ``"zstd"``, ``"blosc"``, or a mapping with options of Zarr's codec, such as
            ``{"name": "zstd", "level": 3}`` (``docs/how-to/compression.md``). Tensors are compressed, values are not.
        portable_dtypes: store bfloat16 and float8 as unsigned integers of the same size, bit for bit, for Zarr readers
            without these dtypes (``docs/how-to/read.md``). Loads return tensors of the real dtype (default False).
        durable: sync local files to disk before the commit (default). False is faster, but a power failure can destroy
            the checkpoint. It has no effect in object stores, where each put is durable.
        max_chunk_bytes: maximum chunk size in bytes. Larger pieces become several chunks. The default is 128 MiB. It is
            limited to 7/8 of ``max_inflight_bytes``, but not below 16 MiB.
        concurrency: maximum number of chunks and documents that a rank transfers at a time. The store chooses the
            default, 64 in object stores (``docs/how-to/speed.md``). :func:`async_save` then leaves one processor to
            training.
        max_inflight_bytes: maximum memory in bytes of a rank for chunks in transfer, beyond the state or its copy
            (default 512 MiB, at least one chunk).
        reuse: whether unchanged chunks of an earlier checkpoint, the base, are copied by the store or linked instead of
            sent (``docs/how-to/reuse.md``). ``"auto"`` (default) does this in :class:`CheckpointManager`, where the
            base is the run's newest checkpoint, and in saves with a ``base``. ``"on"`` also prepares other saves to
            object stores to be a base: they store 8 bytes of digest per chunk. There, whoever can write to the base
            decides the bytes of the new checkpoint. ``"off"`` writes every chunk. Saves to archives (``.zarr.zip``)
            write every chunk.
        reuse_full_every: write every chunk in one of this number of saves, so that a chunk that was damaged in the
            store is not shared for ever. None (default) never does.
        timeout: maximum time in seconds without an arrival or progress of a rank (default 1800). Then all other ranks
            raise an error that names the rank. After 30 s, a warning (logger ``zarrckpt``) names what is waited for.
            Requests to the store have separate limits. DCP's calls use the timeout of their process group instead.
        on_event: called with each :class:`Event` of the saves (``docs/how-to/monitor.md``), in the thread in which it
            happens. So it must return quickly, and neither save nor load. Its errors are logged and not raised.
            :class:`CheckpointManager` also calls it for deletions, and for restores whose options have no ``on_event``.
            Ranks may pass different ones.

    Raises TypeError and ValueError that name the wrong option.
    """

    compression: CompressionOption = None
    portable_dtypes: bool = False
    durable: bool = True
    max_chunk_bytes: int = MAX_CHUNK_BYTES
    concurrency: int | None = None
    max_inflight_bytes: int = DEFAULT_MAX_INFLIGHT_BYTES
    reuse: ReuseMode = "auto"
    reuse_full_every: int | None = None
    timeout: float = TIMEOUT
    on_event: OnEvent | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        parse_option(self.compression)
        if isinstance(self.compression, Mapping):
            # A copy, so that later changes of the mapping have no effect.
            object.__setattr__(self, "compression", dict(self.compression))
        _check_bool("portable_dtypes", self.portable_dtypes)
        _check_bool("durable", self.durable)
        check_limits(max_chunk_bytes=self.max_chunk_bytes)
        if self.reuse not in get_args(ReuseMode):
            raise ValueError(f"reuse must be one of {', '.join(get_args(ReuseMode))}, got {self.reuse!r}")
        if self.reuse_full_every is not None:
            check_limits(reuse_full_every=self.reuse_full_every)
        _check_transfer(self)

    @property
    def plan(self) -> PlanOptions:
        """The options that affect the plan."""
        # A copied chunk is in memory as a whole, except for local files. 1/8 remains for rounding.
        fits = max(self.max_inflight_bytes - self.max_inflight_bytes // 8, MIN_FITTING_BYTES)
        return PlanOptions(parse_option(self.compression), min(self.max_chunk_bytes, fits), self.portable_dtypes)


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """The transfer of a load's bytes, for :func:`load` and :class:`ZarrStorageReader`. All ranks pass equal options.

    Args:
        share_reads: one rank reads data that several ranks need (replicas, small chunks), and sends it to the others
            over a private gloo mesh. If False, each rank reads all its data itself. The coordinator's option is used.
            The default is True in object stores, and False for local paths, because the file cache is faster than the
            mesh.
        concurrency: maximum number of requests of a rank at a time. The store chooses the default, 64 in object stores
            (``docs/how-to/speed.md``).
        max_inflight_bytes: maximum memory in bytes of a rank for chunks in transfer, beyond the targets (default
            512 MiB).
        timeout, on_event: as in :class:`SaveOptions`.
        check_after: the comparison of the state with the data that was read, after all ``load_state_dict`` calls
            (``load`` and ``restore`` only). ``"sample"`` (default) compares names, shapes, dtypes, values, whole
            tensors up to 64 KiB, and 512 elements of larger ones, in about 0.05 ms per tensor. ``"full"`` compares all
            elements at the speed of memory. ``"off"`` compares nothing.

    Raises TypeError and ValueError that name the wrong option.
    """

    share_reads: bool | None = None
    concurrency: int | None = None
    max_inflight_bytes: int = DEFAULT_MAX_INFLIGHT_BYTES
    timeout: float = TIMEOUT
    check_after: CheckAfter = "sample"
    on_event: OnEvent | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if self.share_reads is not None:
            _check_bool("share_reads", self.share_reads)
        if self.check_after not in get_args(CheckAfter):
            raise ValueError(f"check_after must be one of {', '.join(get_args(CheckAfter))}, got {self.check_after!r}")
        _check_transfer(self)

    def shares_reads(self, *, is_local: bool) -> bool:
        """Whether ranks share their reads. ``is_local``: whether the store has local files."""
        return not is_local if self.share_reads is None else self.share_reads


def _check_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r} of type {type(value).__name__}")


def _check_transfer(options: SaveOptions | LoadOptions) -> None:
    """Check the options that saves and loads have in common."""
    check_limits(max_inflight_bytes=options.max_inflight_bytes)
    if options.concurrency is not None:
        check_limits(concurrency=options.concurrency)
    if options.on_event is not None and not callable(options.on_event):
        raise TypeError(f"on_event must be a callable, got a {type(options.on_event).__name__}")
    timeout = options.timeout
    if isinstance(timeout, bool) or not isinstance(timeout, int | float):
        raise TypeError(f"timeout must be a number of seconds, got {timeout!r} of type {type(timeout).__name__}")
    if not 0 < timeout <= MAX_TIMEOUT:
        raise ValueError(f"timeout must be more than 0 and at most {MAX_TIMEOUT} seconds, got {timeout}")


def checked_options(options: OptionsT | None, kind: type[OptionsT]) -> OptionsT:
    """Return the ``options`` of a call, or the defaults for None. Raises TypeError for other types, such as a dict."""
    if options is None:
        return kind()
    if not isinstance(options, kind):
        raise TypeError(f"options must be a zarrckpt.{kind.__name__}, got a {type(options).__name__}")
    return options
