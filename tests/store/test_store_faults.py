"""Stores that fail permanently or sometimes: a save or load succeeds, or every rank soon gets one clear error.

A failed save commits nothing, and the next one works. No error, log or stored object quotes a secret. The stores' own
tests have the faults of single operations. These are the faults of whole saves and loads on several ranks.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import itertools
import logging
import os
import re
import resource
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness.faulty_store import LOSE, SHORTEN, Call, Fault, FaultyStore, Rule, at, never
from harness.ranks import run_ranks
from harness.s3_server import Answer, Request, S3Server, served, xml
from harness.store_servers import free_port
from harness.uneven_states import clear, full, held_of, mesh_of, sharded, uneven_state
from torch.distributed.checkpoint import CheckpointException

import zarrckpt
from zarrckpt import ZarrStorageReader, ZarrStorageWriter

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning"),
]

SECONDS = 20.0
"""Maximum seconds of a failing save or load. Most take less than one. The process group waits for a minute."""

SECRETS = {"key": "AKIASTOREFAULTS00001", "secret": "wJalrXUtnFEMI/K7MDENG+bPxRfi", "token": "FwoGZXIvYXdzEBYaDHqa0AP"}
PAUSES = {"init_backoff": timedelta(milliseconds=10), "max_backoff": timedelta(milliseconds=50), "base": 2}


def options_of(endpoint: str, **more: Any) -> dict[str, Any]:
    """Return options for a server to which a request is sent at most three times."""
    retries = {"max_retries": 2, "retry_timeout": 10, "backoff": PAUSES}
    return {**SECRETS, "endpoint_url": endpoint, "region": "us-east-1", "retry_config": retries, **more}


def state_of(number: float) -> dict[str, Any]:
    """Return pieces that move between two ranks, one tensor of both, and values. Not collective."""
    line = mesh_of([0, 1])
    small = {f"{place}": sharded(full((9, 4), number + place / 10), line) for place in range(4)}
    return {"small": small, "plain": full((5, 2), number), "value": [number, None], "blob": str(number).encode()}


# -- allowed contents of errors, logs and reports


def everything_in(error: BaseException) -> str:
    """Return all texts that a log of the error can show: its traceback, and every linked exception, also of other
    ranks.
    """
    texts = []
    seen: list[BaseException] = []
    todo: list[BaseException | None] = [error]
    while todo:
        item = todo.pop()
        if item is None or any(item is other for other in seen):
            continue
        seen.append(item)
        texts += [*traceback.format_exception(item), str(item), repr(item), repr(vars(item))]
        todo += [item.__cause__, item.__context__]
        if isinstance(item, CheckpointException):
            todo += [err for err, _ in item.failures.values()]
    return "\n".join(texts)


class _Heard(logging.Handler):
    """Keeps every log record of this process at any level, except those of AWS's client at DEBUG."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno > logging.DEBUG or "boto" not in record.name:
            self.lines.append(self.format(record) + repr(record.__dict__))


@contextlib.contextmanager
def collected_output(lines: list[str]) -> Iterator[None]:
    """Add the logs and warnings of a block to ``lines``."""
    heard, root = _Heard(), logging.getLogger()
    level = root.level
    root.addHandler(heard)
    root.setLevel(logging.DEBUG)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield
    finally:
        root.setLevel(level)
        root.removeHandler(heard)
        lines += heard.lines + [str(warning.message) for warning in caught]


def secrets_in(text: str) -> list[str]:
    return [name for name, secret in SECRETS.items() if secret in text]


# -- running a case on all ranks


@dataclass
class Failure:
    """The outcome of a call on one rank."""

    kind: str = ""
    """The error's class, "" if none was raised."""
    is_ours: bool = False
    text: str = ""
    seconds: float = 0.0
    shows: list[str] = field(default_factory=list)
    """The names of the secrets that the error, a log or a warning shows."""


def failure_of(call: Callable[[], Any]) -> Failure:
    """Call, and return the outcome."""
    found, texts = Failure(), list[str]()
    began = time.monotonic()
    try:
        with collected_output(texts):
            call()
    except (Exception, CheckpointException) as err:
        found.kind, found.is_ours, found.text = type(err).__name__, isinstance(err, zarrckpt.CheckpointError), str(err)
        texts.append(everything_in(err))
    found.seconds = time.monotonic() - began
    found.shows = secrets_in("\n".join(texts))
    return found


