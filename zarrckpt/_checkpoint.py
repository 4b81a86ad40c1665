"""``open``: a committed checkpoint as a read-only mapping. No torch."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any

from zarrckpt._convert.export_paths import MAX_EXPORT_BYTES, stripped
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
    def nbytes_stored(self) -> int:
        """Bytes of the chunks of all tensors and blobs as they are stored: with padding, checksums and compression.

        No request; where any of them is compressed, one or two for the tables, the first time. Raises
        CorruptCheckpointError where a table is damaged, CheckpointReplacedError, StorageError.
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
        """Sizes, dtypes, step, who wrote it, layout. No request, but those of :attr:`nbytes_stored`.

        Where they fail, ``info.nbytes_stored`` is None: a damaged checkpoint can be looked at, too.
        """
        try:
            stored = self.nbytes_stored
        except CheckpointError:
            stored = None
        return info_of(self.url, self._catalog.root, self._names, stored)

    @property
    def metadata(self) -> dict[str, Any]:
        """What was given to the save as ``metadata``: a dict of JSON types, a new one each time."""
        return copy.deepcopy(dict(self._catalog.root.metadata))

    def ranks(self, fqn: str) -> tuple[int, ...]:
        """The ranks that the first axis of a tensor stands for, where it holds what each rank keeps for itself.

        Their numbers in the default process group, as :class:`PerRank` says; () for every other entry. Raises
        KeyMismatchError for an unknown name. No request.
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
        """The error for a name that is none of some names."""
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
        """(name, dtype or kind, shape or value, size) of an entry for people. No request."""
        entry = self._catalog.root.entries[fqn]
        if isinstance(entry, ArrayNode):
            return fqn, entry.dtype.name, str(entry.grid.shape), size_text(entry.nbytes)
        if isinstance(entry, BlobEntry):
            return fqn, entry.encoding, entry.kind or "", size_text(entry.array.nbytes)
        return fqn, "value", shorten(value_text(self[fqn])), ""

    def nbytes_of(self, fqn: str) -> int:
        """Bytes of one entry, as :attr:`nbytes` counts them; 0 for a value that the root document holds."""
        if fqn not in self._names:
            raise self._no("entry", fqn, self)
        node = self._catalog.root.array(fqn)
        return 0 if node is None else node.nbytes

    def node_path(self, fqn: str) -> str:
        """The path of a tensor's array below the url, for other Zarr readers: ``zarr.open_group(url)[path]``."""
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
        """Read whole tensors into memory, many requests at a time: name -> array, in the order of ``keys``.

        All chunks of all tensors are fetched side by side, after one request for the table of checksums, and each byte
        is checked. bfloat16 and float8 arrays have the dtypes of ``ml_dtypes``.

        Args:
            keys: names of tensors (default: those of ``out``, else all).
            out: name -> memory that is filled in place, for each of ``keys``: numpy arrays, or other objects with a
                writable buffer (a torch CPU tensor's ``.numpy()``), of the tensor's shape and dtype and any strides.
                bfloat16 and float8 also go into unsigned integers of their size, bit for bit. Nothing of the tensors'
                size is allocated.
            max_inflight_bytes: bound on the memory beyond the arrays (default 512 MiB).
            progress: called as ``progress(bytes_done, bytes_total)`` while chunks are read.

        Raises KeyMismatchError for a name that is no tensor, and, before anything is read, for what in ``out`` has
        another shape or dtype (all are listed); TypeError and ValueError for what there is no writable memory;
        CorruptCheckpointError, CheckpointReplacedError: then what ``out`` holds is undefined.
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
        """Read entries into new torch tensors: the nested state dict that was saved, or a part of it.

        ``model.load_state_dict(ckpt.load("model")["model"], assign=True)`` fills a model on the ``meta`` device. Needs
        torch; one process reads all of it (:func:`zarrckpt.load` fills sharded states).

        Args:
            keys: as in :meth:`select` (default: everything).
            device: where the tensors are to be.
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
        """Copy this checkpoint, or this part of one, to another place, between any stores; rearranged if need be.

        What is read is compared with its checksums, and the copy is committed as a save is: complete, or not there. It
        has a save id of its own. Chunks of tensors for which no option changes anything stay the same, byte for byte.

        Args:
            url: where to, as in :func:`save`; so is storage_options.
            overwrite: replace what is there.
            chunks: a shape for the chunks of all tensors with as many dimensions, or a mapping pattern -> shape (the
                first that means a tensor counts); -1 stands for a whole dimension.
            max_chunk_bytes: give all other tensors the chunks that a :func:`save` by one process gives them, of at most
                so many bytes.
            dtype: cast floating tensors, such as ``"bfloat16"``, or a mapping pattern -> dtype with the patterns of
                :meth:`select` (the first match counts). The rule is torch's (``docs/reference/casts.md``). Finite
                values beyond the dtype's range are counted in the report, with a UserWarning.
                Left alone: float8_e8m0fnu, what is not floating, and numbers that a training counts or
                sets by: tensors named ``step``, ``global_step`` or ``iteration``, 0-d tensors, and tensors of one
                element whose names have no part ``weight`` or ``bias``. The report's ``uncast`` names them. A mapping
                casts one of them if it has its full name: ``{"model.scale": "bfloat16"}``.
            compression: of all tensors, as in :func:`save`: None takes it away; ``"keep"`` leaves it.
            portable_dtypes: as in :class:`SaveOptions`. Tensors that are stored so already stay so.
            max_inflight_bytes: bound on the memory (default 512 MiB, at least one chunk and what it is made from).
            progress: called as ``progress(bytes_done, bytes_total)``.

        Raises CheckpointExistsError, ForeignObjectsError, CorruptCheckpointError (nothing is committed then),
        CheckpointReplacedError, StorageError; KeyMismatchError for a pattern that means no tensor, TypeError and
        ValueError for options that make no sense. Two requests a chunk that stays as it is, two an array; to make other
        chunks, those parts of the source are read that they need.
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
        """Write the tensors, or those that patterns mean, as safetensors: one file, or several with an index.

        Hugging Face's libraries and ``safetensors`` load the result. Files appear under their names when all are whole.

        Args:
            target: a local folder, made where it is absent; or, where it ends in ``.safetensors``, the one file.
            patterns: as in :meth:`select` (default: all tensors).
            strip: a beginning that the names lose: ``"model"`` writes ``model.embed.weight`` as ``embed.weight``;
                names without it keep theirs.
            dtype: cast floating tensors, as in :meth:`copy_to`; patterns are those of names in the checkpoint.
            max_file_bytes: a file has more only where a single tensor has.
            overwrite: replace the file, or the folder's ``model*.safetensors`` and their index.
            max_inflight_bytes: bound on the memory (default 128 MiB).
            progress: see :meth:`read`.

        Raises UnsupportedValueError for a dtype that safetensors lacks, two tensors of one name, or the name
        ``__metadata__``; StorageError, also where such files exist; and what :meth:`read` raises.
        """
        from zarrckpt._convert.safetensors import export_safetensors
        from zarrckpt._read.casts import plan_casts

        paths = self.select(*patterns).tensors._stripped(strip)
        if not paths:
            raise KeyMismatchError(f"what was chosen of {self.url} has no tensor, and safetensors files hold no values")
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
        """Write the nested state dict, or the part of it that patterns mean, as a file of ``torch.save``.

        ``torch.load`` reads it with its defaults, ``mmap=True`` too; values of kinds that ``weights_only=True`` refuses
        (numpy's, for one) need ``weights_only=False``. The file appears under its name when it is whole. Needs torch,
        and memory for all that is written: :meth:`to_safetensors` and :meth:`to_dcp` need less.

        Args:
            path: a local file.
            overwrite: replace a file that is there.
            max_inflight_bytes: bound on the memory beyond what is written (default 128 MiB).

        The other arguments are those of :meth:`to_safetensors`; entries that are no tensors are written, too.

        Raises UnsafeValueError for a pickled value, unless this was opened with ``allow_pickle=True``;
        UnsupportedValueError for two entries of one name; StorageError, also where the file exists; and what
        :meth:`read` raises.
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
        """Write the state, or the part of it that patterns mean, as a folder of ``torch.distributed.checkpoint``.

        By DCP's own ``FileSystemWriter``: ``dcp.load`` reads it into any sharding. Tensors are saved in the boxes of
        their chunks here. The folder appears under its name when it is whole. Needs torch; runs in one process.

        Args:
            folder: local; absent or empty.
            overwrite: replace a folder that holds DCP's files and nothing else.

        The other arguments are those of :meth:`to_torch_save`.

        Raises what :meth:`to_torch_save` raises.
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
        """Where the entries go without a beginning of their names."""
        return stripped({fqn: self._catalog.root.state_path(fqn) for fqn in self}, prefix)

    def stats(self, *patterns: str, progress: Progress | None = None) -> dict[str, TensorStats]:
        """Min, max, mean, std, norm, zeros, NaN and inf of each tensor, or of those that patterns mean.

        Integers are summed exactly. Sums of floats are those of float64, scaled so that squares neither over- nor
        underflow.

        Everything is read, some chunks at a time: memory is bounded by 512 MiB. Errors as for :meth:`read`.
        """
        from zarrckpt._inspect.stats import tensor_stats

        return tensor_stats(self._catalog, self.select(*patterns).tensors, progress)

    def diff(self, other: Checkpoint, *patterns: str, progress: Progress | None = None) -> Difference:
        """Compare with another checkpoint: keys, shapes, dtypes, values, and how far tensors are apart.

        Their chunks, and their stores, may differ; so may floating dtypes: of a bfloat16 copy of float32 weights, the
        result counts the elements that are not merely rounded. Integers are compared exactly. The result has totals for
        each group, the first part of the names. Memory is bounded as in :meth:`stats`. ``patterns`` are those of
        :meth:`select`; they must mean something in one of the two.
        """
        from zarrckpt._inspect.differences import Difference, tensor_differences

        wanted = self._of_both(other, patterns)
        changed, same = self._changes(other, wanted)
        here, there = [n for n in wanted if n not in other], [n for n in wanted if n not in self]
        found, groups = tensor_differences(self._catalog, other._catalog, same, progress)
        return Difference(tuple(here), tuple(there), changed, found, groups)

    def _of_both(self, other: Checkpoint, patterns: Sequence[str]) -> list[str]:
        """The entries of either that patterns mean."""
        if not isinstance(other, Checkpoint):
            raise TypeError(f"expected a Checkpoint to compare with, not {other!r:.80}: pass zarrckpt.open(its url)")
        names = list(dict.fromkeys((*self, *other)))
        where = self.url if other is self else f"{self.url} and {other.url}"
        return select(names, patterns, where) if patterns else names

    def _changes(self, other: Checkpoint, names: Iterable[str]) -> tuple[dict[str, tuple[str, str]], list[str]]:
        """What differs without a look at numbers, as texts; and the tensors whose numbers can be compared."""
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
        """Describe how an entry differs that is no pair of comparable tensors; None if it does not."""
        one, two = self._catalog.root.entries[fqn], other._catalog.root.entries[fqn]
        if isinstance(one, ValueEntry) and isinstance(two, ValueEntry):
            values = self[fqn], other[fqn]
            return None if comparison_key(values[0]) == comparison_key(values[1]) else describe_change(*values)
        texts = self._described(fqn), other._described(fqn)
        if not (isinstance(one, BlobEntry) and isinstance(two, BlobEntry)):
            return texts
        sums = self._catalog.checksums(one.array).tolist(), other._catalog.checksums(two.array).tolist()
        if texts[0] == texts[1]:  # bytes that need code to be understood are only compared
            if sums[0] == sums[1]:
                return None
            first = next((pair for pair in zip(*sums, strict=False) if pair[0] != pair[1]), (0, 0))
            return f"{texts[0]}, checksum {first[0]:08x}", f"{texts[1]}, checksum {first[1]:08x}"
        return texts

    def _described(self, fqn: str) -> str:
        """An entry beside another one: dtype and shape, the value, or encoding, kind and size of a blob."""
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
        """Write one HTML page that shows this checkpoint, or compares it with another one.

        Sizes as a tree map; of each tensor its numbers, a histogram, outliers, NaN and inf, and which rank wrote which
        of its chunks; values. The page loads nothing from anywhere, and runs no code but its own. Everything is read
        once and checked, in memory bounded as in :meth:`stats`. Blobs are not read, and nothing is unpickled.

        Args:
            path: the file to write; its folder exists.
            other: compare with it: what changed most comes first.
            include: as in :meth:`select` (default: all); of two checkpoints, patterns mean entries of either.
            exclude: entries to leave out, likewise.
            values: False shows the layout alone, and reads no tensor, but for the tables: a few requests.
            overwrite: replace a file that is there.
            progress: called as ``progress(bytes_done, bytes_total)``.

        Raises what :meth:`read` raises, and StorageError where the file exists or cannot be written.
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
        """The keys that lead to an entry in the state dict that was saved."""
        if fqn not in self._names:
            raise self._no("entry", fqn, self)
        return tuple(self._catalog.root.state_path(fqn).keys)

    def to_xarray(self, group: str = "") -> Any:
        """The arrays below a group (``"model"``, ``"optim.state"``; default: all) as a lazy ``xarray.DataTree``.

        Of a part of a checkpoint, the arrays of that part. Whatever is read is checked. Needs xarray. Raises
        KeyMismatchError for a name that is no group.
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
        """Check that everything of this checkpoint is stored as it was saved; the report names each damaged object.

        Chunks, tables, and the documents of all nodes, which this package reads from the root alone and other Zarr
        readers do not; the claim and the marker, too.

        Args:
            quick: only list: what is missing, or has another size. One request for each 1,000 objects or so, and two
                where arrays are compressed; over HTTP, one request for each object. Otherwise everything is read and
                compared with its checksums, many requests at a time.
            max_inflight_bytes: bound on the memory (default 512 MiB).
            progress: called as ``progress(bytes_done, bytes_total)`` while objects are read.

        Raises CheckpointReplacedError where another save has been committed meanwhile, StorageError. Damage is no
        error: see :meth:`VerifyReport.raise_if_damaged`.
        """
        from zarrckpt._ops.verify import verify

        return verify(self._catalog, quick=quick, max_inflight_bytes=max_inflight_bytes, progress=progress)

    def writers(self, fqn: str) -> np.ndarray[Any, Any]:
        """Which rank wrote each chunk of a tensor: uint32, in the chunk grid's shape. One request for all tensors."""
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
        # Built from the root's consolidated metadata: no request.
        document: Any = copy.deepcopy(node.document())
        return zarr.Array(AsyncArray(document, StorePath(self._zarr_store, node.path)))


def _warn_of_overflow(report: CopyReport | ExportReport) -> None:
    for fqn, count in report.overflowed.items():
        warn(f"{fqn!r}: {count:,} finite values are beyond the range of the dtype now")


def open(
    url: Url,
    *,
    storage_options: Mapping[str, Any] | None = None,
    allow_pickle: bool = False,
) -> Checkpoint:
    """Open a committed checkpoint for reading. One request; torch is not needed.

    Raises CheckpointNotFoundError (saying whether nothing is there or an unfinished save is), ForeignObjectsError,
    UnsupportedFormatError, CorruptCheckpointError.
    """
    spec = StoreSpec(url, storage_options)
    return Checkpoint(Catalog(spec), allow_pickle=allow_pickle)
