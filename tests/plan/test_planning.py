"""Plans at scale: the ranks' parts fit together and do not grow with other ranks. Repeated saves plan once."""

from __future__ import annotations

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
from harness import ROOT, large_models
from harness.internals import AllDescriptions, Box, intersect
from harness.merging import MergingPlan
from harness.plan_traffic import moved_bytes
from harness.ranks import run_ranks
from harness.simulated import kept, memory_store, simulate
from harness.torch_internals import agree
from harness.uneven_states import fsdp_tp, full, mesh_of, sharded
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.tensor import DTensor

import zarrckpt
from zarrckpt._format.root import Root, Table
from zarrckpt._format.state_path import DICT, StatePath
from zarrckpt._plan.description import DescribedEntry, Description
from zarrckpt._plan.global_state import gather_state
from zarrckpt._plan.plan import PlanOptions, SavePlan, plan_save

SMALL = {"small": (512, 3, 128, 1024)}
"""A model of 30 weights, with moments and steps."""


def _planned(layout: str, ranks: int, least: int | None = None) -> SavePlan:
    """Return the plan of a small model's save, as each rank computes it."""
    with patch.dict(large_models.MODELS, SMALL):
        gathered = large_models.Case("small", layout, ranks).descriptions()
    return plan_save(gather_state(gathered), MergingPlan(min_piece_bytes=least))


# -- work of each rank


@pytest.mark.parametrize("compared", [True, False])
def test_replicas_without_digests_are_written_by_one_rank(compared: bool) -> None:
    """They may differ, and no rank had a mixture of them."""
    entry = DescribedEntry(StatePath(("w",), (DICT,)), "tensor", (1000,), "torch.float32")
    gathered = AllDescriptions([Description((entry,), compared=compared)], np.zeros(4, np.int64), range(4))
    plan = plan_save(gather_state(gathered), PlanOptions(max_chunk_bytes=400))
    assert len({*plan.chunk_owners.owner.tolist()}) == (4 if compared else 1)


def test_plans_differ_if_another_rank_writes() -> None:
    one, other = (_planned("fsdp-tp", 24) for _ in range(2))
    other.chunk_owners.owner[0] = (other.chunk_owners.owner[0] + 1) % 24
    assert one.digest == _planned("fsdp-tp", 24).digest != other.digest


@pytest.mark.parametrize(
    ("layout", "ranks", "least"),
    [
        ("fsdp-tp", 24, None),
        ("fsdp-tp", 24, 0),
        ("hsdp-tp", 24, None),
        ("hsdp-tp", 24, 0),
        ("fsdp-tp", 64, None),
        ("hsdp-tp", 96, None),
        ("pipeline", 64, None),
    ],
)
def test_parts_of_the_plan_fit_together(layout: str, ranks: int, least: int | None) -> None:
    plan = _planned(layout, ranks, least)
    written: Counter[tuple[str, Any]] = Counter()
    documents: Counter[str] = Counter()
    values: Counter[str] = Counter()
    sent: dict[tuple[int, int, int], list[tuple[str, Box]]] = {}
    received: dict[tuple[int, int, int], list[tuple[str, Box]]] = {}
    for rank in range(ranks):
        part = plan.rank_plan(rank)
        documents.update([*part.documents])
        values.update([*part.object_paths])
        chunks = [(-1, chunk) for chunk in part.chunks]
        chunks += [(number, chunk) for number, bundle in part.bundles.items() for chunk in bundle.chunks]
        assert {name for name, _ in part.items} | {chunk.fqn for _, chunk in chunks} == {*part.arrays}
        assert [*part.bundles] == sorted(part.bundles)
        for number, chunk in chunks:
            written[chunk.fqn, chunk.chunk_index] += 1
            whole = plan.layout.tensors[chunk.fqn].grid.chunk_box(chunk.chunk_index)
            assert sum(box.size for box, _, _ in chunk.pieces) == whole.size
            for box, item, source in chunk.pieces:
                assert intersect(box, whole) == box
                if item is not None:
                    name, held = part.items[item]
                    assert source is None and name == chunk.fqn and intersect(held, whole) == box
                else:
                    assert source is not None and source != rank and number >= 0
                    received.setdefault((number, source, rank), []).append((chunk.fqn, box))
        for number, bundle in part.bundles.items():
            for sending in bundle.sends:
                name, held = part.items[sending.item]
                assert sending.to != rank and intersect(sending.box, held) == sending.box
                sent.setdefault((number, rank, sending.to), []).append((name, sending.box))
    assert sent == received and bool(sent) == plan.moves_pieces and (sent or least == 0)
    grids = {name: node.grid for name, node in plan.layout.tensors.items()}
    sizes = {name: math.prod(grid.shape) * 4 for name, grid in grids.items()}
    moved = 4 * sum(box.size for boxes in sent.values() for _, box in boxes)
    # If no divisor of a piece's rows fits subchunks, a few of the rows move to the owner of the next chunk.
    assert moved == moved_bytes(plan.chunk_owners) and (least is None or moved < 0.005 * sum(sizes.values()))
    assert set(written.values()) == {1}
    assert Counter(fqn for fqn, _ in written) == {fqn: grid.num_chunks for fqn, grid in grids.items()}
    assert len(grids) == 4 * 30 and set(values) == {*large_models.VALUES} and set(values.values()) == {1}
    assert set(documents.values()) == {1} and len(documents) > 120


