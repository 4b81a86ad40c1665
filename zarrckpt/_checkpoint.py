"""``open``: a committed checkpoint as a read-only mapping. No torch."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any

from zarrckpt._convert.export_paths import MAX_EXPORT_BYTES, strip_prefix
from zarrckpt._errors import CheckpointError, KeyMismatchError, warn
from zarrckpt._format.documents import ArrayNode
from zarrckpt._format.matching import hint, select
from zarrckpt._format.root import BlobEntry, ValueEntry
from zarrckpt._format.state_path import StatePath
from zarrckpt._inspect.html import Group, as_html
from zarrckpt._inspect.info import CheckpointInfo, info_of
from zarrckpt._inspect.value_changes import comparison_key, describe_change, shorten
from zarrckpt._jobs import DEFAULT_MAX_INFLIGHT_BYTES, Progress
from zarrckpt._read.arrays import read_arrays
from zarrckpt._read.catalog import Catalog
from zarrckpt._reports import ExportReport, count_text, size_text, time_text, value_text
from zarrckpt._store import StoreSpec, Url
from zarrckpt._store._whole_files import local_file, local_path

if TYPE_CHECKING:
    import numpy as np
    import zarr

    from zarrckpt._format.compression import CompressionOption
    from zarrckpt._inspect.differences import Difference
    from zarrckpt._inspect.page import PageReport
    from zarrckpt._inspect.stats import TensorStats
    from zarrckpt._ops.copy_plan import ChunksOption
    from zarrckpt._ops.verify import VerifyReport
    from zarrckpt._read.casts import DTypeOption
    from zarrckpt._reports import CopyReport


class Checkpoint(Mapping[str, Any]):
    """A committed checkpoint: a mapping from fqns to ``zarr.Array`` objects or Python values.

    Arrays are lazy: data are read when an array is indexed. All data are compared with the table of checksums (one
    request, with the first chunk). A missing or altered chunk raises CorruptCheckpointError. Values are decoded.
    Pickled values raise UnsafeValueError unless the checkpoint was opened with ``allow_pickle=True``.

    :attr:`tensors`, :attr:`non_tensors`, :attr:`groups` and :meth:`select` return parts of it, which are Checkpoints
    too.
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
    def tree(self) -> str:
        """The group below the url that holds the arrays: ``""``, or ``"@..."`` after an overwrite or a crashed save."""
        return self._catalog.root.tree

    @property
    def created(self) -> str:
        """The time of the commit: UTC, ISO 8601."""
        return self._catalog.root.created

    @property
    def world_size(self) -> int:
        """The number of ranks that saved it."""
        return self._catalog.root.world_size

    @property
    def nbytes(self) -> int:
        """The number of bytes of all tensors and blobs, without padding and checksums."""
        return sum(node.nbytes for node in self._catalog.root.arrays(self._names))

    @property
    def nbytes_stored(self) -> int:
        """The number of bytes of all stored chunks of tensors and blobs, with padding, checksums and compression.

        No request. If a tensor or blob is compressed, the first access needs one or two requests for the tables. Raises
        CorruptCheckpointError if a table is damaged, CheckpointReplacedError, StorageError.
        """
        return sum(self._catalog.stored_nbytes(node) for node in self._catalog.root.arrays(self._names))

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
        """The nested dicts at the first level of the state dict, by key, with the entries below each."""
        found: dict[str, list[str]] = {}
        for fqn in self._names:
            keys = self._catalog.root.state_path(fqn).keys
            if len(keys) > 1:
                found.setdefault(str(keys[0]), []).append(fqn)
        return {name: self._part(names) for name, names in found.items()}

    def select(self, *patterns: str, exclude: Iterable[str] = ()) -> Checkpoint:
        """Return the entries that match patterns: fqns, their prefixes up to a dot, or globs (``"*.bias"``).

        Without patterns, all entries match. Entries that match ``exclude`` are left out. Raises KeyMismatchError for a
        pattern without a match.
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
        """Sizes, dtypes, step, software and layout. It needs only the requests of :attr:`nbytes_stored`.

        If these fail, ``info.nbytes_stored`` is None, so that a damaged checkpoint can be inspected too.
        """
        try:
            stored = self.nbytes_stored
        except CheckpointError:
            stored = None
        return info_of(self.url, self._catalog.root, self._names, stored)

    @property
    def metadata(self) -> dict[str, Any]:
        """The ``metadata`` of the save: a dict of JSON types, a new copy at each access."""
        return copy.deepcopy(dict(self._catalog.root.metadata))

    def ranks(self, fqn: str) -> tuple[int, ...]:
        """Return the rank of each element of the first axis of a :class:`PerRank` tensor, and () for other entries.

        Ranks are numbered as in the default process group. Raises KeyMismatchError for an unknown name. No request.
        """
        if fqn not in self._names:
            raise self._no("entry", fqn, self)
        stack = self._catalog.root.stacks.get(fqn)
        return () if stack is None else stack.ranks

    def __getitem__(self, fqn: str) -> Any:
        root = self._catalog.root
        if fqn in self._names and fqn in root.tensors:
            return self._array(fqn)
        if fqn in self._names:
            return self._catalog.read_object(fqn, allow_pickle=self._allow_pickle)
        raise self._no("entry", fqn, self)

    def _no(self, what: str, fqn: str, names: Iterable[str]) -> KeyMismatchError:
        """Return the error for a name that is not among these names."""
        text = "it is a value" if fqn in self._names else hint(str(fqn), names)
        return KeyMismatchError(f"no {what} {fqn!r} in {self.url}; {text}")

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, fqn: object) -> bool:
        return fqn in self._names

    def __repr__(self) -> str:
        what = f"{count_text(len(self.tensors), 'tensor')}, {count_text(len(self.non_tensors), 'value')}"
        who = f"saved by {count_text(self.world_size, 'rank')} at {time_text(self.created)}"
        return f"<zarrckpt.Checkpoint {self.url!r}: {what}, {size_text(self.nbytes)}, {who}>"

    def _repr_html_(self) -> str:
        parts = self.groups
        below = {fqn for part in parts.values() for fqn in part}
        shown = [*parts.items(), ("(no group)", self._part(fqn for fqn in self._names if fqn not in below))]
        return as_html(self.info, [self._html_group(name, part) for name, part in shown if len(part)])

    def _html_group(self, name: str, part: Checkpoint) -> Group:
        return Group(name, len(part), part.nbytes, [part.summary(fqn) for fqn in islice(part, Group.SHOWN)])

    def summary(self, fqn: str) -> tuple[str, str, str, str]:
        """Return the name, dtype or kind, shape or value, and size of an entry as texts. No request."""
        entry = self._catalog.root.entries[fqn]
        if isinstance(entry, ArrayNode):
            return fqn, entry.dtype.name, str(entry.grid.shape), size_text(entry.nbytes)
        if isinstance(entry, BlobEntry):
            return fqn, entry.encoding, entry.kind or "", size_text(entry.array.nbytes)
        return fqn, "value", shorten(value_text(self[fqn])), ""

    def nbytes_of(self, fqn: str) -> int:
        """Return the number of bytes of an entry, as in :attr:`nbytes`. It is 0 for a value in the root document."""
        if fqn not in self._names:
            raise self._no("entry", fqn, self)
        node = self._catalog.root.array(fqn)
        return 0 if node is None else node.nbytes

    def node_path(self, fqn: str) -> str:
        """Return the path of a tensor's array below the url, for other readers: ``zarr.open_group(url)[path]``."""
        root = self._catalog.root
        if fqn not in root.tensors:
            raise self._no("tensor", fqn, self.tensors)
        return root.tensors[fqn].under(root.tree).path

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
            progress: called as ``progress(bytes_done, bytes_total)`` while chunks are read.

        Raises KeyMismatchError for a name that is not a tensor, and before the first read for memory in ``out`` with
        another shape or dtype (all are listed). Raises TypeError and ValueError for memory that is not writable.
        Raises CorruptCheckpointError and CheckpointReplacedError, after which the contents of ``out`` are undefined.
        """
        root = self._catalog.root
        names = (self.tensors if out is None else out) if keys is None else [keys] if isinstance(keys, str) else keys
        wanted = list(dict.fromkeys(names))
        for fqn in wanted:
            if fqn not in self._names or fqn not in root.tensors:
                raise self._no("tensor", fqn, self.tensors)
        return read_arrays(self._catalog, wanted, max_inflight_bytes, progress, out)

    def load(
        self, keys: str | Iterable[str] | None = None, *, device: Any = "cpu", progress: Progress | None = None
    ) -> dict[str, Any]:
        """Read entries into new torch tensors, and return the saved nested state dict or a part of it.

        ``model.load_state_dict(ckpt.load("model")["model"], assign=True)`` fills a model on the ``meta`` device. Needs
        torch. One process reads everything; :func:`zarrckpt.load` fills sharded states.

        Args:
            keys: patterns as in :meth:`select` (default: everything).
            device: the device of the tensors.
            progress: see :meth:`read`.

        Raises what :meth:`read` raises, and UnsafeValueError.
        """
        from zarrckpt._convert.loading import load_nested

        patterns = () if keys is None else (keys,) if isinstance(keys, str) else tuple(keys)
        names = select(self._names, patterns, self.url) if patterns else list(self._names)
        paths = {fqn: self._catalog.root.state_path(fqn) for fqn in names}
        return load_nested(
            self._catalog,
            paths,
            device,
            allow_pickle=self._allow_pickle,
            max_inflight_bytes=DEFAULT_MAX_INFLIGHT_BYTES,
            progress=progress,
        )

    def copy_to(
        self,
        url: Url,
        *,
        overwrite: bool = False,
        chunks: ChunksOption = None,
        max_chunk_bytes: int | None = None,
        dtype: DTypeOption = None,
        compression: CompressionOption = "keep",
        portable_dtypes: bool = False,
        storage_options: Mapping[str, Any] | None = None,
        max_inflight_bytes: int = DEFAULT_MAX_INFLIGHT_BYTES,
        progress: Progress | None = None,
    ) -> CopyReport:
        """Copy this checkpoint, or this part of one, to another url in any store, also with other chunks or dtypes.

        All data are compared with their checksums, and the copy is committed like a save. It has a new save id. Chunks
        of tensors that no option changes are copied byte for byte.

        Args:
            url: the url of the copy, as in :func:`save`.
            overwrite: replace an existing checkpoint at the url.
            chunks: a chunk shape for all tensors with this number of dimensions, or a mapping from patterns to shapes
                (the first match is used). -1 stands for a whole dimension.
            max_chunk_bytes: give all other tensors the chunks of a :func:`save` by one process with this limit.
            dtype: a dtype for floating tensors, such as ``"bfloat16"``, or a mapping from patterns of :meth:`select` to
                dtypes (the first match is used). Casts follow torch's rule (``docs/reference/casts.md``). Finite values
                beyond the range of the dtype are counted in the report, with a UserWarning. These keep their dtype:
                float8_e8m0fnu, tensors that are not floating, and numbers that a training counts with or is configured
                by: tensors named ``step``, ``global_step`` or ``iteration``, 0-d tensors, and tensors of one element
                without ``weight`` or ``bias`` as a part of the name. The report's ``uncast`` lists them. A mapping
                casts one of them if it has its full name: ``{"model.scale": "bfloat16"}``.
            compression: the compression of all tensors, as in :func:`save`. None removes it, ``"keep"`` keeps it.
            portable_dtypes: as in :class:`SaveOptions`. Tensors that are stored as integers already stay so.
            storage_options: as in :func:`save`.
            max_inflight_bytes: maximum memory in bytes (default 512 MiB, at least one chunk and its source data).
            progress: called as ``progress(bytes_done, bytes_total)``.

        Raises CheckpointExistsError, ForeignObjectsError, CorruptCheckpointError (then nothing is committed),
        CheckpointReplacedError and StorageError. Raises KeyMismatchError for a pattern that matches no tensor, and
        TypeError and ValueError for wrong options. Costs two requests per unchanged chunk and two per array. For other
        chunks, only the necessary parts of the source are read.
        """
        from zarrckpt._ops.copy import copy_checkpoint
        from zarrckpt._ops.copy_plan import parse_changes

        changes = parse_changes(
            self._catalog.root,
            self._names,
            self.url,
            chunks=chunks,
            max_chunk_bytes=max_chunk_bytes,
            dtype=dtype,
            compression=compression,
            portable_dtypes=portable_dtypes,
        )
        target = StoreSpec(url, storage_options).open()
        report = copy_checkpoint(
            self._catalog,
            list(self._names),
            target,
            changes,
            overwrite=overwrite,
            max_inflight_bytes=max_inflight_bytes,
            progress=progress,
        )
        _warn_of_overflow(report)
        return report

    def to_safetensors(
        self,
        target: str | os.PathLike[str],
        *patterns: str,
        strip: str = "",
        dtype: DTypeOption = None,
        max_file_bytes: int = 5_000_000_000,
        overwrite: bool = False,
        max_inflight_bytes: int = MAX_EXPORT_BYTES,
        progress: Progress | None = None,
    ) -> ExportReport:
        """Write tensors as safetensors: one file, or several files with an index.

        Hugging Face's libraries and ``safetensors`` can load them. Files get their final names when all are complete.

        Args:
            target: a local folder, which is created if necessary, or the path of a single file that ends in
                ``.safetensors``.
            patterns: as in :meth:`select` (default: all tensors).
            strip: a prefix to remove from names: ``"model"`` writes ``model.embed.weight`` as ``embed.weight``. Names
                without the prefix do not change.
            dtype: cast floating tensors, as in :meth:`copy_to`. Its patterns match names in the checkpoint.
            max_file_bytes: maximum size of a file in bytes. Only a single tensor can exceed it.
            overwrite: replace the file, or the folder's ``model*.safetensors`` and their index.
            max_inflight_bytes: maximum memory in bytes (default 128 MiB).
            progress: see :meth:`read`.

        Raises UnsupportedValueError for a dtype that safetensors lacks, for two tensors with one name, or for the name
        ``__metadata__``. Raises StorageError, also if such files exist, and the errors of :meth:`read`.
        """
        from zarrckpt._convert.safetensors import export_safetensors
        from zarrckpt._read.casts import plan_casts

        paths = self.select(*patterns).tensors._stripped(strip)
        if not paths:
            raise KeyMismatchError(
                f"the selected entries of {self.url} have no tensor, and safetensors files cannot hold values"
            )
        names = {fqn: path.fqn for fqn, path in paths.items()}
        report = export_safetensors(
            self._catalog,
            names,
            local_path(target),
            plan_casts(self._catalog.root, names, self.url, dtype),
            max_file_bytes=max_file_bytes,
            overwrite=overwrite,
            max_inflight_bytes=max_inflight_bytes,
            progress=progress,
        )
        _warn_of_overflow(report)
        return report

    def to_torch_save(
        self,
        path: str | os.PathLike[str],
        *patterns: str,
        strip: str = "",
        overwrite: bool = False,
        max_inflight_bytes: int = MAX_EXPORT_BYTES,
        progress: Progress | None = None,
    ) -> ExportReport:
        """Write the nested state dict, or the part that matches the patterns, as a ``torch.save`` file.

        ``torch.load`` reads it with its defaults, also with ``mmap=True``. Types that ``weights_only=True`` refuses,
        such as numpy's, need ``weights_only=False``. The file gets its name when it is complete. Needs torch, and
        memory for all written data; :meth:`to_safetensors` and :meth:`to_dcp` need less.

        Args:
            path: a local file.
            overwrite: replace an existing file.
            max_inflight_bytes: maximum memory in bytes beyond the written data (default 128 MiB).

        The other arguments are those of :meth:`to_safetensors`. Non-tensor entries are written too.

        Raises UnsafeValueError for a pickled value, unless this was opened with ``allow_pickle=True``. Raises
        UnsupportedValueError for two entries with one name, StorageError, also if the file exists, and the errors of
        :meth:`read`.
        """
        from zarrckpt._convert.torch_save import export_torch_save

        return export_torch_save(
            self._catalog,
            self.select(*patterns)._stripped(strip),
            local_file(path),
            overwrite=overwrite,
            allow_pickle=self._allow_pickle,
            max_inflight_bytes=max_inflight_bytes,
            progress=progress,
        )

    def to_dcp(
        self,
        folder: str | os.PathLike[str],
        *patterns: str,
        strip: str = "",
        overwrite: bool = False,
        max_inflight_bytes: int = MAX_EXPORT_BYTES,
        progress: Progress | None = None,
    ) -> ExportReport:
        """Write the state, or the part that matches the patterns, as a folder of ``torch.distributed.checkpoint``.

        DCP's own ``FileSystemWriter`` writes it, and ``dcp.load`` reads it into any sharding. Each chunk becomes one
        piece. The folder gets its name when it is complete. Needs torch. Runs in one process.

        Args:
            folder: a local folder, absent or empty.
            overwrite: replace a folder that has only files of DCP.

        The other arguments are those of :meth:`to_torch_save`.

        Raises the errors of :meth:`to_torch_save`.
        """
        from zarrckpt._dcp.export import export_dcp

        part = self.select(*patterns)
        return export_dcp(
            self._catalog,
            part._stripped(strip),
            dict(part.non_tensors),
            local_path(folder),
            overwrite=overwrite,
            max_inflight_bytes=max_inflight_bytes,
            progress=progress,
        )

    def _stripped(self, prefix: str) -> dict[str, StatePath]:
        """Return the state paths of the entries without a prefix."""
        return strip_prefix({fqn: self._catalog.root.state_path(fqn) for fqn in self}, prefix)

    def stats(self, *patterns: str, progress: Progress | None = None) -> dict[str, TensorStats]:
        """Return min, max, mean, std, norm, and counts of zeros, NaN and inf of each tensor that matches the patterns.

        Integers are summed exactly. Sums of floats use float64, scaled so that squares neither overflow nor underflow.

        All data of these tensors are read, in at most 512 MiB of memory. Raises the errors of :meth:`read`.
        """
        from zarrckpt._inspect.stats import tensor_stats

        return tensor_stats(self._catalog, self.select(*patterns).tensors, progress)

    def diff(self, other: Checkpoint, *patterns: str, progress: Progress | None = None) -> Difference:
        """Compare with another checkpoint: keys, shapes, dtypes, values, and the distance of tensors.

        Chunks and stores can differ. Floating dtypes can differ too: for a bfloat16 copy of float32 weights, the result
        counts the elements that differ by more than rounding. Integers are compared exactly. The result has totals for
        each group, the first part of the names. Memory is limited as in :meth:`stats`. ``patterns`` are as in
        :meth:`select`. Each must match an entry of one of the two.
        """
        from zarrckpt._inspect.differences import Difference, tensor_differences

        wanted = self._of_both(other, patterns)
        changed, same = self._changes(other, wanted)
        here, there = [n for n in wanted if n not in other], [n for n in wanted if n not in self]
        found, groups = tensor_differences(self._catalog, other._catalog, same, progress)
        return Difference(tuple(here), tuple(there), changed, found, groups)

    def _of_both(self, other: Checkpoint, patterns: Sequence[str]) -> list[str]:
        """Return the names of entries of either checkpoint that match the patterns."""
        if not isinstance(other, Checkpoint):
            raise TypeError(f"expected a Checkpoint to compare with, got {other!r:.80}: pass zarrckpt.open(url)")
        names = list(dict.fromkeys((*self, *other)))
        where = self.url if other is self else f"{self.url} and {other.url}"
        return select(names, patterns, where) if patterns else names

    def _changes(self, other: Checkpoint, names: Iterable[str]) -> tuple[dict[str, tuple[str, str]], list[str]]:
        """Return texts of differences other than in numbers, and the names of tensors with comparable numbers."""
        from zarrckpt._inspect.differences import comparable

        arrays, others = self._catalog.root.tensors, other._catalog.root.tensors
        changed, same = {}, []
        for fqn in (name for name in names if name in self and name in other):
            if fqn in arrays and fqn in others and comparable(arrays[fqn], others[fqn]):
                same.append(fqn)
            elif (texts := self._change(other, fqn)) is not None:
                changed[fqn] = texts
        return changed, same

    def _change(self, other: Checkpoint, fqn: str) -> tuple[str, str] | None:
        """Describe the difference of an entry other than two comparable tensors, or return None."""
        one, two = self._catalog.root.entries[fqn], other._catalog.root.entries[fqn]
        if isinstance(one, ValueEntry) and isinstance(two, ValueEntry):
            values = self[fqn], other[fqn]
            return None if comparison_key(values[0]) == comparison_key(values[1]) else describe_change(*values)
        texts = self._described(fqn), other._described(fqn)
        if not (isinstance(one, BlobEntry) and isinstance(two, BlobEntry)):
            return texts
        sums = self._catalog.checksums(one.array).tolist(), other._catalog.checksums(two.array).tolist()
        if texts[0] == texts[1]:  # Blobs are compared by checksum and never decoded.
            if sums[0] == sums[1]:
                return None
            first = next((pair for pair in zip(*sums, strict=False) if pair[0] != pair[1]), (0, 0))
            return f"{texts[0]}, checksum {first[0]:08x}", f"{texts[1]}, checksum {first[1]:08x}"
        return texts

    def _described(self, fqn: str) -> str:
        """Describe an entry: dtype and shape, the value, or encoding, kind and size of a blob."""
        entry = self._catalog.root.entries[fqn]
        text = " ".join(self.summary(fqn)[1:3])
        return f"{text}, {entry.array.nbytes:,} bytes" if isinstance(entry, BlobEntry) else text

    def report(
        self,
        path: str | os.PathLike[str],
        other: Checkpoint | None = None,
        *,
        include: Iterable[str] = (),
        exclude: Iterable[str] = (),
        values: bool = True,
        overwrite: bool = False,
        progress: Progress | None = None,
    ) -> PageReport:
        """Write an HTML page that shows this checkpoint, or compares it with another one.

        The page has a tree map of sizes, the numbers, histogram, outliers, NaN and inf of each tensor, the rank that
        wrote each chunk, and the values. It loads no other files and runs only its own code. All tensors are read once
        and checked, with memory limited as in :meth:`stats`. Blobs are not read, and pickles are not loaded.

        Args:
            path: the file to write, in an existing folder.
            other: a checkpoint to compare with. The entries that changed most are listed first.
            include: patterns as in :meth:`select` (default: all). They match entries of either checkpoint.
            exclude: patterns of entries to leave out.
            values: False shows only the layout, and reads only the tables with a few requests.
            overwrite: replace an existing file.
            progress: called as ``progress(bytes_done, bytes_total)``.

        Raises the errors of :meth:`read`, and StorageError if the file exists or cannot be written.
        """
        from zarrckpt._inspect.page import Side, check_target, write_page

        target = local_file(path)
        check_target(target, overwrite)
        everything = other if other is not None else self
        dropped = set(self._of_both(everything, drop)) if (drop := [*exclude]) else set()
        wanted = [fqn for fqn in self._of_both(everything, [*include]) if fqn not in dropped]
        ckpts = [self] if other is None else [self, other]
        parts = [ckpt._part(fqn for fqn in wanted if fqn in ckpt) for ckpt in ckpts]
        sides = [Side(part._catalog, tuple(part), part.info) for part in parts]
        changed, same = ({}, []) if other is None else self._changes(other, wanted)
        return write_page(target, sides, same, changed, values=values, overwrite=overwrite, progress=progress)

    def path(self, fqn: str) -> tuple[object, ...]:
        """Return the keys that lead to an entry in the saved state dict."""
        if fqn not in self._names:
            raise self._no("entry", fqn, self)
        return tuple(self._catalog.root.state_path(fqn).keys)

    def to_xarray(self, group: str = "") -> Any:
        """Return the arrays below a group (``"model"``, ``"optim.state"``; default: all) as a lazy ``xarray.DataTree``.

        A part of a checkpoint returns only its own arrays. All data that are read are checked. Needs xarray. Raises
        KeyMismatchError for a name that is not a group.
        """
        from zarrckpt._inspect.xarray_view import open_tree

        return open_tree(self.url, self._catalog.root, self._zarr_store, self._names, group)

    def verify(
        self,
        *,
        quick: bool = False,
        max_inflight_bytes: int = DEFAULT_MAX_INFLIGHT_BYTES,
        progress: Progress | None = None,
    ) -> VerifyReport:
        """Check that the whole checkpoint is stored as it was saved. The report names each damaged object.

        This covers chunks, tables, the claim and the marker, and the documents of all nodes. Other Zarr readers need
        these documents, but this package reads only the root document.

        Args:
            quick: only list the objects, to find missing ones and other sizes. This costs one request per 1,000
                objects, and two more for compressed arrays; over HTTP, one request per object. Otherwise all data are
                read in parallel and compared with their checksums.
            max_inflight_bytes: maximum memory in bytes (default 512 MiB).
            progress: called as ``progress(bytes_done, bytes_total)`` while objects are read.

        Raises CheckpointReplacedError if another save was committed in the meantime, and StorageError. Damage raises no
        error, see :meth:`VerifyReport.raise_if_damaged`.
        """
        from zarrckpt._ops.verify import verify

        return verify(self._catalog, quick=quick, max_inflight_bytes=max_inflight_bytes, progress=progress)

    def writers(self, fqn: str) -> np.ndarray[Any, Any]:
        """Return the rank that wrote each chunk of a tensor, as uint32 in the chunk grid's shape.

        One request for all tensors.
        """
        if fqn not in self._catalog.root.tensors:
            raise self._no("tensor", fqn, self.tensors)
        return self._writers[self._catalog.root.tensors[fqn].path]

    @cached_property
    def _writers(self) -> dict[str, np.ndarray[Any, Any]]:
        return self._catalog.writers()

    @cached_property
    def _zarr_store(self) -> Any:
        from zarrckpt._read import zarr_dtypes  # noqa: F401 - importing it registers bfloat16 and float8
        from zarrckpt._read.zarr_view import reopen

        return reopen(self._catalog)

    def _array(self, fqn: str) -> zarr.Array[Any]:
        import zarr
        from zarr.core.array import AsyncArray
        from zarr.storage import StorePath

        root = self._catalog.root
        self._catalog.refuse_unbacked_size(root.tensors[fqn])
        node = root.tensors[fqn].under(root.tree)
        # Built from the root's consolidated metadata, without a request.
        document: Any = copy.deepcopy(node.document())
        return zarr.Array(AsyncArray(document, StorePath(self._zarr_store, node.path)))


def _warn_of_overflow(report: CopyReport | ExportReport) -> None:
    for fqn, count in report.overflowed.items():
        warn(f"{fqn!r}: {count:,} finite values are beyond the range of the new dtype")


def open(
    url: Url,
    *,
    storage_options: Mapping[str, Any] | None = None,
    allow_pickle: bool = False,
) -> Checkpoint:
    """Open a committed checkpoint for reading. One request. torch is not needed.

    Raises CheckpointNotFoundError (the message names an unfinished save), ForeignObjectsError, UnsupportedFormatError,
    CorruptCheckpointError.
    """
    spec = StoreSpec(url, storage_options)
    return Checkpoint(Catalog(spec), allow_pickle=allow_pickle)
