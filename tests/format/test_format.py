"""Stored bytes follow the format page: the reader on that page reads them."""

from __future__ import annotations

import io
import json
import math
import random
from collections import OrderedDict
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from harness.bits import bits, same
from harness.internals import DTYPES, by_name, by_torch_name
from harness.merging import MergingOptions
from harness.page_reader import PAGE, Reader
from harness.random_tensors import random_tensor
from harness.ranks import run_ranks
from harness.s3_server import S3Server
from harness.shared_chunks import sharing_small_chunks

import zarrckpt
from zarrckpt import UnsupportedValueError
from zarrckpt._format.crc64 import crc64

SCHEMA: Any = jsonschema.Draft202012Validator(json.loads(PAGE.with_name("zarrckpt.schema.json").read_bytes()))


def read(folder: Path) -> Reader:
    """Return the page's reader of a checkpoint whose root has the published schema."""
    SCHEMA.validate(json.loads((folder / "zarr.json").read_bytes()))
    return Reader(folder)


def check_tensors(reader: Reader, flat: dict[str, torch.Tensor]) -> None:
    for fqn, tensor in flat.items():
        dtype, shape, data = reader.tensor(fqn)
        assert (dtype, tuple(shape), data) == bits(tensor), fqn


def test_the_table_is_torchs_dtypes_that_zarr_can_name() -> None:
    known = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    for name, dtype in DTYPES.items():
        ours = known.pop(f"torch.{name}")
        assert by_torch_name(str(ours)) is by_torch_name(name) is by_name(name) is dtype
        assert (dtype.name, dtype.itemsize, dtype.numpy.itemsize) == (name, ours.itemsize, ours.itemsize)
        assert ours.is_floating_point == (dtype.kind == "float")
        assert ours.is_complex == (dtype.kind == "complex")
        if dtype.kind in ("int", "uint"):
            limits = torch.iinfo(ours)
            assert dtype.fill_value == (limits.min if dtype.kind == "int" else limits.max)
    assert known, "nothing left to refuse"
    for name in known:
        with pytest.raises(UnsupportedValueError, match=name):
            by_torch_name(name)


SHAPES = {"matrix": (5, 7), "scalar": (), "empty": (0, 3), "none": (4, 0), "one": (1,)}


@pytest.mark.parametrize("portable", [False, True])
def test_every_dtype_and_shape(tmp_path: Path, portable: bool) -> None:
    torch.manual_seed(1)
    state = {kind: {name: random_tensor(name, shape) for name in DTYPES} for kind, shape in SHAPES.items()}
    zarrckpt.save(state, tmp_path / "ck", options=zarrckpt.SaveOptions(portable_dtypes=portable))
    reader = read(tmp_path / "ck")
    flat = {f"{kind}.{name}": tensor for kind, group in state.items() for name, tensor in group.items()}
    check_tensors(reader, flat)
    assert list(reader.entries) == list(flat)
    document = json.loads((tmp_path / "ck/matrix/bfloat16/zarr.json").read_bytes())
    assert document["data_type"] == ("uint16" if portable else "bfloat16")


def test_views_are_saved_by_their_content(tmp_path: Path) -> None:
    real, cplx = torch.randn(6, 8), torch.randn(6, 8, dtype=torch.complex64)
    state = {
        "transposed": real.t(),
        "strided": real[::2, 1::3],
        "expanded": real[:1].expand(4, 8),
        "conjugate": cplx.conj(),
        "negative": cplx.conj().imag,
        "tied": real,
        "tied_too": real,
    }
    zarrckpt.save(state, tmp_path / "ck")
    check_tensors(read(tmp_path / "ck"), state)


LARGE = {
    "rows": (32768, 160),
    "second_of_three_dims": (3, 2000, 800),
    "prime": (8377, 768),
    "one_dim": (5_000_000,),
}


