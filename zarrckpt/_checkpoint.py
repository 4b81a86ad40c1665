"""``open``: a committed checkpoint as a read-only mapping. No torch."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from zarrckpt import _commit
from zarrckpt._arrays import read_arrays
from zarrckpt._catalog import Catalog
from zarrckpt._documents import NODE, join
from zarrckpt._errors import (
    CheckpointError,
    ForeignObjectsError,
    KeyMismatchError,
    ObjectNotFoundError,
    StorageError,
)
from zarrckpt._root import HOUSE
from zarrckpt._store import Store, StoreSpec, join_url
from zarrckpt._transfer import DEFAULT_MAX_INFLIGHT_BYTES, Progress, run

if TYPE_CHECKING:
    import numpy as np
    import zarr

    from zarrckpt._verify import VerifyReport


class Checkpoint(Mapping[str, Any]):
    """A committed checkpoint: flat name -> ``zarr.Array`` or Python value.

    Arrays are lazy: nothing is read before they are indexed. Then whatever is read is checked against the table of
    checksums (one request, with the first chunk), and a missing or altered chunk raises CorruptCheckpointError.
    Values come decoded; pickled ones raise UnsafeValueError unless the checkpoint was opened with
    ``allow_pickle=True``.
    """

    def __init__(self, catalog: Catalog, *, allow_pickle: bool = False) -> None:
        self._catalog = catalog
        self._allow_pickle = allow_pickle

    @property
    def url(self) -> str:
        """Where it was opened."""
        return self._catalog.store.url

    @property
    def save_id(self) -> str:
        """The id of the save that wrote it: 32 hexadecimal digits."""
        return self._catalog.root.save_id

    @property
    def tree(self) -> str:
        """The group below the url that holds the arrays: ``""``, or ``"@..."`` after an overwrite or a crashed save."""
        return self._catalog.root.tree

    @property
    def created(self) -> str:
        """When it was committed: UTC, ISO 8601."""
        return self._catalog.root.created

    @property
    def world_size(self) -> int:
        """How many ranks saved it."""
        return self._catalog.root.world_size

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors and blobs, without padding and checksums."""
        return sum(node.nbytes for node in self._catalog.root.arrays())

    @property
    def tensors(self) -> list[str]:
        """The names of the entries that are arrays, in the order of the state dict."""
        return list(self._catalog.root.tensors)

    @property
    def non_tensors(self) -> list[str]:
        """The names of the entries that are Python values."""
        return list(self._catalog.root.objects)

    def __getitem__(self, fqn: str) -> Any:
        root = self._catalog.root
        if fqn in root.tensors:
            return self._array(fqn)
        if fqn in root.objects:
            return self._catalog.read_object(fqn, allow_pickle=self._allow_pickle)
        raise KeyMismatchError(f"no entry {fqn!r} in {self.url}; it has {len(self)}, for example {list(self)[:3]}")

    def __iter__(self) -> Iterator[str]:
        return iter(self._catalog.root.entries)

    def __len__(self) -> int:
        return len(self._catalog.root.entries)

    def __contains__(self, fqn: object) -> bool:
        return fqn in self._catalog.root.entries

    def __repr__(self) -> str:
        return (
            f"<zarrckpt.Checkpoint {self.url!r}: {len(self.tensors)} tensors, {len(self.non_tensors)} values, "
            f"{self.nbytes:,} bytes, saved by {self.world_size} ranks at {self.created}>"
        )

    def node_path(self, fqn: str) -> str:
        """The path of a tensor's array below the url, for other Zarr readers: ``zarr.open_group(url)[path]``."""
        root = self._catalog.root
        if fqn not in root.tensors:
            raise KeyMismatchError(f"no tensor {fqn!r} in {self.url}")
        return root.tensors[fqn].under(root.tree).path

    def read(
        self,
        keys: Iterable[str] | None = None,
        *,
        max_inflight_bytes: int = DEFAULT_MAX_INFLIGHT_BYTES,
        progress: Progress | None = None,
    ) -> dict[str, np.ndarray[Any, Any]]:
        """Read whole tensors into memory, many requests at a time: name -> array, in the order of ``keys``.

        All chunks of all tensors are fetched side by side, after one request for the table of checksums, and each byte
        is checked. bfloat16 and float8 arrays have the dtypes of ``ml_dtypes``.

        Args:
            keys: names of tensors (default: all).
            max_inflight_bytes: bound on the memory beyond the arrays (default 512 MiB).
            progress: called as ``progress(bytes_done, bytes_total)`` while chunks are read.

        Raises KeyMismatchError for a name that is no tensor, CorruptCheckpointError, CheckpointReplacedError.
        """
        root = self._catalog.root
        wanted = list(dict.fromkeys(self.tensors if keys is None else [keys] if isinstance(keys, str) else keys))
        for fqn in wanted:
            if fqn not in root.tensors:
                raise KeyMismatchError(f"no tensor {fqn!r} in {self.url}; it has {self.tensors[:3]}, for example")
        return read_arrays(self._catalog, wanted, max_inflight_bytes, progress)

    def verify(
        self,
        *,
        quick: bool = False,
        max_inflight_bytes: int = DEFAULT_MAX_INFLIGHT_BYTES,
        progress: Progress | None = None,
    ) -> VerifyReport:
        """Check that everything of this checkpoint is stored as it was saved; the report names each damaged object.

        Chunks, tables, and the documents of all nodes, which this package reads from the root alone and other Zarr
        readers do not; the claim and the marker, too.

        Args:
            quick: only list: what is missing, or has another size. One request for each 1,000 objects or so, and two
                where arrays are compressed. Otherwise everything is read and compared with its checksums, many
                requests at a time.
            max_inflight_bytes: bound on the memory (default 512 MiB).
            progress: called as ``progress(bytes_done, bytes_total)`` while objects are read.

        Raises CheckpointReplacedError where another save has been committed meanwhile, StorageError. Damage is no
        error: see :meth:`VerifyReport.raise_if_damaged`.
        """
        from zarrckpt._verify import verify

        return verify(self._catalog, quick=quick, max_inflight_bytes=max_inflight_bytes, progress=progress)

    def writers(self, fqn: str) -> np.ndarray[Any, Any]:
        """Which rank wrote each chunk of a tensor: uint32, in the chunk grid's shape. One request for all tensors."""
        if fqn not in self._catalog.root.tensors:
            raise KeyMismatchError(f"no tensor {fqn!r} in {self.url}")
        return self._writers[self._catalog.root.tensors[fqn].path]

    @cached_property
    def _writers(self) -> dict[str, np.ndarray[Any, Any]]:
        return self._catalog.writers()

    @cached_property
    def _zarr_store(self) -> Any:
        from zarrckpt import _zarr_dtypes  # noqa: F401 - importing it registers bfloat16 and float8
        from zarrckpt._strict_store import reopen

        return reopen(self._catalog)

    def _array(self, fqn: str) -> zarr.Array[Any]:
        import zarr
        from zarr.core.array import AsyncArray
        from zarr.storage import StorePath

        root = self._catalog.root
        node = root.tensors[fqn].under(root.tree)
        # Built from the root's consolidated metadata: no request.
        document: Any = node.document()
        array: Any = AsyncArray(document, StorePath(self._zarr_store, node.path))
        return zarr.Array(array)


