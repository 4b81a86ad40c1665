"""Pins: a checkpoint in use is neither removed nor replaced, in any order of the calls."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.faulty_store import STOP, Call, Fault, FaultyStore, Stopped
from harness.interleaving import Agent, Exploration, Faults, Judge
from harness.internals import Store
from harness.one_at_a_time import ROOT, Content, Op, Save, Shelf, committed_first, one_thread, running
from harness.s3_server import S3Server

import zarrckpt
from zarrckpt.cli import main

STATE = {"w": torch.arange(4.0), "step": 7}
PINS, RECORD = "@zarrckpt/pins/", "@zarrckpt/removed/zarr.json"


def objects(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_a_pinned_checkpoint_is_neither_removed_nor_replaced(tmp_path: Path) -> None:
    zarrckpt.save(STATE, tmp_path / "a")
    before = objects(tmp_path / "a")
    one, other = zarrckpt.pin(tmp_path / "a", "evaluation of run 7"), zarrckpt.pin(tmp_path / "a")
    own = json.loads((tmp_path / "a" / f"{PINS}{one}/zarr.json").read_bytes())["attributes"]["zarrckpt"]
    assert (own["format"], own["pin"], own["note"]) == (1, one, "evaluation of run 7")
    assert re.fullmatch("[0-9a-f]{32}", one) and one != other
    for refused in (
        lambda: zarrckpt.remove(tmp_path / "a"),
        lambda: zarrckpt.save({"step": 8}, tmp_path / "a", overwrite=True),
        lambda: zarrckpt.async_save({"step": 8}, tmp_path / "a", overwrite=True).result(60),
        lambda: zarrckpt.copy(tmp_path / "a", tmp_path / "a", overwrite=True),
    ):
        with pytest.raises(zarrckpt.CheckpointPinnedError, match=f"evaluation of run 7.*{one}"):
            refused()
        assert zarrckpt.open(tmp_path / "a")["step"] == 7 and zarrckpt.open(tmp_path / "a").verify()
    # Harmless actions succeed, and clean-ups leave the pins.
    zarrckpt.recover(tmp_path / "a", stopped=True)
    assert {key: data for key, data in objects(tmp_path / "a").items() if not key.startswith(PINS)} == before
    zarrckpt.unpin(tmp_path / "a", one)
    with pytest.raises(zarrckpt.CheckpointPinnedError, match=other):
        zarrckpt.remove(tmp_path / "a")
    zarrckpt.unpin(tmp_path / "a", other)
    zarrckpt.unpin(tmp_path / "a", other)
    zarrckpt.save({"step": 8}, tmp_path / "a", overwrite=True)
    assert zarrckpt.remove(tmp_path / "a") > 0 and not (tmp_path / "a").exists()


def test_in_an_object_store(s3_stub: S3Server) -> None:
    place = s3_stub.bucket()
    url, options = place.url("run"), place.storage_options
    zarrckpt.save(STATE, url, storage_options=options)
    pin_id = zarrckpt.pin(url, storage_options=options)
    with pytest.raises(zarrckpt.CheckpointPinnedError):
        zarrckpt.remove(url, storage_options=options)
    zarrckpt.unpin(url, pin_id, storage_options=options)
    assert zarrckpt.remove(url, storage_options=options) > 0


def test_wrong_arguments_are_refused(tmp_path: Path) -> None:
    with pytest.raises(zarrckpt.CheckpointNotFoundError):
        zarrckpt.pin(tmp_path / "nothing")
    assert not (tmp_path / "nothing").exists()
    zarrckpt.save(STATE, tmp_path / "a")
    with pytest.raises(TypeError, match="note"):
        zarrckpt.pin(tmp_path / "a", 7)  # type: ignore[arg-type]
    for no_id in ("", "../../w", "x" * 32):
        with pytest.raises(zarrckpt.CheckpointError, match="no pin's id"):
            zarrckpt.unpin(tmp_path / "a", no_id)
    assert zarrckpt.open(tmp_path / "a").verify() and zarrckpt.remove(tmp_path / "a") > 0


def test_a_damaged_pin_still_protects(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    zarrckpt.save(STATE, tmp_path / "a")
    pin_id = zarrckpt.pin(tmp_path / "a", "who")
    (tmp_path / "a" / f"{PINS}{pin_id}/zarr.json").write_bytes(b"{}")
    with pytest.raises(zarrckpt.CheckpointPinnedError, match=pin_id):
        zarrckpt.remove(tmp_path / "a")
    zarrckpt.pin(tmp_path / "a", "who else")
    with suppress(SystemExit):
        main(["doctor", str(tmp_path / "a")])
    assert re.search(f"pinned: 'a damaged pin' .*{pin_id}.*pinned: 'who else'", capsys.readouterr().out, re.DOTALL)


def test_recover_does_not_finish_the_removal_of_a_pinned_checkpoint(tmp_path: Path) -> None:
    """``recover`` does not finish it, and cancels it if no other process is at work."""

    def crash(call: Call) -> Fault | None:
        return STOP if call.verb == "get" and call.key.startswith(PINS) else None

    zarrckpt.save(STATE, tmp_path / "a")
    pin_id = zarrckpt.pin(tmp_path / "a")
    with pytest.raises(Stopped):
        zarrckpt.remove(FaultyStore(tmp_path / "a", crash))
    assert (tmp_path / "a/@zarrckpt/removed/zarr.json").exists()
    with pytest.raises(zarrckpt.CheckpointPinnedError, match=pin_id):
        zarrckpt.recover(tmp_path / "a")
    zarrckpt.recover(tmp_path / "a", stopped=True)
    assert not (tmp_path / "a/@zarrckpt/removed/zarr.json").exists()
    assert zarrckpt.open(tmp_path / "a").verify()
    with pytest.raises(Stopped):
        zarrckpt.remove(FaultyStore(tmp_path / "a", crash))
    with pytest.raises(zarrckpt.CheckpointRemovedError):  # a checkpoint that is being removed cannot be pinned
        zarrckpt.pin(tmp_path / "a")


# -- orders of two calls


def _pin(store: Store) -> str:
    running.number = 3
    try:
        zarrckpt.pin(store)
    except (zarrckpt.CheckpointNotFoundError, zarrckpt.CheckpointRemovedError, zarrckpt.CheckpointReplacedError):
        return "not pinned"
    return f"pinned {zarrckpt.open(store)['step']}"


def _remove(store: Store) -> str:
    running.number = 1
    try:
        zarrckpt.remove(store)
    except zarrckpt.CheckpointPinnedError:
        return "refused"
    return "removed"


class _Replace(Save):
    """A save over the committed checkpoint."""

    def __call__(self, store: Store) -> str:
        try:
            return super().__call__(store)
        except zarrckpt.CheckpointPinnedError:
            return "refused"


def _recover(store: Store) -> str:
    running.number = 2
    try:
        zarrckpt.recover(store)
    except zarrckpt.CheckpointPinnedError:
        return "refused"
    return "recovered"


def of_no_interest(op: Op) -> bool:
    """Whether the other agents change nothing that an operation reads before the root is gone."""
    return op.verb in ("get", "list", "list_dir") and not (
        op.key in (ROOT, RECORD, "@zarrckpt") or PINS in f"{op.key}/"
    )


OTHERS: dict[str, tuple[list[Any], int | None]] = {
    "a removal": ([_remove], None),
    "an overwrite": ([_Replace], None),
    "a removal that another process goes on with": ([_remove, _recover], 2),
}
"""The agents beside a pin, and the maximum number of their interruptions."""


@pytest.mark.parametrize("name", OTHERS)
def test_a_pinned_checkpoint_exists_in_every_interleaving(name: str) -> None:
    """A pin and others, in every order of their requests: a pinned checkpoint exists."""
    judge = Judge()
    with one_thread():
        base = committed_first()
        codes, bound = OTHERS[name]
        others = [code(1) if code is _Replace else code for code in codes]
        agents = [Agent(code) for code in [_pin, *others]]
        exploration = Exploration(agents, base, Faults(), of_no_interest, bound)

        def at_end(content: Content, ends: list[str]) -> None:
            pinned = any(key.startswith(PINS) and key.count("/") == 3 for key in content)
            assert pinned == ends[0].startswith("pinned")
            if pinned:  # then it is still the pinned one
                assert "zarr.json" in content
                assert zarrckpt.open(Shelf(content).store)["step"] == int(ends[0][-1])

        found = exploration.run(judge.committed, at_end, 10**6)
    assert found.complete and found.states > 100
    assert {("pinned", "refused"), ("not", "won" if _Replace in codes else "removed")} <= {
        (ends[0].split()[0], ends[1]) for ends in found.outcomes
    }
