"""Pieces that move between ranks: in every kind of save, during training, within a memory bound, with failing ranks."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import itertools
import json
import os
import random
import tempfile
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness.internals import Buffer, LocalStore, owners
from harness.memory_peaks import peak_of, traced_peak_of
from harness.merging import MergingOptions
from harness.ranks import context, idle_meshes, run_ranks
from harness.simulated import MemoryStore, memory_store
from harness.torch_internals import CallGroup, Handle, LostPeerError, MessageChannel, channel, links
from harness.uneven_states import (
    clear,
    differing,
    distributed,
    fsdp_tp,
    full,
    held_of,
    mesh_of,
    opens,
    same_bits,
    sharded,
    sharded_tensor,
    uneven_state,
    uneven_values,
)
from torch import nn
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.checkpoint.state_dict_saver import save_state_dict
from torch.distributed.tensor import Replicate, Shard

import zarrckpt
from zarrckpt import CheckpointError, ZarrSavePlanner, ZarrStorageWriter
from zarrckpt._dcp.channel import ChannelName, connect_channel
from zarrckpt._ranks.mesh import connect_mesh

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

SECONDS = 30.0
"""Maximum seconds of a failing save. All take far less, but none may wait for a timeout of a minute."""

MANY_BUNDLES = MergingOptions(max_inflight_bytes=4, fill_bytes=64, durable=False)
"""Options under which pieces move in many bundles, one after the other, within :func:`small_bundles`."""

ALL = (0, 1, 2, 3)


def _wrong(url: str, number: float, rows: int = 13) -> list[str]:
    """Return the entries of a checkpoint that differ from ``uneven_state(number)``, on rank 0. Collective."""
    dist.barrier()
    return differing(url, number, rows) if dist.get_rank() == 0 else []


@contextlib.contextmanager
def small_bundles(nbytes: int = 64) -> Iterator[None]:
    """Make about one bundle of each chunk whose pieces move. A context or a decorator, used on all ranks."""
    with patch.object(owners, "BUNDLE_BYTES", nbytes):
        yield


class Moves:
    """Counts the pieces that this process sends and receives. Calls ``act`` before the piece of a given number."""

    def __init__(self, number: int = -1, act: Callable[[], Any] = lambda: None) -> None:
        self.count = 0
        self._number, self._act, self._posted = number, act, MessageChannel._posted

    def __enter__(self) -> Moves:
        MessageChannel._posted = lambda *args: self._counted(*args)  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        MessageChannel._posted = self._posted  # type: ignore[method-assign]

    def _counted(self, *args: Any) -> Handle:
        self.count += 1
        if self.count == self._number:
            self._act()
        return self._posted(*args)


class _Altered(Handle):
    """A received piece of which one bit has changed."""

    def wait(self) -> Any:
        data = super().wait()
        data[len(data) // 2] ^= 4
        return data


@contextlib.contextmanager
def altered_message(rank: int) -> Iterator[None]:
    """Change a bit of the first message that one rank receives."""
    recv, left = MessageChannel.recv, [1]

    def altered(*args: Any) -> Handle:
        handle = recv(*args)
        if dist.get_rank() == rank and left[0]:
            left[0] = 0
            return _Altered(handle._future)
        return handle

    with patch.object(MessageChannel, "recv", altered):
        yield
    assert left[0] == (dist.get_rank() != rank)


# -- one mesh for all calls, and no message if no piece must move


@small_bundles()
def _several_calls(folder: str) -> tuple[list[str], list[dict[Any, str]], int]:
    wrong, meshes = [], []
    with Moves() as moves:
        for number in range(4):
            state, url = uneven_state(number), f"{folder}/{number}"
            zarrckpt.save(state, url, options=MANY_BUNDLES if number % 2 else None)
            wrong += _wrong(url, number)
            meshes.append(idle_meshes())
            target = uneven_state(-1)
            clear(target)
            zarrckpt.load(target, url, options=zarrckpt.LoadOptions(share_reads=True))
            wrong += [] if held_of(target) == held_of(state) else [f"the load of {number}"]
            meshes.append(idle_meshes())
    return wrong, meshes, moves.count


def test_saves_and_loads_use_one_mesh(tmp_path: Path) -> None:
    answers = run_ranks(_several_calls, str(tmp_path))
    for wrong, meshes, moves in answers:
        assert not wrong and moves >= 40
        assert all(mesh == answers[0][1][0] and list(mesh) == [(ALL, "foreground")] for mesh in meshes), meshes


def _in_bundles(folder: str) -> list[int]:
    """Return the numbers of pieces that a rank posts in a save: with bundles of one chunk, and of 8 MiB."""
    counts = []
    for nbytes in (64, owners.BUNDLE_BYTES):
        wholes = {f"{nbytes}-{place}": full((8,), place) for place in range(40)}
        state = {name: sharded(whole, mesh_of(list(ALL))) for name, whole in wholes.items()}
        with Moves() as moves, small_bundles(nbytes):
            zarrckpt.save(state, f"{folder}/{nbytes}")
        counts.append(moves.count)
        checkpoint = zarrckpt.open(f"{folder}/{nbytes}")
        assert all(same_bits(checkpoint[name][...], whole) for name, whole in wholes.items())
    return counts


def test_small_chunks_move_together(tmp_path: Path) -> None:
    """In one bundle, a rank sends and receives at most one message to and from each other rank."""
    # Each of ten chunks needs three pieces of other ranks, and this rank sends the same number.
    assert run_ranks(_in_bundles, str(tmp_path)) == [[60, 6]] * 4


def _aligned(folder: str) -> list[int]:
    counts = []
    for number, state in enumerate([_big_pieces(), _replicas()]):
        with Moves() as moves:
            zarrckpt.save(state, f"{folder}/{number}")
        counts.append(moves.count)
    return counts


def _big_pieces() -> dict[str, Any]:
    line, square = mesh_of([0, 1, 2, 3]), mesh_of([[0, 1], [2, 3]])
    return {
        "rows": sharded(torch.rand(1024, 1024), line),
        "columns": sharded(torch.rand(512, 2048), line, 1),
        "uneven": sharded(torch.rand(1026, 1100), line),
        "two": distributed(torch.rand(512, 512), (1024, 1024), square, [Shard(0), Shard(1)]),
        "hsdp": distributed(torch.rand(512, 600), (1024, 600), square, [Replicate(), Shard(0)]),
        "step": 3,
    }


def _replicas() -> dict[str, Any]:
    norm = distributed(torch.ones(99), (99,), mesh_of([0, 1, 2, 3]), [Replicate()])
    return {"w": torch.ones(1000, 1000), "norm": norm, **{f"b{i}": torch.full((3,), i) for i in range(9)}}


def test_big_pieces_on_a_grid_and_replicas_move_no_bytes(tmp_path: Path) -> None:
    """The pieces have 1 MiB, below which pieces of four ranks are merged."""
    assert run_ranks(_aligned, str(tmp_path)) == [[0, 0]] * 4


def _then_destroyed(folder: str) -> tuple[int, bool]:
    """Return the number of moved pieces, and whether the default group is freed after it was destroyed."""
    state = {"w": sharded(full((7, 3)), mesh_of(list(ALL))), "plain": torch.ones(3)}
    with Moves() as moves:
        zarrckpt.save(state, f"{folder}/1")
    zarrckpt.async_save(state, f"{folder}/2").result(timeout=60)
    zarrckpt.load(state, f"{folder}/2", options=zarrckpt.LoadOptions(share_reads=True))
    group = weakref.ref(dist.group.WORLD)
    dist.barrier()
    dist.destroy_process_group()
    gc.collect()
    return moves.count, group() is None


def test_kept_meshes_do_not_keep_the_default_group(tmp_path: Path) -> None:
    """Its threads and sockets would stay."""
    for moved, gone in run_ranks(_then_destroyed, str(tmp_path)):
        assert moved and gone


# -- groups and kinds of saves


def _groups(folder: str) -> tuple[list[str], list[Any]]:
    """Let two groups save at the same time, then all ranks."""
    pairs = [(0, 2), (1, 3)]
    mine = pairs[dist.get_rank() % 2]
    group = [dist.new_group(list(pair)) for pair in pairs][dist.get_rank() % 2]
    wrong = []
    for number in range(3):
        whole, url = full((7, 3), number + mine[0]), f"{folder}/{mine[0]}-{number}"
        zarrckpt.save({"w": sharded(whole, mesh_of(list(mine)))}, url, process_group=group)
        target = {"w": sharded(torch.zeros_like(whole), mesh_of(list(mine)), 1)}
        zarrckpt.load(target, url, process_group=group, options=zarrckpt.LoadOptions(share_reads=True))
        if held_of(target) != held_of({"w": sharded(whole, mesh_of(list(mine)), 1)}):
            wrong.append(url)
        zarrckpt.save(uneven_state(number), f"{folder}/all-{number}")
        wrong += _wrong(f"{folder}/all-{number}", number)
    return wrong, sorted(idle_meshes())


def test_groups_of_ranks_have_separate_meshes(tmp_path: Path) -> None:
    for rank, (wrong, meshes) in enumerate(run_ranks(_groups, str(tmp_path))):
        assert not wrong and meshes == sorted([(ALL, "foreground"), ((rank % 2, rank % 2 + 2), "foreground")])


def _slow_puts(seconds: float) -> Any:
    def slow_put(store: LocalStore, key: Any, groups: Any, put: Callable[..., None] = LocalStore.put_parts) -> None:
        time.sleep(seconds if "/c." in key else 0)
        put(store, key, groups)

    return patch.object(LocalStore, "put_parts", slow_put)


@small_bundles()
def _beside_training(folder: str, how: str) -> tuple[list[str], list[Any]]:
    """Save in the background with slow puts, and run collectives of the training group at the same time."""
    wrong, group = [], dist.new_group(backend="gloo")
    with _slow_puts(0.01):
        for number in range(2):
            state, url = uneven_state(number), f"{folder}/{number}"
            future: Any
            if how == "dcp":
                del state["spec"]  # DCP's stager takes no ShardedTensors
            if how == "zarrckpt":
                future = zarrckpt.async_save(state, url, options=MANY_BUNDLES)
            else:
                writer = ZarrStorageWriter(url, options=MANY_BUNDLES)
                future = dcp.async_save(state, storage_writer=writer, process_group=group, planner=ZarrSavePlanner())
            clear(state)
            for _ in range(50):
                dist.all_reduce(torch.ones(10))
            future.result(timeout=60)
            wrong += [name for name in _wrong(url, number) if name != "spec" or "spec" in state]
    assert len(channel._in_use) == (2 if how == "dcp" else 0)
    return wrong, sorted(idle_meshes())


@pytest.mark.parametrize("how", ["zarrckpt", "dcp"])
def test_background_saves_beside_training(how: str, tmp_path: Path) -> None:
    meshes = [] if how == "dcp" else [(ALL, "background")]
    assert run_ranks(_beside_training, str(tmp_path), how) == [([], meshes)] * 4


@small_bundles()
def _cached_plans(folder: str) -> tuple[list[str], int]:
    """Change the layout with every second save, so that cached plans are used and then replaced."""
    for name in ("_cached_save_plan", "_cached_final_save_plan", "_cached_all_plans", "_cached_global_plan"):
        getattr(SavePlanner, name).clear()
    SavePlanner._cached_metadata.clear()
    wrong = []
    with Moves() as moves:
        for number, rows in enumerate([13, 13, 10, 10, 17, 17, 17]):
            state, url = uneven_state(number, rows), f"{folder}/{number}"
            planner = ZarrSavePlanner(enable_plan_caching=True)
            dcp.save(state, storage_writer=ZarrStorageWriter(url, options=MANY_BUNDLES), planner=planner)
            wrong += _wrong(url, number, rows)
    return wrong, moves.count


def test_cached_plans(tmp_path: Path) -> None:
    for wrong, moves in run_ranks(_cached_plans, str(tmp_path)):
        assert not wrong and moves >= 14


@small_bundles()
def _kept_plans(folder: str) -> list[str]:
    """Do the same with this package's calls. They keep the last plan, and detect a changed layout."""
    wrong = []
    with Moves() as moves:
        for number, rows in enumerate([13, 13, 10, 10, 17, 17, 17]):
            before = moves.count
            zarrckpt.save(uneven_state(number, rows), f"{folder}/{number}", options=MANY_BUNDLES)
            wrong += _wrong(f"{folder}/{number}", number, rows)
            wrong += [] if moves.count > before else [f"nothing moved in {number}"]
    return wrong