def test_subchunks(tmp_path: Path) -> None:
    state = {name: torch.randn(shape) for name, shape in LARGE.items()}
    zarrckpt.save(state, tmp_path / "ck", options=zarrckpt.SaveOptions(durable=False))
    reader = read(tmp_path / "ck")
    layouts = {name: reader.layout(name) for name in LARGE}
    assert {name: [c // s for c, s in zip(at.chunk, at.sub, strict=True)] for name, at in layouts.items()} == {
        "rows": [8, 1],
        "second_of_three_dims": [3, 4, 1],
        "prime": [9, 1],
        "one_dim": [10],
    }
    check_tensors(reader, state)


def test_padded_chunks_with_and_without_subchunks(tmp_path: Path) -> None:
    state = {"subchunks": torch.randn(8209, 1024), "plain": torch.randn(8209, 1024).bfloat16()}
    zarrckpt.save(state, tmp_path / "ck", options=zarrckpt.SaveOptions(max_chunk_bytes=18 << 20, durable=False))
    zarrckpt.save(
        {"plain": torch.randn(257, 30)}, tmp_path / "small", options=zarrckpt.SaveOptions(max_chunk_bytes=1000)
    )
    reader = read(tmp_path / "ck")
    layout = reader.layout("subchunks")
    assert layout.counts == [2, 1] and layout.sub != layout.chunk and layout.shape[0] % layout.chunk[0]
    check_tensors(reader, state)
    small = read(tmp_path / "small").layout("plain")
    assert math.prod(small.counts) > 20 and any(n % c for n, c in zip(small.shape, small.chunk, strict=True))


VALUES: dict[str, Any] = {
    "none": None,
    "yes": True,
    "small": -7,
    "edge": 2**53 - 1,
    "large": -(2**80),
    "float": 0.1,
    "whole": 1e16,
    "minus_zero": -0.0,
    "inf": -math.inf,
    "text": 'ü "quoted" \x00 \U0001f600',
    "surrogate": "a\ud800",
    "complex": complex(1.5, -math.inf),
    "tuple": (1, (2.0, "x"), []),
    "sets": [{1, 2}, frozenset({"a"})],
    "plain": ({"a": {"b": [None, {}]}, "c": ()},),
    "typed": ({1: "int", "1": "str", (1, 2): "tuple", None: "none"},),
    "dollar": ({"$int": 1},),
    "ordered": (OrderedDict(b=1, a=2),),
    "long": "x" * 70_000,
    "long_tree": list(range(20_000)),
    "bytes": b"\x00\xff" * 5,
    "no_bytes": b"",
    "bytearray": bytearray(b"abc"),
    "mixed": ("MT", np.arange(5, dtype=np.uint32), {"n": 3}, b"raw", np.float32(2.5)),
    "array": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "scalar": np.int16(3),
    "rng": random.getstate(),
    "numpy_rng": np.random.get_state(),
}


def test_values_and_blobs(tmp_path: Path) -> None:
    zarrckpt.save({**VALUES, "stream": io.BytesIO(b"stream")}, tmp_path / "ck")
    reader = read(tmp_path / "ck")
    encodings = {entry.get("encoding") for entry in reader.entries.values()}
    assert encodings == {None, "raw", "npy", "tree"}
    for name, value in VALUES.items():
        assert same(reader.value(name), value), name
    assert reader.value("stream").getvalue() == b"stream"


def test_torch_and_pickle_blobs_have_their_libraries_bytes(tmp_path: Path) -> None:
    import pickle

    pair = (torch.arange(3), "x")
    with pytest.warns(UserWarning, match="pickle"):
        zarrckpt.save({"pair": pair, "path": Path("a/b")}, tmp_path / "ck")
    reader = read(tmp_path / "ck")
    encoding, kind, data = reader.value("pair")
    loaded = torch.load(io.BytesIO(data), weights_only=True)
    assert (encoding, kind) == ("torch", "builtins.tuple")
    assert torch.equal(loaded[0], pair[0]) and loaded[1] == "x"
    encoding, kind, data = reader.value("path")
    assert encoding == "pickle" and kind.endswith("Path") and pickle.loads(data) == Path("a/b")


NAMES = [
    *["layers.0.weight", "a/b", "a\\b", "%41", "%", "__meta", "_ok", "@home", " lead", "trail ", "dot.", ".", ".."],
    *["zarr.json", ".zgroup", "c", "c.0", "#12", "x#3", "ünï✓", "q?*:|<>\"'", "\x01\x7f", "~", "", "A", "a"],
    *["long" * 100, "ü" * 200, "nan"],
]


def test_names(tmp_path: Path) -> None:
    state = {name: torch.full((2,), float(i)) for i, name in enumerate(NAMES)}
    state |= {f"in{i}": {name: torch.full((1,), float(i))} for i, name in enumerate(NAMES)}
    zarrckpt.save(state, tmp_path / "ck")
    reader = read(tmp_path / "ck")
    flat = {name: value if isinstance(value, torch.Tensor) else None for name, value in state.items()}
    check_tensors(reader, {name: value for name, value in flat.items() if value is not None})
    assert [key for key in reader.nested()] == list(state)
    for i, name in enumerate(NAMES):
        assert reader.nested()[f"in{i}"] == {name: f"in{i}.{name}"}


def test_nested_state_with_its_keys_and_containers(tmp_path: Path) -> None:
    one = torch.ones(1)
    state = {
        "z": {3: one, "a": {True: 1, None: one, (1, "x"): 2}},
        "ordered": OrderedDict(b=one, a=OrderedDict(c=1)),
        "list": [one, {"k": [[one], 5]}, "text", OrderedDict(y=1)],
        "empty": {},
        "nothing": OrderedDict(),
        "no_items": [],
        "tuple": (1, {}),
    }
    zarrckpt.save(state, tmp_path / "ck")
    reader = read(tmp_path / "ck")

    def fill(found: Any) -> Any:
        if isinstance(found, dict):
            return type(found)((key, fill(item)) for key, item in found.items())
        if isinstance(found, list):
            return [fill(item) for item in found]
        return one if reader.is_tensor(found) else reader.value(found)

    assert same(fill(reader.nested()), state)


def test_an_overwritten_checkpoint(tmp_path: Path) -> None:
    saves = []
    for number in range(3):
        state = {
            "model": {"w": torch.full((3, 4), float(number)), "b": random_tensor("bfloat16", (5,))},
            "step": number,
        }
        saves.append(zarrckpt.save(state, tmp_path / "ck", overwrite=True).save_id)
    reader = read(tmp_path / "ck")
    assert reader.tree == f"@{saves[2]}" == f"@{reader.save_id}"
    assert reader.own["history"] == [saves[1], saves[0]]
    check_tensors(reader, {f"model.{name}": tensor for name, tensor in state["model"].items()})
    assert reader.value("step") == 2
    # Exactly the keys of the format page are stored.
    stored = {str(path.relative_to(tmp_path / "ck")) for path in (tmp_path / "ck").rglob("*") if path.is_file()}
    tree, reserved = reader.tree, "@zarrckpt"
    assert {key for key in stored if not key.startswith(reserved)} == {
        *["zarr.json", f"{tree}/zarr.json", f"{tree}/model/zarr.json"],
        *[f"{tree}/model/{name}/{key}" for name, key in (("w", "c.0.0"), ("b", "c.0"))],
        *[f"{tree}/model/{name}/zarr.json" for name in "wb"],
    }
    assert {key for key in stored if key.startswith(reserved)} == {
        *[f"{reserved}/zarr.json", f"{reserved}/{saves[2]}/zarr.json"],
        *[f"{reserved}/{saves[2]}/{table}/{key}" for table in ("checksums", "writers") for key in ("zarr.json", "c.0")],
    }


def test_claim_and_marker(tmp_path: Path) -> None:
    report = zarrckpt.save({"model": {"w": torch.ones(2)}, "step": 1, "raw": b"x"}, tmp_path / "ck")
    group = {"zarr_format": 3, "node_type": "group"}
    claim = json.loads((tmp_path / "ck/@zarrckpt/zarr.json").read_bytes())
    assert len(claim["attributes"]["zarrckpt"].pop("crc32c")) == 8
    assert claim == {**group, "attributes": {"zarrckpt": {"format": 1, "claim": report.save_id}}}
    marker = json.loads((tmp_path / f"ck/@zarrckpt/{report.save_id}/zarr.json").read_bytes())
    own = marker["attributes"]["zarrckpt"]
    assert len(own.pop("crc32c")) == 8
    assert own.pop("started") < read(tmp_path / "ck").own["created"]
    assert own == {
        **{"format": 1, "attempt": report.save_id, "tree": "", "base": ""},
        **{"arrays": ["model/w", "raw", "step"], "groups": ["model"]},
    }


def _save_sharded(folder: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    full = torch.arange(35.0).reshape(5, 7)
    state = {"rows": distribute_tensor(full, mesh, [Shard(0)]), "columns": distribute_tensor(full, mesh, [Shard(1)])}
    zarrckpt.save({**state, "plain": full, "step": 3}, f"{folder}/apart", options=MergingOptions(min_piece_bytes=0))
    zarrckpt.save({**state, "plain": full, "step": 3}, f"{folder}/merged")


def test_shards_are_padded_chunks_with_recorded_writers(tmp_path: Path) -> None:
    run_ranks(_save_sharded, str(tmp_path), world_size=2)
    full = torch.arange(35.0).reshape(5, 7)
    merged = read(tmp_path / "merged")
    check_tensors(merged, {"rows": full, "columns": full, "plain": full})
    assert (merged.layout("rows").chunk, merged.layout("columns").chunk) == ([5, 7], [5, 7])
    reader = read(tmp_path / "apart")
    check_tensors(reader, {"rows": full, "columns": full, "plain": full})
    assert (reader.layout("rows").chunk, reader.layout("columns").chunk) == ([3, 7], [5, 4])
    ckpt = zarrckpt.open(tmp_path / "apart")
    assert ckpt.writers("rows").tolist() == [[0], [1]] and ckpt.writers("columns").tolist() == [[0, 1]]
    assert reader.own["world_size"] == 2


def crc64_of(data: bytes) -> int:
    """Return the CRC-64/NVME of some bytes, bit by bit."""
    found = 2**64 - 1
    for byte in data:
        found ^= byte
        for _ in range(8):
            found = found >> 1 ^ (0x9A6C9329AC4BC9B5 if found & 1 else 0)
    return found ^ 2**64 - 1


def test_digests_are_those_of_all_chunk_objects(tmp_path: Path, s3_stub: S3Server) -> None:
    """In the order of the paths, also of copied chunks, and of arrays without dimensions or elements."""
    assert crc64_of(b"123456789") == crc64(b"6789", crc64(b"12345")) == 0xAE8B14860A799888
    state = {"w": torch.arange(12.0).reshape(4, 3), "n": torch.tensor(1), "empty": torch.zeros(0, 2), "blob": b"x" * 50}
    place, base = s3_stub.bucket(), None
    options = zarrckpt.SaveOptions(reuse="on", compression="zstd", max_chunk_bytes=16)
    for number in range(2):
        url = tmp_path / str(number)
        state["n"] += number
        with sharing_small_chunks():
            target = place.url(str(number))
            zarrckpt.save(state, target, base=base, storage_options=place.storage_options, options=options)
        for name, stored in s3_stub.objects.items():
            file = tmp_path / name.removeprefix(f"{place.bucket}/")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(stored.data)
        (table,) = url.glob("@zarrckpt/*/digests/c.0")
        chunks = [url / "blob/c.0", url / "n/c", *(url / f"w/c.{row}.0" for row in range(4))]
        digests = [crc64_of(path.read_bytes()) for path in chunks]
        assert np.frombuffer(table.read_bytes()[:-4], "<u8").tolist() == digests
        base = target
    reused = read(url).own["reused"]
    sizes = [path.stat().st_size for path in chunks if path.parent.name != "n"]
    assert reused == {"save_id": read(tmp_path / "0").save_id, "objects": 5, "nbytes": sum(sizes), "saves": 1}


def test_the_page_lists_every_dtype() -> None:
    page = PAGE.read_text()
    for name, dtype in DTYPES.items():
        assert f"`{name}`" in page
        assert f"`{json.dumps(dtype.fill_value)}`" in page
