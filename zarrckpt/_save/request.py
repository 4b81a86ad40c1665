"""What a save is asked to do: the arguments of ``save``, checked."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from zarrckpt._commit import protocol
from zarrckpt._errors import StorageError
from zarrckpt._format.compression import CompressionOption, parse_option
from zarrckpt._format.metadata import checked_metadata
from zarrckpt._jobs import DEFAULT_MAX_INFLIGHT_BYTES, Progress, check_limits
from zarrckpt._plan.chunking import MAX_CHUNK_BYTES
from zarrckpt._plan.plan import Options, Sizes
from zarrckpt._store import StoreSpec


@dataclass(frozen=True)
class SaveRequest:
    """Where to save, and how. Pickles without clients and without secrets."""

    spec: StoreSpec
    overwrite: bool
    metadata: Mapping[str, Any]
    options: Options
    max_inflight_bytes: int
    progress: Progress | None

    @classmethod
    def checked(
        cls,
        url: str | os.PathLike[str] | None = None,
        overwrite: bool = False,
        *,
        metadata: Mapping[str, Any] | None = None,
        store: object | None = None,
        storage_options: Mapping[str, Any] | None = None,
        credential_provider: Callable[..., Any] | None = None,
        compression: CompressionOption = None,
        max_chunk_bytes: int = MAX_CHUNK_BYTES,
        min_piece_bytes: int | None = None,
        fill_bytes: int | None = None,
        concurrency: int | None = None,
        max_inflight_bytes: int = DEFAULT_MAX_INFLIGHT_BYTES,
        durable: bool = True,
        progress: Progress | None = None,
    ) -> SaveRequest:
        """From the arguments of :func:`zarrckpt.save`. Raises TypeError and ValueError naming the argument."""
        if concurrency is not None:
            check_limits(concurrency=concurrency)
        sizes = Sizes.checked(max_chunk_bytes, min_piece_bytes, fill_bytes, max_inflight_bytes)
        spec = StoreSpec(url, store, storage_options, credential_provider, durable, concurrency)
        kept = checked_metadata(metadata)
        return cls(spec, overwrite, kept, Options(parse_option(compression), sizes), max_inflight_bytes, progress)

    def refuse_committed(self) -> None:
        """Raise what a save would where a checkpoint is committed that it must not overwrite. One request.

        A store that does not answer is left for the save to meet: it may be there again by then.
        """
        if not self.overwrite:
            with suppress(StorageError):
                protocol.refuse_committed(self.spec.open())
