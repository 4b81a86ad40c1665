"""The root document: what a checkpoint holds, where, and the proof that it is complete.

Also the claim and the marker of an attempt. Models only: parse, validate, emit; no I/O.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, wraps
from typing import Any, TypeVar

from zarrckpt import _dtypes, _names, _values
from zarrckpt._crc32c import crc32c
from zarrckpt._documents import ATTRIBUTE, NODE, ArrayNode, Json, dumps, group_document, join, loads, parse_array
from zarrckpt._errors import CorruptCheckpointError, ForeignObjectsError, KeyMismatchError, UnsupportedFormatError
from zarrckpt._grid import Grid
from zarrckpt._state_path import CONTAINERS, DICT, LIST, StatePath

T = TypeVar("T")

FORMAT = 1
HOUSE = "@zarrckpt"
"""The group that holds the claim, and a group for each attempt: its marker and its tables."""

CHECKSUMS, WRITERS, SIZES = "checksums", "writers", "sizes"
REMOVED = "removed"
"""The group beside those of the attempts whose document records that everything at the url is being removed."""
MAX_POSITION = 1 << 20
"""Positions in lists are below: who rebuilds a list makes room up to the last one. Flat lists of values are values."""
PROBE = "probe-"
"""How the names of objects in the house begin on which a store's conditional puts are tried."""
HISTORY = 16
"""Save ids that a root remembers: enough to tell a lost answer from a lost race."""

_ID = re.compile(r"[0-9a-f]{32}")
_SEAL = b'{"zarr_format":3,"node_type":"group","attributes":{"zarrckpt":{"crc32c":"'
"""How the bytes of root, claim and markers begin; the 8 digits of their own checksum follow."""
_UNSEALED = "00000000"
_BLOB_ENCODINGS = ("raw", "json", "npy", "torch", "tree", "pickle")


@dataclass(frozen=True)
class BlobEntry:
    """A non-tensor entry kept as a uint8 array, and how its bytes are to be understood."""

    array: ArrayNode
    encoding: str
    kind: str | None = None


@dataclass(frozen=True)
class ValueEntry:
    """A non-tensor entry kept as JSON in the root document."""

    path: str
    json: Any


@dataclass(frozen=True)
class Table:
    """A uint32 array beside the tree: its number of elements and the crc32c of its bytes."""

    length: int
    crc32c: int


