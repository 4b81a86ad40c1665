"""``Checkpoint.read(out=...)`` fills the caller's memory in place, with any strides."""

from __future__ import annotations

import array
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from harness.memory_peaks import peak_of
from harness.store_servers import S3Place

import zarrckpt
from zarrckpt import SaveOptions


def _state() -> dict[str, Any]:
    torch.manual_seed(0)
    return {
        "w": torch.randn(700, 500),
        "b16": torch.randn(9, 4).bfloat16(),
        "f8": torch.randn(12).to(torch.float8_e5m2),
        "z": torch.randn(5, 3, 2, dtype=torch.complex128),
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 3),
        "flag": torch.tensor([True, False]),
        "step": 3,
    }


FORMS: list[dict[str, Any]] = [{}, {"compression": "zstd"}, {"max_chunk_bytes": 70_000}, {"portable_dtypes": True}]


@pytest.fixture(params=FORMS)
def ckpt(tmp_path: Path, request: pytest.FixtureRequest) -> zarrckpt.Checkpoint:
    """A checkpoint whose chunks are stored in several ways."""
    zarrckpt.save(_state(), tmp_path / "ckpt", options=SaveOptions(**request.param))
    return zarrckpt.open(tmp_path / "ckpt")


def _memory(ckpt: zarrckpt.Checkpoint) -> dict[str, np.ndarray[Any, Any]]:
    nodes = ckpt._catalog.root.tensors
    return {fqn: np.full(node.grid.shape, 1, node.dtype.numpy) for fqn, node in nodes.items()}


def test_arrays_are_filled_in_place(ckpt: zarrckpt.Checkpoint) -> None:
    out, expected = _memory(ckpt), ckpt.read()
    seen: list[tuple[int, int]] = []
    found = ckpt.read(out=out, progress=lambda *done: seen.append(done))
    assert all(found[fqn] is out[fqn] for fqn in out) and list(found) == list(expected)
    assert all(out[fqn].tobytes() == expected[fqn].tobytes() for fqn in out)
    assert seen[-1] == (ckpt.tensors.nbytes, ckpt.tensors.nbytes)
    assert list(ckpt.read(["z", "w", "z"])) == ["z", "w"] and list(ckpt.read("flag")) == ["flag"]


def test_targets_of_any_strides_are_filled(ckpt: zarrckpt.Checkpoint) -> None:
    expected = ckpt.read(["w", "z"])
    wide = np.zeros((1400, 1003), "f4")
    odd = np.zeros(5 * 3 * 2 * 16 + 1, "u1")[1:].view("c16").reshape(5, 3, 2)  # not aligned
    layouts = [
        {"w": np.asfortranarray(np.zeros((700, 500), "f4")), "z": np.zeros((2, 5, 3), "c16").transpose(1, 2, 0)},
        {"w": wide[::2, 3:1003:2], "z": odd},
        {"w": wide[1399::-2, 999:499:-1], "z": odd[::-1, :, ::-1]},
    ]
    for out in layouts:
        ckpt.read(out=out)
        assert all(np.array_equal(out[fqn], expected[fqn]) for fqn in out)
    wide[:] = 7
    ckpt.read("w", out={"w": wide[100:800, 100:600], "z": None})
    assert (
        (wide[:100] == 7).all()
        and (wide[800:] == 7).all()
        and (wide[:, 600:] == 7).all()
        and (wide[:, :100] == 7).all()
    )


