"""The page of a checkpoint: its data compared with numpy, hostile names, and that it needs nothing else."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import warnings
import zipfile
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from harness import GOLDEN
from hypothesis import given
from hypothesis import strategies as st

import zarrckpt
from zarrckpt._inspect.page.histogram import Histogram
from zarrckpt._inspect.page.layout import sequences
from zarrckpt.cli import main

STATS = ("count", "nan", "inf", "zeros", "min", "max", "mean", "std", "norm")


class Page(HTMLParser):
    """A page as a browser's parser sees it: every element, and the text in scripts and styles."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, str] = {}
        self._open = ""
        self.text = path.read_text()
        self.feed(self.text)
        self.data: dict[str, Any] = json.loads(self.texts["script#data"])
        self.tensors: dict[str, Any] = {tensor["name"]: tensor for tensor in self.data["tensors"]}
        self.entries: dict[str, Any] = {entry["name"]: entry for entry in self.data["entries"]}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._open = f"{tag}#{dict(attrs)['id']}" if "id" in dict(attrs) else tag

    def handle_data(self, data: str) -> None:
        self.texts[self._open] = self.texts.get(self._open, "") + data

    def handle_endtag(self, tag: str) -> None:
        self._open = ""

    def look(self, name: str, side: int = 0) -> dict[str, Any]:
        """Return the page's statistics of a tensor."""
        found: dict[str, Any] = self.tensors[name]["sides"][side]["look"]
        return {**found, **dict(zip(STATS, found["stats"], strict=True))}

    def layout(self, name: str, side: int = 0) -> dict[str, Any]:
        number = self.tensors[name]["sides"][side]["layout"]
        found: dict[str, Any] = self.data["sides"][side]["layouts"][number]
        return found


def decoded(sequences: list[list[int]]) -> list[int]:
    return [first + i * step for first, step, count in sequences for i in range(count)]


def counted(values: np.ndarray[Any, Any], histogram: list[Any]) -> list[int]:
    """Return numpy's counts for the bins of a histogram on the page."""
    exponent, first, counts = histogram[:3]
    scaled = np.floor(np.ldexp(values.reshape(-1).astype("f8"), -exponent)) - first
    return [int((scaled == i).sum()) for i in range(len(counts))]


def page_of(state: dict[str, Any], folder: Path, options: zarrckpt.SaveOptions | None = None) -> Page:
    zarrckpt.save(state, folder / "one", options=options)
    zarrckpt.report(folder / "one", folder / "page.html")
    return Page(folder / "page.html")


# -- histograms

NUMBERS = st.floats(width=32, allow_nan=False, allow_infinity=False)


@given(st.lists(st.lists(NUMBERS, min_size=1, max_size=20), min_size=1, max_size=6), st.sampled_from([3, 8, 64]))
def test_histograms_of_parts_add_up_to_that_of_the_whole(parts: list[list[float]], most: int) -> None:
    found: Histogram | None = None
    for part in parts:
        values = np.array(part)
        one = Histogram.of(values, values.min().item(), values.max().item(), max_bins=most)
        found = one if found is None else found.plus(one, most)
    assert found is not None
    values = np.array([x for part in parts for x in part])
    whole = Histogram.of(values, values.min().item(), values.max().item(), max_bins=most)
    assert (found.exponent, found.first, found.counts.tolist()) == (whole.exponent, whole.first, whole.counts.tolist())
    assert counted(values, [found.exponent, found.first, found.counts]) == found.counts.tolist()
    assert len(found.counts) <= most and found.counts[0] and found.counts[-1]
    lowest, highest = (math.ldexp(place, found.exponent) for place in (found.first, found.end))
    assert lowest <= values.min() and values.max() < highest


@given(st.lists(NUMBERS, min_size=1, max_size=50), st.integers(2, 70))
def test_fewer_bins_have_the_same_numbers(values: list[float], most: int) -> None:
    numbers = np.array(values)
    found = Histogram.of(numbers, numbers.min().item(), numbers.max().item()).within(most)
    assert len(found.counts) <= most
    assert counted(numbers, [found.exponent, found.first, found.counts]) == found.counts.tolist()


@given(st.lists(st.integers(0, 3), max_size=12))
def test_sequences_of_ranks_decode_to_the_ranks(ranks: list[int]) -> None:
    found = sequences(np.array(ranks, "u4"))
    assert found is not None and decoded([[*one] for one in found]) == ranks