@dataclass(frozen=True)
class Root:
    """Everything that the root document says. Paths are relative to ``tree``."""

    save_id: str
    tree: str
    entries: Mapping[str, ArrayNode | ValueEntry | BlobEntry]
    """fqn -> what it is, in the order of the state dict."""
    checksums: Table
    writers: Table
    sizes: Table | None = None
    """Only where an array is compressed."""
    history: tuple[str, ...] = ()
    created: str = ""
    software: Mapping[str, str] = field(default_factory=dict)
    world_size: int = 1
    keys: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    """fqn -> the original keys, where they are not the strings that the path spells."""
    containers: Mapping[str, str] = field(default_factory=dict)
    """node path -> the container there, where it is not a dict."""

    @cached_property
    def tensors(self) -> dict[str, ArrayNode]:
        """The entries that are arrays."""
        return {fqn: entry for fqn, entry in self.entries.items() if isinstance(entry, ArrayNode)}

    @cached_property
    def objects(self) -> dict[str, ValueEntry | BlobEntry]:
        """The entries that are Python objects."""
        return {fqn: entry for fqn, entry in self.entries.items() if not isinstance(entry, ArrayNode)}

    def arrays(self, fqns: Iterable[str] | None = None) -> list[ArrayNode]:
        """Every array of the tree, or of some entries, sorted by path: the order of the tables."""
        nodes = map(self.array, self.entries if fqns is None else fqns)
        return sorted((node for node in nodes if node is not None), key=lambda node: node.path)

    def array(self, fqn: str) -> ArrayNode | None:
        """The array that holds an entry, a tensor or a blob; None for a value."""
        entry = self.entries[fqn]
        if isinstance(entry, ValueEntry):
            return None
        return entry.array if isinstance(entry, BlobEntry) else entry

    def marker(self) -> Marker:
        """What the save's own marker says, as far as the root knows it."""
        arrays = tuple(node.path for node in self.arrays())
        return Marker(self.save_id, self.tree, arrays, tuple(sorted(parent_groups(arrays))), self.created)

    def node_path(self, fqn: str) -> str:
        """An entry's path, relative to the tree; values have one too, though no node."""
        entry = self.entries[fqn]
        return entry.array.path if isinstance(entry, BlobEntry) else entry.path

    def state_path(self, fqn: str) -> StatePath:
        """Where an entry sits in the state dict."""
        names = self.node_path(fqn).split("/")
        containers = [self.containers.get("/".join(names[:depth]), DICT) for depth in range(len(names))]
        keys: list[object] = list(self.keys.get(fqn, map(_names.unescape, names)))
        if len(keys) != len(names):
            raise CorruptCheckpointError(f"entry {fqn!r:.200} has {len(keys)} keys for the path {names!r:.200}")
        for depth, container in enumerate(containers):
            if container == LIST:
                keys[depth] = _position(keys[depth], fqn)
        return StatePath(keys, containers)

    def group_path(self, name: str) -> str:
        """The node path of the group with a flat name. Raises KeyMismatchError where no array is below such a group."""
        for fqn, entry in self.entries.items():
            if fqn.startswith(f"{name}.") and not isinstance(entry, ValueEntry):
                keys = self.state_path(fqn).keys
                for depth in range(1, len(keys)):
                    if ".".join(map(str, keys[:depth])) == name:
                        return "/".join(self.node_path(fqn).split("/")[:depth])
        raise KeyMismatchError(f"no group {name!r} with arrays below it")

    def document(self) -> Json:
        """The root ``zarr.json``: a Zarr group with inline consolidated metadata and our one attribute."""
        own: Json = {
            "crc32c": _UNSEALED,
            "format": FORMAT,
            "features": [],
            "save_id": self.save_id,
            "history": list(self.history),
            "tree": self.tree,
            "created": self.created,
            "software": dict(self.software),
            "world_size": self.world_size,
            "entries": {fqn: _entry_json(entry) for fqn, entry in self.entries.items()},
            "keys": {fqn: [_values.encode_json(key) for key in keys] for fqn, keys in self.keys.items()},
            "containers": dict(self.containers),
            "tables": {
                name: {"length": table.length, "crc32c": table.crc32c}
                for name, table in ((CHECKSUMS, self.checksums), (WRITERS, self.writers), (SIZES, self.sizes))
                if table is not None
            },
        }
        nodes: Json = {path: group_document() for path in self.groups()}
        nodes |= {join(self.tree, node.path): node.document() for node in self.arrays()}
        consolidated = {"kind": "inline", "must_understand": False, "metadata": dict(sorted(nodes.items()))}
        return group_document({ATTRIBUTE: own}) | {"consolidated_metadata": consolidated}

    def to_bytes(self) -> bytes:
        """The root ``zarr.json`` as it is stored, with its own checksum filled in."""
        return _sealed(self.document())

    def groups(self) -> list[str]:
        """Paths, from the checkpoint's url, of all groups below the root, the tree's own included."""
        found = parent_groups(node.path for node in self.arrays())
        inside = [join(self.tree, path) for path in found]
        return sorted([self.tree, *inside] if self.tree else inside)


def _entry_json(entry: ArrayNode | ValueEntry | BlobEntry) -> Json:
    if isinstance(entry, ArrayNode):
        return {"path": entry.path}
    if isinstance(entry, ValueEntry):
        return {"path": entry.path, "value": entry.json}
    extra = {} if entry.kind is None else {"kind": entry.kind}
    return {"path": entry.array.path, "encoding": entry.encoding, **extra}


def parent_groups(paths: Iterable[str]) -> set[str]:
    """Every proper ancestor of the given node paths, the empty path left out."""
    groups: set[str] = set()
    for path in paths:
        parent = path.rpartition("/")[0]
        while parent and parent not in groups:
            groups.add(parent)
            parent = parent.rpartition("/")[0]
    return groups


