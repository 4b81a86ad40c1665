"""Plain tensors that describe which boxes of a global tensor they hold: torch 2.14's ``CheckpointableTensor``.

Torch recognizes them by four attributes, and so does this package, with any torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness.ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import zarrckpt

RANKS = 3
SHAPE = (10, 7)
ROWS = [[(0, 2), (6, 1)], [(2, 4), (0, 0)], [(7, 3)]]
"""By rank: the begins of its runs of rows, and their lengths. Some ranks have two, one of them an empty one."""
COLUMNS = [[(0, 1)], [(5, 2), (1, 3)], [(4, 1)]]
PAD = -9
KNOWN_TO_DCP = hasattr(dcp, "CheckpointableTensor")


def _whole(dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(70).reshape(SHAPE).to(dtype)


def _part(whole: torch.Tensor, dim: int, runs: list[list[tuple[int, int]]]) -> Any:
    """Return this rank's runs one after the other, with padding before, between and after them."""
    own = runs[dist.get_rank()]
    shape = [*whole.shape]
    shape[dim] = 1 + sum(n + 1 for _, n in own)
    part: Any = torch.full(shape, PAD, dtype=whole.dtype)
    global_offsets, local_offsets, sizes, place = [], [], [], 1
    for begin, n in own:
        part.narrow(dim, place, n).copy_(whole.narrow(dim, begin, n))
        global_offsets.append(_at(dim, begin))
        local_offsets.append(_at(dim, place))
        sizes.append(tuple(n if axis == dim else size for axis, size in enumerate(whole.shape)))
        place += n + 1
    part.global_shape, part.global_offsets = tuple(whole.shape), tuple(global_offsets)
    part.local_offsets, part.local_sizes = tuple(local_offsets), tuple(sizes)
    return part


def _at(dim: int, begin: int) -> tuple[int, ...]:
    return tuple(begin if axis == dim else 0 for axis in range(len(SHAPE)))


def _state(dtype: torch.dtype, dim: int = 0, value: int | None = None) -> dict[str, Any]:
    whole = _whole(dtype) if value is None else torch.full(SHAPE, value, dtype=dtype)
    part = _part(whole, dim, (ROWS, COLUMNS)[dim])
    empty: Any = torch.zeros(0, 3, dtype=dtype)
    empty.global_shape, empty.global_offsets, empty.local_offsets, empty.local_sizes = (0, 3), (), (), ()
    return {"deep": {"w": part}, "list": [_part(whole, 1 - dim, (ROWS, COLUMNS)[1 - dim])], "empty": empty}


def _save_and_load(folder: str, how: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        url = f"{folder}/{str(dtype)[6:]}"
        for _ in range(2):  # again, with what the first save has kept: the copy's memory, the plan
            state = _state(dtype)
            if how == "async_save":
                future = zarrckpt.async_save(state, url, overwrite=True)
                state["deep"]["w"].fill_(PAD), state["list"][0].fill_(PAD)
                future.result(timeout=60)
            elif how == "save":
                zarrckpt.save(state, url, overwrite=True)
            else:
                del state["empty"]  # DCP leaves it out, because no rank has an element
                dcp.save(state, storage_writer=zarrckpt.ZarrStorageWriter(url, overwrite=True))
        for dim in (0, 1):
            target, expected = _state(dtype, dim, value=PAD), _state(dtype, dim)
            memory = target["deep"]["w"].data_ptr()
            if how == "dcp":
                del target["empty"]
                dcp.load(target, storage_reader=zarrckpt.ZarrStorageReader(url))
            else:
                zarrckpt.load(target, url)
            # In place, with unchanged padding.
            assert target["deep"]["w"].data_ptr() == memory
            assert torch.equal(target["deep"]["w"], expected["deep"]["w"])
            assert torch.equal(target["list"][0], expected["list"][0])


@pytest.mark.parametrize("how", ["async_save", "save", *(["dcp"] if KNOWN_TO_DCP else [])])
def test_parts_are_saved_as_one_tensor_and_load_into_other_parts(how: str, tmp_path: Path) -> None:
    run_ranks(_save_and_load, str(tmp_path), how, world_size=RANKS)
    for dtype in (torch.float32, torch.bfloat16):
        checkpoint = zarrckpt.open(tmp_path / str(dtype)[6:])
        for name in ("deep.w", "list.0"):
            assert checkpoint[name].shape == SHAPE
        loaded = checkpoint.load()
        assert how == "dcp" or loaded["empty"].shape == (0, 3)
        assert torch.equal(loaded["deep"]["w"], _whole(dtype)) and torch.equal(loaded["list"][0], _whole(dtype))


def _from_and_to_dtensors(folder: str) -> None:
    mesh = init_device_mesh("cpu", (RANKS,))
    whole = _whole(torch.float32)
    zarrckpt.save({"w": distribute_tensor(whole, mesh, [Shard(0)])}, f"{folder}/dtensor")
    target: dict[str, Any] = {"w": _part(torch.full_like(whole, PAD), 1, COLUMNS)}
    zarrckpt.load(target, f"{folder}/dtensor")
    assert torch.equal(target["w"], _part(whole, 1, COLUMNS))
    zarrckpt.save(target, f"{folder}/parts")
    back = distribute_tensor(torch.zeros(SHAPE), mesh, [Shard(0)])
    zarrckpt.load({"w": back}, f"{folder}/parts")
    assert isinstance(back, DTensor) and torch.equal(back.full_tensor(), whole)
    target["w"].global_shape = (10, 8)
    with pytest.raises(zarrckpt.KeyMismatchError, match=r"'w' has shape \(10, 8\), the checkpoint has \(10, 7\)"):
        zarrckpt.load(target, f"{folder}/parts")


def test_parts_and_dtensors_load_into_each_other(tmp_path: Path) -> None:
    run_ranks(_from_and_to_dtensors, str(tmp_path), world_size=RANKS)


def _wrong_parts(url: str) -> None:
    cases = [
        ("global_offsets", ((8, 0), (0, 0))),
        ("local_offsets", ((4, 0), (0, 0))),
        ("global_offsets", ((2, 0),)),
        ("local_sizes", ()),
    ]
    # As many elements as the tensor has, but some of them twice.
    overlaid = _part(_whole(torch.float32), 0, [*ROWS[:1], [(0, 4), (0, 0)], *ROWS[2:]])
    twice = _part(_whole(torch.float32), 0, [[*ROWS[0], *ROWS[0]], *ROWS[1:]])
    for part in (overlaid, twice):
        with pytest.raises(zarrckpt.UnsupportedLayoutError, match=r"'w' .*overlap"):
            zarrckpt.save({"w": part}, url)
    for what, wrong in cases:
        part = _part(_whole(torch.float32), 0, ROWS)
        if dist.get_rank() == 1:
            setattr(part, what, wrong)
        with pytest.raises(zarrckpt.UnsupportedLayoutError, match=f"'w': .*{what}"):
            zarrckpt.save({"w": part}, url)
        with pytest.raises(zarrckpt.UnsupportedLayoutError, match=f"'w': .*{what}"):
            zarrckpt.async_save({"w": part}, url).result(timeout=60)


def test_a_box_outside_of_the_tensor_is_refused_by_name(tmp_path: Path) -> None:
    run_ranks(_wrong_parts, str(tmp_path / "one"), world_size=RANKS)
    assert not (tmp_path / "one").exists()
