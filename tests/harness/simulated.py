"""Many ranks in one process: each is a thread, and the threads only exchange messages.

``simulate(function, world_size)`` calls ``function(rank)`` on each of that many threads. Inside it, the rounds of
``zarrckpt.save`` and ``zarrckpt.load`` go from thread to thread as bytes. So do DCP's collectives and the pieces that
ranks exchange. There is no process group and no second process. A save and a load by six ranks take some hundredths of
a second.

One rank runs at a time, until it waits for a message that has not arrived. The next rank is drawn with the seed. So
every run can be repeated, and ranks that all wait for each other are found at once.
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
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar
from unittest.mock import patch

import numpy as np
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.logger import _dcp_logger
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.utils import _DistWrapper

import zarrckpt._api  # it is imported lazily, and must exist to be patched
import zarrckpt._dcp.reader
import zarrckpt._dcp.writer
import zarrckpt._save.plan_report  # noqa: F401
from harness.internals import Listing, ObjectInfo, Store, StoreSpec, VersionedObject, in_thread
from harness.torch_internals import Ranks, agree
from zarrckpt import ObjectExistsError, ObjectNotFoundError
from zarrckpt._dcp.channel import ChannelName
from zarrckpt._format import wire
from zarrckpt._ranks.errors import Failure, LostPeerError, StoppedError, raise_together, select_causes

T = TypeVar("T")

TIMEOUT = 60.0
"""Maximum seconds that a rank waits. Reached only if a thread hangs outside of the simulation."""


class Stuck(AssertionError):
    """A rank waits for a message that will never arrive."""


_CLOSED = "closed"
"""The message that a rank which leaves a mesh sends to all its members."""


class World:
    """The messages between the ranks, and the rank whose turn it is."""

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
        """Give the turn to a rank that can continue. If none can but some wait, all of them get Stuck."""
        with self._lock:
            ready = [rank for rank, address in self._waits.items() if address is None or self._mail[address]]
            for rank in [self._draw.choice(ready)] if ready else list(self._waits):
                del self._waits[rank]
                self._turn[rank].release()

    def send(self, address: tuple[Any, ...], message: Any) -> None:
        with self._lock:
            self._mail[address].append(message)

    def receive(self, rank: int, address: tuple[Any, ...]) -> Any:
        """Return the next message at an address. Other ranks run until it has arrived."""
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
        """Return addresses with messages that no rank received, except on meshes that some rank has left."""
        left = {address[1] for address, messages in self._mail.items() if messages and messages[-1] is _CLOSED}
        unread = [address for address, messages in self._mail.items() if messages and address[1] not in left]
        return [address for address in unread if address[0] != "meeting"]

    def _wait(self, rank: int) -> None:
        if not self._turn[rank].acquire(timeout=TIMEOUT):
            raise Stuck(f"rank {rank} had no turn for {TIMEOUT:.0f} s")


class _Here(threading.local):
    world: World | None = None
    rank: int = -1
    calls: int = 0
    plans: int = 0
    """Number of DCP's plans that have arrived, the same on all ranks."""
    connected: bool = True
    """Whether this rank has connected since then, or has sent that it will not."""


_here = _Here()


def current_rank() -> int:
    """Return the rank whose thread this is."""
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
        _stay_away()
        self._send_to([self.coordinator_rank], object)
        return self._receive_all() if self.is_coordinator else None

    def all_gather_object(self, object: Any) -> list[Any]:
        _stay_away()
        self._send_to(range(self.world.size), object)
        return self._receive_all()

    def scatter_object(self, object_list: list[Any] | None) -> Any:
        if self.is_coordinator:
            assert object_list is not None
            for rank, part in enumerate(object_list):
                self._send_to([rank], part)
        _here.plans, _here.connected = _here.plans + 1, False
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
        """Receive as gloo's gather does: everything arrives, then all is unpickled, in the order of the ranks."""
        world, me = self.world, self.rank
        parts = [world.receive(me, ("collective", rank, me)) for rank in range(world.size)]
        return [pickle.loads(part) for part in parts]


def _get_rank(group: None = None) -> int:
    assert _here.world is not None
    return _here.world.numbers[_here.rank]


@dataclass
class Traffic:
    """Bytes that ranks sent each other in some simulations."""

    moved: int = 0
    """Bytes that went from one rank to another."""
    most: int = 0
    """Maximum bytes that one rank had under way at once, sent and received."""


