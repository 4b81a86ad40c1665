"""Kill ranks of real saves at random moments, and check the stored objects after each kill.

python tools/kill_campaign.py --kills 300                # a temporary folder, and an S3 server started for the campaign
python tools/kill_campaign.py --kills 100 --url s3://bucket/kills --url /mnt/shared/kills

Four processes save a state whose pieces move between them: to a new url, or over a checkpoint that they saved just
before. Each save reuses unchanged chunks of an earlier one. At a random moment of the save, one process or all get
SIGKILL. The others are killed a moment later, as torchrun does it. In a share of the trials they are watched instead
until they notice the loss themselves. After each kill the url must open as the complete old checkpoint, as the complete
new one, or as not committed, without damage. Every few kills the next save must succeed and leave no object of the
killed saves. A ``--url`` must be empty.

Other kills are aimed (``AIMS``): one rank gets SIGKILL at a given step, between the rounds of a save or around its
commit. Then all survivors must end soon and without help: with reports if the save is committed, else with errors.

The command prints a table. It exits with 1 if a check failed or a case took longer than a minute.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import json
import mmap
import multiprocessing
import os
import random
import signal
import statistics
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from enum import IntEnum
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

sys.path.extend(str(Path(__file__).resolve().parents[1] / name) for name in ("", "tests", "tools"))

import torch
import torch.distributed as dist
from harness.merging import MergingOptions
from harness.s3_server import served
from harness.shared_chunks import sharing_small_chunks
from harness.uneven_states import full, mesh_of, same_bits, sharded, uneven_state, uneven_values, uneven_wholes

import zarrckpt
from zarrckpt._commit import attempts
from zarrckpt._save import steps
from zarrckpt._save.exchange import Exchange
from zarrckpt._save.steps import RankSave
from zarrckpt._store import open_store
from zarrckpt._store._archive import SUFFIX

RANKS = 4
WATCHED_SECONDS = 20.0
"""How long survivors are watched."""

LONGEST_SECONDS = 60.0
"""A case that takes longer counts as a hang."""

AGENT_SECONDS = 0.1
"""Interval at which torchrun checks its processes."""

OPTIONS = MergingOptions(fill_bytes=8 << 10, max_inflight_bytes=64 << 10, reuse="on", timeout=15.0)
"""Options of the saves. Pieces move in many bundles, and the timeout is shorter than the time of watching."""

LATE = ("_api", "_checkpoint", "_ops.recover", "_ops.verify", "_store._local", "_store._obstore")
"""Modules of this package that are imported on first use. Import them before the processes fork."""

_context = multiprocessing.get_context("fork")


class Place(IntEnum):
    """Steps of a rank's save. The coordinator's steps are in their order."""

    STARTS = 0
    PLANS = 1
    BEGINS = 2
    SENDS_PLANS = 3
    """The attempt has begun, and the other ranks have not received it yet."""
    AGREED = 4
    WRITES = 5
    EXCHANGES = 6
    WAITS = 7
    """The rank has written, and has not reported it."""
    COUNTS = 8
    ALL_WRITTEN = 9
    """All ranks have received it. No rank has agreed to the commit."""
    COMMITS = 10
    CLEANS = 11
    ANSWERS = 12
    """The save is committed, and the other ranks have not received that yet."""
    RETURNED = 13


class Board:
    """Shared memory in which the ranks of a job mark their steps, with the aim of the next kill."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, mmap.PAGESIZE)
        self._pids = memoryview(self._memory)[64 : 64 + 4 * RANKS].cast("i")
        self._aim: Aim | None = None

    def clear(self, aim: Aim | None) -> None:
        """Reset for a new job, before its processes start."""
        self._memory[: 2 * RANKS] = bytes(2 * RANKS)
        self._aim = aim

    def come(self, rank: int) -> None:
        """Store this process's id. Each rank calls this before it can be killed."""
        self._pids[rank] = os.getpid()

    def mark(self, rank: int, place: Place) -> None:
        self._memory[rank] = place
        if self._aim is not None and (self._aim.at, self._aim.place) == (rank, place):
            os.kill(self._pids[self._aim.victim], signal.SIGKILL)

    def place(self, rank: int) -> Place:
        return Place(self._memory[rank])

    def fail(self, rank: int) -> None:
        self._memory[RANKS + rank] = 1

    def failed(self, rank: int) -> bool:
        return bool(self._memory[RANKS + rank])

    def all_at(self, place: Place) -> bool:
        return all(self.place(rank) >= place for rank in range(RANKS))


