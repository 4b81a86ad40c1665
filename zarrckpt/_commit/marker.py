"""What a save, a removal or a pin leaves beside the root document, so that others can tell what is whose. No I/O."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from functools import cached_property

from zarrckpt._format.documents import NODE, Json, join
from zarrckpt._format.names import check_paths
from zarrckpt._format.root import CHECKSUMS, RESERVED_GROUP, SIZES, WRITERS, Root, parent_groups
from zarrckpt._format.sealed import Members, nesting_bounded, now, parse_sealed, sealed_bytes

REMOVED = "removed"
"""The group beside those of the attempts whose document records that everything at the url is being removed."""

PINS = "pins"
"""The group beside those of the attempts that holds the pins: they keep a checkpoint from being removed or replaced."""

PROBE = "probe-"
"""Prefix of the names of the objects on which a store's conditional puts are tried."""

CLAIM_KEY = f"{RESERVED_GROUP}/{NODE}"
REMOVAL_KEY = f"{RESERVED_GROUP}/{REMOVED}/{NODE}"

_CHUNK_KEY = re.compile(r"c(\.\d+)*", re.ASCII)
_PIN_KEY = re.compile(rf"{RESERVED_GROUP}/{PINS}/([0-9a-f]{{32}}/)?{re.escape(NODE)}")
_TABLE_KEY = re.compile(rf"{RESERVED_GROUP}/[0-9a-f]{{32}}/({CHECKSUMS}|{WRITERS}|{SIZES})/({re.escape(NODE)}|c\.0)")


def marker_key(save_id: str) -> str:
    """Where an attempt puts its marker."""
    return f"{RESERVED_GROUP}/{save_id}/{NODE}"


def pin_key(pin_id: str) -> str:
    """Where a pin is put."""
    return f"{RESERVED_GROUP}/{PINS}/{pin_id}/{NODE}"


def pin_id_of(owner: str) -> str:
    """Return the id of the pin that an owner puts on a checkpoint: the same at every call, in every process."""
    return hashlib.sha256(f"zarrckpt {owner}".encode()).hexdigest()[:32]


def is_pin_key(key: str) -> bool:
    """Whether a key is that of a pin, or of the group of all pins."""
    return _PIN_KEY.fullmatch(key) is not None


def is_table_key(key: str) -> bool:
    """Whether a key is one of an attempt's tables."""
    return _TABLE_KEY.fullmatch(key) is not None


@dataclass(frozen=True)
class Marker:
    """What an attempt is going to write, put before its first chunk, so that others can clean up after it."""

    save_id: str
    tree: str
    arrays: tuple[str, ...]
    groups: tuple[str, ...]
    started: str
    base: str = ""
    """The save that it is to replace, or "" where none was committed. It can commit while that is still so."""
    failed: bool = False
    """Whether it has ended without a commit, and will never make one."""
    run: str = ""
    """The id of the run that it saves for, or "": what that run's own clean-up may delete."""

    def to_bytes(self) -> bytes:
        """The marker as it is stored."""
        own: Json = {
            "attempt": self.save_id,
            "tree": self.tree,
            "base": self.base,
            "started": self.started,
            "arrays": list(self.arrays),
            "groups": list(self.groups),
        }
        failed: Json = {"failed": True} if self.failed else {}
        return sealed_bytes(own | failed | ({"run": self.run} if self.run else {}))

    def top_names(self) -> set[str]:
        """The names right below the checkpoint's url that this attempt writes under."""
        if self.tree:
            return {self.tree}
        return {path.partition("/")[0] for path in (*self.arrays, *self.groups)}

    def folders(self) -> set[str]:
        """The folders that this attempt may have made, below the checkpoint's url."""
        nodes = {join(self.tree, path) for path in (*self.arrays, *self.groups)}
        own = f"{RESERVED_GROUP}/{self.save_id}"
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


def marker_of(root: Root) -> Marker:
    """What the marker of a committed save says, as far as its root knows it."""
    arrays = tuple(node.path for node in root.arrays())
    return Marker(root.save_id, root.tree, arrays, tuple(sorted(parent_groups(arrays))), root.created)


@nesting_bounded
def parse_marker(data: bytes, where: str) -> Marker:
    """Validate a stored marker; errors as in :func:`zarrckpt._format.sealed.parse_sealed`."""
    members = parse_sealed(data, where)[1]
    save_id, base = members.save_id("attempt"), members.text("base")
    return Marker(
        save_id,
        _tree(members, save_id),
        check_paths(members.sequence("arrays"), where),
        check_paths(members.sequence("groups"), where),
        members.time("started"),
        base and members.as_save_id("base", base),
        members.own.get("failed") is True,
        members.as_save_id("run", members.own["run"]) if "run" in members.own else "",
    )


def _tree(members: Members, save_id: str) -> str:
    tree = members.text("tree")
    if tree not in ("", f"@{save_id}"):
        raise members.fail("tree", tree, "'' or '@' and the attempt's id")
    return tree


def claim_bytes(save_id: str) -> bytes:
    """The claim on the canonical tree as it is stored: put once, by the first attempt at a url."""
    return sealed_bytes({"claim": save_id})


@nesting_bounded
def parse_claim(data: bytes, where: str) -> str:
    """The id of the attempt that put a stored claim; errors as for a marker."""
    return parse_sealed(data, where)[1].save_id("claim")


def removal_bytes(save_id: str, removal_id: str) -> bytes:
    """The record of a removal as it is stored; ``save_id`` names the committed save, "" where there is none.

    ``removal_id`` is random: by its record a removal knows that it still is the one that goes on.
    """
    return sealed_bytes({"removed": save_id, "removal": removal_id, "started": now()})


@dataclass(frozen=True)
class Pin:
    """What keeps a checkpoint from being removed or replaced, until it is deleted itself."""

    pin_id: str
    note: str
    """Who needs the checkpoint, and what for: shown to whoever would remove it."""
    created: str

    def to_bytes(self) -> bytes:
        """The pin as it is stored."""
        return sealed_bytes({"pin": self.pin_id, "note": self.note, "created": self.created})


@nesting_bounded
def parse_pin(data: bytes, where: str) -> Pin:
    """Validate a stored pin; errors as for a marker."""
    members = parse_sealed(data, where)[1]
    return Pin(members.save_id("pin"), members.text("note"), members.time("created"))