@dataclass
class Outcome:
    """One case on one rank."""

    name: str
    save: Failure | None = None
    load: Failure | None = None
    opened: bool = False
    """Whether the failed save committed a checkpoint."""
    wrong: list[str] = field(default_factory=list)
    """Wrong entries of the next save and load, without a fault."""


@dataclass(frozen=True)
class Case:
    """A failing store: the ranks on which it fails, in a save, a load or both, and the expected error text."""

    name: str
    says: str
    ranks: tuple[int, ...] = (0, 1)
    hits: tuple[str, ...] = ("save", "load")

    def options(self, good: dict[str, Any], bad: dict[str, Any]) -> dict[str, Any]:
        return bad if dist.get_rank() in self.ranks else good


def opens(url: str, options: Mapping[str, Any]) -> bool:
    try:
        zarrckpt.open(url, **options)
    except zarrckpt.CheckpointNotFoundError:
        return False
    return True


def _case(case: Case, url: str, good: Mapping[str, Any], bad: Mapping[str, Any], broken: Any) -> Outcome:
    """Save and load with a fault, from the options ``bad`` or the context ``broken``, then without it."""
    outcome, mine = Outcome(case.name), dist.get_rank() in case.ranks
    own = bad if mine else good

    def fails(call: Callable[[], Any]) -> Failure:
        with broken() if mine else contextlib.nullcontext():
            found = failure_of(call)
        dist.barrier()
        return found

    if "save" in case.hits:
        outcome.save = fails(lambda: zarrckpt.save(state_of(1), url, **own))
        outcome.opened = opens(url, good)
        dist.barrier()
    zarrckpt.save(state_of(2), url, **good)
    target, expected = state_of(-1), held_of(state_of(2))
    if "load" in case.hits:
        outcome.load = fails(lambda: zarrckpt.load(target, url, **own))
    clear(target)
    zarrckpt.load(target, url, **good)
    outcome.wrong = [name for name, held in held_of(target).items() if held != expected[name]]
    return outcome


def check(cases: Sequence[Case], answers: Sequence[Sequence[Outcome]]) -> None:
    """Check that every rank soon got one right error without a secret, nothing was committed, and the
    next save works.
    """
    for case, row in zip(cases, zip(*answers, strict=True), strict=True):
        for what in ("save", "load"):
            failures = [getattr(outcome, what) for outcome in row if what in case.hits]
            for failure in failures:
                shown = f"{case.name}: {what}: {failure}"
                assert failure.kind == "StorageError" and failure.is_ours and failure.seconds < SECONDS, shown
                assert re.search(case.says, failure.text, re.DOTALL), shown
                assert not failure.shows, shown
                assert failure.text == failures[0].text, shown
        for outcome in row:
            assert not outcome.opened and not outcome.wrong, outcome


# -- servers


@dataclass(frozen=True)
class Wrong:
    """A server's wrong answer: a status, silence, or an answer that a reset cuts short."""

    status: int = 0
    code: str = ""
    silent_seconds: float = 0.0
    cuts: bool = False


class BadServer(S3Server):
    """A second endpoint of a server, on which some requests always fail. Its refusals quote all secrets."""

    def __init__(self, good: S3Server, wrong: Wrong, strikes: Callable[[str, str], bool] = lambda method, path: True):
        super().__init__()
        self.store, self.wrong, self.strikes, self.struck = good.store, wrong, strikes, 0

    def answer(self, request: Request, body: memoryview) -> Answer:
        wrong = self.wrong
        if not self.strikes(request.method, request.target):
            return super().answer(request, body)
        self.struck += 1
        if wrong.cuts:
            answer = super().answer(request, body)
            answer.sent, answer.reset = 2 / 3, True
            return answer
        if wrong.silent_seconds:
            time.sleep(wrong.silent_seconds)
            return Answer(sent=0.0, reset=True)
        quoted = "".join(f"<AWSAccessKeyId>{secret}</AWSAccessKeyId> {secret}" for secret in SECRETS.values())
        return xml(f"<Error><Code>{wrong.code}</Code><Message>{wrong.code}: {quoted}</Message></Error>", wrong.status)


def at_chunks(method: str, path: str) -> bool:
    """Whether a request is for chunks of tensors and blobs: after a save's begin, or after a load's root and table."""
    return "/c." in path and "%40zarrckpt" not in path and "@zarrckpt" not in path


def writing(method: str, path: str) -> bool:
    return method in ("PUT", "POST")


def reading_chunks(method: str, path: str) -> bool:
    return method == "GET" and at_chunks(method, path)