def test_every_process_computes_the_same_plan(tmp_path: Path) -> None:
    """No result depends on the order of a set, or on a hash."""
    program = (
        "import sys; sys.path.append('tests'); from harness.large_models import Case; "
        "from zarrckpt._plan.global_state import gather_state; from zarrckpt._plan.plan import *; "
        "case = Case('8B', 'hsdp-tp', 64); "
        "plan = plan_save(gather_state(case.descriptions()), PlanOptions()); "
        "print([*map(bytes.hex, [d.digest for d in case.descriptions().descriptions])], plan.digest.hex())"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            check=True,
            cwd=ROOT,
            timeout=100,
            env={"PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    }
    assert len(found) == 1


def test_messages_and_documents_grow_only_with_tensors() -> None:
    sizes = []
    for ranks in (8, 1024):
        with patch.dict(large_models.MODELS, SMALL):
            gathered: AllDescriptions = large_models.Case("small", "fsdp-tp", ranks).descriptions()
        layout = plan_save(gather_state(gathered), PlanOptions()).layout
        document = Root("0" * 32, "", layout.tensors, Table(0, 0), world_size=layout.world_size).to_bytes()
        sizes.append((len(gathered.descriptions[0].packed), len(document)))
        assert len(gathered.descriptions) == 1
    few, many = sizes
    # The shapes of chunks are other numbers, but not more numbers. A mesh names its ranks.
    assert few[1] * 0.95 < many[1] < few[1] * 1.05 and many[0] < few[0] + 4 * 1024


# -- loads


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
def _planning() -> Iterator[list[int]]:
    """Count how often this process plans a save."""
    calls: list[int] = []
    real = agree.plan_save

    def counted(*args: Any, **options: Any) -> Any:
        calls.append(1)
        return real(*args, **options)

    with patch.object(agree, "plan_save", counted):
        yield calls


class _Saves:
    """Saves one state after the other on each rank. Checks the stored state, and how often each rank plans."""

    def __init__(self, folder: str, group: dist.ProcessGroup | None = None) -> None:
        self.folder, self.group, self.count = folder, group, 0

    def __call__(self, state: dict[str, Any], plans: int, url: str = "", **options: Any) -> None:
        self.count += 1
        url = f"{self.folder}/{url or self.count}"
        with _planning() as calls:
            self.save(state, url, **options)
        assert len(calls) == plans, (self.count, calls)
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
        with _planning() as calls, pytest.raises(error):
            zarrckpt.save(state, f"{self.folder}/{url}", process_group=self.group)
        assert len(calls) == plans


class _AsyncSaves(_Saves):
    def save(self, state: dict[str, Any], url: str, **options: Any) -> None:
        zarrckpt.async_save(state, url, process_group=self.group, **options).result(timeout=60)


def _state(number: float) -> dict[str, Any]:
    """Return pieces that fit a grid, pieces that do not, replicas, and a value, as on every rank of four."""
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
    # Options that change the plan.
    saves(_state(9), 1, options=zarrckpt.SaveOptions(max_chunk_bytes=40))
    saves(_state(10), 0, options=zarrckpt.SaveOptions(max_chunk_bytes=40))
    saves(_state(11), 1)
    background(_state(12), 0)


def test_saves_of_the_same_state_plan_once(tmp_path: Path) -> None:
    run_ranks(_same_again, str(tmp_path))


def _changes(folder: str) -> None:
    rank, saves = dist.get_rank(), _Saves(folder)
    saves(_state(0), 1)
    # One rank has one more tensor, and later has not.
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
    # Ranks hold different values, which changes the owners.
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        zarrckpt.save(_state(9) | {"step": rank, "b": full((5,), rank)}, f"{folder}/differs")
    assert any("'b' (ranks 0, 1, 2, 3)" in str(one.message) for one in caught) == (rank == 0)
    dist.barrier()
    assert zarrckpt.open(f"{folder}/differs")["b"][...].tolist() == full((5,), 0).tolist()
    # The previous plan is still kept.
    saves(_state(10), 0)


def test_any_change_on_any_rank_is_planned_anew(tmp_path: Path) -> None:
    run_ranks(_changes, str(tmp_path))


def _forgotten(folder: str) -> None:
    saves, rank = _Saves(folder), dist.get_rank()
    saves(_state(0), 1)
    # As if another process replaced the coordinator, or some ranks.
    if rank == 0:
        agree._kept_plans.clear()
    saves(_state(1), 1)
    saves(_state(2), 0)
    if rank in (1, 2):
        agree._kept_plans.clear()
    saves(_state(3), 1)
    saves(_state(4), 0)
    group = dist.new_group([1, 2, 3])
    if rank > 0:
        some = _Saves(f"{folder}/some", group)
        for turn in range(3):
            some({"w": sharded(full((6, 2), turn), mesh_of([1, 2, 3])), "number": turn}, int(turn == 0))
    dist.barrier()
    saves(_state(5), 0)


def test_ranks_without_the_cached_plan_get_it(tmp_path: Path) -> None:
    run_ranks(_forgotten, str(tmp_path))
    run_ranks(_same_again, str(tmp_path / "other"))  # in the same processes, with another group


def _random_states(seed: int, world: int) -> Iterator[Callable[[int], dict[str, Any]]]:
    """Yield states by rank. Most equal the state before. In some, one rank or all have another shape."""
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
def test_random_changes_renew_the_plan(seed: int) -> None:
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
