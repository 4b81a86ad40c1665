"""The ranks of a save or a load."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

import torch.distributed as dist


def has_default_group() -> bool:
    """Whether this process has a default process group (under torchrun, after init_process_group)."""
    return dist.is_available() and dist.is_initialized()


def global_rank() -> int:
    """Return this process's rank in the default group, or 0 without a group."""
    return dist.get_rank() if has_default_group() else 0


def default_group() -> Callable[[], object]:
    """Return a weak reference to the default group, so that destroy_process_group can end its threads and sockets."""
    world = dist.group.WORLD if has_default_group() else None
    return (lambda: None) if world is None else weakref.ref(world)


@dataclass(frozen=True)
class Ranks:
    """The ranks that save or load together: those of a process group (default: all ranks), or only this process.

    Raises ValueError for a group together with ``no_dist``, and if this process is not a member of the group. Raises
    TypeError for a group of another type.
    """

    group: dist.ProcessGroup | None = None
    no_dist: bool = field(default=False, kw_only=True)
    """Whether only this process takes part, without collectives, even if there is a group."""
    size: int = field(default=1, init=False)
    """The number of ranks when this object was created."""

    def __post_init__(self) -> None:
        if self.no_dist and self.group is not None:
            raise ValueError("no_dist=True means this process only: leave out process_group or no_dist")
        group: object = self.group
        if dist.is_available() and group == dist.GroupMember.NON_GROUP_MEMBER:
            raise ValueError(
                f"process_group: this process, rank {global_rank()}, is not a member of the group. Only the group's "
                "ranks make this call"
            )
        if group is not None and not (dist.is_available() and isinstance(group, dist.ProcessGroup)):
            raise TypeError(f"process_group must be a torch.distributed.ProcessGroup, got a {type(group).__name__}")
        object.__setattr__(self, "size", len(self.members))

    @property
    def members(self) -> tuple[int, ...]:
        """The number of each rank in the default group, in the order of ``group``.

        Raises ValueError if the process group was destroyed.
        """
        if self.no_dist:
            return (global_rank(),)
        if has_default_group() and self.group is None:
            return tuple(range(dist.get_world_size()))
        if not has_default_group() and self.group is None and self.size == 1:
            return (0,)
        try:
            return tuple(dist.get_process_group_ranks(self.group))
        except (KeyError, ValueError) as err:
            what = "the default process group" if self.group is None else "process_group"
            raise ValueError(
                f"{what} was destroyed (destroy_process_group), so this rank cannot save or load with the others: call "
                "this before destroy_process_group, or initialize torch.distributed again and use its groups"
            ) from err