SERVERS: list[tuple[Case, Wrong | None, Callable[[str, str], bool], dict[str, Any]]] = [
    (Case("500", "InternalError"), Wrong(500, "InternalError"), lambda *_: True, {}),
    (Case("500-for-rank-1", "InternalError", ranks=(1,)), Wrong(500, "InternalError"), at_chunks, {}),
    (Case("silent-at-chunks", "Check the endpoint"), Wrong(silent_seconds=4), at_chunks, {"timeout": 0.5}),
    (Case("reset-at-chunks", "Check the endpoint"), Wrong(cuts=True), at_chunks, {}),
    (Case("expired-for-rank-1", "ExpiredToken", ranks=(1,)), Wrong(403, "ExpiredToken"), at_chunks, {}),
    (Case("may-only-read", "AccessDenied.*credentials", hits=("save",)), Wrong(403, "AccessDenied"), writing, {}),
    (Case("may-not-read", "AccessDenied.*credentials", hits=("load",)), Wrong(403, "AccessDenied"), reading_chunks, {}),
    (
        Case("no-bucket", "bucket.*no-bucket"),
        Wrong(404, "NoSuchBucket"),
        lambda *_: True,
        {},
    ),
    (Case("refused-for-rank-1", "Check the endpoint", ranks=(1,)), None, lambda *_: True, {}),
]


def _at_servers(cases: Sequence[Case], good: dict[str, Any], bad: Sequence[dict[str, Any]]) -> list[Outcome]:
    own = {"storage_options": good}
    return [
        _case(case, f"s3://bucket/{case.name}", own, {"storage_options": options}, contextlib.nullcontext)
        for case, options in zip(cases, bad, strict=True)
    ]


def test_servers_that_fail_for_good(s3_stub: S3Server) -> None:
    cases, bad, servers = [], [], []
    with contextlib.ExitStack() as stack:
        for case, wrong, strikes, more in SERVERS:
            endpoint = f"http://127.0.0.1:{free_port()}"
            if wrong is not None:
                servers.append(stack.enter_context(BadServer(s3_stub, wrong, strikes)))
                endpoint = servers[-1].endpoint
            cases.append(case)
            bad.append(options_of(endpoint, **more))
        good = options_of(s3_stub.endpoint)
        check(cases, run_ranks(_at_servers, cases, good, bad, world_size=2, timeout=300))
    assert all(server.struck for server in servers)
    stored = b"".join(item.data for item in s3_stub.objects.values()) + "".join(s3_stub.objects).encode()
    assert not secrets_in(stored.decode("latin-1"))


def _everything_else(endpoint: str, url: str) -> list[str]:
    """Return the names of secrets that errors or reprs of other calls show."""
    options = options_of(endpoint)
    writer = ZarrStorageWriter(url, storage_options=options)
    reader = ZarrStorageReader(url, storage_options=options)
    calls: list[Callable[[], Any]] = [
        lambda: dcp.save({"w": torch.ones(3)}, storage_writer=writer),
        lambda: dcp.load({"w": torch.ones(3)}, storage_reader=reader),
        lambda: zarrckpt.async_save({"w": torch.ones(3)}, url, storage_options=options).result(),
        lambda: zarrckpt.open(url, storage_options=options),
        lambda: zarrckpt.latest(url, storage_options=options),
        lambda: zarrckpt.recover(url, storage_options=options),
        lambda: zarrckpt.remove(url, storage_options=options),
    ]
    found = [failure_of(call) for call in calls]
    assert all(failure.kind in ("StorageError", "CheckpointException") for failure in found), found
    assert all(failure.seconds < SECONDS for failure in found), found
    shown = [name for failure in found for name in failure.shows]
    return shown + secrets_in(repr(writer) + repr(reader) + repr(vars(writer)) + repr(vars(reader)))


def test_no_call_shows_a_secret(s3_stub: S3Server) -> None:
    with BadServer(s3_stub, Wrong(403, "SignatureDoesNotMatch")) as server:
        assert run_ranks(_everything_else, server.endpoint, "s3://bucket/run", world_size=2) == [[], []]


