"""Targets that share memory. They are filled one after the other, and only if their stored contents agree."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from zarrckpt._errors import KeyMismatchError
from zarrckpt._load.fill import TensorReads, TensorTarget
from zarrckpt._read.catalog import Catalog
from zarrckpt._read.chunks import subchunks_in
from zarrckpt._state.local_state import format_lines
from zarrckpt._state.tensors import raw_view

_EXACT_STEPS = 100_000
"""Maximum number of steps to search for an element that two strided views share. With more, they count as sharing."""


def separate_targets(
    catalog: Catalog, targets: Sequence[TensorTarget], limit: int
) -> tuple[list[TensorTarget], list[list[str]]]:
    """Return targets that can be filled in any order, and the names of each group that cannot be filled.

    Of targets that are the same view and have the same stored content, only the first is read. Other targets that share
    memory are read to compare their contents. If the contents agree, each target gets a separate buffer, which is
    copied to the target after all reads. If they differ, or if the comparison needs more than ``limit`` bytes, the
    group cannot be filled. No request unless targets share memory.
    """
    kept, conflicts = dict(enumerate(targets)), []
    for group in _find_groups([target.tensor for target in targets]):
        members = [targets[index] for index in group]
        if _are_same_view_and_content(catalog, members):
            for index in group[1:]:
                del kept[index]
            kept[group[0]] = members[0]._replace(on_filled=_call_all([one.on_filled for one in members]))
        elif _have_equal_contents(catalog, members, limit):
            kept.update((index, _fill_by_copy(targets[index])) for index in group)
        else:
            conflicts.append(sorted({one.name or one.fqn for one in members}))
    return list(kept.values()), conflicts


def refuse_conflicts(conflicts: Sequence[Sequence[str]]) -> None:
    """Raise KeyMismatchError with the targets that share memory and cannot be filled, if there are any."""
    if conflicts:
        shown = format_lines([" and ".join(map(repr, group)) for group in conflicts])
        raise KeyMismatchError(
            f"{len(conflicts)} groups of targets share memory, and their contents in the checkpoint differ or are too "
            f"large to compare. Nothing was loaded:{shown}\n"
            "clone() one tensor of each group in the state, or leave one out, for example with keys=[...]"
        )


# -- the groups of targets that share memory


class _View(NamedTuple):
    """The memory of a tensor: contiguous bytes, repeated along some dimensions."""

    number: int
    """The index of the tensor in the list of tensors."""
    start: int
    dims: tuple[tuple[int, int], ...]
    """The stride in bytes and the number of repetitions of each dimension, largest stride first."""
    nbytes: int
    """The number of contiguous bytes."""

    @property
    def end(self) -> int:
        return self.start + sum(stride * (n - 1) for stride, n in self.dims) + self.nbytes


def _find_groups(tensors: Sequence[torch.Tensor]) -> list[list[int]]:
    """Return groups of tensors that share memory, by their indices. Takes one sort of the addresses."""
    spaces: dict[object, list[_View]] = {}
    for index, tensor in enumerate(tensors):
        if tensor.numel():
            space, view = _view_of(index, tensor)
            spaces.setdefault(space, []).append(view)
    groups = []
    for views in spaces.values():
        whole = {view.number: view for view in views}
        for cluster in _clusters(views):
            groups += _connected([whole[view.number] for view in cluster])
    return groups


def _view_of(index: int, tensor: torch.Tensor) -> tuple[object, _View]:
    address, size = tensor.data_ptr(), tensor.element_size()
    space: object = tensor.device
    if not address:  # The device has no addresses.
        space, address = (space, tensor.untyped_storage()._cdata), int(tensor.storage_offset()) * size
    if tensor.is_contiguous():
        return space, _View(index, address, (), tensor.numel() * size)
    dims = sorted((stride * size, n) for stride, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1)
    nbytes = size
    while dims and dims[0][0] == nbytes:
        nbytes *= dims.pop(0)[1]
    return space, _View(index, address, tuple(reversed(dims)), nbytes)


def _clusters(views: list[_View]) -> Iterator[list[_View]]:
    """Yield groups of views whose address ranges overlap, so that they may share memory.

    If the largest strides are equal (columns of one matrix), the ranges within one stride must overlap, too.
    """
    cluster: list[_View] = []
    end = 0
    for view in [*sorted(views, key=lambda view: view.start), None]:
        if view is not None and view.start < end:
            cluster.append(view)
            end = max(end, view.end)
            continue
        if len(cluster) > 1:
            yield from _within_stride(cluster)
        if view is not None:
            cluster, end = [view], view.end


def _within_stride(cluster: list[_View]) -> Iterator[list[_View]]:
    strides = {view.dims[0][0] if view.dims else 0 for view in cluster}
    stride = strides.pop()
    if stride and not strides:
        base = min(view.start for view in cluster)
        inner = [view._replace(start=(view.start - base) % stride, dims=view.dims[1:]) for view in cluster]
        if all(view.end <= stride for view in inner):
            yield from _clusters(inner)
            return
    yield cluster


def _connected(views: list[_View]) -> list[list[int]]:
    """Return groups of views that share memory, directly or through other views of the group, by their numbers."""
    same: dict[object, list[int]] = {}
    distinct: list[_View] = []
    for view in sorted(views, key=lambda view: view.start):
        numbers = same.setdefault(view[1:], [])
        if not numbers:
            distinct.append(view)
        numbers.append(view.number)
    groups: list[list[_View]] = []
    for view in distinct:
        merged, disjoint = [view], []
        for group in groups:
            if any(_share_memory(view, other) for other in group):
                merged += group
            else:
                disjoint.append(group)
        groups = [*disjoint, merged]
    positions = [sorted(index for view in group for index in same[view[1:]]) for group in groups]
    return [found for found in positions if len(found) > 1]


def _share_memory(a: _View, b: _View) -> bool:
    if a.start >= b.end or b.start >= a.end:
        return False
    if not a.dims and not b.dims:
        return True
    try:
        return np.shares_memory(_as_array(a), _as_array(b), max_work=_EXACT_STEPS)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


class _Interface:
    def __init__(self, interface: Mapping[str, Any]) -> None:
        self.__array_interface__ = interface


def _as_array(view: _View) -> np.ndarray[Any, Any]:
    """Return an array at the view's addresses for ``np.shares_memory``. Its memory is never read."""
    dims = [*view.dims, (1, view.nbytes)]
    strides, shape = zip(*dims, strict=True)
    interface = {"version": 3, "typestr": "|u1", "data": (view.start, True), "shape": shape, "strides": strides}
    return np.asarray(_Interface(interface))


