"""The root document: the entries of a checkpoint, their paths, and the tables of checksums. No I/O."""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from typing import Any, NamedTuple

from zarrckpt._errors import CorruptCheckpointError
from zarrckpt._format import dtypes, json_values
from zarrckpt._format import names as _names
from zarrckpt._format.documents import ATTRIBUTE, ArrayNode, Json, group_document, join, parse_array, same_json
from zarrckpt._format.grid import Grid, Ints
from zarrckpt._format.json_values import MAX_JSON_VALUE
from zarrckpt._format.levels import Levels
from zarrckpt._format.metadata import parse_metadata
from zarrckpt._format.module_versions import StoredVersions, expand, parse_versions
from zarrckpt._format.sealed import Members, nesting_bounded, parse_strictly, sealed_bytes
from zarrckpt._format.state_path import DICT, LIST, ORDERED_DICT, RANKS, StatePath, is_key, with_shared_nans
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


@dataclass(frozen=True)
class Table:
    """An array outside the tree (see :func:`table_node`): its number of elements and the crc32c of its bytes."""

    length: int
    crc32c: int


@dataclass(frozen=True)
class ReusedChunks:
    """The chunks of a checkpoint that were copied or linked from an earlier checkpoint. They are stored here, too."""

    save_id: str
    """The id of the earlier save."""
    objects: int
    nbytes: int
    saves: int
    """The number of saves since the last one that wrote every chunk."""


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
    keys: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    """The original keys by fqn, for entries whose keys differ from the components of the path."""
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
        return sorted((node for node in nodes if node is not None), key=lambda node: node.path)

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
        containers = [self.containers.get("/".join(names[:depth]), DICT) for depth in range(len(names))]
        keys: list[object] = list(self.keys.get(fqn, names))
        if len(keys) != len(names):
            raise CorruptCheckpointError(
                f"entry {fqn!r:.200} has {len(keys)} keys, expected {len(names)} for the path {names!r:.200}"
            )
        for depth, container in enumerate(containers):
            if container == LIST:
                keys[depth] = _position(keys[depth], fqn)
        stack = self.stacks.get(fqn)
        if stack is not None and keys[stack.level] != RANKS:
            raise CorruptCheckpointError(f"entry {fqn!r:.200} has no key {RANKS!r} at level {stack.level}")
        return StatePath([*map(with_shared_nans, keys)], containers, *(stack or ()))

    def groups(self) -> list[str]:
        """Return the paths of all groups below the root, including the tree's own, relative to the checkpoint's url."""
        inside = [join(self.tree, path) for path in parent_groups(node.path for node in self.arrays())]
        return sorted([self.tree, *inside] if self.tree else inside)

    def documents(self) -> dict[str, Json]:
        """Return the documents of all nodes below the root by path, sorted. Paths are relative to the url."""
        nodes: dict[str, Json] = {path: group_document() for path in self.groups()}
        nodes |= {join(self.tree, node.path): node.document() for node in self.arrays()}
        return dict(sorted(nodes.items()))

    def to_bytes(self) -> bytes:
        """Return the stored bytes of the root ``zarr.json``.

        It is a Zarr group with consolidated metadata and the attribute ``zarrckpt``.
        """
        tables = {CHECKSUMS: self.checksums, SIZES: self.sizes, DIGESTS: self.digests}
        members: Json = {
            "features": [],
            "save_id": self.save_id,
            "history": list(self.history),
            "tree": self.tree,
            "created": self.created,
            "software": dict(self.software),
            "world_size": self.world_size,
            "entries": {fqn: self._entry_json(fqn, entry) for fqn, entry in self.entries.items()},
            "keys": {fqn: [json_values.encode_json(key) for key in keys] for fqn, keys in self.keys.items()},
            "containers": dict(self.containers),
            "tables": {name: asdict(table) for name, table in tables.items() if table is not None},
        }
        if self.optimizers:
            members["optimizers"] = dict(self.optimizers)
        if self.reused is not None:
            members["reused"] = asdict(self.reused)
        if self.versions:
            members["versions"] = {name: dict(own) for name, own in self.versions.items()}
        if self.metadata:
            members["metadata"] = json_values.encode_json(dict(self.metadata))
        consolidated = {"kind": "inline", "must_understand": False, "metadata": self.documents()}
        return sealed_bytes(members, {"zarr_conventions": [CONVENTION]}, {"consolidated_metadata": consolidated})

    def _entry_json(self, fqn: str, entry: Entry) -> Json:
        if isinstance(entry, ValueEntry):
            return {"path": entry.path, "value": entry.json}
        if isinstance(entry, BlobEntry):
            kind = {} if entry.kind is None else {"kind": entry.kind}
            return {"path": entry.array.path, "encoding": entry.encoding, **kind}
        stack = self.stacks.get(fqn)
        return {"path": entry.path} | ({} if stack is None else {"ranks": spans(stack.ranks), "level": stack.level})


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


