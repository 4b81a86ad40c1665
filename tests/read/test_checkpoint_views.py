"""Parts of an open checkpoint, its numbers, and conversions: xarray, torch."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr

import zarrckpt


def _state() -> dict[str, Any]:
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 2))
    return {
        "model": model.state_dict(),
        "ema": OrderedDict(w=torch.randn(4, 6).bfloat16()),
        "list": [torch.ones(2), 3],
        "cfg": {"lr": 0.1, 2: "two"},
        "step": 12,
    }


@pytest.fixture
def state() -> dict[str, Any]:
    torch.manual_seed(0)
    return _state()


@pytest.fixture
def ckpt(tmp_path: Path, state: dict[str, Any]) -> zarrckpt.Checkpoint:
    zarrckpt.save(state, tmp_path / "one")
    return zarrckpt.open(tmp_path / "one")


def test_views_are_checkpoints_of_a_part(ckpt: zarrckpt.Checkpoint) -> None:
    assert list(ckpt.tensors) == ["model.0.weight", "model.0.bias", "model.1.weight", "model.1.bias", "ema.w", "list.0"]
    assert dict(ckpt.non_tensors) == {"list.1": 3, "cfg.lr": 0.1, "cfg.2": "two", "step": 12}
    assert {name: len(part) for name, part in ckpt.groups.items()} == {"model": 4, "ema": 1, "list": 2, "cfg": 2}
    part = ckpt.select("model", "*.w")
    assert list(part) == [name for name in ckpt.tensors if not name.startswith("list")]
    assert list(part.select("*.bias").read()) == ["model.0.bias", "model.1.bias"]
    assert "step" not in part and part.nbytes == sum(array.nbytes for array in part.read().values())
    with pytest.raises(zarrckpt.KeyMismatchError):
        part["step"]
    with pytest.raises(zarrckpt.KeyMismatchError):
        part.read(["list.0"])
    with pytest.raises(zarrckpt.KeyMismatchError):
        ckpt.select("model", "nothing.*")
    assert ckpt != zarrckpt.open(ckpt.url) and len({ckpt, part}) == 2


def test_info_adds_up(ckpt: zarrckpt.Checkpoint) -> None:
    found = ckpt.info
    assert (found.step, found.tensors, found.values, found.blobs) == (12, 6, 4, 0)
    assert found.nbytes == sum(part.nbytes for part in found.dtypes.values()) == sum(found.groups.values())
    assert found.dtypes["bfloat16"].elements == 24
    assert found.largest[0][:3] == ("model.0.weight", (5, 3), "float32")
    assert ckpt.select("model").info.nbytes == ckpt.groups["model"].nbytes == (15 + 5 + 10 + 2) * 4


def test_an_entry_does_not_match_longer_names(tmp_path: Path) -> None:
    zarrckpt.save({"a": torch.ones(3), "a.b": torch.ones(5), "v": 1}, tmp_path / "one")
    ckpt = zarrckpt.open(tmp_path / "one")
    assert [ckpt.entry(fqn).nbytes for fqn in ckpt] == [12, 20, 0]
    entry = ckpt.entry("a.b")
    assert (entry.kind, entry.keys, entry.dtype, entry.shape) == ("tensor", ("a.b",), "float32", (5,))
    assert ckpt.entry("v").kind == "value" and ckpt.entry("v").shape is None
    with pytest.raises(zarrckpt.KeyMismatchError):
        ckpt.select("v").entry("a")


def test_html_shows_groups_and_escapes_names(tmp_path: Path) -> None:
    many = {f"w{i}": torch.ones(2) for i in range(300)}
    state = {"<b>": torch.ones(2), "s": "<script>", "<i>": {"<u>": 1}, "many": many, "step": 5}
    zarrckpt.save(state, tmp_path / "one")
    text = zarrckpt.open(tmp_path / "one")._repr_html_()
    assert "&lt;b&gt;" in text and not [tag for tag in ("<script>", "<b>b", "<i>", "<u>") if f"{tag}<" in text]
    assert "<script" not in text and "src=" not in text and "http" not in text
    assert text.count("<details>") == text.count("</details>") == 3  # two groups, and the entries in none
    assert "300 entries" in text and "many.w199<" in text and "many.w200<" not in text and "and 100 more" in text
    assert "saved 20" in text and "by 1 rank," in text and "step <b>5</b>" in text and "2.41 KB" in text


def test_load_returns_the_nested_state(ckpt: zarrckpt.Checkpoint, state: dict[str, Any]) -> None:
    found = ckpt.load()
    assert type(found["ema"]) is OrderedDict and found["ema"]["w"].dtype == torch.bfloat16
    assert torch.equal(found["ema"]["w"], state["ema"]["w"]) and torch.equal(found["list"][0], torch.ones(2))
    assert found["cfg"] == {"lr": 0.1, 2: "two"} and found["list"][1] == 3
    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 2))
    model.load_state_dict(ckpt.load("model")["model"], assign=True)
    assert all(torch.equal(value, state["model"][name]) for name, value in model.state_dict().items())
    assert ckpt.load("step") == {"step": 12}
    (Path(ckpt.url) / "ema" / "w" / "c.0.0").unlink()
    with pytest.raises(RuntimeError, match="device"):  # before anything is read
        ckpt.load(device="nowhere")


def test_arrays_show_their_url_and_path(ckpt: zarrckpt.Checkpoint) -> None:
    assert repr(ckpt["ema.w"]) == f"<Array {ckpt.url}/ema/w shape=(4, 6) dtype=bfloat16>"


def test_a_wrong_name_suggests_a_right_one(ckpt: zarrckpt.Checkpoint) -> None:
    for ask in (ckpt.__getitem__, ckpt.entry, ckpt.writers, ckpt.read, ckpt.select, ckpt.load):
        with pytest.raises(zarrckpt.KeyMismatchError, match=r"model\.0\.weight"):
            ask("model.0.weigth")
        with pytest.raises(zarrckpt.KeyMismatchError, match="did you mean 'model"):
            ask("1.bias")
    with pytest.raises(zarrckpt.KeyMismatchError, match="it is a value"):
        ckpt.read("step")
    with pytest.raises(zarrckpt.KeyMismatchError, match=r"group with 4 entries: model\.0\.weight"):
        ckpt["model"]
    with pytest.raises(zarrckpt.KeyMismatchError, match="no entry 0"):
        ckpt[0]  # type: ignore[index]


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_stored_bytes_equal_the_sizes_of_objects(compression: str | None, tmp_path: Path) -> None:
    """Subchunks, cut chunks, scalars, blobs, empty ones."""
    state = {
        "large": torch.zeros(1100, 600),
        "m": {"cut": torch.randn(301, 77), "scalar": torch.ones(()), "none": torch.zeros(0, 4)},
        "blob": b"x" * 70000,
    }
    zarrckpt.save(
        state, tmp_path / "one", options=zarrckpt.SaveOptions(compression=compression, max_chunk_bytes=1 << 21)
    )
    ckpt = zarrckpt.open(tmp_path / "one")
    for part in (ckpt, ckpt.select("m"), ckpt.select("large")):
        places = [tmp_path / "one" / fqn.replace(".", "/") for fqn in part]
        assert part.info.nbytes_stored == sum(f.stat().st_size for place in places for f in place.rglob("c*"))
    info = ckpt.info
    assert info.nbytes == ckpt.nbytes and info.blob_nbytes == 70000
    assert info.groups == {name: ckpt.select(name).nbytes for name in ("large", "m", "blob")}
    assert info.nbytes - info.blob_nbytes == ckpt.tensors.nbytes == sum(part.nbytes for part in info.dtypes.values())
    assert info.chunks == sum(ckpt.writers(fqn).size for fqn in ckpt.tensors) + 1  # the blob's


def test_only_compressed_checkpoints_need_a_table_for_stored_bytes(tmp_path: Path) -> None:
    for name, compression in (("plain", None), ("small", "zstd")):
        zarrckpt.save(
            {"w": torch.zeros(50, 50)}, tmp_path / name, options=zarrckpt.SaveOptions(compression=compression)
        )
        for table in tmp_path.rglob("@zarrckpt/*/*/c.0"):
            table.unlink()
    assert zarrckpt.open(tmp_path / "plain").info.nbytes_stored == 10004
    damaged = zarrckpt.open(tmp_path / "small")
    assert damaged.info.nbytes_stored is None and damaged.info.nbytes == 10000


def test_xarray_reads_and_checks(ckpt: zarrckpt.Checkpoint, state: dict[str, Any]) -> None:
    tree = ckpt.to_xarray()
    assert isinstance(tree, xr.DataTree) and {"model", "ema"} <= {*tree.children}
    found = ckpt.to_xarray("model")["0.weight"]
    assert np.array_equal(found.values, state["model"]["0.weight"].numpy())
    (Path(ckpt.url) / "model" / "1.weight" / "c.0.0").unlink()
    with pytest.raises(zarrckpt.CorruptCheckpointError):
        ckpt.to_xarray("model")["1.weight"].load()
    with pytest.raises(zarrckpt.KeyMismatchError, match="'model', 'ema'"):
        ckpt.to_xarray("nothing")


def test_xarray_contains_only_the_selected_part(ckpt: zarrckpt.Checkpoint, state: dict[str, Any]) -> None:
    part = ckpt.select("model.0", "ema")
    tree = part.to_xarray()
    assert {*tree.children} == {"model", "ema"} and {*tree["model"].data_vars} == {"0.weight", "0.bias"}
    assert np.array_equal(tree["model"]["0.bias"].values, state["model"]["0.bias"].numpy())
    assert {*part.to_xarray("model").data_vars} == {"0.weight", "0.bias"}
    with pytest.raises(zarrckpt.KeyMismatchError):
        part.to_xarray("list")
    assert not part.select("ema").to_xarray()["ema"].children
    attributes = ckpt.to_xarray().attrs  # not the root's own: a table of all entries
    assert attributes == {"url": ckpt.url, "save_id": ckpt.save_id, "created": ckpt.info.created, "step": 12}


def test_progress_of_stats_ends_with_all_bytes(ckpt: zarrckpt.Checkpoint) -> None:
    seen: list[tuple[int, int]] = []
    ckpt.stats(progress=lambda *done: seen.append(done))
    assert seen[-1] == (ckpt.tensors.nbytes, ckpt.tensors.nbytes)


CASTS = [
    *(("float32", name) for name in ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz")),
    *(("float64", name) for name in ("float32", "float16", "bfloat16", "float8_e5m2fnuz")),
    *(("bfloat16", "float16"), ("float16", "bfloat16"), ("float16", "float8_e5m2"), ("complex128", "complex64")),
]
SPECIAL = [0.0, -0.0, float("nan"), float("inf"), -float("inf"), 1.0, -2.0, 300000.0]


def cast_pair(old: str, new: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a tensor, and torch's cast of it. Four elements of the copy have another sign."""
    values = torch.randn(1000, generator=torch.Generator().manual_seed(len(old + new)), dtype=torch.float64)
    line = torch.cat([values, torch.tensor(SPECIAL, dtype=torch.float64)])
    one = (torch.complex(line, line.flip(0)) if old.startswith("complex") else line).to(getattr(torch, old))
    copy = one.to(getattr(torch, new))
    copy[5:9] = (copy[5:9].to(torch.complex64 if copy.is_complex() else torch.float32) * -1).to(copy.dtype)
    return one.reshape(8, -1), copy.reshape(8, -1)


