"""The root document: the entries of a checkpoint, their paths, and the tables of checksums. No I/O."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass, field, fields
from functools import cached_property
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType

from zarrckpt._errors import UnsupportedValueError
from zarrckpt._format import dtypes, json_values
from zarrckpt._format.documents import ATTRIBUTE, GROUP_DOCUMENT, ArrayNode, join
from zarrckpt._format.grid import Grid
from zarrckpt._format.module_versions import StoredVersions, expand
from zarrckpt._format.sealed import Count, Document, Group, Id, Time
from zarrckpt._format.state_path import DICT, LIST, StatePath
from zarrckpt._format.wire import record

RESERVED_GROUP = "@zarrckpt"
"""The group of the claim, the records, the pins, and one group for each attempt with its marker and tables."""

RUN_GROUP = "@run"
"""The group, in a folder of checkpoints, whose document names the run and the job that continues it."""

CHECKSUMS, WRITERS, SIZES, DIGESTS = "checksums", "writers", "sizes", "digests"
TABLES = (CHECKSUMS, WRITERS, SIZES, DIGESTS)
"""The names of all tables. The last two are optional."""
MAX_POSITION = 1 << 20
"""Upper bound for positions in lists, because readers allocate a list up to its last position.

It does not limit plain lists of values, because they are single entries.
"""
MAX_RANKS = 1 << 20
"""Maximum number of ranks whose tensors one entry stacks. Readers make a list of them, shared by equal stacks."""
MAX_ALL_RANKS = 1 << 22
"""Maximum total length of the different lists of ranks in a root."""
HISTORY = 16
"""Maximum number of save ids in a root's history. It is enough to distinguish a lost answer from a lost race."""

CONVENTION = {
    "uuid": "5b7d4e6c-9370-451d-99bb-c6befbe4ad94",
    "name": ATTRIBUTE,
    "description": "A checkpoint of PyTorch state: entries, their original keys and values, tables of checksums",
}
"""The description of the attribute ``zarrckpt`` in the attribute ``zarr_conventions``."""
CONVENTIONS = json_values.dumps([CONVENTION])

BLOB_KINDS = {"raw": True, "npy": True, "tree": False, "torch": True, "pickle": True}
"""The encodings of blobs, and whether an entry with this encoding has a kind."""


@record
@dataclass(frozen=True)
class BlobEntry:
    """A non-tensor entry that is stored as a uint8 array, and the encoding of its bytes."""

    array: ArrayNode
    encoding: str
    kind: str | None = None


@record
@dataclass(frozen=True)
class ValueEntry:
    """A non-tensor entry that is stored as JSON in the root document."""

    path: str
    json: Any


Entry = ArrayNode | ValueEntry | BlobEntry


class Stack(NamedTuple):
    """The ranks of an entry that stacks the tensors of several ranks."""

    ranks: tuple[int, ...]
    """The ranks in ascending order. Each has one element of the first axis."""
    level: int
    """The index of the entry's key that stands for the number of the rank."""


class Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An array outside the tree (see :func:`table_node`): its number of elements and the crc32c of its bytes."""

    length: Count
    crc32c: Count


@dataclass(frozen=True)
class ReusedChunks:
    """The chunks of a checkpoint that were copied or linked from an earlier checkpoint. They are stored here, too."""

    save_id: str
    """The id of the earlier save."""
    objects: int
    nbytes: int
    saves: int
    """The number of saves since the last one that wrote every chunk."""


class _Reused(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The stored form of :class:`ReusedChunks`."""

    save_id: Id
    objects: Count
    nbytes: Count
    saves: Count


class StoredEntry(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, gc=False):
    """The members of an entry. Those that are present determine its type."""

    path: str
    value: Raw | UnsetType = UNSET
    encoding: str | UnsetType = UNSET
    kind: str | UnsetType = UNSET
    ranks: tuple[tuple[Count, Count], ...] | UnsetType = UNSET
    level: Count | UnsetType = UNSET