def table_node(save_id: str, name: str, length: int) -> ArrayNode:
    """The array that holds a table of an attempt; its path begins at the checkpoint's url."""
    return ArrayNode(join(HOUSE, save_id, name), Grid((length,), (max(length, 1),)), _dtypes.by_name("uint32"))


def now() -> str:
    """The time in UTC, ISO 8601, to the microsecond: texts sort as times do."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def _own_attribute(document: Json, where: str) -> Json:
    """The ``zarrckpt`` attribute of a group document.

    Raises ForeignObjectsError where another program wrote the document, UnsupportedFormatError for a version or
    feature that this package does not know.
    """
    attributes = document.get("attributes")
    own = attributes.get(ATTRIBUTE) if isinstance(attributes, dict) else None
    if not isinstance(own, dict) or "format" not in own:
        raise ForeignObjectsError(f"{where} was not written by zarrckpt: it has no {ATTRIBUTE!r} attribute")
    features = own.get("features", [])
    if type(own["format"]) is not int or own["format"] != FORMAT or features != []:
        raise UnsupportedFormatError(
            f"{where} has format {own['format']!r:.40} with features {features!r:.200}; this zarrckpt reads "
            f"format {FORMAT} without features: upgrade zarrckpt"
        )
    return own


def _nesting_bounded(parse: Callable[[bytes, str], T]) -> Callable[[bytes, str], T]:
    """Nesting that the JSON parser has just taken may be too deep for what shows or compares it."""

    @wraps(parse)
    def bounded(data: bytes, where: str) -> T:
        try:
            return parse(data, where)
        except RecursionError as err:
            raise CorruptCheckpointError(f"{where} is nested deeper than any document of this format") from err

    return bounded


@_nesting_bounded
def parse_root(data: bytes, where: str) -> Root:
    """Validate a stored root document. ``where`` names it in errors.

    Raises ForeignObjectsError, UnsupportedFormatError, or CorruptCheckpointError for anything inconsistent. Nothing is
    allocated from sizes that the document claims.
    """
    document, own = _unsealed(data, where)
    check = _Checker(own, where)
    tree = check.text("tree")
    save_id = check.save_id(check.text("save_id"))
    if tree and tree != f"@{save_id}":
        raise CorruptCheckpointError(f"{where} names the tree {tree!r:.80}, expected '' or '@' and its save id")
    nodes = _consolidated(document, tree, where)
    root = Root(
        save_id=save_id,
        tree=tree,
        entries={fqn: check.entry(nodes, entry, fqn) for fqn, entry in check.mapping("entries").items()},
        checksums=check.table(CHECKSUMS),
        writers=check.table(WRITERS),
        sizes=check.table(SIZES) if any(node.compression is not None for node in nodes.values()) else None,
        history=tuple(check.save_id(item) for item in check.sequence("history")),
        created=check.text("created"),
        software={str(k): str(v) for k, v in check.mapping("software").items()},
        world_size=check.count(own.get("world_size"), "world_size"),
        keys={fqn: check.keys(fqn, keys) for fqn, keys in check.mapping("keys").items()},
        containers={path: check.container(path, kind) for path, kind in check.mapping("containers").items()},
    )
    _check_whole(root, nodes, where)
    return root


def _sealed(document: Json) -> bytes:
    """The bytes of a document whose own attribute begins with the place for its checksum."""
    return _seal(dumps(document))


def _unsealed(data: bytes, where: str) -> tuple[Json, Json]:
    """A document and its own attribute. Errors as in :func:`parse_root`."""
    sealed = data.startswith(_SEAL)
    if sealed and _seal(data) != data:
        raise CorruptCheckpointError(
            f"{where} is not what was saved: its checksum differs; it was damaged, or edited by another program"
        )
    document = loads(data, where)
    own = _own_attribute(document, where)
    if not sealed:
        raise CorruptCheckpointError(f"{where} does not begin with its checksum")
    return document, own


def _seal(data: bytes) -> bytes:
    """The bytes with the right checksum in its place: that of the bytes with zeros there."""
    rest = data[len(_SEAL) + len(_UNSEALED) :]
    return _SEAL + b"%08x" % crc32c(_SEAL + _UNSEALED.encode() + rest) + rest


def _consolidated(document: Json, tree: str, where: str) -> dict[str, ArrayNode]:
    """The arrays of the consolidated metadata, by path relative to the tree."""
    consolidated = document.get("consolidated_metadata")
    metadata = consolidated.get("metadata") if isinstance(consolidated, dict) else None
    if not isinstance(metadata, dict):
        raise CorruptCheckpointError(f"{where} has no consolidated metadata")
    nodes: dict[str, ArrayNode] = {}
    prefix = f"{tree}/" if tree else ""
    for path, node in metadata.items():
        if not isinstance(node, dict) or node.get("node_type") not in ("group", "array"):
            raise CorruptCheckpointError(f"{where}: node {path!r:.200} is neither a group nor an array")
        if node["node_type"] == "array":
            relative = path.removeprefix(prefix)
            if not path.startswith(prefix):
                raise CorruptCheckpointError(f"{where}: array {path!r:.200} is outside the tree {tree!r}")
            _check_path(relative, where)
            nodes[relative] = parse_array(relative, node)
    return nodes


def _check_path(path: str, where: str) -> None:
    try:
        _names.validate_path(path)
    except CorruptCheckpointError as err:
        raise CorruptCheckpointError(f"{where}: {err}") from err


def _check_whole(root: Root, nodes: Mapping[str, ArrayNode], where: str) -> None:
    used = [node.path for node in root.arrays()]
    if sorted(nodes) != used:
        odd = sorted({*nodes} ^ {*used})
        raise CorruptCheckpointError(f"{where}: arrays and entries do not match, e.g. {odd[:3]}")
    arrays = root.arrays()
    for table, expected in (
        (root.checksums, sum(node.grid.num_subchunks for node in arrays)),
        (root.writers, sum(node.grid.num_chunks for node in arrays)),
        (root.sizes, sum(node.grid.num_subchunks for node in arrays if node.compression is not None)),
    ):
        if table is not None and table.length != expected:
            raise CorruptCheckpointError(f"{where}: a table has {table.length} elements, expected {expected}")
    inside: dict[tuple[object, ...], str] = {}
    for fqn in root.entries:
        path = root.state_path(fqn)
        if path.fqn != fqn:
            raise CorruptCheckpointError(f"{where}: entry {fqn!r:.200} is kept under a path of another name")
        _check_nesting(inside, path, where)


def _check_nesting(inside: dict[tuple[object, ...], str], path: StatePath, where: str) -> None:
    """Add an entry to what holds the entries before it (keys -> container). Refuses what no nested state is like."""
    for depth, container in enumerate(path.containers):
        if inside.setdefault(path.keys[:depth], container) != container:
            raise CorruptCheckpointError(f"{where}: entry {path.fqn!r:.200} is in what is no {container} for others")
    if path.keys in inside:
        raise CorruptCheckpointError(f"{where}: entry {path.fqn!r:.200} stands where others are")
    inside[path.keys] = ""


def _position(key: object, fqn: str) -> int:
    found = -1
    if isinstance(key, int) and not isinstance(key, bool):
        found = key
    elif isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 10:
        found = int(key)
    if 0 <= found < MAX_POSITION:
        return found
    raise CorruptCheckpointError(f"entry {fqn!r:.200}: {key!r:.40} is no position in a list")


_VALUE_LEVELS = 128
"""Of JSON; the format's own limit is lower, and found when a value is decoded."""