def test_readers_without_ranks_are_told(s3_stub: S3Server) -> None:
    """A failing server is not damage, and must not be reported as damage."""
    good, url = options_of(s3_stub.endpoint), "s3://bucket/run"
    zarrckpt.save({"w": torch.ones(3, 4)}, url, storage_options=good)
    wrongs = (Wrong(500, "InternalError"), Wrong(403, "ExpiredToken"), Wrong(cuts=True))
    for wrong, backend in [*((wrong, "obstore") for wrong in wrongs), (wrongs[1], "fsspec")]:
        with BadServer(s3_stub, wrong, at_chunks) as server:
            region = {"client_kwargs": {"region_name": "us-east-1"}}
            own = {**SECRETS, "endpoint_url": server.endpoint, **region, "backend": "fsspec"}
            bad = own if backend == "fsspec" else options_of(server.endpoint)
            checkpoint = zarrckpt.open(url, storage_options=bad)
            for call in (checkpoint.read, checkpoint.verify, lambda: checkpoint["w"][:]):  # noqa: B023 - called here
                failure = failure_of(call)
                assert failure.kind == "StorageError" and failure.seconds < SECONDS, (wrong, failure)
                assert not failure.shows, (wrong, failure)


# -- a server that fails sometimes


def _again_and_again(url: str, options: dict[str, Any], seed: int) -> list[str]:
    """Save, overwrite and load. Return the entries that differ in a bit from the saved ones."""
    wrong = []
    target = uneven_state(-1)
    for number in range(seed, seed + 2):
        state = uneven_state(number)
        zarrckpt.save(state, url, overwrite=True, storage_options=options)
        for shared in (False, True):
            clear(target)
            zarrckpt.load(target, url, options=zarrckpt.LoadOptions(share_reads=shared), storage_options=options)
            held, expected = held_of(target), held_of(state)
            wrong += [name for name in expected if held[name] != expected[name]]
            wrong += [name for name in ("value", "blob") if target[name] != state[name]]
    return wrong


def test_four_ranks_survive_throttling_and_resets() -> None:
    with served(latency=0.001, throttle=0.2, reset_share=0.02) as server:
        options = server.storage_options
        answers = run_ranks(_again_and_again, "s3://bucket/run", options, 1, world_size=4, timeout=240)
        statuses = server.stats()["statuses"]
        report = zarrckpt.open("s3://bucket/run", storage_options=options).verify()
    assert answers == [[]] * 4
    assert report and report.damages == ()
    assert statuses["503"] > 0.1 * statuses["200"]


# -- a filesystem that fails


@contextlib.contextmanager
def _failing(name: str, number: int, after: int = 0, where: Callable[..., bool] = lambda *_: True) -> Iterator[None]:
    """Make ``os.<name>`` fail after some calls, if ``where`` returns true for its arguments."""
    real, calls = getattr(os, name), itertools.count()

    def call(*args: Any, **options: Any) -> Any:
        if where(*args) and next(calls) >= after:
            raise OSError(number, os.strerror(number))
        return real(*args, **options)

    with patch.object(os, name, call):
        yield


def _makes(path: Any, flags: int = 0, *_: Any) -> bool:
    return bool(flags & os.O_CREAT)


def _of_a_chunk(path: Any, *_: Any) -> bool:
    return "/c." in str(path) and "@zarrckpt" not in str(path)


@contextlib.contextmanager
def _refusing(number: int) -> Iterator[None]:
    with _failing("open", number, where=_makes), _failing("mkdir", number):
        yield


