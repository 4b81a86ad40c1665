"""Many ranks in one process: each is a thread, and between the threads are DCP's collectives and nothing else.

``simulate(function, world_size)`` calls ``function(rank)`` on each of that many threads. Inside it DCP runs as it is,
over collectives that pickle objects from thread to thread, and so do ``zarrckpt.save`` and ``zarrckpt.load``; pieces
that ranks hand each other go from thread to thread too. There is no process group and no second process: a save and a
load by six ranks take some hundredths of a second.

One rank runs at a time, until it waits for a message that is not there yet; which one goes on then is drawn with the
seed. So every run can be repeated, and ranks that all wait for each other are found at once.
"""

from __future__ import annotations

import contextlib
import pickle
import queue
import random
import sys
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar
from unittest.mock import patch

import numpy as np
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.logger import _dcp_logger
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.utils import _DistWrapper

import zarrckpt._api  # noqa: F401 - it is loaded late, and must be there to be patched
from zarrckpt import ObjectExistsError, ObjectNotFoundError, _exchange, _kept_plans
from zarrckpt._exchange import MeshId, PeerLost
from zarrckpt._store import ObjectInfo, Store, StoreSpec, Versioned
from zarrckpt._store._base import Listing

T = TypeVar("T")

TIMEOUT = 60.0
"""Seconds that a rank waits at most; reached only where a thread is stuck outside of the simulation."""


class Stuck(AssertionError):
    """A rank waits for a message that will never come."""


_CLOSED = "closed"
"""What a rank that leaves a mesh sends to all of it."""


class World:
    """The messages between the ranks, and whose turn it is."""

    def __init__(self, numbers: Sequence[int], seed: int, traffic: Traffic) -> None:
        self.numbers = tuple(numbers)
        self.size = size = len(numbers)
        self.traffic = traffic
        self._draw = random.Random(seed)
        self._mail: defaultdict[tuple[Any, ...], deque[Any]] = defaultdict(deque)
        self._waits: dict[int, tuple[Any, ...] | None] = dict.fromkeys(range(size))
        self._turn = [threading.Semaphore(0) for _ in range(size)]
        self._lock = threading.Lock()

    def begin(self, rank: int) -> None:
        """Wait for a rank's first turn."""
        self._wait(rank)

    def pass_on(self) -> None:
        """Give the turn to a rank that can go on. Where none can but some wait, all of them get Stuck."""
        with self._lock:
            ready = [rank for rank, address in self._waits.items() if address is None or self._mail[address]]
            for rank in [self._draw.choice(ready)] if ready else list(self._waits):
                del self._waits[rank]
                self._turn[rank].release()

    def send(self, address: tuple[Any, ...], message: Any) -> None:
        with self._lock:
            self._mail[address].append(message)

    def receive(self, rank: int, address: tuple[Any, ...]) -> Any:
        """The next message at an address; other ranks run until it is there."""
        with self._lock:
            if self._mail[address]:
                return self._mail[address].popleft()
            self._waits[rank] = address
        self.pass_on()
        self._wait(rank)
        with self._lock:
            if not self._mail[address]:
                raise Stuck(f"rank {rank} waits for {address}, which never comes")
            return self._mail[address].popleft()

    def unread(self) -> list[tuple[Any, ...]]:
        """Addresses with messages that nobody took, but for meshes that somebody has left."""
        left = {address[1] for address, messages in self._mail.items() if messages and messages[-1] is _CLOSED}
        return [address for address, messages in self._mail.items() if messages and address[1] not in left]

    def _wait(self, rank: int) -> None:
        if not self._turn[rank].acquire(timeout=TIMEOUT):
            raise Stuck(f"rank {rank} had no turn for {TIMEOUT:.0f} s")


class _Here(threading.local):
    world: World | None = None
    rank: int = -1
    joining: _Joining | None = None


_here = _Here()


def current_rank() -> int:
    """The rank whose thread this is."""
    return _here.rank