def _is_deeper(value: object, levels: int) -> bool:
    if not isinstance(value, dict | list):
        return False
    inner = value.values() if isinstance(value, dict) else value
    return levels == 0 or any(_is_deeper(item, levels - 1) for item in inner)


@dataclass(frozen=True)
class _Checker:
    """Typed access to the fields of our attribute; each miss is damage that names the field."""

    own: Json
    where: str

    def fail(self, field_name: str, value: object, expected: str) -> CorruptCheckpointError:
        return CorruptCheckpointError(f"{self.where}: {field_name} is {value!r:.80}, expected {expected}")

    def text(self, name: str) -> str:
        value = self.own.get(name)
        if not isinstance(value, str):
            raise self.fail(name, value, "a string")
        return value

    def mapping(self, name: str) -> Json:
        value = self.own.get(name)
        if not isinstance(value, dict):
            raise self.fail(name, value, "an object")
        return value

    def sequence(self, name: str) -> list[Any]:
        value = self.own.get(name)
        if not isinstance(value, list):
            raise self.fail(name, value, "a list")
        return value

    def save_id(self, value: Any) -> str:
        if not isinstance(value, str) or not _ID.fullmatch(value):
            raise self.fail("a save id", value, "32 hexadecimal digits")
        return value

    def count(self, value: Any, name: str) -> int:
        if type(value) is not int or not 0 <= value < 2**63:
            raise self.fail(name, value, "a whole number")
        return value

    def table(self, name: str) -> Table:
        entry = self.mapping("tables").get(name)
        if not isinstance(entry, dict):
            raise self.fail(f"table {name!r}", entry, "an object")
        return Table(self.count(entry.get("length"), "length"), self.count(entry.get("crc32c"), "crc32c"))

    def entry(self, nodes: Mapping[str, ArrayNode], entry: Any, fqn: str) -> ArrayNode | ValueEntry | BlobEntry:
        if not isinstance(entry, dict):
            raise self.fail(f"entry {fqn!r:.200}", entry, "an object")
        if "value" in entry:
            return self.value(entry, fqn)
        return self.blob(nodes, entry, fqn) if "encoding" in entry else self.node(nodes, entry.get("path"), fqn)

    def node(self, nodes: Mapping[str, ArrayNode], path: Any, fqn: str) -> ArrayNode:
        if not isinstance(path, str) or path not in nodes:
            raise self.fail(f"the path of {fqn!r:.200}", path, "an array of the consolidated metadata")
        return nodes[path]

    def blob(self, nodes: Mapping[str, ArrayNode], entry: Json, fqn: str) -> BlobEntry:
        if entry["encoding"] not in _BLOB_ENCODINGS:
            raise self.fail(f"blob {fqn!r:.200}", entry, f"a path and an encoding of {_BLOB_ENCODINGS}")
        kind = entry.get("kind")
        if kind is not None and not isinstance(kind, str):
            raise self.fail(f"the kind of blob {fqn!r:.200}", kind, "a string")
        node = self.node(nodes, entry.get("path"), fqn)
        if node.dtype.name != "uint8" or len(node.grid.shape) != 1:
            raise self.fail(f"the array of blob {fqn!r:.200}", node.dtype.name, "one dimension of uint8")
        return BlobEntry(node, entry["encoding"], kind)

    def value(self, entry: Json, fqn: str) -> ValueEntry:
        if not isinstance(entry.get("path"), str):
            raise self.fail(f"value {fqn!r:.200}", entry, "a path and a value")
        _check_path(entry["path"], self.where)
        if _is_deeper(entry["value"], _VALUE_LEVELS):
            raise CorruptCheckpointError(f"{self.where}: value {fqn!r:.200} is nested deeper than any value")
        return ValueEntry(entry["path"], entry["value"])

    def keys(self, fqn: str, keys: Any) -> tuple[object, ...]:
        if fqn not in self.mapping("entries") or not isinstance(keys, list):
            raise self.fail(f"the keys of {fqn!r:.200}", keys, "a list, for a known entry")
        found = tuple(_values.decode_json(key) for key in keys)
        try:
            for key in found:
                hash(key)
                str(key)
        except (TypeError, ValueError):  # no key of any dict, or an integer with more digits than Python shows
            raise self.fail(f"the keys of {fqn!r:.200}", keys, "keys of dicts") from None
        return found

    def container(self, path: str, kind: Any) -> str:
        if kind not in CONTAINERS:
            raise self.fail(f"container {path!r:.200}", kind, f"one of {CONTAINERS}")
        return str(kind)