@contextlib.contextmanager
def _small_files() -> Iterator[None]:
    """Let no file grow beyond 100 bytes. The kernel then refuses in the middle of a write."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    # File stores of earlier process groups write when they are freed. If they cannot, they end the process.
    gc.collect()
    gc.disable()
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        gc.enable()


SAVE, LOAD = ("save",), ("load",)

LOCAL: dict[str, tuple[Case, Callable[[], contextlib.AbstractContextManager[None]]]] = {
    case.name: (case, broken)
    for case, broken in [
        (Case("full", "disk is full", hits=SAVE), lambda: _failing("writev", errno.ENOSPC)),
        (Case("full-later", "disk is full", (1,), SAVE), lambda: _failing("writev", errno.ENOSPC, after=3)),
        (Case("full-later-0", "disk is full", (0,), SAVE), lambda: _failing("writev", errno.ENOSPC, after=4)),
        (Case("small-files", "File too large", (1,), SAVE), _small_files),
        (Case("sync-0", "syncing", (0,), SAVE), lambda: _failing("fsync", errno.EIO, after=6)),
        (Case("denied-1", "Permission is denied", (1,), SAVE), lambda: _refusing(errno.EACCES)),
        (Case("no-rename-0", "not permitted", (0,), SAVE), lambda: _failing("replace", errno.EPERM)),
        (
            Case("unreadable", "Permission is denied", (1,), LOAD),
            lambda: _failing("open", errno.EACCES, where=_of_a_chunk),
        ),
        (Case("bad-disk-1", "Input/output error", (1,), LOAD), lambda: _failing("preadv", errno.EIO)),
    ]
}


def _at_disks(folder: str, names: Sequence[str]) -> list[Outcome]:
    return [_case(LOCAL[name][0], f"{folder}/{name}", {}, {}, LOCAL[name][1]) for name in names]


def test_disks_that_fail(tmp_path: Path) -> None:
    names = [*LOCAL]
    check([LOCAL[name][0] for name in names], run_ranks(_at_disks, str(tmp_path), names, world_size=2, timeout=300))
    for name in names:
        tree = zarrckpt.open(tmp_path / name).info.tree
        left = {path.name for path in (tmp_path / name).iterdir()}
        assert not tree or left == {"zarr.json", "@zarrckpt", tree}, name
        assert not [*(tmp_path / name).rglob(".zarrckpt-*")], name


def _as_nobody(folder: str) -> list[Failure]:
    """Save to a read-only folder, and load from a closed one, as a user without rights."""
    zarrckpt.save(state_of(1), f"{folder}/open/warm")
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        return [
            failure_of(lambda: zarrckpt.save(state_of(1), f"{folder}/listed/one")),
            failure_of(lambda: zarrckpt.save(state_of(1), f"{folder}/closed/one")),
            failure_of(lambda: zarrckpt.load(state_of(1), f"{folder}/closed/one")),
        ]
    finally:
        if root:
            os.seteuid(0)


def test_folders_without_permission() -> None:
    """The kernel itself refuses."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        for name, mode in (("open", 0o777), ("listed", 0o555), ("closed", 0o000)):
            Path(folder, name).mkdir()
            os.chmod(Path(folder, name), mode)
        for failures in run_ranks(_as_nobody, folder, world_size=2):
            for failure in failures:
                assert failure.kind == "StorageError" and "Permission is denied" in failure.text, failure
                assert failure.seconds < SECONDS, failure
        os.chmod(Path(folder, "closed"), 0o700)
        assert not [*Path(folder, "listed").iterdir()] and not [*Path(folder, "closed").iterdir()]


# -- names that are too long


def _deep(levels: int) -> dict[str, Any]:
    state: dict[str, Any] = state_of(1)
    for level in range(levels):
        state = {f"{level:03}" + "n" * 200: state}
    return state


def _too_long(url: str, levels: int, options: dict[str, Any]) -> Failure:
    failure = failure_of(lambda: zarrckpt.save(_deep(levels), url, **options))
    with contextlib.suppress(zarrckpt.StorageError):  # there is no such path
        assert not opens(url, options)
    return failure


def _long_keys(method: str, path: str) -> bool:
    return method == "PUT" and len(path.removeprefix("/bucket/")) > 1024


def test_names_that_are_too_long(tmp_path: Path, s3_stub: S3Server) -> None:
    with BadServer(s3_stub, Wrong(400, "KeyTooLongError"), _long_keys) as server:
        remote = {"storage_options": options_of(server.endpoint)}
        cases: list[tuple[str, int, dict[str, Any], str]] = [
            (f"{tmp_path}/{'n' * 300}", 0, {}, "use a shorter path"),
            (f"{tmp_path}/deep", 25, {}, "use a shorter path"),
            ("s3://bucket/deep", 6, remote, "KeyTooLongError"),
        ]
        for url, levels, options, says in cases:
            for failure in run_ranks(_too_long, url, levels, options, world_size=2):
                assert failure.kind == "StorageError" and says in failure.text, failure
                assert failure.seconds < SECONDS, failure
    # The url can be used again, and be removed.
    zarrckpt.recover(tmp_path / "deep", stopped=True)
    zarrckpt.save(_flat(1), tmp_path / "deep")
    zarrckpt.remove(tmp_path / "deep")
    assert not (tmp_path / "deep").exists()
    # One level may have any length.
    zarrckpt.save({"n" * 3000: torch.ones(3)}, tmp_path / "flat")
    assert list(zarrckpt.open(tmp_path / "flat")) == ["n" * 3000]


# -- short reads and stale listings


def _flat(number: float) -> dict[str, Any]:
    return {"w": torch.full((6, 4), float(number)), "deep": {"b": torch.full((3,), float(number))}, "blob": b"12345"}


def _filled(url: str | FaultyStore) -> dict[str, Any]:
    target = {"w": torch.full((6, 4), -1.0), "deep": {"b": torch.full((3,), -1.0)}, "blob": None}
    zarrckpt.load(target, url)
    return target


