"""Each step of a save and of a load fails on each rank: errors name it, nothing is committed, the next one works.

First come tests of the metadata of each kind of entry.

The states have pieces that ranks exchange, so a rank that fails before, in or after its exchange keeps others waiting
for its pieces. They must not wait for a timeout. But if a rank fails before zarrckpt's writer or reader is called, only
DCP notices. Then the others wait for it to join until a timeout, which is short here.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness.merging import MergingOptions
from harness.ranks import run_ranks
from harness.store_servers import S3Place
from harness.torch_internals import links
from harness.uneven_states import clear, differing, held_of, opens, uneven_state
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load_state_dict
from torch.distributed.checkpoint.state_dict_saver import save_state_dict
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

import zarrckpt
from zarrckpt import LoadOptions, SaveOptions, ZarrLoadPlanner, ZarrSavePlanner, ZarrStorageReader, ZarrStorageWriter

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

T = TypeVar("T")

ALL = (0, 1, 2, 3)

MERGED, APART = SaveOptions(durable=False), MergingOptions(durable=False, min_piece_bytes=0)

SECONDS = 30.0
"""Maximum seconds of a failing save or load. All take far less, but none may wait for a timeout of a minute."""


# -- metadata


def _rows_on(ranks: Sequence[int], shape: tuple[int, ...], fill: float | None = None) -> Any:
    """Return a ShardedTensor cut by rows over some ranks. Its spec lacks the others. Collective."""
    spec = ChunkShardingSpec(dim=0, placements=[f"rank:{rank}/cpu" for rank in ranks])
    made = sharded_tensor.empty(spec, *shape, dtype=torch.float64)
    for shard in made.local_shards():
        begin = shard.metadata.shard_offsets[0]
        rows = torch.arange(begin, begin + len(shard.tensor), dtype=torch.float64)[:, None]
        shard.tensor.copy_(rows.expand_as(shard.tensor) if fill is None else torch.tensor(fill))
    return made


def _metadata_state(specs: Sequence[Sequence[int]], fill: float | None = None) -> dict[str, Any]:
    state: dict[str, Any] = {f"sharded{place}": _rows_on(ranks, (10, 4), fill) for place, ranks in enumerate(specs)}
    return {**state, "replicated": torch.full((4,), 3.0 if fill is None else fill), "bytes": [1, 2, 3, 4]}


def _metadata(url: str) -> tuple[Metadata, Metadata, list[bool]]:
    """Return the metadata of DCP's own planners for an entry of each kind, that of zarrckpt's reader,
    and load results.
    """
    saved = dcp.save(_metadata_state([ALL, (1,), (0, 3)]), storage_writer=ZarrStorageWriter(url))
    read = ZarrStorageReader(url).read_metadata()
    right = []
    for specs in ([ALL, ALL, ALL], [(2,), (3, 1), (1,)]):
        target = _metadata_state(specs, fill=-1.0)
        target["bytes"] = None
        dcp.load(target, storage_reader=ZarrStorageReader(url))
        expected = _metadata_state(specs)
        right.append(held_of(target) == held_of(expected) and target["bytes"] == [1, 2, 3, 4])
    return saved, read, right


def test_metadata_of_each_kind_of_entry(tmp_path: Path) -> None:
    for saved, read, right in run_ranks(_metadata, str(tmp_path / "one")):
        assert right == [True, True]
        assert saved.state_dict_metadata.keys() == read.state_dict_metadata.keys()
        for metadata, pieces in ((saved, [4, 1, 2]), (read, [1, 1, 1])):
            entries = metadata.state_dict_metadata
            assert isinstance(entries["bytes"], BytesStorageMetadata)
            replicated = entries["replicated"]
            assert isinstance(replicated, TensorStorageMetadata) and len(replicated.chunks) == 1
            assert replicated.size == torch.Size([4]) and replicated.properties.dtype == torch.float32
            for place, count in enumerate(pieces):
                entry = entries[f"sharded{place}"]
                assert isinstance(entry, TensorStorageMetadata) and len(entry.chunks) == count
                assert entry.size == torch.Size([10, 4]) and entry.properties.dtype == torch.float64


# -- failing steps


class Injected(Exception):
    """Raised by the tests' own faults."""


@dataclass(frozen=True)
class Case:
    """A step that fails on some ranks: with ``after``, after the step's own work instead of before."""

    step: str
    ranks: tuple[int, ...]
    after: bool = False