@dataclass(frozen=True)
class Marker:
    """What an attempt is going to write, put before its first chunk, so that others can clean up after it."""

    attempt: str
    tree: str
    arrays: tuple[str, ...]
    groups: tuple[str, ...]
    started: str
    base: str = ""
    """The save that it is to replace, or "" where none was committed. It can commit while that is still so."""
    failed: bool = False
    """Whether it has ended without a commit, and will never make one."""

    def to_bytes(self) -> bytes:
        """The marker as it is stored."""
        own: Json = {
            "crc32c": _UNSEALED,
            "format": FORMAT,
            "attempt": self.attempt,
            "tree": self.tree,
            "base": self.base,
            "started": self.started,
            "arrays": list(self.arrays),
            "groups": list(self.groups),
        }
        own |= {"failed": True} if self.failed else {}
        return _sealed(group_document({ATTRIBUTE: own}))

    def top_names(self) -> set[str]:
        """The names right below the checkpoint's url that this attempt writes under."""
        if self.tree:
            return {self.tree}
        return {path.partition("/")[0] for path in (*self.arrays, *self.groups)}

    def folders(self) -> set[str]:
        """The folders that this attempt may have made, below the checkpoint's url."""
        nodes = {join(self.tree, path) for path in (*self.arrays, *self.groups)}
        own = f"{HOUSE}/{self.attempt}"
        tables = {own, *(f"{own}/{name}" for name in (CHECKSUMS, WRITERS, SIZES))}
        return nodes | tables | ({self.tree} if self.tree else set())

    def names_key(self, key: str) -> bool:
        """Whether a key is one that this attempt may have written (its marker and tables excepted)."""
        relative = key.removeprefix(f"{self.tree}/") if self.tree else key
        if self.tree and relative == key:
            return False
        node, _, name = relative.rpartition("/")
        if name == NODE:
            return node in self._groups or node in self._arrays or (not node and bool(self.tree))
        return node in self._arrays and _CHUNK_KEY.fullmatch(name) is not None

    @cached_property
    def _arrays(self) -> frozenset[str]:
        return frozenset(self.arrays)

    @cached_property
    def _groups(self) -> frozenset[str]:
        return frozenset(self.groups)


