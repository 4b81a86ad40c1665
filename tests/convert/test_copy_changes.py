"""Copies with other chunks, dtypes or compression: the same values, the right tables, for every reader."""

from __future__ import annotations

import json
import math
import warnings
import zipfile
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401 - numpy knows bfloat16 by it
import numpy as np
import pytest
import tensorstore as ts
import torch
import zarr
from click.testing import CliRunner
from harness import GOLDEN
from harness.internals import DTYPES
from harness.memory_peaks import peak_of
from harness.random_tensors import random_tensor
from harness.store_servers import S3Place
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

import zarrckpt
from zarrckpt.cli import main

CHANGES: dict[str, dict[str, Any]] = {
    "smaller chunks": {"max_chunk_bytes": 100_000},
    "one shape": {"chunks": (64, -1)},
    "compressed": {"compression": {"name": "zstd", "level": 3}},
    "all of it": {"chunks": {"model.w": (100, 70), "model": (-1,)}, "max_chunk_bytes": 50_000, "compression": "blosc"},
}


def _state() -> dict[str, Any]:
    torch.manual_seed(0)
    return {
        "model": {"w": torch.randn(801, 603), "b": torch.randn(70_001).bfloat16()},
        "other": {"i": torch.arange(40_000), "flag": torch.rand(300, 7) < 0.5, "z": torch.randn(9, 5, 3).cfloat()},
        "odd": {"empty": torch.zeros(0, 3), "scalar": torch.tensor(2.5)},
        "step": 7,
        "blob": b"bytes" * 50_000,
    }


def _bits(value: torch.Tensor) -> torch.Tensor:
    return value.reshape(-1).view(torch.uint8)


def _tables(ckpt: zarrckpt.Checkpoint) -> dict[str, list[int]]:
    catalog = ckpt._catalog
    return {node.path: catalog.checksums(node).tolist() for node in catalog.root.arrays()}


@pytest.mark.parametrize(
    ("saving", "changes"),
    [
        *(({}, changes) for changes in CHANGES.values()),
        ({"compression": "blosc"}, CHANGES["all of it"]),
        ({"portable_dtypes": True}, CHANGES["smaller chunks"]),
    ],
)
def test_other_chunks_hold_the_same_values(tmp_path: Path, saving: dict[str, Any], changes: dict[str, Any]) -> None:
    if "chunks" in changes and isinstance(changes["chunks"], dict):
        changes = {**changes, "chunks": {"model.w": (100, 70), "model.b": (-1,)}}
    zarrckpt.save(_state(), tmp_path / "one", options=zarrckpt.SaveOptions(**saving))
    one = zarrckpt.open(tmp_path / "one")
    seen: list[tuple[int, int]] = []
    report = zarrckpt.copy(one, tmp_path / "two", progress=lambda *done: seen.append(done), **changes)
    two = zarrckpt.open(tmp_path / "two")
    two.verify().raise_if_damaged()
    assert zarrckpt.diff(one, two) and str(one.load()) == str(two.load()) and seen[-1][0] == seen[-1][1]
    chunks = [path for path in (tmp_path / "two").rglob("c*") if path.is_file() and "@zarrckpt" not in path.parts]
    assert report.objects == len(chunks) and report.nbytes == sum(path.stat().st_size for path in chunks)
    again = zarrckpt.copy(one, tmp_path / "three", **changes)
    assert _tables(zarrckpt.open(tmp_path / "three")) == _tables(two) and again.nbytes == report.nbytes
    group = zarr.open_group(tmp_path / "two", mode="r")
    expected = one.read()
    stored = zarr.open_group(tmp_path / "one", mode="r")[one.entry("model.b").node_path]
    assert group[two.entry("model.b").node_path].dtype == stored.dtype  # an unsigned integer's, if portable
    for name in ("model.w", "other.i", "other.z", "odd.scalar"):
        assert np.array_equal(group[two.entry(name).node_path][...], expected[name])
        spec = {
            "driver": "zarr3",
            "kvstore": {"driver": "file", "path": f"{tmp_path}/two/{two.entry(name).node_path}/"},
        }
        assert np.array_equal(ts.open(spec).result().read().result(), expected[name])


