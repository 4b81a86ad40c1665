"""Rounds between real processes: their results, and the error of each rank when one fails, dies or is silent."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from harness.ranks import context, run_ranks
from harness.torch_internals import CallGroup, Ranks

from zarrckpt import CheckpointError, KeyMismatchError, StorageError
from zarrckpt._ranks import call_group, joining, links, mesh
from zarrckpt._ranks.errors import LostPeerError, StoppedError
from zarrckpt._ranks.rounds import Rounds, open_rounds

c10d: Any = dist  # its stubs lack the stores

SOON = 5.0
"""Seconds within which all ranks notice that one failed or was killed."""


def apart(function: Callable[..., Any], *args: Any, world_size: int = 4, tcp: bool = False) -> dict[int, Any]:
    """Call ``function(*args)`` in separate processes, which may be killed or stopped. Return the results of the others.

    Processes that end without a signal must end with exit code 0.
    """
    with tempfile.TemporaryDirectory() as folder:
        init = f"tcp://127.0.0.1:{free_port()}" if tcp else f"file://{folder}/store"
        pipes, processes = [], []
        for rank in range(world_size):
            pipe, child = context.Pipe()
            process = context.Process(target=_apart, args=(child, function, args, rank, world_size, init), daemon=True)
            process.start()
            child.close()
            pipes.append(pipe)
            processes.append(process)
        answers: dict[int, Any] = {}
        waiting = {pipe: rank for rank, pipe in enumerate(pipes)}
        end = time.monotonic() + 40
        stopped: set[int] = set()
        while len(waiting) > len(stopped) and time.monotonic() < end:
            for ready in wait([*waiting], 0.2):
                assert isinstance(ready, Connection)
                with contextlib.suppress(EOFError):
                    answers[waiting[ready]] = ready.recv()
                del waiting[ready]
            stopped = {rank for rank in waiting.values() if _is_stopped(processes[rank].pid)}
        for pipe in pipes:
            with contextlib.suppress(OSError):
                pipe.send("leave")
        for rank, process in enumerate(processes):
            if rank in answers:
                process.join(10)
                assert process.exitcode == 0, (rank, process.exitcode)
            process.kill()
            process.join()
        assert len(waiting) == len(stopped), f"no answer from {waiting.values()}"
    return answers


def _apart(pipe: Any, function: Callable[..., Any], args: Any, rank: int, size: int, init: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=init, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    dist.barrier()
    pipe.send(function(*args))
    pipe.recv()


def _is_stopped(pid: int | None) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def me() -> int:
    return dist.get_rank()


def call(name: str = "save to a", timeout: float = 20.0, ranks: Ranks | None = None, **options: Any) -> Any:
    return open_rounds(ranks or Ranks(), name, timeout, **options)


def works(timeout: float = 20.0, ranks: Ranks | None = None) -> bool:
    """Whether a call of all ranks works, in two rounds."""
    with call("the next call", timeout, ranks) as rounds:
        first = rounds.merge("numbers", lambda: rounds.rank, list)
        second = rounds.merge("sums", lambda: rounds.rank, sum)
    return bool(first == [*range(rounds.size)] and second == sum(first))


def error_of(work: Callable[[], Any], kind: type[BaseException] = CheckpointError) -> str:
    try:
        work()
    except kind as err:
        return "\n".join([str(err), *getattr(err, "__notes__", ())])
    raise AssertionError("nothing was raised")


def said(works: Callable[[], Any]) -> tuple[str, float]:
    """Return the error of a call, and the seconds that it took."""
    began = time.monotonic()
    return error_of(works), time.monotonic() - began


def one_round(rounds: Rounds, mine: Callable[[], Any] = lambda: 1, stop: Callable[[], None] | None = None) -> Any:
    return rounds.merge("parts", mine, list, stop)


def in_call(mine: Callable[[], Any], timeout: float = 20.0, stop: Callable[[], None] | None = None) -> Any:
    with call(timeout=timeout) as rounds:
        return one_round(rounds, mine, stop)


@contextlib.contextmanager
def narrow_tree() -> Iterator[None]:
    before, call_group.FANOUT = call_group.FANOUT, 2
    try:
        yield
    finally:
        call_group.FANOUT = before


def kept() -> list[Any]:
    return [slot.mesh for slot in mesh._slots.values() if slot.mesh is not None]


# Results of rounds.


def _agrees() -> list[Any]:
    answers: list[Any] = [works(), kept()[0] is not None]
    first = kept()[0]
    with call() as rounds:
        # Longer than a frame, both ways.
        answers.append(rounds.merge("long", lambda: bytes(1000 * rounds.rank), lambda all: [len(a) for a in all]))
        answers.append(len(rounds.merge("longer", lambda: None, lambda all: bytes(3_000_000))))
    answers.append(kept()[0] is first and first.calls == 2)
    return answers


def test_all_ranks_get_the_answer_over_kept_connections() -> None:
    expected = [True, True, [0, 1000, 2000, 3000], 3_000_000, True]
    assert run_ranks(_agrees) == [expected] * 4


def _agrees_narrow() -> Any:
    with narrow_tree():
        return works() and works() and len(kept()[0].tree.edges)


def test_messages_are_forwarded_along_the_tree() -> None:
    assert run_ranks(_agrees_narrow, world_size=7) == [2, 3, 3, 1, 1, 1, 1]


def test_one_process_raises_errors_unchanged() -> None:
    with open_rounds(Ranks(), "save", 1.0) as rounds:
        assert rounds.merge("a", lambda: 2, lambda all: [*all, 3]) == [2, 3]
        assert error_of(lambda: one_round(rounds, lambda: 1 / 0), ZeroDivisionError) == "division by zero"


def _sub_group_call() -> Any:
    group = dist.new_group([4, 1, 3])
    other = dist.new_group([0, 2])
    ranks = Ranks(group if me() in (1, 3, 4) else other)
    if me() == 3:
        mine: Callable[[], Any] = lambda: 1 / 0  # noqa: E731
        return works(ranks=ranks), error_of(lambda: _fails_in(ranks, mine))
    if me() in (1, 4):
        return works(ranks=ranks), error_of(lambda: _fails_in(ranks, lambda: 1))
    return works(ranks=ranks), works(ranks=ranks)


def _fails_in(ranks: Ranks, mine: Callable[[], Any]) -> None:
    with call(ranks=ranks) as rounds:
        one_round(rounds, mine)


def test_errors_in_a_sub_group_name_global_ranks() -> None:
    failed = (True, "rank 3 failed with ZeroDivisionError: division by zero (failed ranks: 3)")
    assert run_ranks(_sub_group_call, world_size=5) == [(True, True), failed, (True, True), failed, failed]


# Errors of a rank's own work.


class OddError(StorageError):
    """A subclass that other ranks cannot import."""


def _own_error(failing: dict[int, Exception]) -> Any:
    cause = OSError("the cause")

    def mine() -> int:
        if me() in failing:
            raise failing[me()] from cause
        return 1

    try:
        in_call(mine)
    except CheckpointError as err:
        at_own = err is failing.get(me()) and err.__cause__ is cause
        return type(err).__name__, str(err), err.__notes__, at_own, len(kept()) == 1 and works()


def test_an_error_is_raised_by_all_and_keeps_connections() -> None:
    answers = run_ranks(_own_error, {1: StorageError("no space"), 3: KeyMismatchError("b\nc")})
    text = ("StorageError", "no space", ["(failed on rank 1, 3)"])
    assert [answer[:3] for answer in answers] == [text] * 4
    assert [answer[3] for answer in answers] == [False, True, False, False]
    assert all(answer[4] for answer in answers)
    answers = run_ranks(_own_error, {2: OddError("odd"), 3: ValueError("lower ranks first")})
    assert [answer[0] for answer in answers] == ["StorageError", "StorageError", "OddError", "StorageError"]
    assert all(answer[1:3] == ("odd", ["(failed on rank 2, 3)"]) for answer in answers)


def _foreign_error() -> Any:
    try:
        in_call(lambda: [][me()] if me() in (2, 3) else 1)
    except CheckpointError as err:
        return str(err), type(err.__cause__).__name__, hasattr(err, "__notes__")


def test_a_foreign_error_is_the_cause_on_its_rank() -> None:
    text = "rank 2 failed with IndexError: list index out of range (failed ranks: 2, 3)"
    nowhere = (text, "NoneType", False)
    assert run_ranks(_foreign_error) == [nowhere, nowhere, (text, "IndexError", False), nowhere]


def _decide_fails(unsendable: bool) -> Any:
    def decide(parts: list[int]) -> Any:
        if unsendable:
            return lambda: parts
        raise StorageError("not committed")

    def round() -> None:
        with call() as rounds:
            rounds.merge("a", lambda: 1, decide)

    return error_of(round), works()


def test_an_error_in_the_decision_is_raised_by_all() -> None:
    assert run_ranks(_decide_fails, False) == [("not committed\n(failed on rank 0)", True)] * 4
    answers = run_ranks(_decide_fails, True)
    assert all(answer == answers[0] and "sent to another rank" in answer[0] for answer in answers)


def _stopped() -> Any:
    ended = threading.Event()
    stops = []

    def stop() -> None:
        stops.append(threading.current_thread() is not threading.main_thread())
        ended.set()

    def mine() -> int:
        if me() == 3:
            time.sleep(0.3)
            raise StorageError("full")
        if me() == 1:
            return 1  # done already: nothing to stop
        assert ended.wait(20)
        raise LostPeerError("this only follows") if me() == 2 else StoppedError

    with narrow_tree():
        error, took = said(lambda: in_call(mine, stop=stop))
        mesh_before = kept()[0]
        return error, stops, took < SOON, works() and kept()[0] is mesh_before


def test_work_on_other_ranks_stops_if_one_fails() -> None:
    answers = run_ranks(_stopped)
    assert [answer[1] for answer in answers] == [[True], [], [True], []]
    assert all(answer[::2] == ("full\n(failed on rank 3)", True) and answer[3] for answer in answers)


def _leaves() -> Any:
    def rounds_of_all() -> None:
        with call() as rounds:
            one_round(rounds)
            if me() == 2:
                raise StorageError("between rounds")
            one_round(rounds, lambda: time.sleep(0.1))

    return error_of(rounds_of_all, StorageError), works()


def test_an_error_between_rounds_is_raised_by_all() -> None:
    answers = run_ranks(_leaves)
    assert [answer[0].splitlines()[0] for answer in answers] == ["between rounds"] * 4
    assert all(answer[1] for answer in answers)


def _left(leaver: int, long: bool) -> Any:
    with narrow_tree():
        assert works()
        dist.barrier()
        if me() == leaver:
            mesh.close_all_meshes()
        time.sleep(0 if me() == leaver else 0.3 * (me() % 2))
        # Some ranks have begun their work on connections that another rank has left.

        def mine() -> int:
            time.sleep(0.5 if long and me() == 1 else 0)
            return me()

        answers = [in_call(mine) for _ in range(2)]
        return answers == [[*range(6)]] * 2 and kept()[0].calls == 2


def test_all_ranks_rejoin_if_one_closed_kept_connections() -> None:
    for leaver in (0, 5):
        assert run_ranks(_left, leaver, leaver == 5, world_size=6) == [True] * 6


# Ranks that are absent, or make another call.


def _absent(before: bool) -> Any:
    if before:
        assert works()
    error = said(lambda: in_call(lambda: 1, 1.0)) if me() != 2 else None
    if me() == 2:
        time.sleep(2.0)
    return error, works(10)


def test_an_absent_rank_is_named_and_the_next_call_works() -> None:
    for before in (False, True):
        answers = run_ranks(_absent, before)
        for rank in (0, 1, 3):
            text, took = answers[rank][0]
            assert "rank 2 " in text and "rank 1" not in text and 0.9 < took < 4, answers
        assert all(answer[1] for answer in answers)


def _coordinator_absent() -> Any:
    error = said(lambda: in_call(lambda: 1, 1.0)) if me() != 0 else None
    if me() == 0:
        time.sleep(2.0)
    return error, works(10)


def test_an_absent_coordinator_is_named() -> None:
    answers = run_ranks(_coordinator_absent)
    assert all(
        "rank 0 did not make this call" in answers[rank][0][0] and answers[rank][0][1] < 4 for rank in (1, 2, 3)
    ), answers
    assert all(answer[1] for answer in answers)


def _stale_token() -> Any:
    if me() == 0:
        store = dist.distributed_c10d._get_default_store()
        rendezvous = joining._Rendezvous(CallGroup((0, 1, 2, 3), 2, "foreground", "", 1), store, bool)
        store.set(rendezvous._token_keys[2], "of a process that is gone")
    dist.barrier()
    time.sleep(1.0 if me() == 2 else 0)
    return works()


def test_a_stale_token_is_ignored() -> None:
    assert run_ranks(_stale_token) == [True] * 4


# Data that a process in a rank's place may send.


class Bomb:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (self.folder,)


def _impostor(who: int, module: str, function: str, folder: str) -> Any:
    assert works()
    forged = patch.object(importlib.import_module(module), function, lambda _: pickle.dumps(Bomb(folder)))
    with forged if me() == who else contextlib.nullcontext():
        text = error_of(lambda: in_call(lambda: 1))
    dist.barrier()
    return text, works(), os.path.exists(folder)


@pytest.mark.parametrize("who", [0, 2])
@pytest.mark.parametrize("what", ["mesh.encode_message", "rounds.encode"])
def test_a_pickle_instead_of_a_message_is_refused(who: int, what: str, tmp_path: Path) -> None:
    module, _, function = f"zarrckpt._ranks.{what}".rpartition(".")
    answers = run_ranks(_impostor, who, module, function, str(tmp_path / "ran"))
    assert all(works and not ran for _, works, ran in answers)
    others = [text for rank, (text, _, _) in enumerate(answers) if rank != who]
    # A rank whose neighbour has closed its connections for that may name the absent ranks instead.
    assert all(others) and any(f"a message of rank {who} (" in text for text in others), others


def _forged_name(forged: str) -> Any:
    answer = joining._Rendezvous._answer
    with patch.object(joining._Rendezvous, "_answer", lambda rendezvous, _: answer(rendezvous, forged)):
        text = error_of(lambda: in_call(lambda: 1, timeout=2.0 if me() == 0 else 20.0))
    dist.barrier()
    return text, works()


@pytest.mark.parametrize("forged", ["../default_pg", "!\x1b[2Jx"])
def test_a_forged_answer_in_the_store_is_refused(forged: str) -> None:
    answers = run_ranks(_forged_name, forged)
    for text, works_after in answers[1:]:
        assert works_after and "\x1b" not in text and ascii(forged)[2:-1] in text


def _progress() -> Any:
    def mine() -> int:
        if me() == 1:
            for _ in range(12):
                time.sleep(0.15)
                rounds.report_alive()
        return 1

    with call(timeout=0.8) as rounds:
        return one_round(rounds, mine)


def test_work_with_progress_may_take_longer_than_the_timeout() -> None:
    assert run_ranks(_progress) == [[1] * 4] * 4


class Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _warns() -> Any:
    before, call_group.WARN_SECONDS = call_group.WARN_SECONDS, 1.5
    heard = Heard()
    logging.getLogger("zarrckpt").addHandler(heard)
    try:
        time.sleep(2.2 if me() == 3 else 0)
        in_call(lambda: time.sleep(3.0 if me() == 2 else 0), 4.0)
    finally:
        call_group.WARN_SECONDS = before
        logging.getLogger("zarrckpt").removeHandler(heard)
    return heard.lines


def test_the_log_names_missing_ranks() -> None:
    answers = run_ranks(_warns)
    waiting = "save to a: waiting for rank 2 (parts). If only one rank is to make this call, pass no_dist=True"
    joining = (
        "save to a: waiting for rank 3 to make this call. If only one rank is to make this call, pass no_dist=True"
    )
    assert answers == [[joining, waiting], [waiting], [], [waiting]]


# Ranks that are killed, stopped or interrupted.


def _one_is_killed(victim: int, how: int, before: bool, narrow: bool, timeout: float) -> Any:
    with narrow_tree() if narrow else contextlib.nullcontext():
        assert not before or works()
        ended = threading.Event()
        stops: list[float] = []
        calls: list[Rounds] = []

        def mine() -> int:
            if me() == victim:
                time.sleep(0.7)
                os.kill(os.getpid(), how)
            while me() % 2 and not ended.wait(0.1):
                calls[0].report_alive()
            return 1

        def stop() -> None:
            stops.append(time.monotonic())
            ended.set()

        def whole() -> None:
            with call(timeout=timeout) as rounds:
                calls.append(rounds)
                one_round(rounds, mine, stop)

        text, took = said(whole)
        return text, took, len(stops), kept()


def test_all_ranks_name_a_killed_rank_at_once() -> None:
    for victim, before, narrow in ((2, False, False), (0, True, False), (1, True, True)):
        answers = apart(_one_is_killed, victim, signal.SIGKILL, before, narrow, 30.0, world_size=7 if narrow else 4)
        assert len(answers) == (6 if narrow else 3), answers
        for rank, (text, took, stops, left) in answers.items():
            assert f"the connection to rank {victim} was lost (parts)" in text and took < SOON, answers
            assert stops == rank % 2 and left == []


def test_a_stopped_rank_is_named_within_the_timeout() -> None:
    answers = apart(_one_is_killed, 3, signal.SIGSTOP, True, False, 2.0)
    assert len(answers) == 3, answers
    for text, took, _, _ in answers.values():
        assert "rank 3 sent nothing for 2 s" in text and took < 6, answers


def _interrupted(victim: int, joining_too: bool) -> Any:
    if not joining_too:
        assert works()

    def rounds_of_all() -> None:
        # A test run in the background inherits that this signal is ignored.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if me() == victim:
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        if joining_too and me() == 1:
            time.sleep(1.0)
            raise CheckpointError("was interrupted")
        with call(timeout=20) as rounds:
            one_round(rounds, lambda: time.sleep(1.5) if me() == 1 else 1)

    kind = KeyboardInterrupt if me() == victim else CheckpointError
    began = time.monotonic()
    text = error_of(rounds_of_all, kind)
    return text, time.monotonic() - began, works()


def test_an_interrupted_rank_is_named_and_the_next_call_works() -> None:
    for victim, joining_too in ((2, False), (2, True)):
        answers = run_ranks(_interrupted, victim, joining_too)
        for rank, (text, took, after) in enumerate(answers):
            assert after and took < SOON, answers
            if rank != victim and not (joining_too and rank == 1):
                assert text == f"save to a: rank {victim} was interrupted (KeyboardInterrupt)", answers


# The default group, and other threads.


def _made_anew(port: int) -> Any:
    answers = [works()]
    for _ in range(2):
        dist.destroy_process_group()
        time.sleep(0.2)
        init = f"tcp://127.0.0.1:{port}"
        rank, size = int(os.environ.get("R", "0")), 3
        dist.init_process_group("gloo", init_method=init, rank=rank, world_size=size, timeout=timedelta(seconds=20))
        answers.append(works())
    return answers


def _made_anew_apart(port: int) -> Any:
    os.environ["R"] = str(me())
    return _made_anew(port)


def test_calls_work_after_the_default_group_is_recreated() -> None:
    assert apart(_made_anew_apart, free_port(), world_size=3, tcp=True) == dict.fromkeys(range(3), [True] * 3)


def _destroyed_in_mid_call() -> Any:
    with call() as rounds:
        one_round(rounds)
        dist.destroy_process_group()
        channel = rounds.channel()
        after = (rounds.rank + 1) % rounds.size
        sent = channel.send(after, np.full(10, rounds.rank, np.uint8))
        got = channel.recv((rounds.rank - 1) % rounds.size, 10).wait()
        sent.wait()
        return one_round(rounds, lambda: int(got[0])), kept()[0].is_current()


def test_a_call_survives_the_end_of_the_default_group() -> None:
    assert apart(_destroyed_in_mid_call, tcp=True) == dict.fromkeys(range(4), ([3, 0, 1, 2], False))


def _side_by_side() -> Any:
    ended: list[bool] = []

    def background() -> None:
        for _ in range(10):
            with call("in the background", queue="background") as rounds:
                ended.append(one_round(rounds, lambda: me()) == [0, 1, 2])

    thread = threading.Thread(target=background)
    thread.start()
    mine = []
    for _ in range(10):
        mine.append(works())
        dist.all_reduce(torch.ones(1000))
    thread.join()
    return ended == [True] * 10 and mine == [True] * 10 and len(kept()) == 2


def test_background_calls_and_collectives_run_concurrently() -> None:
    assert run_ranks(_side_by_side, world_size=3) == [True] * 3


def _half_posted() -> Any:
    tensor = torch.ones(4)
    work: Any = dist.all_reduce(tensor, async_op=True) if me() != 1 else None
    ended = works()
    if work is None:
        dist.all_reduce(tensor)
    else:
        work.wait()
    return ended and tensor.tolist() == [3.0] * 4


def test_a_call_works_while_a_collective_is_pending() -> None:
    assert run_ranks(_half_posted, world_size=3) == [True] * 3


def _same_ranks_twice() -> Any:
    begun, may_end = threading.Event(), threading.Event()

    def first() -> None:
        with call() as rounds:
            begun.set()
            may_end.wait()
            one_round(rounds)

    thread = threading.Thread(target=first)
    thread.start()
    begun.wait()
    text = error_of(lambda: in_call(lambda: 1, 0.3))
    may_end.set()
    thread.join()
    return "another call of the same ranks" in text and works()


def test_two_calls_of_the_same_ranks_run_in_turn() -> None:
    assert run_ranks(_same_ranks_twice, world_size=2) == [True] * 2


# Pieces.


def _pieces(failing: int | None) -> Any:
    def swap() -> list[int]:
        channel = rounds.channel()
        others = [rank for rank in range(rounds.size) if rank != me()]
        sends, receives = [], []
        for step in range(3):
            if me() == failing and step == 1:
                raise StorageError("full")
            receives += [channel.recv(rank, 1 << 18) for rank in others]
            sends += [channel.send(rank, np.full(1 << 18, 10 * step + me(), np.uint8)) for rank in others]
        for handle in sends:
            handle.wait()
        return [int(handle.wait()[-1]) for handle in receives]

    with call() as rounds:
        one_round(rounds)
        return one_round(rounds, swap)[me()]


def _pieces_fail() -> Any:
    text, took = said(lambda: _pieces(2))
    return text, took < SOON, kept(), _pieces(None)


def test_pieces_arrive_and_end_at_once_if_a_rank_fails() -> None:
    expected = [[10 * step + rank for step in range(3) for rank in range(4) if rank != me] for me in range(4)]
    assert run_ranks(_pieces, None) == expected
    assert run_ranks(_pieces_fail) == [("full\n(failed on rank 2)", True, [], pieces) for pieces in expected]


def _killed_amid_pieces() -> Any:
    def swap() -> int:
        if me() == 3:
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGKILL)
        return int(rounds.channel().recv(3, 10).wait()[0])

    def both() -> None:
        one_round(rounds)
        one_round(rounds, swap)

    with contextlib.suppress(CheckpointError), call(timeout=30) as rounds:
        return said(both)


def test_a_rank_killed_while_sending_pieces_is_named() -> None:
    answers = apart(_killed_amid_pieces)
    assert sorted(answers) == [0, 1, 2]
    for text, took in answers.values():
        assert "the connection to rank 3 was lost" in text and took < SOON, answers


# The environment of the rounds.

SCRIPT = """
import sys, threading, time
import torch.distributed as dist
from zarrckpt._ranks.group import Ranks
from zarrckpt._ranks.rounds import open_rounds
dist.init_process_group("gloo", init_method=sys.argv[1], rank=int(sys.argv[2]), world_size=2)
def calls():
    while True:
        with open_rounds(Ranks(), "save", 20.0) as rounds:
            rounds.merge("a", lambda: 1, sum)
        if sys.argv[3] == "once":
            return