class MessageChannel:
    """One rank's end of the connections on which pieces move. Replaces ``_ranks.pieces.MessageChannel``."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._on_their_way = 0

    def send(self, to: int, data: Any) -> _Sent:
        world = _world()
        assert to != _here.rank and data.dtype == np.uint8 and data.ndim == 1
        world.send(self._address(_here.rank, to), data.copy())
        # Without the checksum at its end.
        world.traffic.moved += data.nbytes - 4
        return _Sent(self, self._counted(data.nbytes - 4))

    def recv(self, source: int, nbytes: int) -> _Awaited:
        self._counted(nbytes - 4)
        return _Awaited(self, self._address(source, _here.rank), nbytes)

    def _counted(self, nbytes: int) -> int:
        traffic = _world().traffic
        self._on_their_way += nbytes
        traffic.most = max(traffic.most, self._on_their_way)
        return nbytes

    def close(self) -> None:
        for rank in range(_world().size):
            _world().send(self._address(_here.rank, rank), _CLOSED)

    def _address(self, source: int, to: int) -> tuple[Any, ...]:
        return ("pieces", self._name, source, to)


@dataclass(frozen=True)
class _Sent:
    """A sent piece, which has arrived at once."""

    channel: MessageChannel
    nbytes: int

    def wait(self) -> None:
        self.channel._counted(-self.nbytes)


@dataclass(frozen=True)
class _Awaited:
    channel: MessageChannel
    address: tuple[Any, ...]
    nbytes: int

    def wait(self) -> Any:
        self.channel._counted(4 - self.nbytes)
        message = _world().receive(_here.rank, self.address)
        if message is _CLOSED:
            _world().send(self.address, _CLOSED)
            raise LostPeerError("its sender is gone")
        assert len(message) == self.nbytes, (self.address, len(message), self.nbytes)
        return message


def _world() -> World:
    assert _here.world is not None
    return _here.world


@contextlib.contextmanager
def _connected(name: ChannelName | None) -> Iterator[MessageChannel | None]:
    """Replace ``_dcp.channel.connect_channel``."""
    if name is None:
        yield None
        return
    assert name.members == _world().numbers
    channel = MessageChannel(name.name)
    others = _come("here")
    if any(_world().receive(_here.rank, _meeting(rank, _here.rank)) is _CLOSED for rank in others):
        channel.close()
        raise LostPeerError("a rank did not come")
    try:
        yield channel
    except BaseException:
        channel.close()
        raise


def _meeting(rank: int, to: int) -> tuple[Any, ...]:
    return ("meeting", f"plan {_here.plans}", rank, to)


def _come(said: str) -> list[int]:
    """Send all other ranks whether this one connects with them. Return those ranks."""
    others = [rank for rank in range(_world().size) if rank != _here.rank]
    for rank in others:
        _world().send(_meeting(_here.rank, rank), said)
    _here.connected = True
    return others


def _stay_away() -> None:
    """Tell the others that this rank never connects, if it has not when DCP gathers results. Stands for a timeout."""
    if not _here.connected:
        _come(_CLOSED)


class Rounds:
    """One rank's rounds. Replaces ``_ranks.rounds.Rounds``."""

    error_is_shared = True
    world = None

    def __init__(self, call: str) -> None:
        self.rank, self.size, self.members = _here.rank, _world().size, _world().numbers
        self._call = call
        self._channel: MessageChannel | None = None

    def merge(
        self,
        round_name: str,
        on_each_rank: Callable[[], Any],
        on_coordinator: Callable[[list[Any]], Any],
        stop: Any = None,
    ) -> Any:
        error: BaseException | None = None
        try:
            said: Any = wire.encode(on_each_rank())
        except Exception as err:
            error, said = err, Failure.of_error(err, self.members[self.rank])
            if self._channel is not None:
                self._channel.close()  # ranks that wait for this one must notice
        _world().send(("up", self.rank), (self._call, said))
        if self.rank == 0:
            answer, error = self._answer(on_coordinator, error)
            for rank in range(1, self.size):
                _world().send(("down", rank), answer)
        else:
            answer = _world().receive(self.rank, ("down", self.rank))
        if isinstance(answer, list):
            raise_together(answer, self.members[self.rank], error)
        return wire.decode(answer)

    def _answer(
        self, decide: Callable[[list[Any]], Any], error: BaseException | None
    ) -> tuple[bytes | list[Failure], BaseException | None]:
        found = [_world().receive(0, ("up", rank)) for rank in range(self.size)]
        assert {call for call, _ in found} == {self._call}, f"the ranks are in different calls: {found}"
        failures = [said for _, said in found if isinstance(said, Failure) and said.kind != StoppedError.__name__]
        if failures:
            return select_causes(failures), error
        try:
            return wire.encode(decide([wire.decode(said) for _, said in found])), None
        except Exception as err:
            return [Failure.of_error(err, self.members[0])], err

    def report_alive(self) -> None:
        pass

    def channel(self) -> MessageChannel:
        if self._channel is None:
            self._channel = MessageChannel(self._call)
        return self._channel