def test_copies_have_the_chunks_of_a_save_by_one_process(tmp_path: Path) -> None:
    zarrckpt.save(_state(), tmp_path / "one")
    zarrckpt.save(
        _state(), tmp_path / "small", options=zarrckpt.SaveOptions(max_chunk_bytes=100_000, compression="zstd")
    )
    one, small = zarrckpt.open(tmp_path / "one"), zarrckpt.open(tmp_path / "small")
    zarrckpt.copy(one, tmp_path / "two", max_chunk_bytes=100_000, compression="zstd")
    two = zarrckpt.open(tmp_path / "two")
    assert {fqn: node.document_bytes() for fqn, node in two._catalog.root.tensors.items()} == {
        fqn: node.document_bytes() for fqn, node in small._catalog.root.tensors.items()
    }
    assert _tables(two) == _tables(small) and two._catalog.sizes(two._catalog.root.tensors["model.w"]) is not None


def test_unchanged_chunks_are_copied_as_bytes(tmp_path: Path) -> None:
    zarrckpt.save(_state(), tmp_path / "one", options=zarrckpt.SaveOptions(compression={"name": "zstd", "level": 5}))
    zarrckpt.copy(tmp_path / "one", tmp_path / "two", dtype={"model.w": "float64"}, chunks={"other.i": (640,)})
    for path in (tmp_path / "one").rglob("c*"):
        below = path.relative_to(tmp_path / "one")
        if path.is_file() and "@zarrckpt" not in below.parts and below.parts[1] not in ("w", "i"):
            assert path.read_bytes() == (tmp_path / "two" / below).read_bytes()
    two = zarrckpt.open(tmp_path / "two")
    assert two.verify() and two["model.w"].dtype == np.float64 and two["other.i"].chunks == (640,)
    assert "Zstd" in str(two["model.w"].compressors)
    zarrckpt.copy(two, tmp_path / "three", compression=None)
    three = zarrckpt.open(tmp_path / "three")
    assert three.verify() and zarrckpt.diff(two, three) and not list((tmp_path / "three").glob("@zarrckpt/*/sizes"))
    assert (
        "Zstd" not in str(three["model.w"].compressors)
        and (three.read(["other.i"])["other.i"] == np.arange(40_000)).all()
    )


CAST_TO = [name for name, dtype in DTYPES.items() if dtype.kind == "float" and name != "float8_e8m0fnu"]


def _hard_to_cast() -> dict[str, torch.Tensor]:
    """Return every float16 and bfloat16, and wide numbers: near midpoints of narrow ones, and of any magnitude."""
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    found = {"float16": bits.view(torch.float16), "bfloat16": bits.view(torch.bfloat16)}
    narrow = [found["float16"][::7], found["bfloat16"][::7]]
    narrow += [torch.arange(256).byte().view(getattr(torch, name)) for name in CAST_TO if name.startswith("float8")]
    values = [torch.unique(part.double()[part.double().isfinite()]) for part in narrow]
    middle = torch.cat([(part[1:] + part[:-1]) / 2 for part in values])
    random = torch.randn(5000, dtype=torch.float64) * 10.0 ** torch.empty(5000, dtype=torch.float64).uniform_(-330, 300)
    special = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0, 1e300, 5e-324], dtype=torch.float64)
    near = [middle * factor for factor in (1, 1 + 2**-52, 1 - 2**-53, 1 + 2**-30, 1 - 2**-30, 1 + 2**-22, 1 - 2**-22)]
    wide = torch.cat([*values, *near, random, special])
    return found | {"float64": wide, "float32": wide.float()}


def _same_numbers(found: torch.Tensor, expected: torch.Tensor) -> bool:
    one, other = found.double(), expected.double()
    same = (one.view(torch.int64) == other.view(torch.int64)) | (one.isnan() & other.isnan())
    return found.dtype == expected.dtype and bool(same.all())


