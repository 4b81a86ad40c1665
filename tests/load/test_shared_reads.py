"""With ``share_reads``, four gloo ranks fetch each range once and send it to the other ranks that need it.

After a load, each rank's tensors are compared bit for bit with parts that these tests cut from the full tensors.
"""

from __future__ import annotations

import itertools
import json
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch
from urllib.parse import unquote

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness.internals import Catalog, StoredArray, StoreSpec, max_stored_subchunk_bytes
from harness.merging import MergingOptions
from harness.ranks import RankError, all_ranks_raise, idle_meshes, run_ranks
from harness.s3_server import S3Server
from harness.store_servers import S3Place
from harness.torch_internals import Handle, LostPeerError, MessageChannel, links
from harness.uneven_states import distributed, fsdp_tp, full, held_of
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

import zarrckpt
from zarrckpt import CheckpointError, CorruptCheckpointError, ZarrLoadPlanner, ZarrStorageReader
from zarrckpt._load import fill

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

QUICK = 20.0
"""Seconds on a busy machine. Without a bound, a wait ends with the process group's minute, or after half an hour."""


# -- states: full tensors, and their parts on four ranks


def wholes(number: float) -> dict[str, torch.Tensor]:
    """Return the full tensors: small ones, and one with several subchunks when its pieces are merged."""
    return {
        "w": full((384, 1024), number),
        "v": full((33, 50), number + 1),
        "norm": full((65,), number + 2),
        "scalar": full((), number + 3),
    }


KINDS = ("ddp", "hsdp", "tp", "fsdp", "grid", "odd")


def state(kind: str, number: float) -> dict[str, Any]:
    """Return the tensors as a rank holds them under one kind of parallelism. Not collective."""
    whole = wholes(number)
    if kind == "ddp":
        return dict(whole)
    if kind == "odd":
        square = _mesh([[0, 1], [2, 3]])
        return {name: fsdp_tp(tensor, square) if tensor.dim() else tensor for name, tensor in whole.items()}
    kinds: dict[str, tuple[DeviceMesh, list[Placement]]] = {
        "hsdp": (_mesh([[0, 1], [2, 3]]), [Replicate(), Shard(0)]),
        "tp": (_mesh([0, 1, 2, 3]), [Shard(1)]),
        "fsdp": (_mesh([0, 1, 2, 3]), [Shard(0)]),
        "grid": (_mesh([[0, 1], [2, 3]]), [Shard(1), Shard(0)]),
    }
    mesh, placements = kinds[kind]
    # Tensor parallelism replicates the norms.
    return {name: placed(tensor, mesh, _that_fit(tensor, placements)) for name, tensor in whole.items()}


def _mesh(ranks: list[Any]) -> DeviceMesh:
    return DeviceMesh("cpu", ranks, _init_backend=False, _rank=dist.get_rank())


def _that_fit(whole: torch.Tensor, placements: list[Placement]) -> list[Placement]:
    return [p if not isinstance(p, Shard) or p.dim < whole.dim() else Replicate() for p in placements]