@dataclass
class Fault:
    """The step that fails on this rank, none while ``case`` is None."""

    case: Case | None = None
    calls: int = 0

    def strike(self, step: str, *, after: bool = False, call: int = 0) -> None:
        """Raise if this is the step. In steps with many calls, raise at the call of that number."""
        case = self.case
        if case is None or case.step != step or case.after != after or dist.get_rank() not in case.ranks:
            return
        self.calls += 1
        if self.calls > call:
            raise Injected(f"rank {dist.get_rank()} fails {'after' if after else 'before'} {step}")

    def failing(self, step: str, future: Future[Any]) -> Future[Any]:
        """Return a failed future if this is the step, else the given one."""
        try:
            self.strike(step)
        except Injected as err:
            future = Future()
            future.set_exception(err)
        return future


STEPS: dict[type, list[str]] = {
    ZarrStorageWriter: ["set_up_storage_writer", "prepare_local_plan", "prepare_global_plan", "write_data", "finish"],
    ZarrSavePlanner: ["set_up_planner", "create_local_plan", "create_global_plan", "finish_plan", "resolve_data"],
    ZarrStorageReader: [
        *["read_metadata", "set_up_storage_reader", "prepare_local_plan", "prepare_global_plan", "read_data"]
    ],
    ZarrLoadPlanner: [
        *["set_up_planner", "create_local_plan", "create_global_plan", "finish_plan"],
        *["resolve_tensor", "commit_tensor", "lookup_tensor", "load_value"],
    ],
}


def faulty(kind: type[T], fault: Fault, *args: Any, **options: Any) -> T:
    """Return an object of a class whose steps fail as the fault says, before or after their work."""

    def failing_step(name: str) -> Callable[..., Any]:
        work = getattr(kind, name)

        @functools.wraps(work)  # DCP looks at the parameters
        def step(self: Any, *given: Any, **more: Any) -> Any:
            fault.strike(name, call=3 if name == "lookup_tensor" else 0)
            future = {"write_data": "write", "read_data": "read"}.get(name)
            if future and (never := fault.failing(f"future of no {future}", Future())).done():
                return never
            answer = work(self, *given, **more)
            # After its checks and one more item, a rank is within its exchange.
            fault.strike(name, after=True, call=len(self.plan.items) + 1 if name == "resolve_data" else 0)
            return fault.failing(f"future of a {future}", answer) if future else answer

        return step

    return type(kind.__name__, (kind,), {name: failing_step(name) for name in STEPS[kind]})(*args, **options)