@pytest.mark.parametrize("name", CAST_TO)
def test_copies_exports_and_loads_cast_like_torch(tmp_path: Path, name: str) -> None:
    dtype, state = getattr(torch, name), _hard_to_cast()
    rest = {"i": torch.arange(5), "z": torch.randn(3).cfloat(), "t": torch.tensor([True, False])}
    zarrckpt.save(state | rest, tmp_path / "one", options=zarrckpt.SaveOptions(max_chunk_bytes=100_000))
    one = zarrckpt.open(tmp_path / "one")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of values beyond the range
        report = zarrckpt.copy(one, tmp_path / "two", dtype=name)
        exported = zarrckpt.to_safetensors(one.select(*state), tmp_path / "three.safetensors", dtype=name)
    two = zarrckpt.open(tmp_path / "two")
    assert two.verify() and report.overflowed == exported.overflowed
    ways = [two.load(), load_file(tmp_path / "three.safetensors")]
    for strided in (False, True):
        target = {key: torch.empty(2 * len(value), dtype=dtype)[::2] for key, value in state.items()}
        target = target if strided else {key: value.contiguous() for key, value in target.items()}
        zarrckpt.load(target, tmp_path / "one", strict=False, allow_cast=True)
        ways.append(target)
    for key, value in state.items():
        expected = value.to(dtype)
        assert [_same_numbers(way[key], expected) for way in ways] == [True] * 4, key
        # 464 is half-way between 448 and 480, which would be next.
        beyond = value.float().abs() > 464 if name == "float8_e4m3fn" else ~expected.double().isfinite()
        assert report.overflowed.get(key, 0) == (value.isfinite() & beyond).sum()
    assert all(torch.equal(two.load()[key], value) for key, value in rest.items())


def test_portable_copies_have_the_same_bytes(tmp_path: Path) -> None:
    state = {name: random_tensor(name, (9, 4)) for name in DTYPES}
    zarrckpt.save(state, tmp_path / "one")
    one = zarrckpt.open(tmp_path / "one")
    arguments = ["cp", str(tmp_path / "one"), str(tmp_path / "two"), "--portable"]
    assert CliRunner().invoke(main, arguments, catch_exceptions=False).exit_code == 0
    two = zarrckpt.open(tmp_path / "two")
    assert two.verify() and zarrckpt.diff(one, two) and _tables(one) == _tables(two)
    for name, tensor in state.items():
        assert two[name].dtype.name == DTYPES[name].portable.name
        chunks = [(tmp_path / place / name / "c.0.0").read_bytes() for place in ("one", "two")]
        assert chunks[0] == chunks[1] and torch.equal(_bits(two.load(name)[name]), _bits(tensor))
    # A copy of them is portable as well, unless its types are cast.
    zarrckpt.copy(two, tmp_path / "three", chunks=(3, 4), dtype={"float8_e5m2": "float16", "float32": "bfloat16"})
    three = zarrckpt.open(tmp_path / "three")
    names = ("bfloat16", "float8_e5m2", "float8_e4m3fn", "float32")
    assert [three[name].dtype.name for name in names] == ["uint16", "float16", "uint8", "bfloat16"]
    assert three.verify() and torch.equal(_bits(three.load("bfloat16")["bfloat16"]), _bits(state["bfloat16"]))


