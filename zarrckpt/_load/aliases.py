"""Targets that share memory: no two of them are filled at the same time, and none loses its content to another."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from zarrckpt._errors import KeyMismatchError
from zarrckpt._load.fill import TensorReads, TensorTarget
from zarrckpt._read.catalog import Catalog
from zarrckpt._read.chunks import subchunks_in
from zarrckpt._state.local_state import listed
from zarrckpt._state.tensors import raw_view

_EXACT_STEPS = 100_000
"""Steps of the search for an element that two strided views share. Views that need more count as sharing."""


def separate_targets(
    catalog: Catalog, targets: Sequence[TensorTarget], limit: int
) -> tuple[list[TensorTarget], list[list[str]]]:
    """Return targets that can be filled in any order, and the names of each group that cannot be filled.

    Of targets that are the same view and have the same stored content, one is read. Other targets that share memory get
    memory of their own, which is copied to them one after the other, if their contents agree. To see whether they do,
    they are read; groups that take more than ``limit`` bytes for that cannot be filled. No request unless targets
    share memory.
    """
    kept, conflicts = dict(enumerate(targets)), []
    for group in _find_groups([target.tensor for target in targets]):
        members = [targets[place] for place in group]
        if _are_one(catalog, members):
            for place in group[1:]:
                del kept[place]
            kept[group[0]] = dataclasses.replace(members[0], filled=_call_all([one.filled for one in members]))
        elif _agree(catalog, members, limit):
            kept.update((place, _copied_later(targets[place])) for place in group)
        else:
            conflicts.append(sorted({one.name or one.fqn for one in members}))
    return list(kept.values()), conflicts


def refuse_conflicts(conflicts: Sequence[Sequence[str]]) -> None:
    """Raise KeyMismatchError naming targets that share memory and whose contents differ."""
    if conflicts:
        raise KeyMismatchError(
            f"{len(conflicts)} groups of targets share memory, and their contents in the checkpoint differ or are too "
            f"large to compare; nothing was loaded:{listed([' and '.join(map(repr, group)) for group in conflicts])}\n"
            "clone() one of each group in the state, or leave one out, for example with keys=[...]"
        )


# -- which targets share memory


class _View(NamedTuple):
    """The memory of a tensor: runs of bytes, repeated along some dimensions."""

    place: int
    start: int
    dims: tuple[tuple[int, int], ...]
    """Stride in bytes, number of repetitions: the largest stride first."""
    run: int
    """Bytes without a gap."""

    @property
    def end(self) -> int:
        return self.start + sum(stride * (n - 1) for stride, n in self.dims) + self.run


def _find_groups(tensors: Sequence[torch.Tensor]) -> list[list[int]]:
    """Return the positions of tensors that share memory, for each group of them. Sorts addresses once."""
    spaces: dict[object, list[_View]] = {}
    for place, tensor in enumerate(tensors):
        if tensor.numel():
            space, view = _view_of(place, tensor)
            spaces.setdefault(space, []).append(view)
    groups = []
    for views in spaces.values():
        whole = {view.place: view for view in views}
        for cluster in _clusters(views):
            groups += _connected([whole[view.place] for view in cluster])
    return groups


def _view_of(place: int, tensor: torch.Tensor) -> tuple[object, _View]:
    address, size = tensor.data_ptr(), tensor.element_size()
    space: object = tensor.device
    if not address:  # devices without addresses
        space, address = (space, tensor.untyped_storage()._cdata), int(tensor.storage_offset()) * size
    if tensor.is_contiguous():
        return space, _View(place, address, (), tensor.numel() * size)
    dims = sorted((stride * size, n) for stride, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1)
    run = size
    while dims and dims[0][0] == run:
        run *= dims.pop(0)[1]
    return space, _View(place, address, tuple(reversed(dims)), run)


def _clusters(views: list[_View]) -> Iterator[list[_View]]:
    """Yield views that may share memory: their address ranges overlap.

    If they have their largest stride in common (columns of one matrix), then so do the ranges within one stride.
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
    """Return the positions of views that share memory, be it through others."""
    same: dict[object, list[int]] = {}
    distinct: list[_View] = []
    for view in sorted(views, key=lambda view: view.start):
        places = same.setdefault(view[1:], [])
        if not places:
            distinct.append(view)
        places.append(view.place)
    groups: list[list[_View]] = []
    for view in distinct:
        merged, apart = [view], []
        for group in groups:
            if any(_share_memory(view, other) for other in group):
                merged += group
            else:
                apart.append(group)
        groups = [*apart, merged]
    positions = [sorted(place for view in group for place in same[view[1:]]) for group in groups]
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
    """An array at the view's addresses, for numpy to compare; its memory is never read."""
    dims = [*view.dims, (1, view.run)]
    strides, shape = zip(*dims, strict=True)
    interface = {"version": 3, "typestr": "|u1", "data": (view.start, True), "shape": shape, "strides": strides}
    return np.asarray(_Interface(interface))


# -- what they get


def _are_one(catalog: Catalog, members: Sequence[TensorTarget]) -> bool:
    """Whether targets are the same view, and the checksums of what is stored for them are the same."""
    first = members[0]
    return all(_form(one) == _form(first) for one in members) and all(
        _same_checksums(catalog, first, one) for one in members[1:]
    )


def _form(target: TensorTarget) -> object:
    tensor = target.tensor
    lies = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.is_conj(), tensor.is_neg())
    return (target.box, tensor.dtype, *lies)


def _same_checksums(catalog: Catalog, a: TensorTarget, b: TensorTarget) -> bool:
    nodes = [catalog.root.tensors[target.fqn] for target in (a, b)]
    node, other = nodes
    if node is other:
        return True
    if (node.grid, node.dtype, node.compression) != (other.grid, other.dtype, other.compression):
        return False
    for one in nodes:
        catalog.refuse_more_chunks_than_checksums(one)
    with catalog.explaining_damage():
        stored = [catalog.stored(one) for one in nodes]
    for chunk in node.grid.chunks_of(a.box):
        numbers = subchunks_in(node.grid, chunk, a.box)
        mine, theirs = (one.table(chunk).checksums[numbers] for one in stored)
        if not np.array_equal(mine, theirs):
            return False
    return True


def _agree(catalog: Catalog, members: Sequence[TensorTarget], limit: int) -> bool:
    """Whether targets that share memory can all have their content: read them, and copy them to a model of it."""
    tensors = [one.tensor for one in members]
    views = [_view_of(place, tensor)[1] for place, tensor in enumerate(tensors)]
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


def _copied_later(target: TensorTarget) -> TensorTarget:
    """The target with memory of its own, which is copied to the target's tensor after all reads."""
    own = torch.empty_like(target.tensor)

    def copy() -> None:
        with torch.no_grad(), torch.inference_mode(target.tensor.is_inference()):
            target.tensor.copy_(own)
        target.filled()

    return dataclasses.replace(target, tensor=own, filled=copy)


def _call_all(calls: Sequence[Callable[[], None]]) -> Callable[[], None]:
    def call() -> None:
        for one in calls:
            one()

    return call
