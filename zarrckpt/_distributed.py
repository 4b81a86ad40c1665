"""The ranks of a save or a load, and their errors as this package's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from zarrckpt._errors import CheckpointError

T = TypeVar("T")


def in_use() -> bool:
    """Whether this process is one of a group (under torchrun, after init_process_group)."""
    return dist.is_available() and dist.is_initialized()


def global_rank() -> int:
    """This process's rank in the default group; 0 where there is none."""
    return dist.get_rank() if in_use() else 0


@dataclass(frozen=True)
class Ranks:
    """The ranks that save or load together: those of a process group (default: all), or this process alone.

    Raises ValueError where both a group and ``no_dist`` are given.
    """

    group: dist.ProcessGroup | None = None
    no_dist: bool = False
    """Whether this process is alone although there is a group: no collective then, and no group is made or used."""

    def __post_init__(self) -> None:
        if self.no_dist and self.group is not None:
            raise ValueError("no_dist=True is for this process alone: leave process_group out, or no_dist")

    @property
    def alone(self) -> bool:
        """Whether there is no other rank to wait for."""
        return self.no_dist or not in_use()

    @property
    def number(self) -> int:
        """This process's rank among them."""
        return 0 if self.alone else dist.get_rank(self.group)


def from_coordinator(make: Callable[[], T], ranks: Ranks) -> T:
    """Call ``make`` on the coordinator, rank 0; return its result, or raise its error, on every rank. Collective."""
    if ranks.alone:
        return make()
    answer: list[T | BaseException | None] = [None]
    if ranks.number == 0:
        try:
            answer = [make()]
        except Exception as err:
            answer = [err]
    dist.broadcast_object_list(answer, src=_coordinator(ranks.group), group=ranks.group)
    if isinstance(answer[0], BaseException):
        raise answer[0]
    return answer[0]  # type: ignore[return-value]


def _coordinator(group: dist.ProcessGroup | None) -> int:
    return 0 if group is None else dist.get_global_rank(group, 0)


@contextmanager
def own_errors(ranks: Ranks) -> Iterator[None]:
    """Raise what DCP gathered from all ranks as one of this package's errors, the same on every rank.

    But a rank that was interrupted (KeyboardInterrupt, SystemExit) raises just that: an ``except CheckpointError`` must
    not swallow it.

    The message is that of the lowest failed rank; where there are several ranks, a note names those that failed. Any
    other exception becomes the cause of a CheckpointError that names it.
    """
    try:
        yield
    except CheckpointException as err:
        failures = sorted(err.failures.items())
        mine = err.failures.get(ranks.number)
        if mine is not None and not isinstance(mine[0], Exception):
            raise mine[0] from None
        own = [(rank, error) for rank, (error, _) in failures if isinstance(error, CheckpointError)]
        failed = ", ".join(str(rank) for rank, _ in failures)
        alone = ranks.alone or dist.get_world_size(ranks.group) == 1
        if own:
            error: CheckpointError = own[0][1]
            if not alone:
                error.add_note(f"(failed on rank {failed})")
            # Its own cause is the client's error; DCP's wrapper around it says nothing more.
            raise error from error.__cause__
        rank, (other, _) = failures[0]
        said = f"{type(other).__name__}: {other}"
        raise CheckpointError(said if alone else f"rank {rank} failed with {said} (failed ranks: {failed})") from other
