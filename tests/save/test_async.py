"""``zarrckpt.async_save``: it saves the copy, training continues, and no save is lost at the end."""

from __future__ import annotations

import inspect
import io
import itertools
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from harness.faulty_store import Call, Fault, FaultyStore
from harness.models import make_run, same, snapshot
from harness.ranks import all_ranks_raise, run_ranks
from harness.store_servers import S3Place
from harness.torch_internals import LocalState
from harness.uneven_states import clear, differing, mesh_of, sharded, uneven_state
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper

import zarrckpt
from zarrckpt._save.background import _savers
from zarrckpt._store import _local


def _whole(run: Any) -> dict[str, Any]:
    model, optim = get_model_state_dict(run.model), get_optimizer_state_dict(run.model, run.optim)
    return snapshot({"model": model, "optim": optim, "step": run.step})


def _train_while_saving(kind: str, folder: str, env_url: str | None) -> None:
    run = make_run(kind)
    saved, futures = [], []
    for step in range(3):
        run.train(1)
        saved.append(_whole(run))
        futures.append(zarrckpt.async_save(run.state, f"{env_url or folder}/{step}"))
        # In place, and with collectives of the training.
        run.train(2)
    for step, future in enumerate(futures):
        report = future.result(timeout=60)
        assert report.url == f"{env_url or folder}/{step}" and report.objects > 0
        other = make_run(kind, seed=4, lr=0.3)
        state = other.state
        zarrckpt.load(state, report.url)
        other.resume(state)
        assert same(saved[step], _whole(other)) == [], step


@pytest.mark.parametrize("kind", ["fsdp2", "ddp"])
def test_async_save_saves_the_state_at_the_call(kind: str, tmp_path: Path) -> None:
    run_ranks(_train_while_saving, kind, str(tmp_path), None, world_size=2)


def test_async_save_to_s3(moto_bucket: S3Place) -> None:
    run_ranks(_train_while_saving, "fsdp2", "", moto_bucket.url("run"), world_size=2, env=moto_bucket.environment)


@pytest.mark.filterwarnings("ignore:.*pickle")
def test_values_are_copied_too(tmp_path: Path) -> None:
    inner = torch.ones(2)
    state: dict[str, Any] = {"tuple": (inner, [1]), "shared": _Shared([1])}
    state |= {"list": [1, 2], "deep": {"names": ["a"]}, "w": torch.ones(3).to(torch.bfloat16)}
    state["conjugate"] = torch.tensor([1 + 2j, 3 - 4j]).conj()
    future = zarrckpt.async_save(state, tmp_path / "one")
    state["list"].append(3)
    state["deep"]["names"][0] = "b"
    inner.zero_()
    state["tuple"][1].append(2)
    state["shared"].content.append(2)
    state["w"].zero_()
    state["conjugate"].zero_()
    future.result(timeout=60)
    checkpoint = zarrckpt.open(tmp_path / "one", allow_pickle=True)
    assert checkpoint["list"] == [1, 2] and checkpoint["deep.names"] == ["a"]
    assert checkpoint["tuple"][0].tolist() == [1, 1] and checkpoint["tuple"][1] == checkpoint["shared"].content == [1]
    target = {"w": torch.zeros(3, dtype=torch.bfloat16), "conjugate": torch.zeros(2, dtype=torch.complex64)}
    zarrckpt.load(target, tmp_path / "one")
    assert target["w"].tolist() == [1, 1, 1] and target["conjugate"].tolist() == [1 - 2j, 3 + 4j]


class _Shared:
    """A value whose copy is itself."""

    def __init__(self, content: Any) -> None:
        self.content = content

    def __deepcopy__(self, memo: object) -> _Shared:
        return self


def _stored(call: Callable[[], object], url: Path) -> object:
    """Return the objects that a save stores at its url except the attempt's documents, or its error's
    class and text.
    """
    try:
        call()
    except zarrckpt.CheckpointError as err:
        return type(err), str(err)
    files = {str(path.relative_to(url)): path.read_bytes() for path in url.rglob("*") if path.is_file()}
    root = json.loads(files.pop("zarr.json"))["attributes"]["zarrckpt"]
    return {key: data for key, data in files.items() if not key.startswith("@")}, root["entries"]


