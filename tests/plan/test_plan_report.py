"""``plan_report`` predicts a save: it is compared with the objects, the requests and the messages of one."""

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
from harness.internals import Catalog, StoreSpec, owners
from harness.merging import MergingOptions
from harness.models import make_run
from harness.ranks import all_ranks_raise, run_ranks
from harness.s3_server import S3Server
from harness.torch_internals import MessageChannel, agree
from harness.uneven_states import distributed, full, sharded, uneven_state
from torch.distributed._shard.sharded_tensor import Shard as LocalShard
from torch.distributed._shard.sharded_tensor import init_from_local_shards
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard

import zarrckpt
from zarrckpt import PlanReport, SaveOptions, SaveReport, UnsupportedLayoutError, UnsupportedValueError
from zarrckpt._format.chunk_layout import chunk_object_bytes
from zarrckpt._ranks.mesh import _slots
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


def planned(
    state: Mapping[str, Any], ranks_per_host: int | None = None, process_group: Any = None, **sizes: Any
) -> PlanReport:
    """Return a report. Fail if that opens a store or moves a piece."""
    with patch.object(StoreSpec, "open", _no_requests), patch.object(Rounds, "channel", _no_requests):
        return zarrckpt.plan_report(
            state, process_group=process_group, options=MergingOptions(**sizes), ranks_per_host=ranks_per_host
        )


def files(url: str) -> tuple[int, int]:
    """Return the numbers of files below a committed checkpoint: chunks of tensors, and others."""
    chunks = {
        f"{node.path}/{path.name}"
        for node in Catalog(StoreSpec(url)).root.tensors.values()
        for path in Path(url, node.path).glob("c*")
    }
    return len(chunks), sum(path.is_file() for path in Path(url).rglob("*")) - len(chunks)


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
    assert report.rank_bytes == tuple(elements[rank] for rank in range(report.ranks))
    assert saved.rank_bytes == tuple(stored[rank] for rank in range(report.ranks))


# -- one process


@pytest.mark.parametrize("sizes", [{}, {"max_chunk_bytes": 500}, {"max_chunk_bytes": 64, "fill_bytes": 32}], ids=str)
def test_a_plan_needs_no_process_group(sizes: dict[str, Any], tmp_path: Path) -> None:
    url, state = str(tmp_path / "run"), plain()
    report = planned(state, **sizes)
    saved = zarrckpt.save(state, url, options=MergingOptions(**sizes))
    assert (report.objects, report.documents) == files(url)
    assert report.objects == saved.objects > (3 if not sizes else 30)
    assert (report.ranks, report.tensors, report.merged, report.moved_bytes, report.bundles) == (1, 5, 0, 0, 0)
    assert (report.control_rounds, report.rank_connections, report.host_bytes) == (0, (0,), None)
    assert report.nbytes == sum(report.rank_bytes) == 70 * 33 * 8 + 5 * 8 + 8 + 9 * 2 * 2
    assert report.balance == 1.0
    check_ranks(url, report, saved)


@pytest.mark.parametrize("state", [{}, {"step": 3}, {"w": torch.zeros(0, 4)}], ids=["nothing", "value", "no elements"])
def test_states_without_elements(state: dict[str, Any], tmp_path: Path) -> None:
    url = str(tmp_path / "run")
    report = planned(state)
    zarrckpt.save(state, url)
    assert (report.objects, report.documents) == files(url)
    assert report.nbytes == 0 and report.balance == 1.0 and str(report)


def test_modules_and_optimizers(tmp_path: Path) -> None:
    run, url = make_run("plain"), str(tmp_path / "run")
    run.train(1)
    state = {"model": run.model, "optim": run.optim}
    report = planned(state)
    saved = zarrckpt.save(state, url)
    assert (report.objects, report.documents) == files(url) and report.objects == saved.objects
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
def test_puts_are_those_that_a_server_gets(s3_stub: S3Server, state: dict[str, Any]) -> None:
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
            assert report.puts == len(puts) == len({*puts}) == report.objects + report.documents, (options, overwrite)


def test_uploads_in_parts_count_each_request(s3_stub: S3Server) -> None:
    place, state = s3_stub.bucket(), {"w": torch.arange(40 << 20, dtype=torch.uint8), "b": b"x" * (17 << 20)}
    zarrckpt.save({"step": 1}, place.url("first"), storage_options=place.storage_options)
    report = zarrckpt.plan_report(state)
    begin = len(s3_stub.requests)
    zarrckpt.save(state, place.url("run"), storage_options=place.storage_options)
    kinds = Counter(request.kind for request in s3_stub.requests[begin:])
    sent = kinds["put"] + kinds["begin"] + kinds["part"] + kinds["end"]
    assert report.put_requests == sent > report.puts == kinds["put"] + kinds["begin"]