class _Tables(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    checksums: Table
    sizes: Table | UnsetType = UNSET
    digests: Table | UnsetType = UNSET


class RootDocument(Document, frozen=True):
    """The attribute ``zarrckpt`` of the root."""

    features: Annotated[tuple[str, ...], Meta(max_length=0)]
    save_id: Id
    history: Annotated[tuple[Id, ...], Meta(max_length=HISTORY)]
    tree: str
    created: Time
    software: dict[str, str]
    world_size: Annotated[int, Meta(ge=1, le=2**63 - 1)]
    entries: dict[str, StoredEntry]
    keys: Raw
    containers: dict[str, Literal["list", "OrderedDict"]]
    tables: _Tables
    optimizers: dict[str, str] | UnsetType = UNSET
    reused: _Reused | UnsetType = UNSET
    versions: dict[str, dict[str, Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None]] | UnsetType = UNSET
    metadata: Raw | UnsetType = UNSET


@dataclass(frozen=True)
class Root:
    """The content of a root document. Paths are relative to ``tree``."""

    save_id: str
    tree: str
    entries: Mapping[str, Entry]
    """Entries by fqn, in the order of the state dict."""
    checksums: Table
    sizes: Table | None = None
    """The table of stored sizes, if an array is compressed."""
    digests: Table | None = None
    """The table of chunk digests, if the save wrote it for later saves that reuse its chunks."""
    reused: ReusedChunks | None = None
    """The chunks that the save reused, or None if it has written all."""
    history: tuple[str, ...] = ()
    created: str = ""
    software: Mapping[str, str] = field(default_factory=dict)
    world_size: int = 1
    keys: Mapping[str, object] = field(default_factory=dict)
    """The original keys by path of an entry or a container, if they differ from the last component of the path."""
    containers: Mapping[str, str] = field(default_factory=dict)
    """Containers by node path, except dicts."""
    stacks: Mapping[str, Stack] = field(default_factory=dict)
    """Stacks by fqn, for entries that stack the tensors of several ranks along the first axis."""
    optimizers: Mapping[str, str] = field(default_factory=dict)
    """The names of the classes of optimizers, by the fqn of the optimizer's state."""
    versions: StoredVersions = field(default_factory=dict)
    """The stored form of :attr:`module_versions`."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """The user's metadata."""

    @cached_property
    def tensors(self) -> dict[str, ArrayNode]:
        """The entries that are tensors."""
        return {fqn: entry for fqn, entry in self.entries.items() if isinstance(entry, ArrayNode)}

    @cached_property
    def non_tensors(self) -> dict[str, ValueEntry | BlobEntry]:
        """The entries that are values or blobs."""
        return {fqn: entry for fqn, entry in self.entries.items() if not isinstance(entry, ArrayNode)}

    @cached_property
    def module_versions(self) -> dict[str, dict[str, int]]:
        """The version of each module by its path, by the flat name of the state dict."""
        return expand(self.versions, self.entries)

    def arrays(self, fqns: Iterable[str] | None = None) -> list[ArrayNode]:
        """Return all arrays of the tree, or those of some entries, sorted by path. The tables have this order."""
        nodes = map(self.array, self.entries if fqns is None else fqns)
        return sorted(node for node in nodes if node is not None)

    def array(self, fqn: str) -> ArrayNode | None:
        """Return the array of a tensor or a blob, or None for a value."""
        entry = self.entries[fqn]
        if isinstance(entry, ValueEntry):
            return None
        return entry.array if isinstance(entry, BlobEntry) else entry

    def node_path(self, fqn: str) -> str:
        """Return the path of an entry, relative to the tree. Values have a path too, but no node."""
        entry = self.entries[fqn]
        return entry.array.path if isinstance(entry, BlobEntry) else entry.path

    def state_path(self, fqn: str) -> StatePath:
        """Return the path of an entry in the state dict. Raises CorruptCheckpointError if its keys do not fit it."""
        if fqn not in self._state_paths:
            self._state_paths[fqn] = self._make_state_path(fqn)
        return self._state_paths[fqn]

    def __getstate__(self) -> dict[str, Any]:
        # Without cached properties.
        return {member.name: getattr(self, member.name) for member in fields(self)}

    @cached_property
    def _state_paths(self) -> dict[str, StatePath]:
        """The cache of :meth:`state_path`, by fqn."""
        return {}

    def _make_state_path(self, fqn: str) -> StatePath:
        names = self.node_path(fqn).split("/")
        paths = [*itertools.accumulate(names, "{}/{}".format)]
        containers = [DICT, *(self.containers.get(path, DICT) for path in paths[:-1])]
        keys = [
            int(name) if container == LIST else self.keys.get(path, name)
            for name, path, container in zip(names, paths, containers, strict=True)
        ]
        return StatePath(keys, containers, *self.stacks.get(fqn, ()))

    def groups(self) -> list[str]:
        """Return the paths of all groups below the root, including the tree's own, relative to the checkpoint's url."""
        inside = [join(self.tree, path) for path in parent_groups(node.path for node in self.arrays())]
        return sorted([self.tree, *inside] if self.tree else inside)

    def documents(self) -> dict[str, bytes]:
        """Return the documents of all nodes below the root by path, sorted. Paths are relative to the url."""
        nodes = dict.fromkeys(self.groups(), GROUP_DOCUMENT)
        nodes |= {join(self.tree, node.path): node.document_bytes() for node in self.arrays()}
        return dict(sorted(nodes.items()))

    def to_bytes(self) -> bytes:
        """Return the stored bytes of the root ``zarr.json``.

        It is a Zarr group with consolidated metadata and the attribute ``zarrckpt``. Raises UnsupportedValueError if
        readers would refuse the number of arrays and objects.
        """
        own = RootDocument(
            (),
            self.save_id,
            self.history,
            self.tree,
            self.created,
            dict(self.software),
            self.world_size,
            {fqn: self._entry_json(fqn, entry) for fqn, entry in self.entries.items()},
            _raw({path: json_values.encode_json(key) for path, key in self.keys.items()}),
            dict(self.containers),  # type: ignore[arg-type]
            _Tables(self.checksums, self.sizes or UNSET, self.digests or UNSET),
            dict(self.optimizers) or UNSET,
            UNSET if self.reused is None else _Reused(*astuple(self.reused)),
            {name: dict(own) for name, own in self.versions.items()} or UNSET,
            _raw(json_values.encode_json(dict(self.metadata))) if self.metadata else UNSET,
        )
        metadata = {path: Raw(document) for path, document in self.documents().items()}
        data = Group.of_root(own, Raw(CONVENTIONS), metadata).to_bytes()
        if json_values.is_dense(data):
            raise UnsupportedValueError(
                f"the values of the state have too many lists and dicts for one document of {len(data):,} bytes. Save "
                "long lists as tensors or NumPy arrays"
            )
        return data

    def _entry_json(self, fqn: str, entry: Entry) -> StoredEntry:
        if isinstance(entry, ValueEntry):
            return StoredEntry(entry.path, value=_raw(entry.json))
        if isinstance(entry, BlobEntry):
            return StoredEntry(
                entry.array.path, encoding=entry.encoding, kind=UNSET if entry.kind is None else entry.kind
            )
        stack = self.stacks.get(fqn)
        return (
            StoredEntry(entry.path)
            if stack is None
            else StoredEntry(entry.path, ranks=spans(stack.ranks), level=stack.level)
        )


def _raw(form: object) -> Raw:
    return Raw(json_values.dumps(form))


def parent_groups(paths: Iterable[str]) -> set[str]:
    """Return the paths of all groups above these node paths, without the empty path."""
    groups: set[str] = set()
    for path in paths:
        parent = path.rpartition("/")[0]
        while parent and parent not in groups:
            groups.add(parent)
            parent = parent.rpartition("/")[0]
    return groups


def table_node(save_id: str, name: str, length: int) -> ArrayNode:
    """Return the array of a table of an attempt. Its path is relative to the checkpoint's url.

    Its elements are uint64 digests of chunks, or uint32.
    """
    dtype = dtypes.by_name("uint64" if name == DIGESTS else "uint32")
    return ArrayNode(join(RESERVED_GROUP, save_id, name), Grid((length,), (max(length, 1),)), dtype)


def spans(ranks: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """Return ascending ranks as half-open spans [begin, end)."""
    found: list[tuple[int, int]] = []
    for rank in ranks:
        begin = found.pop()[0] if found and found[-1][1] == rank else rank
        found.append((begin, rank + 1))
    return tuple(found)