_lazy = torch.nn.UninitializedParameter()


@pytest.mark.filterwarnings("ignore:.*pickle")
@pytest.mark.parametrize("in_background", [False, True])
@pytest.mark.parametrize(
    "value",
    [
        ((torch.ones(2, requires_grad=True) * 3).sum(), 1),
        [{}, Counter(), (1, {2})],
        [torch.ones(1), threading.Lock()],
        threading.Lock(),
        (number for number in (1, 2)),
        _Shared([1]),
        _Shared(threading.Lock()),
        io.BytesIO(b"bytes"),
        bytearray(b"bytes"),
        np.str_("nulls\0"),
        list(range(20_000)),
        Counter("aab"),
        lambda: None,
        _lazy,
    ],
    ids=lambda value: type(value).__name__,
)
def test_async_save_accepts_and_refuses_the_same_as_save(value: Any, in_background: bool, tmp_path: Path) -> None:
    state, one, two = {"w": torch.ones(2), "value": value}, tmp_path / "one", tmp_path / "two"
    expected = _stored(lambda: zarrckpt.save(state, one), one)
    # The call itself succeeds: the future has the error.
    future = zarrckpt.async_save(state, two, copy_in_background=in_background)
    assert _stored(lambda: future.result(timeout=60), two) == expected
    assert isinstance(expected[0], dict) or "'value" in expected[1]  # type: ignore[index]


def test_two_background_saves_never_overlap(tmp_path: Path) -> None:
    gate, begun = threading.Event(), threading.Event()
    log: list[str] = []

    def slowly(done: int, total: int) -> None:
        begun.set()
        assert gate.wait(60)
        log.append("first")

    first = zarrckpt.async_save({"w": torch.ones(3)}, tmp_path / "first", progress=slowly)
    assert begun.wait(60)
    second: list[Any] = []

    def save_again() -> None:
        options = {"progress": lambda done, total: log.append("second")}
        second.append(zarrckpt.async_save({"w": torch.ones(3)}, tmp_path / "second", **options))

    caller = threading.Thread(target=save_again)
    caller.start()
    caller.join(0.3)
    assert caller.is_alive() and not first.done() and not (tmp_path / "second").exists()
    gate.set()
    caller.join(60)
    assert first.done() and second[0].result(timeout=60).objects == 1
    assert log == ["first", "second"]


def _collectives_while_saving(folder: str) -> int:
    """Use collectives on both sides all the time. On one group they would be mismatched, and hang."""
    state = {f"t{i}": torch.full((16,), float(i)) for i in range(60)}
    rounds = 0
    for turn in range(3):
        future = zarrckpt.async_save(state, f"{folder}/{turn}")
        while True:
            # Every rank continues until all are done.
            done = torch.tensor(float(future.done()))
            dist.all_reduce(done)
            rounds += 1
            if done == dist.get_world_size():
                break
        future.result()
    return rounds


def test_training_collectives_work_beside_a_save(tmp_path: Path) -> None:
    assert min(run_ranks(_collectives_while_saving, str(tmp_path))) > 10
    for turn in range(3):
        assert zarrckpt.open(tmp_path / str(turn))["t7"][0] == 7


def _buffers() -> set[int]:
    return {buffer.data_ptr() for _, buffer in _savers[os.getpid()]._stager.buffers.values()}