def test_diff_across_dtypes_counts_more_than_rounding(tmp_path: Path) -> None:
    pairs = {f"{old} as {new}": cast_pair(old, new) for old, new in CASTS}
    wide: dict[str, Any] = {name: pair[0] for name, pair in pairs.items()}
    narrow: dict[str, Any] = {name: pair[1] for name, pair in pairs.items()}
    wide |= {"exact": torch.arange(9.0), "int": torch.ones(3).int(), "real": torch.ones(3)}
    narrow |= {"exact": torch.arange(9).half(), "int": torch.ones(3).long(), "real": torch.ones(3) + 0j}
    zarrckpt.save(wide, tmp_path / "wide", options=zarrckpt.SaveOptions(max_chunk_bytes=1 << 10))
    zarrckpt.save(narrow, tmp_path / "narrow", options=zarrckpt.SaveOptions(compression="zstd"))
    a, b = zarrckpt.open(tmp_path / "wide"), zarrckpt.open(tmp_path / "narrow")
    found = zarrckpt.diff(a, b)
    back = zarrckpt.diff(b, a)
    assert [*found.changed] == ["int", "real"] and [*found.tensors] == [*pairs, "exact"]
    assert not found and not zarrckpt.diff(a, b, "exact") and found.tensors["exact"].unequal == 0
    for name, (one, copy) in pairs.items():
        x, y = (tensor.to(torch.complex128).numpy().reshape(-1) for tensor in (one, copy))
        with np.errstate(invalid="ignore"):
            p, q = (np.stack([values.real, values.imag]) for values in (x, y))
            same = ((p == q) & (np.signbit(p) == np.signbit(q))) | (np.isnan(p) & np.isnan(q))
            # A value beyond the range becomes inf, NaN or the greatest number of the dtype.
            beyond = np.isfinite(p) & (np.abs(p) > torch.finfo(copy.dtype).max)
            lost = (beyond | (np.isfinite(q) > np.isfinite(p))).any(axis=0)
            lost[5:9] = True
            finite = np.isfinite(x) & np.isfinite(y)
            apart, size = np.abs(x - y)[finite], np.maximum(np.abs(x), np.abs(y))[finite]
        for item, dtypes in ((found.tensors[name], name.split(" as ")), (back.tensors[name], name.split(" as ")[::-1])):
            assert (item.count, [*item.dtypes]) == (x.size, dtypes)
            assert (item.unequal, item.beyond_rounding) == ((~same).any(axis=0).sum(), lost.sum()), name
            assert item.not_finite == (~same.all(axis=0) & ~finite).sum()
            assert item.max_abs == pytest.approx(apart.max(), rel=1e-12)
            assert item.max_rel == pytest.approx((apart / np.where(size, size, 1)).max(), rel=1e-12)
    assert found.tensors["float32 as bfloat16"].beyond_rounding == 4
