"""Rounds with one call: by the coordinator alone, or by every rank without a result."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from zarrckpt._ranks.rounds import Rounds

B = TypeVar("B")


def call_on_coordinator(rounds: Rounds, what: str, call: Callable[[], B]) -> B:
    """Call a function on the coordinator in one round, and return its result, or raise its error, on all ranks."""
    return rounds.merge(what, lambda: None, lambda _: call())


def call_on_all(rounds: Rounds, what: str, call: Callable[[], None], stop: Callable[[], None] | None = None) -> None:
    """Call a function on every rank in one round. An error on one rank is raised on all; ``stop`` as in ``merge``."""
    rounds.merge(what, call, lambda _: None, stop)