_CHUNK_KEY = re.compile(r"c(\.\d+)*")


_TABLE_KEY = re.compile(rf"{HOUSE}/[0-9a-f]{{32}}/({CHECKSUMS}|{WRITERS}|{SIZES})/({re.escape(NODE)}|c\.0)")


def is_tree(name: str) -> bool:
    """Whether a name is that of a tree that is not the canonical one."""
    return name.startswith("@") and _ID.fullmatch(name[1:]) is not None


def is_table_key(key: str) -> bool:
    """Whether a key is one of an attempt's tables."""
    return _TABLE_KEY.fullmatch(key) is not None


@_nesting_bounded
def parse_marker(data: bytes, where: str) -> Marker:
    """Validate a stored marker; errors as in :func:`parse_root`."""
    check = _Checker(_unsealed(data, where)[1], where)
    attempt = check.save_id(check.text("attempt"))
    tree, base = check.text("tree"), check.text("base")
    if tree not in ("", f"@{attempt}"):
        raise check.fail("tree", tree, "'' or '@' and the attempt's id")
    paths = {name: check.sequence(name) for name in ("arrays", "groups")}
    for path in (*paths["arrays"], *paths["groups"]):
        if not isinstance(path, str):
            raise check.fail("a path", path, "a string")
        _check_path(path, where)
    arrays, groups = tuple(paths["arrays"]), tuple(paths["groups"])
    failed = check.own.get("failed") is True
    return Marker(attempt, tree, arrays, groups, check.text("started"), base and check.save_id(base), failed)


def claim_bytes(save_id: str) -> bytes:
    """The claim on the canonical tree as it is stored: put once, by the first attempt at a url."""
    return _sealed(group_document({ATTRIBUTE: {"crc32c": _UNSEALED, "format": FORMAT, "claim": save_id}}))


def removal_bytes(save_id: str) -> bytes:
    """The record of a removal as it is stored; ``save_id`` names the committed save, "" where there is none."""
    own = {"crc32c": _UNSEALED, "format": FORMAT, "removed": save_id, "started": now()}
    return _sealed(group_document({ATTRIBUTE: own}))


@_nesting_bounded
def parse_claim(data: bytes, where: str) -> str:
    """The id of the attempt that put a stored claim; errors as in :func:`parse_root`."""
    check = _Checker(_unsealed(data, where)[1], where)
    return check.save_id(check.text("claim"))
