"""The states that are saved and loaded: weights with the shapes of a Llama, and targets of the same shapes."""

from __future__ import annotations

import math
from typing import Any

import torch

State = dict[str, torch.Tensor]

PIECE = 128 << 20
"""Maximum size of the files with which limits are measured: that of the largest chunks."""


def layer_shapes(dim: int, kv: int, ffn: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of one layer's weights, by name."""
    shapes: dict[str, tuple[int, ...]] = {"q": (dim, dim), "k": (kv, dim), "v": (kv, dim), "o": (dim, dim)}
    return shapes | {"gate": (ffn, dim), "up": (ffn, dim), "down": (dim, ffn)}


def shapes_of(gigabytes: float, itemsize: int = 4) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of a model of about that size: an embedding, and layers of at most a quarter of it."""
    budget = gigabytes * 1e9 / itemsize
    width = int(math.sqrt(budget / 4 / 14.4))
    dim = max(64, min(4096, 1 << (width.bit_length() - 1)))
    shapes: dict[str, tuple[int, ...]] = {"model.embed.weight": (12 * dim, dim), "model.norm.weight": (dim,)}
    used = 12 * dim * dim
    for layer in range(max(1, round((budget - used) / (14.5 * dim * dim)))):
        weights = layer_shapes(dim, dim // 4, 4 * dim) | {"norm1": (dim,), "norm2": (dim,)}
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in weights.items()}
    return shapes


def make_state(gigabytes: float, dtype: str = "float32") -> State:
    """Return random weights of about that size. ``mix`` means matrices in bfloat16 and vectors in float32."""
    state = {}
    generator = torch.Generator().manual_seed(0)
    for name, shape in shapes_of(gigabytes, 4 if dtype == "float32" else 2).items():
        kind = torch.bfloat16 if dtype == "bfloat16" or (dtype == "mix" and len(shape) > 1) else torch.float32
        state[name] = torch.empty(shape, dtype=kind).uniform_(-1, 1, generator=generator)
    return state


def gpt2_with_adamw() -> State:
    """Return GPT-2 (124M) and its AdamW's state: 592 tensors, 1.49 GB, most of them small."""
    dim, layers = 768, 12
    shapes: dict[str, tuple[int, ...]] = {"wte.weight": (50257, dim), "wpe.weight": (1024, dim)}
    for layer in range(layers):
        name = f"h.{layer}"
        for norm in ("ln_1", "ln_2"):
            shapes |= {f"{name}.{norm}.weight": (dim,), f"{name}.{norm}.bias": (dim,)}
        widths = {"attn.c_attn": (dim, 3 * dim), "attn.c_proj": (dim, dim)}
        widths |= {"mlp.c_fc": (dim, 4 * dim), "mlp.c_proj": (4 * dim, dim)}
        for part, shape in widths.items():
            shapes |= {f"{name}.{part}.weight": shape, f"{name}.{part}.bias": shape[1:]}
    shapes |= {"ln_f.weight": (dim,), "ln_f.bias": (dim,)}
    state = {f"model.{name}": torch.rand(shape) for name, shape in shapes.items()}
    for name, shape in shapes.items():
        state |= {f"optimizer.state.{name}.{moment}": torch.rand(shape) for moment in ("exp_avg", "exp_avg_sq")}
        state[f"optimizer.state.{name}.step"] = torch.tensor(1000.0)
    return state


def small_tensors(count: int) -> State:
    """Return ``count`` vectors of 16 KiB."""
    return {f"model.layers.{number}.weight": torch.rand(4096) for number in range(count)}


def of_kind(kind: str, gigabytes: float, dtype: str) -> State:
    """Return a state by name: "large" of the given size, "gpt2" or "small". Below 0.1 GB the last two are tiny."""
    if kind == "large":
        return make_state(gigabytes, dtype)
    if gigabytes < 0.1:
        return small_tensors(100)
    return gpt2_with_adamw() if kind == "gpt2" else small_tensors(1000)


def sharded(state: State) -> dict[str, Any]:
    """Return every tensor as a DTensor with Shard(0) over all ranks, like FSDP's, each in separate memory."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh, rank, count = init_device_mesh("cpu", (dist.get_world_size(),)), dist.get_rank(), dist.get_world_size()
    found = {}
    for name, tensor in state.items():
        parts = tensor.chunk(count)
        part = parts[rank].clone() if rank < len(parts) else tensor[:0].clone()
        stride = tensor.stride()
        found[name] = DTensor.from_local(part, mesh, [Shard(0)], shape=tensor.shape, stride=stride, run_check=False)
    return found


def like(state: dict[str, Any]) -> dict[str, Any]:
    """Return targets of the same kind, whose memory has been touched."""
    return {name: torch.zeros_like(tensor) + 0 for name, tensor in state.items()}


def clear(target: dict[str, Any]) -> None:
    for tensor in target.values():
        local(tensor).zero_()


def local(tensor: Any) -> torch.Tensor:
    """Return this rank's part."""
    found: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return found


def equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(torch.equal(local(one[name]), local(other[name])) for name in other)


def nbytes(state: dict[str, Any]) -> int:
    """Return the bytes of the whole state, over all ranks."""
    return sum(tensor.numel() * tensor.itemsize for tensor in state.values())


def memory(tensor: Any) -> memoryview:
    """Return a tensor's bytes."""
    data: Any = local(tensor).reshape(-1).view(torch.uint8).numpy()
    return memoryview(data)


def pieces(state: dict[str, Any]) -> list[memoryview]:
    """Return the memory of this rank's state in pieces of at most PIECE bytes, which the limits transfer."""
    found = []
    for tensor in state.values():
        view = memory(tensor)
        found += [view[at : at + PIECE] for at in range(0, len(view), PIECE)]
    return found
