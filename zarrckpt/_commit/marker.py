"""Documents beside the root document: markers of attempts, the claim, the record of a removal, and pins. No I/O.

From them, other processes find out which attempt has written an object and whether it may be deleted.
"""

from __future__ import annotations

import hashlib
import re
import uuid
from functools import cached_property

from zarrckpt._format.documents import NODE, join
from zarrckpt._format.names import check_paths
from zarrckpt._format.root import RESERVED_GROUP, TABLES, Root, parent_groups
from zarrckpt._format.sealed import Document, Id, IdOrEmpty, Time

REMOVED = "removed"
"""The group whose document records that everything at the url is being removed, beside the groups of the attempts."""

PINS = "pins"
"""The group of the pins, which protect a checkpoint from removal and replacement, beside the groups of the attempts."""

PROBE = "probe-"
"""Prefix of the names of the objects with which a store's conditional puts are tested."""

CLAIM_KEY = f"{RESERVED_GROUP}/{NODE}"
REMOVAL_KEY = f"{RESERVED_GROUP}/{REMOVED}/{NODE}"

_CHUNK_KEY = re.compile(r"c(\.\d+)*", re.ASCII)
_PIN_KEY = re.compile(rf"{RESERVED_GROUP}/{PINS}/([0-9a-f]{{32}}/)?{re.escape(NODE)}")
_TABLE_KEY = re.compile(rf"{RESERVED_GROUP}/[0-9a-f]{{32}}/({'|'.join(TABLES)})/({re.escape(NODE)}|c\.0)")


def new_id() -> str:
    """Return a new random id of a save, a pin or a removal."""
    return uuid.uuid4().hex


def marker_key(save_id: str) -> str:
    """Return the key of an attempt's marker."""
    return f"{RESERVED_GROUP}/{save_id}/{NODE}"


def pin_key(pin_id: str) -> str:
    """Return the key of a pin."""
    return f"{RESERVED_GROUP}/{PINS}/{pin_id}/{NODE}"


def pin_id_of(owner: str) -> str:
    """Return the id of an owner's pin. It is the same in every process."""
    return hashlib.sha256(f"zarrckpt {owner}".encode()).hexdigest()[:32]


def is_pin_key(key: str) -> bool:
    """Whether a key belongs to a pin or to the group of all pins."""
    return _PIN_KEY.fullmatch(key) is not None


def is_table_key(key: str) -> bool:
    """Whether a key belongs to an attempt's tables."""
    return _TABLE_KEY.fullmatch(key) is not None


class Marker(Document, frozen=True, dict=True, rename={"save_id": "attempt", "replaced_id": "base", "run_id": "run"}):
    """A list of the nodes that an attempt is going to write, put before its first chunk.

    From it, other processes can delete the objects of an attempt that did not commit.
    """

    save_id: Id
    tree: str
    replaced_id: IdOrEmpty
    """The id of the save that the attempt replaces, or "" if none was committed.

    The attempt can commit only while this save is the committed one.
    """
    started: Time
    arrays: tuple[str, ...]
    groups: tuple[str, ...]
    failed: bool = False
    """Whether the attempt has ended without a commit and will never commit."""
    run_id: IdOrEmpty = ""
    """The id of the run that the attempt belongs to, or "". A run deletes only folders whose attempts have its id."""

    def __post_init__(self) -> None:
        check_paths((*self.arrays, *self.groups), "its list of nodes")
        if self.tree not in ("", f"@{self.save_id}"):
            raise ValueError(f"tree is {self.tree!r:.80}, expected '' or '@' and the attempt's id")

    def top_names(self) -> set[str]:
        """Return the names directly below the checkpoint's url under which this attempt writes."""
        if self.tree:
            return {self.tree}
        return {path.partition("/")[0] for path in (*self.arrays, *self.groups)}

    def folders(self) -> set[str]:
        """Return the folders below the checkpoint's url that this attempt may have created."""
        nodes = {join(self.tree, path) for path in (*self.arrays, *self.groups)}
        own = f"{RESERVED_GROUP}/{self.save_id}"
        tables = {own, *(f"{own}/{name}" for name in TABLES)}
        return nodes | tables | ({self.tree} if self.tree else set())

    def names_key(self, key: str) -> bool:
        """Whether this attempt may have written a key. False for its marker and tables."""
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


def marker_of(root: Root) -> Marker:
    """Return a marker of a committed save with the fields that its root has."""
    arrays = tuple(node.path for node in root.arrays())
    return Marker(root.save_id, root.tree, "", root.created, arrays, tuple(sorted(parent_groups(arrays))))


class Claim(Document, frozen=True, rename={"save_id": "claim"}):
    """The claim on the canonical tree. The first attempt at a url puts it, once."""

    save_id: Id


class RemovalRecord(Document, frozen=True, rename={"save_id": "removed", "removal_id": "removal"}):
    """The record of a removal."""

    save_id: IdOrEmpty
    """The committed save, or "" if there is none."""
    removal_id: Id
    """A random id, so that a removal notices if the record of another removal has replaced its own."""
    started: Time


class Pin(Document, frozen=True, rename={"pin_id": "pin"}):
    """A protection of a checkpoint from removal and replacement, until the pin is deleted."""

    pin_id: Id
    note: str
    """The reason for the pin, and who needs the checkpoint. It is shown in CheckpointPinnedError."""
    created: Time