@dataclass(frozen=True)
class Aim:
    """A kill at a step: when the rank ``at`` reaches a step, the victim gets SIGKILL."""

    at: int
    place: Place
    victim: int

    @property
    def commits(self) -> bool:
        """Whether the save is committed and the survivors return. If the coordinator lives, later steps also commit."""
        return self.place > Place.COMMITS or (self.place == Place.COMMITS and self.victim != 0)


AIMS = [
    *(Aim(0, place, 0) for place in Place if place not in (Place.STARTS, Place.PLANS, Place.RETURNED)),
    *(Aim(2, place, 2) for place in (Place.AGREED, Place.WRITES, Place.EXCHANGES, Place.WAITS, Place.ALL_WRITTEN)),
    *(Aim(0, place, 3) for place in (Place.SENDS_PLANS, Place.COUNTS, Place.COMMITS, Place.CLEANS, Place.ANSWERS)),
]


# -- the state


def _extra(number: float) -> dict[str, torch.Tensor]:
    """Return tensors of a few KiB, whose pieces move, and larger ones. Half of them never change."""
    small = {f"small.{place}": full((64, 16), (number if place % 2 else 0) + place / 100) for place in range(12)}
    return {**small, "large": full((512, 512), number), "frozen": full((512, 512), 0.5)}


def state_of(number: float) -> dict[str, Any]:
    """Return the state that is saved, of four ranks. Collective."""
    line = mesh_of([*range(RANKS)])
    extra = {name: sharded(whole, line) for name, whole in _extra(number).items()}
    return {**uneven_state(number), "extra": extra}


def wrong_entries(checkpoint: zarrckpt.Checkpoint, number: float) -> list[str]:
    """Return the entries of a checkpoint that differ from ``state_of(number)``."""
    wholes = uneven_wholes(number) | {f"extra.{name}": whole for name, whole in _extra(number).items()}
    values = uneven_values(number)
    found = checkpoint.read()
    wrong = [name for name in wholes.keys() & found if not same_bits(found[name], wholes[name])]
    wrong += [name for name in values.keys() & {*checkpoint.non_tensors} if checkpoint[name] != values[name]]
    return wrong + sorted({*wholes, *values} ^ {*checkpoint})


# -- the ranks


@dataclass(frozen=True)
class Saving:
    """A save of one number by four processes, to a new url or over another number that they save before."""

    url: str
    number: int
    replaces: bool = False

    @property
    def base(self) -> str:
        """The url of the checkpoint that overwrites replace. It is absent in the first trial."""
        return f"{self.url.rpartition('/')[0]}/latest{_suffix(self.url)}"

    def run(self, rank: int, board: Board) -> None:
        """Save. Called on every rank, within their process group."""
        if self.replaces:
            zarrckpt.save(state_of(self.number - 1), self.url, overwrite=True, options=OPTIONS)
        state = state_of(self.number)
        _watch(rank, board)
        dist.barrier()
        board.mark(rank, Place.PLANS)
        with sharing_small_chunks():
            report = zarrckpt.save(state, self.url, overwrite=True, base=self.base, options=OPTIONS)
        board.mark(rank, Place.RETURNED)
        if self.replaces and report.sent_bytes == report.nbytes and not _suffix(self.url):
            raise Wrong("no chunk was reused")
        if zarrckpt.open(self.url).save_id != report.save_id:
            raise Wrong(f"its report is of save {report.save_id}, which is not committed")


def _suffix(url: str) -> str:
    return SUFFIX if url.endswith(SUFFIX) else ""