def test_the_copys_memory_is_used_again(tmp_path: Path) -> None:
    state = {f"t{i}": torch.full((1000,), float(i)) for i in range(3)}
    zarrckpt.async_save(state, tmp_path / "1").result(timeout=60)
    first = _buffers()
    kept = [*_savers[os.getpid()]._stager.buffers.values()]  # new memory has other addresses while this lives
    state["t1"] += 1
    zarrckpt.async_save(state, tmp_path / "2").result(timeout=60)
    assert _buffers() == first and len(first) == 3
    assert zarrckpt.open(tmp_path / "1")["t1"][0] == 1 and zarrckpt.open(tmp_path / "2")["t1"][0] == 2
    others = {"new": torch.ones(5), "t0": torch.ones(1000), "t1": torch.ones(1000, dtype=torch.int32)}
    zarrckpt.async_save(others, tmp_path / "3").result(timeout=60)
    assert len(_buffers()) == 3 and len(_buffers() & first) == 1 and len(kept) == 3
    assert zarrckpt.open(tmp_path / "3")["t1"].dtype == "int32"
    zarrckpt.async_save(state, tmp_path / "4", keep_buffers=False).result(timeout=60)
    assert not _buffers() and zarrckpt.open(tmp_path / "4")["t1"][0] == 2


def test_shared_memory_is_copied_once(tmp_path: Path) -> None:
    weight = torch.randn(600, 500)
    state = {"embed": weight, "head": weight.detach(), "turned": weight.T, "bits": weight.view(torch.int32)}
    future = zarrckpt.async_save(state, tmp_path / "one")
    before = weight.clone()
    weight.zero_()
    future.result(timeout=60)
    assert len(_buffers()) == 3
    checkpoint = zarrckpt.open(tmp_path / "one")
    assert (checkpoint["head"][:] == before.numpy()).all() and (checkpoint["turned"][:] == before.T.numpy()).all()
    assert (checkpoint["embed"][:] == before.numpy()).all() and (
        checkpoint["bits"][:1] == before.view(torch.int32)[:1].numpy()
    ).all()


def _in_all_layouts(number: float) -> dict[str, torch.Tensor]:
    """Return tensors of all kinds of strides, from a few bytes to sizes that several threads copy."""
    big = torch.arange(9 << 20, dtype=torch.float32) + number
    return {
        "big": big,
        "big_turned": big.view(1024, -1).T,
        "columns": big.view(1024, -1)[:, 3:900:2],
        "rows": torch.full((3000, 400), number)[::3],
        "expanded": torch.full((4, 1), number).expand(4, 3),
        "channels_last": (torch.rand(2, 3, 4, 5) + number).to(memory_format=torch.channels_last),
        "conjugate": torch.full((3, 2), complex(number, 3)).conj(),
        "negative": torch.full((3, 2), complex(number, 3)).conj().imag,
        "scalar": torch.tensor(number),
        "empty": torch.zeros(0, 4),
        "half": torch.full((5,), number, dtype=torch.bfloat16),
        "trained": torch.full((3,), number, requires_grad=True),
    }


@pytest.mark.parametrize("threads", [1, 2])
def test_tensors_of_every_layout_are_copied(threads: int, tmp_path: Path) -> None:
    set_before = torch.get_num_threads()
    torch.set_num_threads(threads)  # with one, this package's threads make the copies
    try:
        for number in (1.0, 2.0):
            state = _in_all_layouts(number)
            expected = {name: tensor.detach().clone() for name, tensor in state.items()}
            future = zarrckpt.async_save(state, tmp_path / str(number), keep_buffers=number == 1)
            with torch.no_grad():
                for name, tensor in state.items():
                    if name != "expanded":
                        tensor.fill_(-1)
            future.result(timeout=60)
            target = {name: torch.zeros_like(tensor).contiguous() for name, tensor in expected.items()}
            zarrckpt.load(target, tmp_path / str(number))
            assert [name for name in target if not torch.equal(target[name], expected[name])] == []
    finally:
        torch.set_num_threads(set_before)


class _Threads:
    """Used as ``progress``: counts the writing threads. It is so slow that other threads begin if they may."""

    def __init__(self) -> None:
        self.seen: set[int] = set()

    def __call__(self, done: int, total: int) -> None:
        self.seen.add(threading.get_ident())
        time.sleep(0.01)

    def count(self) -> int:
        """Return the number of threads since the last call."""
        found = len(self.seen)
        self.seen.clear()
        return found