def test_kept_plans(tmp_path: Path) -> None:
    assert run_ranks(_kept_plans, str(tmp_path)) == [[]] * 4


# -- two saves of one process at a time


@small_bundles()
def _while_another_is_halfway(folder: str) -> list[str]:
    """Let a background save wait in its exchange, on an existing mesh, while other saves and loads run."""
    pairs = [(0, 1), (2, 3)]
    groups = [dist.new_group(list(pair)) for pair in pairs]
    mine = dist.get_rank() // 2
    states = [uneven_state(number) for number in range(4)]
    gate, halfway = threading.Event(), threading.Event()

    def progress(done: int, total: int) -> None:
        halfway.set()
        gate.wait(60)

    wrong = []
    zarrckpt.async_save(states[0], f"{folder}/0", options=MANY_BUNDLES).result(timeout=60)
    with Moves() as moves:
        slow = zarrckpt.async_save(states[1], f"{folder}/1", options=MANY_BUNDLES, progress=progress)
        halfway.wait(60)
        try:
            for number in (2, 3):
                zarrckpt.save(states[number], f"{folder}/{number}", options=MANY_BUNDLES)
                target = uneven_state(-1)
                zarrckpt.load(target, f"{folder}/{number}", options=zarrckpt.LoadOptions(share_reads=True))
                wrong += [] if held_of(target) == held_of(states[number]) else [f"the load of {number}"]
                # Also saves of some of the ranks.
                whole, url = full((9,), number + mine), f"{folder}/pair-{mine}-{number}"
                zarrckpt.save({"w": sharded(whole, mesh_of(list(pairs[mine])))}, url, process_group=groups[mine])
                wrong += [] if same_bits(zarrckpt.open(url)["w"][...], whole) else [url]
            assert not slow.done()
            before = moves.count
        finally:
            gate.set()
        slow.result(timeout=60)
        assert moves.count > before  # so that the slow save was within its exchange
    for number in range(4):
        wrong += _wrong(f"{folder}/{number}", number)
    return wrong


