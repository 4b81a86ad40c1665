"""Rounds in which only the coordinator calls a function, or every rank calls one that returns None."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from zarrckpt._ranks.rounds import Rounds

B = TypeVar("B")


def call_on_coordinator(rounds: Rounds, round_name: str, call: Callable[[], B]) -> B:
    """Call a function on the coordinator in one round, and return its result, or raise its error, on all ranks."""
    return rounds.merge(round_name, on_each_rank=lambda: None, on_coordinator=lambda _: call())


def call_on_all(
    rounds: Rounds, round_name: str, call: Callable[[], None], stop: Callable[[], None] | None = None
) -> None:
    """Call a function on every rank in one round. An error on one rank is raised on all. ``stop`` as in ``merge``."""
    rounds.merge(round_name, on_each_rank=call, on_coordinator=lambda _: None, stop=stop)