def test_training_keeps_a_processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_local, "BESIDE_TRAINING", 1)
    monkeypatch.setattr(_local.LocalStore, "max_concurrency", 4)
    state = {f"t{number}": torch.full((1 << 18,), float(number)) for number in range(16)}
    threads = _Threads()
    zarrckpt.async_save(state, tmp_path / "1", progress=threads).result(timeout=60)
    assert threads.count() == 1
    # The caller's ``concurrency`` is used.
    zarrckpt.async_save(state, tmp_path / "2", progress=threads, options=zarrckpt.SaveOptions(concurrency=3)).result(
        timeout=60
    )
    assert threads.count() > 1
    # A blocking save uses all threads.
    zarrckpt.save(state, tmp_path / "3", progress=threads)
    assert threads.count() > 1
    # Also through the store for tests.
    zarrckpt.async_save(state, FaultyStore(tmp_path / "4"), progress=threads).result(timeout=60)
    assert threads.count() == 1
    for number in "1234":
        assert zarrckpt.open(tmp_path / number)["t7"][0] == 7


def test_async_save_works_in_inference_mode(tmp_path: Path) -> None:
    with torch.inference_mode():
        zarrckpt.async_save({"w": torch.ones(3)}, tmp_path / "1").result(timeout=60)
    state = {"w": torch.full((3,), 2.0, requires_grad=True)}
    zarrckpt.async_save(state, tmp_path / "2").result(timeout=60)
    assert [zarrckpt.open(tmp_path / step)["w"][0] for step in ("1", "2")] == [1, 2]


def _save_what_is_sharded(folder: str) -> list[str]:
    """Save uneven shards, ShardedTensors, DTensors in lists and of several boxes, all changed after the call."""
    rank, mesh = dist.get_rank(), mesh_of([0, 1, 2, 3])
    for number in (1, 2):
        whole = torch.arange(40.0).reshape(8, 5) * number
        parts = LocalShardsWrapper(
            [whole[n : n + 1].clone() for n in (2 * rank, 2 * rank + 1)], [(2 * rank, 0), (2 * rank + 1, 0)]
        )
        wrapped = DTensor.from_local(parts, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride())
        more = {"list": [sharded(whole, mesh), [sharded(whole, mesh, 1)]], "parts": wrapped}
        state = uneven_state(number)
        future = zarrckpt.async_save({**state, **more}, f"{folder}/{number}")
        clear(state)
        for tensor in (*parts.local_shards(), more["list"][0].to_local(), more["list"][1][0].to_local()):
            tensor.fill_(-1)
        future.result(timeout=60)
        checkpoint = zarrckpt.open(f"{folder}/{number}")
        for name in ("list.0", "list.1.0", "parts"):
            assert (checkpoint[name][:] == whole.numpy()).all(), name
    return differing(f"{folder}/2", 2)


def test_sharded_tensors_are_copied(tmp_path: Path) -> None:
    for wrong in run_ranks(_save_what_is_sharded, str(tmp_path)):
        assert wrong == ["list.0", "list.1.0", "parts"]  # the uneven state has none of them


def _save_what_cannot_be(url: str) -> list[str]:
    mesh = mesh_of([0, 1])
    messages = []
    for bad in (
        DTensor.from_local(torch.ones(2), mesh, [Partial()]),
        torch.ones(2, device="meta"),
        torch.eye(2).to_sparse(),
        (zarrckpt.PerRank(torch.ones(2)),),
    ):
        with pytest.raises(zarrckpt.UnsupportedValueError) as caught:
            zarrckpt.async_save({"fine": torch.ones(2), "bad": bad}, url).result(timeout=60)
        messages.append(str(caught.value))
    return messages


def test_async_save_refuses_what_save_refuses(tmp_path: Path) -> None:
    for messages in run_ranks(_save_what_cannot_be, str(tmp_path / "one"), world_size=2):
        assert all("'bad'" in message for message in messages[:3]), messages
    assert not (tmp_path / "one" / "zarr.json").exists()


