"""Build the JSON data of a page, for one checkpoint or two."""

from __future__ import annotations

import dataclasses
import pprint
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from zarrckpt._format.documents import ArrayNode, Json
from zarrckpt._format.root import BlobEntry
from zarrckpt._inspect.differences import choose_wider
from zarrckpt._inspect.info import CheckpointInfo
from zarrckpt._inspect.page.layout import Layouts
from zarrckpt._inspect.page.values import PageStats, number_json
from zarrckpt._read.catalog import Catalog
from zarrckpt._reports import value_text
from zarrckpt._version import __version__

_MAX_TEXT = 20_000
"""Maximum number of characters of a value on the page."""


@dataclass(frozen=True)
class PageCheckpoint:
    """A checkpoint on the page, or a part of one."""

    catalog: Catalog
    names: tuple[str, ...]
    info: CheckpointInfo

    @cached_property
    def tensors(self) -> dict[str, ArrayNode]:
        """The tensors by fqn."""
        known = self.catalog.root.tensors
        return {fqn: known[fqn] for fqn in self.names if fqn in known}

    @cached_property
    def objects(self) -> frozenset[str]:
        """The fqns of the other entries."""
        return frozenset(self.names) - self.tensors.keys()


def page_data(
    sides: Sequence[PageCheckpoint],
    same: Sequence[str],
    changed: Mapping[str, tuple[str, str]],
    found: PageStats | None,
) -> Json:
    """Return the JSON of a page.

    Costs one request per side for the table of writers. Without ``found``, comparing two sides also reads their tables
    of checksums.

    Args:
        sides: one checkpoint or two.
        same: the comparable tensors that both sides have.
        changed: the values that differ between the sides.
        found: the numbers of the tensors, or None if they were not read.
    """
    layouts = [Layouts(side.catalog.writers_by_path()) for side in sides]
    names = list(dict.fromkeys(fqn for side in sides for fqn in side.tensors))
    others = dict.fromkeys(fqn for side in sides for fqn in side.names if fqn in side.objects)
    both = set(same)
    tensors = [_tensor_json(fqn, sides, layouts, found, fqn in both) for fqn in names]
    return {
        "zarrckpt": __version__,
        "values": found is not None,
        "sides": [_side(side, part) for side, part in zip(sides, layouts, strict=True)],
        "tensors": tensors,
        "entries": [
            {"name": fqn, "sides": [_entry_json(side, fqn) for side in sides], "changed": fqn in changed}
            for fqn in others
        ],
    }


def _side(side: PageCheckpoint, layouts: Layouts) -> Json:
    root = side.catalog.root
    part = len(side.names) < len(root.entries)
    info = dataclasses.asdict(dataclasses.replace(side.info, largest=(), groups={}, metadata={}))
    info["step"] = None if side.info.step is None else number_json(side.info.step)
    if part:
        info["reused"] = None  # it counts the whole checkpoint
    info["metadata"] = {name: value_text(value) for name, value in side.info.metadata.items()}
    ranks = layouts.rank_bytes(root.arrays(side.names))
    return {"info": info, "layouts": layouts.found, "ranks": ranks, "part": part}


def _tensor_json(
    fqn: str, sides: Sequence[PageCheckpoint], layouts: Sequence[Layouts], found: PageStats | None, in_both: bool
) -> Json:
    nodes = [side.tensors.get(fqn) for side in sides]
    one_grid = len({node.grid for node in nodes if node is not None}) == 1
    # If two tensors were compared, their chunks with NaN and inf are numbered by the grid of the wider one.
    counted = choose_wider(sides[0].catalog, sides[1].catalog, fqn) if in_both else None
    looks: list[Json | None] = []
    for number, node in enumerate(nodes):
        look = found.looks[number].get(fqn) if found is not None else None
        if look is not None and not one_grid and counted not in (None, node):
            look.pop("broken", None)
        looks.append(None if node is None else {"layout": layouts[number].number(node), "look": look})
    tensor: Json = {"name": fqn, "sides": looks}
    if any(fqn in side.objects for side in sides):
        tensor["value"] = True
    if in_both and found is not None:
        tensor["difference"] = found.differences[fqn]
    elif in_both and len({node.dtype for node in nodes if node is not None}) == 1:
        tensor["equal"] = _equal_bytes(sides, fqn)
    return tensor


def _equal_bytes(sides: Sequence[PageCheckpoint], fqn: str) -> bool | None:
    """Whether two tensors have equal bytes, by their checksums. None if checksums cannot decide it."""
    one, other = (side.tensors[fqn] for side in sides)
    if (one.grid, one.compression) != (other.grid, other.compression):
        return None
    equal = np.array_equal(sides[0].catalog.checksums(one), sides[1].catalog.checksums(other))
    return True if equal else False if one.compression is None else None


def _entry_json(side: PageCheckpoint, fqn: str) -> Json | None:
    """Return a value as Python's text, or the size of a blob, which is not read."""
    if fqn not in side.objects:
        node = side.tensors.get(fqn)
        return None if node is None else {"type": "tensor", "tensor": f"{node.dtype.name} {node.grid.shape}"}
    entry = side.catalog.root.non_tensors[fqn]
    if isinstance(entry, BlobEntry):
        return {"type": entry.kind or "", "encoding": entry.encoding, "nbytes": entry.array.nbytes}
    value = side.catalog.read_non_tensor(fqn)
    try:
        text = pprint.pformat(value, width=88, compact=True, sort_dicts=False)
    except ValueError:  # an int with more digits than Python converts to text
        text = value_text(value)
    found: Json = {"type": type(value).__name__, "text": text[:_MAX_TEXT]}
    return found if len(text) <= _MAX_TEXT else found | {"cut": len(text) - _MAX_TEXT}
