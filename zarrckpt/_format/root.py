"""The root document: the entries of a checkpoint, their paths, and the tables of checksums. No I/O."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType

from zarrckpt._errors import CorruptCheckpointError, UnsupportedValueError
from zarrckpt._format import dtypes, json_values
from zarrckpt._format.documents import ATTRIBUTE, GROUP_DOCUMENT, ArrayNode, join, parse_node
from zarrckpt._format.grid import Grid
from zarrckpt._format.hashes import MAX_EQUAL_HASHES, hashes_collide
from zarrckpt._format.json_values import MAX_JSON_VALUE
from zarrckpt._format.metadata import parse_metadata
from zarrckpt._format.module_versions import StoredVersions, begins_one, expand
from zarrckpt._format.names import check_paths
from zarrckpt._format.sealed import Count, Document, Group, Id, Time, parse_group
from zarrckpt._format.state_path import DICT, LIST, RANKS, StatePath, is_key, with_shared_nans
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
_ALL_RANKS = 1 << 22
"""Maximum total length of the different lists of ranks in a root."""
HISTORY = 16
"""Maximum number of save ids in a root's history. It is enough to distinguish a lost answer from a lost race."""

CONVENTION = {
    "uuid": "5b7d4e6c-9370-451d-99bb-c6befbe4ad94",
    "name": ATTRIBUTE,
    "description": "A checkpoint of PyTorch state: entries, their original keys and values, tables of checksums",
}
"""The description of the attribute ``zarrckpt`` in the attribute ``zarr_conventions``."""
_CONVENTIONS = json_values.dumps([CONVENTION])

_BLOB_KINDS = {"raw": True, "npy": True, "tree": False, "torch": True, "pickle": True}
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


