"""``zarrckpt.save`` and ``load`` with real processes: trainings are saved and resumed on any mesh."""

from __future__ import annotations

import json
import math
import os
import re
import struct
import subprocess
import sys
import warnings
from collections import UserDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness.merging import MergingOptions
from harness.models import KINDS, Run, make_run, same, snapshot
from harness.ranks import all_ranks_raise, run_ranks
from harness.store_servers import S3Place
from torch import nn
from torch.distributed._shard.sharded_tensor import Shard as SpecShard
from torch.distributed._shard.sharded_tensor import init_from_local_shards
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

import zarrckpt

# -- whole training runs


def _whole(run: Run) -> dict[str, Any]:
    """Return all state that must be restored, gathered without this package."""
    return snapshot(
        {
            "model": get_model_state_dict(run.model),
            "optim": get_optimizer_state_dict(run.model, run.optim),
            "schedule": {k: v for k, v in run.schedule.state_dict().items() if not k.startswith("_")},
            "rng": torch.get_rng_state(),
            "step": run.step,
        }
    )


def _train_and_save(kind: str, url: str) -> tuple[dict[str, Any], list[float], zarrckpt.SaveReport]:
    run = make_run(kind)
    run.train(2)
    report = zarrckpt.save(run.state, url)
    saved = _whole(run)
    return saved, run.train(3), report


def _resume(kind: str, url: str) -> tuple[dict[str, Any], list[float], zarrckpt.LoadReport]:
    run = make_run(kind, seed=5, lr=0.7)
    state = run.state
    report = zarrckpt.load(state, url)
    run.resume(state)
    return _whole(run), run.train(3), report


def _resume_trained(kind: str, url: str) -> tuple[dict[str, Any], list[float], zarrckpt.LoadReport]:
    """Load into a run that has trained before and keeps its gradients."""
    run = make_run(kind, seed=6)
    run.train(1)
    gradients = [p.grad for p in run.model.parameters()]
    state = run.state
    report = zarrckpt.load(state, url)
    assert all(p.grad is g for p, g in zip(run.model.parameters(), gradients, strict=True))
    run.resume(state)
    return _whole(run), run.train(3), report


RESUMES: dict[str, list[tuple[str, int]]] = {
    "plain": [("plain", 0), ("fsdp2", 4)],
    "ddp": [("ddp", 2), ("plain", 0)],
    "fsdp2": [("fsdp2", 3), ("fsdp2", 1), ("hsdp", 4)],
    "fsdp2_tp": [("fsdp2", 3), ("plain", 0)],
    "hsdp": [("fsdp2_tp", 4), ("ddp", 2)],
    "fsdp1": [("fsdp1", 2), ("fsdp2", 3)],
    "compiled": [("compiled", 0), ("fsdp2", 2)],
}
"""Kinds and numbers of ranks that resume a training of another kind. ``test_end_to_end`` resumes each as the same."""


@pytest.mark.parametrize("kind", KINDS)
def test_training_resumes(kind: str, tmp_path: Path) -> None:
    url = str(tmp_path / "step-2")
    ranks = run_ranks(_train_and_save, kind, url, **_where(0 if kind in ("plain", "compiled") else 4))
    saved, losses, report = ranks[0]
    assert all(rank[1] == losses and rank[2] == report for rank in ranks)
    for other, world_size in RESUMES[kind]:
        for loaded, next_losses, _ in run_ranks(_resume, other, url, **_where(world_size)):
            assert same(saved, loaded) == [], (other, world_size)
            assert next_losses == pytest.approx(losses, rel=1e-9), (other, world_size)


def _where(world_size: int) -> dict[str, Any]:
    return {"world_size": world_size} if world_size else {"world_size": 1, "group": False}


def test_a_load_does_not_change_gradients(tmp_path: Path) -> None:
    url = str(tmp_path / "step-2")
    saved, losses, _ = run_ranks(_train_and_save, "fsdp2", url)[0]
    for loaded, next_losses, report in run_ranks(_resume_trained, "fsdp2", url, world_size=2):
        assert same(saved, loaded) == []
        assert next_losses == pytest.approx(losses, rel=1e-9)
        assert report.missing == report.unexpected == ()


# -- layouts of one tensor


def _source(shape: tuple[int, ...]) -> torch.Tensor:
    return (torch.arange(math.prod(shape), dtype=torch.float32) + 0.5).reshape(shape)


def _save_rows(url: str, **options: Any) -> zarrckpt.SaveReport:
    mesh = init_device_mesh("cpu", (4,))
    return zarrckpt.save({"w": distribute_tensor(_source((10, 3)), mesh, [Shard(0)])}, url, **options)


def _save_rows_unmerged(url: str) -> zarrckpt.SaveReport:
    return _save_rows(url, options=MergingOptions(min_piece_bytes=0))


def test_each_rank_writes_its_own_chunks(tmp_path: Path) -> None:
    report = run_ranks(_save_rows_unmerged, str(tmp_path / "one"))[0]
    assert zarrckpt.open(tmp_path / "one").writers("w").tolist() == [[0], [1], [2], [3]]
    assert zarrckpt.open(tmp_path / "one")["w"].chunks == (3, 3)
    # Three rows of three float32 and a checksum. The last chunk is stored padded.
    assert report.rank_bytes == (40, 40, 40, 40) and report.nbytes == 160 and report.objects == 4


def test_small_pieces_are_merged_into_one_chunk(tmp_path: Path) -> None:
    report = run_ranks(_save_rows, str(tmp_path / "one"))[0]
    checkpoint = zarrckpt.open(tmp_path / "one")
    assert checkpoint["w"].chunks == (10, 3) and report.objects == 1 and report.nbytes == 124
    assert sorted(report.rank_bytes) == [0, 0, 0, 124]
    assert (checkpoint["w"][...] == _source((10, 3)).numpy()).all()


def _save_strided(rows: int, url: str) -> None:
    """Save one weight under FSDP2 over TP, both cutting its rows."""
    source = _source((rows, 3))
    model = nn.Sequential(nn.Linear(3, rows, bias=False))
    with torch.no_grad():
        model[0].weight.copy_(source)
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    held = model[0].weight.to_local()
    mine = _part(_part(source, 2, mesh["tp"].get_local_rank()), mesh["dp"].size(), mesh["dp"].get_local_rank())
    assert torch.equal(held, mine)
    zarrckpt.save({"model": model}, url)
    target = torch.zeros_like(source)
    zarrckpt.load({"model": {"0.weight": target}}, url)
    assert torch.equal(target, source)
    # A whole tensor loads into uneven shards.
    whole = f"{url}-whole"
    zarrckpt.save({"model": {"0.weight": source}}, whole)
    with torch.no_grad():
        held.zero_()
    zarrckpt.load({"model": model}, whole)
    assert torch.equal(held, mine)


