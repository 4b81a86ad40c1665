"""Numbers of parameter groups over all ranks: stages of a pipeline have other parameters in groups of one number.

An optimizer's groups are a list in each rank's state. Groups of several ranks are one group of the checkpoint if they
have the same parameters. So each parameter is saved with its own options, and a load finds them by its name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from zarrckpt._errors import UnsupportedLayoutError
from zarrckpt._format.state_path import StatePath
from zarrckpt._plan.description import ParameterGroup

GroupNumbers = Mapping[tuple[object, ...], int | None]
"""The numbers that groups of a rank have in the checkpoint, by the keys that lead to them in the rank's state, as far
as they are others. None: the group is not saved, as it is empty and other ranks have parameters in it."""


def renumber_groups(found: Mapping[int, Sequence[ParameterGroup]]) -> dict[int, GroupNumbers]:
    """Return the numbers of groups for each description, where ranks have different groups.

    Args:
        found: the groups of each description, the lowest rank's first, by a rank that gave it.

    Raises UnsupportedLayoutError for different groups whose parameters a load cannot find by their names.
    """
    optimizers: dict[str, dict[int, list[ParameterGroup]]] = {}
    for rank, groups in found.items():
        for group in groups:
            optimizers.setdefault(group.optimizer, {}).setdefault(rank, []).append(group)
    changed: dict[int, dict[tuple[object, ...], int | None]] = {}
    for name, by_rank in optimizers.items():
        rows = {rank: [group.members for group in groups] for rank, groups in by_rank.items()}
        if len({*map(tuple, rows.values())}) == 1:
            continue
        # A load finds the options of an Optimizer's group by the names of its parameters, others by their position.
        if not all(group.of_object and not group.by_number for groups in by_rank.values() for group in groups):
            _refuse(name, rows)
        numbers = _numbers_of_groups([*rows.values()])
        for rank, groups in by_rank.items():
            for place, group in enumerate(groups):
                number = numbers.get(group.members or place)
                if number != place:
                    changed.setdefault(rank, {})[group.path.keys[:-1]] = number
    return {**changed}


def _numbers_of_groups(rows: Sequence[Sequence[bytes]]) -> dict[bytes | int, int]:
    """The number of each group by its members; of one that is empty on all ranks, by its position."""
    order: dict[bytes | int, None] = {}
    for place in range(max(map(len, rows))):
        others = (row[place] for row in rows if place < len(row))
        order.setdefault(next(filter(None, others), place))
    for row in rows:
        order |= dict.fromkeys(filter(None, row))
    return {key: number for number, key in enumerate(order)}


def _refuse(optimizer: str, rows: Mapping[int, Sequence[bytes]]) -> None:
    (first, own), *others = rows.items()
    other, theirs = next((rank, row) for rank, row in others if row != own)
    places = range(max(len(own), len(theirs)))
    unlike = [place for place in places if [*own[place : place + 1]] != [*theirs[place : place + 1]]]
    raise UnsupportedLayoutError(
        f"{optimizer!r}: the parameter groups {unlike} of this optimizer's state dict have other parameters on rank "
        f"{other} than on rank {first}, and a load would give all ranks those of rank {first}; nothing was written: "
        "put the optimizer itself and the module that it trains into the state, or wrap what each rank keeps: "
        "zarrckpt.PerRank(value)"
    )


def renumbered(path: StatePath, numbers: GroupNumbers) -> StatePath | None:
    """Return the path that an entry has in the checkpoint; None if it is not saved."""
    for depth in {len(keys) for keys in numbers}:
        keys = path.keys[:depth]
        if keys in numbers:
            number = numbers[keys]
            own = (*keys[:-1], number, *path.keys[depth:])
            return None if number is None else StatePath(own, path.containers, path.ranks, path.rank_at)
    return path
