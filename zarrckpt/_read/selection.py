"""Entries of an open checkpoint as a mapping, the base class of ``Checkpoint``. No torch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Self

from zarrckpt._errors import KeyMismatchError
from zarrckpt._format.matching import hint, select
from zarrckpt._jobs import DEFAULT_MAX_INFLIGHT_BYTES, Progress
from zarrckpt._read.arrays import read_arrays
from zarrckpt._read.catalog import Catalog
from zarrckpt._store import StoreSpec, Url

if TYPE_CHECKING:
    import numpy as np
    import zarr


class Selection(Mapping[str, Any]):
    """All or some entries of an open checkpoint, by name.

    The base class of :class:`Checkpoint`. Modules that Checkpoint's methods call use this class, because they cannot
    import :class:`Checkpoint`.
    """

    __eq__ = object.__eq__  # Mapping would read and compare all values.
    __hash__ = object.__hash__

    def __init__(self, catalog: Catalog, *, allow_pickle: bool = False, names: Iterable[str] | None = None) -> None:
        self._catalog = catalog
        self._allow_pickle = allow_pickle
        self._names = dict.fromkeys(catalog.root.entries if names is None else names)

    @property
    def url(self) -> str:
        """The url at which it was opened."""
        return self._catalog.store.url

    @property
    def save_id(self) -> str:
        """The id of the save that wrote it: 32 hexadecimal digits."""
        return self._catalog.root.save_id

    @property
    def nbytes(self) -> int:
        """The number of bytes of all tensors and blobs, without padding and checksums."""
        return sum(node.nbytes for node in self._catalog.root.arrays(self._names))

    @property
    def tensors(self) -> Self:
        """The entries that are arrays, in the order of the state dict."""
        return self._part(fqn for fqn in self._names if fqn in self._catalog.root.tensors)

    @property
    def non_tensors(self) -> Self:
        """The entries that are Python values."""
        return self._part(fqn for fqn in self._names if fqn in self._catalog.root.non_tensors)

    @property
    def groups(self) -> dict[str, Self]:
        """The nested dicts at the first level of the state dict, by key, with the entries below each."""
        found: dict[str, list[str]] = {}
        for fqn in self._names:
            keys = self._catalog.root.state_path(fqn).keys
            if len(keys) > 1:
                found.setdefault(str(keys[0]), []).append(fqn)
        return {name: self._part(names) for name, names in found.items()}

    def select(self, *patterns: str, exclude: Iterable[str] = ()) -> Self:
        """Return the entries that match patterns: fqns, their prefixes up to a dot, or globs (``"*.bias"``).

        Without patterns, all entries match. Entries that match ``exclude`` are left out. Raises KeyMismatchError for a
        pattern without a match.
        """
        wanted = select(self._names, patterns, self.url) if patterns else self._names
        dropped = {*select(self._names, [*exclude], self.url)}
        return self._part(fqn for fqn in wanted if fqn not in dropped)

    def _part(self, names: Iterable[str]) -> Self:
        return type(self)(self._catalog, allow_pickle=self._allow_pickle, names=names)

    def __getitem__(self, fqn: str) -> Any:
        self._check_entry(fqn)
        if fqn in self._catalog.root.tensors:
            return self._array(fqn)
        return self._catalog.read_non_tensor(fqn, allow_pickle=self._allow_pickle)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, fqn: object) -> bool:
        return fqn in self._names

    def read(
        self,
        keys: Iterable[str] | None = None,
        *,
        out: Mapping[str, Any] | None = None,
        max_inflight_bytes: int = DEFAULT_MAX_INFLIGHT_BYTES,
        progress: Progress | None = None,
    ) -> dict[str, np.ndarray[Any, Any]]:
        """Read whole tensors in parallel, and return their arrays by name, in the order of ``keys``.

        After one request for the table of checksums, the chunks of all tensors are read in parallel, and each byte is
        checked. bfloat16 and float8 arrays have the dtypes of ``ml_dtypes``.

        Args:
            keys: names of tensors (default: the names in ``out``, or all tensors).
            out: memory to fill for each of ``keys``, by name: numpy arrays or other objects with a writable buffer (a
                torch CPU tensor's ``.numpy()``), with the tensor's shape and dtype and any strides. bfloat16 and
                float8 also go into unsigned integers of the same size, bit for bit. No memory of the tensors' size is
                allocated.
            max_inflight_bytes: maximum memory in bytes beyond the arrays (default 512 MiB).
            progress: as for :func:`save`.

        Raises KeyMismatchError for a name that is not a tensor, and before the first read for memory in ``out`` with
        another shape or dtype (all are listed). Raises TypeError and ValueError for memory that is not writable.
        Raises CorruptCheckpointError and CheckpointReplacedError, after which the contents of ``out`` are undefined.
        """
        if keys is None:
            keys = self.tensors if out is None else out
        names = list(dict.fromkeys([keys] if isinstance(keys, str) else keys))
        for fqn in names:
            self._check_tensor(fqn)
        return read_arrays(self._catalog, names, max_inflight_bytes, progress, out)

    def _check_entry(self, fqn: str) -> None:
        """Raise KeyMismatchError if there is no entry with this name."""
        if fqn not in self._names:
            raise KeyMismatchError(f"no entry {fqn!r} in {self.url}; {hint(str(fqn), self)}")

    def _check_tensor(self, fqn: str) -> None:
        """Raise KeyMismatchError if there is no tensor with this name."""
        if fqn not in self._names or fqn not in self._catalog.root.tensors:
            text = "it is a value" if fqn in self._names else hint(str(fqn), self.tensors)
            raise KeyMismatchError(f"no tensor {fqn!r} in {self.url}; {text}")

    def _array(self, fqn: str) -> zarr.Array[Any]:
        import zarr
        from zarr.core.array import AsyncArray
        from zarr.storage import StorePath

        root = self._catalog.root
        self._catalog.refuse_implausible_size(root.tensors[fqn])
        node = root.tensors[fqn].under(root.tree)
        # Built from the root document, without a request.
        document = json.loads(node.document_bytes())
        return zarr.Array(AsyncArray(document, StorePath(self._catalog.zarr_store, node.path)))


def catalog_of(entries: Selection) -> Catalog:
    """Return the opened checkpoint that the entries belong to."""
    return entries._catalog


def part_of(entries: Selection, names: Iterable[str]) -> Selection:
    """Return the entries with these names, in this order."""
    return entries._part(names)


def open_selection(source: Selection | Url, storage_options: Mapping[str, Any] | None = None) -> Selection:
    """Return a source that is open already, or open the checkpoint at its url with these options (one request)."""
    return source if isinstance(source, Selection) else Selection(Catalog(StoreSpec(source, storage_options)))