def _part(rows: torch.Tensor, parts: int, number: int) -> torch.Tensor:
    chunks = rows.chunk(parts)
    return chunks[number] if number < len(chunks) else rows[:0]


def _save_strided_all(folder: str) -> None:
    for rows in (*range(1, 10), 13, 16, 19, 26):
        _save_strided(rows, f"{folder}/{rows}")


def test_fsdp2_over_tp_on_one_dimension_is_saved_right(tmp_path: Path) -> None:
    run_ranks(_save_strided_all, str(tmp_path))


def _save_interleaved(url: str, rows: int) -> None:
    """Save with strides that really interleave: a rank holds several boxes."""
    mesh = init_device_mesh("cpu", (4,))
    placement = _StridedShard(0, split_factor=2)
    local = placement._split_tensor(_source((rows, 3)), 4, with_padding=False)[0][dist.get_rank()]
    tensor = DTensor.from_local(local, mesh, [placement], run_check=False, shape=(rows, 3), stride=(3, 1))
    zarrckpt.save({"w": tensor}, url)
    target = torch.zeros(rows, 3)
    zarrckpt.load({"w": target}, url)
    assert torch.equal(target, _source((rows, 3)))
    local.zero_()
    zarrckpt.load({"w": tensor}, url)
    assert torch.equal(local, placement._split_tensor(target, 4, with_padding=False)[0][dist.get_rank()])


@pytest.mark.parametrize("rows", [16, 13, 5])
def test_interleaved_shards_are_several_boxes(rows: int, tmp_path: Path) -> None:
    run_ranks(_save_interleaved, str(tmp_path / "one"), rows)