def test_puts_have_a_price_and_a_duration() -> None:
    report = planned({"w": torch.zeros(40 << 20, dtype=torch.uint8)})
    requests = report.put_requests
    assert requests > report.puts and report.put_cost() == pytest.approx(requests * 0.005 / 1000)
    assert report.put_cost(usd_per_1000=2) == pytest.approx(requests / 500)
    assert report.put_seconds(per_second=requests / 2) == pytest.approx(2)
    assert f"{report.objects} chunk object" in str(report) and f"{report.documents} documents" in str(report)


Floats = np.ndarray[Any, np.dtype[np.float64]]


def lost_shares(report: PlanReport, stall: float, rate: float, intervals: Floats) -> Floats:
    """Simulate a job that fails at random and restarts, for each interval. Return the shares of its time that it loses.

    A save copies the state, and commits it later. A failure loses all steps since the copy that was committed last.
    """
    hours = 50_000 / report.ranks
    uptimes = np.random.default_rng(0).exponential(hours * 3600, 10_000)[:, None]
    writing = max(report.rank_bytes) / rate
    commits = np.maximum(np.floor((uptimes - writing) / intervals), 0)
    trained = (commits * (intervals - stall)).sum(axis=0)
    return 1 - trained / uptimes.sum()


@pytest.mark.parametrize("stall, rate", [(0.04, 0.6e9), (2.0, 0.6e9), (60.0, 0.6e9), (0.0, 0.6e9), (0.04, 2e6)])
@pytest.mark.parametrize("ranks", [64, 16_384])
def test_the_interval_loses_the_least_time(ranks: int, stall: float, rate: float) -> None:
    report = PlanReport(ranks, 1, ranks * 400_000_000, ranks, 9, (400_000_000,) * ranks, 0, 0, 0)
    suggested = report.save_interval(stall_seconds=stall, bytes_per_second=rate)
    # Saves do not overlap.
    shortest = max(max(report.rank_bytes) / rate, report.put_seconds(), 2 * stall)
    assert suggested >= shortest
    others = np.geomspace(shortest, 500 * shortest, 60)
    own, *rest = lost_shares(report, stall, rate, np.array([suggested, *others]))
    assert own < 1.02 * min(rest) and max(rest) > 2 * own


def test_the_interval_of_an_empty_state() -> None:
    report = planned({})
    assert 0 < report.save_interval() < 1 and "save every" not in str(report)
    assert "save every" in str(planned({"w": torch.zeros(1)}))


WRONG = {"gpu_hours_per_failure": (0, -1), "bytes_per_second": (0, -1), "stall_seconds": (-1,)}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_rates_are_named(name: str) -> None:
    for value in (*WRONG[name], math.nan, math.inf):
        with pytest.raises(ValueError, match=name):
            planned({"w": torch.zeros(1)}).save_interval(**{name: value})


def test_balance_is_the_largest_part_over_the_mean() -> None:
    report = PlanReport(4, 1, 8, 1, 9, (4, 2, 2, 0), 0, 0, 0)
    assert report.balance == 2.0


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


class _Traffic:
    """The messages of this rank to others in a save."""

    def __init__(self) -> None:
        self.rounds = 0
        self.sent: Counter[int] = Counter()
        """Bytes of pieces, by the rank that gets them."""
        self.peers: set[int] = set()
        self._merge, self._posted = Rounds.merge, MessageChannel._posted

    def merge(self, *args: Any, **named: Any) -> Any:
        self.rounds += 1
        return self._merge(*args, **named)

    def posted(self, pieces: Any, way: str, peer: int, data: Any) -> Any:
        self.peers.add(peer)
        if way == "send":
            self.sent[peer] += data.nbytes - 4  # each message ends with its checksum
        return self._posted(pieces, way, peer, data)


Said = tuple[int, Counter[int], set[int]]