def test_a_save_may_overlap_another_ones_exchange(tmp_path: Path) -> None:
    assert run_ranks(_while_another_is_halfway, str(tmp_path)) == [[]] * 4


@small_bundles()
def _side_by_side(folder: str) -> list[str]:
    """Save with DCP in the main thread and in a second one, over two groups with different coordinators."""
    groups = [dist.new_group(backend="gloo") for _ in range(2)]
    states = [[uneven_state(number + lane / 2) for number in range(5)] for lane in (0, 1)]

    def save_all(lane: int) -> None:
        for number, state in enumerate(states[lane]):
            writer = ZarrStorageWriter(f"{folder}/{lane}-{number}", options=MANY_BUNDLES)
            planner = ZarrSavePlanner()
            save_state_dict(state, writer, groups[lane], coordinator_rank=3 * lane, planner=planner)

    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(save_all, 1)
        save_all(0)
        other.result(timeout=60)
    return [w for lane in (0, 1) for number in range(5) for w in _wrong(f"{folder}/{lane}-{number}", number + lane / 2)]


def test_saves_run_side_by_side(tmp_path: Path) -> None:
    assert run_ranks(_side_by_side, str(tmp_path)) == [[]] * 4


# -- a rank fails within its exchange


class Injected(Exception):
    """Raised by the tests' own faults."""


