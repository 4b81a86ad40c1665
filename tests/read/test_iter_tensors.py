"""``Checkpoint.iter_tensors``: names, casts, order, memory, damage, and the end of the loop."""

from __future__ import annotations

import os
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr
from harness.bits import same
from harness.memory_peaks import peak_of

import zarrckpt
from zarrckpt.testing import FaultyStore

MIB = 1 << 20
FORMS: list[dict[str, Any]] = [{}, {"compression": "zstd"}, {"max_chunk_bytes": 70_000}, {"portable_dtypes": True}]


def state() -> dict[str, Any]:
    torch.manual_seed(0)
    tensors: dict[str, Any] = {
        "w": torch.randn(700, 500),
        "b16": torch.randn(9, 4).bfloat16(),
        "f8": torch.randn(12).to(torch.float8_e5m2),
        "z": torch.randn(5, 3, 2, dtype=torch.complex128),
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 3),
        "flag": torch.tensor([True, False]),
    }
    return {"model": tensors, "step": 3}


@pytest.fixture
def ckpt(tmp_path: Path) -> zarrckpt.Checkpoint:
    zarrckpt.save(state(), tmp_path / "ckpt")
    return zarrckpt.open(tmp_path / "ckpt")


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("zarrckpt-read")]


@pytest.mark.parametrize("options", FORMS)
@pytest.mark.parametrize("is_local", [True, False])
def test_tensors_are_yielded_in_order(options: dict[str, Any], is_local: bool, tmp_path: Path) -> None:
    url = tmp_path / "ckpt" if is_local else zarr.storage.MemoryStore()
    zarrckpt.save(state(), url, options=zarrckpt.SaveOptions(**options))
    ckpt, seen = zarrckpt.open(url), list[tuple[int, int]]()
    for limit in (1, 512 * MIB):
        seen.clear()
        found = [*ckpt.iter_tensors(max_inflight_bytes=limit, progress=lambda *done: seen.append(done))]
        assert [name for name, _ in found] == list(ckpt.tensors)
        assert all(same(tensor, state()["model"][name[6:]]) for name, tensor in found)
        assert seen[-1] == (ckpt.tensors.nbytes, ckpt.tensors.nbytes)


def test_keys_are_names_after_rename(ckpt: zarrckpt.Checkpoint) -> None:
    names = {"model.": ""}
    assert [name for name, _ in ckpt.iter_tensors(["scalar", "b*"], rename=names)] == ["b16", "scalar"]
    assert [name for name, _ in ckpt.iter_tensors("model.z", rename=str.lower)] == ["model.z"]
    for wrong in ({"keys": "model.w", "rename": names}, {"rename": {"old.": ""}}, {"rename": lambda name: "same"}):
        with pytest.raises(zarrckpt.KeyMismatchError):
            ckpt.iter_tensors(**wrong)
    with pytest.raises(TypeError, match="rename"):
        ckpt.iter_tensors(rename=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="meta"):
        ckpt.iter_tensors(device="meta")
    with pytest.raises(ValueError, match="max_inflight_bytes"):
        ckpt.iter_tensors(max_inflight_bytes=0)


def test_floating_tensors_are_cast_as_in_copies(ckpt: zarrckpt.Checkpoint, tmp_path: Path) -> None:
    zarrckpt.copy(ckpt, tmp_path / "copy", dtype="float16")
    copied = dict(zarrckpt.open(tmp_path / "copy").iter_tensors())
    cast = dict(ckpt.iter_tensors(dtype=torch.float16))
    assert cast["model.w"].dtype == torch.float16 and cast["model.scalar"].dtype == torch.float32
    assert all(same(cast[name], copied[name]) for name in copied)
    patterns = dict(ckpt.iter_tensors(dtype={"model.w": "bfloat16"}))
    assert [str(patterns[f"model.{name}"].dtype) for name in ("w", "f8")] == ["torch.bfloat16", "torch.float8_e5m2"]
    zarrckpt.save({"w": torch.tensor([1e6, 1.0])}, tmp_path / "large")
    with pytest.warns(UserWarning, match="'w': 1 finite values"):
        assert [*zarrckpt.open(tmp_path / "large").iter_tensors(dtype="float16")][0][1].isinf().sum() == 1


@pytest.mark.parametrize("options", [{}, {"compression": {"name": "zstd", "level": 1}}])
def test_memory_stays_within_the_bound_and_one_tensor(options: dict[str, Any], tmp_path: Path) -> None:
    size, bound = 24 * MIB, 32 * MIB
    noise = torch.from_numpy(np.random.default_rng(0).integers(0, 99, size, np.uint8))
    zarrckpt.save({f"w{n}": noise for n in range(12)}, tmp_path / "c", options=zarrckpt.SaveOptions(**options))

    def iterate() -> None:
        for _, tensor in zarrckpt.open(tmp_path / "c").iter_tensors(max_inflight_bytes=bound):
            assert tensor[-1] == noise[-1]

    iterate()  # imports and threads
    assert peak_of(iterate) < size + bound + size + 8 * MIB


def test_the_end_of_the_loop_ends_reads_and_frees_memory(tmp_path: Path) -> None:
    zarrckpt.save({f"w{n}": torch.ones(MIB) for n in range(64)}, tmp_path / "c")
    store = FaultyStore(tmp_path / "c")
    tensors = zarrckpt.open(store).iter_tensors(max_inflight_bytes=32 * MIB)
    with pytest.raises(ZeroDivisionError):
        for _, tensor in tensors:
            used = weakref.ref(tensor)
            del tensor
            assert used() is None  # the iterator has no reference either
            1 / 0  # noqa: B018
    del tensors
    assert not threads() and sum(call.verb == "read" for call in store.calls) < 32
    for _ in zarrckpt.open(store).iter_tensors():
        break
    assert not threads()


def test_damage_is_raised_at_its_tensor(tmp_path: Path) -> None:
    url = tmp_path / "c"
    zarrckpt.save({name: torch.ones(1000) for name in "abcd"}, url)
    ckpt = zarrckpt.open(url)
    data = bytearray((url / "c/c.0").read_bytes())
    (url / "c/c.0").write_bytes(data[:9] + bytes([data[9] ^ 1]) + data[10:])
    found = []
    with pytest.raises(zarrckpt.CorruptCheckpointError, match=r"c/c\.0"):
        for name, tensor in ckpt.iter_tensors():
            assert torch.equal(tensor, torch.ones(1000))
            found.append(name)
    assert found == ["a", "b"] and not threads()
    zarrckpt.save({"a": torch.zeros(1000)}, url, overwrite=True)
    with pytest.raises(zarrckpt.CheckpointReplacedError):
        [*ckpt.iter_tensors()]


def test_two_iterators_and_a_forked_child(ckpt: zarrckpt.Checkpoint) -> None:
    pairs = zip(ckpt.iter_tensors(), ckpt.iter_tensors(), strict=True)
    assert all(one[0] == other[0] and same(one[1], other[1]) for one, other in pairs)
    begun = ckpt.iter_tensors()
    next(begun)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            assert len([*ckpt.iter_tensors()]) == 7
            with pytest.raises(zarrckpt.CheckpointError, match="forked"):
                next(begun)
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert len([*begun]) == 6