def _watch(rank: int, board: Board) -> None:
    """Patch the package so that it marks every step of the next save on the board."""

    def marked(owner: Any, name: str, place: Place | None, after: Place | None = None) -> None:
        real = getattr(owner, name)

        def call(*args: Any, **options: Any) -> Any:
            if place is not None:
                board.mark(rank, place)
            found = real(*args, **options)
            if after is not None:
                board.mark(rank, after)
            return found

        setattr(owner, name, call)

    marked(attempts, "begin", Place.BEGINS, Place.SENDS_PLANS)
    marked(steps, "agree", None, Place.AGREED)
    marked(RankSave, "write", Place.WRITES, Place.WAITS)
    marked(Exchange, "_begin_transfer", Place.EXCHANGES)
    marked(Exchange, "_open_message", Place.WRITES)
    marked(RankSave, "finish", Place.COUNTS)
    marked(steps, "_commit_together", Place.ALL_WRITTEN)
    marked(attempts, "commit", Place.COMMITS, Place.CLEANS)
    marked(RankSave, "commit", None, Place.ANSWERS)


def _rank(saving: Saving, rank: int, board: Board, port: int, name: str, log: str) -> None:
    with open(log, "a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    try:
        board.come(rank)
        torch.set_num_threads(1)
        server = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
        store = dist.PrefixStore(name, server)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=LONGEST_SECONDS)
        )
        saving.run(rank, board)
    except BaseException:
        board.fail(rank)
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


class Job:
    """Four processes that save."""

    def __init__(self, saving: Saving, board: Board, aim: Aim | None, port: int, name: str, log: str) -> None:
        board.clear(aim)
        self._board = board
        self.processes = [
            _context.Process(target=_rank, args=(saving, rank, board, port, name, log), daemon=True)
            for rank in range(RANKS)
        ]
        for process in self.processes:
            process.start()

    def wait_until(self, place: Place) -> None:
        """Return when all ranks have reached a step. Raise if one ends before."""
        deadline = time.monotonic() + LONGEST_SECONDS
        while not self._board.all_at(place):
            if any(process.exitcode for process in self.processes):
                raise Wrong("a rank failed without being killed")
            if time.monotonic() > deadline:
                raise Wrong(f"hangs: {[self._board.place(rank).name for rank in range(RANKS)]}")
            time.sleep(0.0005)

    def kill(self, ranks: Sequence[int]) -> None:
        for rank in ranks:
            self.processes[rank].kill()
        for rank in ranks:
            self.processes[rank].join()

    def wait_for_death(self, rank: int) -> None:
        """Return when a rank was killed. Raise if it ends in another way or does not end."""
        if not wait([self.processes[rank].sentinel], LONGEST_SECONDS):
            raise Wrong(f"hangs: {[self._board.place(other).name for other in range(RANKS)]}")
        self.processes[rank].join()
        if self.processes[rank].exitcode != -signal.SIGKILL:
            raise Wrong(f"rank {rank} ended before it was killed, with {self.processes[rank].exitcode}")

    def watch(self, seconds: float) -> None:
        """Return when all processes have ended, or after some seconds."""
        end = time.monotonic() + seconds
        while self.running() and time.monotonic() < end:
            self.wait_for_any(end - time.monotonic())

    def running(self) -> list[int]:
        return [rank for rank, process in enumerate(self.processes) if process.exitcode is None]

    def wait_for_any(self, seconds: float) -> None:
        """Return when a running process has ended, or after some seconds. Return at once if none runs."""
        if running := self.running():
            wait([self.processes[rank].sentinel for rank in running], seconds)

    def end(self) -> None:
        self.kill(range(RANKS))
        for process in self.processes:
            process.close()


# -- processes of the campaign


class Wrong(Exception):
    """A check of the campaign failed."""


