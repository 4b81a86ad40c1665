"""States whose pieces fit no regular grid, or are too small for separate objects, so that ranks exchange them.

The expected parts of each rank do not come from this package. Dimensions are cut as ``torch.chunk`` does, mesh
dimension by mesh dimension, in the order in which FSDP2 over TP cuts. Values depend on a number, so that values of
another save are recognized.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor import Shard as LocalShard
from torch.distributed._shard.sharded_tensor import ShardedTensor, init_from_local_shards
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

import zarrckpt

Shape = tuple[int, ...]


def mesh_of(ranks: Any) -> DeviceMesh:
    """Return a mesh of these ranks (nested for more dimensions), without process groups. Not collective."""
    return DeviceMesh("cpu", ranks, _init_backend=False, _rank=dist.get_rank())


def full(shape: Shape, number: float = 0) -> torch.Tensor:
    """Return a whole tensor. No two elements are equal, and none equals one of another number."""
    return torch.arange(math.prod(shape), dtype=torch.float64).reshape(shape) + 1000 * number


def _part(whole: torch.Tensor, dim: int, parts: int, mine: int) -> torch.Tensor:
    step = -(-whole.shape[dim] // parts) or 1
    begin = min(mine * step, whole.shape[dim])
    return whole.narrow(dim, begin, min(step, whole.shape[dim] - begin))


def distributed(local: torch.Tensor, shape: Shape, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """Return a DTensor from its local part. Not collective."""
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)


def sharded(whole: torch.Tensor, mesh: DeviceMesh, dim: int = 0) -> DTensor:
    """Return a DTensor cut along one dimension over a mesh of one dimension. Not collective."""
    place = mesh.get_coordinate()
    assert place is not None
    local = _part(whole, dim, mesh.size(), place[0]).clone(memory_format=torch.contiguous_format)
    return distributed(local, tuple(whole.shape), mesh, [Shard(dim)])


def fsdp_tp(whole: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    """Return a parameter as FSDP2 over TP holds it if both cut dimension 0: TP cuts first. ``mesh`` is dp x tp."""
    place = mesh.get_coordinate()
    assert place is not None
    local = _part(_part(whole, 0, mesh.size(1), place[1]), 0, mesh.size(0), place[0]).clone()
    return distributed(local, tuple(whole.shape), mesh, [_StridedShard(0, split_factor=mesh.size(1)), Shard(0)])


def sharded_tensor(whole: torch.Tensor, rows: Sequence[int]) -> ShardedTensor:
    """Return a ShardedTensor with these numbers of rows per rank. Its spec lacks ranks with 0 rows. Collective."""
    rank = dist.get_rank()
    begin = sum(rows[:rank])
    offsets = [begin, *[0] * (whole.dim() - 1)]
    part = whole[begin : begin + rows[rank]].clone()
    mine = [LocalShard.from_tensor_and_offsets(part, offsets, rank)] if rows[rank] else []
    return init_from_local_shards(mine, *whole.shape)


def uneven_wholes(number: float, rows: int = 13) -> dict[str, torch.Tensor]:
    """Return the tensors of :func:`uneven_state`, whole."""
    shapes: dict[str, Shape] = {
        "merged.a": (rows, 3),
        "merged.b": (8,),
        "merged.c": (4, 5),
        "merged.empty_pieces": (3, 2),
        "odd.ten": (10, 3),
        "odd.nine": (9, 2),
        "odd.seventeen": (17,),
        "spec": (11, 2),
        "norm": (6,),
        "plain": (5, 2),
    }
    return {name: full(shape, number + place / 100) for place, (name, shape) in enumerate(shapes.items())}


def uneven_state(number: float, rows: int = 13) -> dict[str, Any]:
    """Return small pieces, uneven FSDP2 over TP, a ShardedTensor, replicas and values, on four ranks. Collective."""
    line, square = mesh_of([0, 1, 2, 3]), mesh_of([[0, 1], [2, 3]])
    whole = uneven_wholes(number, rows)
    return {
        "merged": {name: sharded(whole[f"merged.{name}"], line) for name in ("a", "b", "c", "empty_pieces")},
        "odd": {name: fsdp_tp(whole[f"odd.{name}"], square) for name in ("ten", "nine", "seventeen")},
        "spec": sharded_tensor(whole["spec"], [5, 0, 2, 4]),
        "norm": distributed(whole["norm"].clone(), (6,), line, [Replicate()]),
        "plain": whole["plain"].clone(),
        **uneven_values(number),
    }


def uneven_values(number: float) -> dict[str, Any]:
    """Return the values of :func:`uneven_state`: one becomes JSON, one a blob."""
    return {"value": [1, 2, number, None], "blob": str(number).encode()}


def differing(url: str, number: float, rows: int = 13) -> list[str]:
    """Return the entries of a checkpoint that differ from ``uneven_state(number)``."""
    checkpoint = zarrckpt.open(url)
    wholes, values = uneven_wholes(number, rows), uneven_values(number)
    wrong = [name for name in wholes.keys() & checkpoint if not same_bits(checkpoint[name][...], wholes[name])]
    wrong += [name for name in values.keys() & checkpoint if checkpoint[name] != values[name]]
    return wrong + sorted({*wholes, *values} ^ set(checkpoint))


def same_bits(array: Any, tensor: torch.Tensor) -> bool:
    """Whether a numpy array is a tensor's equal in shape, dtype and every bit."""
    other = tensor.numpy()
    return array.shape == other.shape and array.dtype == other.dtype and array.tobytes() == other.tobytes()


def _held(state: Mapping[str, Any], prefix: str = "") -> dict[str, list[torch.Tensor]]:
    found: dict[str, list[torch.Tensor]] = {}
    for key, value in state.items():
        if isinstance(value, Mapping):
            found |= _held(value, f"{prefix}{key}.")
        elif isinstance(value, ShardedTensor):
            found[prefix + key] = [shard.tensor for shard in value.local_shards()]
        elif isinstance(value, torch.Tensor):
            found[prefix + key] = [value.to_local() if isinstance(value, DTensor) else value]
    return found


def held_of(state: Mapping[str, Any]) -> dict[str, bytes]:
    """Return this rank's own memory of every tensor."""
    return {name: b"".join(part.numpy().tobytes() for part in parts) for name, parts in _held(state).items()}


def clear(state: Mapping[str, Any]) -> None:
    """Set this rank's own memory of every tensor to -1."""
    for parts in _held(state).values():
        for part in parts:
            part.fill_(-1)


def opens(url: str) -> bool:
    """Whether a checkpoint is committed at a url."""
    try:
        zarrckpt.open(url)
    except zarrckpt.CheckpointNotFoundError:
        return False
    return True
