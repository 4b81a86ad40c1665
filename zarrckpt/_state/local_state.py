"""The state of one rank in a save: its flat entries, their description, and digests of replicated contents."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from zarrckpt._errors import UnsupportedLayoutError, UnsupportedValueError
from zarrckpt._format.documents import MAX_DIMENSIONS
from zarrckpt._format.grid import Box, Ints
from zarrckpt._format.state_path import RANKS, StatePath
from zarrckpt._format.values import EncodedValue
from zarrckpt._plan.description import REPLICATED, DescribedEntry, Description, EntryKind, ParameterGroup
from zarrckpt._plan.global_state import ReplicaPart, dtype_of
from zarrckpt._plan.group_numbers import GroupNumbers, renumber_path
from zarrckpt._plan.shards import Sharding
from zarrckpt._reports import count_text
from zarrckpt._state.digests import content_digest, is_compared, is_parameter_list
from zarrckpt._state.flatten import flatten
from zarrckpt._state.group_options import ParameterNames
from zarrckpt._state.local_boxes import LocalBoxes, local_tensors, to_local_boxes
from zarrckpt._state.objects import convert_for_save
from zarrckpt._state.per_rank import PerRank
from zarrckpt._state.tensors import memory_fault, plain_tensor, stride_order
from zarrckpt._state.torch_kinds import is_dtensor

PER_RANK_FAULT = "is a PerRank, which zarrckpt.save, async_save and load accept, but DCP's own calls do not"


class LocalState:
    """The flat state of one rank: leaves and state paths by fqn, and versions of modules as :func:`flatten` returns.

    Raises UnsupportedValueError with a list of the entries that cannot be saved.
    """

    own_memory = True
    """Whether the tensors keep their memory as long as this object lives, so that views of them stay valid."""

    def __init__(
        self,
        leaves: Mapping[str, Any],
        paths: Mapping[str, StatePath],
        versions: Mapping[StatePath, Mapping[str, int]],
    ) -> None:
        refuse_unsaveable(leaves)
        self._leaves = {fqn: to_local_boxes(fqn, leaf) for fqn, leaf in leaves.items()}
        self._paths = paths
        self._versions = versions
        self._groups = [
            _parameter_group(paths[fqn], leaf)
            for fqn, leaf in leaves.items()
            if isinstance(leaf, list) and is_parameter_list(fqn) and paths[fqn].rank_at is None
        ]
        self._renumbered: dict[str, str] = {}
        """The local names of entries that are renamed in the checkpoint, by the names in the checkpoint."""
        self._in_stacks = {path.with_rank(RANKS).fqn: fqn for fqn, path in paths.items() if path.rank_at is not None}
        """The local names of this rank's tensors in stacks, by the names of the stacks."""

    @classmethod
    def from_user_state(cls, state: Mapping[Any, Any]) -> LocalState:
        """Return the local state of a state with modules and other objects. Raises UnsupportedValueError."""
        return cls.from_plain_state(convert_for_save(state).state)

    @classmethod
    def from_plain_state(cls, plain: Mapping[Any, Any]) -> LocalState:
        """Return the local state of nested plain containers, tensors and values. Raises UnsupportedValueError."""
        return cls(*flatten(plain))

    # -- for other ranks

    def description(self) -> Description:
        """Return the description of this rank's state. Raises UnsupportedValueError for a dtype without a Zarr type."""
        shardings: dict[Sharding, int] = {}
        entries = []
        for fqn, leaf in self._leaves.items():
            path = self._paths[fqn]
            path = path if path.rank_at is None else path.with_rank(RANKS)
            if isinstance(leaf, LocalBoxes | torch.Tensor):
                dtype_of(fqn, str(leaf.dtype))
                order = stride_order(leaf) if isinstance(leaf, torch.Tensor) else leaf.order
                entries.append(tensor_entry(path, leaf, str(leaf.dtype), shardings)._replace(order=order))
            else:
                entries.append(DescribedEntry(path, _kind_of(fqn, leaf)))
        return Description(
            tuple(entries), tuple(shardings), groups=tuple(self._groups), versions=shared_versions(self._versions)
        )

    def renumber_groups(self, numbers: GroupNumbers) -> None:
        """Set the numbers of parameter groups in the checkpoint. The methods below expect names with these numbers."""
        self._renumbered = {}
        for fqn, path in self._paths.items() if numbers else ():
            other = renumber_path(path, numbers)
            if other is not None and other is not path:
                self._renumbered[other.fqn] = fqn

    def digest(self, part: ReplicaPart) -> bytes:
        """Return a digest of 8 bytes of a part that other ranks hold too."""
        fqn, offset = part
        found = self.value(fqn) if offset is None else self._tensor(fqn, offset)
        return content_digest(fqn, found) or b""

    def digest_of_parts(self, parts: Iterable[ReplicaPart]) -> bytes:
        """Return a digest of 8 bytes of several parts."""
        digest = hashlib.blake2b(digest_size=8)
        for part in parts:
            digest.update(self.digest(part))
        return digest.digest()

    def refuse_partial_tensors(self) -> None:
        """Raise UnsupportedLayoutError if this rank does not hold all elements of some tensor."""
        parts = []
        for fqn, leaf in self._leaves.items():
            if isinstance(leaf, LocalBoxes):
                held, size = sum(box.size for box in leaf.boxes), math.prod(leaf.shape)
                if held < size:
                    parts.append(f"{fqn!r} lacks {size - held if leaf.boxes else 'all'} elements")
        if parts:
            raise UnsupportedLayoutError(
                f"this process saves alone, but holds only parts of {count_text(len(parts), 'tensor')}. Nothing was "
                f"written:{format_lines(parts)}\nsave on all ranks that hold parts, without no_dist, or save "
                ".full_tensor() of each"
            )

    # -- for the writer

    def tensor(self, fqn: str, box: Box) -> torch.Tensor:
        """Return the memory of a box of an array. For a stack of PerRank tensors, this is the rank's own tensor."""
        return self._tensor(fqn, box.offset)

    def value(self, fqn: str) -> Any:
        """Return a non-tensor entry."""
        leaf = self._leaves[self._renumbered.get(fqn, fqn)]
        return [*leaf] if isinstance(leaf, ParameterNames) else leaf

    def _tensor(self, fqn: str, offset: Ints) -> torch.Tensor:
        leaf = self._leaves[self._in_stacks.get(fqn) or self._renumbered.get(fqn, fqn)]
        tensor: torch.Tensor = leaf.tensor_at(offset) if isinstance(leaf, LocalBoxes) else plain_tensor(leaf)
        return tensor