class Helper:
    """A forked process that answers calls. Its threads and clients do not stay in this process."""

    def __init__(self, work: Callable[[Connection], None]) -> None:
        self._pipe, child = _context.Pipe()
        self._process = _context.Process(target=work, args=(child,), daemon=True)
        self._process.start()
        child.close()

    def receive(self) -> Any:
        if not self._pipe.poll(LONGEST_SECONDS):
            raise Wrong(f"hangs: no answer within {LONGEST_SECONDS} s")
        right, found = self._pipe.recv()
        if not right:
            raise Wrong(found)
        return found

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        self._pipe.send((function, args))
        return self.receive()

    def end(self) -> None:
        self._process.kill()
        self._process.join()


def _rendezvous(pipe: Connection) -> None:
    """Run a TCPStore, as torchrun does."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipe.send((True, server.port))
    with contextlib.suppress(EOFError):
        pipe.recv()


def _answer(pipe: Connection) -> None:
    with contextlib.suppress(EOFError):
        while True:
            function, args = pipe.recv()
            try:
                pipe.send((True, function(*args)))
            except Exception:
                pipe.send((False, traceback.format_exc()))


def look(url: str) -> int | None:
    """Return the number of the checkpoint at a url, or None if none is committed. Raise if it is damaged."""
    try:
        checkpoint = zarrckpt.open(url)
    except zarrckpt.CheckpointNotFoundError:
        return None
    number: int = checkpoint["value"][2]
    if wrong := wrong_entries(checkpoint, number):
        raise Wrong(f"{url}: these entries are not those of save {number}: {wrong}")
    checkpoint.verify().raise_if_damaged()
    return number


def left_beside(url: str) -> list[str]:
    """Return the names in a url's folder, or beside an archive, that do not belong to the committed checkpoint."""
    if _suffix(url):
        return [str(path) for path in Path(url).parent.glob(f"*{Path(url).name}*") if path != Path(url)]
    tree = zarrckpt.open(url).info.tree
    objects, folders = open_store(url).list_dir()
    # The canonical tree has no own folder.
    names = {*objects, *folders} - {"zarr.json", "@zarrckpt", tree} if tree else set()
    # Unfinished files. Those of the root and of the claim are not searched: they are small and rare.
    parts = () if "://" in url else Path(url).glob("[@a-z]*/*/**/.zarrckpt-*.part")
    return sorted({*names, *map(str, parts)})


def erase(url: str) -> list[str]:
    """Remove all objects that saves left at a url. Return the keys that remain, which must be none."""
    with contextlib.suppress(zarrckpt.CheckpointNotFoundError):
        zarrckpt.remove(url)
    if not _suffix(url):
        return [info.key for info in open_store(url).list()]
    # No document names the folder of a save that was killed before its marker was written.
    zarrckpt.recover(url, stopped=True)
    return left_beside(url)


# -- trials


@dataclass
class Kill:
    """One kill and its outcome."""

    url: str
    replaces: bool
    victims: tuple[int, ...]
    place: str
    """The victim's step, or the coordinator's if all were killed."""
    coordinator: str
    """The coordinator's step when the last process had ended."""
    found: str
    """"old", "new", "none"."""
    seconds: float
    noticed: float | None = None
    """Seconds after which the last survivor had ended without help, if that was waited for."""
    unaware: int = 0
    """Number of survivors that had not ended after WATCHED_SECONDS."""
    returned: tuple[int, ...] = ()
    """Survivors whose save returned."""
    raised: tuple[int, ...] = ()
    """Survivors whose save raised an error."""
    aimed: str = ""
    """The step and the rank of an aimed kill."""


