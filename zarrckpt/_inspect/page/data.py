"""Build the JSON data of a page, for one checkpoint or two."""

from __future__ import annotations

import dataclasses
import math
import pprint
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from zarrckpt._format.documents import ArrayNode, Json
from zarrckpt._format.root import BlobEntry
from zarrckpt._inspect.differences import TensorDifference, choose_wider
from zarrckpt._inspect.info import CheckpointInfo
from zarrckpt._inspect.page.histogram import Histogram
from zarrckpt._inspect.page.layout import Layouts
from zarrckpt._inspect.page.values import Extreme, PageStats, read_stats
from zarrckpt._jobs import Progress
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


@dataclass(frozen=True)
class PageNumbers:
    """The statistics of the tensors of each side, and the differences of tensors that both sides have."""

    looks: tuple[dict[str, PageStats], ...]
    differences: Mapping[str, TensorDifference]

    def is_broken(self, fqn: str) -> bool:
        """Whether a tensor has NaN or inf on any side."""
        looks = (side[fqn] for side in self.looks if fqn in side)
        return any(look.stats.nan or look.stats.inf for look in looks)


def read_numbers(sides: Sequence[PageCheckpoint], same: Sequence[str], progress: Progress | None) -> PageNumbers:
    """Read all tensors of the sides once, and compare the tensors in ``same``, whose numbers can be compared."""
    both = set(same)
    groups = [([*range(len(sides))], [*same])]
    groups += [([number], [fqn for fqn in side.tensors if fqn not in both]) for number, side in enumerate(sides)]
    catalogs = [side.catalog for side in sides]
    amounts = [
        sum(choose_wider(catalogs[own[0]], catalogs[own[-1]], fqn).nbytes for fqn in fqns) for own, fqns in groups
    ]

    def part(number: int) -> Progress | None:
        if progress is None:
            return None
        before, total = sum(amounts[:number]), sum(amounts)
        return lambda done, _: progress(before + done, total)

    found: list[dict[str, PageStats]] = [{} for _ in sides]
    differences: dict[str, TensorDifference] = {}
    for number, (own, fqns) in enumerate(groups):
        looks, differing = read_stats([catalogs[side] for side in own], fqns, part(number))
        differences |= differing
        for side, known in zip(own, looks, strict=True):
            found[side] |= known
    return PageNumbers(tuple(found), differences)


def page_data(
    sides: Sequence[PageCheckpoint],
    same: Sequence[str],
    changed: Mapping[str, tuple[str, str]],
    found: PageNumbers | None,
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
        "entries": [_entry_json(fqn, sides, fqn in changed) for fqn in others],
    }


def _side(side: PageCheckpoint, layouts: Layouts) -> Json:
    root = side.catalog.root
    part = len(side.names) < len(root.entries)
    info = dataclasses.asdict(dataclasses.replace(side.info, largest=(), groups={}, metadata={}))
    info["step"] = None if side.info.step is None else _number(side.info.step)
    if part:
        info["reused"] = None  # it counts the whole checkpoint
    info["metadata"] = {name: value_text(value) for name, value in side.info.metadata.items()}
    return {
        "info": info,
        "layouts": layouts.found,
        "ranks": layouts.rank_bytes(root.arrays(side.names)),
        "part": part,
    }


def _tensor_json(
    fqn: str, sides: Sequence[PageCheckpoint], layouts: Sequence[Layouts], found: PageNumbers | None, in_both: bool
) -> Json:
    nodes = [side.tensors.get(fqn) for side in sides]
    one_grid = len({node.grid for node in nodes if node is not None}) == 1
    # If two tensors were compared, their chunks with NaN and inf are numbered by the grid of the wider one.
    counted = choose_wider(sides[0].catalog, sides[1].catalog, fqn) if in_both else None
    looks: list[Json | None] = []
    for number, node in enumerate(nodes):
        look = found.looks[number].get(fqn) if found is not None else None
        shown = None if look is None else _look_json(look, with_chunks=one_grid or counted in (None, node))
        part = layouts[number]
        looks.append(None if node is None else {"layout": part.number(node), "look": shown})
    tensor: Json = {"name": fqn, "sides": looks}
    if any(fqn in side.objects for side in sides):
        tensor["value"] = True
    if in_both and found is not None:
        measures = dataclasses.asdict(found.differences[fqn])
        dtypes = measures.pop("dtypes")
        position = measures.pop("max_abs_at")
        numbers = {name: _number(value) for name, value in measures.items()}
        tensor["difference"] = {**numbers, "dtypes": dtypes, "max_abs_at": position}
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


def _look_json(look: PageStats, *, with_chunks: bool) -> Json:
    found: Json = {"stats": [_number(value) for value in dataclasses.astuple(look.stats)]}
    if look.histogram is not None:
        found["histogram"] = _histogram(look.histogram)
        found["low"], found["high"] = ([_extreme(item, look) for item in items] for items in (look.low, look.high))
        found["beyond"] = look.beyond
    if look.bulk is not None:
        middle, below, above = look.bulk
        found["bulk"] = [*_histogram(middle), below, above]
    if look.first_broken is not None:
        found["first_broken"] = look.first_broken
    if look.broken and with_chunks:
        found["broken"] = list(look.broken.items())
    return found


def _histogram(found: Histogram) -> list[Any]:
    return [found.exponent, found.first, found.counts.tolist()]


def _extreme(item: Extreme, look: PageStats) -> list[Any]:
    value, position = item
    sigma = look.sigmas.get(value)
    return [_number(value), position, sigma if sigma is None else round(sigma, 4)]


_MAX_INTEGER = 2**53
"""Integers from this number on are stored as texts, because JavaScript's numbers have 53 bits."""


def _number(value: float) -> float | str | None:
    """Return a number for JSON, unrounded. NaN becomes None, infinities and large integers become texts."""
    if isinstance(value, int):
        return value if abs(value) < _MAX_INTEGER else str(value)
    if math.isnan(value):
        return None
    return value if math.isfinite(value) else str(value)


def _entry_json(fqn: str, sides: Sequence[PageCheckpoint], changed: bool) -> Json:
    shown = [_side_of_entry(side, fqn) for side in sides]
    return {"name": fqn, "sides": shown, "changed": changed}


def _side_of_entry(side: PageCheckpoint, fqn: str) -> Json | None:
    if fqn in side.objects:
        return _value(side, fqn)
    node = side.tensors.get(fqn)
    return None if node is None else {"type": "tensor", "tensor": f"{node.dtype.name} {node.grid.shape}"}


def _value(side: PageCheckpoint, fqn: str) -> Json:
    """Return a value as Python's text, or the size of a blob, which is not read."""
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