class Slow:
    """A value that waits until it may be encoded, or cannot be encoded."""

    may = threading.Event()
    fails = False

    def __reduce__(self) -> tuple[type, tuple[()]]:
        assert self.may.wait(60)
        if self.fails:
            raise RuntimeError("cannot be copied")
        return Slow, ()


@pytest.mark.filterwarnings("ignore:.*pickle")
def test_a_copy_in_the_background_is_waited_for(tmp_path: Path) -> None:
    weights = torch.arange(1000.0)
    state = {"w": weights, "slow": Slow()}
    Slow.may.clear()
    future = zarrckpt.async_save(state, tmp_path / "one", copy_in_background=True)
    with pytest.raises(TimeoutError):
        future.copied(timeout=0.05)
    assert not future.done()
    Slow.may.set()
    future.copied(timeout=60)
    weights.zero_()
    assert future.result(timeout=60).objects == 2
    assert torch.equal(torch.from_numpy(zarrckpt.open(tmp_path / "one")["w"][:]), torch.arange(1000.0))


def test_a_failed_background_copy_is_raised_by_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Slow, "fails", True)
    Slow.may.set()
    future = zarrckpt.async_save({"slow": Slow()}, tmp_path / "one", copy_in_background=True)
    future.copied(timeout=60)
    with pytest.raises(zarrckpt.UnsupportedValueError, match=r"'slow'.*cannot be copied"):
        future.result(timeout=60)
    refused = zarrckpt.async_save({"w": torch.eye(2).to_sparse()}, tmp_path / "one", copy_in_background=True)
    refused.copied(timeout=60)
    with pytest.raises(zarrckpt.UnsupportedValueError):
        refused.result(timeout=60)
    zarrckpt.async_save({"w": torch.ones(2)}, tmp_path / "one").copied(timeout=0)


def _copy_in_background(url: str) -> list[bool]:
    mesh = init_device_mesh("cpu", (2,))
    same = []
    for number in range(3):
        whole = torch.arange(64.0).reshape(8, 8) + number
        weight = distribute_tensor(whole, mesh, [Shard(0)])
        future = zarrckpt.async_save({"w": weight, "step": number}, f"{url}/{number}", copy_in_background=True)
        future.copied(timeout=60)
        weight.to_local().zero_()
        future.result(timeout=60)
        target = {"w": distribute_tensor(torch.zeros(8, 8), mesh, [Shard(1)]), "step": -1}
        zarrckpt.load(target, f"{url}/{number}")
        same.append(torch.equal(target["w"].full_tensor(), whole) and target["step"] == number)  # type: ignore[attr-defined]
    return same


def test_ranks_copy_in_the_background(tmp_path: Path) -> None:
    assert run_ranks(_copy_in_background, str(tmp_path), world_size=2) == [[True] * 3] * 2


def test_async_save_has_the_arguments_of_save() -> None:
    of_save, own = (inspect.signature(f).parameters for f in (zarrckpt.save, zarrckpt.async_save))
    assert [*own] == [*of_save, "keep_buffers", "copy_in_background"]
    for name, parameter in of_save.items():
        assert (own[name].kind, own[name].default) == (parameter.kind, parameter.default), name