class Wrapper(StorageWriter):
    """A writer around another one, which it does not call on the failing ranks."""

    def __init__(self, inner: ZarrStorageWriter, fault: Fault) -> None:
        self.inner = inner
        self.fault = fault

    def reset(self, checkpoint_id: Any = None) -> None:
        self.inner.reset(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self.inner.set_up_storage_writer(is_coordinator, *args, **kwargs)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return self.inner.prepare_local_plan(plan)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return self.inner.prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        self.fault.strike("write_data of a wrapper")
        nothing: Future[list[WriteResult]] = Future()
        nothing.set_result([])
        try:
            self.fault.strike("write_data of a wrapper, in silence")
        except Injected:
            return nothing
        return self.inner.write_data(plan, planner)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        self.inner.finish(metadata, results)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


# -- running cases on all ranks


@dataclass
class Told:
    """The outcome of one case on one rank, checked by the test. An assertion in the rank would leave others waiting."""

    case: Case
    failures: list[int] | None = None
    """The ranks that are named as failed. None if the call did not raise."""
    errors: set[str] = field(default_factory=set)
    seconds: float = 0.0
    opened: bool = False
    """Whether a checkpoint was committed."""
    touched: bool = False
    """Whether a target of a load was changed."""
    next_wrong: list[str] = field(default_factory=list)
    """Wrong entries of the next save or load."""


def _fails(told: Told, call: Callable[[], Any]) -> None:
    began = time.monotonic()
    try:
        call()
    except CheckpointException as err:
        told.failures = sorted(err.failures)
        told.errors = {type(error).__name__ for error, _ in err.failures.values()}
    told.seconds = time.monotonic() - began


def _works(call: Callable[[], Any]) -> list[str]:
    try:
        call()
    except CheckpointException as err:
        return [f"failed: {err.failures!r:.1000}"]
    return []


@contextmanager
def _absent_ranks_are_missed_soon(case: Case) -> Iterator[None]:
    """Shorten the timeout if a rank fails before it joins the others."""
    absent = case.step in NEVER_JOINS or (case.step in ("write_data", "read_data") and not case.after)
    with mock.patch.object(links, "CONNECT_TIMEOUT", timedelta(seconds=0.5) if absent else links.CONNECT_TIMEOUT):
        yield


def _fail_saves(folder: str, cases: Sequence[Case], coordinator: int, options: SaveOptions) -> list[Told]:
    """Let each case fail, then save to the same url with the same writer."""
    found = []
    state = uneven_state(coordinator)
    for number, case in enumerate(cases):
        url, fault = f"{folder}/{number}", Fault(case)
        inner = faulty(ZarrStorageWriter, fault, url, options=options)
        writer = Wrapper(inner, fault) if "wrapper" in case.step else inner

        def save(fault: Fault = fault, writer: StorageWriter = writer) -> None:
            save_state_dict(state, writer, coordinator_rank=coordinator, planner=faulty(ZarrSavePlanner, fault))

        told = Told(case)
        with _absent_ranks_are_missed_soon(case):
            _fails(told, save)
        told.opened = opens(url)
        dist.barrier()
        fault.case = None
        told.next_wrong = _works(save)
        if dist.get_rank() == coordinator and not told.next_wrong:
            told.next_wrong = differing(url, coordinator)
        found.append(told)
    return found


def _fail_loads(url: str, cases: Sequence[Case], coordinator: int, options: LoadOptions | None = None) -> list[Told]:
    """Let each case fail, then load with the same reader."""
    found = []
    expected, target = held_of(uneven_state(7)), uneven_state(-1)
    for case in cases:
        fault = Fault(case)
        reader = faulty(ZarrStorageReader, fault, url, options=options)

        def load(fault: Fault = fault, reader: ZarrStorageReader = reader) -> None:
            load_state_dict(target, reader, coordinator_rank=coordinator, planner=faulty(ZarrLoadPlanner, fault))

        told = Told(case)
        clear(target)
        before = held_of(target)
        with _absent_ranks_are_missed_soon(case):
            _fails(told, load)
        told.touched = held_of(target) != before
        fault.case = None
        clear(target)
        told.next_wrong = _works(load)
        held = held_of(target)
        told.next_wrong += [name for name in expected if held[name] != expected[name]]
        found.append(told)
    return found


def _check(answers: Sequence[Sequence[Told]], named: Sequence[int] | None = None, error: str = "Injected") -> None:
    """Check that every rank soon names exactly the failed ranks, nothing is committed, and the next call works."""
    for row in zip(*answers, strict=True):
        for rank, told in enumerate(row):
            assert told.failures == list(told.case.ranks if named is None else named), (rank, told)
            assert told.errors == {error}, (rank, told)
            assert told.seconds < SECONDS and not told.opened and not told.next_wrong, (rank, told)


NEVER_JOINS = {
    "finish_plan",
    "future of no write",
    "write_data of a wrapper",
    "write_data of a wrapper, in silence",
    "future of no read",
    "resolve_tensor",
}
"""Steps that a rank reaches before it joins the others, but after the plan made them expect it."""

SEVERAL = [(0, 3), ALL]


def _cases(steps: Sequence[str], afters: Sequence[str], ranks: Sequence[tuple[int, ...]]) -> list[Case]:
    cases = [Case(step, own) for step in steps for own in ranks]
    return cases + [Case(step, own, after=True) for step in afters for own in ranks]


def _cases_on_several(steps: Sequence[str], afters: Sequence[str]) -> list[Case]:
    """Return each step on all ranks, or on some without the coordinator, in turn."""
    cases = [(step, False) for step in steps] + [(step, True) for step in afters]
    return [Case(step, SEVERAL[number % 2], after=after) for number, (step, after) in enumerate(cases)]


def _cases_in_turn(coordinator: int, steps: Sequence[str], afters: Sequence[str]) -> list[Case]:
    """Return each step on the coordinator, and on one of the others in turn."""
    cases = []
    for number, (step, after) in enumerate([*((step, False) for step in steps), *((step, True) for step in afters)]):
        other = (coordinator + 1 + number % 3) % len(ALL)
        cases += [Case(step, (rank,), after=after) for rank in (coordinator, other)]
    return cases


# -- saves

SAVE_STEPS = [
    "set_up_planner",
    "set_up_storage_writer",
    "create_local_plan",
    "prepare_local_plan",
    "finish_plan",
    "write_data",
    "resolve_data",
    "future of no write",
    "future of a write",
    "write_data of a wrapper",
]
SAVE_AFTERS = ["prepare_local_plan", "finish_plan", "resolve_data", "write_data"]


def test_each_step_of_a_save_fails_on_each_rank(tmp_path: Path) -> None:
    coordinator = 3
    cases = _cases_in_turn(coordinator, SAVE_STEPS, SAVE_AFTERS)
    cases += _cases(["create_global_plan", "prepare_global_plan", "finish"], ["prepare_global_plan"], [(coordinator,)])
    _check(run_ranks(_fail_saves, str(tmp_path), cases, coordinator, MERGED, timeout=600))


def test_saves_that_fail_on_several_ranks(tmp_path: Path) -> None:
    # Not within their exchange: there the first rank that fails keeps the others from failing.
    cases = _cases_on_several(SAVE_STEPS, [step for step in SAVE_AFTERS if step != "resolve_data"])
    _check(run_ranks(_fail_saves, str(tmp_path), cases, 1, MERGED, timeout=600))


def test_saves_whose_pieces_move_only_where_they_fit_no_grid(tmp_path: Path) -> None:
    cases = _cases_in_turn(3, ["finish_plan", "write_data", "resolve_data"], ["resolve_data", "write_data"])
    _check(run_ranks(_fail_saves, str(tmp_path), cases, 3, APART, timeout=600))


@pytest.mark.parametrize("options", [MERGED, APART], ids=["merged", "apart"])
def test_a_rank_that_skips_its_writes_is_found(options: SaveOptions, tmp_path: Path) -> None:
    """No rank has failed, but the coordinator counts the written chunks."""
    cases = _cases(["write_data of a wrapper, in silence"], [], [(1,), (2,), *SEVERAL])
    answers = run_ranks(_fail_saves, str(tmp_path), cases, 1, options, timeout=600)
    _check(answers, named=[1], error="IncompleteSaveError")


def _fail_after_the_commit(url: str) -> tuple[list[int], list[str]]:
    fault, told = Fault(Case("finish", (3,), after=True)), Told(Case("finish", (3,)))
    writer, state = faulty(ZarrStorageWriter, fault, url), uneven_state(5)
    _fails(told, lambda: save_state_dict(state, writer, coordinator_rank=3, planner=ZarrSavePlanner()))
    dist.barrier()
    return told.failures or [], differing(url, 5)


def test_failures_after_the_commit_do_not_undo_it(tmp_path: Path) -> None:
    assert run_ranks(_fail_after_the_commit, str(tmp_path / "one")) == [([3], [])] * 4


def _fail_on_s3(url: str, cases: Sequence[Case]) -> list[list[Told]]:
    saved = _fail_saves(url, cases, 1, MERGED)
    zarrckpt.save(uneven_state(7), f"{url}/good")
    loads = [Case(case.step.replace("write", "read"), case.ranks) for case in cases if "resolve" not in case.step]
    return [saved, _fail_loads(f"{url}/good", loads, 1)]


def test_failures_on_s3(moto_bucket: S3Place) -> None:
    cases = [Case("prepare_local_plan", (2,)), Case("write_data", (0,)), Case("future of a write", (1, 3))]
    cases += [Case("resolve_data", (2,)), Case("resolve_data", (1,), after=True)]
    url, env = moto_bucket.url("failures"), moto_bucket.environment
    for answers in zip(*run_ranks(_fail_on_s3, url, cases, env=env, timeout=600), strict=True):
        _check(answers)


# -- loads

# No target is changed before the last of these has succeeded on all ranks.
LOAD_PLANS = ["set_up_planner", "set_up_storage_reader", "create_local_plan", "prepare_local_plan"]
LOAD_READS = [
    "finish_plan",
    "read_data",
    "resolve_tensor",
    "commit_tensor",
    "load_value",
    "future of no read",
    "future of a read",
]


def test_each_step_of_a_load_fails_on_each_rank(tmp_path: Path) -> None:
    """With replicas read once: ranks wait for bytes that others read."""
    url, coordinator = str(tmp_path / "good"), 0
    run_ranks(_save_good, url)
    planning = _cases_in_turn(coordinator, LOAD_PLANS, ["set_up_storage_reader", "prepare_local_plan"])
    planning += _cases(["create_global_plan", "prepare_global_plan"], ["prepare_global_plan"], [(coordinator,)])
    reading = _cases_in_turn(coordinator, LOAD_READS, ["read_data"])
    options = LoadOptions(share_reads=True)
    answers = run_ranks(_fail_loads, url, [*planning, *reading], coordinator, options, timeout=600)
    _check_loads(answers, len(planning))


def test_loads_without_shared_reads_fail_on_each_rank(tmp_path: Path) -> None:
    url = str(tmp_path / "good")
    run_ranks(_save_good, url)
    cases = _cases_on_several([*LOAD_PLANS, *LOAD_READS], [])
    answers = run_ranks(_fail_loads, url, cases, 1, LoadOptions(share_reads=False), timeout=600)
    _check_loads(answers, len(LOAD_PLANS))


def _check_loads(answers: Sequence[Sequence[Told]], planning: int) -> None:
    _check(answers)
    for told in (told for row in answers for told in row[:planning]):
        assert not told.touched, told


def _save_good(url: str) -> None:
    zarrckpt.save(uneven_state(7), url)


@pytest.mark.parametrize("coordinator", [0, 3])
def test_ranks_that_cannot_read_the_metadata(coordinator: int, tmp_path: Path) -> None:
    """DCP raises a separate error for them."""
    url = str(tmp_path / "good")
    run_ranks(_save_good, url)
    cases = _cases(["read_metadata"], [], [(coordinator,), (1,), *SEVERAL])
    _check(run_ranks(_fail_loads, url, cases, coordinator), error="AssertionError")