class ReusedChunks(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The chunks of a checkpoint that were copied or linked from an earlier checkpoint. They are stored here, too."""

    save_id: Id
    """The id of the earlier save."""
    objects: Count
    nbytes: Count
    saves: Count
    """The number of saves since the last one that wrote every chunk."""


class _Entry(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, gc=False):
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


class _Own(Document, frozen=True):
    """The attribute ``zarrckpt`` of the root."""

    features: Annotated[tuple[str, ...], Meta(max_length=0)]
    save_id: Id
    history: Annotated[tuple[Id, ...], Meta(max_length=HISTORY)]
    tree: str
    created: Time
    software: dict[str, str]
    world_size: Annotated[int, Meta(ge=1, le=2**63 - 1)]
    entries: dict[str, _Entry]
    keys: Raw
    containers: dict[str, Literal["list", "OrderedDict"]]
    tables: _Tables
    optimizers: dict[str, str] | UnsetType = UNSET
    reused: ReusedChunks | UnsetType = UNSET
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
        own = _Own(
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
            self.reused or UNSET,
            {name: dict(own) for name, own in self.versions.items()} or UNSET,
            _raw(json_values.encode_json(dict(self.metadata))) if self.metadata else UNSET,
        )
        metadata = {path: Raw(document) for path, document in self.documents().items()}
        data = Group.of_root(own, Raw(_CONVENTIONS), metadata).to_bytes()
        if json_values.is_dense(data):
            raise UnsupportedValueError(
                f"the values of the state have too many lists and dicts for one document of {len(data):,} bytes. Save "
                "long lists as tensors or NumPy arrays"
            )
        return data

    def _entry_json(self, fqn: str, entry: Entry) -> _Entry:
        if isinstance(entry, ValueEntry):
            return _Entry(entry.path, value=_raw(entry.json))
        if isinstance(entry, BlobEntry):
            return _Entry(entry.array.path, encoding=entry.encoding, kind=UNSET if entry.kind is None else entry.kind)
        stack = self.stacks.get(fqn)
        return _Entry(entry.path) if stack is None else _Entry(entry.path, ranks=spans(stack.ranks), level=stack.level)


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


def parse_root(data: bytes, where: str) -> Root:
    """Return the validated content of a stored root document. ``where`` is its name in errors.

    Raises ForeignObjectsError, UnsupportedFormatError, or CorruptCheckpointError if anything is inconsistent. Allocates
    no memory of a size from the document before the size is checked.
    """
    group = parse_group(_Own, data, where)
    try:
        return _root_of(group)
    except (CorruptCheckpointError, ValueError) as err:
        raise CorruptCheckpointError(f"{where}: {err}") from err


def _root_of(group: Group[_Own]) -> Root:
    """Return the root for its documents, whose members have the declared types. Raises ValueError."""
    own, conventions, consolidated = (
        group.attributes.zarrckpt,
        group.attributes.zarr_conventions,
        group.consolidated_metadata,
    )
    if conventions is not UNSET and bytes(conventions) != _CONVENTIONS:
        json_values.loads(bytes(conventions))  # ignored, but no JSON has a member twice
    if consolidated is UNSET or consolidated.must_understand:
        raise ValueError("it has no inline consolidated metadata")
    if own.tree not in ("", f"@{own.save_id}"):
        raise ValueError(f"tree is {own.tree!r:.80}, expected '' or '@' and its save id")
    paths = [entry.path for entry in own.entries.values()]
    check_paths(paths, "entries")
    groups = parent_groups(paths)
    if len({*paths}) != len(paths) or not groups.isdisjoint(paths):
        raise ValueError("two entries have one path, or the path of an entry is that of a container of others")
    if empty := sorted(own.containers.keys() - groups):
        raise ValueError(f"the container {empty[0]!r:.200} has no entry")
    keys = _parse_keys(own, paths, groups)
    nodes = _parse_nodes(consolidated.metadata, own)
    entries, stacks = _parse_entries(own, nodes, keys)
    versions = {} if own.versions is UNSET else own.versions
    ascending = sorted(own.entries) if versions else ()
    if odd := [name for name in versions if not begins_one(name, ascending)]:
        raise ValueError(f"versions of {odd[0]!r:.200}, which has no entries")
    return Root(
        save_id=own.save_id,
        tree=own.tree,
        entries=entries,
        checksums=own.tables.checksums,
        sizes=own.tables.sizes or None,
        digests=own.tables.digests or None,
        reused=own.reused or None,
        history=own.history,
        created=own.created,
        software=own.software,
        world_size=own.world_size,
        keys=keys,
        containers=own.containers,
        stacks=stacks,
        optimizers=own.optimizers or {},
        versions=versions,
        metadata={} if own.metadata is UNSET else parse_metadata(json_values.loads(bytes(own.metadata))),
    )


def _parse_keys(own: _Own, paths: list[str], groups: set[str]) -> dict[str, object]:
    """Return the keys that differ from components of paths. Check that entries have different keys, and their fqns."""
    forms = json_values.loads(bytes(own.keys))
    if not isinstance(forms, dict) or not forms.keys() <= groups.union(paths):
        raise ValueError("keys is not an object with the paths of entries and containers")
    keys = {path: with_shared_nans(json_values.decode_json(form)) for path, form in forms.items()}
    if not all(map(is_key, keys.values())):
        raise ValueError("keys has other values than possible keys of dicts")
    lists = {path for path, kind in own.containers.items() if kind == LIST}
    if lists:
        parts = [path.rpartition("/") for path in itertools.chain(paths, groups)]
        positions = [name for parent, _, name in parts if parent in lists]
        if not _POSITIONS.fullmatch("\n".join(positions)) or max(map(int, positions)) >= MAX_POSITION:
            raise ValueError(f"a list has other keys than integers from 0 to {MAX_POSITION - 1}")
        if odd := [path for path in keys if path.rpartition("/")[0] in lists]:
            raise ValueError(f"keys has {odd[0]!r:.200}, which is in a list")
    if not keys:
        names = "\n".join(paths).replace("/", ".").split("\n") if paths else []
    else:
        found: dict[str, tuple[object, ...]] = {"": ()}
        for path in (*sorted(groups), *paths):
            parent, _, name = path.rpartition("/")
            found[path] = (*found[parent], keys.get(path, name))
        if hashes_collide(found.values()):
            raise ValueError(f"it has more than {MAX_EQUAL_HASHES} keys with the same hash")
        if len({*found.values()}) != len(found):
            raise ValueError("two entries or containers have equal keys")
        names = [".".join(map(str, found[path])) for path in paths]
    if names != [*own.entries]:
        odd = [name for name, fqn in zip(names, own.entries, strict=True) if name != fqn]
        raise ValueError(f"an entry has the keys of another name, {odd[0]!r:.200}")
    return keys


_POSITIONS = re.compile(r"(?:0|[1-9][0-9]{0,8})(?:\n(?:0|[1-9][0-9]{0,8}))*+")


def _parse_nodes(metadata: Mapping[str, Raw], own: _Own) -> dict[str, ArrayNode]:
    """Return the arrays of the consolidated metadata by path relative to the tree. Check the lengths of the tables.

    Equal documents are parsed once, because many layers have them.
    """
    documents = [*map(bytes, metadata.values())]
    forms: dict[bytes, ArrayNode | None] = {}
    for path, document in zip(metadata, documents, strict=True):
        if document not in forms:
            forms[document] = parse_node(path, document)
    lengths = {name: 0 for name in (CHECKSUMS, DIGESTS) if getattr(own.tables, name)}
    for document, count in Counter(documents).items():
        if (form := forms[document]) is not None:
            lengths[CHECKSUMS] += count * form.grid.num_subchunks
            if DIGESTS in lengths:
                lengths[DIGESTS] += count * form.grid.num_chunks
            if form.compression is not None:
                lengths[SIZES] = lengths.get(SIZES, 0) + count * form.grid.num_subchunks
    for name in (CHECKSUMS, SIZES, DIGESTS):
        table = getattr(own.tables, name) or None
        if (found := table and table.length) != lengths.get(name):
            raise ValueError(f"the length of table {name!r} is {found}, expected {lengths.get(name)}")
        if table and table.length == 0 != table.crc32c:
            raise ValueError(f"the crc32c of table {name!r} is {table.crc32c}, expected 0 for an empty table")
    pairs = [(path, forms[document]) for path, document in zip(metadata, documents, strict=True)]
    prefix = f"{own.tree}/" if own.tree else ""
    if odd := [path for path, form in pairs if form is not None and not path.startswith(prefix)] if prefix else []:
        raise ValueError(f"array {odd[0]!r:.200} is outside the tree {own.tree!r}")
    begin = len(prefix)
    nodes = {path[begin:]: ArrayNode(path[begin:], *form[1:]) for path, form in pairs if form is not None}
    expected = {join(own.tree, path) for path in parent_groups(nodes)} | ({own.tree} if own.tree else set())
    if odd := sorted(expected.symmetric_difference([path for path, form in pairs if form is None])):
        raise ValueError(f"groups and arrays do not match, e.g. {odd[:3]!r:.200}")
    return nodes


def _parse_entries(
    own: _Own, nodes: Mapping[str, ArrayNode], keys: Mapping[str, object]
) -> tuple[dict[str, Entry], dict[str, Stack]]:
    """Return the entries and the stacks. Each array belongs to exactly one entry, because paths are unique."""
    entries: dict[str, Entry] = {}
    stacks: dict[str, Stack] = {}
    ranks_of: dict[Any, tuple[int, ...]] = {}
    for fqn, entry in own.entries.items():
        path, encoding, kind, level = entry.path, entry.encoding, entry.kind, entry.level
        is_tensor = encoding is UNSET and kind is UNSET
        if entry.value is not UNSET:
            if not (is_tensor and entry.ranks is UNSET and level is UNSET):
                raise _entry_error(fqn, "a value and other members")
            entries[fqn] = ValueEntry(path, _parse_value(fqn, entry.value))
        elif path not in nodes:
            raise _entry_error(fqn, f"the path {path!r:.200}, which no array has")
        elif not is_tensor:
            node, own_kind = nodes[path], None if kind is UNSET else kind
            if _BLOB_KINDS.get(encoding or "") is not (own_kind is not None) or not entry.ranks is level is UNSET:
                raise _entry_error(fqn, f"expected an encoding of {(*_BLOB_KINDS,)} and, except for tree, a kind")
            if node.dtype.name != "uint8" or len(node.grid.shape) != 1:
                raise _entry_error(fqn, f"an array of {node.dtype.name}, expected one dimension of uint8 for a blob")
            entries[fqn] = BlobEntry(node, encoding or "", own_kind)
        elif entry.ranks is level is UNSET:
            entries[fqn] = nodes[path]
        else:
            entries[fqn] = nodes[path]
            stacks[fqn] = _parse_stack(fqn, entry, nodes[path], keys, ranks_of)
    if len(entries) - sum(entry.value is not UNSET for entry in own.entries.values()) != len(nodes):
        odd = sorted({*nodes}.difference(entry.path for entry in own.entries.values() if entry.value is UNSET))
        raise ValueError(f"arrays and entries do not match, e.g. {odd[:3]!r:.200}")
    return entries, stacks


def _parse_value(fqn: str, stored: Raw) -> object:
    value = json_values.loads(bytes(stored))
    if not json_values.is_bounded(value):
        levels = json_values.MAX_LEVELS
        raise _entry_error(fqn, f"a value of more than {levels} levels, or with numbers beyond the range of floats")
    if isinstance(value, dict | list | str) and (size := json_values.json_size(value)) > MAX_JSON_VALUE:
        raise _entry_error(fqn, f"a value of {size:,} bytes, expected at most {MAX_JSON_VALUE:,} bytes of JSON")
    return value


def _parse_stack(
    fqn: str, entry: _Entry, node: ArrayNode, keys: Mapping[str, object], ranks_of: dict[Any, tuple[int, ...]]
) -> Stack:
    """Return the ranks of a stack. ``ranks_of`` has those of the stacks before, because many are equal."""
    spans, level, names = entry.ranks or (), entry.level, entry.path.split("/")
    ends = [-1, *(end for _, end in spans)]
    count = sum(end - begin for begin, end in spans)
    # Checked before the list is allocated, because a damaged document can have any numbers.
    if not all(before < begin < end for before, (begin, end) in zip(ends, spans, strict=False)):
        raise _entry_error(
            fqn, f"the ranks {spans!r:.80}, expected ascending spans [begin, end) with gaps between them"
        )
    if not 0 < count <= MAX_RANKS or node.grid.shape[:1] != (count,):
        raise _entry_error(fqn, f"{count} ranks, expected {node.grid.shape[:1]}, and at most {MAX_RANKS}")
    if level is UNSET or level >= len(names) or keys.get("/".join(names[: level + 1]), names[level]) != RANKS:
        raise _entry_error(fqn, f"the level {level}, expected that of its key {RANKS!r}")
    if spans not in ranks_of:
        if count + sum(map(len, ranks_of.values())) > _ALL_RANKS:
            raise _entry_error(fqn, f"{count} ranks, expected at most {_ALL_RANKS} ranks in all stacks")
        ranks_of[spans] = tuple(itertools.chain.from_iterable(itertools.starmap(range, spans)))
    return Stack(ranks_of[spans], level)


def _entry_error(fqn: str, fault: str) -> ValueError:
    return ValueError(f"entry {fqn!r:.200} has {fault}")