# -- the contents of a group


def _are_same_view_and_content(catalog: Catalog, members: Sequence[TensorTarget]) -> bool:
    """Whether targets are the same view and their stored contents have the same checksums."""
    first = members[0]
    return all(_form(one) == _form(first) for one in members) and all(
        _same_checksums(catalog, first, one) for one in members[1:]
    )


def _form(target: TensorTarget) -> object:
    tensor = target.tensor
    layout = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.is_conj(), tensor.is_neg())
    return (target.box, tensor.dtype, *layout)


def _same_checksums(catalog: Catalog, a: TensorTarget, b: TensorTarget) -> bool:
    nodes = [catalog.root.tensors[target.fqn] for target in (a, b)]
    node, other = nodes
    if node is other:
        return True
    if (node.grid, node.dtype, node.compression) != (other.grid, other.dtype, other.compression):
        return False
    for one in nodes:
        catalog.refuse_too_many_chunks(one)
    with catalog.explaining_damage():
        stored = [catalog.stored_array(one) for one in nodes]
    for chunk in node.grid.chunks_of(a.box):
        numbers = subchunks_in(node.grid, chunk, a.box)
        mine, theirs = (one.table(chunk).checksums[numbers] for one in stored)
        if not np.array_equal(mine, theirs):
            return False
    return True


def _have_equal_contents(catalog: Catalog, members: Sequence[TensorTarget], limit: int) -> bool:
    """Whether all targets that share memory can hold their contents. Reads the contents into a copy of that memory."""
    tensors = [one.tensor for one in members]
    views = [_view_of(index, tensor)[1] for index, tensor in enumerate(tensors)]
    base = min(view.start for view in views) & -16
    size = max(view.end for view in views) - base
    if 2 * sum(tensor.nbytes for tensor in tensors) + size > limit:
        return False
    if any(
        tensor.is_conj() or tensor.is_neg() or (view.start - base) % tensor.element_size()
        for view, tensor in zip(views, tensors, strict=True)
    ):
        return False
    memory = torch.zeros(size, dtype=torch.uint8, device="cpu")
    own, shared = [], []
    for view, tensor in zip(views, tensors, strict=True):
        own.append(torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu"))
        offset = (view.start - base) // tensor.element_size()
        empty = torch.empty(0, dtype=tensor.dtype, device="cpu")
        shared.append(empty.set_(memory.untyped_storage(), offset, tensor.shape, tensor.stride()))
    reads = [TensorTarget(one.fqn, one.box, tensor) for one, tensor in zip(members, own, strict=True)]
    with catalog.explaining_damage():
        TensorReads(catalog, reads, limit, None).read()
    for target, source in zip(shared, own, strict=True):
        target.copy_(source)
    return all(np.array_equal(raw_view(a), raw_view(b)) for a, b in zip(shared, own, strict=True))


def _fill_by_copy(target: TensorTarget) -> TensorTarget:
    """Return the target with a separate buffer, which is copied to the target's tensor after all reads."""
    own = torch.empty_like(target.tensor)

    def copy() -> None:
        with torch.no_grad(), torch.inference_mode(target.tensor.is_inference()):
            target.tensor.copy_(own)
        target.on_filled()

    return target._replace(tensor=own, on_filled=copy)


def _call_all(calls: Sequence[Callable[[], None]]) -> Callable[[], None]:
    def call() -> None:
        for one in calls:
            one()

    return call
