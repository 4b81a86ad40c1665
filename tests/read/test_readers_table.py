"""Results of each other library for each kind of array, measured and compared with ``docs/reference/readers.md``.

Each library reads in a separate process (``plain_readers.probe``). The bits are compared with the saved ones.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import ROOT, plain_readers
from harness.bits import bits
from harness.internals import DTYPES
from harness.random_tensors import random_tensor
from harness.store_servers import REGION, S3Place

import zarrckpt

PAGE = ROOT / "docs" / "reference" / "readers.md"
COLUMNS = {
    "zarrckpt": "zarrckpt",
    "zarr": "zarr-python",
    "zarrs": "zarrs",
    "xarray": "xarray `open_zarr`",
    "datatree": "xarray `open_datatree`",
    "dask": "dask",
    "tensorstore": "TensorStore",
}
TYPES = {
    "bool": ["bool"],
    "int8, int16, int32, int64": ["int8", "int16", "int32", "int64"],
    "uint8, uint16, uint32, uint64": ["uint8", "uint16", "uint32", "uint64"],
    "float16": ["float16"],
    "float32, float64": ["float32", "float64"],
    "complex64, complex128": ["complex64", "complex128"],
    "bfloat16": ["bfloat16"],
    "float8_e4m3fn": ["float8_e4m3fn"],
    "float8_e5m2": ["float8_e5m2"],
    "float8_e4m3fnuz, float8_e5m2fnuz": ["float8_e4m3fnuz", "float8_e5m2fnuz"],
    "float8_e8m0fnu": ["float8_e8m0fnu"],
}
NAMES = ["layers.0.weight", "a%b", "a/b", "@home", "__meta", "ünï✓", "zarr.json", "x y", "q?*#1"]
CORE = [name for name, dtype in DTYPES.items() if dtype.core]
SUBCHUNKS = (1100, 600)
PART = [[3, 7], [100, 200]]


@dataclass(frozen=True)
class Case:
    """A part of an array of a checkpoint, and the saved numbers."""

    url: str
    path: str
    expected: tuple[str, tuple[int, ...], bytes]
    box: list[list[int]] | None = None


class Rows:
    """Rows of the table: label -> cases. Also saves the checkpoints of the cases."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rows: dict[str, list[Case]] = {}

    def save(self, name: str, state: dict[str, Any], *, overwrite: bool = False, **options: Any) -> zarrckpt.Checkpoint:
        layout = zarrckpt.SaveOptions(durable=False, **options)
        zarrckpt.save(state, self.folder / name, overwrite=overwrite, options=layout)
        return zarrckpt.open(self.folder / name)

    def add(self, row: str, ckpt: zarrckpt.Checkpoint, tensors: dict[str, torch.Tensor], box: Any = None) -> None:
        for fqn, tensor in tensors.items():
            part = tensor if box is None else tensor[tuple(slice(*pair) for pair in box)]
            self.rows.setdefault(row, []).append(Case(ckpt.url, ckpt.entry(fqn).node_path, bits(part), box))


def make_rows(folder: Path) -> dict[str, list[Case]]:
    torch.manual_seed(5)
    rows = Rows(folder)
    _types(rows)
    _forms(rows)
    _compressed(rows)
    _damaged(rows)
    return rows.rows


def _types(rows: Rows) -> None:
    square, scalar, empty = ({n: random_tensor(n, shape) for n in DTYPES} for shape in ((8, 8), (), (0, 3)))
    ckpt = rows.save("types", {"square": square, "scalar": scalar, "empty": empty})
    for row, names in TYPES.items():
        rows.add(row, ckpt, {f"square.{name}": square[name] for name in names})
    rows.add("0-dimensional", ckpt, {f"scalar.{name}": scalar[name] for name in CORE})
    rows.add("no elements", ckpt, {f"empty.{name}": empty[name] for name in CORE})
    others = {name: square[name] for name in DTYPES if name not in CORE}
    options = zarrckpt.SaveOptions(durable=False, portable_dtypes=True)
    zarrckpt.save(others, folder := rows.folder / "portable", options=options)
    as_integers = {name: t.view(getattr(torch, DTYPES[name].portable.name)) for name, t in others.items()}
    rows.add("bfloat16 and float8 saved with `portable_dtypes`", zarrckpt.open(folder), as_integers)


