"""``plan_report`` predicts a save: it is compared with the objects, the requests and the bytes of one."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from harness.internals import Catalog, StoreSpec
from harness.merging import MergingOptions
from harness.models import make_run
from harness.ranks import all_ranks_raise, run_ranks
from harness.s3_server import S3Server
from harness.torch_internals import agree
from harness.uneven_states import distributed, full, sharded, uneven_state
from torch.distributed._shard.sharded_tensor import Shard as LocalShard
from torch.distributed._shard.sharded_tensor import init_from_local_shards
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

import zarrckpt
from zarrckpt import PlanReport, SaveOptions, SaveReport, UnsupportedLayoutError, UnsupportedValueError
from zarrckpt._format.chunk_layout import chunk_object_bytes
from zarrckpt._ranks.rounds import Rounds

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


def plain() -> dict[str, Any]:
    """Return tensors of all kinds at several depths, and values that need no separate object."""
    return {
        "model": {"w": full((70, 33), 1), "deep": {"er": {"b": full((5,), 2)}}, "e": torch.zeros(0, 3)},
        "scalar": torch.tensor(7),
        "half": torch.ones(9, 2, dtype=torch.bfloat16),
        "step": 3,
        "names": ["a", {"b": None}],
    }


def test_chunks_fit_into_the_memory_bound() -> None:
    """A chunk whose pieces move is in memory as a whole."""
    state = {"w": torch.zeros(48 << 20, dtype=torch.uint8)}
    assert planned(state).objects == 1 and planned(state, max_inflight_bytes=16 << 20).objects > 2


def _no_requests(*args: Any) -> Any:
    raise AssertionError("a store was opened")


def planned(state: Mapping[str, Any], process_group: Any = None, **sizes: Any) -> PlanReport:
    """Return a report. Fail if that opens a store or moves a piece."""
    with patch.object(StoreSpec, "open", _no_requests), patch.object(Rounds, "channel", _no_requests):
        return zarrckpt.plan_report(state, process_group=process_group, options=MergingOptions(**sizes))


def files(url: str) -> tuple[int, int]:
    """Return the numbers of files below a committed checkpoint: chunks of tensors, and all."""
    chunks = {
        f"{node.path}/{path.name}"
        for node in Catalog(StoreSpec(url)).root.tensors.values()
        for path in Path(url, node.path).glob("c*")
    }
    return len(chunks), sum(path.is_file() for path in Path(url).rglob("*"))


def check_ranks(url: str, report: PlanReport, saved: SaveReport) -> None:
    """Check the bytes per rank with the table of writers: elements as reported, stored bytes as saved."""
    catalog = Catalog(StoreSpec(url))
    writers = catalog.writers_by_path()
    elements, stored = Counter[int](), Counter[int]()
    for node in catalog.root.tensors.values():
        for index in node.grid.chunks_of(
            node.grid.chunk_box((0,) * len(node.grid.shape))._replace(shape=node.grid.shape)
        ):
            writer = int(writers[node.path][index])
            elements[writer] += node.grid.chunk_box(index).size * node.dtype.itemsize
            stored[writer] += chunk_object_bytes(node)
    assert report.largest_rank_bytes == max(elements.values()) and report.nbytes == elements.total()
    assert saved.rank_bytes == tuple(stored[rank] for rank in range(report.ranks))


# -- one process


@pytest.mark.parametrize("sizes", [{}, {"max_chunk_bytes": 500}, {"max_chunk_bytes": 64, "fill_bytes": 32}], ids=str)
def test_a_plan_needs_no_process_group(sizes: dict[str, Any], tmp_path: Path) -> None:
    url, state = str(tmp_path / "run"), plain()
    report = planned(state, **sizes)
    saved = zarrckpt.save(state, url, options=MergingOptions(**sizes))
    assert (report.objects, report.requests) == files(url)
    assert report.objects == saved.objects > (3 if not sizes else 30)
    assert report.ranks == 1 and report.nbytes == report.largest_rank_bytes == 70 * 33 * 8 + 5 * 8 + 8 + 9 * 2 * 2
    check_ranks(url, report, saved)


@pytest.mark.parametrize("state", [{}, {"step": 3}, {"w": torch.zeros(0, 4)}], ids=["nothing", "value", "no elements"])
def test_states_without_elements(state: dict[str, Any], tmp_path: Path) -> None:
    url = str(tmp_path / "run")
    report = planned(state)
    zarrckpt.save(state, url)
    assert (report.objects, report.requests) == files(url)
    assert report.nbytes == report.largest_rank_bytes == 0 and str(report)


def test_modules_and_optimizers(tmp_path: Path) -> None:
    run, url = make_run("plain"), str(tmp_path / "run")
    run.train(1)
    state = {"model": run.model, "optim": run.optim}
    report = planned(state)
    saved = zarrckpt.save(state, url)
    assert (report.objects, report.requests) == files(url) and report.objects == saved.objects
    check_ranks(url, report, saved)


def blobs() -> dict[str, Any]:
    """Values that become arrays, two in separate groups, and one of several MiB beside a tensor."""
    values = {"numpy": np.arange(9), "deep": {"er": {"nothing": b""}}, "text": "x" * 100_000}
    return {"model": {"w": full((5,), 1), "bytes": b"x" * 5_000_000}, "set": {"of": {1, 2}}, **values}


STATES_OF_ONE: dict[str, dict[str, Any]] = {
    "plain": plain(),
    "blobs": blobs(),
    "only blobs": {"a": {"b": np.arange(3)}},
    "per rank": {"w": torch.ones(3), "own": zarrckpt.PerRank({"t": torch.ones(4), "n": 3, "b": b"own"})},
    "nothing": {},
    "no elements": {"w": torch.zeros(0, 4)},
    "many chunks": {"w": torch.arange(5_000.0).reshape(50, 100)},
}


@pytest.mark.parametrize("state", STATES_OF_ONE.values(), ids=STATES_OF_ONE)
def test_requests_are_those_that_a_server_gets(s3_stub: S3Server, state: dict[str, Any]) -> None:
    place = s3_stub.bucket()
    # The first create and the first replace of a process test the server's conditional puts.
    zarrckpt.save({"step": 1}, place.url("first"), storage_options=place.storage_options)
    zarrckpt.save({"step": 1}, place.url("first"), overwrite=True, storage_options=place.storage_options)
    sizes: list[dict[str, Any]] = [{}, {"compression": "zstd"}, {"compression": "blosc", "max_chunk_bytes": 300}]
    for number, options in enumerate([*sizes, {"portable_dtypes": True}]):
        report = planned(state, **options)
        for overwrite in (False, True):
            begin = len(s3_stub.requests)
            zarrckpt.save(
                state,
                place.url(f"run{number}"),
                overwrite=overwrite,
                storage_options=place.storage_options,
                options=SaveOptions(**options),
            )
            requests = s3_stub.requests[begin:]
            puts = [request.target for request in requests if request.method == "PUT"]
            assert report.requests == len(puts) == len({*puts}), (options, overwrite)


def test_uploads_in_parts_count_each_request(s3_stub: S3Server) -> None:
    place, state = s3_stub.bucket(), {"w": torch.arange(40 << 20, dtype=torch.uint8), "b": b"x" * (17 << 20)}
    zarrckpt.save({"step": 1}, place.url("first"), storage_options=place.storage_options)
    report = zarrckpt.plan_report(state)
    begin = len(s3_stub.requests)
    zarrckpt.save(state, place.url("run"), storage_options=place.storage_options)
    kinds = Counter(request.kind for request in s3_stub.requests[begin:])
    sent = kinds["put"] + kinds["begin"] + kinds["part"] + kinds["end"]
    assert report.requests == sent > kinds["put"] + kinds["begin"]


# -- four ranks


def _fsdp(number: float) -> dict[str, Any]:
    """Return pieces of 1.5 MiB, smaller ones, replicas, and a tensor that is cut unevenly."""
    line = DeviceMesh("cpu", [0, 1, 2, 3], _init_backend=False, _rank=dist.get_rank())
    square = DeviceMesh("cpu", [[0, 1], [2, 3]], _init_backend=False, _rank=dist.get_rank())
    norm, w = full((64,), number), full((10, 4), number + 1)
    mine = w[5 * (dist.get_rank() % 2) :][:5].clone()
    return {
        "large": sharded(full((768, 1024), number), line),
        "small": {str(n): sharded(full((n, 8), number), line) for n in (13, 32, 1024)},
        "norm": distributed(norm, tuple(norm.shape), line, [Replicate()]),
        "hsdp": distributed(mine, tuple(w.shape), square, [Replicate(), Shard(0)]),
        "replicas": {str(n): full((n, 3), number) for n in range(40, 50)},
    }


STATES: dict[str, Callable[[float], dict[str, Any]]] = {"fsdp": _fsdp, "uneven": uneven_state}


def _plan_and_save(url: str, name: str, sizes: dict[str, Any]) -> tuple[PlanReport, SaveReport]:
    state = STATES[name](1)
    report = planned(state, **sizes)
    agree._kept_plans.clear()  # as if nothing had been planned
    return report, zarrckpt.save(state, url, options=MergingOptions(**sizes))


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("fsdp", {}),
        ("fsdp", {"min_piece_bytes": 0}),
        ("fsdp", {"max_inflight_bytes": 4096, "fill_bytes": 1024, "max_chunk_bytes": 1 << 19}),
        ("uneven", {}),
        ("uneven", {"min_piece_bytes": 0, "max_chunk_bytes": 100}),
    ],
    ids=str,
)
def test_four_ranks_get_one_report(name: str, sizes: dict[str, Any], tmp_path: Path) -> None:
    url = str(tmp_path / "run")
    reports, saves = zip(*run_ranks(_plan_and_save, url, name, sizes), strict=True)
    report, saved = reports[0], saves[0]
    assert all(other == report for other in reports) and report.ranks == 4
    blobs = saved.objects - report.objects
    assert blobs == (1 if name == "uneven" else 0)
    assert (report.objects, report.requests) == files(url)
    tensors = Catalog(StoreSpec(url)).root.tensors.values()
    assert report.nbytes == sum(math.prod(node.grid.shape) * node.dtype.itemsize for node in tensors)
    if not blobs:
        check_ranks(url, report, saved)


def _with_and_without_merging() -> list[PlanReport]:
    return [planned(_fsdp(1), min_piece_bytes=least) for least in (0, None, 1 << 40)]


def test_merging_reduces_objects() -> None:
    never, default, always = run_ranks(_with_and_without_merging)[0]
    assert never.nbytes == default.nbytes == always.nbytes and never.requests > default.requests > always.requests
    # Three tensors of four small pieces and one of two are a chunk each. The large one and the replicas stay.
    assert always.objects < default.objects == never.objects - 3 * 3 - 1


def _of_some_ranks() -> PlanReport | None:
    group = dist.new_group([1, 2, 3])
    if dist.get_rank() == 0:
        return None
    return planned({"w": full((7,), 1), "v": full((8,), 1), "u": full((9,), 1)}, process_group=group)


def test_a_sub_group_is_planned() -> None:
    alone, *reports = run_ranks(_of_some_ranks)
    assert alone is None and all(report == reports[0] for report in reports)
    assert reports[0].ranks == 3 and reports[0].largest_rank_bytes == 72


# -- errors of plans


def test_plans_raise_the_errors_of_a_save(tmp_path: Path) -> None:
    for state in ({"s": torch.eye(3).to_sparse()}, 3):
        with pytest.raises(UnsupportedValueError) as by_save:
            zarrckpt.save(state, str(tmp_path / "run"))  # type: ignore[arg-type]
        with pytest.raises(UnsupportedValueError) as by_plan:
            planned(state)  # type: ignore[arg-type]
        assert str(by_plan.value) == str(by_save.value)
    wrong = {"max_chunk_bytes": 0, "max_inflight_bytes": 0}
    for name, value in wrong.items():
        with pytest.raises(ValueError, match=name):
            planned({"w": torch.zeros(3)}, **{name: value})
    with pytest.raises(TypeError, match="max_chunk_bytes"):
        planned({"w": torch.zeros(3)}, max_chunk_bytes="1 MiB")
    assert not (tmp_path / "run").exists()


def _unsavable(url: str | None, what: str) -> None:
    rank = dist.get_rank()
    if what == "gap":
        line = DeviceMesh("cpu", [0, 1, 2, 3], _init_backend=False, _rank=rank)
        state: dict[str, Any] = {} if rank == 2 else {"w": sharded(full((8,), 1), line)}
    elif what == "overlap":
        shards = [LocalShard.from_tensor_and_offsets(torch.zeros(2, 2), [2 * rank, 0], rank)]
        tensor = init_from_local_shards(shards, 8, 2)
        tensor.local_shards()[0].metadata.shard_offsets[0] = 2 * max(rank, 1)
        for shard in tensor.metadata().shards_metadata[:1]:
            shard.shard_offsets[0] = 2
        state = {"w": tensor}
    else:
        state = {"w": torch.zeros(3), **({"s": torch.eye(2).to_sparse()} if rank == 3 else {})}
    if url is None:
        planned(state)
    else:
        zarrckpt.save(state, url)


@pytest.mark.parametrize(
    ("what", "error"),
    [
        ("gap", UnsupportedLayoutError),
        ("overlap", UnsupportedLayoutError),
        ("sparse", UnsupportedValueError),
    ],
)
def test_errors_reach_all_ranks(what: str, error: type[Exception], tmp_path: Path) -> None:
    name = "'s'" if what == "sparse" else "'w'"
    assert name in all_ranks_raise(error, _unsavable, None, what)
    all_ranks_raise(error, _unsavable, str(tmp_path / "run"), what)