@dataclass
class Told:
    """The outcome of one failing call on one rank."""

    what: str
    rank: int
    failed: list[int] = field(default_factory=list)
    """The failed ranks that its error names."""
    seconds: float = 0.0
    opened: bool = False
    wrong: list[str] = field(default_factory=list)
    """Wrong entries of the next save."""
    meshes: list[Any] = field(default_factory=list)
    """The idle meshes before the call, after the failure, and after the next call."""

    @contextlib.contextmanager
    def failing(self) -> Iterator[None]:
        """Run a call that fails on one rank."""
        began = time.monotonic()
        try:
            with _fault(self.what) if dist.get_rank() == self.rank else contextlib.nullcontext():
                yield
        except CheckpointError as err:
            text = str(err)
            assert f"failed with Injected: {self.what} (failed ranks: " in text, text
            self.failed = [int(rank) for rank in text.rpartition("failed ranks: ")[2].rstrip(")").split(", ")]
            assert isinstance(err.__cause__, Injected) == (dist.get_rank() == self.rank)
        self.seconds = time.monotonic() - began


def _fault(what: str) -> Any:
    """Return a context in which this rank fails."""

    def fail(*_: Any) -> None:
        raise Injected(what)

    chunks = itertools.count()

    def put(store: LocalStore, key: Any, groups: Any, real: Any = LocalStore.put_parts) -> None:
        # Fail permanently after three chunks, when some bundles are written.
        if "/c." in key and next(chunks) >= 3:
            fail()
        real(store, key, groups)

    def sync(store: LocalStore, keys: Iterable[str]) -> None:
        if any("/c." in key for key in keys):  # not those of the coordinator's begin
            fail()

    if what == "put":
        return patch.object(LocalStore, "put_parts", put)
    if what == "sync":
        return patch.object(LocalStore, "sync", sync)
    return Moves(int(what.removeprefix("piece ")), fail)