# -- numbers


def arrays() -> dict[str, np.ndarray[Any, Any]]:
    rng = np.random.default_rng(0)
    normal = rng.normal(0.5, 2, (700, 900)).astype("f4")
    normal[3, 7], normal[699, 0] = 400, -300
    return {
        "normal": normal,
        "wide": (rng.normal(size=5000) ** 9).astype("f8"),
        "ids": rng.integers(-50, 50, (40, 30)),
        "flag": rng.random(100) < 0.25,
        "same": np.full((6, 6), 0.3, "f2"),
        "zeros": np.zeros(9, "f4"),
        "scalar": np.float32(2.5),
        "empty": np.zeros((0, 3), "f4"),
        "complex": (rng.normal(size=20) + 1j * rng.normal(size=20)).astype("c8"),
    }


def test_numbers_equal_numpys(tmp_path: Path) -> None:
    given = arrays()
    state = {name: torch.tensor(array) for name, array in given.items()}
    state["half"] = state["normal"].bfloat16()
    given["half"] = state["half"].float().numpy()
    page = page_of(state, tmp_path, zarrckpt.SaveOptions(max_chunk_bytes=1 << 18))
    assert page.layout("normal")["chunks"] > 5
    stats = zarrckpt.open(tmp_path / "one").stats()
    for name, array in given.items():
        values = np.abs(array.astype("c16")) if array.dtype.kind == "c" else array.astype("f8")
        look = page.look(name)
        assert (look["count"], look["nan"], look["inf"]) == (values.size, 0, 0)
        if not values.size:
            assert look["mean"] is None and "histogram" not in look
            continue
        assert [look[key] for key in STATS] == [*vars(stats[name]).values()]  # not rounded
        histogram = look["histogram"]
        assert counted(values, histogram) == histogram[2] and sum(histogram[2]) == values.size
        assert len(histogram[2]) <= 64
        low, high = np.sort(values.reshape(-1))[:4], -np.sort(-values.reshape(-1))[:4]
        assert [value for value, _, _ in look["low"]] == [*low]
        assert [value for value, _, _ in look["high"]] == [*high]
        assert all(values[tuple(at)] == value for value, at, _ in look["low"] + look["high"])
        sigmas = [(value - look["mean"]) / look["std"] if look["std"] else None for value, _, _ in look["high"]]
        assert [sigma for _, _, sigma in look["high"]] == (pytest.approx(sigmas, abs=1e-4) if look["std"] else sigmas)
    assert page.look("normal")["high"][0][:2] == [400, [3, 7]]
    assert page.look("normal")["low"][0][:2] == [-300, [699, 0]]
    assert page.look("normal")["beyond"] == 2
    assert page.look("ids")["histogram"][0] >= 0  # no bins between integers


def test_large_integers_are_whole_on_a_page(tmp_path: Path) -> None:
    """JavaScript's numbers hold 53 bits, so longer integers are texts."""
    ids = 2**62 + torch.arange(500) // 499 * 3
    page = page_of(
        {"ids": ids, "max": torch.full((3,), 2**63 - 1), "times": 1_700_000_000_000 + torch.arange(500)}, tmp_path
    )
    look = page.look("ids")
    assert (look["min"], look["max"]) == (str(2**62), str(2**62 + 3))
    assert look["high"][0][:2] == [str(2**62 + 3), [499]] and look["high"][0][2] == pytest.approx(499**0.5, abs=1e-4)
    assert sum(look["histogram"][2]) == 500
    assert page.look("max")["std"] == 0 and page.look("max")["high"][0] == [str(2**63 - 1), [0], None]
    assert page.look("times")["max"] == 1_700_000_000_499