@dataclass
class Report:
    """All kills of a campaign."""

    kills: list[Kill] = field(default_factory=list)
    wrongs: list[str] = field(default_factory=list)
    late: int = 0
    """Kills after the end of the save. They are not counted, but the stored objects were checked as well."""
    next_saves: int = 0
    durations: dict[str, float] = field(default_factory=dict)
    longest: float = 0.0

    @property
    def hangs(self) -> int:
        return sum(kill.seconds > LONGEST_SECONDS for kill in self.kills) + sum("hangs" in w for w in self.wrongs)

    def text(self) -> str:
        """Return the campaign as a few tables."""
        lines = [f"{len(self.kills)} kills, {len(self.wrongs)} wrong, {self.hangs} hangs; {self.late} came too late"]
        lines += [f"{self.next_saves} next saves; the longest case took {self.longest:.1f} s", ""]
        lines += [f"a save takes {seconds:.2f} s: {what}" for what, seconds in self.durations.items()]
        found = Counter((kill.place, kill.found) for kill in self.kills)
        lines += ["", f"{'killed while it':<16}{'none':>6}{'old':>6}{'new':>6}"]
        for place in Place:
            counts = [found[place.name, what] for what in ("none", "old", "new")]
            if any(counts):
                lines.append(f"{place.name.lower():<16}" + "".join(f"{count:>6}" for count in counts))
        lines += ["", *self._groups(), *self._survivors(), *self._aimed(), *self.wrongs]
        return "\n".join(lines)

    def _groups(self) -> Iterator[str]:
        groups = Counter(
            (
                "S3" if kill.url.startswith("s3:") else "local files",
                "overwrite" if kill.replaces else "first save",
                "all ranks" if len(kill.victims) > 1 else "the coordinator" if 0 in kill.victims else "another rank",
            )
            for kill in self.kills
        )
        for (where, what, who), count in sorted(groups.items()):
            yield f"{count:>5}  {where}, {what}, {who}"

    def _aimed(self) -> Iterator[str]:
        aimed = Counter(kill.aimed for kill in self.kills if kill.aimed)
        if aimed:
            slowest = max(kill.noticed or 0.0 for kill in self.kills if kill.aimed)
            yield f"\naimed kills, {sum(aimed.values())} of them; the survivors had ended after {slowest:.2f} s at most"
            yield from (f"{count:>5}  {name}" for name, count in aimed.items())

    def _survivors(self) -> Iterator[str]:
        watched = [kill for kill in self.kills if kill.noticed is not None and not kill.aimed]
        if watched:
            aware = sorted(kill.noticed or 0.0 for kill in watched if not kill.unaware)
            shown = f"median {statistics.median(aware):.2f} s, most {aware[-1]:.2f} s" if aware else "none did"
            yield f"\nsurvivors were watched {len(watched)} times: all had noticed in {len(aware)} ({shown})"
            for kill in watched:
                if kill.unaware:
                    yield f"  not by {kill.unaware} after {WATCHED_SECONDS:.0f} s: {kill.victims} {kill.place}"


@dataclass(frozen=True)
class Shares:
    """Shares of the trials in which all ranks are killed, survivors are watched, and the next save is tried."""

    all_ranks: float = 0.3
    watched: float = 0.1
    next_save: float = 0.25