FAULTS = ("piece 1", "piece 3", "put", "sync")
"""Before this rank's first piece, in the middle, in a put between bundles, and after the last bundle."""


@small_bundles()
def _fail_in_exchanges(folder: str) -> list[Told]:
    """Let every rank fail in every way, and then save the same to the same url."""
    found = []
    state = uneven_state(5)
    zarrckpt.save(state, f"{folder}/first", options=MANY_BUNDLES)
    for what, rank in itertools.product(FAULTS, ALL):
        url, told = f"{folder}/{what}-{rank}", Told(what, rank, meshes=[idle_meshes()])
        with told.failing():
            zarrckpt.save(state, url, options=MANY_BUNDLES)
        told.opened = opens(url)
        told.meshes.append(idle_meshes())
        dist.barrier()
        zarrckpt.save(state, url, options=MANY_BUNDLES)
        told.meshes.append(idle_meshes())
        told.wrong = _wrong(url, 5)
        found.append(told)
    return found


def test_a_rank_that_fails_within_its_exchange(tmp_path: Path) -> None:
    """The error names only that rank, at once. The next save works, on a new mesh of all ranks."""
    for row in zip(*run_ranks(_fail_in_exchanges, str(tmp_path), timeout=200), strict=True):
        for rank, told in enumerate(row):
            assert told.failed == [told.rank] and told.seconds < SECONDS, (rank, told)
            assert not told.opened and not told.wrong, (rank, told)
            before, failed, after = told.meshes
            assert not failed and [*after] == [(ALL, "foreground")] and before != after, (rank, told)
            assert told.meshes == row[0].meshes, (rank, told)


def _job(folder: Path, function: Callable[..., None], *args: Any) -> list[int | None]:
    """Run a job of four processes that may die. Return their exit codes."""
    store = tempfile.mktemp(dir=folder)
    processes = [context.Process(target=_rank_of_a_job, args=(store, rank, function, *args)) for rank in ALL]
    for process in processes:
        process.start()
    for process in processes:
        process.join(100)
        process.kill()
    return [process.exitcode for process in processes]


def _rank_of_a_job(store: str, rank: int, function: Callable[..., None], *args: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=4)
    function(*args)
    with contextlib.suppress(Exception):
        dist.destroy_process_group()


class SlowStore(dist.Store):
    """A rank's store that answers slowly, so that this rank joins last."""

    def __init__(self, store: Any) -> None:
        super().__init__()
        self._store = store

    def clone(self) -> Any:
        return self

    def set(self, key: Any, value: Any) -> None:
        self._store.set(key, value)

    def get(self, key: str) -> Any:
        time.sleep(0.2)
        return self._store.get(key)

    def add(self, key: str, value: int) -> int:
        found: int = self._store.add(key, value)
        return found

    def check(self, keys: Any) -> bool:
        time.sleep(0.05)
        return bool(self._store.check(keys))

    def delete_key(self, key: str) -> bool:
        return bool(self._store.delete_key(key))

    def wait(self, keys: Any, timeout: Any = None) -> None:
        self._store.wait(keys)


def _leave_at_once(how: str, slow: int) -> str:
    """Let all ranks join a mesh, one slowly, while another leaves as soon as it has joined. Return the error."""
    default = dist.distributed_c10d._get_default_store()
    store = SlowStore(default) if dist.get_rank() == slow else default
    with (
        patch.object(links, "CONNECT_TIMEOUT", timedelta(seconds=10)),
        patch.object(dist.distributed_c10d, "_get_default_store", lambda: store),
    ):
        try:
            if how == "dcp":
                with contextlib.suppress(Injected), connect_channel(ChannelName("left-at-once", ALL)):
                    if dist.get_rank() == 1:
                        raise Injected
            else:
                mesh = connect_mesh(CallGroup(ALL, dist.get_rank(), "foreground", "left at once", 10.0))
                if dist.get_rank() == 1:
                    mesh.close()
                dist.barrier()
                mesh.close()
        except (LostPeerError, CheckpointError) as err:
            return str(err)
    return ""


