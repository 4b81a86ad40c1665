"""Saves and reads over one store in memory that answers one operation at a time.

The caller decides the order of the operations and answers them (see ``interleaving.py``). The content of the store is a
dict that is never changed in place.
"""

from __future__ import annotations

import itertools
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar
from unittest import mock

import torch

import zarrckpt
import zarrckpt._api  # it is imported lazily, and must exist to be patched
import zarrckpt._save.finish
import zarrckpt._save.steps
from harness.internals import Buffer, Listing, ObjectInfo, Store, VersionedObject, in_thread
from harness.shared_chunks import sharing_small_chunks
from harness.torch_internals import LocalState, RankSave
from zarrckpt import ObjectNotFoundError, StorageError, _jobs
from zarrckpt._commit import attempts, marker
from zarrckpt._commit.stored_documents import parse_root_document
from zarrckpt._format import sealed
from zarrckpt._save.agree import plan_alone
from zarrckpt._save.request import SaveRequest
from zarrckpt._store._conditional_puts import ConditionalStore, ConditionSupport
from zarrckpt._store._optional import OptionalRequests

T = TypeVar("T")
Content = dict[str, bytes]
ROOT, CLAIM = "zarr.json", "@zarrckpt/zarr.json"
FIRST = 0
"""The number of the save that is committed before all others, if one is."""


class Op(NamedTuple):
    """One operation on the store: the bytes to write and, for a conditional put, the bytes that must be stored.

    Of a copy, ``data`` is the key of its source.
    """

    verb: str
    key: str
    data: bytes = b""
    version: bytes | None = None


class Failed(NamedTuple):
    """The answer of a store that failed."""

    reason: str


def answer(content: Content, op: Op) -> tuple[Any, Content]:
    """Return the store's answer to an operation, and its content afterwards."""
    verb, key, data, version = op
    if verb == "get":
        return content.get(key), content
    if verb == "list":
        return tuple((name, len(found)) for name, found in sorted(content.items()) if _below(name, key)), content
    if verb == "list_dir":
        rests = sorted({name[len(key) + 1 if key else 0 :] for name in content if _below(name, key)})
        objects = tuple(rest for rest in rests if "/" not in rest)
        return (objects, tuple(dict.fromkeys(rest.split("/")[0] for rest in rests if "/" in rest))), content
    if verb == "copy":
        found = content.get(data.decode())
        return (None, content) if found is None else (len(found), {**content, key: found})
    if verb == "delete":
        return True, {name: found for name, found in content.items() if name != key}
    if (verb == "create" and key in content) or (verb == "replace" and content.get(key) != version):
        return False, content
    return True, {**content, key: data}


def _below(name: str, folder: str) -> bool:
    return not folder or name.startswith(f"{folder}/")


class AskedStore(ConditionalStore):
    """A store that passes each operation to a function that answers it. The package handles lost answers."""

    url = "asked"
    max_concurrency = 1

    def __init__(self, ask: Callable[[Op], Any], folder: str = "") -> None:
        super().__init__(ConditionSupport(True, True))
        self._ask_one = ask
        self._folder = f"{folder}/" if folder else ""

    def at(self, folder: str) -> AskedStore:
        """Return a store of the objects in a folder."""
        return AskedStore(self._ask_one, folder)

    def ask(self, op: Op) -> Any:
        found = self._ask_one(op._replace(key=f"{self._folder}{op.key}".rstrip("/")))
        if isinstance(found, Failed):
            raise StorageError(found.reason)
        return found

    def get(self, key: str) -> bytes:
        data: bytes | None = self.ask(Op("get", key))
        if data is None:
            raise ObjectNotFoundError(f"there is no object {key!r}")
        return data

    def get_versioned(self, key: str) -> VersionedObject:
        data = self.get(key)
        return VersionedObject(data, data)

    def read_into(self, key: str, byte_offset: int, buffer: memoryview) -> None:
        buffer[:] = self.get(key)[byte_offset : byte_offset + len(buffer)]

    def put(self, key: str, buffers: Sequence[Buffer]) -> None:
        self.ask(Op("put", key, b"".join(bytes(buffer) for buffer in buffers)))

    def copies_from(self, source: Store) -> bool:
        return isinstance(source, AskedStore)

    def copy_from(self, source: Store, source_key: str, key: str, nbytes: int, optional: OptionalRequests) -> bool:
        assert isinstance(source, AskedStore)
        found: int | None = self.ask(Op("copy", key, f"{source._folder}{source_key}".encode()))
        return found == nbytes

    def delete(self, keys: Iterable[str]) -> None:
        # In any store, many keys take many requests. Other agents may act in between.
        for key in keys:
            self.ask(Op("delete", key))

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        cut = len(self._folder)
        return (ObjectInfo(name[cut:], nbytes) for name, nbytes in self.ask(Op("list", prefix)))

    def list_dir(self, prefix: str = "") -> Listing:
        objects, folders = self.ask(Op("list_dir", prefix))
        return [*objects], [*folders]

    def sync(self, keys: Iterable[str]) -> None:
        """Do nothing: a sync changes nothing that other agents could see."""

    def put_if_absent(self, key: str, data: bytes) -> bool:
        found: bool = self.ask(Op("create", key, data))
        return found

    def put_if_version(self, key: str, data: bytes, version: Any) -> bool:
        found: bool = self.ask(Op("replace", key, data, version))
        return found