def open(
    url: str | os.PathLike[str] | None = None,
    *,
    store: object | None = None,
    storage_options: Mapping[str, Any] | None = None,
    credential_provider: Callable[..., Any] | None = None,
    allow_pickle: bool = False,
) -> Checkpoint:
    """Open a committed checkpoint for reading. One request; torch is not needed.

    Raises CheckpointNotFoundError (saying whether nothing is there or an unfinished save is), ForeignObjectsError,
    UnsupportedFormatError, CorruptCheckpointError.
    """
    spec = StoreSpec(url, store, storage_options, credential_provider)
    return Checkpoint(Catalog(spec), allow_pickle=allow_pickle)


def latest(
    prefix: str | os.PathLike[str] | None = None,
    *,
    store: object | None = None,
    storage_options: Mapping[str, Any] | None = None,
    credential_provider: Callable[..., Any] | None = None,
) -> str | None:
    """The url of the checkpoint below a prefix that was committed last, or None where there is none: for resuming.

    Looks at the folders right below the prefix (``<prefix>/step-100``), one request each, and skips unfinished
    saves and what is no checkpoint. All ranks that call it get the same answer as long as no save is being
    committed.
    """
    place = StoreSpec(prefix, store, storage_options, credential_provider).open()
    folders = place.list_dir()[1]
    if HOUSE in folders:
        warnings.warn(f"latest({place.url!r}) looks below a checkpoint: pass the folder that holds it", stacklevel=2)
    names = [name for name in folders if not name.startswith("@")]
    looks = (partial(_committed, place, name) for name in names)
    found = [entry for entry in run(looks, place.max_concurrency) if entry]
    if not found:
        return None
    newest = max(found)[1]
    if store is not None:
        return newest if prefix is None else f"{str(prefix).rstrip('/')}/{newest}"
    assert prefix is not None
    return join_url(prefix, newest)


def _committed(place: Store, name: str) -> tuple[str, str] | None:
    """When the checkpoint in a folder was committed, and the folder's name; None where there is none."""
    url = join(place.url, name)
    try:
        root = _commit.parse_committed(place.get(f"{name}/{NODE}"), url)
    except (ObjectNotFoundError, ForeignObjectsError):
        return None
    except StorageError:
        raise
    except CheckpointError as err:
        warnings.warn(f"latest() passes over {url}: {err}", stacklevel=2)
        return None
    return root.created, name