@pytest.mark.parametrize("how", ["zarrckpt", "dcp"])
@pytest.mark.parametrize("slow", [0, 2])
def test_no_rank_leaves_a_mesh_before_all_have_joined(slow: int, how: str) -> None:
    assert run_ranks(_leave_at_once, how, slow) == [""] * 4


@small_bundles()
def _die(folder: str, victim: int) -> None:
    """Let one rank die within its exchange. The others write a file with their errors."""
    state, url = uneven_state(victim), f"{folder}/one"
    began, raised = time.monotonic(), ""
    try:
        with Moves(3, lambda: os._exit(1)) if dist.get_rank() == victim else contextlib.nullcontext():
            dcp.save(state, storage_writer=ZarrStorageWriter(url, options=MANY_BUNDLES), planner=ZarrSavePlanner())
    except Exception as err:  # DCP has no group any more to gather failures over
        raised = f"{type(err).__name__}: {err}"
    told = json.dumps([raised, time.monotonic() - began, opens(url)])
    Path(folder, f"survivor-{victim}-{dist.get_rank()}").write_text(told)


def _restart(url: str) -> None:
    zarrckpt.save(uneven_state(8), url, options=MANY_BUNDLES)


def test_a_rank_that_dies_within_an_exchange_of_dcp(tmp_path: Path) -> None:
    """The other ranks notice, nothing is committed, and a restarted job saves to the same url."""
    for victim in (2, 0):
        assert _job(tmp_path, _die, str(tmp_path), victim) == [int(rank == victim) for rank in ALL]
        survivors = [json.loads(path.read_text()) for path in tmp_path.glob(f"survivor-{victim}-*")]
        assert len(survivors) == 3
        for raised, seconds, opened in survivors:
            assert raised and seconds < SECONDS and not opened
    assert _job(tmp_path, _restart, str(tmp_path / "one")) == [0] * 4
    assert differing(str(tmp_path / "one"), 8) == []


def _does_not_come(folder: str, absent: int) -> list[str]:
    """Let one rank make none of the calls. Return the errors of the others, which time out after a second."""
    told, state, url = [], uneven_state(1), f"{folder}/one"
    zarrckpt.save(state, url)
    calls: list[Callable[[], object]] = [
        lambda: zarrckpt.save(state, f"{folder}/two", options=zarrckpt.SaveOptions(timeout=1)),
        lambda: zarrckpt.async_save(state, f"{folder}/two", options=zarrckpt.SaveOptions(timeout=1)),
        lambda: zarrckpt.load(uneven_values(1), url, options=zarrckpt.LoadOptions(timeout=1)),
    ]
    for call in calls:
        began = time.monotonic()
        if dist.get_rank() != absent:
            with pytest.raises(CheckpointError) as caught:
                call()
            told.append(str(caught.value))
            assert time.monotonic() - began < SECONDS
        dist.barrier()
    assert not opens(f"{folder}/two")
    zarrckpt.async_save(state, f"{folder}/two").result(timeout=60)
    return told + _wrong(f"{folder}/two", 1)


def test_a_rank_that_does_not_make_the_call_is_named(tmp_path: Path) -> None:
    absent = 2
    answers = run_ranks(_does_not_come, str(tmp_path), absent)
    assert answers.pop(absent) == []
    for told in answers:
        assert len(told) == 3
        for text, call in zip(told, ("the save to", "the background save to", "the load from"), strict=True):
            assert call in text and f"rank {absent}" in text and "1 s" in text, text


# -- memory and balance

BOUND = 8 << 20


def _peaks(folder: str, inflight: int) -> tuple[int, int, float]:
    """Return peak bytes of numpy's and Python's buffers in a save, those of the process, and the number of pieces."""
    # 128 MiB, of which 32 lie on this rank, in chunks of 1 MiB. So three quarters of all bytes move.
    state = {f"w{i}": sharded(torch.rand(512, 512), mesh_of([0, 1, 2, 3])) for i in range(128)}
    zarrckpt.save({"w": state["w0"]}, f"{folder}/warm-{inflight}", options=zarrckpt.SaveOptions(durable=False))
    url, traced = f"{folder}/{inflight}", 0

    def save() -> None:
        nonlocal traced
        traced = traced_peak_of(
            lambda: zarrckpt.save(state, url, options=zarrckpt.SaveOptions(max_inflight_bytes=inflight, durable=False))
        )

    with Moves() as moves, _slow_puts(0.1):  # so that received pieces pile up if they can
        resident = peak_of(save)
    return traced, resident, moves.count


