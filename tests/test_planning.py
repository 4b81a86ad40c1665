"""Plans at scale: what ranks are told fits together and does not grow with other ranks; repeated saves plan once."""

from __future__ import annotations

import importlib
import math
import pickle
import random
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import run_ranks
from simulated import kept, memory_store, simulate
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan
from torch.distributed.checkpoint.utils import _DistWrapper
from torch.distributed.tensor import DTensor
from uneven_states import fsdp_tp, full, mesh_of, sharded

import zarrckpt
from zarrckpt import _kept_plans, _plan
from zarrckpt._grid import Box, intersect

sys.path.append(str(Path(__file__).parents[1]))
plan_scale: Any = importlib.import_module("benchmarks.plan_scale")

# -- what ranks are told


def _arrived(ranks: int, groups: int, folder: Path, **options: Any) -> tuple[list[SavePlan], int, int]:
    """The plans as simulated ranks receive them; the sizes of the root document and of DCP's metadata."""
    writer = zarrckpt.ZarrStorageWriter(folder, **options)
    sent = plan_scale.sent_to_us((groups, ranks // groups), plan_scale.tensors(120), writer)
    writer.reset()
    writer.set_up_storage_writer(True)
    plans, metadata = plan_scale.by_us(sent, writer)
    assert writer._layout is not None
    _plan.describe(metadata, writer._layout)
    return (
        [pickle.loads(pickle.dumps(plan)) for plan in plans],
        plan_scale.root_bytes(writer),
        len(pickle.dumps(metadata)),
    )


@pytest.mark.parametrize(("ranks", "groups", "least"), [(24, 1, None), (24, 1, 0), (24, 4, None), (24, 4, 0)])
def test_what_ranks_are_told_fits_together(ranks: int, groups: int, least: int | None, tmp_path: Path) -> None:
    plans, _, _ = _arrived(ranks, groups, tmp_path / "save", min_piece_bytes=least)
    written: Counter[tuple[str, Any]] = Counter()
    documents: Counter[str] = Counter()
    sent: dict[tuple[int, int, int], list[tuple[str, Box]]] = {}
    received: dict[tuple[int, int, int], list[tuple[str, Box]]] = {}
    grids = {}
    for rank, plan in enumerate(plans):
        own = plan.storage_data[0]
        boxes = [Box(tuple(i.tensor_data.chunk.offsets), tuple(i.tensor_data.chunk.sizes)) for i in plan.items]  # type: ignore[union-attr]
        documents.update(list(own.documents))
        for number, step in [(-1, own), *own.rounds.items()]:
            for chunk in step.chunks:
                written[chunk.fqn, chunk.cell] += 1
                grid = grids[chunk.fqn] = own.arrays[chunk.fqn].grid
                whole = grid.chunk_box(chunk.cell)
                assert sum(part.box.size for part in chunk.parts) == whole.size
                for part in chunk.parts:
                    assert intersect(part.box, whole) == part.box
                    if part.item is not None:
                        assert plan.items[part.item].index.fqn == chunk.fqn
                        assert intersect(boxes[part.item], whole) == part.box
                    else:
                        received.setdefault((number, part.source, rank), []).append((chunk.fqn, part.box))
            for sending in step.sends if number >= 0 else ():
                row = (plan.items[sending.item].index.fqn, sending.box)
                assert intersect(sending.box, boxes[sending.item]) == sending.box
                sent.setdefault((number, rank, sending.to), []).append(row)
    assert sent == received and (sent or least == 0)
    # Where no divisor of a piece's rows fits subchunks, a few of them move to the owner of the next chunk.
    moved = sum(box.size for boxes in sent.values() for _, box in boxes)
    assert least is None or moved < 0.005 * sum(math.prod(grid.shape) for grid in grids.values())
    assert set(written.values()) == {1}
    assert Counter(fqn for fqn, _ in written) == {fqn: grid.num_chunks for fqn, grid in grids.items()}
    assert len(grids) == 120 and set(documents.values()) == {1} and len(documents) > 120


def test_documents_grow_with_tensors_only(tmp_path: Path) -> None:
    few, many = (_arrived(ranks, 1, tmp_path / str(ranks)) for ranks in (4, 64))
    # The shapes of chunks are other numbers, and no more of them.
    assert few[1] * 0.98 < many[1] < few[1] * 1.02 and many[2] == few[2]


def test_the_benchmark_prints_a_row_for_each_size() -> None:
    script = Path(plan_scale.__file__)
    command = [sys.executable, str(script), "--ranks", "2", "8", "--tensors", "60"]
    found = subprocess.run(command, capture_output=True, text=True, check=True, cwd=script.parents[1], timeout=100)
    rows = [line.split("|")[1:-1] for line in found.stdout.splitlines()]
    assert [row[0].strip() for row in rows[2:]] == ["2", "8"] and {len(row) for row in rows} == {len(rows[0])}


# -- loads


def _load_plans(folder: str) -> None:
    """What a rank sends of a load's plan, with planners that leave items alone and with others."""
    state = {f"layers.{n}.weight": sharded(full((8, 4), n), mesh_of([0, 1, 2, 3])) for n in range(300)}
    zarrckpt.save(state, folder)
    for share, planner, most in [
        (False, zarrckpt.ZarrLoadPlanner(), 1000),
        (True, zarrckpt.ZarrLoadPlanner(), 9000),
        (False, _Looking(), 1 << 20),
    ]:
        sent: list[int] = []
        real = _DistWrapper.gather_object

        def gather(self: Any, plan: Any, sent: list[int] = sent, real: Any = real) -> Any:
            sent.append(len(pickle.dumps(plan)))
            return real(self, plan)

        target = {name: sharded(full((8, 4), -1), mesh_of([0, 1, 2, 3])) for name in state}
        with patch.object(_DistWrapper, "gather_object", gather):
            dcp.load(target, storage_reader=zarrckpt.ZarrStorageReader(folder, share_reads=share), planner=planner)
        assert all(torch.equal(t.to_local(), state[name].to_local()) for name, t in target.items())
        assert sent[0] < most and (sent[0] > 20000) == isinstance(planner, _Looking), sent


class _Looking(zarrckpt.ZarrLoadPlanner):
    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        assert [len(plan.items) for plan in global_plan] == [300] * 4
        return super().create_global_plan(global_plan)


def test_read_items_stay_with_their_rank(tmp_path: Path) -> None:
    run_ranks(_load_plans, str(tmp_path / "one"))


def test_our_load_planner_with_another_reader(tmp_path: Path) -> None:
    dcp.save({"w": torch.arange(4.0)}, checkpoint_id=tmp_path)
    target = {"w": torch.zeros(4)}
    reader = FileSystemReader(tmp_path)
    planner = zarrckpt.ZarrLoadPlanner()
    planner.set_up_planner(target, reader.read_metadata())
    plan = pickle.loads(pickle.dumps(reader.prepare_local_plan(planner.create_local_plan())))
    assert [item.storage_index.fqn for item in plan.items] == ["w"]


# -- repeated saves


@contextmanager
def _planned() -> Iterator[list[int]]:
    """Counts how often this process plans a save."""
    calls: list[int] = []
    real = _plan.plan_save

    def counted(*args: Any, **options: Any) -> Any:
        calls.append(1)
        return real(*args, **options)

    with patch.object(_plan, "plan_save", counted):
        yield calls


class _Saves:
    """Saves one state after the other, on each rank; checks what is stored, and how often the coordinator plans."""

    def __init__(self, folder: str, group: dist.ProcessGroup | None = None) -> None:
        self.folder, self.group, self.count = folder, group, 0

    def __call__(self, state: dict[str, Any], plans: int, url: str = "", **options: Any) -> None:
        self.count += 1
        url = f"{self.folder}/{url or self.count}"
        with _planned() as calls:
            self.save(state, url, **options)
        assert len(calls) == (plans if dist.get_rank(self.group) == 0 else 0), (self.count, calls)
        dist.barrier(self.group)
        found = zarrckpt.open(url)
        for name, value in state.items():
            stored = found[name]
            if not isinstance(value, torch.Tensor):
                assert stored == value, name
            else:
                whole = full(tuple(value.shape), state["number"]) if isinstance(value, DTensor) else value
                assert np.array_equal(stored[...], whole.numpy()), name
        dist.barrier(self.group)

    def save(self, state: dict[str, Any], url: str, **options: Any) -> None:
        zarrckpt.save(state, url, process_group=self.group, **options)

    def fails(self, error: type[Exception], state: dict[str, Any], plans: int, url: str) -> None:
        with _planned() as calls, pytest.raises(error):
            zarrckpt.save(state, f"{self.folder}/{url}", process_group=self.group)
        assert len(calls) == (plans if dist.get_rank(self.group) == 0 else 0)


class _AsyncSaves(_Saves):
    def save(self, state: dict[str, Any], url: str, **options: Any) -> None:
        zarrckpt.async_save(state, url, process_group=self.group, **options).result(timeout=60)


def _state(number: float) -> dict[str, Any]:
    """Pieces that fit a grid, pieces that do not, replicas, a value. As on every rank of four."""
    mesh, square = mesh_of([0, 1, 2, 3]), mesh_of([[0, 1], [2, 3]])
    state: dict[str, Any] = {"w": sharded(full((12, 3), number), mesh), "odd": fsdp_tp(full((10, 2), number), square)}
    return state | {"b": full((5,), number), "number": number, "step": number, "text": f"turn {number}"}


def _same_again(folder: str) -> None:
    saves, background = _Saves(folder), _AsyncSaves(folder + "/async")
    saves(_state(0), 1)
    saves(_state(1), 0)
    saves(_state(2), 0, url="one")
    saves(_state(3), 0, url="one", overwrite=True)
    saves.fails(zarrckpt.CheckpointExistsError, _state(4), 0, "one")
    saves(_state(5), 0)
    background(_state(6), 0)
    saves(_state(7), 0)
    background(_state(8), 0)
    # What steers a plan.
    saves(_state(9), 1, max_chunk_bytes=40)
    saves(_state(10), 0, max_chunk_bytes=40)
    saves(_state(11), 1)
    background(_state(12), 0)


def test_saves_of_the_same_state_plan_once(tmp_path: Path) -> None:
    run_ranks(_same_again, str(tmp_path))


def _changes(folder: str) -> None:
    rank, saves = dist.get_rank(), _Saves(folder)
    saves(_state(0), 1)
    # One rank has something more, and then has not.
    only = {"only": torch.ones(3)} if rank == 2 else {}
    saves(_state(1) | only, 1)
    assert zarrckpt.open(f"{folder}/2")["only"][...].tolist() == [1, 1, 1]
    saves(_state(2) | only, 0)
    saves(_state(3), 1)
    assert "only" not in zarrckpt.open(f"{folder}/4")
    for changed in ({"b": torch.ones(5)}, {"b": torch.ones(6)}, {"b": "text"}, {"step": torch.ones(2)}, {"text": {}}):
        saves(_state(4) | changed, 1)
        saves(_state(5) | changed, 0)
    saves(_state(6), 1)
    # One rank cannot save.
    bad = {"bad": torch.ones(2).to_sparse()} if rank == 3 else {}
    saves.fails(zarrckpt.UnsupportedValueError, _state(7) | bad, 0, "bad")
    saves(_state(8), 0)
    # Ranks hold different values, which changes who writes what.
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        zarrckpt.save(_state(9) | {"step": rank, "b": full((5,), rank)}, f"{folder}/differs")
    assert any("'b' (ranks 0, 1, 2, 3)" in str(one.message) for one in caught) == (rank == 0)
    dist.barrier()
    assert zarrckpt.open(f"{folder}/differs")["b"][...].tolist() == full((5,), 0).tolist()
    saves(_state(10), 1)
    saves(_state(11), 0)


def test_any_change_on_any_rank_is_planned_anew(tmp_path: Path) -> None:
    run_ranks(_changes, str(tmp_path))


def _forgotten(folder: str) -> None:
    saves, rank = _Saves(folder), dist.get_rank()
    saves(_state(0), 1)
    memory = _kept_plans.memory_of(None)
    # As when another process takes the coordinator's place, or some ranks'.
    if rank == 0:
        memory.plans.clear()
    saves(_state(1), 1)
    saves(_state(2), 0)
    if rank in (1, 2):
        memory.own = None
    saves(_state(3), 1)
    saves(_state(4), 0)
    group = dist.new_group([1, 2, 3])
    if rank > 0:
        some = _Saves(f"{folder}/some", group)
        for turn in range(3):
            some({"w": sharded(full((6, 2), turn), mesh_of([1, 2, 3])), "number": turn}, int(turn == 0))
    dist.barrier()
    saves(_state(5), 0)


def test_plans_that_a_rank_does_not_know(tmp_path: Path) -> None:
    run_ranks(_forgotten, str(tmp_path))
    run_ranks(_same_again, str(tmp_path / "other"))  # in the same processes: a group of their own


def _random_states(seed: int, world: int) -> Iterator[Callable[[int], dict[str, Any]]]:
    """States by rank, one after the other: most are as before, in some a rank or all of them have something else."""
    chance = random.Random(seed)
    shapes = [{"own": 2, "more": 0} for _ in range(world)]
    for turn in range(14):
        for rank in chance.choice([[], [], [chance.randrange(world)], range(world)]):
            shapes[rank] = {"own": chance.randint(1, 3), "more": chance.randint(0, 2)}

        yield partial(_random_state, turn, [dict(shape) for shape in shapes])


def _random_state(turn: int, shapes: list[dict[str, int]], rank: int) -> dict[str, Any]:
    more = {f"more{n}": torch.full((2,), turn + rank + n) for n in range(shapes[rank]["more"])}
    rows = torch.arange(shapes[rank]["own"]) + 100 * rank + turn
    return {"all": torch.full((4,), turn), "step": turn, f"rank{rank}": {"own": rows, **more}}


@pytest.mark.parametrize("seed", range(12))
def test_random_changes(seed: int) -> None:
    world = 2 + seed % 4
    with kept(), memory_store() as store, warnings.catch_warnings():
        warnings.simplefilter("error")
        for turn, state in enumerate(_random_states(seed, world)):
            store.objects.clear()
            simulate(lambda rank, state=state: zarrckpt.save(state(rank), "/x"), world, seed=turn)  # type: ignore[misc]
            expected: dict[str, Any] = {}
            for rank in range(world):
                expected |= state(rank)
            target = {**expected, "all": torch.zeros(4, dtype=torch.int64), "step": None}
            for rank in range(world):
                target[f"rank{rank}"] = {name: torch.zeros_like(t) for name, t in expected[f"rank{rank}"].items()}
            report = simulate(lambda _, target=target: zarrckpt.load(target, "/x"), 1)[0]  # type: ignore[misc]
            assert not report.unexpected and target["step"] == expected["step"]
            assert torch.equal(target["all"], expected["all"])
            for rank in range(world):
                for name, tensor in expected[f"rank{rank}"].items():
                    assert torch.equal(target[f"rank{rank}"][name], tensor), (seed, turn, rank, name)
