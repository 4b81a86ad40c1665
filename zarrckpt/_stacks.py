"""What ranks keep for themselves, as one array: tensors of one form are stacked, the first axis is the rank. No I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from zarrckpt._documents import MAX_DIMENSIONS
from zarrckpt._errors import UnsupportedValueError
from zarrckpt._grid import Box, Ints
from zarrckpt._owners import Held, Holders
from zarrckpt._state_path import RANKS, StatePath

if TYPE_CHECKING:
    from zarrckpt._holdings import TensorHolders


@dataclass(frozen=True)
class Stacks:
    """The tensors of a save, those of single ranks stacked where that can be."""

    tensors: Mapping[str, TensorHolders]
    paths: Mapping[str, StatePath]
    stack_of: Mapping[str, str] = field(default_factory=dict)
    """The flat name of a rank's own tensor -> that of the stack that it is in."""


@dataclass(frozen=True)
class _Own:
    """One rank's own tensor: its number in the default process group, its flat name, who holds it."""

    number: int
    fqn: str
    holders: TensorHolders


def stacked(tensors: Mapping[str, TensorHolders], paths: Mapping[str, StatePath]) -> Stacks:
    """Stack what ranks keep for themselves under one name, where those of at least two, or of all, have one form.

    Of several forms, the one that most ranks have; the others' tensors stay as they are.
    """
    alike: dict[StatePath, dict[tuple[Ints, str], list[_Own]]] = {}
    for fqn, holders in tensors.items():
        path = paths[fqn]
        if path.rank_at is not None and len(holders.shape) < MAX_DIMENSIONS:
            forms = alike.setdefault(path.with_rank(RANKS), {})
            form = (holders.shape, holders.dtype.name)
            forms.setdefault(form, []).append(_Own(int(path[path.rank_at]), fqn, holders))
    made: dict[str, tuple[StatePath, TensorHolders]] = {}
    stack_of: dict[str, str] = {}
    known: dict[object, Holders] = {}
    for path, forms in alike.items():
        most: list[_Own] = max(forms.values(), key=lambda rows: len(rows))
        own = sorted(most, key=lambda one: one.number)
        if len(own) == 1 < len(forms):
            continue
        path = StatePath(path.keys, path.containers, [one.number for one in own], path.rank_at)
        if path.fqn in paths or path.fqn in made:
            raise UnsupportedValueError(
                f"what ranks keep for themselves in {own[0].fqn!r} is saved under the name {path.fqn!r}, which another "
                "entry has; rename that one"
            )
        made[path.fqn] = (path, _stack(path.fqn, [one.holders for one in own], known))
        stack_of |= {one.fqn: path.fqn for one in own}
    new_paths: dict[str, StatePath] = {}
    new_tensors: dict[str, TensorHolders] = {}
    for fqn, entry in paths.items():
        name = stack_of.get(fqn, fqn)
        new_paths.setdefault(name, made[name][0] if fqn in stack_of else entry)
        if fqn in tensors:
            new_tensors.setdefault(name, made[name][1] if fqn in stack_of else tensors[fqn])
    return Stacks(new_tensors, new_paths, stack_of)


def _stack(fqn: str, rows: list[TensorHolders], known: dict[object, Holders]) -> TensorHolders:
    shape = rows[0].shape
    ranks = tuple(int(row.held.ranks[0]) if len(row.held.ranks) else -1 for row in rows)
    # Their grid is chosen once, for elements of one size.
    key = (shape, ranks, rows[0].dtype.itemsize)
    if key not in known:
        origin = (0,) * len(shape)
        boxes = (Box((place, *origin), (1, *shape)) for place in range(len(rows)))
        known[key] = Holders([Held(box, (rank,)) for box, rank in zip(boxes, ranks, strict=True) if box.size])
    places = np.array([row.places[0] for row in rows if len(row.places)], np.int64)
    return replace(rows[0], fqn=fqn, shape=(len(rows), *shape), held=known[key], places=places)