def test_an_exchange_stays_within_the_memory_bound(tmp_path: Path) -> None:
    for peak, _, _ in run_ranks(_peaks, str(tmp_path), 64 * BOUND):
        assert peak > 2 * BOUND  # so a bound that is not kept would show
    for peak, resident, moves in run_ranks(_peaks, str(tmp_path), BOUND):
        assert peak <= BOUND + (1 << 20), peak
        assert resident <= BOUND + (12 << 20), resident
        assert moves > 40
    assert len(zarrckpt.open(tmp_path / str(BOUND))) == 128


def _peak_of_reuse(folder: str) -> tuple[int, float]:
    """Return the peak bytes of numpy's and Python's buffers in a save that links every chunk, and the linked share."""
    state = {f"w{i}": sharded(torch.rand(512, 512), mesh_of([0, 1, 2, 3])) for i in range(128)}
    options = zarrckpt.SaveOptions(max_inflight_bytes=BOUND, durable=False, reuse="on")
    zarrckpt.save(state, f"{folder}/base", options=options)
    reports = []
    peak = traced_peak_of(
        lambda: reports.append(zarrckpt.save(state, f"{folder}/new", base=f"{folder}/base", options=options))
    )
    return peak, reports[0].linked_bytes / reports[0].nbytes


def test_pieces_of_reused_chunks_are_freed(tmp_path: Path) -> None:
    for peak, share in run_ranks(_peak_of_reuse, str(tmp_path)):
        assert share == 1
        assert peak <= BOUND + (2 << 20), peak


def _balanced(folder: str) -> dict[str, float]:
    """Return the maximum bytes that a rank wrote over the mean, for states with replicas."""
    line, square = mesh_of([0, 1, 2, 3]), mesh_of([[0, 1], [2, 3]])
    dims = [Replicate(), Shard(0)]
    layers = {f"{i}": nn.Linear(100, 100) for i in range(8)}
    model = nn.parallel.DistributedDataParallel(nn.ModuleDict(layers))
    chunked, default = zarrckpt.SaveOptions(max_chunk_bytes=10_000), zarrckpt.SaveOptions()
    states: dict[str, tuple[dict[str, Any], zarrckpt.SaveOptions]] = {
        "plain": ({"w": torch.ones(1000, 64)}, chunked),
        "replicated": (
            {"w": distributed(torch.ones(1000, 64), (1000, 64), line, [Replicate()])},
            chunked,
        ),
        "hsdp": ({f"w{i}": distributed(torch.ones(200, 64), (400, 64), square, dims) for i in range(4)}, default),
        "ddp": ({"model": model}, default),
        "merged": ({f"w{i}": sharded(torch.ones(40, 64), line) for i in range(16)}, default),
    }
    reports = {
        name: zarrckpt.save(state, f"{folder}/{name}", options=options) for name, (state, options) in states.items()
    }
    state = {"model": get_model_state_dict(model)}
    reports["ddp, DCP's planner"] = dcp.save(state, storage_writer=ZarrStorageWriter(f"{folder}/dcp")).storage_data
    return {name: max(report.rank_bytes) * 4 / report.nbytes for name, report in reports.items()}


def test_written_bytes_are_balanced(tmp_path: Path) -> None:
    for name, excess in run_ranks(_balanced, str(tmp_path))[0].items():
        assert 1 <= excess <= 1.1, (name, excess)


# -- many layouts, one after the other


OPTIONS = [
    zarrckpt.SaveOptions(),
    MANY_BUNDLES,
    MergingOptions(min_piece_bytes=0),
    MergingOptions(fill_bytes=64),
    zarrckpt.SaveOptions(max_chunk_bytes=64),
]


def _laid_out(draw: random.Random, whole: torch.Tensor) -> Any:
    """Return a tensor in a random layout on four ranks. Collective, with the same draws on all ranks."""
    rows, dims = whole.shape[0], whole.dim()
    kind = draw.choice(["plain", "replicated", "line", "square", "spec"])
    if kind == "plain":
        return whole.clone()
    if kind == "spec":
        cuts = [0, *sorted(draw.randint(0, rows) for _ in range(3)), rows]
        return sharded_tensor(whole, [end - begin for begin, end in itertools.pairwise(cuts)])
    ranks = draw.sample(ALL, 4)
    if kind == "replicated":
        return distributed(whole.clone(), tuple(whole.shape), mesh_of(ranks), [Replicate()])
    if kind == "line":
        return sharded(whole, mesh_of(ranks), draw.randrange(dims))
    return fsdp_tp(whole, mesh_of([ranks[:2], ranks[2:]]))