def spans(ranks: Iterable[int]) -> list[list[int]]:
    """Return ascending ranks as half-open spans [begin, end)."""
    found: list[list[int]] = []
    for rank in ranks:
        if found and found[-1][1] == rank:
            found[-1][1] = rank + 1
        else:
            found.append([rank, rank + 1])
    return found


@nesting_bounded
def parse_root(data: bytes, where: str) -> Root:
    """Return the validated content of a stored root document. ``where`` is its name in errors.

    Raises ForeignObjectsError, UnsupportedFormatError, or CorruptCheckpointError if anything is inconsistent. Allocates
    no memory of a size from the document before the size is checked.
    """
    document, own = parse_strictly(data, where)
    members = Members(own, where)
    members.sequence("features")
    save_id, tree = members.save_id("save_id"), members.text("tree")
    if tree and tree != f"@{save_id}":
        raise members.fail("tree", tree, "'' or '@' and its save id")
    history = members.sequence("history")
    if len(history) > HISTORY:
        raise members.fail("history", f"a list of {len(history)}", f"at most {HISTORY} save ids")
    software = members.mapping("software")
    if not all(isinstance(version, str) for version in software.values()):
        raise members.fail("software", software, "an object of strings")
    containers = members.mapping("containers")
    for path, kind in containers.items():
        if kind not in (LIST, ORDERED_DICT):
            raise members.fail(f"container {path!r:.200}", kind, f"{LIST!r} or {ORDERED_DICT!r}")
    optimizers = members.mapping("optimizers") if "optimizers" in members.own else {}
    if not all(isinstance(name, str) for name in optimizers.values()):
        raise members.fail("optimizers", optimizers, "an object of strings")
    nodes = _consolidated(document, tree, where)
    parsed = _Entries(members, nodes)
    root = Root(
        save_id=save_id,
        tree=tree,
        entries={fqn: parsed.entry(fqn, entry) for fqn, entry in members.mapping("entries").items()},
        history=tuple(members.as_save_id("history", one) for one in history),
        created=members.time("created"),
        software=software,
        world_size=members.count("world_size", 1),
        keys={fqn: parsed.keys(fqn, keys) for fqn, keys in members.mapping("keys").items()},
        containers=containers,
        stacks=parsed.stacks,
        optimizers=optimizers,
        versions=parse_versions(members, members.mapping("entries")),
        metadata=parse_metadata(members.own.get("metadata", {}), where),
        reused=_reused(members),
        **_tables(members, nodes.values()),
    )
    _check_consistency(root, nodes, where)
    return root


def _consolidated(document: Json, tree: str, where: str) -> dict[str, ArrayNode]:
    """Return the arrays of the consolidated metadata by path relative to the tree.

    Raises CorruptCheckpointError if the metadata has other nodes than these arrays and the groups above them.
    """
    consolidated = document.get("consolidated_metadata")
    metadata = consolidated.pop("metadata", None) if isinstance(consolidated, dict) else None
    if not isinstance(metadata, dict) or not same_json(consolidated, {"kind": "inline", "must_understand": False}):
        raise CorruptCheckpointError(f"{where} has no inline consolidated metadata")
    nodes: dict[str, ArrayNode] = {}
    forms: dict[bytes, ArrayNode] = {}
    groups = set()
    prefix = f"{tree}/" if tree else ""
    for path, node in metadata.items():
        if same_json(node, group_document()):
            groups.add(path)
        elif not isinstance(node, dict) or node.get("node_type") != "array":
            raise CorruptCheckpointError(f"{where}: node {path!r:.200} is neither a plain group nor an array")
        elif not path.startswith(prefix):
            raise CorruptCheckpointError(f"{where}: array {path!r:.200} is outside the tree {tree!r}")
        else:
            relative, form = path.removeprefix(prefix), pickle.dumps(node, 5)
            # Parsed once for all arrays with this document, because many layers have equal documents.
            known = forms.get(form) or forms.setdefault(form, parse_array(relative, node))
            nodes[relative] = known.at(relative)
    _names.check_paths(nodes, where)
    expected = {join(tree, path) for path in parent_groups(nodes)} | ({tree} if tree else set())
    if groups != expected:
        odd = sorted(groups ^ expected)
        raise CorruptCheckpointError(f"{where}: groups and arrays do not match, e.g. {odd[:3]!r:.200}")
    return nodes