def placed(whole: torch.Tensor, mesh: DeviceMesh, placements: list[Placement]) -> DTensor:
    """Return a DTensor whose local part is cut here, mesh dimension by mesh dimension."""
    local, at = whole, mesh.get_coordinate()
    assert at is not None
    for dim, placement in enumerate(placements):
        if isinstance(placement, Shard):
            step = -(-local.shape[placement.dim] // mesh.size(dim))
            begin = min(at[dim] * step, local.shape[placement.dim])
            extent = min(step, local.shape[placement.dim] - begin)
            local = local.narrow(placement.dim, begin, extent)
    return distributed(local.clone(memory_format=torch.contiguous_format), tuple(whole.shape), mesh, placements)


def wrong(kind: str, number: float, loaded: Mapping[str, Any]) -> list[str]:
    """Return the names of the tensors whose part on this rank is wrong."""
    expected, held = held_of(state(kind, number)), held_of(loaded)
    return sorted(expected.keys() ^ held.keys()) + [name for name in expected if expected[name] != held.get(name)]


def stored_bytes(url: str, **options: Any) -> int:
    """Return the bytes that fetch every subchunk of every tensor once."""
    nodes = Catalog(StoreSpec(url, **options)).root.tensors.values()
    return sum(node.grid.num_subchunks * max_stored_subchunk_bytes(node) for node in nodes)


def _save(url: str, kind: str, number: float, options: zarrckpt.SaveOptions | None = None) -> None:
    zarrckpt.save(state(kind, number), url, options=options)


def _load(
    url: str, kind: str, number: float, share: bool | None, max_inflight_bytes: int = 1 << 29, **arguments: Any
) -> int:
    """Load into a state of other values. Return the bytes that this rank fetched."""
    target = state(kind, -7)
    options = zarrckpt.LoadOptions(share_reads=share, max_inflight_bytes=max_inflight_bytes)
    report = zarrckpt.load(target, url, options=options, **arguments)
    assert not wrong(kind, number, target), (kind, share)
    return report.nbytes


# -- values, and bytes fetched


@dataclass(frozen=True)
class Place:
    """The url of a checkpoint, and the environment that processes need to reach it."""

    url: str
    env: Mapping[str, str]
    shares: bool
    """Whether loads from it share reads by default."""


@pytest.fixture
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    if request.param == "disk":
        return Place(str(tmp_path / "run"), {}, False)
    bucket: S3Place = request.getfixturevalue("moto_bucket")
    return Place(bucket.url("run"), bucket.environment, True)


def _all_kinds(url: str, saved: str) -> dict[tuple[str, bool | None], int]:
    _save(url, saved, 3)
    return {(kind, share): _load(url, kind, 3, share) for kind in KINDS for share in (True, False, None)}


@pytest.mark.parametrize(("saved", "place"), [("fsdp", "disk"), ("grid", "moto")], indirect=["place"])
def test_replicas_are_fetched_once(saved: str, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched = run_ranks(_all_kinds, place.url, saved, env=dict(place.env))
    for name, value in place.env.items():
        monkeypatch.setenv(name, value)
    once = stored_bytes(place.url)

    def together(kind: str, share: bool | None) -> int:
        return sum(rank[kind, share] for rank in fetched)

    for kind in KINDS:
        # All ranks together need every tensor.
        assert together(kind, True) == once, kind
        assert together(kind, None) == together(kind, place.shares), kind
        assert together(kind, False) >= once, kind
    assert together("ddp", False) == 4 * once
    # The pieces of each half lie in separate subchunks, so only the replica of a rank needs the same ones.
    assert together("hsdp", False) >= 2 * once
    # Neighbours need the same subchunks, replicas or not.
    assert together("odd", False) > once
    # A rank that reads its columns without sharing fetches whole rows.
    assert together("tp", False) > 3 * once


def _of_so_many(url: str) -> list[int]:
    return [_load(url, "ddp", 1, share) for share in (True, False)]


def test_bytes_fetched_do_not_depend_on_the_number_of_replicas(tmp_path: Path) -> None:
    url = str(tmp_path / "run")
    zarrckpt.save(wholes(1), url, options=zarrckpt.SaveOptions(max_chunk_bytes=1 << 18))
    once = stored_bytes(url)
    assert _of_so_many(url) == [once, once]
    for ranks in (2, 3, 4):
        fetched = run_ranks(_of_so_many, url, world_size=ranks)
        assert [sum(part) for part in zip(*fetched, strict=True)] == [once, ranks * once]
        assert max(shared for shared, _ in fetched) <= once / ranks + (1 << 18)


def ranges_of_chunks(stub: S3Server) -> dict[str, list[tuple[int, int]]]:
    """Return the byte ranges that were requested of each chunk of a tensor: half-open, sorted."""
    found: dict[str, list[tuple[int, int]]] = {}
    for request in stub.requests:
        key = unquote(request.target.partition("?")[0])
        if request.method != "GET" or "@zarrckpt" in key or not key.rpartition("/")[2].startswith("c"):
            continue
        first, last = request.headers["range"].removeprefix("bytes=").split("-")
        found.setdefault(key, []).append((int(first), int(last) + 1))
    return {key: sorted(ranges) for key, ranges in found.items()}


def test_a_server_is_asked_for_each_byte_once(s3_stub: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    place = s3_stub.bucket()
    url, env = place.url("run"), place.environment
    run_ranks(_save, url, "fsdp", 5, env=env)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    once = stored_bytes(url)
    for kind in ("ddp", "hsdp", "odd"):
        s3_stub.requests.clear()
        fetched = run_ranks(_load, url, kind, 5, None, env=env)
        asked = ranges_of_chunks(s3_stub)
        for ranges in asked.values():
            ends = [0, *(end for _, end in ranges)]
            assert [begin for begin, _ in ranges] == ends[:-1], "every byte, and none twice"
        assert sum(ranges[-1][1] for ranges in asked.values()) == once == sum(fetched)
    s3_stub.requests.clear()
    run_ranks(_load, url, "ddp", 5, False, env=env)
    assert all(set(Counter(ranges).values()) == {4} for ranges in ranges_of_chunks(s3_stub).values())


# -- targets of every kind, planners, groups


def _of_subsets(url: str) -> int:
    """Load tensors for every set of two or more ranks, so that fetched pieces go to many combinations of ranks."""
    sets = ["".join(map(str, ranks)) for n in (2, 3, 4) for ranks in itertools.combinations(range(4), n)]
    whole = {f"for{ranks}.{n}": full((40 + n,), 10 * n + int(ranks)) for ranks in sets for n in range(4)}
    zarrckpt.save(whole, url)
    target = {name: torch.zeros_like(t) for name, t in whole.items() if str(dist.get_rank()) in name.split(".")[0]}
    reader = ZarrStorageReader(url, options=zarrckpt.LoadOptions(share_reads=True))
    dcp.load(target, storage_reader=reader)
    assert len(target) == 4 * 7 and all(torch.equal(target[name], whole[name]) for name in target)
    return reader.bytes_read


def test_tensors_of_every_set_of_ranks_are_shared(tmp_path: Path) -> None:
    url = str(tmp_path / "run")
    assert sum(run_ranks(_of_subsets, url)) == stored_bytes(url)


class _Flights:
    """The bytes that one rank sends and receives, from the post of a message to the end of its wait."""

    def __init__(self) -> None:
        self.nbytes = self.peak = self.posts = self.rounds = 0
        self._sent: dict[int, int] = {}

    def posted(self, way: str, data: Any) -> None:
        self.posts += 1
        self.rounds += not self.nbytes  # all bytes of the round before have arrived
        copies = self._sent.get(id(data), 0) if way == "send" else 0
        if way == "send":
            self._sent[id(data)] = copies + 1
        self.nbytes += 0 if copies else len(data)  # one buffer for all receivers
        self.peak = max(self.peak, self.nbytes)

    def ended(self, way: str, data: Any) -> None:
        if way == "send":
            self._sent[id(data)] -= 1
        self.nbytes -= 0 if way == "send" and self._sent[id(data)] else len(data)


@contextmanager
def flights_recorded() -> Iterator[_Flights]:
    """Record the bytes that this rank sends to and receives from other ranks."""
    flights, post = _Flights(), MessageChannel._posted

    class Waited(Handle):
        way: str
        data: Any

        def wait(self) -> Any:
            arrived = super().wait()
            flights.ended(self.way, self.data)
            return arrived

    def recorded(self: MessageChannel, way: str, peer: int, data: Any) -> Handle:
        flights.posted(way, data)
        handle = Waited(post(self, way, peer, data)._future)
        handle.way, handle.data = way, data
        return handle

    with patch.object(MessageChannel, "_posted", recorded):
        yield flights


def _other_targets(url: str) -> None:
    whole = wholes(2)
    zarrckpt.save(
        {name: tensor.clone() for name, tensor in whole.items()},
        url,
        options=zarrckpt.SaveOptions(max_chunk_bytes=1 << 17),
    )
    turned = torch.zeros(1024, 384, dtype=torch.float64).T
    spread = torch.zeros(33, 200, dtype=torch.float64)[:, 100::2]
    backing = torch.full((130,), -5.0, dtype=torch.float64)
    target: dict[str, Any] = {
        "w": turned,
        "v": spread,
        "norm": backing[::2],
        "scalar": torch.zeros((), dtype=torch.float64),
    }
    zarrckpt.load(target, url, options=zarrckpt.LoadOptions(share_reads=True))
    assert target["w"] is turned and not turned.is_contiguous()
    assert all(torch.equal(target[name], whole[name]) for name in whole)
    assert backing[1::2].eq(-5).all()
    # Targets of another dtype, a different one on each rank.
    dtype = (torch.float32, torch.bfloat16, torch.float64, torch.float32)[dist.get_rank()]
    cast = {name: torch.zeros(tensor.shape, dtype=dtype) for name, tensor in whole.items()}
    zarrckpt.load(cast, url, options=zarrckpt.LoadOptions(share_reads=True), allow_cast=True)
    assert all(torch.equal(cast[name], whole[name].to(dtype)) for name in whole)
    # DCP's own planner. Only the coordinator's choice counts.
    target = {name: torch.zeros_like(tensor) for name, tensor in whole.items()}
    reader = ZarrStorageReader(url, options=zarrckpt.LoadOptions(share_reads=dist.get_rank() == 0))
    dcp.load(target, storage_reader=reader, planner=DefaultLoadPlanner())
    assert all(torch.equal(target[name], whole[name]) for name in whole)
    fetched: list[Any] = [None] * 4
    dist.all_gather_object(fetched, reader.bytes_read)
    assert sum(fetched) == stored_bytes(url)
    # Ranks that want different tensors, and one that wants none.
    names = (["w", "v"], ["v", "norm"], ["norm", "w"], [])[dist.get_rank()]
    target = {name: torch.zeros_like(whole[name]) for name in names}
    dcp.load(target, storage_reader=ZarrStorageReader(url, options=zarrckpt.LoadOptions(share_reads=True)))
    assert all(torch.equal(target[name], whole[name]) for name in names)


def test_targets_of_every_kind_share_reads(tmp_path: Path) -> None:
    run_ranks(_other_targets, str(tmp_path / "run"))


def _many_rounds(url: str) -> _Flights:
    _save(url, "ddp", 4, zarrckpt.SaveOptions(max_chunk_bytes=1 << 16))
    with flights_recorded() as flights:
        nbytes = _load(url, "ddp", 4, True, max_inflight_bytes=1 << 20)
    assert nbytes < stored_bytes(url) / 2
    return flights


def test_rounds_stay_within_the_memory_bound(tmp_path: Path) -> None:
    for flights in run_ranks(_many_rounds, str(tmp_path / "run")):
        # 4 MiB in rounds of a quarter of 1 MiB.
        assert flights.rounds >= 16 and flights.posts > 3 * flights.rounds
        assert 0 < flights.peak <= 1 << 18 and flights.nbytes == 0


def _one_subchunk_a_round(url: str) -> None:
    _save(url, "fsdp", 4)
    for kind in ("ddp", "hsdp", "odd"):
        _load(url, kind, 4, True, max_inflight_bytes=1)


def test_a_bound_below_one_subchunk_still_loads(tmp_path: Path) -> None:
    run_ranks(_one_subchunk_a_round, str(tmp_path / "run"))


def _some_ranks(url: str) -> int | None:
    group = dist.new_group([1, 3])
    if dist.get_rank() not in (1, 3):
        return None
    zarrckpt.save(wholes(6), url, process_group=group, options=zarrckpt.SaveOptions(max_chunk_bytes=1 << 18))
    return _load(url, "ddp", 6, True, process_group=group)


def test_a_sub_group_shares_reads(tmp_path: Path) -> None:
    url = str(tmp_path / "run")
    fetched = run_ranks(_some_ranks, url)
    assert fetched[0] is fetched[2] is None
    assert fetched[1] + fetched[3] == stored_bytes(url)
    assert min(fetched[1], fetched[3]) > 0.4 * stored_bytes(url)


def _save_load_save(url: str) -> list[dict[Any, str]]:
    meshes = []
    _save(f"{url}/1", "fsdp", 1)
    meshes.append(idle_meshes())
    for share in (True, False, True):
        _load(f"{url}/1", "ddp", 1, share)
        meshes.append(idle_meshes())
    _save(f"{url}/2", "odd", 2)
    with flights_recorded() as flights:
        _load(f"{url}/2", "hsdp", 2, True)
    meshes.append(idle_meshes())
    assert flights.posts
    return meshes


def test_loads_and_saves_take_turns_on_one_mesh(tmp_path: Path) -> None:
    found = run_ranks(_save_load_save, str(tmp_path))
    (name,) = {*found[0][0].values()}
    assert all(meshes == [{((0, 1, 2, 3), "foreground"): name}] * 5 for meshes in found), found


def _unshared(url: str) -> int:
    _save(url, "ddp", 1)
    with flights_recorded() as flights:
        _load(url, "ddp", 1, False)
        _load(url, "ddp", 1, None)
    return flights.posts


def test_without_shared_reads_ranks_exchange_no_data(tmp_path: Path) -> None:
    assert run_ranks(_unshared, str(tmp_path / "run")) == [0] * 4


class Changing(DefaultLoadPlanner):
    """On rank 1, a plan other than the one for which the coordinator planned the reads."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self._how = how

    def finish_plan(self, central_plan: Any) -> Any:
        plan = super().finish_plan(central_plan)
        if dist.get_rank() != 1:
            return plan
        if self._how == "anew":
            return replace(plan, storage_data=None)
        return replace(plan, items=[item for item in plan.items if item.storage_index.fqn != "w"])


def _changed_plan(url: str, how: str) -> None:
    _save(url, "ddp", 3, zarrckpt.SaveOptions(max_chunk_bytes=1 << 18))
    target = {name: torch.zeros_like(tensor) for name, tensor in wholes(0).items()}
    with patch.object(links, "CONNECT_TIMEOUT", timedelta(seconds=0.5 if how == "anew" else 2)):
        dcp.load(
            target,
            storage_reader=ZarrStorageReader(url, options=zarrckpt.LoadOptions(share_reads=True)),
            planner=Changing(how),
        )
    left_out = {"w"} if how == "fewer" and dist.get_rank() == 1 else set()
    expected = wholes(3)
    for name, tensor in target.items():
        assert torch.equal(tensor, torch.zeros_like(tensor) if name in left_out else expected[name]), name


@pytest.mark.parametrize("how", ["anew", "fewer"])
def test_a_planner_with_a_changed_plan_reads_alone(how: str, tmp_path: Path) -> None:
    run_ranks(_changed_plan, str(tmp_path / "run"), how)


# -- damage


def _fragile(number: float) -> dict[str, Any]:
    """Return tensors whose chunks all ranks need, two ranks, one rank, and all ranks except for private parts."""
    square, line = _mesh([[0, 1], [2, 3]]), _mesh([0, 1, 2, 3])
    return {
        "all": full((8, 6), number),
        "pair": placed(full((8, 5), number + 1), square, [Replicate(), Shard(0)]),
        "own": placed(full((8, 4), number + 2), line, [Shard(0)]),
        "odd": fsdp_tp(full((34, 3), number + 3), square),
        "more": full((64,), number + 4),
    }


DAMAGED = {
    "all/c.0.0": {0, 1, 2, 3},
    "pair/c.0.0": {0, 2},
    "pair/c.1.0": {1, 3},
    "own/c.2.0": {2},
    "odd/c.0.0": {0, 1, 2, 3},
}
"""The ranks that need each of these chunks."""


def _failures(load: Callable[[], object]) -> dict[int, type]:
    """Return the ranks that failed, and the types of their errors."""
    try:
        load()
    except CheckpointException as err:
        return {rank: type(error) for rank, (error, _) in err.failures.items()}
    return {}


def _is_filled(target: Mapping[str, Any], number: float) -> bool:
    return held_of(target) == held_of(_fragile(number))


def _damage(path: Path, how: str) -> None:
    if how == "missing":
        path.unlink()
    else:
        data = bytearray(path.read_bytes())
        data[9] ^= 16
        path.write_bytes(data if how == "flipped" else data[:-5])


def _loads_with_damage(url: str, how: str) -> None:
    zarrckpt.save(_fragile(1), url, options=MergingOptions(min_piece_bytes=0))
    for key, needing in DAMAGED.items():
        path = Path(url, key)
        whole = path.read_bytes()
        dist.barrier()
        if dist.get_rank() == 0:
            _damage(path, how)
        dist.barrier()
        target = _fragile(-1)
        began = time.monotonic()
        reader = ZarrStorageReader(url, options=zarrckpt.LoadOptions(share_reads=True))
        failed = _failures(lambda target=target, reader=reader: dcp.load(target, storage_reader=reader))  # type: ignore[misc]
        assert failed == dict.fromkeys(needing, CorruptCheckpointError), (key, failed)
        assert time.monotonic() - began < QUICK
        assert _is_filled(target, 1) == (dist.get_rank() not in needing)
        dist.barrier()
        if dist.get_rank() == 0:
            path.write_bytes(whole)
        dist.barrier()
        # A load after a failed one succeeds.
        dcp.load(target, storage_reader=ZarrStorageReader(url, options=zarrckpt.LoadOptions(share_reads=True)))
        assert _is_filled(target, 1)


@pytest.mark.parametrize("how", ["flipped", "missing", "short"])
def test_damage_fails_only_ranks_that_need_the_chunk(how: str, tmp_path: Path) -> None:
    run_ranks(_loads_with_damage, str(tmp_path / "run"), how)


def _load_fragile(url: str) -> None:
    zarrckpt.load(_fragile(-1), url, options=zarrckpt.LoadOptions(share_reads=True))


def _save_fragile(url: str) -> None:
    zarrckpt.save(_fragile(1), url, options=MergingOptions(min_piece_bytes=0))


def test_damage_is_named_on_every_rank(tmp_path: Path) -> None:
    url = str(tmp_path / "run")
    run_ranks(_save_fragile, url)
    _damage(tmp_path / "run" / "pair" / "c.0.0", "flipped")
    text = all_ranks_raise(CorruptCheckpointError, _load_fragile, url)
    assert "'pair/c.0.0'" in text and "'pair'" in text


# -- ranks that fail


class Unwell(Exception):
    """The error of a failing rank in these tests."""


class UnwellPlanner(ZarrLoadPlanner):
    """On one rank, it fails to resolve one tensor."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self._unwell = dist.get_rank() == rank

    def resolve_tensor(self, read_item: Any) -> torch.Tensor:
        if self._unwell and read_item.storage_index.fqn == "norm":
            raise Unwell("not resolved")
        return super().resolve_tensor(read_item)


class UnwellReader(ZarrStorageReader):
    """On one rank, it fails before it reads anything."""

    unwell = -1

    def read_data(self, plan: Any, planner: Any) -> Any:
        if dist.get_rank() == self.unwell:
            raise Unwell("not read")
        return super().read_data(plan, planner)


PLACES: dict[str, tuple[Any, str]] = {
    "piece": (MessageChannel, "_posted"),
    "fetch": (fill, "fetch"),
    "check": (fill, "unpack"),
}


@contextmanager
def failing(where: str, rank: int, error: Exception, after: int) -> Iterator[None]:
    """Make a function fail on one rank after a number of calls."""
    place, name = PLACES[where]
    function = getattr(place, name)
    left = [after]

    def fails(*args: Any) -> Any:
        left[0] -= 1
        if left[0] < 0 and (dist.get_rank() == rank):
            raise error
        return function(*args)

    with patch.object(place, name, fails):
        yield


def _with_a_failing_rank(url: str, how: str, rank: int) -> float:
    """Return the seconds that the load took."""
    _save(url, "ddp", 1, zarrckpt.SaveOptions(max_chunk_bytes=1 << 16))
    target = state("ddp", -1)
    # About 16 rounds.
    reader: ZarrStorageReader = ZarrStorageReader(
        url, options=zarrckpt.LoadOptions(share_reads=True, max_inflight_bytes=1 << 20)
    )
    planner = ZarrLoadPlanner()
    if how == "resolve":
        planner = UnwellPlanner(rank)
    elif how == "read_data":
        reader = UnwellReader(url, options=zarrckpt.LoadOptions(share_reads=True, max_inflight_bytes=1 << 20))
        reader.unwell = rank  # type: ignore[attr-defined]
    error = LostPeerError("made up") if how == "lost" else Unwell(how)
    where = {"lost": "piece"}.get(how, how)
    dist.barrier()
    began = time.monotonic()

    def load() -> None:
        # Before a rank's ``read_data`` is called, it cannot send the others that it will not take part.
        with patch.object(links, "CONNECT_TIMEOUT", timedelta(seconds=0.5 if how == "read_data" else 60)):
            dcp.load(target, storage_reader=reader, planner=planner)

    if where in PLACES:
        with failing(where, rank, error, after=9):
            failed = _failures(load)
    else:
        failed = _failures(load)
    seconds = time.monotonic() - began
    assert failed == ({} if how == "lost" else {rank: Unwell})
    if rank != dist.get_rank() or how == "lost":
        assert not wrong("ddp", 1, target)
    # The next load, on new connections.
    _load(url, "ddp", 1, True)
    return seconds


@pytest.mark.parametrize(
    ("how", "rank"),
    [("resolve", 2), ("read_data", 1), ("read_data", 0), ("piece", 3), ("fetch", 1), ("check", 0), ("lost", 2)],
)
def test_under_dcp_only_the_failing_rank_is_named(how: str, rank: int, tmp_path: Path) -> None:
    """It fails before it reads, between two rounds, or while it fetches or copies. Or it loses its peers ("lost")."""
    assert max(run_ranks(_with_a_failing_rank, str(tmp_path / "run"), how, rank)) < QUICK


class UnwellObject:
    """On one rank, its ``state_dict`` or its ``load_state_dict`` raises."""

    def __init__(self, fails_in: str) -> None:
        self._fails_in = fails_in

    def state_dict(self) -> dict[str, Any]:
        if self._fails_in == "state_dict":
            raise Unwell("state_dict")
        return {"n": torch.zeros(3)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self._fails_in == "load_state_dict":
            raise Unwell("load_state_dict")


def _own_load_with_a_failing_rank(url: str, how: str, rank: int) -> float:
    """Do the same with this package's own load. Return the seconds that it took."""
    whole = {**wholes(1), "object": {"n": torch.ones(3)}}
    zarrckpt.save(whole, url, options=zarrckpt.SaveOptions(max_chunk_bytes=1 << 16))
    unwell = UnwellObject(how if dist.get_rank() == rank else "")
    target: dict[str, Any] = {**state("ddp", -1), "object": unwell}
    before = idle_meshes()
    began = time.monotonic()
    fault = failing(how, rank, Unwell(how), after=9) if how in PLACES else nullcontext()
    with fault, pytest.raises(CheckpointError, match=rf"^rank {rank} failed with Unwell: {how} ") as caught:
        zarrckpt.load(target, url, options=zarrckpt.LoadOptions(share_reads=True, max_inflight_bytes=1 << 20))
    seconds = time.monotonic() - began
    assert f"(failed ranks: {rank})" in str(caught.value)
    assert isinstance(caught.value.__cause__, Unwell) == (dist.get_rank() == rank)
    # If pieces may still be under way, all ranks close the connections.
    handed = how in PLACES or how == "load_state_dict"
    assert idle_meshes() == ({} if handed else before)
    dist.barrier()
    _load(url, "ddp", 1, True, strict=False)
    return seconds


@pytest.mark.parametrize(
    ("how", "rank"),
    [("state_dict", 2), ("load_state_dict", 1), ("piece", 3), ("piece", 0), ("fetch", 1), ("check", 0)],
)
def test_a_failing_rank_is_named_on_every_rank(how: str, rank: int, tmp_path: Path) -> None:
    assert max(run_ranks(_own_load_with_a_failing_rank, str(tmp_path / "run"), how, rank)) < QUICK


def _waits_while_another_fails(url: str, share_reads: bool) -> float:
    """Let one rank fail at once, while the others would read for a minute."""
    _save(url, "ddp", 1, zarrckpt.SaveOptions(max_chunk_bytes=1 << 16))
    owner, step = (fill, "fetch") if share_reads else (StoredArray, "chunk_jobs")
    target, real = state("ddp", -1), getattr(owner, step)
    gate = threading.Event()

    def slowly(*args: Any) -> Any:
        if dist.get_rank() == 1:
            raise Unwell("at once")
        gate.wait(1)
        return real(*args)

    dist.barrier()
    began = time.monotonic()
    options = zarrckpt.LoadOptions(share_reads=share_reads, max_inflight_bytes=1 << 16, concurrency=1)
    with patch.object(owner, step, slowly), pytest.raises(CheckpointError, match="rank 1 failed with Unwell"):
        zarrckpt.load(target, url, options=options)
    return time.monotonic() - began


@pytest.mark.parametrize("share_reads", [True, False])
def test_other_ranks_stop_reading_after_a_failure(share_reads: bool, tmp_path: Path) -> None:
    assert max(run_ranks(_waits_while_another_fails, str(tmp_path / "run"), share_reads)) < QUICK


def _killed_between_rounds(url: str, notes: str, how: str) -> None:
    _save(url, "ddp", 1, zarrckpt.SaveOptions(max_chunk_bytes=1 << 16))
    target = state("ddp", -1)
    # In DCP, a rank that waits for a peer of the dead rank gets no error before the group's own timeout.
    group = dist.new_group(timeout=timedelta(seconds=3))
    post = MessageChannel._posted
    calls = []

    def dies(*args: Any) -> Any:
        calls.append(1)
        if dist.get_rank() == 2 and len(calls) == 15:
            os._exit(1)
        return post(*args)

    dist.barrier()
    began = time.monotonic()
    error: BaseException | None = None
    with patch.object(MessageChannel, "_posted", dies):
        try:
            if how == "dcp":
                reader = ZarrStorageReader(
                    url, options=zarrckpt.LoadOptions(share_reads=True, max_inflight_bytes=1 << 20)
                )
                dcp.load(target, storage_reader=reader, process_group=group)
            else:
                zarrckpt.load(target, url, options=zarrckpt.LoadOptions(share_reads=True, max_inflight_bytes=1 << 20))
        except Exception as err:
            error = err
    right = not wrong("ddp", 1, target)
    results = [time.monotonic() - began, right, type(error).__name__, str(error)]
    Path(notes, str(dist.get_rank())).write_text(json.dumps(results))


@pytest.mark.parametrize("how", ["zarrckpt", "dcp"])
def test_a_dead_rank_ends_the_load_on_the_others_soon(how: str, tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    notes.mkdir()
    with pytest.raises(RankError) as caught:
        run_ranks(_killed_between_rounds, str(tmp_path / "run"), str(notes), how)
    assert list(caught.value.failures) == [2]
    results = {int(path.name): json.loads(path.read_text()) for path in notes.iterdir()}
    assert results.keys() == {0, 1, 3}
    for seconds, right, kind, text in results.values():
        assert seconds < QUICK
        if how == "dcp":  # it read without the others, and fails when it would meet them again
            assert right and kind != "NoneType", (kind, text)
        else:
            assert kind == "CheckpointError" and "rank 2 was lost" in text, (kind, text)