class Shelf:
    """A store that answers from its own content, for code that runs alone."""

    def __init__(self, content: Content) -> None:
        self.content = content
        self.store = AskedStore(self._answer)

    def _answer(self, op: Op) -> Any:
        found, self.content = answer(self.content, op)
        return found


# -- the code that runs


Order = Callable[[list[Any]], list[Any]]
"""The order of jobs that threads would run at the same time."""


class Running:
    """The number of the save that runs, and the order of its jobs."""

    number = FIRST
    order: Order = list


running = Running()


def _run(
    jobs: Iterable[Callable[[], T]], concurrency: object, *, caller_draws: bool = False, on_failure: object = None
) -> list[T]:
    numbered = [*enumerate(jobs)]
    found = {number: job() for number, job in running.order(numbered)}
    return [found[number] for number, _ in numbered]


def _in_thread(call: Callable[[], T], *, at_once: bool = False) -> AbstractContextManager[Callable[[], T]]:
    return in_thread(call, at_once=True)


@contextmanager
def one_thread() -> Iterator[None]:
    """Run all jobs of the package in the calling thread. Saves get ids and times from their numbers.

    Jobs that threads would run at the same time make one request each, so every interleaving of them is an order.
    """
    modules = [module for name, module in sys.modules.items() if name.startswith("zarrckpt.")]
    instead: dict[str, tuple[Any, Any]] = {
        "run_jobs": (_jobs.run_jobs, _run),
        "in_thread": (in_thread, _in_thread),
        "new_id": (marker.new_id, lambda: save_id(running.number)),
        # The record of a removal has the time, which must differ between removals.
        "now": (sealed.now, lambda: f"2026-01-01T00:00:0{running.number}.000000Z"),
    }
    with ExitStack() as patches:
        patches.enter_context(sharing_small_chunks())
        for module, (name, (original, other)) in itertools.product(modules, instead.items()):
            if getattr(module, name, None) is original:
                patches.enter_context(mock.patch.object(module, name, other))
        patches.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        yield


def save_id(number: int) -> str:
    """Return the id of the save with a number."""
    return f"{number + 1:032x}"


def state(number: int) -> dict[str, Any]:
    """Return two chunks of two bytes, and a value, all of which show the number of their save."""
    return {"w": torch.full((4,), number, dtype=torch.uint8), "step": number}


@dataclass
class Save:
    """A save over the stored content, with its plan and the ranks' results prepared: begin, puts, finish, commit.

    The coordinator's part is the package's own code. Planning is left out, because it does not touch the store.
    """

    number: int
    layout: Any = None
    results: Any = None
    puts: Content = field(default_factory=dict)

    def __post_init__(self) -> None:
        shelf, held = Shelf({}), LocalState.from_user_state(state(self.number))
        request = SaveRequest.from_arguments(shelf.store, options=zarrckpt.SaveOptions(max_chunk_bytes=2))
        plan = plan_alone(held, request.options.plan, (0,))
        save = RankSave(request, request.begin_events(0))
        name = save.begin(plan.layout)
        before = shelf.content
        self.layout, self.results = plan.layout, save.write(name, plan.rank_plan(0), held, None, lambda: None)
        self.puts = {key: data for key, data in shelf.content.items() if key not in before}

    def __call__(self, store: Store) -> str:
        running.number = self.number
        request = SaveRequest.from_arguments(store, overwrite=True, options=zarrckpt.SaveOptions(max_chunk_bytes=2))
        save = RankSave(request, request.begin_events(0))
        try:
            name = save.begin(self.layout)
            with attempts.report_lost_commit(store, name):
                self._put(store, name.tree)
            save.commit(save.finish(self.layout, [self.results]))
        except zarrckpt.CheckpointError as err:
            # As zarrckpt.save does on every rank.
            save.abandon()
            if isinstance(err, zarrckpt.CheckpointExistsError):
                return "lost"
            if isinstance(err, StorageError):
                return "failed"
            raise
        return "won"

    def _put(self, store: Store, tree: str) -> None:
        keys = []
        try:
            for key, data in self.puts.items():
                keys.append(f"{tree}/{key}" if tree else key)
                store.put(keys[-1], [data])
        except StorageError:
            with suppress(StorageError):
                store.delete(keys)
            raise