def test_meaningless_timeouts_are_refused_by_name(tmp_path: Path) -> None:
    state = {"w": torch.ones(3)}
    zarrckpt.save(state, tmp_path / "one", options=zarrckpt.SaveOptions(timeout=1))
    calls: list[Any] = [
        lambda timeout: zarrckpt.save(state, tmp_path / "two", options=zarrckpt.SaveOptions(timeout=timeout)),
        lambda timeout: zarrckpt.async_save(state, tmp_path / "two", options=zarrckpt.SaveOptions(timeout=timeout)),
        lambda timeout: zarrckpt.load(state, tmp_path / "one", options=zarrckpt.LoadOptions(timeout=timeout)),
        lambda timeout: zarrckpt.plan_report(state, options=zarrckpt.SaveOptions(timeout=timeout)),
    ]
    wrong: list[Any] = [0, -1, -0.5, 1e9, float("inf"), float("nan"), "8", None, True, timedelta(seconds=1)]
    for call, timeout in itertools.product(calls, wrong):
        numeric = isinstance(timeout, int | float) and not isinstance(timeout, bool)
        with pytest.raises(ValueError if numeric else TypeError, match="timeout must be"):
            call(timeout)
    assert not (tmp_path / "two").exists()
    zarrckpt.async_save(state, tmp_path / "two", options=zarrckpt.SaveOptions(timeout=0.5)).result(timeout=60)
    zarrckpt.load(state, tmp_path / "two", options=zarrckpt.LoadOptions(timeout=1))


def _errors_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "zarrckpt"]


def test_an_error_that_no_call_received_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    state = {"w": torch.ones(3)}
    odd = {"odd": torch.eye(2).to_sparse()}
    forgotten = zarrckpt.async_save(odd, tmp_path / "one")
    with caplog.at_level(logging.ERROR, "zarrckpt"):
        asked = zarrckpt.async_save(odd, tmp_path / "one")
        assert forgotten.done()
        (message,) = _errors_in(caplog)
        assert "UnsupportedValueError" in message and str(tmp_path / "one") in message
        assert isinstance(asked.exception(timeout=60), zarrckpt.UnsupportedValueError)
        zarrckpt.async_save(state, tmp_path / "two").result(timeout=60)
    assert len(_errors_in(caplog)) == 1


def test_a_save_is_not_cancelled(tmp_path: Path) -> None:
    future = zarrckpt.async_save({"w": torch.ones(3)}, tmp_path / "one")
    assert not future.cancel() and future.result(timeout=60).objects == 1


def test_the_future_raises_errors(tmp_path: Path) -> None:
    state = {"w": torch.ones(3)}
    zarrckpt.async_save(state, tmp_path / "one").result(timeout=60)
    looks: list[str] = []

    def commits_first(call: Call) -> Fault | None:
        """Let another save commit after the call has looked and before the save begins."""
        if call.key == "zarr.json" and call.verb == "get":
            looks.append(call.verb)
            if len(looks) == 2:
                zarrckpt.save(state, tmp_path / "late")
        return None

    late = zarrckpt.async_save(state, FaultyStore(tmp_path / "late", commits_first))
    with pytest.raises(zarrckpt.CheckpointExistsError, match="Checkpoint already exists"):
        late.result(timeout=60)
    sparse = zarrckpt.async_save({"odd": torch.eye(2).to_sparse()}, tmp_path / "two")
    with pytest.raises(zarrckpt.UnsupportedValueError, match="'odd'"):
        sparse.result(timeout=60)
    assert zarrckpt.async_save(state, tmp_path / "two").result(timeout=60).objects == 1
    over = zarrckpt.async_save({"w": torch.zeros(3)}, tmp_path / "one", overwrite=True)
    over.result(timeout=60)
    assert zarrckpt.open(tmp_path / "one")["w"][0] == 0
    with pytest.raises(TypeError):
        zarrckpt.async_save(state, tmp_path / "three", no_such_option=1)


def _save_over(url: str) -> None:
    zarrckpt.async_save({"w": torch.ones(3)}, url).result(timeout=60)
    store = FaultyStore(url)
    with pytest.raises(zarrckpt.CheckpointExistsError, match="Checkpoint already exists"):
        zarrckpt.async_save({"w": torch.ones(3)}, store)
    assert [(call.verb, call.key) for call in store.calls] == [("get", "zarr.json")] * (dist.get_rank() == 0)
    # The group is unchanged, and so is the memory of the copy.
    zarrckpt.async_save({"w": torch.zeros(3)}, url, overwrite=True).result(timeout=60)
    assert zarrckpt.open(url)["w"][0] == 0