def shared_versions(versions: Mapping[StatePath, Mapping[str, int]]) -> dict[str, dict[str, int]]:
    """Return the versions of a rank's modules by flat names, in which RANKS stands for the number of the rank."""
    found: dict[str, dict[str, int]] = {}
    for path, own in versions.items():
        shared = path if path.rank_at is None else path.with_rank(RANKS)
        found.setdefault(shared.fqn, {}).update(own)
    return found


def tensor_entry(
    path: StatePath, leaf: LocalBoxes | torch.Tensor, dtype: str, shardings: dict[Sharding, int]
) -> DescribedEntry:
    """Return the described entry of a tensor. A new sharding is added to ``shardings``.

    Raises UnsupportedLayoutError if the size of the local tensor does not fit its mesh.
    """
    if not isinstance(leaf, LocalBoxes):
        return DescribedEntry(path, "tensor", tuple(leaf.shape), dtype)
    boxes = tuple(leaf.boxes)
    if leaf.sharding is None:
        return DescribedEntry(path, "tensor", leaf.shape, dtype, REPLICATED, boxes)
    return DescribedEntry(path, "tensor", leaf.shape, dtype, shardings.setdefault(leaf.sharding, len(shardings)))


def format_lines(faults: Sequence[str]) -> str:
    """Format faults for a message, one per line."""
    more = [f"and {len(faults) - 50} more"] if len(faults) > 50 else []
    return "".join(f"\n  {line}" for line in [*faults[:50], *more])


def refuse_unsaveable(leaves: Mapping[str, Any]) -> None:
    """Raise UnsupportedValueError with a list of the leaves of a flat state that cannot be saved."""
    bad = [f"{fqn!r} {fault}" for fqn, leaf in leaves.items() if (fault := _fault_of(leaf))]
    if bad:
        raise UnsupportedValueError("; ".join(bad))


def _fault_of(leaf: Any) -> str | None:
    if isinstance(leaf, PerRank):
        return PER_RANK_FAULT
    if is_dtensor(leaf) and any(placement.is_partial() for placement in leaf.placements):
        return f"is a DTensor of partial sums, with placements {leaf.placements}: redistribute() it first"
    if not isinstance(leaf, torch.Tensor):
        return None
    if (fault := next(filter(None, map(memory_fault, local_tensors(leaf))), None)) is not None:
        return fault
    if leaf.ndim > MAX_DIMENSIONS:
        return f"has {leaf.ndim} dimensions: more than {MAX_DIMENSIONS} cannot be saved; reshape it"
    return None


def _parameter_group(path: StatePath, members: list[Any]) -> ParameterGroup:
    shown = repr(sorted(members, key=str)).encode("utf-8", "surrogatepass")
    digest = hashlib.blake2b(shown, digest_size=8).digest() if members else b""
    by_number = any(isinstance(member, int) for member in members)
    class_name = members.class_name if isinstance(members, ParameterNames) else ""
    return ParameterGroup(path, digest, class_name, by_number)


def _kind_of(fqn: str, value: Any) -> EntryKind:
    is_empty = value.is_empty if isinstance(value, EncodedValue) else isinstance(value, Mapping) and not value
    if is_empty:
        return "empty"
    return "value" if is_compared(fqn, value) else "opaque"