def test_values_beyond_the_range_are_counted(tmp_path: Path) -> None:
    values = torch.tensor([1.0, 70_000.0, -1e30, float("inf"), float("nan"), 65_504.0])
    zarrckpt.save(
        {"a": values, "b": torch.ones(3), "n": {"c": values.repeat(1000)}},
        tmp_path / "one",
        options=zarrckpt.SaveOptions(max_chunk_bytes=4096),
    )
    with pytest.warns(UserWarning) as caught:
        report = zarrckpt.copy(tmp_path / "one", tmp_path / "two", dtype="float16")
    assert report.overflowed == {"a": 2, "n.c": 2000}
    assert [str(item.message)[:13] for item in caught] == ["'a': 2 finite", "'n.c': 2,000 "]
    found = zarrckpt.open(tmp_path / "two").read()["a"]
    assert found.tolist()[:4] == [1.0, np.inf, -np.inf, np.inf] and found[5] == 65_504
    arguments = ["cp", str(tmp_path / "one"), str(tmp_path / "three"), "--dtype", "float8_e4m3fn", "--json"]
    done = CliRunner().invoke(main, arguments, catch_exceptions=False)
    assert json.loads(done.stdout)["overflowed"] == {"a": 3, "n.c": 3000}
    assert "warning: 'a': 3 finite" in done.stderr and "Traceback" not in done.stderr


def test_a_bfloat16_copy_keeps_step_counters(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Linear(4, 1))
    optim = torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-3))
    loop = {"seen": torch.tensor([257.0]), "global_step": torch.full((3,), 257.0)}
    each_rank = zarrckpt.PerRank({"count": torch.tensor(257.0)})
    state = {"model": model, "optim": optim, "loop": loop, "own": each_rank}
    for _ in range(257):
        model(torch.randn(2, 8)).sum().backward()
        optim.step()
    zarrckpt.save(state, tmp_path / "one")
    found = CliRunner().invoke(main, ["cp", str(tmp_path / "one"), str(tmp_path / "two"), "--dtype", "bfloat16"])
    copy = zarrckpt.open(tmp_path / "two")
    kept = {fqn for fqn in copy.tensors if copy.entry(fqn).dtype == "float32"}
    others = {"optim.param_groups.0.lr", "loop.seen", "loop.global_step", "own.ranks.count"}
    assert kept == others | {f"optim.state.{name}.step" for name, _ in model.named_parameters()}
    assert "not cast: 8 counters and single numbers: optim.state.0.weight.step" in found.stdout
    zarrckpt.load(state, tmp_path / "two", allow_cast=True)
    optim.step()
    assert {float(part["step"]) for part in optim.state.values()} == {258.0} and loop["seen"] == 257


def test_patterns_cast_counters_only_by_full_name(tmp_path: Path) -> None:
    model = {"w": torch.randn(5, 4), "i": torch.arange(3), "scale": torch.tensor(2.5), "odd": torch.tensor([1.5])}
    zarrckpt.save({"model": model, "optim": {"step": torch.tensor(1001.0)}}, tmp_path / "one")
    wanted = {"model.w": "float16", "model": "bfloat16", "model.odd": "float64"}
    report = zarrckpt.copy(tmp_path / "one", tmp_path / "two", dtype=wanted)
    found = {fqn: array.dtype.name for fqn, array in zarrckpt.open(tmp_path / "two").read().items()}
    dtypes = {"model.w": "float16", "model.i": "int64", "model.scale": "float32", "model.odd": "float64"}
    assert found == {**dtypes, "optim.step": "float32"} and report.uncast == ("model.scale",)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"dtype": "int8"}, ValueError),
        ({"dtype": "complex64"}, ValueError),
        ({"dtype": "float8_e8m0fnu"}, ValueError),
        ({"dtype": "float3"}, zarrckpt.UnsupportedValueError),
        ({"dtype": {"other.i": "bfloat16"}}, ValueError),
        ({"dtype": {"odd.scal*": "bfloat16"}}, ValueError),
        ({"dtype": {"nothing.*": "bfloat16"}}, zarrckpt.KeyMismatchError),
        ({"chunks": (3, 0)}, ValueError),
        ({"chunks": (3, 2, 1, 1)}, ValueError),
        ({"chunks": {"model.w": (3,)}}, ValueError),
        ({"chunks": {"step": (3,)}}, zarrckpt.KeyMismatchError),
        ({"chunks": "auto"}, TypeError),
        ({"max_chunk_bytes": 0}, ValueError),
        ({"compression": "lz4"}, ValueError),
        ({"max_inflight_bytes": 0}, ValueError),
    ],
)
def test_meaningless_options_are_refused(tmp_path: Path, options: dict[str, Any], error: type[Exception]) -> None:
    zarrckpt.save(_state(), tmp_path / "one")
    with pytest.raises(error):
        zarrckpt.copy(tmp_path / "one", tmp_path / "two", **options)
    assert not (tmp_path / "two").exists()


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--dtype", "int8"], 2),
        (["--dtype", "float3"], 2),
        (["--dtype", "other.i=bfloat16"], 2),
        (["--dtype", "bfloat16", "--dtype", "model=float16"], 2),
        (["--chunks", "3,x"], 2),
        (["--chunks", "model.w=3"], 2),
        (["--max-chunk-mb", "0"], 2),
        (["--compression", "lz4"], 2),
        (["--dtype", "nothing=bfloat16"], 3),
    ],
)
def test_wrong_arguments_are_refused(tmp_path: Path, arguments: list[str], code: int) -> None:
    zarrckpt.save(_state(), tmp_path / "one")
    found = CliRunner().invoke(main, ["cp", str(tmp_path / "one"), str(tmp_path / "two"), *arguments])
    assert found.exit_code == code and not (tmp_path / "two").exists() and found.stderr


