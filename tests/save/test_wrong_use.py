"""Wrong arguments, states and targets, and interrupts: each is named before it does harm."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness.ranks import run_ranks
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

import zarrckpt
from zarrckpt._state import objects


@pytest.mark.parametrize("name", ["concurrency", "max_inflight_bytes", "max_chunk_bytes"])
def test_meaningless_limits_are_refused_by_name(name: str, tmp_path: Path) -> None:
    one: dict[str, Any] = {name: 1}
    zarrckpt.save({"w": torch.ones(3)}, tmp_path / "one", options=zarrckpt.SaveOptions(**one))
    for value, error in {0: ValueError, -1: ValueError, 1.5: TypeError, "8": TypeError}.items():
        wrong: dict[str, Any] = {name: value}
        with pytest.raises(error, match=name):
            zarrckpt.SaveOptions(**wrong)
        if name != "max_chunk_bytes":
            with pytest.raises(error, match=name):
                zarrckpt.LoadOptions(**wrong)


def test_flags_of_options_are_bools_and_a_mapping_is_copied() -> None:
    with pytest.raises(TypeError, match="durable"):
        zarrckpt.SaveOptions(durable="no")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="share_reads"):
        zarrckpt.LoadOptions(share_reads=1)  # type: ignore[arg-type]
    compression = {"name": "zstd", "level": 3}
    options = zarrckpt.SaveOptions(compression=compression)
    compression["name"] = "other"
    assert options.compression == {"name": "zstd", "level": 3}


CALLS: dict[str, Callable[..., object]] = {
    "SaveOptions": lambda state, url, options: zarrckpt.save(state, url, options=options),
    "SaveOptions of async_save": lambda state, url, options: zarrckpt.async_save(state, url, options=options),
    "SaveOptions of plan_report": lambda state, url, options: zarrckpt.plan_report(state, options=options),
    "SaveOptions of the writer": lambda state, url, options: zarrckpt.ZarrStorageWriter(url, options=options),
    "LoadOptions": lambda state, url, options: zarrckpt.load(state, url, options=options),
    "LoadOptions of the reader": lambda state, url, options: zarrckpt.ZarrStorageReader(url, options=options),
}


@pytest.mark.parametrize("call", CALLS)
def test_options_of_another_kind_are_refused(call: str, tmp_path: Path) -> None:
    """A dict, or the options of the other direction, before anything is read or written."""
    kind = call.partition(" ")[0]
    other = zarrckpt.LoadOptions() if kind == "SaveOptions" else zarrckpt.SaveOptions()
    for wrong in ({"timeout": 60}, other):
        with pytest.raises(TypeError, match=f"must be a zarrckpt.{kind}, got a {type(wrong).__name__}$"):
            CALLS[call]({"w": torch.ones(3)}, tmp_path / "one", wrong)
    assert not (tmp_path / "one").exists()


@pytest.mark.parametrize("state", [nn.Linear(2, 2), [torch.ones(2)], torch.ones(2), None])
def test_a_state_that_is_no_dict_is_refused(state: Any, tmp_path: Path) -> None:
    zarrckpt.save({"w": torch.ones(3)}, tmp_path / "one")
    expected = f"{type(state).__name__}, expected a dict"
    with pytest.raises(zarrckpt.UnsupportedValueError, match=expected):
        zarrckpt.save(state, tmp_path / "two")
    with pytest.raises(zarrckpt.UnsupportedValueError, match=expected):
        zarrckpt.async_save(state, tmp_path / "two").result()
    with pytest.raises(zarrckpt.UnsupportedValueError, match=expected):
        zarrckpt.load(state, tmp_path / "one")
    assert not (tmp_path / "two").exists()


def test_swapped_arguments_and_a_missing_url_are_named(tmp_path: Path) -> None:
    wrong: Any = {"w": torch.ones(3)}
    for call in (zarrckpt.save, zarrckpt.async_save, zarrckpt.load):
        with pytest.raises(zarrckpt.UnsupportedValueError, match=rf"wrong order: {call.__name__}\(state, url\)"):
            call(str(tmp_path / "one"), wrong)  # type: ignore[operator]
    with pytest.raises(zarrckpt.StorageError, match="latest"):
        zarrckpt.load({"w": torch.ones(3)}, zarrckpt.latest(tmp_path))


def test_a_mismatch_names_the_next_steps(tmp_path: Path) -> None:
    zarrckpt.save({"w": torch.ones(3), "n": 1}, tmp_path / "one")
    steps = {"sizes": torch.ones(4), "allow_cast": torch.ones(3).half(), "strict=False": None}
    for step, target in steps.items():
        state = {"other": torch.ones(3)} if target is None else {"w": target}
        with pytest.raises(zarrckpt.KeyMismatchError) as caught:
            zarrckpt.load(state, tmp_path / "one")
        assert [other for other in steps if other in str(caught.value)] == [step]


def test_a_module_without_loaded_entries_is_warned_of(tmp_path: Path) -> None:
    zarrckpt.save({"model": nn.Linear(2, 2)}, tmp_path / "one")
    with pytest.warns(UserWarning, match="'net'.*none of its entries.*'model'") as caught:
        zarrckpt.load({"net": nn.Linear(2, 2), "model": nn.Linear(2, 2)}, tmp_path / "one", strict=False)
    assert [Path(item.filename).name for item in caught] == [Path(__file__).name]


def _save_nothing(url: str) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        zarrckpt.save({}, url)
        zarrckpt.save({"rank": dist.get_rank() if dist.is_initialized() else 0}, f"{url}-some")
    return [str(item.message) for item in caught if "no entries" in str(item.message)]


def test_a_state_without_any_entry_is_saved_with_a_warning(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="no entries") as caught:
        zarrckpt.save({}, tmp_path / "zero")
    assert caught[0].filename == __file__
    (message,) = _save_nothing(str(tmp_path / "one"))
    assert str(tmp_path / "one") in message and not zarrckpt.open(tmp_path / "one")
    assert [len(lines) for lines in run_ranks(_save_nothing, str(tmp_path / "two"), world_size=2)] == [1, 0]


def _notes(url: str) -> list[str]:
    with pytest.raises(zarrckpt.CheckpointError) as caught:
        zarrckpt.save({"sparse": torch.eye(2).to_sparse()}, url)
    with pytest.raises(zarrckpt.CheckpointError) as other:
        zarrckpt.save({"model": _Failing()}, url)
    return [*getattr(caught.value, "__notes__", []), str(other.value)]


class _Failing(nn.Module):
    def state_dict(self, *args: Any, **options: Any) -> Any:
        raise RuntimeError("no state today")


def test_errors_of_one_process_name_no_rank(tmp_path: Path) -> None:
    (text,) = _notes(str(tmp_path / "one"))
    assert "no state today" in text and "rank" not in text
    for note, text in run_ranks(_notes, str(tmp_path / "two"), world_size=2):
        assert "rank 0" in note and "rank 0" in text


def test_a_tuple_of_objects_is_refused(tmp_path: Path) -> None:
    with pytest.raises(zarrckpt.UnsupportedValueError, match=r"'a\.nets' is a tuple that contains"):
        zarrckpt.save({"a": {"nets": (nn.Linear(2, 2), nn.Linear(2, 2))}}, tmp_path / "one")


def test_an_expanded_target_is_refused_before_it_is_touched(tmp_path: Path) -> None:
    zarrckpt.save({"a": torch.ones(6), "w": torch.ones(2, 3)}, tmp_path / "one")
    target = {"a": torch.zeros(6), "w": torch.zeros(2, 1).expand(2, 3)}
    with pytest.raises(zarrckpt.KeyMismatchError, match="'w' is an expanded view"):
        zarrckpt.load(target, tmp_path / "one")
    reader = zarrckpt.ZarrStorageReader(tmp_path / "one")
    with pytest.raises(CheckpointException) as caught:
        dcp.load(target, storage_reader=reader, planner=DefaultLoadPlanner(), no_dist=True)
    assert "'w' is an expanded view" in str(caught.value.failures[0][0])
    assert not target["a"].any() and not target["w"].any()


def _load_own_part(url: str) -> None:
    rank = dist.get_rank()
    target = {f"part{rank}": torch.zeros(2)}
    zarrckpt.load(target, url, keys=["part0", "part1"])
    assert target[f"part{rank}"].eq(rank + 1).all()


def test_keys_without_a_target_on_any_rank_are_an_error(tmp_path: Path) -> None:
    url = str(tmp_path / "one")
    zarrckpt.save({"part0": torch.full((2,), 1.0), "part1": torch.full((2,), 2.0)}, url)
    run_ranks(_load_own_part, url, world_size=2)
    target = {"part1": torch.zeros(2), "net": torch.zeros(2)}
    with pytest.raises(zarrckpt.KeyMismatchError, match=r"\['part0'\] match no target.*'net'"):
        zarrckpt.load(target, url, keys=["part0", "part1"])
    assert not target["part1"].any()
    assert zarrckpt.load(target, url, keys=["part0", "part1"], strict=False).unexpected == ("part0",)
    assert target["part1"].eq(2).all()


def test_an_interrupt_is_raised_and_the_save_can_be_repeated(tmp_path: Path) -> None:
    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    state = {"w": torch.ones(100)}
    with pytest.raises(KeyboardInterrupt):
        zarrckpt.save(state, tmp_path / "one", progress=interrupt)
    with pytest.raises(zarrckpt.CheckpointNotFoundError, match="has failed"):
        zarrckpt.open(tmp_path / "one")
    zarrckpt.save(state, tmp_path / "one")
    with pytest.raises(KeyboardInterrupt):
        zarrckpt.load(state, tmp_path / "one", progress=interrupt)


def test_long_lists_of_numbers_are_not_searched_for_objects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    class Asking(type):
        def __instancecheck__(cls, value: object) -> bool:
            asked.append(value)
            return False

    monkeypatch.setattr(objects, "Stateful", Asking("Stateful", (), {}))
    zarrckpt.save({"seen": list(range(5000)), "names": ["a"] * 5000}, tmp_path / "one")
    assert len(asked) < 100


def _without_membership(url: str) -> None:
    state: dict[str, Any] = {"w": torch.ones(2)}
    others, own = dist.new_group([0]), dist.new_group([0, 1])
    calls: list[Callable[[Any], object]] = [
        lambda group: zarrckpt.save(state, url, process_group=group),
        lambda group: zarrckpt.async_save(state, url, process_group=group),
        lambda group: zarrckpt.load(state, url, process_group=group),
        lambda group: zarrckpt.plan_report(state, process_group=group),
        lambda group: zarrckpt.latest(url, process_group=group),
        lambda group: zarrckpt.CheckpointManager(url, process_group=group),
    ]
    if dist.get_rank() == 1:
        for call in calls:
            with pytest.raises(ValueError, match="rank 1, is not a member"):
                call(others)
    dist.destroy_process_group(own)
    for call in calls:
        with pytest.raises(ValueError, match="process_group was destroyed"):
            call(own)
        with pytest.raises(TypeError, match="ProcessGroup, got a list"):
            call([0, 1])


def test_a_process_group_without_this_rank_is_refused(tmp_path: Path) -> None:
    run_ranks(_without_membership, str(tmp_path / "one"), world_size=2)
    assert not (tmp_path / "one").exists()
