"""``on_event``: each rank gets the events of its saves, loads and deletions, and no event disturbs them."""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness.merging import MergingOptions
from harness.ranks import all_ranks_raise, run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import zarrckpt

Events = list[zarrckpt.Event]

STATE = {"w": torch.arange(1000.0), "bf": torch.ones(7, dtype=torch.bfloat16), "step": 3}


def save_options(events: Events) -> zarrckpt.SaveOptions:
    return zarrckpt.SaveOptions(durable=False, on_event=events.append)


def kinds(events: Sequence[zarrckpt.Event]) -> list[str]:
    return [event.kind for event in events]


def test_a_save_and_a_load_send_their_events(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    url, events = str(tmp_path / "a"), Events()
    with caplog.at_level(logging.INFO, "zarrckpt"):
        saved = zarrckpt.save(STATE, url, metadata={"loss": 2.5}, options=save_options(events))
        loaded = zarrckpt.load(dict(STATE), url, options=zarrckpt.LoadOptions(on_event=events.append))
        dcp.load(dict(STATE), storage_reader=zarrckpt.ZarrStorageReader(url), no_dist=True)
    assert kinds(events) == ["begun", "written", "committed", "begun", "loaded"]
    _, written, committed, _, done = events
    assert written.nbytes == saved.nbytes == committed.nbytes and done.nbytes == loaded.nbytes
    assert committed.report == saved and done.report == loaded and committed.metadata == {"loss": 2.5}
    assert [event.operation for event in events] == ["save"] * 3 + ["load"] * 2
    assert {(event.url, event.rank, event.step, event.error) for event in events} == {(url, 0, None, None)}
    assert 0 < written.seconds <= committed.seconds and done.seconds > 0
    assert saved.root_sha256 == hashlib.sha256((tmp_path / "a" / "zarr.json").read_bytes()).hexdigest()
    # One line for each.
    lines = [(record.levelname, record.message.partition(":")[0]) for record in caplog.records]
    assert lines == [("INFO", f"saved {url}"), ("INFO", f"loaded {url}"), ("INFO", f"loaded {url}")]


def test_a_background_save_sends_the_copy_before_the_data(tmp_path: Path) -> None:
    for in_background in (False, True):
        url, events = str(tmp_path / f"{in_background}"), Events()
        options = save_options(events)
        future = zarrckpt.async_save(STATE, url, options=options, copy_in_background=in_background)
        if not in_background:
            assert kinds(events)[:2] == ["begun", "staged"]
        report = future.result()
        assert kinds(events) == ["begun", "staged", "written", "committed"]
        assert events[1].nbytes == 4014 and events[3].report == report


def unpicklable() -> dict[str, Any]:
    return {"w": torch.ones(2), "lambda": lambda: 0}


def test_a_failure_is_sent_once(tmp_path: Path) -> None:
    url, events = str(tmp_path / "a"), Events()
    zarrckpt.save(STATE, url)
    options, load_options = save_options(events), zarrckpt.LoadOptions(on_event=events.append)
    calls: dict[str, Callable[[], Any]] = {
        "save": lambda: zarrckpt.save(STATE, url, options=options),
        "background, at once": lambda: zarrckpt.async_save(STATE, url, options=options),
        "background, later": lambda: zarrckpt.async_save(unpicklable(), f"{url}-2", options=options).result(),
        "load": lambda: zarrckpt.load(dict(STATE), f"{url}-3", options=load_options),
        "dcp.save": lambda: dcp.save(STATE, storage_writer=zarrckpt.ZarrStorageWriter(url, options=options)),
        "dcp.load": lambda: dcp.load(
            dict(STATE), storage_reader=zarrckpt.ZarrStorageReader(f"{url}-3", options=load_options)
        ),
    }
    for name, call in calls.items():
        events.clear()
        with pytest.raises(BaseException) as raised:  # DCP has a class of its own
            call()
        found = [event for event in events if event.kind == "failed"]
        assert len(found) == 1, (name, kinds(events))
        assert events[0].kind == "begun" and events[-1] is found[0], name
        error = found[0].error
        assert isinstance(error, zarrckpt.CheckpointError) and str(error) in str(raised.value), name


def test_an_error_of_the_callable_is_logged_once_and_not_raised(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(event: zarrckpt.Event) -> None:
        raise RuntimeError(f"cannot report {event.kind}")

    zarrckpt.async_save(STATE, str(tmp_path / "a"), options=zarrckpt.SaveOptions(on_event=fail)).result()
    state = {**STATE, "w": torch.zeros(1000)}
    zarrckpt.load(state, str(tmp_path / "a"), options=zarrckpt.LoadOptions(on_event=fail))
    assert torch.equal(state["w"], STATE["w"])
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
    with pytest.raises(TypeError, match="on_event"):
        zarrckpt.SaveOptions(on_event="print")  # type: ignore[arg-type]


def test_a_manager_sends_steps_and_deletions(tmp_path: Path) -> None:
    events = Events()
    state = dict(STATE)
    keep = zarrckpt.Keep(newest=1)
    with zarrckpt.CheckpointManager(tmp_path, keep=keep, save_every=1, options=save_options(events)) as manager:
        for step in (1, 2, 3):
            manager.step(step, state, metrics={"loss": 1 / step})
        manager.restore(state)
    found = [(event.operation, event.step) for event in events if event.kind in ("committed", "loaded", "deleted")]
    # Deletions run beside the next save.
    assert sorted(found) == [("delete", 1), ("delete", 2), ("load", 3), *(("save", step) for step in (1, 2, 3))]
    assert found.index(("save", 2)) < found.index(("delete", 1))
    metadata = [event.metadata for event in events if event.kind == "committed"]
    assert metadata == [{"step": step, "loss": 1 / step} for step in (1, 2, 3)]
    assert {event.url for event in events if event.step == 2} == {str(tmp_path / "step-00000002")}


def _events_of_ranks(folder: str, fails: bool) -> tuple[list[tuple[str, str, int]], list[int | None]]:
    events = Events()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state: dict[str, Any] = {"w": distribute_tensor(torch.arange(4000.0), mesh, [Shard(0)])}
    if fails and dist.get_rank() == 1:
        state["lambda"] = lambda: 0
    options = MergingOptions(durable=False, min_piece_bytes=0, on_event=events.append)
    load_options = zarrckpt.LoadOptions(on_event=events.append)
    try:
        zarrckpt.save(state, f"{folder}/a", options=options)
        zarrckpt.load(state, f"{folder}/a", options=load_options)
        dcp.save(state, storage_writer=zarrckpt.ZarrStorageWriter(f"{folder}/b", options=options))
        dcp.load(state, storage_reader=zarrckpt.ZarrStorageReader(f"{folder}/b", options=load_options))
    finally:
        found = [(event.operation, event.kind, event.rank) for event in events]
        if fails:
            sent = [kind for _, kind, _ in found if kind != "written"]
            assert sent == ["begun", "failed"], sent
    return found, [event.nbytes for event in events]


def test_each_rank_gets_its_own_events(tmp_path: Path) -> None:
    for rank, (found, nbytes) in enumerate(run_ranks(_events_of_ranks, str(tmp_path), False, world_size=2)):
        native = [("save", "begun"), ("save", "written"), ("save", "committed"), ("load", "begun"), ("load", "loaded")]
        # DCP reports the commit to the coordinator only.
        of_dcp = [event for event in native if rank == 0 or event != ("save", "committed")]
        assert found == [(operation, kind, rank) for operation, kind in [*native, *of_dcp]]
        assert nbytes[:3] == [None, 8004, 16008]
    all_ranks_raise(zarrckpt.UnsupportedValueError, _events_of_ranks, str(tmp_path / "failed"), True, world_size=2)
    for call in ("save", "load", "dcp"):
        ends = run_ranks(_ends_of_refused_options, str(tmp_path), call, world_size=2)
        # DCP does not report errors of other ranks.
        assert ends == ["NoneType" if call == "dcp" else "StorageError", "StorageError"], call


def _ends_of_refused_options(folder: str, call: str) -> str:
    """Pass an option that no local store has on one rank. Return the error in the last event."""
    events = Events()
    refused = {"storage_options": {"no_such_option": 1}} if dist.get_rank() == 1 else {}
    options = zarrckpt.SaveOptions(timeout=20, on_event=events.append)
    load_options = zarrckpt.LoadOptions(timeout=20, on_event=events.append)
    with pytest.raises(BaseException):  # noqa: B017
        if call == "save":
            zarrckpt.save(dict(STATE), f"{folder}/c", options=options, **refused)
        elif call == "load":
            zarrckpt.load(dict(STATE), f"{folder}/a", strict=False, options=load_options, **refused)
        else:
            writer = zarrckpt.ZarrStorageWriter(f"{folder}/d", options=options, **refused)
            dcp.save(dict(STATE), storage_writer=writer)
    return type(events[-1].error).__name__


def test_events_of_a_waiting_call_have_its_seconds(tmp_path: Path) -> None:
    """``staged`` counts the wait for the previous save, and a slow callable does not keep training from the state."""
    events = Events()
    first = zarrckpt.async_save(
        STATE, str(tmp_path / "a"), options=zarrckpt.SaveOptions(on_event=lambda event: time.sleep(0.2))
    )
    zarrckpt.async_save(STATE, str(tmp_path / "b"), options=save_options(events)).result()
    assert first.done() and events[1].kind == "staged" and events[1].seconds > 0.3

    staged, copied = threading.Event(), threading.Event()

    def wait_for_copy(event: zarrckpt.Event) -> None:
        if event.kind == "staged":
            staged.set()
            assert copied.wait(20)

    options = zarrckpt.SaveOptions(on_event=wait_for_copy)
    future = zarrckpt.async_save(STATE, str(tmp_path / "c"), options=options, copy_in_background=True)
    future.copied(20)
    copied.set()
    future.result()
    assert staged.is_set()