if sys.argv[3] == "once":
    calls()
else:
    threading.excepthook = lambda args: None  # the other's end is an error of this one
    threading.Thread(target=calls, daemon=True).start()
    time.sleep(0.5 + 0.3 * int(sys.argv[2]))
"""


@pytest.mark.parametrize("how", ["once", "amid a call"])
def test_a_process_ends_without_a_crash(how: str, tmp_path: Path) -> None:
    arguments = [[f"file://{tmp_path}/store", str(rank), how] for rank in range(2)]
    command = [sys.executable, "-c", SCRIPT]
    processes = [subprocess.Popen([*command, *args], stderr=subprocess.PIPE) for args in arguments]
    errors = [process.communicate(timeout=30)[1].decode() for process in processes]
    assert [process.returncode for process in processes] == [0, 0], errors
    assert not any("terminate" in error or "FATAL" in error for error in errors), errors


def test_the_address_is_the_one_towards_the_store() -> None:
    store = c10d.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert links.local_address(c10d.PrefixStore("a", store)) == "127.0.0.1"
    assert links.local_address(c10d.HashStore()) is None


def test_a_name_of_loopback_is_not_this_hosts_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(links, "_source_towards", lambda host, port: "127.0.1.1" if host == "here" else "10.1.2.3")
    store = SimpleNamespace(host="here", port=1)
    monkeypatch.setattr(dist, "TCPStore", SimpleNamespace)
    assert links.local_address(store) == "10.1.2.3"


def test_a_store_that_cannot_be_cloned_is_named() -> None:
    with pytest.raises(CheckpointError, match=r"store \(Store\)"):
        links.clone_store(c10d.Store())