def test_a_committed_checkpoint_is_found_in_the_call(tmp_path: Path) -> None:
    run_ranks(_save_over, str(tmp_path / "one"), world_size=2)

    def no_answer_at_first(call: Call) -> Fault | None:
        return Fault.FAIL if call.number == 0 else None

    store = FaultyStore(tmp_path / "two", no_answer_at_first)
    zarrckpt.async_save({"w": torch.ones(3)}, store).result(timeout=60)
    assert zarrckpt.open(tmp_path / "two")["w"][0] == 1


def _fail_on_one_rank(url: str) -> None:
    odd = torch.eye(2).to_sparse() if dist.get_rank() == 1 else torch.eye(2)
    try:
        zarrckpt.async_save({"odd": odd}, url).result(timeout=30)
    finally:
        dist.barrier()
        zarrckpt.async_save({"odd": torch.eye(2)}, url).result(timeout=30)


def test_an_error_on_one_rank_is_raised_by_every_future(tmp_path: Path) -> None:
    message = all_ranks_raise(zarrckpt.UnsupportedValueError, _fail_on_one_rank, str(tmp_path / "one"))
    assert "'odd'" in message
    assert zarrckpt.open(tmp_path / "one")["odd"][0, 0] == 1


def _some_ranks(folder: str) -> None:
    group = dist.new_group([1, 3])
    if dist.get_rank() in (1, 3):
        state = {"w": torch.arange(4.0), "who": "two"}
        futures = [zarrckpt.async_save(state, f"{folder}/{i}", process_group=group) for i in range(2)]
        assert [len(future.result(timeout=60).rank_bytes) for future in futures] == [2, 2]
    zarrckpt.async_save({"w": torch.arange(4.0)}, f"{folder}/all").result(timeout=60)


def test_a_sub_group_saves_in_the_background(tmp_path: Path) -> None:
    run_ranks(_some_ranks, str(tmp_path))
    assert zarrckpt.open(tmp_path / "0").info.world_size == 2 and zarrckpt.open(tmp_path / "all").info.world_size == 4


SCRIPT = """
import sys, torch, zarrckpt
state = {f"t{i}": torch.full((1000,), float(i)) for i in range(200)}
if sys.argv[2] == "odd":
    state["odd"] = torch.eye(2).to_sparse()
future = zarrckpt.async_save(state, sys.argv[1])
print("leaving", flush=True)
if sys.argv[2] == "raise":
    raise SystemExit(3)
if sys.argv[2] == "odd":
    import time
    while not future.done():
        time.sleep(0.01)
"""


@pytest.mark.parametrize("how", ["end", "raise"])
def test_the_end_of_the_process_waits_for_the_save(how: str, tmp_path: Path) -> None:
    url = str(tmp_path / "one")
    ended = subprocess.run([sys.executable, "-c", SCRIPT, url, how], capture_output=True, text=True, timeout=120)
    assert ended.returncode == (3 if how == "raise" else 0), ended.stderr
    assert ended.stdout == "leaving\n"
    checkpoint = zarrckpt.open(url)
    assert len(checkpoint) == 200 and (checkpoint["t199"][:] == 199).all()
    if how == "end":
        # It failed before the end, and its result was never requested.
        url = str(tmp_path / "two")
        again = subprocess.run([sys.executable, "-c", SCRIPT, url, "odd"], capture_output=True, text=True, timeout=120)
        *others, last = again.stderr.splitlines()
        assert again.returncode == 0 and last.startswith(f"zarrckpt: the background save to {url} failed"), again.stderr
        assert "UnsupportedValueError: 'odd'" in last and url not in "".join(others), again.stderr


def test_the_call_returns_before_the_save_is_done(tmp_path: Path) -> None:
    gate = threading.Event()
    future = zarrckpt.async_save({"w": torch.ones(3)}, tmp_path / "one", progress=lambda done, total: gate.wait(60))
    assert not future.done()
    time.sleep(0.2)
    with pytest.raises(zarrckpt.CheckpointNotFoundError):
        zarrckpt.open(tmp_path / "one")
    gate.set()
    future.result(timeout=60)
    assert zarrckpt.open(tmp_path / "one")["w"][0] == 1


