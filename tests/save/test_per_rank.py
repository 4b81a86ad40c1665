"""``zarrckpt.PerRank``: every rank gets its own state back. Other ranks get one by a stated rule."""

from __future__ import annotations

import copy
import io
import random
import warnings
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import zarr
from harness.ranks import all_ranks_raise, run_ranks
from harness.store_servers import S3Place
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import zarrckpt
from zarrckpt import PerRank


class Loader:
    """A kind of data loader state: a position, and one prefetched sample per step of the rank."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.position = 0
        self.ahead = torch.zeros(0)

    def advance(self, steps: int) -> None:
        self.position += steps
        self.ahead = torch.arange(self.position) + 100.0 * self.rank

    def state_dict(self) -> dict[str, Any]:
        return {"rank": self.rank, "position": self.position, "ahead": None if self.position == 0 else self.ahead}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rank, self.position = state["rank"], state["position"]
        self.ahead = torch.zeros(0) if state["ahead"] is None else state["ahead"]


@dataclass
class Trainer:
    """A Stateful with generators of each rank in its state."""

    rng: torch.Generator
    step: int = 0

    def state_dict(self) -> dict[str, Any]:
        return OrderedDict(step=self.step, deep=[{"rng": PerRank(self.rng.get_state())}])

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]
        self.rng.set_state(state["deep"][0]["rng"].value)


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _state(seed: int, *, new_ranks: Any = "error") -> dict[str, Any]:
    rank = _rank()
    torch.manual_seed(seed + rank)
    random.seed(seed + rank)
    np.random.seed(seed + rank)
    return {
        "w": torch.full((3,), float(seed)),
        "rng": PerRank(
            {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": np.random.get_state()},
            new_ranks=new_ranks,
        ),
        "loader": PerRank(Loader(rank), new_ranks=new_ranks),
        "deep": {"parts": [PerRank(None, new_ranks=new_ranks), {"n": seed}]},
        "trainer": PerRank([Trainer(torch.Generator().manual_seed(seed + rank))], new_ranks=new_ranks),
    }


def _draws(state: dict[str, Any]) -> tuple[Any, ...]:
    rng, trainer = state["rng"].value, state["trainer"].value[0]
    torch.set_rng_state(rng["torch"])
    random.setstate(rng["python"])
    np.random.set_state(rng["numpy"])
    return (
        torch.rand(3).tolist(),
        random.random(),
        float(np.random.rand()),
        torch.rand(2, generator=trainer.rng).tolist(),
        trainer.step,
    )


def _found(state: dict[str, Any]) -> dict[str, Any]:
    """Return all state of a rank as values that compare."""
    loader, part = state["loader"].value, state["deep"]["parts"][0].value
    return {
        "draws": _draws(state),
        "loader": (loader.rank, loader.position, loader.ahead.tolist()),
        "part": part if part is None else part.tolist(),
        "shared": (state["w"].tolist(), state["deep"]["parts"][1]),
    }


def _save(url: str, group_ranks: list[int] | None = None, later: bool = False) -> dict[str, Any]:
    """Save state that differs on every rank, also in shape. Return the state that a load must restore."""
    group = None if group_ranks is None else dist.new_group(group_ranks)
    state = _state(10)
    torch.rand(_rank() + 1)
    state["rng"].value["torch"] = torch.get_rng_state()
    state["loader"].value.advance(_rank() + 2)
    state["deep"]["parts"][0].value = torch.full((_rank() + 1, 2), float(_rank()))
    state["trainer"].value[0].step = 7 * _rank()
    if group_ranks is None or _rank() in group_ranks:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            if later:
                future = zarrckpt.async_save(state, url, process_group=group)
                before = copy.deepcopy(state)
                state["rng"].value["torch"].zero_()
                state["deep"]["parts"][0].value.zero_()
                state["loader"].value.advance(5)
                future.result(60)
                state = before
            else:
                zarrckpt.save(state, url, process_group=group)
    return _found(state)


def _load(url: str, new_ranks: Any = "error", **options: Any) -> tuple[dict[str, Any], zarrckpt.LoadReport]:
    state = _state(90, new_ranks=new_ranks)
    kept = dict(state), state["rng"].value, state["loader"].value, state["rng"].value["torch"]
    report = zarrckpt.load(state, url, **options)
    now = dict(state), state["rng"].value, state["loader"].value, state["rng"].value["torch"]
    assert all(one is other for one, other in zip(kept[1:], now[1:], strict=True))
    assert all(now[0][name] is kept[0][name] for name in kept[0])
    return _found(state), report


def _fresh() -> dict[str, Any]:
    return _found(_state(90))


def test_new_ranks_get_state_by_the_rule(tmp_path: Path) -> None:
    url = str(tmp_path / "four")
    saved = run_ranks(_save, url)
    assert len({str(rank) for rank in saved}) == 4
    for world_size in (4, 2):
        answers = run_ranks(_load, url, world_size=world_size)
        assert [found for found, _ in answers] == saved[:world_size]
        assert all(report.unexpected == () and report.missing == () for _, report in answers)
        assert "rng.1.torch" in answers[1][1].loaded and "rng.0.torch" not in answers[1][1].loaded
    alone, report = _load(url)
    assert alone == saved[0] and report.unexpected == ()

    url = str(tmp_path / "two")
    saved = run_ranks(_save, url, world_size=2)
    answers = run_ranks(_load, url, "wrap")
    assert [found for found, _ in answers] == saved + saved
    assert "loader.1.position" in answers[3][1].loaded


def test_per_rank_state_works_on_s3(moto_bucket: S3Place) -> None:
    url, env = moto_bucket.url("run/step-1"), moto_bucket.environment
    saved = run_ranks(_save, url, env=env)
    assert [found for found, _ in run_ranks(_load, url, world_size=2, env=env)] == saved[:2]


def _load_more_ranks(url: str) -> None:
    fresh = _fresh()
    found, report = _load(url, "keep")
    new = _rank() > 1
    # Shared entries are loaded on every rank.
    assert found["shared"] == ([10.0] * 3, {"n": 10})
    assert (found["draws"], found["loader"], found["part"]) == (fresh["draws"], fresh["loader"], None) or not new
    assert report.missing == () and report.unexpected == ()

    found, report = _load(url, strict=False)
    assert (found["draws"], found["part"]) == (fresh["draws"], None) or not new
    assert (f"rng.{_rank()}.torch" in report.missing) == new and ("deep.parts.0.2" in report.missing) == (_rank() == 2)

    target = torch.zeros(3)
    with pytest.raises(zarrckpt.KeyMismatchError):
        zarrckpt.load({"w": target, "rng": PerRank(None)}, url)
    assert not target.any()
    zarrckpt.load({"w": target, "rng": PerRank("old")}, url, keys=["w"])
    assert target.eq(10).all()


def test_a_new_rank_is_an_error_by_default(tmp_path: Path) -> None:
    url = str(tmp_path / "two")
    run_ranks(_save, url, world_size=2)
    text = all_ranks_raise(zarrckpt.KeyMismatchError, _load, url)
    assert "'rng.2.torch' is not in the checkpoint" in text and "'deep.parts.0.2' is not" in text
    assert "'rng' has the state of 2 ranks (0 to 1), but this is rank 2" in text
    assert "new_ranks='wrap') loads the state of rank 0, new_ranks='keep' leaves" in text
    run_ranks(_load_more_ranks, url)


def _save_in_background(folder: str) -> list[dict[str, Any]]:
    return [_save(f"{folder}/{n}", later=True) for n in range(2)]


def test_async_save_keeps_each_ranks_copy(tmp_path: Path) -> None:
    saved = run_ranks(_save_in_background, str(tmp_path), world_size=2)
    for n in range(2):
        assert [found for found, _ in run_ranks(_load, str(tmp_path / str(n)), world_size=2)] == [s[n] for s in saved]


def test_without_a_process_group_a_process_is_rank_0(tmp_path: Path) -> None:
    saved = _save(str(tmp_path / "one"))
    assert _load(str(tmp_path / "one"))[0] == saved
    assert [name for name in zarrckpt.open(tmp_path / "one") if name.startswith("loader.")] == [
        "loader.0.rank",
        "loader.0.position",
        "loader.ranks.ahead",
    ]
    assert [found for found, _ in run_ranks(_load, str(tmp_path / "one"), "wrap", world_size=2)] == [saved, saved]


def _load_in_group(url: str, members: list[int]) -> Any:
    group = dist.new_group(members)
    return _load(url, process_group=group)[0] if _rank() in members else None


def test_ranks_of_a_sub_group_keep_their_global_numbers(tmp_path: Path) -> None:
    url = str(tmp_path / "some")
    saved = run_ranks(_save, url, [1, 3])
    assert set(zarrckpt.open(url)).isdisjoint({"rng.0.torch", "rng.2.torch"})
    assert run_ranks(_load_in_group, url, [1, 3]) == [None, saved[1], None, saved[3]]
    # saved[r % len(saved)], where saved = [1, 3]; ranks 1 and 3 have their own.
    wrapped = [found for found, _ in run_ranks(_load, url, "wrap")]
    assert wrapped == [saved[1], saved[1], saved[1], saved[3]]
    assert _load(url, "wrap")[0] == saved[1]


def test_all_ranks_state_can_be_read(tmp_path: Path) -> None:
    url = str(tmp_path / "four")
    saved = run_ranks(_save, url)
    opened = zarrckpt.open(url)
    group = zarr.open_group(url, mode="r", zarr_format=3)
    target: dict[str, Any] = {"deep": None, "loader": None}
    zarrckpt.load(target, url)
    assert list(target["loader"]) == ["0", "1", "2", "3"]
    for rank, found in enumerate(saved):
        assert opened[f"deep.parts.0.{rank}"][:].tolist() == found["part"]
        assert group[f"loader/{rank}/ahead"][:].tolist() == found["loader"][2]
        assert target["deep"]["parts"][0][str(rank)].tolist() == found["part"]
        assert target["loader"][str(rank)]["position"] == opened[f"loader.{rank}.position"] == found["loader"][1]
    # A PerRank loads entries that a user saved under the ranks as keys, and vice versa.
    zarrckpt.save({"mine": {"0": torch.ones(2), "1": torch.zeros(3)}}, tmp_path / "hand")
    by_hand = {"mine": PerRank()}
    zarrckpt.load(by_hand, tmp_path / "hand")
    assert by_hand["mine"].value.tolist() == [1, 1]


def _own_tensors(number: int) -> dict[str, Any]:
    """Return tensors of each rank: of one form on all ranks, on three of four, or on one, under similar keys."""
    rank = _rank()
    return {
        "rng": PerRank(torch.full((5000,), number + rank, dtype=torch.uint8)),
        "most": PerRank(torch.full((3 + (rank == 2),), float(number + rank))),
        "all differ": PerRank([torch.full((rank + 1,), float(number))]),
        "deep": PerRank({"ranks": torch.tensor(number + rank), "0": torch.ones(2) * rank, "epoch": rank}),
        "ranks": PerRank({"none": torch.zeros(0, 3), "turned": torch.arange(6).reshape(2, 3).T + rank}),
    }


def _values(state: dict[str, Any]) -> Any:
    return {name: one.value for name, one in state.items()}


def _save_own_tensors(url: str, group_ranks: list[int]) -> None:
    group = dist.new_group(group_ranks)
    if _rank() in group_ranks:
        zarrckpt.save(_own_tensors(10), url, process_group=group)


def _load_own_tensors(url: str, share_reads: bool | None = None) -> list[str]:
    """Return the names of the entries that this rank did not get back."""
    target, expected = _own_tensors(50), _values(_own_tensors(10))
    tensors = [target["rng"].value, target["deep"].value["ranks"]]
    zarrckpt.load(target, url, strict=False, options=zarrckpt.LoadOptions(share_reads=share_reads))
    assert tensors[0] is target["rng"].value and tensors[1] is target["deep"].value["ranks"]
    return [name for name, value in _values(target).items() if str(value) != str(expected[name])]


@pytest.mark.parametrize("members", [[0, 1, 2, 3], [1, 3]])
def test_tensors_of_one_dtype_and_shape_are_one_array(members: list[int], tmp_path: Path) -> None:
    url = str(tmp_path / "run")
    run_ranks(_save_own_tensors, url, members)
    opened = zarrckpt.open(url)
    stacked = {name for name in opened if opened.entry(name).ranks}
    assert stacked == {
        "rng.ranks",
        "most.ranks",
        "deep.ranks.ranks",
        "deep.ranks.0",
        "ranks.ranks.none",
        "ranks.ranks.turned",
    }
    array = zarr.open_group(url, mode="r", zarr_format=3)["rng/ranks"]
    assert array.shape == (len(members), 5000) and opened.entry("rng.ranks").ranks == tuple(members)
    assert [int(row[0]) for row in array[:]] == [10 + rank for rank in members]
    alike = [rank for rank in members if rank != 2]
    assert opened.entry("most.ranks").ranks == tuple(alike) and ("most.2" in opened) == (2 in members)
    assert [f"all differ.{rank}.0" in opened for rank in range(4)] == [rank in members for rank in range(4)]
    assert opened.verify()
    for share in (True, False):
        for rank, wrong in enumerate(run_ranks(_load_own_tensors, url, share)):
            # The others' values stay as they are.
            assert bool(wrong) == (rank not in members)
    target: dict[str, Any] = {"deep": None, "rng": None}
    zarrckpt.load(target, url)
    assert target["deep"]["ranks"]["ranks"].tolist() == [10 + rank for rank in members]
    assert target["deep"][str(members[-1])]["epoch"] == members[-1]
    # Loads of a copy give the same.
    zarrckpt.copy(opened, tmp_path / "copy", chunks={"rng.ranks": (1, -1)})
    assert zarrckpt.open(tmp_path / "copy").entry("rng.ranks").ranks == tuple(members)
    wrong = run_ranks(_load_own_tensors, str(tmp_path / "copy"))
    assert [not wrong[rank] for rank in range(4)] == [rank in members for rank in range(4)]


def _save_many(url: str) -> int:
    return zarrckpt.save({f"rng{n}": PerRank(torch.get_rng_state()) for n in range(4)}, url).objects


def test_objects_do_not_grow_with_the_ranks(tmp_path: Path) -> None:
    counts = [run_ranks(_save_many, str(tmp_path / str(n)), world_size=n)[0] for n in (1, 2, 4)]
    assert counts == [4, 4, 4]


def test_a_part_of_per_rank_state_is_loaded(tmp_path: Path) -> None:
    _save(str(tmp_path / "one"))
    fresh = _fresh()
    found, report = _load(str(tmp_path / "one"), keys=["loader"])
    assert found["loader"] == (0, 2, [0.0, 1.0]) and found["draws"] == fresh["draws"] and found["part"] is None
    assert {name.partition(".")[0] for name in report.loaded} == {"loader"} and report.unexpected == ()
    found, _ = _load(str(tmp_path / "one"), keys=["*.parts.0.0"])
    assert found["part"] == [[0.0, 0.0]] and found["loader"] == fresh["loader"]
    with pytest.raises(zarrckpt.KeyMismatchError, match="match nothing"):
        _load(str(tmp_path / "one"), keys=["loader.1"])


def test_shapes_must_be_those_that_this_rank_saved(tmp_path: Path) -> None:
    _save(str(tmp_path / "one"))
    target = PerRank(torch.zeros(2, 2))
    with pytest.raises(zarrckpt.KeyMismatchError, match=r"'deep.parts.0.0' has shape \(2, 2\), the checkpoint has"):
        zarrckpt.load({"deep": {"parts": [target]}}, tmp_path / "one")
    fitting = PerRank(torch.ones(1, 2))
    tensor = fitting.value
    zarrckpt.load({"deep": {"parts": [fitting]}}, tmp_path / "one")
    assert fitting.value is tensor and not tensor.any()


def test_state_not_saved_per_rank_is_missing_or_kept(tmp_path: Path) -> None:
    zarrckpt.save({"rng": torch.ones(2), "seeds": {"a": 1, "01": 2, "-1": 3}}, tmp_path / "one")
    for name in ("rng", "seeds", "absent"):
        for new_ranks in ("error", "wrap"):
            state = {name: PerRank("mine", new_ranks=new_ranks)}
            with pytest.raises(zarrckpt.KeyMismatchError, match=f"'{name}' has no state of ranks in the checkpoint"):
                zarrckpt.load(state, tmp_path / "one")
            assert zarrckpt.load(state, tmp_path / "one", strict=False).missing == (f"{name}.0",)
            assert state[name].value == "mine"
        kept = {name: PerRank("mine", new_ranks="keep"), "list": [PerRank(4, new_ranks="keep")]}
        zarrckpt.load(kept, tmp_path / "one")
        assert kept[name].value == "mine" and kept["list"][0].value == 4


def _local_models(url: str) -> None:
    """Train a separate model on every rank, each of a different size."""
    rank = _rank()

    def made(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed + rank)
        net = nn.Linear(2, rank + 1)
        return {"net": PerRank(net), "optim": PerRank({"adam": torch.optim.Adam(net.parameters(), lr=seed)})}

    def step(state: dict[str, Any]) -> list[float]:
        net, adam = state["net"].value, state["optim"].value["adam"]
        net.zero_grad()
        net(torch.ones(2)).sum().backward()
        adam.step()
        return [p.sum().item() for p in net.parameters()]

    state = made(1)
    step(state)
    zarrckpt.save(state, url)
    expected = step(state)
    other = made(2)
    report = zarrckpt.load(other, url)
    assert other["optim"].value["adam"].param_groups[0]["lr"] == 1
    assert report.missing == () and report.unexpected == ()
    assert {f"net.{rank}.weight", f"optim.{rank}.adam.state.weight.exp_avg"} <= {*report.loaded}
    other_adam = other["optim"].value["adam"].state_dict()["state"]
    assert len(other_adam) == 2
    assert step(other) == expected


def _save_sharded(url: str) -> None:
    mesh = init_device_mesh("cpu", (2,))
    tensor = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
    for state in (
        {"x": PerRank(tensor)},
        {"x": [PerRank({"a": [tensor]})]},
        {"x": PerRank(fully_shard(nn.Linear(2, 2)))},
    ):
        with pytest.raises(zarrckpt.UnsupportedValueError, match=r"'x\..*' is a DTensor inside a PerRank"):
            zarrckpt.save(state, url)
    with pytest.raises(zarrckpt.UnsupportedValueError, match=r"'x\.0' is a DTensor inside a PerRank"):
        zarrckpt.async_save({"x": PerRank(tensor)}, url).result(60)
    zarrckpt.save({"x": PerRank(tensor.to_local())}, url)
    with pytest.raises(zarrckpt.UnsupportedValueError, match=r"'x\.0' is a DTensor inside a PerRank"):
        zarrckpt.load({"x": PerRank(tensor)}, url)


def test_models_that_are_not_sharded_and_tensors_that_are(tmp_path: Path) -> None:
    run_ranks(_local_models, str(tmp_path / "local"), world_size=2)
    run_ranks(_save_sharded, str(tmp_path / "sharded"), world_size=2)


def test_per_rank_in_unsupported_positions_is_refused_by_name(tmp_path: Path) -> None:
    rng = PerRank(torch.get_rng_state())
    for planner in (zarrckpt.ZarrSavePlanner(), None):
        with pytest.raises(CheckpointException) as caught:
            writer = zarrckpt.ZarrStorageWriter(tmp_path / "dcp")
            dcp.save({"rng": rng}, storage_writer=writer, planner=planner, no_dist=True)
        assert "'rng'" in str(caught.value) and "PerRank" in str(caught.value)
    zarrckpt.save({"rng": rng}, tmp_path / "saved")
    with pytest.raises(CheckpointException) as caught:
        reader = zarrckpt.ZarrStorageReader(tmp_path / "saved")
        dcp.load({"rng": rng}, storage_reader=reader, planner=zarrckpt.ZarrLoadPlanner(), no_dist=True)
    assert "'rng'" in str(caught.value) and "PerRank" in str(caught.value)
    for held in ((rng,), {"a": ((1, rng),)}, {"a": {1: {(0, rng)}}}):
        with pytest.raises(zarrckpt.UnsupportedValueError, match="'a"):
            zarrckpt.save({"a": held}, tmp_path / "two")
    with pytest.raises(zarrckpt.UnsupportedValueError, match="PerRank"):
        torch.save(rng, io.BytesIO())
    with pytest.raises(ValueError, match="'fill'"):
        PerRank(1, new_ranks="fill")  # type: ignore[arg-type]
    for folder in ("dcp", "two"):
        with pytest.raises(zarrckpt.CheckpointNotFoundError):
            zarrckpt.open(tmp_path / folder)


def test_copies_are_like_those_of_other_containers() -> None:
    one = PerRank([torch.ones(2)], new_ranks="wrap")
    shallow, deep = copy.copy(one), copy.deepcopy(one)
    assert shallow.value is one.value and shallow.new_ranks == deep.new_ranks == "wrap"
    assert deep.value[0] is not one.value[0] and deep.value[0].eq(1).all()


def test_a_used_name_is_refused(tmp_path: Path) -> None:
    """Ranks' tensors are stacked under ``rng.ranks``. No other entry of that name is lost."""
    own = PerRank(torch.ones(4))
    states: list[dict[str, Any]] = [
        {"rng": own, "rng.ranks": torch.arange(3.0)},
        {"rng.ranks": torch.arange(3.0), "rng": own},
        {"rng.ranks": 5, "rng": own},
        {"rng": PerRank({"a": torch.ones(1)}), "rng.ranks": {"a": 1}},
    ]
    for state in states:
        with pytest.raises(zarrckpt.UnsupportedValueError, match=r"rng\.ranks"):
            zarrckpt.save(state, tmp_path / "one")
    assert not (tmp_path / "one" / "zarr.json").exists()


def test_stacks_have_chunks_of_their_own_type(tmp_path: Path) -> None:
    for order in ("ab", "ba"):
        tensors = {"a": torch.zeros(1 << 20, dtype=torch.uint8), "b": torch.zeros(1 << 20, dtype=torch.float64)}
        zarrckpt.save(
            {"x": PerRank({name: tensors[name] for name in order})},
            tmp_path / order,
            options=zarrckpt.SaveOptions(max_chunk_bytes=1 << 20),
        )
        ckpt = zarrckpt.open(tmp_path / order)
        assert ckpt.writers("x.ranks.a").size == 1 and ckpt.writers("x.ranks.b").size == 8