def whole_save(number: int) -> Callable[[Store], str]:
    """Return a save through the public function."""

    def save(store: Store) -> str:
        running.number = number
        try:
            zarrckpt.save(state(number), store, overwrite=True, options=zarrckpt.SaveOptions(max_chunk_bytes=2))
        except zarrckpt.CheckpointExistsError:
            return "lost"
        except StorageError:
            return "failed"
        return "won"

    return save


def read(store: Store) -> str:
    """Open the stored checkpoint and read all of it. Return the number of its save, or the reason for none."""
    try:
        checkpoint = zarrckpt.open(store)
        arrays = checkpoint.read()
    except zarrckpt.CheckpointNotFoundError:
        return "nothing"
    except zarrckpt.CheckpointReplacedError:
        return "replaced"
    except StorageError:
        return "failed"
    number = checkpoint["step"]
    return f"read {number}" if (arrays["w"] == number).all() and len(arrays["w"]) == 4 else "a mixture"


def committed_first() -> Content:
    """Return the content that the first save leaves, for cases in which one is committed before the others begin."""
    shelf = Shelf({})
    assert Save(FIRST)(shelf.store) == "won"
    return shelf.content


# -- promises that must hold


class Broken(AssertionError):
    """A broken promise, and the operations that led to it."""


class Judge:
    """Checks the content of a store, and keeps the results of contents that it has checked."""

    def __init__(self) -> None:
        self._known: dict[frozenset[tuple[str, bytes]], str] = {}
        self._after: set[frozenset[tuple[str, bytes]]] = set()

    def committed(self, content: Content) -> str:
        """Check that the committed checkpoint is whole and of one save. Return the save's id, "" for none. Raises
        Broken.
        """
        if ROOT not in content:
            return ""
        own = parse_root_document(content[ROOT], "")
        prefixes = (f"{own.tree}/", f"@zarrckpt/{own.save_id}/") if own.tree else ("w/", f"@zarrckpt/{own.save_id}/")
        key = frozenset(item for item in content.items() if item[0] in (ROOT, CLAIM) or item[0].startswith(prefixes))
        if key not in self._known:
            self._known[key] = self._read(content, own.save_id)
        return self._known[key]

    @staticmethod
    def _read(content: Content, committed: str) -> str:
        store = Shelf(content).store
        found = read(store)
        numbers = {f"read {number}": save_id(number) for number in range(10)}
        report = zarrckpt.open(store).verify()
        if not report or numbers.get(found) != committed:
            raise Broken(f"save {committed} is committed, but a reader found {found!r}, and {report.damages}")
        return committed

    def can_go_on(self, content: Content, save: Save) -> None:
        """Check that the next save commits over any content, and that recovery leaves only its checkpoint."""
        key = frozenset(content.items())
        if key in self._after:
            return
        self._after.add(key)
        shelf = Shelf(content)
        if save(shelf.store) != "won" or self.committed(shelf.content) != save_id(save.number):
            raise Broken("the next save did not commit")
        zarrckpt.recover(shelf.store, stopped=True)
        tree = zarrckpt.open(shelf.store).info.tree
        own = {key for key in shelf.content if key.startswith(f"@zarrckpt/{save_id(save.number)}/")}
        named = {f"{tree}/{key}" for key in (*save.puts, ROOT)} if tree else {*save.puts}
        if shelf.content.keys() != own | named | {ROOT, CLAIM} or len(own) != 5:
            raise Broken(f"after it there are {sorted(shelf.content)}")

    @property
    def distinct(self) -> int:
        """Return the number of different committed checkpoints that were read."""
        return len(self._known)


def check_outcomes(content: Content, outcomes: Sequence[str]) -> None:
    """Check, after all saves, that those that won are committed one after the other, and the others are not."""
    history: tuple[str, ...] = ()
    if ROOT in content:
        root = parse_root_document(content[ROOT], "")
        history = (root.save_id, *root.history)
    for number, outcome in enumerate(outcomes, FIRST + 1):
        if (outcome == "won") != (save_id(number) in history) and outcome not in ("failed", "dead"):
            raise Broken(f"save {number} ended with {outcome!r}, but the history is {history}")
        if outcome not in ("won", "lost", "failed", "dead"):
            raise Broken(f"save {number} ended with {outcome!r}")
    if len(set(history)) != len(history):
        raise Broken(f"one base was replaced twice: {history}")
    if {*outcomes} == {"lost"}:
        raise Broken("all saves lost")


def check_reads(outcomes: Sequence[str]) -> None:
    """Check that each reader read one whole save, or got the error that there is none or that it was replaced."""
    for outcome in outcomes:
        if outcome not in ("nothing", "replaced", "failed") and not outcome.startswith("read "):
            raise Broken(f"a reader ended with {outcome!r}")
