"""Checkpoints by step: the names of their folders, and the newest of them. No torch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from zarrckpt._commit import protocol
from zarrckpt._commit.protocol import Below, number_in
from zarrckpt._errors import one_line
from zarrckpt._format.documents import join
from zarrckpt._format.root import Root
from zarrckpt._store import Store

_STEP = re.compile(r"step-(\d+)", re.ASCII)

WIDTH = 8
"""Digits of a step in a name, with zeros in front: then listings of a store are in the order of steps."""


def name_of(step: int) -> str:
    """The folder of a step's checkpoint."""
    return f"step-{step:0{WIDTH}d}"


def step_of(name: str) -> int | None:
    """The step of a folder that a :class:`CheckpointManager` has made, padded or not; None for others."""
    match = _STEP.fullmatch(name)
    return None if match is None else int(match[1])


@dataclass(frozen=True)
class Found:
    """A committed checkpoint of a run."""

    step: int
    name: str
    root: Root


def newest_first(store: Store, names: Iterable[str]) -> Iterator[Below]:
    """The checkpoints in folders with these names that end in a step, the greatest step first. A request for each.

    Damaged ones are among them; unfinished saves, and what is no checkpoint, are passed over.
    """
    numbered = [(number, name) for name in names if (number := number_in(name)) is not None]
    for _, name in sorted(numbered, reverse=True):
        yield from protocol.checkpoints_below(store, [name])


def newest_below(store: Store, names: Iterable[str]) -> tuple[str | None, list[Below]]:
    """The folder of the newest sound checkpoint, or None; and the damaged ones that were passed over on the way.

    The newest has the greatest step in its name. Where none with a step is sound, it is the one that was committed last
    among those without.
    """
    damaged: list[Below] = []
    for below in newest_first(store, names):
        if below.root is not None:
            return below.name, damaged
        damaged.append(below)
    rest = protocol.checkpoints_below(store, [name for name in names if number_in(name) is None])
    last = protocol.newest(rest)
    return None if last is None else last.name, damaged + [below for below in rest if below.damage is not None]


def passed_over(store: Store, below: Below) -> str:
    """That a damaged checkpoint was passed over, for a warning."""
    return f"the checkpoint {join(store.url, one_line(below.name))} is passed over, since it is damaged: {below.damage}"
