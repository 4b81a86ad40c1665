"""``open``: a committed checkpoint as a read-only mapping. No torch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

from zarrckpt._inspect.html import as_html
from zarrckpt._inspect.info import CheckpointInfo, EntryInfo, checkpoint_info, entry_info
from zarrckpt._jobs import DEFAULT_MAX_INFLIGHT_BYTES, Progress
from zarrckpt._read.catalog import Catalog
from zarrckpt._read.selection import Selection
from zarrckpt._reports import count_text, size_text, time_text
from zarrckpt._store import StoreSpec, Url

if TYPE_CHECKING:
    import numpy as np
    import torch

    from zarrckpt._inspect.stats import TensorStats
    from zarrckpt._ops.verify import VerifyReport
    from zarrckpt._read.casts import DTypeOption


class Checkpoint(Selection):
    """A committed checkpoint: a mapping from fqns to ``zarr.Array`` objects or Python values.

    Arrays are lazy: data are read when an array is indexed. All data are compared with the table of checksums (one
    request, with the first chunk). A missing or altered chunk raises CorruptCheckpointError. Values are decoded.
    Pickled values raise UnsafeValueError unless the checkpoint was opened with ``allow_pickle=True``.

    :attr:`tensors`, :attr:`non_tensors`, :attr:`groups` and :meth:`select` return parts of it, which are Checkpoints
    too. :func:`copy`, :func:`diff`, :func:`report`, :func:`to_safetensors`, :func:`to_torch_save` and :func:`to_dcp`
    accept a checkpoint or a part of one.
    """

    @property
    def info(self) -> CheckpointInfo:
        """Sizes, dtypes, step, software and layout.

        No request, or one or two for the stored size if a tensor or blob is compressed. If these fail,
        ``info.nbytes_stored`` is None, so that a damaged checkpoint can be inspected too.
        """
        return checkpoint_info(self)

    @property
    def metadata(self) -> dict[str, Any]:
        """The ``metadata`` of the save: a dict of JSON types, a new copy at each access."""
        return copy.deepcopy(dict(self._catalog.root.metadata))

    def entry(self, fqn: str) -> EntryInfo:
        """Return the kind, keys, dtype, shape, size, path and ranks of an entry. No request.

        Raises KeyMismatchError for an unknown name.
        """
        self._check_entry(fqn)
        return entry_info(self._catalog.root, fqn)

    def writers(self, fqn: str) -> np.ndarray[Any, Any]:
        """Return the rank that wrote each chunk of a tensor, as uint32 in the chunk grid's shape.

        One request for all tensors.
        """
        self._check_tensor(fqn)
        return self._writers[self._catalog.root.tensors[fqn].path]

    @cached_property
    def _writers(self) -> dict[str, np.ndarray[Any, Any]]:
        return self._catalog.writers_by_path()

    def load(
        self, keys: str | Iterable[str] | None = None, *, device: Any = "cpu", progress: Progress | None = None
    ) -> dict[str, Any]:
        """Read entries into new torch tensors, and return the saved nested state dict or a part of it.

        State dicts of modules are OrderedDicts with the saved versions in ``_metadata``, as from ``torch.load``.
        ``model.load_state_dict(ckpt.load("model")["model"], assign=True)`` fills a model on the ``meta`` device, except
        buffers with ``persistent=False``, which no checkpoint has. The tensors have the order of strides that was
        saved. Needs torch. One process reads everything; :func:`zarrckpt.load` fills sharded states.

        Args:
            keys: patterns as in :meth:`select` (default: everything).
            device: the device of the tensors.
            progress: as for :func:`save`.

        Raises what :meth:`read` raises, and UnsafeValueError.
        """
        from zarrckpt._convert.loading import load_nested

        part = self.select(*([keys] if isinstance(keys, str) else keys or ()))
        paths = {fqn: self._catalog.root.state_path(fqn) for fqn in part}
        return load_nested(part, paths, device, DEFAULT_MAX_INFLIGHT_BYTES, progress)

    def iter_tensors(
        self,
        keys: str | Iterable[str] | None = None,
        *,
        dtype: DTypeOption | torch.dtype = None,
        device: torch.device | str = "cpu",
        rename: Mapping[str, str] | Callable[[str], str] | None = None,
        max_inflight_bytes: int = DEFAULT_MAX_INFLIGHT_BYTES,
        progress: Progress | None = None,
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Read tensors one after the other, and yield each as ``(name, tensor)``, in the order of the checkpoint.

        ``ckpt.select("model").iter_tensors(rename={"model.": ""})`` yields a model's own names. Needs torch.
        The next tensors are read in parallel while the caller uses one. Each tensor is compared with its checksums
        before it is yielded. The memory of a tensor is freed when the caller drops it. The end of the loop, also by
        ``break`` or an error, cancels the requests that have not begun, and waits for the others.

        Args:
            keys: patterns as in :meth:`select`, of names after ``rename`` (default: all tensors).
            dtype: cast floating tensors, as in :func:`copy`. Its patterns match names in the checkpoint. Finite values
                beyond the range of the dtype cause a UserWarning.
            device: the device of the tensors. Data are copied to it part by part, from pinned memory if it is a GPU.
            rename: other names for entries, as in :func:`load`.
            max_inflight_bytes: maximum memory in bytes for reading ahead (default 512 MiB), beyond the tensor that the
                caller uses. If the next tensor is larger, it is read alone, and its size is added to the bound.
            progress: as for :func:`save`.

        Raises KeyMismatchError for a pattern or prefix that matches nothing and for equal new names, and TypeError and
        ValueError for a wrong argument, all in the call. The iterator raises the errors of :meth:`read`, and
        CheckpointError in a process that was forked after the first tensor. Tensors that were yielded stay valid.
        """
        from zarrckpt._convert.iterating import iter_tensors

        return iter_tensors(self, keys, dtype, device, rename, max_inflight_bytes, progress)

    def stats(self, *patterns: str, progress: Progress | None = None) -> dict[str, TensorStats]:
        """Return min, max, mean, std, norm, and counts of zeros, NaN and inf of each tensor that matches the patterns.

        Integers are summed exactly. Sums of floats use float64, scaled so that squares neither overflow nor underflow.

        All data of these tensors are read, in at most 512 MiB of memory. Raises the errors of :meth:`read`.
        """
        from zarrckpt._inspect.stats import tensor_stats

        return tensor_stats(self._catalog, self.select(*patterns).tensors, progress)

    def to_xarray(self, group: str = "") -> Any:
        """Return the arrays below a group (``"model"``, ``"optim.state"``; default: all) as a lazy ``xarray.DataTree``.

        A part of a checkpoint returns only its own arrays. All data that are read are checked. Needs xarray. Raises
        KeyMismatchError for a name that is not a group.
        """
        from zarrckpt._inspect.xarray_view import open_tree

        return open_tree(self, group)

    def verify(
        self,
        *,
        quick: bool = False,
        max_inflight_bytes: int = DEFAULT_MAX_INFLIGHT_BYTES,
        progress: Progress | None = None,
    ) -> VerifyReport:
        """Check that the whole checkpoint is stored as it was saved. The report names each damaged object.

        This covers chunks, tables, the claim and the marker, and the documents of all nodes. Other Zarr readers need
        these documents, but this package reads only the root document. In an archive it covers every byte of the file.

        Args:
            quick: only list the objects, to find missing ones and other sizes. This costs one request per 1,000
                objects, and two more for compressed arrays; over HTTP, one request per object. Otherwise all data are
                read in parallel and compared with their checksums.
            max_inflight_bytes: maximum memory in bytes (default 512 MiB).
            progress: as for :func:`save`.

        Raises CheckpointReplacedError if another save was committed in the meantime, and StorageError. Damage raises no
        error, see :meth:`VerifyReport.raise_if_damaged`.
        """
        from zarrckpt._ops.verify import verify

        return verify(self._catalog, quick=quick, max_inflight_bytes=max_inflight_bytes, progress=progress)

    def __repr__(self) -> str:
        root = self._catalog.root
        entries = f"{count_text(len(self.tensors), 'tensor')}, {count_text(len(self.non_tensors), 'value')}"
        saved = f"saved by {count_text(root.world_size, 'rank')} at {time_text(root.created)}"
        return f"<zarrckpt.Checkpoint {self.url!r}: {entries}, {size_text(self.nbytes)}, {saved}>"

    def _repr_html_(self) -> str:
        return as_html(self)


def open(
    url: Url,
    *,
    storage_options: Mapping[str, Any] | None = None,
    allow_pickle: bool = False,
) -> Checkpoint:
    """Open a committed checkpoint for reading. One request. torch is not needed.

    Args:
        url, storage_options: as for :func:`save`.
        allow_pickle: also decode values that were saved as pickles. They can run any code in the checkpoint.

    Raises CheckpointNotFoundError (the message names an unfinished save), ForeignObjectsError, UnsupportedFormatError,
    CorruptCheckpointError.
    """
    spec = StoreSpec(url, storage_options)
    return Checkpoint(Catalog(spec), allow_pickle=allow_pickle)
