"""Renumber parameter groups over all ranks, because stages of a pipeline have different parameters in a group.

An optimizer's groups are a list in each rank's state. Groups of several ranks become one group of the checkpoint if
they have the same parameters. So each parameter is saved with its own options, and a load finds them by its name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from zarrckpt._errors import UnsupportedLayoutError
from zarrckpt._format.state_path import StatePath
from zarrckpt._plan.description import ParameterGroup

GroupNumbers = Mapping[tuple[object, ...], int | None]
"""The changed numbers of a rank's groups in the checkpoint, by their keys in the rank's state. None: the group is not
saved, because it is empty here and has parameters on other ranks."""


def renumber_groups(found: Mapping[int, Sequence[ParameterGroup]]) -> dict[int, GroupNumbers]:
    """Return the changed numbers of groups for each description, if ranks have different groups.

    Args:
        found: the groups of each distinct description, by the lowest rank that has it, in ascending order.

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
        # A load finds groups of an Optimizer by the names of their parameters, and other groups by position.
        if not all(group.class_name and not group.by_number for groups in by_rank.values() for group in groups):
            _refuse(name, rows)
        numbers = _numbers_of_groups([*rows.values()])
        for rank, groups in by_rank.items():
            for index, group in enumerate(groups):
                number = numbers.get(group.members or index)
                if number != index:
                    changed.setdefault(rank, {})[group.path.keys[:-1]] = number
    return {**changed}


def _numbers_of_groups(rows: Sequence[Sequence[bytes]]) -> dict[bytes | int, int]:
    """Return the number of each group by its members, or by its position if it is empty on all ranks."""
    order: dict[bytes | int, None] = {}
    for index in range(max(map(len, rows))):
        others = (row[index] for row in rows if index < len(row))
        order.setdefault(next(filter(None, others), index))
    for row in rows:
        order |= dict.fromkeys(filter(None, row))
    return {key: number for number, key in enumerate(order)}


def _refuse(optimizer: str, rows: Mapping[int, Sequence[bytes]]) -> None:
    (first, own), *others = rows.items()
    other, theirs = next((rank, row) for rank, row in others if row != own)
    indices = range(max(len(own), len(theirs)))
    unlike = [index for index in indices if [*own[index : index + 1]] != [*theirs[index : index + 1]]]
    raise UnsupportedLayoutError(
        f"{optimizer!r}: parameter groups {unlike} of this optimizer's state dict have different parameters on rank "
        f"{other} and rank {first}, so a load would give all ranks the groups of rank {first}. Nothing was written. "
        "Pass the optimizer itself with its module, or wrap the state of each rank in zarrckpt.PerRank(...)"
    )


def renumber_path(path: StatePath, numbers: GroupNumbers) -> StatePath | None:
    """Return the path of an entry in the checkpoint, or None if it is not saved."""
    for depth in {len(keys) for keys in numbers}:
        keys = path.keys[:depth]
        if keys in numbers:
            number = numbers[keys]
            own = (*keys[:-1], number, *path.keys[depth:])
            return None if number is None else StatePath(own, path.containers, path.ranks, path.rank_at)
    return path