class Campaign:
    """Trials at some urls in turn, first saves and overwrites."""

    def __init__(
        self, urls: Sequence[str], folder: str, seed: int = 0, shares: Shares = Shares(), suffix: str = ""
    ) -> None:
        self._urls = urls
        self._suffix = suffix
        self._random = random.Random(seed)
        self._shares = shares
        self._log = f"{folder}/ranks.log"
        self._board = Board()
        self._rendezvous = Helper(_rendezvous)
        self._port: int = self._rendezvous.receive()
        self._checker = Helper(_answer)
        self._jobs = self._number = 0
        self.report = Report()

    def end(self) -> None:
        self._checker.end()
        self._rendezvous.end()

    def run(self, kills: int, aimed: int, told: Callable[[str], None] = print) -> Report:
        """Run trials: ``kills`` at random moments and ``aimed`` at given steps.

        A failed check is printed at once, and the campaign continues.
        """
        kinds = [(url, replaces) for url in self._urls for replaces in (False, True)]
        for url, replaces in kinds[:kills]:
            target = f"{url}/latest{self._suffix}"
            seconds = statistics.median(self._whole(target, replaces) for _ in range(min(3, 1 + kills // 20)))
            self.report.durations[f"{url}, {'overwrite' if replaces else 'first save'}"] = seconds
        durations = [*self.report.durations.values()]
        trial = 0
        while len(self.report.kills) < kills and len(self.report.wrongs) < 10:
            which = trial % len(durations)
            self._try(trial, *kinds[which], durations[which], None, told)
            trial += 1
            if trial % 50 == 0:
                told(f"{len(self.report.kills)} kills, {len(self.report.wrongs)} wrong")
        for number in range(aimed):
            again, which = divmod(number, len(AIMS))
            self._try(trial + number, *kinds[(which + again) % len(kinds)], 0.0, AIMS[which], told)
        return self.report

    def _try(
        self, trial: int, url: str, replaces: bool, duration: float, aim: Aim | None, told: Callable[[str], None]
    ) -> None:
        began = time.monotonic()
        try:
            self._trial(url, replaces, duration, trial, aim)
        except Wrong as err:
            self.report.wrongs.append(f"trial {trial}, {url}, {'overwrite' if replaces else 'first save'}: {err}")
            told(self.report.wrongs[-1])
        self.report.longest = max(self.report.longest, time.monotonic() - began)

    def _start(self, saving: Saving, aim: Aim | None = None) -> Job:
        self._jobs += 1
        return Job(saving, self._board, aim, self._port, f"job-{self._jobs}", self._log)

    def _whole(self, place: str, replaces: bool = False) -> float:
        """Save without a kill and return its seconds. Check that no object of killed attempts is left."""
        saving = self._saving(place, replaces)
        job = self._start(saving)
        try:
            job.wait_until(Place.PLANS)
            began = time.monotonic()
            job.wait_until(Place.RETURNED)
            seconds = time.monotonic() - began
        finally:
            job.end()
        found, left = self._checker.call(look, place), self._checker.call(left_beside, place)
        if found != saving.number or left:
            raise Wrong(f"save {saving.number} succeeded: found are save {found}, and {left} of others")
        return seconds

    def _saving(self, url: str, replaces: bool) -> Saving:
        self._number += 2
        return Saving(url, self._number, replaces)

    def _trial(self, url: str, replaces: bool, duration: float, trial: int, aim: Aim | None) -> None:
        place = f"{url}/latest{self._suffix}" if replaces else f"{url}/first-{trial}{self._suffix}"
        saving = self._saving(place, replaces)
        began = time.monotonic()
        kill, killed = self._kill(saving, duration) if aim is None else (self._aimed(saving, aim), True)
        found = self._checker.call(look, place)
        names = {saving.number: "new", saving.number - 1: "old", None: "none"}
        kill.found = names.get(found, f"save {found}")
        kill.seconds = time.monotonic() - began
        if killed:
            self.report.kills.append(kill)
        else:
            self.report.late += 1
        self._judge(kill, aim)
        if self._random.random() < self._shares.next_save:
            self._whole(place)
            self.report.next_saves += 1
        if not replaces and (left := self._checker.call(erase, place)):
            raise Wrong(f"remove left {left}")

    def _kill(self, saving: Saving, duration: float) -> tuple[Kill, bool]:
        """Kill within a save. Return the kill, and whether the save was still under way."""
        board, shares, chance = self._board, self._shares, self._random
        everyone = chance.random() < shares.all_ranks
        victims = tuple(chance.sample(range(RANKS), RANKS if everyone else 1))
        watches = not everyone and chance.random() < shares.watched
        job = self._start(saving)
        try:
            job.wait_until(Place.PLANS)
            time.sleep(chance.uniform(0, 1.05 * duration))
            job.kill(victims)
            at = time.monotonic()
            place = board.place(0 if everyone else victims[0])
            if watches:
                job.watch(WATCHED_SECONDS)
            elif not everyone:
                job.wait_for_any(chance.uniform(0, AGENT_SECONDS))
            noticed, unaware = time.monotonic() - at, len(job.running())
        finally:
            job.end()
        kill = self._told(saving, victims, place)
        if watches:
            kill.noticed, kill.unaware = noticed, unaware
        return kill, place is not Place.RETURNED

    def _aimed(self, saving: Saving, aim: Aim) -> Kill:
        """Kill at a step, and watch the others."""
        job = self._start(saving, aim)
        try:
            job.wait_for_death(aim.victim)
            place, at = self._board.place(aim.victim), time.monotonic()
            job.watch(WATCHED_SECONDS)
            noticed, unaware = time.monotonic() - at, len(job.running())
        finally:
            job.end()
        kill = self._told(saving, (aim.victim,), place)
        kill.noticed, kill.unaware = noticed, unaware
        who = "the coordinator" if aim.victim == 0 else "another rank"
        kill.aimed = f"{who} when {'the coordinator' if aim.at == 0 else 'it'} is at {aim.place.name.lower()}"
        return kill

    def _told(self, saving: Saving, victims: tuple[int, ...], place: Place) -> Kill:
        """Return a kill with the steps that the ranks of an ended job marked on the board."""
        board, others = self._board, [rank for rank in range(RANKS) if rank not in victims]
        kill = Kill(saving.url, saving.replaces, victims, place.name, board.place(0).name, "", 0.0)
        kill.returned = tuple(rank for rank in others if board.place(rank) is Place.RETURNED)
        kill.raised = tuple(rank for rank in others if board.failed(rank))
        return kill

    def _judge(self, kill: Kill, aim: Aim | None) -> None:
        """Raise unless the stored checkpoint and the survivors' results fit the coordinator's last step."""
        before = "old" if kill.replaces else "none"
        reached = Place[kill.coordinator]
        allowed = {before} if reached < Place.COMMITS else {"new"} if reached > Place.COMMITS else {before, "new"}
        if kill.found not in allowed:
            raise Wrong(f"the coordinator reached {reached.name}, expected {sorted(allowed)}: {kill}")
        if {*kill.returned} & {*kill.raised} or (kill.returned and kill.found != "new"):
            raise Wrong(f"a report of a save that is not committed: {kill}")
        if aim is not None:
            survivors = tuple(rank for rank in range(RANKS) if rank != aim.victim)
            told = (survivors, ()) if aim.commits else ((), survivors)
            if (kill.found == "new") != aim.commits or (kill.returned, kill.raised) != told:
                raise Wrong(f"expected {'reports' if aim.commits else 'errors'} on all survivors: {kill}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=300, help="number of kills at random moments")
    aims = 4 * len(AIMS)
    parser.add_argument("--aimed", type=int, default=aims, help=f"number of aimed kills; default: {aims}, all of them")
    parser.add_argument("--url", action="append", help="url to save to; default: a temporary folder, and an S3 server")
    parser.add_argument("--archives", action="store_true", help=f"save to names that end with {SUFFIX}")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--watched", type=float, default=Shares.watched, help="share of kills with watched survivors")
    parser.add_argument("--latency", type=float, default=0.002, help="delay of the S3 server, in seconds")
    parser.add_argument("--json", help="file for the result of every kill")
    args = parser.parse_args()
    torch.set_num_threads(1)  # a process that has started OpenMP's threads cannot be forked
    for name in ("torch._dynamo", *(f"zarrckpt.{name}" for name in LATE)):
        importlib.import_module(name)
    gc.freeze()  # a collection in a forked process would copy all of this memory
    with tempfile.TemporaryDirectory(prefix="zarrckpt-kills-") as folder, contextlib.ExitStack() as stack:
        urls = args.url
        if not urls:
            server = stack.enter_context(served(latency=args.latency))
            os.environ |= server.environment
            urls = [f"{folder}/local"] if args.archives else [f"{folder}/local", "s3://bucket/kills"]
        campaign = Campaign(urls, folder, args.seed, Shares(watched=args.watched), SUFFIX if args.archives else "")
        stack.callback(campaign.end)
        report = campaign.run(args.kills, args.aimed)
        if report.wrongs:
            print(Path(folder, "ranks.log").read_text()[-20_000:])
    print(report.text())
    if args.json:
        Path(args.json).write_text(json.dumps(asdict(report), indent=1))
    sys.exit(bool(report.wrongs or report.hangs or report.longest > LONGEST_SECONDS))


if __name__ == "__main__":
    main()