def _reused(members: Members) -> ReusedChunks | None:
    if "reused" not in members.own:
        return None
    reused = Members(members.mapping("reused"), f"{members.where}: reused")
    reused.exactly("save_id", "objects", "nbytes", "saves")
    numbers = {name: reused.count(name) for name in ("objects", "nbytes", "saves")}
    return ReusedChunks(save_id=reused.save_id("save_id"), **numbers)


def _tables(members: Members, nodes: Iterable[ArrayNode]) -> dict[str, Table]:
    """Return the tables. Each must have the number of elements that the arrays require."""
    lengths: dict[str, int] = {CHECKSUMS: 0}
    if DIGESTS in members.mapping("tables"):
        lengths[DIGESTS] = 0
    for node in nodes:
        lengths[CHECKSUMS] += node.grid.num_subchunks
        if DIGESTS in lengths:
            lengths[DIGESTS] += node.grid.num_chunks
        if node.compression is not None:
            lengths[SIZES] = lengths.get(SIZES, 0) + node.grid.num_subchunks
    entries = members.mapping("tables")
    if entries.keys() != lengths.keys():
        raise members.fail("tables", sorted(entries), f"exactly {sorted(lengths)}")
    tables = {}
    for name, expected in lengths.items():
        if not isinstance(entries[name], dict):
            raise members.fail(f"table {name!r}", entries[name], "an object")
        table = Members(entries[name], f"{members.where}: table {name!r}")
        table.exactly("length", "crc32c")
        tables[name] = Table(table.count("length"), table.count("crc32c"))
        if tables[name].length != expected:
            raise members.fail(f"the length of table {name!r}", tables[name].length, str(expected))
        if expected == 0 != tables[name].crc32c:
            raise members.fail(f"the crc32c of table {name!r}", tables[name].crc32c, "0 for an empty table")
    return tables