def same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    tensors = torch.equal(one["w"], other["w"]) and torch.equal(one["deep"]["b"], other["deep"]["b"])
    return tensors and one["blob"] == other["blob"]


@pytest.mark.parametrize("how", ["load", "read", "verify"])
def test_every_short_read_is_noticed(how: str, tmp_path: Path) -> None:
    url = str(tmp_path / "one")
    zarrckpt.save(_flat(1), url)

    def read(store: FaultyStore) -> bool:
        """Whether the read gave the saved state."""
        if how == "load":
            return same(_filled(store), _flat(1))
        checkpoint = zarrckpt.open(store)
        if how == "verify":
            return bool(checkpoint.verify())
        return checkpoint.read()["w"].tobytes() == _flat(1)["w"].numpy().tobytes() and checkpoint["blob"] == b"12345"

    counted = FaultyStore(url, never)
    assert read(counted)
    refused = 0
    for call in counted.calls:
        store = FaultyStore(url, at(call.number, SHORTEN))
        try:
            right = read(store)
        except zarrckpt.CheckpointError:
            right = False
        # A listing is not shortened. ``verify`` reports damage instead of raising.
        assert right == (call.verb == "list"), (how, call)
        refused += not right
    assert refused >= 4


def _short_on_one_rank(url: str) -> tuple[list[Failure], list[str]]:
    zarrckpt.save(state_of(3), url)
    target, failures = state_of(-1), []
    for rank, number in itertools.product((0, 1), (0, 1, 2)):
        rule: Rule = _chunk_reads(number, SHORTEN) if dist.get_rank() == rank else never
        store = FaultyStore(url, rule)
        failures.append(failure_of(lambda: zarrckpt.load(target, store)))  # noqa: B023 - called here
    clear(target)
    zarrckpt.load(target, url)
    held, expected = held_of(target), held_of(state_of(3))
    return failures, [name for name in expected if held[name] != expected[name]]


def _chunk_reads(number: int, fault: Fault) -> Rule:
    """Return a rule that applies a fault to the read of a chunk with this number."""
    counted = itertools.count()

    def rule(call: Call) -> Fault | None:
        return fault if call.verb == "read" and next(counted) == number else None

    return rule


def test_short_reads_on_one_rank_fail_all(tmp_path: Path) -> None:
    for failures, wrong in run_ranks(_short_on_one_rank, str(tmp_path / "one"), world_size=2):
        assert not wrong
        for failure in failures:
            assert failure.is_ours and failure.seconds < SECONDS, failure


def _listing(number: int) -> Rule:
    """Return a rule by which the listing with this number lacks its last entry."""
    counted = itertools.count()
    return lambda call: LOSE if call.verb == "list" and next(counted) == number else None


@dataclass
class _Stale:
    """Saves and clean-ups over a store with stale listings. Tracks which checkpoint is committed."""

    url: str
    store: FaultyStore
    holds: float | None = None
    refused: int = 0

    def do(self, call: Callable[[], Any], after: float | None) -> None:
        """Call, and check that ``after`` is committed if the call succeeds, else the previous checkpoint."""
        try:
            call()
            self.holds = after
        except zarrckpt.CheckpointError:
            self.refused += 1
        if self.holds is None:
            assert not opens(self.url, {})
        else:
            assert same(_filled(self.url), _flat(self.holds))


def test_stale_listings_never_cost_a_checkpoint(tmp_path: Path) -> None:
    number = 0
    while True:
        url = str(tmp_path / str(number))
        stale = _Stale(url, FaultyStore(url, _listing(number), durable=False))
        store = stale.store
        for value in (1, 2, 3):
            stale.do(lambda: zarrckpt.save(_flat(value), store, overwrite=True), value)  # noqa: B023
        stale.do(lambda: zarrckpt.recover(store), stale.holds)  # noqa: B023
        stale.do(lambda: zarrckpt.open(store).verify(quick=True), stale.holds)  # noqa: B023
        # With correct listings again, the next save succeeds.
        zarrckpt.save(_flat(9), url, overwrite=True, options=zarrckpt.SaveOptions(durable=False))
        assert same(_filled(url), _flat(9)) and zarrckpt.open(url).verify()
        assert {path.name for path in Path(url).iterdir()} <= {"@zarrckpt", "zarr.json", zarrckpt.open(url).info.tree}
        if number >= sum(call.verb == "list" for call in store.calls):
            break
        number += 1
    assert number > 10
