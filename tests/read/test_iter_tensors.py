"""``Checkpoint.iter_tensors``: names, casts, order, memory, damage, and the end of the loop."""

from __future__ import annotations

import os
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import zarr
from harness.bits import same
from harness.faulty_store import FaultyStore
from harness.memory_peaks import peak_of

import zarrckpt

MIB = 1 << 20
STATE: dict[str, Any] = {
    "w": torch.randn(700, 500),
    "b16": torch.randn(9, 4).bfloat16(),
    "z": torch.randn(5, 3, 2, dtype=torch.complex128),
    "scalar": torch.tensor(2.5),
    "empty": torch.zeros(0, 3),
    "flag": torch.tensor([True, False]),
}


@pytest.fixture(params=[{"compression": "zstd"}, {"max_chunk_bytes": 70_000}, None])
def ckpt(tmp_path: Path, request: pytest.FixtureRequest) -> zarrckpt.Checkpoint:
    """A checkpoint on disk or in memory."""
    url = zarr.storage.MemoryStore() if request.param is None else tmp_path / "ckpt"
    zarrckpt.save({"model": STATE, "step": 3}, url, options=zarrckpt.SaveOptions(**(request.param or {})))
    return zarrckpt.open(url)


def test_tensors_are_yielded_in_order(ckpt: zarrckpt.Checkpoint) -> None:
    seen: list[tuple[int, int]] = []
    for limit in (1, 512 * MIB):
        found = [*ckpt.iter_tensors(max_inflight_bytes=limit, progress=lambda *done: seen.append(done))]
        assert same([(name[6:], tensor) for name, tensor in found], [*STATE.items()])
        assert seen[-1] == (ckpt.tensors.nbytes, ckpt.tensors.nbytes)


def test_names_and_dtypes_can_change(ckpt: zarrckpt.Checkpoint, tmp_path: Path) -> None:
    names = {"model.": ""}
    assert [name for name, _ in ckpt.iter_tensors(["scalar", "b*"], rename=names)] == ["b16", "scalar"]
    for wrong in ({"keys": "model.w", "rename": names}, {"rename": {"old.": ""}}, {"rename": lambda name: "same"}):
        with pytest.raises(zarrckpt.KeyMismatchError):
            ckpt.iter_tensors(**wrong)
    for odd in ({"rename": 3}, {"device": "meta"}, {"max_inflight_bytes": 0}):
        with pytest.raises((TypeError, ValueError), match=next(iter(odd))):
            ckpt.iter_tensors(**odd)  # type: ignore[arg-type]
    zarrckpt.copy(ckpt, tmp_path / "copy", dtype="float16")
    assert same([*ckpt.iter_tensors(dtype=torch.float16)], [*zarrckpt.open(tmp_path / "copy").iter_tensors()])
    zarrckpt.save({"w": torch.tensor([1e6, 1.0])}, tmp_path / "large")
    with pytest.warns(UserWarning, match="'w': 1 finite values"):
        [*zarrckpt.open(tmp_path / "large").iter_tensors(dtype={"w": "float16"})]


@pytest.mark.parametrize("compression", [None, {"name": "zstd", "level": 1}])
def test_memory_stays_within_the_bound_and_one_tensor(compression: Any, tmp_path: Path) -> None:
    size, bound = 16 * MIB, 24 * MIB
    noise = torch.randint(0, 99, (size,), dtype=torch.uint8)
    options = zarrckpt.SaveOptions(compression=compression, durable=False)
    zarrckpt.save({f"w{n}": noise for n in range(8)}, tmp_path / "c", options=options)

    def iterate() -> None:
        for _, tensor in zarrckpt.open(tmp_path / "c").iter_tensors(max_inflight_bytes=bound):
            assert tensor[-1] == noise[-1]

    iterate()  # imports and threads
    assert peak_of(iterate) < size + bound + size + 8 * MIB


def test_the_end_of_the_loop_ends_reads_and_frees_memory(tmp_path: Path) -> None:
    store = FaultyStore(tmp_path / "c", durable=False)
    zarrckpt.save({f"w{n}": torch.ones(MIB) for n in range(64)}, store)
    store.calls.clear()
    with pytest.raises(ZeroDivisionError):
        for _, tensor in zarrckpt.open(store).iter_tensors(max_inflight_bytes=32 * MIB):
            used = weakref.ref(tensor)
            del tensor
            assert used() is None  # the iterator has no reference either
            1 / 0  # noqa: B018
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("zarrckpt-read")]
    assert sum(call.verb == "read" for call in store.calls) < 32  # of 256


def test_damage_is_raised_at_its_tensor(tmp_path: Path) -> None:
    zarrckpt.save({name: torch.ones(1000) for name in "abcd"}, tmp_path)
    ckpt, found = zarrckpt.open(tmp_path), []
    data = (tmp_path / "c/c.0").read_bytes()
    (tmp_path / "c/c.0").write_bytes(data[:9] + bytes([data[9] ^ 1]) + data[10:])
    with pytest.raises(zarrckpt.CorruptCheckpointError, match=r"c/c\.0"):
        found.extend(ckpt.iter_tensors())
    assert same(found, [("a", torch.ones(1000)), ("b", torch.ones(1000))])
    zarrckpt.save({"a": torch.zeros(1000)}, tmp_path, overwrite=True)
    with pytest.raises(zarrckpt.CheckpointReplacedError):
        [*ckpt.iter_tensors()]


@pytest.mark.parametrize("ckpt", [{}], indirect=True)
def test_two_iterators_and_a_forked_child(ckpt: zarrckpt.Checkpoint) -> None:
    assert all(same(one, other) for one, other in zip(ckpt.iter_tensors(), ckpt.iter_tensors(), strict=True))
    begun = ckpt.iter_tensors()
    next(begun)
    child = os.fork()
    if child == 0:
        try:
            assert len([*ckpt.iter_tensors()]) == len(STATE)
            with pytest.raises(zarrckpt.CheckpointError, match="forked"):
                next(begun)
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert len([*begun]) == len(STATE) - 1
