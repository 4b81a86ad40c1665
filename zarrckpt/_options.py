"""``SaveOptions`` and ``LoadOptions``: how bytes are laid out and moved, the same on all ranks. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar, get_args

from zarrckpt._format.compression import CompressionOption, parse_option
from zarrckpt._jobs import DEFAULT_MAX_INFLIGHT_BYTES, check_limits
from zarrckpt._plan.chunking import MAX_CHUNK_BYTES
from zarrckpt._plan.plan import PlanOptions, Sizes

OptionsT = TypeVar("OptionsT", "SaveOptions", "LoadOptions")

CheckAfter = Literal["sample", "full", "off"]

TIMEOUT = 1800.0
"""Seconds without an arrival or progress after which ranks give up, where the caller says nothing."""

MOST_SECONDS = 10_000_000

LEAST_FITTING = 16 << 20
"""For a smaller bound of memory, no smaller chunks are made: they would be too many."""


@dataclass(frozen=True, kw_only=True)
class SaveOptions:
    """How a save lays out and moves its bytes.

    For :func:`save`, :func:`async_save`, :func:`plan_report`, :func:`import_checkpoint` and :class:`ZarrStorageWriter`.
    All ranks pass the same. Immutable, and it pickles: make one for a whole run. ``dataclasses.replace`` makes another.

    Args:
        compression: None (default), ``"zstd"``, ``"blosc"``, or a mapping with options of Zarr's codec, such as
            ``{"name": "zstd", "level": 3}`` (``docs/how-to/compression.md``); tensors are compressed, values are not.
        portable_dtypes: store bfloat16 and float8 as unsigned integers of their size, bit for bit, for Zarr readers
            that know neither (``docs/how-to/read.md``). Loads give tensors of the real dtype (default False).
        durable: local files are synced to disk before the commit (default). False is faster, and a power cut may cost
            the checkpoint. Without meaning in object stores, where a put is durable.
        max_chunk_bytes: larger pieces become several chunks (default 128 MiB; not more than seven eighths of
            ``max_inflight_bytes``, but for 16 MiB).
        min_piece_bytes: pieces of a tensor that are smaller than this on average move between ranks and are merged
            into chunks of about ``fill_bytes``: fewer objects, more traffic between ranks. Default: 256 KiB times the
            number of ranks, at most 16 MiB; 0: no merging, except where pieces fit no regular grid.
        fill_bytes: the size of merged chunks (default: a quarter of a rank's mean part, 4 to 32 MiB).
        concurrency: the number of chunks and documents in transfer at once, a rank. Default: the store's own choice, 64
            in object stores (``docs/how-to/speed.md``); :func:`async_save` then leaves one processor to training.
        max_inflight_bytes: bound on a rank's memory for chunks in transfer, beyond the state or its copy (default
            512 MiB, at least one chunk).
        timeout: the longest time in seconds without an arrival or progress of a rank (default 1800): then all that came
            raise an error that names it. After 30 s a warning (logger ``zarrckpt``) names what is waited for. Requests
            to the store have their own bounds. DCP's calls have the timeout of their process group instead.

    Raises TypeError and ValueError that name the option which makes no sense.
    """

    compression: CompressionOption = None
    portable_dtypes: bool = False
    durable: bool = True
    max_chunk_bytes: int = MAX_CHUNK_BYTES
    min_piece_bytes: int | None = None
    fill_bytes: int | None = None
    concurrency: int | None = None
    max_inflight_bytes: int = DEFAULT_MAX_INFLIGHT_BYTES
    timeout: float = TIMEOUT

    def __post_init__(self) -> None:
        parse_option(self.compression)
        if isinstance(self.compression, Mapping):
            # What the caller does to the mapping later changes nothing here.
            object.__setattr__(self, "compression", dict(self.compression))
        _check_bool("portable_dtypes", self.portable_dtypes)
        _check_bool("durable", self.durable)
        check_limits(max_chunk_bytes=self.max_chunk_bytes)
        if self.fill_bytes is not None:
            check_limits(fill_bytes=self.fill_bytes)
        if self.min_piece_bytes is not None:
            check_limits(0, min_piece_bytes=self.min_piece_bytes)
        _check_transfer(self)

    @property
    def plan(self) -> PlanOptions:
        """What of it the plan is made with."""
        # A chunk that is copied is in memory as a whole, but for local files; an eighth is for what is rounded up.
        fits = max(self.max_inflight_bytes - self.max_inflight_bytes // 8, LEAST_FITTING)
        sizes = Sizes(min(self.max_chunk_bytes, fits), self.min_piece_bytes, self.fill_bytes)
        return PlanOptions(parse_option(self.compression), sizes, self.portable_dtypes)


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """How a load moves its bytes: for :func:`load` and :class:`ZarrStorageReader`. All ranks pass the same.

    Args:
        share_reads: what several ranks need (replicas, small chunks) is fetched by one of them and handed on over a
            private gloo mesh; if false, each rank fetches all that it needs. The coordinator's choice counts. Default:
            in object stores yes; in local paths no, since the machine's file cache is faster than the mesh.
        concurrency: the number of requests at once, a rank. Default: the store's own choice, 64 in object stores
            (``docs/how-to/speed.md``).
        max_inflight_bytes: bound on a rank's memory for chunks in transfer, beyond the targets (default 512 MiB).
        timeout: as in :class:`SaveOptions`.
        check_after: how the state is compared with what was read, after all ``load_state_dict`` calls (``load`` and
            ``restore`` only). ``"sample"`` (default): names, shapes, dtypes, values, and tensors up to 64 KiB, 512
            elements of larger ones; about 0.05 ms for each tensor. ``"full"``: all elements, as fast as memory is
            read. ``"off"``: no comparison.

    Raises TypeError and ValueError that name the option which makes no sense.
    """

    share_reads: bool | None = None
    concurrency: int | None = None
    max_inflight_bytes: int = DEFAULT_MAX_INFLIGHT_BYTES
    timeout: float = TIMEOUT
    check_after: CheckAfter = "sample"

    def __post_init__(self) -> None:
        if self.share_reads is not None:
            _check_bool("share_reads", self.share_reads)
        if self.check_after not in get_args(CheckAfter):
            raise ValueError(f"check_after must be one of {', '.join(get_args(CheckAfter))}, got {self.check_after!r}")
        _check_transfer(self)

    def shares(self, is_local: bool) -> bool:
        """Whether ranks share their reads from a store, which is of local files or not."""
        return not is_local if self.share_reads is None else self.share_reads


def _check_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r} of type {type(value).__name__}")


def _check_transfer(options: SaveOptions | LoadOptions) -> None:
    """Check what both groups have."""
    check_limits(max_inflight_bytes=options.max_inflight_bytes)
    if options.concurrency is not None:
        check_limits(concurrency=options.concurrency)
    timeout = options.timeout
    if isinstance(timeout, bool) or not isinstance(timeout, int | float):
        raise TypeError(f"timeout must be a number of seconds, got {timeout!r} of type {type(timeout).__name__}")
    if not 0 < timeout <= MOST_SECONDS:
        raise ValueError(f"timeout must be more than 0 and at most {MOST_SECONDS} seconds, got {timeout}")


def checked_options(options: OptionsT | None, kind: type[OptionsT]) -> OptionsT:
    """The ``options`` of a call; the defaults for None. Raises TypeError for anything else, such as a dict."""
    if options is None:
        return kind()
    if not isinstance(options, kind):
        raise TypeError(f"options must be a zarrckpt.{kind.__name__}, got a {type(options).__name__}")
    return options