def _plan_and_save(url: str, name: str, sizes: dict[str, Any]) -> tuple[PlanReport, SaveReport, Said]:
    """Return the report, the save's report, and this rank's rounds, bytes sent by rank, and connections."""
    state, traffic = STATES[name](1), _Traffic()
    with patch.object(owners, "BUNDLE_BYTES", 512):
        report = planned(state, ranks_per_host=3, **sizes)
        agree._kept_plans.clear()  # as if nothing had been planned
        with (
            patch.object(Rounds, "merge", lambda *args, **named: traffic.merge(*args, **named)),
            patch.object(MessageChannel, "_posted", lambda *args: traffic.posted(*args)),
        ):
            saved = zarrckpt.save(state, url, options=MergingOptions(**sizes))
    (mesh,) = (slot.mesh for slot in _slots.values() if slot.mesh is not None and slot.mesh.is_usable(None))
    return report, saved, (traffic.rounds, traffic.sent, traffic.peers | {*mesh.tree.edges})


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
    answers = run_ranks(_plan_and_save, url, name, sizes)
    reports, saves = [answer[0] for answer in answers], [answer[1] for answer in answers]
    report, saved = reports[0], saves[0]
    assert all(other == report for other in reports) and report.ranks == 4
    blobs = saved.objects - report.objects
    assert blobs == (1 if name == "uneven" else 0)
    assert (report.objects, report.documents) == files(url)
    tensors = Catalog(StoreSpec(url)).root.tensors.values()
    assert report.tensors == len(tensors)
    assert report.nbytes == sum(math.prod(node.grid.shape) * node.dtype.itemsize for node in tensors)
    if not blobs:
        check_ranks(url, report, saved)
    rounds, sent, peers = zip(*(answer[2] for answer in answers), strict=True)
    assert {*rounds} == {report.control_rounds}
    assert report.moved_bytes == sum(count.total() for count in sent)
    # Ranks 0 to 2 are on one host, rank 3 on another.
    assert report.host_bytes == sum(count[3] for count in sent) + sent[3].total()
    assert report.rank_connections == tuple(map(len, peers))
    assert (report.merged > 0) == (report.bundles > 0) == (report.moved_bytes > 0)
    assert report.bundles > 1 or name == "uneven" or sizes == {"min_piece_bytes": 0}


def _plan_and_save_with_base(url: str) -> tuple[PlanReport, SaveReport]:
    line = init_device_mesh("cpu", (4,))
    state = {"frozen": sharded(full((2000, 33), 1), line), "adapter": sharded(full((2000, 33), 2), line)}
    zarrckpt.save(state, f"{url}/base", options=MergingOptions(reuse="on", min_piece_bytes=0))
    state["adapter"].to_local().add_(1)
    report = zarrckpt.plan_report(state, base=f"{url}/base", options=MergingOptions(min_piece_bytes=0))
    return report, zarrckpt.save(state, f"{url}/next", base=f"{url}/base", options=MergingOptions(min_piece_bytes=0))


def test_a_base_divides_bytes_into_sent_and_reused(tmp_path: Path) -> None:
    reports, saves = zip(*run_ranks(_plan_and_save_with_base, str(tmp_path)), strict=True)
    url, report, saved = str(tmp_path / "next"), reports[0], saves[0]
    assert all(other == report for other in reports) and (report.objects, report.documents) == files(url)
    reused = Catalog(StoreSpec(url)).root.reused
    assert reused is not None and 0 < report.reused_bytes == saved.linked_bytes - 4 * reused.objects
    assert report.sent_bytes == report.nbytes - report.reused_bytes == 2000 * 33 * 8
    assert " are sent and 528 KB reused; " in str(report)


def _with_and_without_merging() -> list[PlanReport]:
    return [planned(_fsdp(1), min_piece_bytes=least) for least in (0, None, 1 << 40)]


def test_merging_trades_objects_for_bytes_between_ranks() -> None:
    never, default, always = run_ranks(_with_and_without_merging)[0]
    assert never.objects > default.objects > always.objects
    assert 0 == never.moved_bytes < default.moved_bytes < always.moved_bytes
    assert 0 == never.merged < default.merged < always.merged
    assert never.nbytes == default.nbytes == always.nbytes and never.put_cost() > always.put_cost()
    # Three tensors of four small pieces and one of two are a chunk each. The large one and the replicas stay.
    assert default.merged == 4 and default.objects == never.objects - 3 * 3 - 1
    # The owner of a chunk holds one of the largest pieces.
    assert default.moved_bytes == (9 + 24 + 768) * 8 * 8 + 5 * 4 * 8


def _of_some_ranks() -> PlanReport | None:
    group = dist.new_group([1, 2, 3])
    if dist.get_rank() == 0:
        return None
    return planned({"w": full((7,), 1), "v": full((8,), 1), "u": full((9,), 1)}, process_group=group)


def test_a_sub_group_is_planned() -> None:
    alone, *reports = run_ranks(_of_some_ranks)
    assert alone is None and all(report == reports[0] for report in reports)
    assert reports[0].ranks == 3 and sorted(reports[0].rank_bytes) == [56, 64, 72]


# -- errors of plans


def test_plans_raise_the_errors_of_a_save(tmp_path: Path) -> None:
    for state in ({"s": torch.eye(3).to_sparse()}, 3):
        with pytest.raises(UnsupportedValueError) as by_save:
            zarrckpt.save(state, str(tmp_path / "run"))  # type: ignore[arg-type]
        with pytest.raises(UnsupportedValueError) as by_plan:
            planned(state)  # type: ignore[arg-type]
        assert str(by_plan.value) == str(by_save.value)
    wrong = {"ranks_per_host": 0, "max_chunk_bytes": 0, "max_inflight_bytes": 0}
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