class Collectives(_DistWrapper):
    """DCP's own wrapper around a process group, with the group replaced."""

    def __init__(self, group: None = None, use_dist: bool = True, coordinator_rank: int = 0) -> None:
        assert _here.world is not None and group is None and use_dist
        self.group = None
        self.use_dist = True
        self.world = _here.world
        self.coordinator_rank = self.global_coordinator_rank = coordinator_rank
        self.rank = _here.rank
        self.is_coordinator = self.rank == coordinator_rank

    def get_world_size(self) -> int:
        return self.world.size

    def broadcast_object(self, object: Any) -> Any:
        if self.is_coordinator:
            self._send_to([rank for rank in range(self.world.size) if rank != self.rank], object)
            return object
        return self._receive_from(self.coordinator_rank)

    def gather_object(self, object: Any) -> list[Any] | None:
        _watch()
        self._send_to([self.coordinator_rank], object)
        return self._receive_all() if self.is_coordinator else None

    def all_gather_object(self, object: Any) -> list[Any]:
        _watch()
        self._send_to(range(self.world.size), object)
        return self._receive_all()

    def scatter_object(self, object_list: list[Any] | None) -> Any:
        if self.is_coordinator:
            assert object_list is not None
            for rank, part in enumerate(object_list):
                self._send_to([rank], part)
        return self._receive_from(self.coordinator_rank)

    def barrier(self) -> None:
        self.all_gather_object(None)

    def _send_to(self, ranks: Iterable[int], message: object) -> None:
        data = pickle.dumps(message)
        for rank in ranks:
            self.world.send(("collective", self.rank, rank), data)

    def _receive_from(self, rank: int) -> Any:
        return pickle.loads(self.world.receive(self.rank, ("collective", rank, self.rank)))

    def _receive_all(self) -> list[Any]:
        """As gloo's gather does it: everything arrives, then all is unpickled, in the order of the ranks."""
        world, me = self.world, self.rank
        parts = [world.receive(me, ("collective", rank, me)) for rank in range(world.size)]
        return [pickle.loads(part) for part in parts]


def _watch() -> None:
    if _here.joining is not None:
        _here.joining.watch()


def _get_rank(group: None = None) -> int:
    assert _here.world is not None
    return _here.world.numbers[_here.rank]


def _broadcast_object_list(objects: list[Any], src: int, group: None) -> None:
    objects[:] = Collectives(group, coordinator_rank=src).broadcast_object(objects)


def _memory_of(group: None) -> _kept_plans.Memory:
    """Kept by rank, where plans are kept."""
    assert _here.world is not None
    if not isinstance(_kept_plans._memories, _PerRank):
        return _kept_plans.Memory()
    members = _here.world.numbers
    if members not in _kept_plans._memories:
        _kept_plans._memories[members] = (None, _kept_plans.Memory())
    return _kept_plans._memories[members][1]


@dataclass
class Traffic:
    """What ranks handed each other in some simulations."""

    moved: int = 0
    """Bytes that went from one rank to another."""
    most: int = 0
    """The most bytes that one rank sent and received in one round."""


class Mesh:
    """One rank's end of the private mesh: takes the place of ``_exchange.Channel``, which stands on gloo."""

    usable = True

    def __init__(self, mesh: MeshId) -> None:
        assert _here.world is not None and mesh.members == _here.world.numbers
        self.mesh = mesh
        self.rank = _here.rank

    def swap(self, sends: Sequence[tuple[int, Any]], receives: Sequence[tuple[int, int]], tag: int) -> list[Any]:
        world = self._world()
        for to, data in sends:
            assert to != self.rank and data.dtype == np.uint8 and data.ndim == 1
            world.send(self._address(self.rank, to), (tag, data.copy()))
        # Without the checksums at their ends. What goes to several ranks is in memory once.
        sent = {id(data): data.nbytes - 4 for _, data in sends}
        received = [nbytes - 4 for _, nbytes in receives]
        world.traffic.moved += sum(received)
        world.traffic.most = max(world.traffic.most, sum(sent.values()) + sum(received))
        return [self._received(world, source, nbytes, tag) for source, nbytes in receives]

    def _received(self, world: World, source: int, nbytes: int, tag: int) -> Any:
        message = world.receive(self.rank, self._address(source, self.rank))
        if message is _CLOSED:
            world.send(self._address(source, self.rank), _CLOSED)
            raise PeerLost(f"rank {source} is gone")
        assert message[0] == tag and len(message[1]) == nbytes, (message[0], tag, len(message[1]), nbytes)
        return message[1]

    def release(self) -> None:
        _exchange._idle[self.mesh.members] = self  # type: ignore[assignment]

    def close(self) -> None:
        world = self._world()
        for rank in range(world.size):
            world.send(self._address(self.rank, rank), _CLOSED)

    def _world(self) -> World:
        """A mesh outlives the simulation that it was made in."""
        assert _here.world is not None and _here.rank == self.rank
        return _here.world

    def _address(self, source: int, to: int) -> tuple[Any, ...]:
        return ("mesh", self.mesh.name, source, to)