def _save_drifted(url: str) -> list[str]:
    """Save entries that differ between ranks, beside equal ones."""
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (4,))
    drifted = torch.zeros(200_000)
    drifted[100_000::2] = rank
    state = {
        "rng": torch.full((16,), rank, dtype=torch.uint8),
        "lr": 0.1 * (rank // 2),
        "shape": torch.zeros(2 + rank // 3),
        "dtype": torch.zeros(2, dtype=torch.int32 if rank else torch.int64),
        "replica": DTensor.from_local(drifted, mesh, [Replicate()], run_check=False),
        "blob": bytes([rank]),
        "same": {"t": torch.arange(100_000).float().t(), "v": [1, float("nan")], "b": b"x", "o": {1, 2}},
        "shard": distribute_tensor(_source((10, 3)), mesh, [Shard(0)]),
        **({"only": 1} if rank == 2 else {}),
    }
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        zarrckpt.save(state, url)
    return [str(warning.message) for warning in caught if "differ between ranks" in str(warning.message)]


def test_differing_entries_are_named_and_saved_from_the_lowest_rank(tmp_path: Path) -> None:
    url = str(tmp_path / "one")
    messages = run_ranks(_save_drifted, url)
    assert [len(found) for found in messages] == [1, 0, 0, 0]
    named = set(re.findall(r"'(\w+)' \(ranks 0, 1, 2, 3\)", messages[0][0]))
    assert named == {"rng", "lr", "shape", "dtype", "replica", "blob"}
    saved = zarrckpt.open(url)
    assert saved["rng"][:].max() == 0 and saved["lr"] == 0 and saved["shape"].shape == (2,) and saved["blob"] == b"\0"
    assert saved["dtype"].dtype == "int64" and saved["replica"][:].max() == 0 and saved["only"] == 1


def _save_on_two_meshes(url: str) -> None:
    """Save experts: one name on disjoint meshes means different tensors."""
    rank = dist.get_rank()
    meshes = [DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])]
    local = torch.full((2, 3), float(rank // 2))
    expert = DTensor.from_local(local, meshes[rank // 2], [Shard(0)], run_check=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        zarrckpt.save({"expert": expert}, url)
    assert rank or any("'expert' (ranks 0, 1, 2, 3)" in str(warning.message) for warning in caught)


def _save_two_forms(url: str) -> None:
    """Save shards of two dtypes, and a tensor on some ranks that is a value on the others."""
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (4,))
    local = torch.ones(1, 3, dtype=torch.int32 if rank == 2 else torch.float32)
    for state in (
        {"w": DTensor.from_local(local, mesh, [Shard(0)], run_check=False)},
        {"w": torch.ones(3) if rank < 3 else 1.0},
    ):
        with pytest.raises(zarrckpt.UnsupportedLayoutError, match=r"'w' is .*"):
            zarrckpt.save(state, url)


def test_one_name_for_two_forms_is_refused(tmp_path: Path) -> None:
    run_ranks(_save_two_forms, str(tmp_path / "one"))


def test_one_name_on_disjoint_meshes_is_named(tmp_path: Path) -> None:
    run_ranks(_save_on_two_meshes, str(tmp_path / "one"))
    assert zarrckpt.open(tmp_path / "one")["expert"][:].tolist() == [[0.0] * 3] * 4


def _save_without_one_ranks_part(url: str) -> None:
    mesh = init_device_mesh("cpu", (4,))
    whole = {"w": distribute_tensor(_source((8, 3)), mesh, [Shard(0)], src_data_rank=None), "b": torch.ones(3)}
    zarrckpt.save({"b": whole["b"]} if dist.get_rank() == 1 else whole, url)


def test_a_missing_shard_is_found_before_a_write(tmp_path: Path) -> None:
    message = all_ranks_raise(zarrckpt.CheckpointError, _save_without_one_ranks_part, str(tmp_path / "one"))
    assert "w" in message and not (tmp_path / "one").exists()


# -- kinds of tensors

DTYPES = [
    torch.bool,
    *(torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32, torch.uint64, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu),
]


def _bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def _random(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Return random bits, so also nan payloads, infinities, negative zeros."""
    if dtype == torch.bool:
        return torch.rand(shape) < 0.5
    return torch.randint(0, 256, (*shape[:-1], shape[-1] * dtype.itemsize), dtype=torch.uint8).view(dtype)


@pytest.mark.parametrize("portable", [False, True])
def test_every_dtype_round_trips_bit_for_bit(portable: bool, tmp_path: Path) -> None:
    state = {str(dtype): _random(dtype, 7, 5) for dtype in DTYPES}
    state |= {f"scalar {dtype}": _random(dtype, 1)[0] for dtype in DTYPES}
    zarrckpt.save(state, tmp_path / "one", options=zarrckpt.SaveOptions(portable_dtypes=portable))
    targets = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    places = [target.data_ptr() for target in targets.values()]
    zarrckpt.load(targets, tmp_path / "one")
    assert [name for name in state if _bits(targets[name]) != _bits(state[name])] == []
    assert [target.data_ptr() for target in targets.values()] == places


def _dcp_save(state: dict[str, Any], url: Path, options: zarrckpt.SaveOptions) -> None:
    dcp.save(dict(state), storage_writer=zarrckpt.ZarrStorageWriter(url, options=options), no_dist=True)


def _manager_save(state: dict[str, Any], url: Path, options: zarrckpt.SaveOptions) -> None:
    with zarrckpt.CheckpointManager(url.with_name("run"), signals=(), options=options) as manager:
        manager.save(1, state)
    url.with_name("run").joinpath("step-00000001").rename(url)


def _import(state: dict[str, Any], url: Path, options: zarrckpt.SaveOptions) -> None:
    torch.save(state, url.with_name("state.pt"))
    zarrckpt.import_checkpoint(url.with_name("state.pt"), url, options=options)


WAYS_TO_SAVE: dict[str, Callable[[dict[str, Any], Path, zarrckpt.SaveOptions], Any]] = {
    "save": lambda state, url, options: zarrckpt.save(state, url, options=options),
    "async_save": lambda state, url, options: zarrckpt.async_save(state, url, options=options).result(),
    "dcp": _dcp_save,
    "manager": _manager_save,
    "import": _import,
}


@pytest.mark.parametrize("way", WAYS_TO_SAVE)
def test_saves_store_the_arrays_of_a_portable_copy(way: str, tmp_path: Path) -> None:
    state = {str(dtype): _random(dtype, 7, 5) for dtype in DTYPES} | {"own": torch.ones(3).bfloat16()}
    zarrckpt.save(state, tmp_path / "native")
    native = zarrckpt.open(tmp_path / "native")
    zarrckpt.copy(native, tmp_path / "copied", portable_dtypes=True)
    WAYS_TO_SAVE[way](state, tmp_path / "saved", zarrckpt.SaveOptions(portable_dtypes=True))
    saved = zarrckpt.open(tmp_path / "saved")
    for name, tensor in state.items():
        documents = [json.loads((tmp_path / url / name / "zarr.json").read_bytes()) for url in ("saved", "copied")]
        assert documents[0] == documents[1] and _bits(saved.load(name)[name]) == _bits(tensor)
    assert documents[0]["data_type"] == "uint16" and saved.verify() and zarrckpt.diff(native, saved, *state)
    assert repr(saved.stats()["own"]) == repr(native.stats()["own"])
    zarrckpt.copy(saved, tmp_path / "back", dtype={"own": "float32"})
    assert zarrckpt.open(tmp_path / "back").read(["own"])["own"].tolist() == [1, 1, 1]


def test_views_are_saved_by_content_and_filled_in_place(tmp_path: Path) -> None:
    base = torch.randn(6, 8, dtype=torch.complex64)
    views = {
        "transposed": base.t(),
        "strided": base[::2, 1::3],
        "conjugate": base.conj(),
        "negative": base.conj().imag,
        "expanded": base[:1].expand(4, 8),
        "imaginary": base.imag,
    }
    zarrckpt.save(views, tmp_path / "one")
    whole = torch.zeros(12, 16, dtype=torch.complex64)
    memory = torch.zeros(9, 9)
    targets = {
        "transposed": whole[:6, :8].t(),
        "strided": whole[6:9, 9:12],
        "conjugate": torch.zeros_like(base).conj(),
        "negative": memory[1:7, 1:9],
        "expanded": torch.zeros(8, 4, dtype=torch.complex64).t(),
        "imaginary": torch.zeros(6, 8),
    }
    zarrckpt.load(targets, tmp_path / "one")
    assert [name for name in views if not torch.equal(targets[name], views[name])] == []
    assert torch.equal(whole[:6, :8], base) and torch.equal(memory[1:7, 1:9], base.conj().imag)
    assert memory[0].eq(0).all() and memory[:, 0].eq(0).all() and whole[9:].eq(0).all()


def _unsaveable() -> dict[str, Any]:
    values = {
        "sparse": torch.eye(3).to_sparse(),
        "meta": torch.empty(3, device="meta"),
        "quantized": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        "half_complex": torch.zeros(3, dtype=torch.complex32),
        "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    }
    if dist.is_initialized():
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        values["partial"] = DTensor.from_local(torch.ones(3), mesh, [Partial()])
    return values


def _save_unsaveable(name: str, url: str, only_rank: int | None) -> None:
    odd = _unsaveable()[name]
    here = only_rank is None or dist.get_rank() == only_rank
    zarrckpt.save({"good": torch.ones(4), "odd": {name: odd if here else torch.ones(3)}}, url)


@pytest.mark.parametrize("name", ["sparse", "meta", "quantized", "half_complex", "nested", "partial"])
def test_unsupported_objects_are_refused_by_name(name: str, tmp_path: Path) -> None:
    for only_rank in (None, 2):
        message = all_ranks_raise(zarrckpt.CheckpointError, _save_unsaveable, name, str(tmp_path / "one"), only_rank)
        assert f"odd.{name}" in message
        assert not (tmp_path / "one").exists()


def _save_sharded_tensor(url: str) -> None:
    rank, source = dist.get_rank(), _source((10, 4))
    rows = source[3 * rank : 3 * rank + 3].clone()
    shards = [SpecShard.from_tensor_and_offsets(rows, [3 * rank, 0], rank)]
    zarrckpt.save({"w": init_from_local_shards(shards, [10, 4])}, url, options=MergingOptions(min_piece_bytes=0))
    target = init_from_local_shards([SpecShard.from_tensor_and_offsets(rows * 0, [3 * rank, 0], rank)], [10, 4])
    zarrckpt.load({"w": target}, url)
    assert torch.equal(target.local_shards()[0].tensor, rows)
    full = torch.zeros(10, 4)
    zarrckpt.load({"w": full}, url)
    assert torch.equal(full, source)


def test_sharded_tensors_round_trip(tmp_path: Path) -> None:
    run_ranks(_save_sharded_tensor, str(tmp_path / "one"))
    assert zarrckpt.open(tmp_path / "one").writers("w").tolist() == [[0], [1], [2], [3]]


# -- states of many shapes


class Counter:
    """A Stateful object that is not a module."""

    def __init__(self, count: int = 0, fail: bool = False) -> None:
        self.count = count
        self.fail = fail

    def state_dict(self) -> dict[str, Any]:
        if self.fail:
            raise OSError("the counter is out of reach")
        return {"count": self.count, "history": torch.full((2,), float(self.count))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]
        assert torch.equal(state["history"], torch.full((2,), float(self.count)))


def _nested(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    nets = [nn.Linear(3, 4), nn.Linear(4, 2)]
    optims = {"first": torch.optim.SGD(nets[0].parameters(), lr=0.1 + seed, momentum=0.9)}
    optims["second"] = torch.optim.Adam(nets[1].parameters(), lr=0.2 + seed)
    nets[1](nets[0](torch.ones(1, 3))).sum().backward()
    for optim in optims.values():
        optim.step()
    return {
        "nets": nets,
        "deep": {"optims": optims, "counters": [Counter(seed), {"again": Counter(seed + 1)}, seed]},
        "plain": {"lr": seed / 7, "names": ["a", seed], 3: torch.full((2,), seed)},
    }


def test_objects_in_nested_containers_round_trip(tmp_path: Path) -> None:
    saved, target = _nested(1), _nested(2)
    zarrckpt.save(saved, tmp_path / "one")
    objects = [*target["nets"], *target["deep"]["optims"].values(), *target["deep"]["counters"][:2]]
    lists = target["nets"], target["deep"]["counters"], target["plain"]
    report = zarrckpt.load(target, tmp_path / "one")
    now = [*target["nets"], *target["deep"]["optims"].values(), *target["deep"]["counters"][:2]]
    assert all(a is b for a, b in zip(objects, now, strict=True))
    assert (target["nets"], target["deep"]["counters"], target["plain"]) == lists
    assert target["deep"]["counters"][0].count == 1 and target["deep"]["counters"][1]["again"].count == 2
    assert target["deep"]["counters"][2] == 1
    assert target["plain"]["lr"] == 1 / 7 and target["plain"]["names"] == ["a", 1]
    assert target["plain"][3].tolist() == [1, 1]
    for one, other in zip(saved["nets"], target["nets"], strict=True):
        assert same(snapshot(one.state_dict()), snapshot(other.state_dict())) == []
    for name, optim in saved["deep"]["optims"].items():
        assert same(snapshot(optim.state_dict()), snapshot(target["deep"]["optims"][name].state_dict())) == []
    assert "deep.counters.1.again.history" in report.loaded and report.missing == report.unexpected == ()


def test_lists_of_tensors_keep_their_order(tmp_path: Path) -> None:
    zarrckpt.save({"many": [torch.tensor(number) for number in range(12)]}, tmp_path / "one")
    target: dict[str, Any] = {"many": None}
    zarrckpt.load(target, tmp_path / "one")
    assert [int(tensor) for tensor in target["many"]] == [*range(12)]


@pytest.mark.parametrize("key", [1, None, 1.5, True])
def test_keys_of_one_name_are_refused(key: Any, tmp_path: Path) -> None:
    """Also if the entries below them have different names, because a reader refuses the keys."""
    state = {"a": {key: {"x": 1}, str(key): {"y": torch.ones(2)}}}
    with pytest.raises(zarrckpt.UnsupportedValueError, match=rf"'a\.{key}\.y' contradicts another entry.*type of key"):
        zarrckpt.save(state, tmp_path / "c")
    assert not (tmp_path / "c").exists()


def test_many_paths_of_keys_with_one_hash_are_refused(tmp_path: Path) -> None:
    """Each dict has few keys, but a reader compares the keys of whole paths. Their hashes are chosen to be equal."""
    prime, modulus, state = 14029467366897019727, 2**64, {}
    for first in range(4000):
        lane = (2870177450012600261 + first * prime) % modulus
        rotated = (lane << 31 | lane >> 33) % modulus * 11400714785074694791 % modulus
        second = (12345 - rotated) * pow(prime, -1, modulus) % modulus
        if second < 2**61 - 1:
            state[first] = {second: 1}
    assert len(state) > 256
    with pytest.raises(zarrckpt.UnsupportedValueError, match=r"256 of its keys.*the same hash"):
        zarrckpt.save(state, tmp_path / "one")


def test_two_entries_of_one_flat_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(zarrckpt.UnsupportedValueError, match=r"the name 'a\.b'"):
        zarrckpt.save({"a.b": torch.ones(2), "a": {"b": torch.zeros(2)}}, tmp_path / "one")
    assert not (tmp_path / "one").exists()


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight


def _nan_keys(url: str) -> None:
    nan, other = float("nan"), struct.unpack(">d", bytes.fromhex("fff8000000000001"))[0]
    below: dict[str, Any] = {"t": torch.arange(3.0), "v": 1, "list": [{"deep": torch.ones(1)}, {}]}
    state = {"a": {nan: below, (1, nan): dict(below), "nan ": 2}, "b": {("x", other): dict(below), other: 3}}
    zarrckpt.save(state, url)
    target: dict[str, Any] = {"a": None, "b": None}
    zarrckpt.load(target, url)
    in_place = {"a": {nan: {"t": torch.zeros(3), "v": 0, "list": None}}}
    zarrckpt.load(in_place, url)
    assert in_place["a"][nan]["t"].tolist() == [0, 1, 2] and in_place["a"][nan]["v"] == 1
    for loaded in (target, zarrckpt.open(url).load()):
        assert [len(loaded[name]) for name in "ab"] == [3, 2]
        for name, expected in state.items():
            for (key, value), (saved, whole) in zip(loaded[name].items(), expected.items(), strict=True):
                assert repr(key) == repr(saved)
                if isinstance(key, float):
                    assert struct.pack(">d", key) == struct.pack(">d", saved)
                if isinstance(whole, dict):
                    assert value["t"].tolist() == [0, 1, 2] and value["v"] == 1 and len(value) == 3
                    assert value["list"][0]["deep"] == 1 and value["list"][1] == {}
    with pytest.raises(zarrckpt.UnsupportedValueError, match="'a' has NaN as a key more than once"):
        zarrckpt.save({"a": {float("nan"): {"x": 1}, float("nan"): {"y": 1}}}, f"{url}-twice")


@pytest.mark.parametrize(
    "key",
    [frozenset("abc"), (1, frozenset({2})), 1j, 2**600, (2**600,), "\ud83d\ude00", ("a\ud800",), b"x", 10**5000],
    ids=lambda key: f"{type(key).__name__}",
)
def test_keys_that_differ_between_processes_are_refused(key: Any, tmp_path: Path) -> None:
    for state in ({key: torch.ones(1)}, {"a": {"b": {key: 1}}}):
        with pytest.raises(zarrckpt.UnsupportedValueError, match=type(key).__name__):
            zarrckpt.save(state, tmp_path / "one")
    assert not (tmp_path / "one").exists()


def test_a_nan_is_one_key(tmp_path: Path) -> None:
    run_ranks(_nan_keys, str(tmp_path / "ranks"), world_size=2)
    _nan_keys(str(tmp_path / "one"))


def test_each_tied_weight_has_a_name(tmp_path: Path) -> None:
    saved, target = Tied(), Tied()
    optim = torch.optim.Adam(saved.parameters())
    saved.head(saved.embed(torch.tensor([1, 2]))).sum().backward()
    optim.step()
    zarrckpt.save({"model": saved, "optim": optim}, tmp_path / "one")
    assert {"model.embed.weight", "model.head.weight"} <= set(zarrckpt.open(tmp_path / "one").tensors)
    fresh = torch.optim.Adam(target.parameters())
    zarrckpt.load({"model": target, "optim": fresh}, tmp_path / "one")
    assert target.head.weight is target.embed.weight and torch.equal(target.embed.weight, saved.embed.weight)
    assert same(snapshot(optim.state_dict()), snapshot(fresh.state_dict())) == []


def _one_rank_fails(url: str, rank: int, verb: str) -> None:
    state = {"counter": Counter(3, fail=dist.get_rank() == rank), "w": torch.ones(3)}
    if verb == "save":
        zarrckpt.save(state, url)
    else:
        zarrckpt.load(state, url)


@pytest.mark.parametrize("rank", [0, 2])
def test_an_object_that_fails_on_one_rank_fails_everywhere(rank: int, tmp_path: Path) -> None:
    url = str(tmp_path / "one")
    message = all_ranks_raise(zarrckpt.CheckpointError, _one_rank_fails, url, rank, "save", timeout=20)
    assert "out of reach" in message and f"rank {rank}" in message and not Path(url).exists()
    zarrckpt.save({"counter": Counter(), "w": torch.zeros(3)}, url)
    message = all_ranks_raise(zarrckpt.CheckpointError, _one_rank_fails, url, rank, "load", timeout=20)
    assert "out of reach" in message and f"rank {rank}" in message


# -- optimizers


def _adam_run() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    return model, torch.optim.Adam(model.parameters(), lr=0.1)


def _step(model: nn.Module, optim: torch.optim.Optimizer) -> None:
    optim.zero_grad()
    model(torch.ones(1, 3)).sum().backward()
    optim.step()


def test_a_fresh_optimizer_is_saved_without_changes(tmp_path: Path) -> None:
    model, optim = _adam_run()
    model(torch.ones(1, 3)).sum().backward()
    gradients = [p.grad for p in model.parameters()]
    zarrckpt.save({"model": model, "optim": optim}, tmp_path / "one")
    assert not optim.state and all(p.grad is g for p, g in zip(model.parameters(), gradients, strict=True))
    assert not [name for name in zarrckpt.open(tmp_path / "one") if name.startswith("optim.state.")]
    for steps in (0, 2):
        other, target = _adam_run()
        for _ in range(steps):
            _step(other, target)
        target.param_groups[0]["lr"] = 5.0
        zarrckpt.load({"model": other, "optim": target}, tmp_path / "one")
        assert not target.state and target.param_groups[0]["lr"] == 0.1, steps
        _step(model, optim)
        _step(other, target)
        assert torch.equal(model.weight, other.weight)
        model, optim = _adam_run()


def test_parameters_without_gradients_stay_without_state(tmp_path: Path) -> None:
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model, _ = _adam_run()
        model.idle = nn.Parameter(torch.ones(2))
        model.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        return model, torch.optim.Adam(model.parameters(), lr=0.1)

    model, optim = make()
    _step(model, optim)
    zarrckpt.save({"model": model, "optim": optim}, tmp_path / "one")
    for steps in (0, 1):
        other, target = make()
        for _ in range(steps):
            _step(other, target)
        zarrckpt.load({"model": other, "optim": target}, tmp_path / "one")
        assert same(snapshot(optim.state_dict()), snapshot(target.state_dict())) == []
        assert other.idle not in target.state and other.frozen not in target.state


def test_loading_only_the_model_keeps_a_fresh_optimizer(tmp_path: Path) -> None:
    model, optim = _adam_run()
    _step(model, optim)
    zarrckpt.save({"model": model, "optim": optim, "step": 1}, tmp_path / "one")
    other, target = _adam_run()
    state = {"model": other, "optim": target, "step": 0}
    report = zarrckpt.load(state, tmp_path / "one", keys="model")
    assert report.loaded == ("model.bias", "model.weight") and state["step"] == 0
    assert torch.equal(model.weight, other.weight)
    assert not target.state and target.param_groups[0]["lr"] == 0.1


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_round_trips(momentum: float, tmp_path: Path) -> None:
    def make(lr: float) -> tuple[nn.Module, torch.optim.Optimizer]:
        model, _ = _adam_run()
        return model, torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)

    model, optim = make(0.1)
    _step(model, optim)
    zarrckpt.save({"model": model, "optim": optim}, tmp_path / "one")
    other, target = make(0.5)
    zarrckpt.load({"model": other, "optim": target}, tmp_path / "one")
    _step(model, optim)
    _step(other, target)
    assert torch.equal(model.weight, other.weight)
    assert same(snapshot(optim.state_dict()), snapshot(target.state_dict())) == []


def test_an_optimizer_without_its_module_is_saved(tmp_path: Path) -> None:
    model, optim = _adam_run()
    _step(model, optim)
    zarrckpt.save({"optim": optim, "w": model.weight}, tmp_path / "one")
    _, target = _adam_run()
    zarrckpt.load({"optim": target}, tmp_path / "one")
    assert same(snapshot(optim.state_dict()), snapshot(target.state_dict())) == []
    with pytest.raises(zarrckpt.UnsupportedValueError, match="no module in the state has"):
        zarrckpt.save({"optim": optim, "model": nn.Linear(2, 2)}, tmp_path / "two")
    both = torch.optim.SGD([*model.parameters(), *nn.Linear(2, 2).parameters()], lr=0.1)
    with pytest.raises(zarrckpt.UnsupportedValueError, match="no module in the state has"):
        zarrckpt.save({"optim": both, "model": model}, tmp_path / "two")
    assert not (tmp_path / "two").exists()


def test_parts_of_an_optimizer_are_loaded(tmp_path: Path) -> None:
    model, optim = _adam_run()
    _step(model, optim)
    zarrckpt.save({"model": model, "optim": optim}, tmp_path / "one")
    saved = snapshot(optim.state_dict())

    other, fresh = _adam_run()
    fresh.param_groups[0]["lr"] = 5.0
    zarrckpt.load({"model": other, "optim": fresh}, tmp_path / "one", keys=["model", "optim.param_groups"])
    assert not fresh.state and fresh.param_groups[0]["lr"] == 0.1

    _step(other, fresh)
    _step(other, fresh)
    before = snapshot(fresh.state_dict()["state"])
    zarrckpt.load({"model": other, "optim": fresh}, tmp_path / "one", keys="optim.param_groups")
    assert same(before, snapshot(fresh.state_dict()["state"])) == []
    fresh.param_groups[0]["lr"] = 5.0
    zarrckpt.load({"model": other, "optim": fresh}, tmp_path / "one", keys=["optim.state.weight"])
    differ = same(saved, snapshot(fresh.state_dict()))
    # Parameters are numbered: 0 is the weight, 1 the bias.
    assert {name[:8] for name in differ} == {"state.1.", "param_gr"} and fresh.param_groups[0]["lr"] == 5.0


# -- keys that are requested, and keys that exist


def _flat_state(factor: int) -> dict[str, Any]:
    return {
        "model": {"a.weight": torch.full((3,), 1.0 * factor), "a.bias": torch.full((2,), 2.0 * factor)},
        "modeling": torch.full((2,), 3.0 * factor),
        "step": 4 * factor,
        "notes": {"who": "x" * factor, "list": [factor]},
    }


def test_keys_select_entries_and_the_report_lists_them(tmp_path: Path) -> None:
    saved = zarrckpt.save(_flat_state(1), tmp_path / "one")
    assert (saved.url, saved.objects, saved.nbytes) == (str(tmp_path / "one"), 3, 3 * 4 + 2 * 4 + 2 * 4 + 3 * 4)
    names = ("model.a.bias", "model.a.weight", "modeling", "notes.list", "notes.who", "step")
    for keys, loaded in {
        None: names,
        "model": ("model.a.bias", "model.a.weight"),
        "*.bias": ("model.a.bias",),
        ("step", "notes"): ("notes.list", "notes.who", "step"),
        "model*": ("model.a.bias", "model.a.weight", "modeling"),
    }.items():
        target = _flat_state(0)
        report = zarrckpt.load(target, tmp_path / "one", keys=keys)
        assert report.loaded == loaded and report.missing == report.unexpected == ()
        assert report.save_id == saved.save_id and report.url == saved.url
        expected, untouched = snapshot(_flat_state(1)), snapshot(_flat_state(0))
        wanted = {name: expected[name] if name in loaded else untouched[name] for name in expected}
        assert same(snapshot(target), wanted) == []
    with pytest.raises(zarrckpt.KeyMismatchError, match=r"'mode'.*match nothing"):
        zarrckpt.load(_flat_state(0), tmp_path / "one", keys=["model", "mode"])


def test_targets_with_more_or_fewer_entries(tmp_path: Path) -> None:
    zarrckpt.save(_flat_state(1), tmp_path / "one")
    target: dict[str, Any] = {"model": {"a.weight": torch.zeros(3), "b": torch.zeros(1)}, "step": 0, "extra": "kept"}
    with pytest.raises(zarrckpt.KeyMismatchError) as caught:
        zarrckpt.load(target, tmp_path / "one")
    assert "'model.b'" in str(caught.value) and "'extra'" in str(caught.value)
    assert target["step"] == 0 and target["model"]["a.weight"].eq(0).all()
    report = zarrckpt.load(target, tmp_path / "one", strict=False)
    assert report.missing == ("extra", "model.b")
    assert report.unexpected == ("model.a.bias", "modeling", "notes.list", "notes.who")
    assert report.loaded == ("model.a.weight", "step")
    assert target["step"] == 4 and target["model"]["a.weight"].eq(1).all()
    assert target["model"]["b"].eq(0).all() and target["extra"] == "kept"


class Renamed(nn.Module):
    """Two layers, of which the first one has any name."""

    def __init__(self, first: str) -> None:
        super().__init__()
        self.add_module(first, nn.Linear(2, 2))
        self.out = nn.Linear(2, 2)


def _renamed(first: str, rates: tuple[float, float]) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Renamed(first)
    groups = [
        {"params": [*layer.parameters()], "lr": rate} for layer, rate in zip(model.children(), rates, strict=True)
    ]
    return model, torch.optim.Adam(groups)


def test_renamed_layers_keep_their_optimizer_state(tmp_path: Path) -> None:
    model, optim = _renamed("old", (0.1, 0.2))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optim.step()
    own = zarrckpt.PerRank({"net": model, "optim": optim, "t": torch.ones(2)})
    zarrckpt.save({"model": model, "optim": optim, "own": own, "step": 3}, tmp_path / "one")
    expected = [optim.state[parameter]["exp_avg"].tolist() for parameter in model.parameters()]

    def check(state: dict[str, Any], other: nn.Module, other_optim: torch.optim.Optimizer, **options: Any) -> Any:
        report = zarrckpt.load(state, tmp_path / "one", **options)
        assert same(snapshot(dict(enumerate(other.parameters()))), snapshot(dict(enumerate(model.parameters())))) == []
        assert [other_optim.state[parameter]["exp_avg"].tolist() for parameter in other.parameters()] == expected
        assert [group["lr"] for group in other_optim.param_groups][::-1] == [0.1, 0.2] and report.missing == ()
        return report

    def fresh() -> tuple[nn.Module, torch.optim.Optimizer]:
        other, other_optim = _renamed("new", (3.0, 4.0))
        other_optim.param_groups.reverse()
        return other, other_optim

    other, other_optim = fresh()
    report = check({"model": other, "optim": other_optim}, other, other_optim, rename={"model.old.": "model.new."})
    assert {"model.new.weight", "optim.state.new.weight.exp_avg"} <= {*report.loaded} and "step" in report.unexpected
    other, other_optim = fresh()
    state: dict[str, Any] = {"net": other, "opt": other_optim, "step": 0}
    rename = {"model": "net", "model.old": "net.new", "optim": "opt"}
    check(state, other, other_optim, rename=lambda name: _by_table(name, rename), keys=["net", "opt"])
    assert state["step"] == 0
    other, other_optim = fresh()
    mine = zarrckpt.PerRank({"net": other, "optim": other_optim, "t": torch.zeros(2)})
    check({"mine": mine}, other, other_optim, rename={"own": "mine", "own.ranks.net.old": "mine.ranks.net.new"})
    assert mine.value["t"].eq(1).all()
    nested: dict[str, Any] = {"net": None}
    zarrckpt.load(nested, tmp_path / "one", rename={"model.old": "net.a.b"})
    assert [*nested["net"]["a"]["b"]] == ["weight", "bias"]


def _by_table(name: str, table: dict[str, str]) -> str:
    begin = max((begin for begin in table if name.startswith(f"{begin}.")), key=len, default=None)
    return name if begin is None else f"{table[begin]}{name[len(begin) :]}"


def test_renames_and_names_that_do_not_fit_are_explained(tmp_path: Path) -> None:
    zarrckpt.save({"model": Renamed("attention"), "step": 3}, tmp_path / "one")
    cases: list[tuple[Any, tuple[str, ...]]] = [
        ({"modle.": "model."}, ("'modle.'", "no entry")),
        ({"model.attention": "model.out"}, ("'model.attention.weight'", "'model.out.weight'", "Nothing was loaded")),
        (lambda name: "one", ("'one'",)),
        (lambda name: None, ("returned None",)),
        (None, ("'model.attn.weight': did you mean 'model.attention.weight'", "rename=")),
    ]
    for rename, words in cases:
        target = Renamed("attn")
        with pytest.raises(zarrckpt.KeyMismatchError) as caught:
            zarrckpt.load({"model": target}, tmp_path / "one", rename=rename)
        assert all(word in str(caught.value) for word in words), str(caught.value)
    with pytest.raises(TypeError, match="rename"):
        zarrckpt.load({}, tmp_path / "one", rename="model")  # type: ignore[arg-type]
    with zarrckpt.CheckpointManager(tmp_path / "run", background=False, signals=()) as manager:
        manager.save(1, {"model": Renamed("old")})
        assert manager.restore({"model": Renamed("new")}, rename={"model.old": "model.new"}) == 1


def test_dtypes_are_converted_only_on_request(tmp_path: Path) -> None:
    zarrckpt.save({"w": torch.tensor([1.5, -2.5])}, tmp_path / "one")
    target = {"w": torch.zeros(2, dtype=torch.bfloat16)}
    with pytest.raises(zarrckpt.KeyMismatchError, match=r"bfloat16.*float32"):
        zarrckpt.load(target, tmp_path / "one")
    zarrckpt.load(target, tmp_path / "one", allow_cast=True)
    assert target["w"].tolist() == [1.5, -2.5]
    with pytest.raises(zarrckpt.KeyMismatchError, match=r"float64.*float32"):
        zarrckpt.load({"w": torch.zeros(2, dtype=torch.float64)}, tmp_path / "one")


@pytest.mark.parametrize("saved", [torch.int64, torch.bool, torch.bfloat16, torch.float64, torch.complex128])
def test_casts_work_for_pieces_across_chunks(saved: torch.dtype, tmp_path: Path) -> None:
    """Every piece is converted separately: parts of subchunks, of any size and alignment."""
    whole = torch.arange(3 * 5 * 7).reshape(3, 5, 7).to(saved)
    parts = {"w": whole, "scalar": whole[1, 2, 3].clone(), "empty": whole[:0]}
    zarrckpt.save(parts, tmp_path / "one", options=zarrckpt.SaveOptions(max_chunk_bytes=40 * whole.element_size()))
    wide = torch.complex128 if saved.is_complex else torch.float32
    strided = torch.zeros(7, 5, 3, dtype=wide).permute(2, 1, 0)
    target = {"w": strided, "scalar": torch.zeros((), dtype=wide), "empty": torch.zeros(0, 5, 7, dtype=wide)}
    if saved.is_complex:
        target = {name: tensor.conj() for name, tensor in target.items()}
    with torch.inference_mode():
        made_inside = {"w": torch.zeros(3, 5, 7, dtype=torch.float16)}
        zarrckpt.load(target, tmp_path / "one", allow_cast=True)
        if not saved.is_complex:
            zarrckpt.load(made_inside, tmp_path / "one", allow_cast=True, keys="w")
            assert torch.equal(made_inside["w"], whole.half())
    assert torch.equal(target["w"], whole.to(wide)) and torch.equal(target["scalar"], parts["scalar"].to(wide))


_CAST = """
import sys, torch, zarrckpt

def peak():
    return next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("VmHWM"))

target = {str(i): torch.ones(4 << 20, dtype=torch.float64) for i in range(8)}
options = zarrckpt.LoadOptions(max_inflight_bytes=16 << 20, concurrency=2)
zarrckpt.load({"small": torch.zeros(2, dtype=torch.float64)}, sys.argv[1], keys="small", allow_cast=True)
before = peak()
zarrckpt.load(target, sys.argv[1], allow_cast=True, strict=False, options=options)
assert target["7"].eq(7).all()
print(peak() - before)
"""


def test_converting_needs_no_second_copy_of_the_state(tmp_path: Path) -> None:
    state = {str(i): torch.full((4 << 20,), float(i)) for i in range(8)}
    zarrckpt.save({**state, "small": torch.ones(2)}, tmp_path / "one")
    found = subprocess.run(
        [sys.executable, "-c", _CAST, str(tmp_path / "one")], capture_output=True, text=True, timeout=120, check=True
    )
    assert int(found.stdout) < 64 << 20  # the saved state is 128 MiB


def test_a_failure_of_the_store_keeps_the_client_s_error_as_its_cause(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(zarrckpt.StorageError) as caught:
        zarrckpt.save({"w": torch.ones(2)}, tmp_path / "file" / "one")
    assert isinstance(caught.value.__cause__, OSError)


def test_containers_of_objects_are_not_replaced(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    zarrckpt.save({"held": UserDict(model=model, step=3)}, tmp_path / "one")
    held = UserDict(model=nn.Linear(2, 2), step=0)
    state = {"held": held}
    zarrckpt.load(state, tmp_path / "one")
    assert state["held"] is held and held["step"] == 3 and torch.equal(held["model"].weight, model.weight)


def test_the_marker_is_on_disk_before_the_first_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A power cut must not keep chunks and lose the list of the save that wrote them."""
    events: list[str] = []
    sync, rename = os.fsync, os.replace

    def record_sync(file: int) -> None:
        events.append(f"sync {os.readlink(f'/proc/self/fd/{file}')}")
        sync(file)

    def record_rename(old: str, new: str) -> None:
        events.append(f"put {new}")
        rename(old, new)

    monkeypatch.setattr(os, "fsync", record_sync)
    monkeypatch.setattr(os, "replace", record_rename)
    for overwrite in (False, True):
        events.clear()
        zarrckpt.save({"w": torch.ones(2)}, tmp_path / "one", overwrite=overwrite)
        before = events[: next(i for i, event in enumerate(events) if "/w/" in event)]
        ids = {event.split("/")[-2] for event in before if event.startswith("put") and "/@zarrckpt/" in event}
        (save_id,) = ids
        house = tmp_path / "one" / "@zarrckpt"
        assert {f"sync {house / save_id / 'zarr.json'}", f"sync {house / save_id}", f"sync {house}"} <= {*before}
        assert (f"sync {tmp_path / 'one' / f'@{save_id}' / 'zarr.json'}" in before) == overwrite


def _sharded_model(rows: int, extra: bool = False) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(rows)
    model = nn.Sequential(nn.Linear(3, rows), nn.LayerNorm(rows, bias=extra))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model, torch.optim.Adam(model.parameters())


def _save_sharded(url: str) -> None:
    model, optim = _sharded_model(6)
    model(torch.ones(1, 3)).sum().backward()
    optim.step()
    zarrckpt.save({"model": model, "optim": optim, "step": 1}, url)


def _load_mismatched(url: str, fault: str) -> None:
    model, optim = _sharded_model(7 if fault == "shape" else 6, extra=fault == "missing")
    if fault == "unexpected":
        model, optim = _sharded_model(6)[0][0], optim
    if fault == "one rank":
        model = model if dist.get_rank() != 3 else nn.Linear(2, 2)
    state: dict[str, Any] = {"model": model, "step": 0}
    if fault != "unexpected" and fault != "one rank":
        state["optim"] = optim
    before = snapshot({k: v.to_local() if isinstance(v, DTensor) else v for k, v in model.state_dict().items()})
    try:
        zarrckpt.load(state, url)
    finally:
        after = snapshot({k: v.to_local() if isinstance(v, DTensor) else v for k, v in model.state_dict().items()})
        assert same(before, after) == [] and state["step"] == 0 and not optim.state


def test_a_mismatch_is_found_before_any_target_is_touched(tmp_path: Path) -> None:
    url = str(tmp_path / "one")
    run_ranks(_save_sharded, url)
    for fault, named in {
        "shape": "'model.0.weight' has shape (7, 3)",
        "missing": "'model.1.bias' is not in the checkpoint",
        "unexpected": "'model.1.weight' is in the checkpoint and has no target",
        "one rank": "'model.weight' is not in the checkpoint",
    }.items():
        assert named in all_ranks_raise(zarrckpt.KeyMismatchError, _load_mismatched, url, fault), fault
    message = all_ranks_raise(zarrckpt.CheckpointNotFoundError, _load_mismatched, str(tmp_path / "none"), "")
    assert "nothing is committed" in message


def test_a_stateful_object_may_leave_entries_unused(tmp_path: Path) -> None:
    zarrckpt.save({"counter": {"count": 3, "history": torch.full((2,), 3.0), "more": 1}}, tmp_path / "one")
    counter = Counter()
    report = zarrckpt.load({"counter": counter}, tmp_path / "one")
    assert counter.count == 3 and report.unexpected == () and "counter.more" in report.loaded


# -- with and without process groups


def _in_a_group_of_three(url: str) -> tuple[zarrckpt.SaveReport, zarrckpt.LoadReport] | None:
    group = dist.new_group([1, 2, 3])
    if dist.get_rank() == 0:
        dist.barrier()
        return None
    mesh = DeviceMesh.from_group(group, "cpu")
    source = _source((7, 3))
    saved = zarrckpt.save(
        {"w": distribute_tensor(source, mesh, [Shard(0)], src_data_rank=None), "who": "three"},
        url,
        process_group=group,
        options=MergingOptions(min_piece_bytes=0),
    )
    targets = {"w": distribute_tensor(source * 0, mesh, [Shard(1)], src_data_rank=None), "who": ""}
    loaded = zarrckpt.load(targets, url, process_group=group)
    assert torch.equal(targets["w"].full_tensor(), source) and targets["who"] == "three"
    dist.barrier()
    return saved, loaded


def test_a_sub_group_saves_and_loads(tmp_path: Path) -> None:
    answers = run_ranks(_in_a_group_of_three, str(tmp_path / "one"))
    assert answers[0] is None
    assert answers[1][0] == answers[2][0] == answers[3][0]
    assert len(answers[1][0].rank_bytes) == 3
    checkpoint = zarrckpt.open(tmp_path / "one")
    assert checkpoint.info.world_size == 3 and checkpoint.writers("w").tolist() == [[0], [1], [2]]
    assert (checkpoint["w"][:] == _source((7, 3)).numpy()).all()


def _replicas(url: str) -> zarrckpt.SaveReport:
    state = {f"t{i}": torch.full((100,), float(i)) for i in range(8)} | {"step": 3, "rank": dist.get_rank()}
    return zarrckpt.save(state, url)


def test_replicas_are_written_once_and_by_turns(tmp_path: Path) -> None:
    report = run_ranks(_replicas, str(tmp_path / "one"))[0]
    assert report.rank_bytes == (808, 808, 808, 808) and report.objects == 8
    checkpoint = zarrckpt.open(tmp_path / "one")
    assert checkpoint["step"] == 3 and checkpoint["rank"] in range(4)


# -- the newest checkpoint


def test_latest_has_the_greatest_step_whenever_it_was_committed(tmp_path: Path) -> None:
    runs = tmp_path / "run"
    assert zarrckpt.latest(runs) is None
    for step in (10, 9, 100):
        zarrckpt.save({"step": step}, runs / f"step-{step}")
    assert zarrckpt.latest(runs) == str(runs / "step-100")
    zarrckpt.save({"step": 9}, runs / "step-9", overwrite=True)
    assert zarrckpt.latest(str(runs)) == str(runs / "step-100")
    zarrckpt.save({"step": 111}, runs / "step-00000111")
    # An unfinished save, one that was removed by hand, a stray folder, a stray file.
    for name in ("zarr.json", "step/zarr.json"):
        (runs / "step-00000111" / name).unlink(missing_ok=True)
    (runs / "logs").mkdir()
    (runs / "note.txt").write_text("here")
    with pytest.raises(zarrckpt.CheckpointNotFoundError, match="never committed"):
        zarrckpt.open(runs / "step-00000111")
    latest = zarrckpt.latest(runs)
    assert latest == str(runs / "step-100")
    state = {"step": 0}
    zarrckpt.load(state, latest)
    assert state == {"step": 100}


def test_latest_without_steps_is_the_last_commit(tmp_path: Path) -> None:
    for name in ("last", "first", "last"):
        zarrckpt.save({"name": name}, tmp_path / name, overwrite=True)
    assert zarrckpt.latest(tmp_path) == str(tmp_path / "last")
    zarrckpt.save({"step": 3}, tmp_path / "epoch_3")
    assert zarrckpt.latest(tmp_path) == str(tmp_path / "epoch_3")


def test_latest_skips_damage_with_a_warning(tmp_path: Path) -> None:
    for step in (1, 2):
        zarrckpt.save({"step": step}, tmp_path / str(step))
    (tmp_path / "2" / "zarr.json").write_text("{")
    with pytest.warns(UserWarning, match="was skipped"):
        assert zarrckpt.latest(tmp_path) == str(tmp_path / "1")


def test_latest_on_s3(moto_bucket: S3Place) -> None:
    options = moto_bucket.storage_options
    assert zarrckpt.latest(moto_bucket.url("run"), storage_options=options) is None
    for step in (1, 2):
        zarrckpt.save({"w": torch.ones(2) * step}, moto_bucket.url(f"run/{step}"), storage_options=options)
    latest = zarrckpt.latest(moto_bucket.url("run"), storage_options=options)
    assert latest == moto_bucket.url("run/2")
    state = {"w": torch.zeros(2)}
    zarrckpt.load(state, latest, storage_options=options)
    assert state["w"].tolist() == [2, 2]
