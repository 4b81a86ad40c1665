"""A Zarr store in which an absent chunk is damage, not zeros."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from zarr.storage import WrapperStore

from zarrckpt._errors import CheckpointReplacedError, CorruptCheckpointError

if TYPE_CHECKING:
    from zarr.abc.store import ByteRequest, Store
    from zarr.core.buffer import Buffer, BufferPrototype

    from zarrckpt._catalog import Catalog

_CHUNK = re.compile(r"(?:.*/)?c(?:\.\d+)*")


class StrictStore(WrapperStore[Any]):
    """What :func:`zarrckpt.open` gives to zarr-python, which reads an absent chunk as fill values.

    Every chunk of a checkpoint is written, so an absent one raises CorruptCheckpointError, or
    CheckpointReplacedError where another save has been committed at the url since.
    """

    def __init__(self, store: Store, catalog: Catalog) -> None:
        super().__init__(store)
        self._catalog = catalog

    def _with_store(self, store: Any) -> StrictStore:
        return StrictStore(store, self._catalog)

    async def get(self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None) -> Buffer | None:
        """An object or a part of it. Raises for an absent chunk."""
        value: Buffer | None = await super().get(key, prototype, byte_range)
        if value is None and _CHUNK.fullmatch(key):
            where = f"{key!r} in {self._catalog.store.url}"
            if self._catalog.replaced():
                raise CheckpointReplacedError(f"chunk {where} went when the checkpoint was replaced: open it again")
            raise CorruptCheckpointError(f"chunk {where} is missing")
        return value