def test_buffers_of_other_libraries_are_filled(ckpt: zarrckpt.Checkpoint) -> None:
    state = _state()
    tensors = {"w": torch.zeros(700, 500), "b16": torch.zeros(9, 4).bfloat16(), "flag": torch.zeros(2).bool()}
    views = {
        "w": tensors["w"].numpy(),
        "b16": tensors["b16"].view(torch.uint16).numpy(),
        "flag": tensors["flag"].numpy(),
    }
    ckpt.read(out=views)
    assert all(torch.equal(value, state[fqn]) for fqn, value in tensors.items())
    raw, number = bytearray(12), array.array("f", [0.0])
    ckpt.read(out={"f8": raw, "scalar": memoryview(number).cast("B").cast("f", ())})
    assert bytes(raw) == state["f8"].view(torch.uint8).numpy().tobytes() and number[0] == 2.5


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"w": np.zeros((500, 700), "f4")}, zarrckpt.KeyMismatchError, ["'w'", "(500, 700)", "(700, 500)"]),
        ({"w": np.zeros((700, 500))}, zarrckpt.KeyMismatchError, ["'w'", "float64", "float32"]),
        ({"w": np.zeros((700, 500), ">f4")}, zarrckpt.KeyMismatchError, ["'w'"]),
        ({"b16": np.zeros((9, 4), "i2")}, zarrckpt.KeyMismatchError, ["'b16'", "int16", "bfloat16"]),
        ({"b16": np.zeros((9, 4), ml_dtypes.float8_e5m2)}, zarrckpt.KeyMismatchError, ["'b16'"]),
        ({"w": np.broadcast_to(np.zeros(500, "f4"), (700, 500))}, ValueError, ["'w'", "read-only"]),
        ({"f8": bytes(12)}, ValueError, ["'f8'", "read-only"]),
        ({"w": torch.zeros(700, 500)}, TypeError, ["'w'", "Tensor", ".numpy()"]),
        ({"w": [0.0]}, TypeError, ["'w'", "list"]),
        ({"nothing": np.zeros(3)}, zarrckpt.KeyMismatchError, ["'nothing'"]),
        ({"step": np.zeros(3)}, zarrckpt.KeyMismatchError, ["'step'"]),
    ],
)
def test_unfitting_targets_are_refused(
    tmp_path: Path, given: dict[str, Any], error: type[Exception], words: list[str]
) -> None:
    zarrckpt.save(_state(), tmp_path / "ckpt")
    ckpt = zarrckpt.open(tmp_path / "ckpt")
    good = {"scalar": np.full((), 9, "f4"), "flag": np.array([False, True])}
    with pytest.raises(error) as caught:
        ckpt.read(out={**good, **given})
    assert all(word in str(caught.value) for word in words)
    assert good["scalar"] == 9 and good["flag"].tolist() == [False, True]


def test_all_unfitting_targets_are_listed(tmp_path: Path) -> None:
    zarrckpt.save(_state(), tmp_path / "ckpt")
    ckpt = zarrckpt.open(tmp_path / "ckpt")
    with pytest.raises(zarrckpt.KeyMismatchError, match=r"'w'(.|\n)*'flag'"):
        ckpt.read(out={"w": np.zeros(3), "flag": np.zeros(3)})
    with pytest.raises(zarrckpt.KeyMismatchError, match="'flag'"):
        ckpt.read(["scalar", "flag"], out={"scalar": np.zeros((), "f4")})


def test_read_out_allocates_no_array_of_the_datas_size(tmp_path: Path, moto_bucket: S3Place) -> None:
    state = {"w": torch.randn(4096, 2048), "v": torch.randn(1 << 22)}  # 48 MB
    places: list[dict[str, Any]] = [{"url": tmp_path / "plain"}, {"url": tmp_path / "zstd"}]
    places.append({"url": moto_bucket.url("out"), "storage_options": moto_bucket.storage_options})
    for place in places:
        zarrckpt.save(state, **place, options=SaveOptions(compression="zstd" if "zstd" in str(place["url"]) else None))
        ckpt = zarrckpt.open(**place)
        ckpt.read(out={"v": np.zeros(1 << 22, "f4")})  # makes the imports and connections
        out = {"w": np.ones((4096, 2048), "f4"), "v": np.ones(1 << 22, "f4")}
        peak = peak_of(partial(ckpt.read, out=out, max_inflight_bytes=8 << 20))
        assert peak < 20 << 20, place
        assert all(np.array_equal(out[fqn], state[fqn].numpy()) for fqn in out)
