"""Parse and check root documents. No I/O."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

from msgspec import UNSET, Raw
from msgspec.structs import astuple

from zarrckpt._errors import CorruptCheckpointError
from zarrckpt._format import json_values
from zarrckpt._format.documents import ArrayNode, join, parse_node
from zarrckpt._format.hashes import MAX_EQUAL_HASHES, hashes_collide
from zarrckpt._format.json_values import MAX_JSON_VALUE
from zarrckpt._format.metadata import parse_metadata
from zarrckpt._format.module_versions import begins_one
from zarrckpt._format.names import check_paths
from zarrckpt._format.root import (
    BLOB_KINDS,
    CHECKSUMS,
    CONVENTIONS,
    DIGESTS,
    MAX_ALL_RANKS,
    MAX_POSITION,
    MAX_RANKS,
    SIZES,
    BlobEntry,
    Entry,
    ReusedChunks,
    Root,
    RootDocument,
    Stack,
    StoredEntry,
    ValueEntry,
    parent_groups,
)
from zarrckpt._format.sealed import Group, parse_group
from zarrckpt._format.state_path import LIST, RANKS, is_key, with_shared_nans


def parse_root(data: bytes, where: str) -> Root:
    """Return the validated content of a stored root document. ``where`` is its name in errors.

    Raises ForeignObjectsError, UnsupportedFormatError, or CorruptCheckpointError if anything is inconsistent. Allocates
    no memory of a size from the document before the size is checked.
    """
    group = parse_group(RootDocument, data, where)
    try:
        return _root_of(group)
    except (CorruptCheckpointError, ValueError) as err:
        raise CorruptCheckpointError(f"{where}: {err}") from err


def _root_of(group: Group[RootDocument]) -> Root:
    """Return the root for its documents, whose members have the declared types. Raises ValueError."""
    own, conventions, consolidated = (
        group.attributes.zarrckpt,
        group.attributes.zarr_conventions,
        group.consolidated_metadata,
    )
    if conventions is not UNSET and bytes(conventions) != CONVENTIONS:
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
        reused=ReusedChunks(*astuple(own.reused)) if own.reused else None,
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


def _parse_keys(own: RootDocument, paths: list[str], groups: set[str]) -> dict[str, object]:
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


def _parse_nodes(metadata: Mapping[str, Raw], own: RootDocument) -> dict[str, ArrayNode]:
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
    own: RootDocument, nodes: Mapping[str, ArrayNode], keys: Mapping[str, object]
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
            if BLOB_KINDS.get(encoding or "") is not (own_kind is not None) or not entry.ranks is level is UNSET:
                raise _entry_error(fqn, f"expected an encoding of {(*BLOB_KINDS,)} and, except for tree, a kind")
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
    fqn: str, entry: StoredEntry, node: ArrayNode, keys: Mapping[str, object], ranks_of: dict[Any, tuple[int, ...]]
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
        if count + sum(map(len, ranks_of.values())) > MAX_ALL_RANKS:
            raise _entry_error(fqn, f"{count} ranks, expected at most {MAX_ALL_RANKS} ranks in all stacks")
        ranks_of[spans] = tuple(itertools.chain.from_iterable(itertools.starmap(range, spans)))
    return Stack(ranks_of[spans], level)


def _entry_error(fqn: str, fault: str) -> ValueError:
    return ValueError(f"entry {fqn!r:.200} has {fault}")