def _forms(rows: Rows) -> None:
    named = {name: torch.randn(3, 5) for name in NAMES}
    rows.add(
        "names with `/`, `%`, spaces, unicode", rows.save("names", {"m": named}), {f"m.{n}": named[n] for n in NAMES}
    )
    rows.save("overwritten", {"m": {"old": torch.zeros(2)}})
    rows.add("after an overwrite", rows.save("overwritten", {"m": named}, overwrite=True), {"m.x y": named["x y"]})
    uneven = {"w": torch.randn(303, 77)}
    ckpt = rows.save("uneven", uneven, max_chunk_bytes=1 << 14)
    assert uneven["w"].shape[0] % ckpt["w"].chunks[0], "the last chunk should be cut"
    rows.add("several chunks, the last one cut", ckpt, uneven)
    large = {"w": torch.randn(SUBCHUNKS), "half": torch.randn(SUBCHUNKS).bfloat16()}
    ckpt = rows.save("large", large)
    assert all(ckpt[name].shards for name in large)
    rows.add("subchunks (`sharding_indexed`)", ckpt, large)
    rows.add("a part of an array with subchunks", ckpt, large, PART)
    plain = {"w": torch.randn(30, 7), "x y": torch.ones(2), "scalar": torch.ones(())}
    ckpt = rows.save("archive.zarr.zip", {"m": plain, **large})
    rows.add("an archive, one ZIP file", ckpt, {f"m.{name}": tensor for name, tensor in plain.items()} | large)
    rows.add("an archive, one ZIP file", ckpt, {"m.w": plain["w"]}, [[3, 7], [1, 2]])


def _compressed(rows: Rows) -> None:
    state = {"small": torch.randn(64, 64), "w": torch.randn(SUBCHUNKS), "half": torch.randn(SUBCHUNKS).bfloat16()}
    for codec in ("zstd", "blosc"):
        ckpt = rows.save(codec, state, compression=codec)
        assert {*ckpt.info.compression} == {codec}
        rows.add(f"{codec}, with and without subchunks", ckpt, state)


def _damaged(rows: Rows) -> None:
    state = {"w": torch.randn(301, 77), "large": torch.randn(SUBCHUNKS), "lost": torch.randn(3, 3)}
    ckpt = rows.save("damaged", state, max_chunk_bytes=1 << 22)
    w, large = (rows.folder / "damaged" / name / "c.0.0" for name in ("w", "large"))
    for file in (w, large):
        data = bytearray(file.read_bytes())
        data[4 * 77 * 3 + 1] ^= 1  # in the box of PART, too
        file.write_bytes(data)
    (rows.folder / "damaged" / "lost" / "c.0.0").unlink()
    rows.add("a flipped bit", ckpt, {"w": state["w"], "large": state["large"]})
    rows.add("a flipped bit, a part of the chunk is read", ckpt, {"w": state["w"]}, [[3, 7], [0, 77]])
    rows.add("a flipped bit, the subchunk is read", ckpt, {"large": state["large"]}, [[0, 8], [0, 300]])
    rows.add("a chunk that is gone", ckpt, {"lost": state["lost"]})


def cell(cases: Sequence[Case], answers: Iterator[tuple[str, Any]]) -> str:
    """Return the cell for the cases of one row, from a reader's next answers."""
    return "; ".join(sorted({_word(case, *next(answers)) for case in cases}))


def _word(case: Case, how: str, what: Any) -> str:
    if how == "raised":
        return "error"
    if what == case.expected:
        return "yes" if how == "read" else "yes, warns"
    values = np.frombuffer(what[2], what[0])
    return "**NaN**" if np.isnan(values).all() else "**other numbers**"


def as_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def on_the_page(name: str) -> str:
    match = re.search(rf"<!-- measured: {name} -->\n(.*?)<!-- end -->", PAGE.read_text(), re.DOTALL)
    assert match, f"{PAGE} has no table {name!r}"
    return match[1]


