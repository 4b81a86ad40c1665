"""Documents beside the root document: markers of attempts, the claim, the record of a removal, and pins. No I/O.

From them, other processes find out which attempt has written an object and whether it may be deleted.
"""

from __future__ import annotations

import hashlib
import re
import uuid
from dataclasses import dataclass
from functools import cached_property

from zarrckpt._format.documents import NODE, Json, join
from zarrckpt._format.names import check_paths
from zarrckpt._format.root import RESERVED_GROUP, TABLES, Root, parent_groups
from zarrckpt._format.sealed import Members, nesting_bounded, now, parse_sealed, sealed_bytes

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


@dataclass(frozen=True)
class Marker:
    """A list of the nodes that an attempt is going to write, put before its first chunk.

    From it, other processes can delete the objects of an attempt that did not commit.
    """

    save_id: str
    tree: str
    arrays: tuple[str, ...]
    groups: tuple[str, ...]
    started: str
    replaced_id: str = ""
    """The id of the save that the attempt replaces, or "" if none was committed.

    The attempt can commit only while this save is the committed one.
    """
    failed: bool = False
    """Whether the attempt has ended without a commit and will never commit."""
    run_id: str = ""
    """The id of the run that the attempt belongs to, or "". A run deletes only folders whose attempts have its id."""

    def to_bytes(self) -> bytes:
        """Return the stored form of the marker."""
        own: Json = {
            "attempt": self.save_id,
            "tree": self.tree,
            "base": self.replaced_id,
            "started": self.started,
            "arrays": list(self.arrays),
            "groups": list(self.groups),
        }
        failed: Json = {"failed": True} if self.failed else {}
        return sealed_bytes(own | failed | ({"run": self.run_id} if self.run_id else {}))

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
    return Marker(root.save_id, root.tree, arrays, tuple(sorted(parent_groups(arrays))), root.created)


@nesting_bounded
def parse_marker(data: bytes, where: str) -> Marker:
    """Parse and validate a stored marker. Raises the errors of :func:`zarrckpt._format.sealed.parse_sealed`."""
    members = parse_sealed(data, where)[1]
    save_id, replaced_id = members.save_id("attempt"), members.text("base")
    return Marker(
        save_id,
        _tree(members, save_id),
        check_paths(members.sequence("arrays"), where),
        check_paths(members.sequence("groups"), where),
        members.time("started"),
        replaced_id and members.as_save_id("base", replaced_id),
        members.own.get("failed") is True,
        members.as_save_id("run", members.own["run"]) if "run" in members.own else "",
    )


def _tree(members: Members, save_id: str) -> str:
    tree = members.text("tree")
    if tree not in ("", f"@{save_id}"):
        raise members.fail("tree", tree, "'' or '@' and the attempt's id")
    return tree


def claim_bytes(save_id: str) -> bytes:
    """Return the stored form of the claim on the canonical tree. The first attempt at a url puts it, once."""
    return sealed_bytes({"claim": save_id})


@nesting_bounded
def parse_claim(data: bytes, where: str) -> str:
    """Return the id of the attempt that put a stored claim. Raises the errors of :func:`parse_marker`."""
    return parse_sealed(data, where)[1].save_id("claim")


def removal_bytes(save_id: str, removal_id: str) -> bytes:
    """Return the stored form of the record of a removal. ``save_id`` is the committed save, or "" if there is none.

    ``removal_id`` is random, so that a removal notices if the record of another removal has replaced its own.
    """
    return sealed_bytes({"removed": save_id, "removal": removal_id, "started": now()})


@dataclass(frozen=True)
class Pin:
    """A protection of a checkpoint from removal and replacement, until the pin is deleted."""

    pin_id: str
    note: str
    """The reason for the pin, and who needs the checkpoint. It is shown in CheckpointPinnedError."""
    created: str

    def to_bytes(self) -> bytes:
        """Return the stored form of the pin."""
        return sealed_bytes({"pin": self.pin_id, "note": self.note, "created": self.created})


@nesting_bounded
def parse_pin(data: bytes, where: str) -> Pin:
    """Parse and validate a stored pin. Raises the errors of :func:`parse_marker`."""
    members = parse_sealed(data, where)[1]
    return Pin(members.save_id("pin"), members.text("note"), members.time("created"))