def test_cp_changes_dtypes_and_chunks_from_the_terminal(tmp_path: Path) -> None:
    zarrckpt.save(_state(), tmp_path / "one")
    arguments = ["--include", "model", "--include", "other", "--exclude", "*.z", "--chunks", "model.w=100,-1"]
    arguments += ["--max-chunk-mb", "0.1", "--dtype", "model=float16", "--compression", "zstd"]
    found = CliRunner().invoke(main, ["cp", str(tmp_path / "one"), str(tmp_path / "two"), *arguments])
    assert found.exit_code == 0 and "copied to" in found.stdout
    assert CliRunner().invoke(main, ["cp", str(tmp_path / "one"), str(tmp_path / "two")]).exit_code == 3
    two = zarrckpt.open(tmp_path / "two")
    assert two.verify() and list(two) == ["model.w", "model.b", "other.i", "other.flag"]
    assert two["model.w"].chunks == (100, 603) and two["model.w"].dtype == np.float16
    assert two["other.i"].nchunks > 3 and "Zstd" in str(two["other.i"].compressors)


def test_damage_is_not_copied(tmp_path: Path) -> None:
    zarrckpt.save(_state(), tmp_path / "one", options=zarrckpt.SaveOptions(max_chunk_bytes=300_000))
    chunk = next((tmp_path / "one" / "model" / "w").glob("c.1*"))
    data = bytearray(chunk.read_bytes())
    data[1000] ^= 1
    chunk.write_bytes(data)
    for number, changes in enumerate(({}, {"max_chunk_bytes": 1 << 20}, {"dtype": "float16"}, {"compression": "zstd"})):
        with pytest.raises(zarrckpt.CorruptCheckpointError, match="model/w"):
            zarrckpt.copy(tmp_path / "one", tmp_path / str(number), **changes)  # type: ignore[arg-type]
        with pytest.raises(zarrckpt.CheckpointNotFoundError):
            zarrckpt.open(tmp_path / str(number))


def test_a_changed_copy_may_replace_its_source(tmp_path: Path, moto_bucket: S3Place) -> None:
    zarrckpt.save(_state(), tmp_path / "one")
    url, options = moto_bucket.url("changed"), moto_bucket.storage_options
    one = zarrckpt.open(tmp_path / "one")
    zarrckpt.copy(one, url, storage_options=options, max_chunk_bytes=100_000, compression="zstd")
    there = zarrckpt.open(url, storage_options=options)
    assert there.verify() and zarrckpt.diff(one, there)
    zarrckpt.copy(there, url, storage_options=options, overwrite=True, dtype="bfloat16", max_chunk_bytes=400_000)
    there = zarrckpt.open(url, storage_options=options)
    assert there.verify() and there["model.w"].dtype.name == "bfloat16"
    zarrckpt.copy(there, tmp_path / "back", chunks=(50, 50))
    assert zarrckpt.open(tmp_path / "back").verify() and zarrckpt.diff(there, zarrckpt.open(tmp_path / "back"))


