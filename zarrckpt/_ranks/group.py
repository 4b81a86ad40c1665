"""The ranks of a save or a load, and their errors as this package's own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch.distributed as dist

from zarrckpt._errors import CheckpointError


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


@contextmanager
def errors_as_ours() -> Iterator[None]:
    """Raise what is no error of this package as the cause of one that names it. For a process alone."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as err:
        raise CheckpointError(f"{type(err).__name__}: {err}") from err