class _Joining:
    """Takes the place of ``_exchange.Joining``: nothing needs a thread here."""

    def __init__(self, mesh: MeshId, kept: Any) -> None:
        self._channel: Any = _exchange.join(mesh, kept)
        _here.joining = self

    def enter(self) -> Mesh:
        self.abandon()
        channel: Mesh = self._channel
        return channel

    def abandon(self) -> None:
        _here.joining = None

    def watch(self) -> None:
        """Called when DCP gathers results: who has not entered by then never will."""
        self.abandon()
        self._channel.close()


class _Inline:
    """An executor without threads: their start would take most of the time. Jobs run when they are submitted."""

    def __init__(self, *args: object, **options: object) -> None:
        pass

    def __enter__(self) -> _Inline:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def submit(self, function: Callable[..., T], *args: object) -> Future[T]:
        future: Future[T] = Future()
        try:
            future.set_result(function(*args))
        except BaseException as err:
            future.set_exception(err)
        return future

    def shutdown(self, **options: object) -> None:
        pass


def _run(
    jobs: Iterable[Callable[[], T]], concurrency: object, *, drawn_here: bool = False, stopping: object = None
) -> list[T]:
    """Jobs of the package, one after the other in the calling thread."""
    return [job() for job in jobs]


class _PerRank(MutableMapping[Any, Any]):
    """Takes the place of a dict that there is one of in each process: one for each rank."""

    def __init__(self) -> None:
        self._dicts: defaultdict[int, dict[Any, Any]] = defaultdict(dict)

    def __getitem__(self, key: Any) -> Any:
        return self._dicts[_here.rank][key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._dicts[_here.rank][key] = value

    def __delitem__(self, key: Any) -> None:
        del self._dicts[_here.rank][key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._dicts[_here.rank])

    def __len__(self) -> int:
        return len(self._dicts[_here.rank])


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """What a process keeps from one save to the next, DCP's cached plans and idle meshes, is kept in this context."""
    caches = [name for name, value in vars(SavePlanner).items() if name.startswith("_cached_") and value == {}]
    assert len(caches) == 5, f"DCP's caches are others: {caches}"
    with contextlib.ExitStack() as stack:
        for name in caches:
            stack.enter_context(patch.object(SavePlanner, name, _PerRank()))
        stack.enter_context(patch.object(_exchange, "_idle", _PerRank()))
        stack.enter_context(patch.object(_kept_plans, "_memories", _PerRank()))
        yield


@contextlib.contextmanager
def _replaced(inline: bool) -> Iterator[None]:
    """Everything that would need a process group, in every module that has it, as what works between the threads."""
    ours: dict[str, Any] = {"in_use": lambda: True, "Joining": _Joining, "Channel": Mesh, "_DistWrapper": Collectives}
    ours["memory_of"] = _memory_of
    if inline:
        ours |= {"ThreadPoolExecutor": _Inline, "run": _run}
    places: list[tuple[Any, str, Any]] = [
        (state_dict_saver, "_DistWrapper", Collectives),
        (state_dict_loader, "_DistWrapper", Collectives),
        (dist, "get_rank", _get_rank),
        (dist, "broadcast_object_list", _broadcast_object_list),
        # It makes a record of every step, and pytest keeps them all.
        (_dcp_logger, "disabled", True),
    ]
    if not isinstance(_exchange._idle, _PerRank):
        places.append((_exchange, "_idle", _PerRank()))
    for name, module in list(sys.modules.items()):
        if name.startswith("zarrckpt.") and not name.startswith("zarrckpt._store"):
            places += [(module, attribute, ours[attribute]) for attribute in ours.keys() & vars(module).keys()]
    before = [getattr(place, name) for place, name, _ in places]
    for place, name, new in places:
        setattr(place, name, new)
    try:
        yield
    finally:
        for (place, name, _), old in zip(places, before, strict=True):
            setattr(place, name, old)


class _RankThread:
    """A rank's own thread, kept: as in a training process, one save after the other comes from the same one."""

    def __init__(self) -> None:
        self.jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self._work, daemon=True).start()

    def _work(self) -> NoReturn:
        while True:
            self.jobs.get()()


_threads: list[_RankThread] = []