def _one_after_the_other(folder: str, seed: int) -> list[str]:
    draw, wrong = random.Random(seed), []
    for number in range(18):
        url = f"{folder}/{number}"
        shapes = [tuple(draw.randint(1, 20) for _ in range(draw.randint(1, 3))) for _ in range(draw.randint(1, 6))]
        wholes = {f"t{place}": full(shape, number) for place, shape in enumerate(shapes)}
        state = {name: _laid_out(draw, whole) for name, whole in wholes.items()}
        options = dataclasses.replace(draw.choice(OPTIONS), durable=False)
        with small_bundles(draw.choice([64, 500, owners.BUNDLE_BYTES])):
            if draw.random() < 0.3:
                zarrckpt.async_save(state, url, options=options).result(timeout=60)
            else:
                zarrckpt.save(state, url, options=options)
        expected = {name: _laid_out(draw, whole) for name, whole in wholes.items()}
        before = held_of(expected)
        clear(expected)
        zarrckpt.load(expected, url, options=zarrckpt.LoadOptions(share_reads=draw.random() < 0.5))
        wrong += [f"{number}: {name}" for name, held in held_of(expected).items() if held != before[name]]
        dist.barrier()
        if dist.get_rank() == 0:
            checkpoint = zarrckpt.open(url)
            wrong += [
                f"{number}: {name}" for name, whole in wholes.items() if not same_bits(checkpoint[name][...], whole)
            ]
    return wrong


def test_random_layouts_are_saved_one_after_the_other(tmp_path: Path) -> None:
    assert run_ranks(_one_after_the_other, str(tmp_path), 1, timeout=400) == [[]] * 4


# -- pieces that are altered in transit


def _altered_on_its_way(url: str) -> list[str]:
    state = uneven_state(1)
    with altered_message(2), pytest.raises(CheckpointError, match=r"a message of rank \d.* was altered") as caught:
        zarrckpt.save(state, url)
    assert not opens(url) and caught.value.__notes__ == ["(failed on rank 2)"]
    zarrckpt.save(state, url)
    wrong = _wrong(url, 1)
    target = uneven_state(-1)
    clear(target)
    with altered_message(2), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        zarrckpt.load(target, url, options=zarrckpt.LoadOptions(share_reads=True))
    # It has read the altered piece from the store instead.
    assert held_of(target) == held_of(state)
    assert any("altered" in str(one.message) for one in told) == (dist.get_rank() == 2)
    zarrckpt.load(target, url, options=zarrckpt.LoadOptions(share_reads=True))
    return wrong


def test_data_altered_between_ranks_is_neither_saved_nor_loaded(tmp_path: Path) -> None:
    assert not any(run_ranks(_altered_on_its_way, str(tmp_path / "run")))


# -- failures while a rank waits for a bundle


class _FailingStore(MemoryStore):
    """A store whose puts of one entry's chunks are slow, and fail on the first rank."""

    max_concurrency = 2

    def put(self, key: str, buffers: Sequence[Buffer]) -> None:
        if key.startswith("big/c") and dist.get_rank() == 0:
            time.sleep(1)
            raise zarrckpt.StorageError("no more space")
        super().put(key, buffers)


def _a_put_fails_while_others_wait_to_begin() -> None:
    """Occupy all of the rank's threads with its own chunks. A bundle's chunks wait for a thread."""
    mesh = mesh_of([0, 1])
    state = {"big": sharded(torch.randn(1024, 1024), mesh, 0)}
    state |= {f"small{number}": sharded(torch.randn(64, 64), mesh, 0) for number in range(12)}
    options = MergingOptions(
        fill_bytes=16 << 10, min_piece_bytes=64 << 10, max_chunk_bytes=1 << 20, max_inflight_bytes=96 << 10
    )
    with memory_store(_FailingStore()), pytest.raises(zarrckpt.StorageError, match="no more space"):
        zarrckpt.save(state, "run", options=options)


def test_a_failed_put_ends_the_save_at_any_wait() -> None:
    run_ranks(_a_put_fails_while_others_wait_to_begin, world_size=2, timeout=60)