class _Entries:
    """Parses and checks the entries of a root document and their keys."""

    def __init__(self, members: Members, nodes: Mapping[str, ArrayNode]) -> None:
        self._members = members
        self._nodes = nodes
        self.stacks: dict[str, Stack] = {}
        self._ranks_of: dict[str, tuple[int, ...]] = {}
        self._all_ranks = 0
        """The total length of the lists in ``_ranks_of``."""

    def entry(self, fqn: str, entry: Any) -> Entry:
        """Return the entry for its JSON object. The names of the members determine its type."""
        if not isinstance(entry, dict) or not isinstance(entry.get("path"), str):
            raise self._fail(fqn, entry, "an object with a path")
        path, names = entry["path"], entry.keys()
        if names == {"path", "value"}:
            _names.check_paths([path], self._members.where)
            value = entry["value"]
            if not json_values.is_bounded(value):
                levels = f"at most {json_values.MAX_LEVELS} levels, and numbers in the range of floats"
                raise self._fail(fqn, f"a value of type {type(value).__name__}", levels)
            if isinstance(value, dict | list | str) and (size := json_values.json_size(value)) > MAX_JSON_VALUE:
                raise self._fail(fqn, f"a value of {size:,} bytes", f"at most {MAX_JSON_VALUE:,} bytes of JSON")
            return ValueEntry(path, value)
        if path not in self._nodes:
            raise self._fail(fqn, path, "the path of an array of the consolidated metadata")
        if "encoding" in names:
            return self._blob(fqn, entry)
        if names == {"path", "ranks", "level"}:
            self.stacks[fqn] = Stack(self._ranks(fqn, entry["ranks"], self._nodes[path].grid.shape), entry["level"])
            if type(entry["level"]) is not int or not 0 <= entry["level"] <= path.count("/"):
                raise self._fail(fqn, entry["level"], "the index of one of its keys as level")
        elif names != {"path"}:
            raise self._fail(fqn, sorted(names), "the members of a tensor, a value or a blob")
        return self._nodes[path]

    def _blob(self, fqn: str, entry: Json) -> BlobEntry:
        node, encoding, kind = self._nodes[entry["path"]], entry["encoding"], entry.get("kind")
        known = isinstance(encoding, str) and encoding in _BLOB_KINDS
        expected = {"path", "encoding", "kind"} if known and _BLOB_KINDS[encoding] else {"path", "encoding"}
        if not known or entry.keys() != expected or not isinstance(entry.get("kind", ""), str):
            raise self._fail(fqn, entry, f"a path, an encoding of {(*_BLOB_KINDS,)}, and, except for tree, a kind")
        if node.dtype.name != "uint8" or len(node.grid.shape) != 1:
            raise self._fail(fqn, node.dtype.name, "one dimension of uint8 for a blob")
        return BlobEntry(node, encoding, kind)

    def _ranks(self, fqn: str, found: Any, shape: Ints) -> tuple[int, ...]:
        """Return the ranks whose tensors are stacked in the array of an entry."""
        count, end = 0, -1
        for span in found if isinstance(found, list) else [None]:
            pair = span if isinstance(span, list) and len(span) == 2 else (-1, -1)
            if not all(type(number) is int for number in pair) or not end < pair[0] < pair[1] < 2**63:
                raise self._fail(fqn, found, "ascending spans of ranks [begin, end) with gaps between them")
            count, end = count + pair[1] - pair[0], pair[1]
        # Checked before the list is allocated, because a damaged document can have any numbers.
        if not 0 < count <= MAX_RANKS or shape[:1] != (count,):
            raise self._fail(fqn, found, f"{shape[:1]} ranks, the length of the first axis, and at most {MAX_RANKS}")
        if (text := repr(found)) not in self._ranks_of:
            self._all_ranks += count
            if self._all_ranks > _ALL_RANKS:
                raise self._fail(fqn, found, f"at most {_ALL_RANKS} ranks in all stacks")
            self._ranks_of[text] = tuple(rank for begin, end in found for rank in range(begin, end))
        return self._ranks_of[text]

    def keys(self, fqn: str, keys: Any) -> tuple[object, ...]:
        """Return the original keys of an entry."""
        if fqn not in self._members.mapping("entries") or not isinstance(keys, list):
            raise self._members.fail(f"the keys of {fqn!r:.200}", keys, "a list for an existing entry")
        try:
            found = tuple(map(json_values.decode_json, keys))
        except CorruptCheckpointError as err:
            raise self._members.fail(f"the keys of {fqn!r:.200}", keys, f"values ({err})") from err
        if not all(map(is_key, found)):
            raise self._members.fail(f"the keys of {fqn!r:.200}", keys, "possible keys of dicts")
        return found

    def _fail(self, fqn: str, found: object, expected: str) -> CorruptCheckpointError:
        return self._members.fail(f"entry {fqn!r:.200}", found, expected)


def _check_consistency(root: Root, nodes: Mapping[str, ArrayNode], where: str) -> None:
    """Check that arrays and entries match, and that the entries form one nested state."""
    used = [node.path for node in root.arrays()]
    if sorted(nodes) != used:
        odd = sorted({*nodes} ^ {*used})
        raise CorruptCheckpointError(f"{where}: arrays and entries do not match, e.g. {odd[:3]}")
    levels = Levels(where)
    for fqn in root.entries:
        try:
            path = root.state_path(fqn)
        except CorruptCheckpointError as err:
            raise CorruptCheckpointError(f"{where}: {err}") from err
        levels.add(fqn, path, root.node_path(fqn).split("/"))
    empty = sorted(root.containers.keys() - levels.containers)
    if empty:
        raise CorruptCheckpointError(f"{where}: the container {empty[0]!r:.200} has no entry")


def _position(key: object, fqn: str) -> int:
    is_number = type(key) is int or (isinstance(key, str) and re.fullmatch("0|[1-9][0-9]{0,8}", key))
    if is_number and 0 <= (found := int(str(key))) < MAX_POSITION:
        return found
    raise CorruptCheckpointError(
        f"entry {fqn!r:.200} has the key {key!r:.40} in a list, expected an integer from 0 to {MAX_POSITION - 1}"
    )