def test_memory_is_bounded(tmp_path: Path) -> None:
    zarrckpt.save(
        {"w": torch.randn(4096, 5120)}, tmp_path / "one", options=zarrckpt.SaveOptions(max_chunk_bytes=4 << 20)
    )  # 80 MiB
    one = zarrckpt.open(tmp_path / "one")
    zarrckpt.copy(one, tmp_path / "warm", chunks=(2048, 2048), compression="zstd", dtype="float16")
    for number, changes in enumerate(({"chunks": (-1, 256)}, {"dtype": "bfloat16"}, {"compression": "zstd"})):
        place, limit = tmp_path / str(number), 16 << 20
        peak = peak_of(partial(zarrckpt.copy, one, place, max_inflight_bytes=limit, **changes))  # type: ignore[arg-type]
        assert peak < 2 * limit, changes


def test_writers_are_the_ranks_that_wrote_most_of_a_chunk(tmp_path: Path) -> None:
    # Four ranks saved it: rows 0-3, 4-7, 8-11 and 12, and two columns each.
    zipfile.ZipFile(GOLDEN / "ranks.zip").extractall(tmp_path / "one")
    one = zarrckpt.open(tmp_path / "one")
    assert one.writers("rows").tolist() == [[0], [1], [2], [3]] and one.writers("columns").tolist() == [[0, 1, 2, 3]]
    zarrckpt.copy(one, tmp_path / "two", chunks={"rows": (7, 3), "columns": (-1, 4)})
    two = zarrckpt.open(tmp_path / "two")
    assert two.writers("rows").tolist() == [[0, 0], [2, 2]] and two.writers("columns").tolist() == [[0, 2]]
    zarrckpt.copy(one, tmp_path / "three", compression="zstd")
    three = zarrckpt.open(tmp_path / "three")
    assert three.writers("rows").tolist() == [[0], [1], [2], [3]] and three.info.world_size == two.info.world_size == 4
    assert two.verify() and three.verify() and zarrckpt.diff(one, two) and zarrckpt.diff(one, three)


SIZES = st.lists(st.integers(0, 40), max_size=3)


@settings(max_examples=8)
@given(shape=SIZES, data=st.data())
def test_any_shape_is_copied_into_any_chunks(
    tmp_path_factory: pytest.TempPathFactory, shape: list[int], data: st.DataObject
) -> None:
    place = tmp_path_factory.mktemp("any")
    chunks = tuple(data.draw(st.sampled_from([-1, 1, 2, 7, 40])) for _ in shape)
    value = torch.randn(shape, dtype=torch.float64)
    zarrckpt.save(
        {"w": value},
        place / "one",
        options=zarrckpt.SaveOptions(max_chunk_bytes=data.draw(st.sampled_from([64, 1000, 100_000]))),
    )
    one = zarrckpt.open(place / "one")
    compression = data.draw(st.sampled_from(["keep", "blosc"]))
    dtype = data.draw(st.sampled_from([None, "float32"]))
    zarrckpt.copy(one, place / "two", chunks=chunks, compression=compression, dtype=dtype)
    two = zarrckpt.open(place / "two")
    two.verify().raise_if_damaged()
    # Single numbers, such as the step of an optimizer, are not cast.
    expected = value if dtype is None or value.numel() == 1 else value.float()
    assert torch.equal(two.load()["w"], expected)
    zarrckpt.copy(
        two, place / "three", max_chunk_bytes=300, compression=None, dtype=None if dtype is None else "float64"
    )
    assert torch.equal(zarrckpt.open(place / "three").load()["w"], expected.double())