# Two processes. The first does not import this package. zarrs is last, because it stays switched on.
PROCESSES = (("xarray", "datatree", "dask", "zarr"), ("tensorstore", "zarrckpt", "zarrs"))
Asked = dict[str, list[dict[str, Any]]]
Answers = dict[str, list[tuple[str, Any]]]


def probed(folder: Path, asked: Asked, environment: dict[str, str]) -> Answers:
    """Return each reader's answers to its cases."""

    def probe(readers: Sequence[str]) -> Answers:
        (folder / readers[0]).mkdir()
        steps = [("probe", {"reader": r, "cases": asked[r], "environment": environment}) for r in readers]
        return dict(zip(readers, plain_readers.call(folder / readers[0], *steps), strict=True))

    with ThreadPoolExecutor() as pool:
        return {reader: found for answers in pool.map(probe, PROCESSES) for reader, found in answers.items()}


def test_the_tables_match_the_readers(tmp_path: Path, moto_bucket: S3Place) -> None:
    rows, on_s3 = make_rows(tmp_path), make_s3_cases(moto_bucket)
    cases = [case for row in rows.values() for case in row]
    ways = {reader: _ways(reader) for reader in COLUMNS}
    asked = {
        reader: [_local(case) for case in cases]
        + [_s3(case, way, moto_bucket) for way in ways[reader] for case in on_s3]
        for reader in COLUMNS
    }
    answers = {reader: iter(found) for reader, found in probed(tmp_path, asked, moto_bucket.environment).items()}
    types = [[row, *(cell(rows[row], answers[reader]) for reader in COLUMNS)] for row in rows]
    s3 = []
    for reader, column in COLUMNS.items():
        found = {way: cell(on_s3, answers[reader]) for way in ways[reader]}
        s3.append([column, *(found.get(way, "-") for way in S3_WAYS)])
    assert not [left for iterator in answers.values() for left in iterator]
    for name, head, table in (
        ("types and features", ["", *COLUMNS.values()], types),
        ("S3", ["", *S3_WAYS.values()], s3),
    ):
        text = as_table(head, table)
        assert text == on_the_page(name), f"put this on the page:\n{text}"


S3_WAYS = {"url": "an `s3://` url (s3fs)", "obstore": "an obstore store", "driver": "its own S3 driver"}


def make_s3_cases(place: S3Place) -> list[Case]:
    """Return whole arrays and a part of one, below the group of an overwrite, in a folder with a space."""
    url, options = place.url("runs/step 7"), place.storage_options
    zarrckpt.save({"old": torch.zeros(4)}, url, storage_options=options)
    state = {"w": torch.randn(3, 5), "half": random_tensor("bfloat16", (5,)), "large": torch.randn(SUBCHUNKS)}
    zarrckpt.save(state, url, overwrite=True, storage_options=options)
    ckpt = zarrckpt.open(url, storage_options=options)
    whole = [Case(url, ckpt.entry(fqn).node_path, bits(tensor)) for fqn, tensor in state.items()]
    part = state["large"][tuple(slice(*pair) for pair in PART)]
    return [*whole, Case(url, ckpt.entry("large").node_path, bits(part), PART)]


def _ways(reader: str) -> list[str]:
    """Return the ways in which a reader reaches S3. zarrckpt's own reader includes obstore."""
    return {"tensorstore": ["driver"], "zarrckpt": ["driver"]}.get(reader, ["url", "obstore"])


def _local(case: Case) -> dict[str, Any]:
    return {"path": case.path, "place": case.url} | ({} if case.box is None else {"box": case.box})


def _s3(case: Case, way: str, place: S3Place) -> dict[str, Any]:
    asked = _local(case)
    if way == "obstore":
        keys = {"access_key_id": place.key, "secret_access_key": place.secret}
        return {**asked, "obstore": {"url": case.url, "endpoint": place.endpoint, "region": REGION, **keys}}
    options = place.storage_options if way == "driver" else place.s3fs_options
    return {**asked, "options": {"storage_options": options}}