def simulate(
    function: Callable[[int], T],
    world_size: int,
    *,
    seed: int = 0,
    inline: bool = True,
    traffic: Traffic | None = None,
    numbers: Sequence[int] | None = None,
) -> list[T]:
    """Call ``function(rank)`` on each of the ranks; return the results by rank.

    Raises what the lowest failed rank raised, with a note of what others did. ``inline=False`` keeps the threads in
    which each rank's transfers run. ``traffic`` is added to. ``numbers``: the ranks' numbers in a larger process group,
    of which they are a part.
    """
    while len(_threads) < world_size:
        _threads.append(_RankThread())
    world = World(numbers or range(world_size), seed, traffic or Traffic())
    results: dict[int, T] = {}
    errors: dict[int, BaseException] = {}
    done: queue.SimpleQueue[int] = queue.SimpleQueue()

    def run(rank: int) -> None:
        _here.world, _here.rank = world, rank
        world.begin(rank)
        try:
            results[rank] = function(rank)
        except BaseException as err:
            errors[rank] = err
        world.pass_on()
        done.put(rank)

    with _replaced(inline):
        for rank in range(world_size):
            _threads[rank].jobs.put(lambda rank=rank: run(rank))  # type: ignore[misc]
        world.pass_on()
        try:
            for _ in range(world_size):
                done.get(timeout=2 * TIMEOUT)
        except queue.Empty:
            _threads.clear()
            raise Stuck(f"some ranks did not end: {errors}") from None
    if errors:
        _raise(errors)
    assert not world.unread(), f"nobody received {world.unread()}"
    return [results[rank] for rank in range(world_size)]


def _raise(errors: dict[int, BaseException]) -> NoReturn:
    # Who is stuck tells less than why: another rank failed.
    first = min(errors, key=lambda rank: (isinstance(errors[rank], Stuck), rank))
    for rank in errors.keys() - {first}:
        errors[first].add_note(f"rank {rank}: {errors[rank]!r:.300}")
    errors[first].add_note(f"(on simulated rank {first})")
    raise errors[first]


class MemoryStore(Store):
    """Objects in a dict; how often each key was written, and which bytes of it were read."""

    url = "memory"
    is_local = False

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.writes: Counter[str] = Counter()
        self.reads: list[tuple[str, int, int, int]] = []
        """(key, first byte, end, rank) of each read of a part; the rank is known where transfers run inline."""
        self._lock = threading.Lock()

    def get(self, key: str) -> bytes:
        try:
            return self.objects[key]
        except KeyError:
            raise ObjectNotFoundError(f"{key!r} is absent") from None

    def get_versioned(self, key: str) -> Versioned:
        data = self.get(key)
        return Versioned(data, data)

    def read_into(self, key: str, byte_offset: int, buffer: memoryview) -> None:
        end = byte_offset + len(buffer)
        with self._lock:
            self.reads.append((key, byte_offset, end, current_rank()))
        found = self.get(key)[byte_offset:end]
        assert len(found) == len(buffer), f"{key!r} has no {len(buffer)} bytes at {byte_offset}"
        buffer[:] = found

    def put(self, key: str, buffers: Sequence[bytes | bytearray | memoryview]) -> None:
        data = b"".join(buffers)
        with self._lock:
            self.objects[key] = data
            self.writes[key] += 1

    def create(self, key: str, data: bytes) -> None:
        with self._lock:
            if key in self.objects:
                raise ObjectExistsError(f"{key!r} exists")
        self.put(key, [data])

    def replace(self, key: str, data: bytes, version: Any) -> None:
        with self._lock:
            if self.objects.get(key) != version:
                raise ObjectExistsError(f"{key!r} has changed")
        self.put(key, [data])

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            self.objects.pop(key, None)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        for key, data in sorted(self.objects.items()):
            if key.startswith(f"{prefix}/" if prefix else ""):
                yield ObjectInfo(key, len(data))

    def list_dir(self, prefix: str = "") -> Listing:
        below = [found.key.removeprefix(f"{prefix}/").partition("/") for found in self.list(prefix)]
        return sorted({n for n, slash, _ in below if not slash}), sorted({n for n, slash, _ in below if slash})

    def sync(self, keys: Iterable[str]) -> None:
        pass

    def zarr_store(self) -> Any:
        from zarr.core.buffer.cpu import Buffer
        from zarr.storage import MemoryStore as ZarrMemoryStore

        return ZarrMemoryStore({key: Buffer.from_bytes(data) for key, data in self.objects.items()}, read_only=True)


@contextlib.contextmanager
def memory_store(store: MemoryStore | None = None) -> Iterator[MemoryStore]:
    """A store (default: a fresh one) in which every url lies while the context lasts."""
    place = MemoryStore() if store is None else store
    with patch.object(StoreSpec, "open", lambda self, **options: place):
        yield place