def _destroy_after_the_call(folder: str) -> None:
    """Plan, connect ranks for their pieces and commit in the background, after the process group is gone."""
    rank, managers, gate, plan = dist.get_rank(), [], threading.Event(), LocalState.from_plain_state

    def when_destroyed(plain: Any) -> LocalState:
        assert gate.wait(60)
        return plan(plain)

    for number in range(3):
        # In another process group the ranks have other numbers.
        rank = 2 - rank
        gate.clear()
        weight = sharded(torch.arange(70.0).reshape(10, 7) + number, mesh_of([0, 1, 2]))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(LocalState, "from_plain_state", when_destroyed)
            future = zarrckpt.async_save({"w": weight}, f"{folder}/{number}")
            managers.append(zarrckpt.CheckpointManager(f"{folder}/run{number}", signals=()))
            dist.destroy_process_group()
            weight.to_local().zero_()
            dist.init_process_group("gloo", init_method=f"file://{folder}/store{number}", rank=rank, world_size=3)
            gate.set()
            assert len(future.result(timeout=60).rank_bytes) == 3
    managers[0].save(1, {"w": torch.ones(2), "number": 3})
    dist.destroy_process_group()
    with pytest.raises(ValueError, match="destroyed"):
        managers[0].save(2, {"w": torch.ones(2)})
    managers[0].close()


def test_a_save_outlives_its_process_group(tmp_path: Path) -> None:
    run_ranks(_destroy_after_the_call, str(tmp_path), world_size=3)
    for number in range(3):
        checkpoint = zarrckpt.open(tmp_path / str(number))
        assert checkpoint["w"][:].ravel().tolist() == [float(number + i) for i in range(70)]
    assert zarrckpt.open(zarrckpt.latest(tmp_path / "run0"))["number"] == 3


def _groups_after_a_save(folder: str) -> None:
    """Make groups of the training program after background saves of some ranks. All ranks must name them the same."""
    rank = dist.get_rank()
    group = dist.new_group([1, 2])
    for number in range(2):
        if rank in (1, 2):
            zarrckpt.async_save({"w": torch.ones(3)}, f"{folder}/{number}", process_group=group).result(timeout=60)
        everyone, some = dist.new_group(), dist.new_group([0, 2])
        total = torch.ones(1)
        dist.all_reduce(total, group=everyone)
        if rank in (0, 2):
            dist.all_reduce(total, group=some)
        assert total == (6 if rank in (0, 2) else 3)
    # A name that torch derives from the ranks. Before 2.14 the two ranks differ after the uneven groups.
    if rank in (1, 2) and torch.__version__ >= "2.14":
        total = torch.ones(1)
        dist.all_reduce(total, group=dist.new_group([1, 2], use_local_synchronization=True))
        assert total == 2


def test_training_makes_groups_after_a_save_of_some_ranks(tmp_path: Path) -> None:
    run_ranks(_groups_after_a_save, str(tmp_path), world_size=3, timeout=30)
    assert [zarrckpt.open(tmp_path / str(number)).info.world_size for number in range(2)] == [2, 2]


def _uneven_groups(folder: str) -> None:
    """Save on ranks that made different numbers of groups. Before 2.14, torch can make no further group of them."""
    group = dist.new_group([1, 2])
    dist.new_group([0, 2])
    if dist.get_rank() != 0:
        for number in range(2):
            url = f"{folder}/{number}"
            zarrckpt.async_save({"w": torch.ones(3)}, url, process_group=group).result(timeout=60)


def test_ranks_with_different_numbers_of_groups_save(tmp_path: Path) -> None:
    run_ranks(_uneven_groups, str(tmp_path), world_size=3, timeout=30)
    assert [zarrckpt.open(tmp_path / str(number)).info.world_size for number in range(2)] == [2, 2]