@contextlib.contextmanager
def _open_rounds(ranks: Ranks, call: str, timeout: float, *, queue: str = "foreground") -> Iterator[Rounds]:
    assert ranks.group is None and not ranks.no_dist
    calls = _here.calls = _here.calls + 1
    yield Rounds(f"{call}, call {calls}")


def _run_jobs(
    jobs: Iterable[Callable[[], T]], concurrency: object, *, caller_draws: bool = False, on_failure: object = None
) -> list[T]:
    """Run jobs of the package, one after the other in the calling thread."""
    return [job() for job in jobs]


def _in_thread(call: Callable[[], T], *, at_once: bool = False) -> contextlib.AbstractContextManager[Callable[[], T]]:
    """Run a call of the package in the calling thread. To start a thread would take most of the time."""
    return in_thread(call, at_once=True)


class _PerRank(MutableMapping[Any, Any]):
    """One dict per rank, in place of a dict of which each process has one."""

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
    """Keep DCP's cached plans and this package's between saves, as a process does."""
    caches = [name for name, value in vars(SavePlanner).items() if name.startswith("_cached_") and value == {}]
    assert len(caches) == 5, f"DCP's caches are others: {caches}"
    with contextlib.ExitStack() as stack:
        for name in caches:
            stack.enter_context(patch.object(SavePlanner, name, _PerRank()))
        stack.enter_context(patch.object(agree, "_kept_plans", _PerRank()))
        yield


@contextlib.contextmanager
def _replaced(inline: bool) -> Iterator[None]:
    """Replace everything that needs a process group, in every module that imports it, for the threads."""
    ours: dict[str, Any] = {"has_default_group": lambda: True, "open_rounds": _open_rounds}
    ours["connect_channel"] = _connected
    if inline:
        ours |= {"in_thread": _in_thread, "run_jobs": _run_jobs}
    places: list[tuple[Any, str, Any]] = [
        (state_dict_saver, "_DistWrapper", Collectives),
        (state_dict_loader, "_DistWrapper", Collectives),
        (dist, "get_rank", _get_rank),
        (dist, "get_world_size", lambda group=None: _world().size),
        # It records every step, and pytest keeps all records.
        (_dcp_logger, "disabled", True),
    ]
    if not isinstance(agree._kept_plans, _PerRank):
        places.append((agree, "_kept_plans", _PerRank()))
    for name, module in list(sys.modules.items()):
        skipped = name.startswith(("zarrckpt._store", "zarrckpt._ranks")) and name != "zarrckpt._ranks.group"
        if name.startswith("zarrckpt.") and not skipped:
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
    """A rank's thread, which is kept. As in a training process, all saves of a rank run in one thread."""

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
    """Call ``function(rank)`` on each of the ranks. Return the results by rank.

    Raises the error of the lowest failed rank, with notes of the others' errors. ``inline=False`` keeps the threads in
    which each rank's transfers run. The bytes are added to ``traffic``. ``numbers`` are the ranks' numbers in a larger
    process group.
    """
    while len(_threads) < world_size:
        _threads.append(_RankThread())
    world = World(numbers or range(world_size), seed, traffic or Traffic())
    results: dict[int, T] = {}
    errors: dict[int, BaseException] = {}
    done: queue.SimpleQueue[int] = queue.SimpleQueue()

    def run(rank: int) -> None:
        _here.world, _here.rank, _here.calls, _here.plans, _here.connected = world, rank, 0, 0, True
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
    # Prefer the error of a failed rank: that another rank is stuck is only its effect.
    first = min(errors, key=lambda rank: (isinstance(errors[rank], Stuck), rank))
    for rank in errors.keys() - {first}:
        errors[first].add_note(f"rank {rank}: {errors[rank]!r:.300}")
    errors[first].add_note(f"(on simulated rank {first})")
    raise errors[first]


class MemoryStore(Store):
    """Objects in a dict. Counts the writes of each key, and records the byte ranges of its reads."""

    url = "memory"
    is_local = False

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.writes: Counter[str] = Counter()
        self.reads: list[tuple[str, int, int, int]] = []
        """(key, first byte, end, rank) of each read of a part. The rank is valid if transfers run inline."""
        self._lock = threading.Lock()

    def get(self, key: str) -> bytes:
        try:
            return self.objects[key]
        except KeyError:
            raise ObjectNotFoundError(f"{key!r} is absent") from None

    def get_versioned(self, key: str) -> VersionedObject:
        data = self.get(key)
        return VersionedObject(data, data)

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
    """Open every url in one store (default: a new one) during the block."""
    place = MemoryStore() if store is None else store
    with patch.object(StoreSpec, "open", lambda self, **options: place):
        yield place
