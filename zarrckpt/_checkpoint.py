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
from zarrckpt._documents import NODE, ArrayNode, join
from zarrckpt._errors import (
    CheckpointError,
    ForeignObjectsError,
    KeyMismatchError,
    ObjectNotFoundError,
    StorageError,
    UnsupportedValueError,
)
from zarrckpt._info import CheckpointInfo, as_html, info_of, size_text
from zarrckpt._matching import select
from zarrckpt._root import HOUSE, BlobEntry
from zarrckpt._store import Store, StoreSpec, join_url
from zarrckpt._transfer import DEFAULT_MAX_INFLIGHT_BYTES, Progress, run

if TYPE_CHECKING:
    import numpy as np
    import zarr

    from zarrckpt._numbers import Difference, TensorStats
    from zarrckpt._report import SaveReport
    from zarrckpt._safetensors import ExportReport
    from zarrckpt._verify import VerifyReport


class Checkpoint(Mapping[str, Any]):
    """A committed checkpoint: flat name -> ``zarr.Array`` or Python value.

    Arrays are lazy: nothing is read before they are indexed. Then whatever is read is checked against the table of
    checksums (one request, with the first chunk), and a missing or altered chunk raises CorruptCheckpointError.
    Values come decoded; pickled ones raise UnsafeValueError unless the checkpoint was opened with
    ``allow_pickle=True``.

    :attr:`tensors`, :attr:`non_tensors`, :attr:`groups` and :meth:`select` give parts of it: Checkpoints, too.
    """

    __eq__ = object.__eq__  # a mapping would compare all values, and read them
    __hash__ = object.__hash__

    def __init__(self, catalog: Catalog, *, allow_pickle: bool = False, names: Iterable[str] | None = None) -> None:
        self._catalog = catalog
        self._allow_pickle = allow_pickle
        self._names = dict.fromkeys(catalog.root.entries if names is None else names)

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
        return sum(node.nbytes for node in self._catalog.root.arrays(self._names))

    @property
    def tensors(self) -> Checkpoint:
        """The entries that are arrays, in the order of the state dict."""
        return self._part(fqn for fqn in self._names if fqn in self._catalog.root.tensors)

    @property
    def non_tensors(self) -> Checkpoint:
        """The entries that are Python values."""
        return self._part(fqn for fqn in self._names if fqn in self._catalog.root.objects)

    @property
    def groups(self) -> dict[str, Checkpoint]:
        """The nested dicts right below the state dict: their keys, and the entries below each."""
        found: dict[str, list[str]] = {}
        for fqn in self._names:
            keys = self._catalog.root.state_path(fqn).keys
            if len(keys) > 1:
                found.setdefault(str(keys[0]), []).append(fqn)
        return {name: self._part(names) for name, names in found.items()}

    def select(self, *patterns: str, exclude: Iterable[str] = ()) -> Checkpoint:
        """The entries that the patterns mean: names, their beginnings up to a dot, or globs (``"*.bias"``).

        No pattern means all; ``exclude`` takes away what its patterns mean. Raises KeyMismatchError for a pattern that
        means none.
        """
        wanted = select(self._names, patterns, self.url) if patterns else self._names
        dropped = {*select(self._names, [*exclude], self.url)}
        return self._part(fqn for fqn in wanted if fqn not in dropped)

    def _part(self, names: Iterable[str]) -> Checkpoint:
        part = Checkpoint(self._catalog, allow_pickle=self._allow_pickle, names=names)
        if "_zarr_store" in self.__dict__:
            part.__dict__["_zarr_store"] = self._zarr_store
        return part

    @property
    def info(self) -> CheckpointInfo:
        """Sizes, dtypes, step, who wrote it, layout. No request."""
        return info_of(self.url, self._catalog.root, self._names)

    def __getitem__(self, fqn: str) -> Any:
        root = self._catalog.root
        if fqn in self._names and fqn in root.tensors:
            return self._array(fqn)
        if fqn in self._names:
            return self._catalog.read_object(fqn, allow_pickle=self._allow_pickle)
        raise KeyMismatchError(f"no entry {fqn!r} in {self.url}; it has {len(self)}, for example {list(self)[:3]}")

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, fqn: object) -> bool:
        return fqn in self._names

    def __repr__(self) -> str:
        return (
            f"<zarrckpt.Checkpoint {self.url!r}: {len(self.tensors)} tensors, {len(self.non_tensors)} values, "
            f"{self.nbytes:,} bytes, saved by {self.world_size} ranks at {self.created}>"
        )

    def _repr_html_(self) -> str:
        return as_html(self.info, (self.summary(fqn) for fqn in self._names))

    def summary(self, fqn: str) -> tuple[str, str, str, str]:
        """(name, dtype or kind, shape or value, size) of an entry for people. No request."""
        entry = self._catalog.root.entries[fqn]
        if isinstance(entry, ArrayNode):
            return fqn, entry.dtype.name, str(entry.grid.shape), size_text(entry.nbytes)
        if isinstance(entry, BlobEntry):
            return fqn, entry.encoding, entry.kind or "", size_text(entry.array.nbytes)
        return fqn, "value", f"{self[fqn]!r:.80}", ""

    def nbytes_of(self, fqn: str) -> int:
        """Bytes of one entry, as :attr:`nbytes` counts them; 0 for a value that the root document holds."""
        if fqn not in self._names:
            raise KeyMismatchError(f"no entry {fqn!r} in {self.url}")
        node = self._catalog.root.array(fqn)
        return 0 if node is None else node.nbytes

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
            if fqn not in self._names or fqn not in root.tensors:
                raise KeyMismatchError(f"no tensor {fqn!r} in {self.url}; it has {list(self.tensors)[:3]}, for example")
        return read_arrays(self._catalog, wanted, max_inflight_bytes, progress)

    def load(
        self, keys: str | Iterable[str] | None = None, *, device: Any = "cpu", progress: Progress | None = None
    ) -> dict[str, Any]:
        """Read entries into new torch tensors: the nested state dict that was saved, or a part of it.

        ``model.load_state_dict(ckpt.load("model")["model"], assign=True)`` fills a model on the ``meta`` device. Needs
        torch; one process reads all of it (:func:`zarrckpt.load` fills sharded states).

        Args:
            keys: as in :meth:`select` (default: everything). device: where the tensors are to be. progress: see
            :meth:`read`.

        Raises what :meth:`read` raises, and UnsafeValueError.
        """
        from zarrckpt._loading import load_state

        patterns = () if keys is None else (keys,) if isinstance(keys, str) else tuple(keys)
        names = select(self._names, patterns, self.url) if patterns else list(self._names)
        return load_state(self._catalog, names, device, allow_pickle=self._allow_pickle, progress=progress)

    def copy_to(
        self,
        url: str | os.PathLike[str] | None = None,
        *,
        overwrite: bool = False,
        store: object | None = None,
        storage_options: Mapping[str, Any] | None = None,
        credential_provider: Callable[..., Any] | None = None,
        max_inflight_bytes: int = DEFAULT_MAX_INFLIGHT_BYTES,
        progress: Progress | None = None,
    ) -> SaveReport:
        """Copy this checkpoint, or this part of one, to another place, between any stores.

        The chunks stay as they are, each is compared with its checksum on the way, and the copy is committed as a save
        is: complete, or not there. It has a save id of its own.

        Args:
            url, store, storage_options, credential_provider: where to, as in :func:`save`. overwrite: replace what is
            there. max_inflight_bytes: bound on the memory (default 512 MiB, at least one chunk). progress: called as
            ``progress(bytes_done, bytes_total)``.

        Raises CheckpointExistsError, ForeignObjectsError, CorruptCheckpointError (nothing is committed then),
        CheckpointReplacedError, StorageError. Two requests a chunk, two an array.
        """
        from zarrckpt._copying import copy_checkpoint

        target = StoreSpec(url, store, storage_options, credential_provider).open()
        limits: dict[str, Any] = {"max_inflight_bytes": max_inflight_bytes, "progress": progress}
        return copy_checkpoint(self._catalog, list(self._names), target, overwrite=overwrite, **limits)

    def to_safetensors(
        self,
        folder: str | os.PathLike[str],
        *patterns: str,
        strip: str = "",
        max_file_bytes: int = 5_000_000_000,
        progress: Progress | None = None,
    ) -> ExportReport:
        """Write the tensors, or those that patterns mean, as safetensors: one file, or several with an index.

        One tensor is in memory at a time. Hugging Face's libraries and ``safetensors`` load the result; a folder that
        holds such files already is refused.

        Args:
            folder: local; made where it is absent. strip: a beginning that the names lose: ``"model"`` writes
                ``model.embed.weight`` as ``embed.weight``; names without it keep theirs. max_file_bytes: a file has
                more only where a single tensor has. progress: see :meth:`read`.

        Raises UnsupportedValueError for a dtype that safetensors lacks, or two tensors of one name; StorageError.
        """
        from zarrckpt._safetensors import export

        part = self.select(*patterns).tensors
        cut = f"{strip}." if strip else ""
        names = {fqn: fqn.removeprefix(cut) for fqn in part}
        if len({*names.values()}) < len(names):
            raise UnsupportedValueError(f"two tensors have one name without {cut!r}: export a part of them")
        return export(self._catalog, names, os.fspath(folder), max_file_bytes, progress)

    def stats(self, *patterns: str, progress: Progress | None = None) -> dict[str, TensorStats]:
        """Min, max, mean, std, norm, zeros, NaN and inf of each tensor, or of those that patterns mean.

        Everything is read, some chunks at a time: memory is bounded by 512 MiB. Errors as for :meth:`read`.
        """
        from zarrckpt._numbers import tensor_stats

        return tensor_stats(self._catalog, self.select(*patterns).tensors, progress)

    def diff(self, other: Checkpoint, *patterns: str, progress: Progress | None = None) -> Difference:
        """Compare with another checkpoint: keys, shapes, dtypes, values, and how far tensors are apart.

        Their chunks, and their stores, may differ. Memory is bounded as in :meth:`stats`. ``patterns`` are those of
        :meth:`select`; they must mean something in one of the two.
        """
        from zarrckpt._numbers import Difference, tensor_differences

        names = list(dict.fromkeys((*self, *other)))
        arrays, others = self._catalog.root.tensors, other._catalog.root.tensors
        wanted = select(names, patterns, f"{self.url} and {other.url}") if patterns else names
        here, there = [n for n in wanted if n not in other], [n for n in wanted if n not in self]
        changed, same = {}, []
        for fqn in (name for name in wanted if name in self and name in other):
            one, two = (" ".join(ckpt.summary(fqn)[1:3]) for ckpt in (self, other))
            if one == two and fqn in arrays and fqn in others:
                same.append(fqn)
            elif one != two or self._fingerprint(fqn) != other._fingerprint(fqn):
                changed[fqn] = (one, two)
        found = tensor_differences(self._catalog, other._catalog, same, progress)
        return Difference(tuple(here), tuple(there), changed, found)

    def _fingerprint(self, fqn: str) -> object:
        """What equal values have alike; bytes that need code to be understood are only compared."""
        entry = self._catalog.root.entries[fqn]
        if isinstance(entry, BlobEntry):
            return self._catalog.checksums(entry.array).tolist()
        return repr(self[fqn])

    def path(self, fqn: str) -> tuple[object, ...]:
        """The keys that lead to an entry in the state dict that was saved."""
        if fqn not in self._names:
            raise KeyMismatchError(f"no entry {fqn!r} in {self.url}")
        return tuple(self._catalog.root.state_path(fqn).keys)

    def to_xarray(self, group: str = "") -> Any:
        """The arrays below a group (``"model"``, ``"optim.state"``; default: all) as a lazy ``xarray.DataTree``.

        Whatever is read is checked. Needs xarray. Raises KeyMismatchError for a name that is no group.
        """
        import xarray

        root = self._catalog.root
        path = join(root.tree, root.group_path(group)) if group else root.tree
        return xarray.open_datatree(self._zarr_store, engine="zarr", group=path or None, zarr_format=3)

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
        self._catalog.refuse_unstored(root.tensors[fqn])
        node = root.tensors[fqn].under(root.tree)
        # Built from the root's consolidated metadata: no request.
        document: Any = node.document()
        array: Any = AsyncArray(document, StorePath(self._zarr_store, node.path))
        if node.compression is not None:
            from zarrckpt._zarr_codecs import check_decoding

            check_decoding(array, f"array {node.path!r} in {self.url}")
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