def test_numbers_at_the_ends_of_doubles_make_a_page(tmp_path: Path) -> None:
    values = np.array([1e308, -1e308, 5e-324, 1.7e308, 1.7e308, 0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        page = page_of({"w": torch.tensor(values), "tiny": torch.tensor(values[[2, 5]])}, tmp_path)
    assert page.look("w")["histogram"][2] == counted(values, page.look("w")["histogram"])
    assert (page.look("w")["min"], page.look("w")["max"]) == (-1e308, 1.7e308)
    assert page.look("w")["mean"] == pytest.approx(1.7e308 / 3) and page.look("w")["norm"] == "inf"
    assert page.look("tiny")["histogram"] == [-1074, 0, [1, 1]]


def test_outliers_are_omitted_from_the_picture(tmp_path: Path) -> None:
    values = np.random.default_rng(1).normal(0, 0.02, 200_000).astype("f4")
    values[:2] = 31, -12
    page = page_of({"w": torch.tensor(values), "even": torch.linspace(0, 1, 1000)}, tmp_path)
    *bulk, below, above = page.look("w")["bulk"]
    assert counted(values, bulk) == bulk[2] and below + sum(bulk[2]) + above == len(values)
    assert len(bulk[2]) > 30 and 0 < below < 400 and 0 < above < 400
    assert "bulk" not in page.look("even")


def test_nan_and_inf_are_counted_by_chunk(tmp_path: Path) -> None:
    w = torch.randn(64, 100)
    w[17, 5:9] = torch.nan
    w[60, 0] = -torch.inf
    zarrckpt.save(
        {"a": torch.ones(3), "w": w, "all": torch.full((2,), torch.nan)},
        tmp_path / "one",
        options=zarrckpt.SaveOptions(max_chunk_bytes=6400),
    )
    report = zarrckpt.report(tmp_path / "one", tmp_path / "page.html")
    assert report.broken == ("w", "all") and report.tensors == 3
    assert report.nbytes == (tmp_path / "page.html").stat().st_size
    page = Page(tmp_path / "page.html")
    look = page.look("w")
    rows = page.layout("w")["chunk"][0]
    assert rows < 43 and look["broken"] == [[17 // rows, 4], [60 // rows, 1]]
    assert look["first_broken"] == [17, 5] and (look["nan"], look["inf"]) == (4, 1)
    assert sum(look["histogram"][2]) == 6400 - 5 and look["max"] == pytest.approx(float(w[:17].max()), abs=9)
    assert "histogram" not in page.look("all") and page.look("all")["min"] is None
    assert "broken" not in page.look("a")


def test_the_page_shows_the_rank_that_wrote_each_chunk(tmp_path: Path) -> None:
    with zipfile.ZipFile(GOLDEN / "ranks.zip") as archive:
        archive.extractall(tmp_path / "one")
    ckpt = zarrckpt.open(tmp_path / "one")
    zarrckpt.report(ckpt, tmp_path / "page.html")
    page = Page(tmp_path / "page.html")
    wrote: dict[int, int] = {}
    for name in ckpt.tensors:
        layout, writers = page.layout(name), ckpt.writers(name)
        assert decoded(layout["writers"]) == writers.reshape(-1).tolist()
        assert layout["chunk"] == [*ckpt[name].chunks] and layout["chunks"] == writers.size
        for index, rank in np.ndenumerate(writers):
            cell = tuple(slice(i * n, (i + 1) * n) for i, n in zip(index, ckpt[name].chunks, strict=True))
            wrote[int(rank)] = wrote.get(int(rank), 0) + ckpt[name][cell].nbytes
    assert page.layout("rows")["writers"] == page.layout("columns")["writers"] == [[0, 1, 4]]
    assert dict(page.data["sides"][0]["ranks"]) == wrote and set(wrote) == {0, 1, 2, 3}
    assert page.data["sides"][0]["info"]["world_size"] == 4


# -- two checkpoints


def test_two_checkpoints_are_compared(tmp_path: Path) -> None:
    one = {"same": torch.randn(50), "w": torch.randn(300, 400), "gone": torch.ones(1), "cut": torch.ones(3), "lr": 0.1}
    w = one["w"] * 1.01  # type: ignore[operator]
    w[299, 7] = torch.nan
    other = {**one, "w": w, "cut": torch.ones(4), "new": torch.tensor([torch.inf]), "lr": 0.2}
    one |= {"lora": torch.zeros(3), "tensor": torch.ones(2), "value": 5}
    other |= {"lora": torch.ones(3), "tensor": [1.0, 1.0], "value": torch.tensor(5)}
    del other["gone"]
    zarrckpt.save(one, tmp_path / "one", options=zarrckpt.SaveOptions(max_chunk_bytes=1 << 16))
    zarrckpt.save(other, tmp_path / "two")
    a, b = zarrckpt.open(tmp_path / "one"), zarrckpt.open(tmp_path / "two")
    report = zarrckpt.report(a, tmp_path / "page.html", b)
    assert report.broken == ("w", "new")
    page, diff = Page(tmp_path / "page.html"), zarrckpt.diff(a, b)
    assert set(page.tensors) == {"same", "w", "gone", "cut", "new", "lora", "tensor", "value"}
    for name, rel_norm in (("same", 0), ("w", None), ("lora", "inf")):
        expected = vars(diff.tensors[name]) | {"rel_norm": rel_norm, "dtypes": ["float32", "float32"]}
        expected["max_abs_at"] = [*expected["max_abs_at"]] if expected["max_abs_at"] else None
        if math.isnan(expected["cosine"]):
            expected["cosine"] = None
        assert page.tensors[name]["difference"] == expected
    assert page.tensors["w"]["difference"]["new_nan"] == 1
    # A tensor in one and a value in the other under one name is one changed entry, on the page as in diff.
    assert {*diff.changed} == {"cut", "lr", "tensor", "value"} and not {"tensor", "value"} & {*diff.only_here}
    assert all(page.tensors[name]["value"] and page.entries[name]["changed"] for name in ("tensor", "value"))
    assert page.entries["tensor"]["sides"][0]["tensor"] == "float32 (2,)"
    assert page.entries["value"]["sides"][1]["tensor"] == "int64 ()"
    assert page.tensors["same"]["difference"]["unequal"] == 0
    assert [page.tensors[name]["sides"][1] is None for name in ("gone", "w")] == [True, False]
    assert page.tensors["new"]["sides"][0] is None and "difference" not in page.tensors["cut"]
    assert page.look("cut", 1)["count"] == 4 and page.look("new", 1)["inf"] == 1
    # Its chunks differ from those by which it was read.
    assert page.look("w", 1)["first_broken"] == [299, 7] and "broken" not in page.look("w", 1)
    assert page.entries["lr"]["changed"] and [side["text"] for side in page.entries["lr"]["sides"]] == ["0.1", "0.2"]


def test_a_copy_of_another_dtype_is_compared(tmp_path: Path) -> None:
    w = torch.randn(300, 400)
    w[299, 7] = torch.nan
    zarrckpt.save({"w": w, "n": torch.ones(3)}, tmp_path / "one", options=zarrckpt.SaveOptions(max_chunk_bytes=1 << 16))
    zarrckpt.save({"w": w.bfloat16(), "n": torch.ones(3).int()}, tmp_path / "two")
    a, b = zarrckpt.open(tmp_path / "one"), zarrckpt.open(tmp_path / "two")
    seen: list[tuple[int, int]] = []
    for number, (one, other) in enumerate([(a, b), (b, a)]):
        zarrckpt.report(one, tmp_path / f"{number}.html", other, progress=lambda *args: seen.append(args))
        page = Page(tmp_path / f"{number}.html")
        found = page.tensors["w"]["difference"]
        assert found["beyond_rounding"] == 0 < found["unequal"] and 1e-3 < found["max_rel"] < 2**-8
        assert found["dtypes"] == [one.entry("w").dtype, other.entry("w").dtype]
        # Both were read by the chunks of the wider one. Only for those are chunks with NaN known.
        assert ["broken" in page.look("w", side) for side in (number, 1 - number)] == [True, False]
        assert "difference" not in page.tensors["n"] and seen[-1][0] == seen[-1][1]
    zarrckpt.report(a, tmp_path / "layout.html", b, values=False)
    assert "equal" not in Page(tmp_path / "layout.html").tensors["w"]


# -- limits of the page

EVIL = [
    "</script><img src=x onerror=alert(1)>",
    "</script x",
    "<!--<script x",
    "a&lt;b",
    "\u2028",
    "$data",
    "${x}",
    "x\u202egnp.exe",
]


def test_names_and_values_are_never_markup(tmp_path: Path) -> None:
    state = {name: torch.ones(2) for name in EVIL} | {f"value {name}": (name, name) for name in EVIL}
    page = page_of(state, tmp_path)
    assert set(page.tensors) == set(EVIL)
    assert page.entries[f"value {EVIL[0]}"]["sides"][0]["text"] == repr((EVIL[0], EVIL[0]))
    assert not set("<>&\u2028") & set(page.texts["script#data"])
    assert [tag for tag, _ in page.elements].count("script") == 2
    assert not {tag for tag, _ in page.elements} - {
        "html",
        "head",
        "meta",
        "title",
        "style",
        "body",
        "noscript",
        "div",
        "script",
    }
    assert not [name for _, attributes in page.elements for name in attributes if name.startswith("on")]


def test_the_page_loads_no_other_resource(tmp_path: Path) -> None:
    page = page_of({"w": torch.ones(3), "link": "no link"}, tmp_path)
    code = page.texts["script"]
    assert set(re.findall(r"https?://[^'\"\s]+", page.text)) == {"http://www.w3.org/2000/svg"}  # a name, not an address
    assert not [attributes for _, attributes in page.elements if {"src", "href"} & set(attributes)]
    assert not re.search(r"@import|url\(|@font-face", page.texts["style"])
    assert not re.search(
        r"\b(fetch|XMLHttpRequest|WebSocket|importScripts|eval|innerHTML|outerHTML|insertAdjacentHTML|import)\b", code
    )
    policy = next(a["content"] for tag, a in page.elements if a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None and policy.startswith("default-src 'none';")
    for text in (code, page.texts["style"]):
        assert f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" in policy


def test_blobs_are_neither_read_nor_unpickled(tmp_path: Path) -> None:
    with pytest.warns(UserWarning):
        zarrckpt.save({"w": torch.ones(3), "blob": b"x" * 70000, "odd": slice(1, 2)}, tmp_path / "one")
    for name in ("blob", "odd"):
        (tmp_path / "one" / name / "c.0").unlink()
    zarrckpt.report(tmp_path / "one", tmp_path / "page.html")
    page = Page(tmp_path / "page.html")
    assert page.entries["blob"]["sides"][0] == {"type": "bytes", "encoding": "raw", "nbytes": 70000}
    assert page.entries["odd"]["sides"][0]["encoding"] == "pickle" and "text" not in page.entries["odd"]["sides"][0]


def test_long_values_are_cut(tmp_path: Path) -> None:
    page = page_of({"text": "x" * 50_000, "int": 10**5000, "w": torch.ones(1)}, tmp_path)
    shown = page.entries["text"]["sides"][0]
    assert len(shown["text"]) + shown["cut"] >= 50_000 and len(shown["text"]) <= 20_000
    assert "digits" in page.entries["int"]["sides"][0]["text"]


def test_without_values_no_tensor_is_read(tmp_path: Path) -> None:
    one = {"w": torch.ones(30, 40), "v": torch.ones(3), "c": torch.ones(64, 64), "step": 1}
    zarrckpt.save(one, tmp_path / "one")
    zarrckpt.save(
        {**one, "v": torch.zeros(3), "step": 2}, tmp_path / "two", options=zarrckpt.SaveOptions(max_chunk_bytes=8192)
    )
    for chunk in [*tmp_path.glob("*/[wvc]/c.*")]:
        chunk.unlink()
    a, b = zarrckpt.open(tmp_path / "one"), zarrckpt.open(tmp_path / "two")
    assert zarrckpt.report(a, tmp_path / "page.html", values=False).broken == ()
    page = Page(tmp_path / "page.html")
    assert page.data["values"] is False and page.tensors["w"]["sides"] == [{"layout": 0, "look": None}]
    zarrckpt.report(a, tmp_path / "both.html", b, values=False)
    both = Page(tmp_path / "both.html")
    assert {name: tensor["equal"] for name, tensor in both.tensors.items()} == {"w": True, "v": False, "c": None}
    assert both.entries["step"]["changed"]


def test_damage_is_an_error_and_keeps_the_old_page(tmp_path: Path) -> None:
    page_of({"w": torch.ones(3)}, tmp_path)
    before = (tmp_path / "page.html").read_bytes()
    chunk = tmp_path / "one" / "w" / "c.0"
    chunk.write_bytes(b"\1" + chunk.read_bytes()[1:])
    with pytest.raises(zarrckpt.CorruptCheckpointError):
        zarrckpt.report(tmp_path / "one", tmp_path / "page.html", overwrite=True)
    assert (tmp_path / "page.html").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "page.html"]


def test_a_page_of_many_tensors_stays_small(tmp_path: Path) -> None:
    state = {f"layers.{i}.weight": torch.randn(40, 25) for i in range(100)}
    page = page_of(state, tmp_path)
    assert len(page.data["sides"][0]["layouts"]) == 1  # equal layouts are stored once
    assert len(page.texts["script#data"]) < 100 * 900


# -- the command

STATE = {
    "model": {"w": torch.ones(3, 4), "b": torch.tensor([1.0, torch.nan])},
    "optim": {"m": torch.ones(3)},
    "step": 7,
}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    zarrckpt.save(STATE, tmp_path / "one")
    return tmp_path / "one"


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["report", *map(str, arguments)], catch_exceptions=False)


def test_the_command_writes_a_page(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = run(saved)
    assert found.exit_code == 0 and found.stdout.startswith(f"{tmp_path}/report.html: 3 tensors, ")
    assert "NaN or inf in model.b" in found.stdout
    assert set(Page(tmp_path / "report.html").tensors) == {"model.w", "model.b", "optim.m"}
    parts = run(
        saved, saved, "-o", "part.html", "--include", "model", "--include", "step", "--exclude", "*.b", "--json"
    )
    message = json.loads(parts.stdout)
    assert (message["path"], message["tensors"], message["broken"]) == (str(tmp_path / "part.html"), 1, [])
    page = Page(tmp_path / "part.html")
    assert set(page.tensors) == {"model.w"} and set(page.entries) == {"step"} and page.data["sides"][0]["part"]


def test_an_existing_page_is_kept(saved: Path, tmp_path: Path) -> None:
    target = tmp_path / "page.html"
    target.write_text("mine")
    found = run(saved, "-o", target)
    assert found.exit_code == 3 and "exists already" in found.stderr and "--overwrite" in found.stderr
    assert target.read_text() == "mine"
    assert run(saved, "-o", target, "--force").exit_code == 0
    assert Page(target).tensors


def test_a_link_is_replaced_and_never_followed(saved: Path, tmp_path: Path) -> None:
    outside, target = tmp_path / "outside", tmp_path / "page.html"

    def plant(done: int, total: int) -> None:
        if not target.is_symlink():
            target.symlink_to(outside)

    with pytest.raises(zarrckpt.StorageError, match="exists already"):
        zarrckpt.report(saved, target, progress=plant)
    assert target.is_symlink() and not outside.exists()
    outside.write_text("mine")
    zarrckpt.report(saved, target, overwrite=True)
    assert outside.read_text() == "mine" and not target.is_symlink() and Page(target).tensors


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["{saved}", "-o", "{tmp}/nowhere/page.html"], 3, "no folder"),
        (["{saved}", "-o", "{tmp}"], 3, "is a folder"),
        (["{saved}", "-o", "{tmp}/page.html", "--include", "modle"], 3, "modle"),
        (["{saved}", "-o", "{tmp}/page.html", "--exclude", "modle"], 3, "modle"),
        (["{tmp}/nothing", "-o", "{tmp}/page.html"], 3, "CheckpointNotFoundError"),
        (["{saved}", "{tmp}/nothing", "-o", "{tmp}/page.html"], 3, "CheckpointNotFoundError"),
        (["{saved}", "-o", "{tmp}/page.html", "-O", "half"], 2, "NAME=VALUE"),
        (["{saved}", "{saved}", "-o", "{tmp}/page.html", "-t", "half"], 2, "NAME=VALUE"),
        ([], 2, "URL"),
    ],
)
def test_wrong_input_is_named_and_nothing_is_written(
    saved: Path, tmp_path: Path, arguments: list[str], code: int, message: str
) -> None:
    found = run(*(argument.format(saved=saved, tmp=tmp_path) for argument in arguments))
    assert found.exit_code == code and message in found.stderr
    assert not [*tmp_path.glob("*.html*")]


def test_progress_ends_with_all_bytes(saved: Path, tmp_path: Path) -> None:
    ckpt, seen = zarrckpt.open(saved), []
    zarrckpt.report(ckpt, tmp_path / "one.html", progress=lambda *done: seen.append(done))
    assert seen[-1] == (ckpt.tensors.nbytes, ckpt.tensors.nbytes)
    both: list[tuple[int, int]] = []
    zarrckpt.save({"model": {"w": torch.ones(3, 4)}, "optim": {"m": torch.ones(5)}}, tmp_path / "two")
    zarrckpt.report(
        ckpt, tmp_path / "two.html", zarrckpt.open(tmp_path / "two"), progress=lambda *done: both.append(done)
    )
    assert both[-1][0] == both[-1][1] == 48 + 12 + 8 + 20 and all(a[0] < b[0] for a, b in pairwise(both))
