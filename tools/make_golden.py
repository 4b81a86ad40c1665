"""Golden checkpoints of format version 1: ``python tools/make_golden.py`` writes the missing ones.

They were written once, by the version that made the format, and must open forever. An existing one is never written
again. Their contents are computed here from numbers only, and compared by ``test_golden.py``. Beside each is a JSON
file that describes it for readers in other languages. It has the keys of each entry and the containers that hold them.
It also has the dtype, shape and SHA-256 (of the elements in C order), or the value, or the encoding and SHA-256.
"""

from __future__ import annotations

import datetime
import hashlib
import io
import json
import math
import struct
import sys
import tempfile
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import google_crc32c
import ml_dtypes
import numpy as np
import torch

sys.path.extend(str(Path(__file__).resolve().parents[1] / name) for name in ("", "tests", "tools"))

from harness import GOLDEN
from harness.merging import MergingOptions
from harness.page_reader import Reader
from harness.ranks import run_ranks, stop_ranks
from harness.simulated import simulate

import zarrckpt
from zarrckpt._format.json_values import encode_json
from zarrckpt._format.root import BlobEntry

WORLD_SIZE = 4
DTYPES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128", "bfloat16"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
)
SIZES = {"complex64": 8, "complex128": 16}


def bits(name: str, shape: tuple[int, ...], number: int = 0) -> torch.Tensor:
    """Return a tensor whose bytes count up by 37, so that it has infinities and some kinds of NaNs."""
    count = math.prod(shape)
    if name == "bool":
        return (torch.arange(count) % 3 == number).reshape(shape)
    dtype = getattr(torch, name)
    raw = (torch.arange(count * SIZES.get(name, dtype.itemsize)) * 37 + 11 + number).to(torch.uint8)
    if name in SIZES:
        return torch.view_as_complex(
            raw.view(torch.float32 if name == "complex64" else torch.float64).reshape(-1, 2)
        ).reshape(shape)
    return raw.view(dtype).reshape(shape)


def tensors() -> dict[str, Any]:
    """Return every dtype, in a matrix, without dimensions, and empty."""
    shapes = {"matrix": (3, 5), "scalar": (), "empty": (0, 3)}
    return {kind: {name: bits(name, shape) for name in DTYPES} for kind, shape in shapes.items()}


def pattern(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return numbers that a zip file compresses well, and that differ between any two parts of a tensor."""
    total = torch.zeros((1,) * len(shape), dtype=torch.int64)
    for dim, n in enumerate(shape):
        steps = torch.arange(n) if dim < len(shape) - 1 else torch.arange(n) // 64
        total = total * 3 + steps.reshape([-1 if axis == dim else 1 for axis in range(len(shape))])
    return (total % 16384).to(dtype)


def values() -> dict[str, Any]:
    """Return every kind of value, and blobs of every encoding but pickle."""
    return {
        **{"none": None, "yes": True, "small": -7, "edge": 2**53 - 1, "large": -(2**80), "float": 0.1, "whole": 1e16},
        **{"minus_zero": -0.0, "inf": -math.inf, "text": 'ü "x" \x00 \U0001f600', "surrogate": "a\ud800"},
        **{"complex": complex(1.5, -math.inf), "tuple": (1, (2.0, "x"), []), "sets": ({1, 2}, frozenset({"a"}))},
        **{"typed": ({1: "int", "1": "str", (1, 2): "tuple"},), "dollar": ({"$int": 1},)},
        "ordered": (OrderedDict(b=1, a=2),),
        **{"raw": b"bytes", "bytearray": bytearray(b"array")},
        "stream": io.BytesIO(b"stream"),
        "npy": np.arange(6, dtype="<i4").reshape(2, 3),
        "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "numpy_scalar": np.float16(1.5),
        "numpy_bfloat16": np.arange(6).astype(ml_dtypes.bfloat16).reshape(2, 3),
        "numpy_float8": ml_dtypes.float8_e4m3fn(1.5),
        "long": "0123456789" * 7000,
        "nan": struct.unpack(">d", bytes.fromhex("7ff8000000000001"))[0],
        "items": ({"raw": [b"raw", b""], b"key": np.arange(3, dtype="<u2")},),
        "tree": ("MT19937", np.arange(5, dtype="<u4"), 3, 0, 0.5),
        "torch": (torch.arange(3), torch.Size([2])),
    }


def nested() -> dict[Any, Any]:
    """Return containers, keys that are not strings, and names that need escapes."""
    one = torch.ones(1)
    return {
        "z": {3: one, "a": {True: 1, None: one, (1, "x"): 2}, math.nan: {"a": 1, "b": one}},
        "ordered": OrderedDict(b=one, a=OrderedDict(c=1)),
        "list": [one, {"k": [[one], 5]}, "text", OrderedDict(y=1)],
        **{"empty": {}, "nothing": OrderedDict(), "no_items": []},
        "half": {0.5: one, (1.5, None): 2},
        "names": {name: one for name in ("", ".", "a/b", "@x", "zarr.json", "c.0", "ü", "x" * 300, "__y", "50%")},
    }


def ordered() -> dict[str, Any]:
    """Return tensors whose paths sort differently by component, by UTF-16, without regard to case, or by fqn."""
    names = ("a-b", "a.c", "ab", "B", "\uff61", "\U0001f600", "10", "9")
    return {
        "a": {"b": bits("int32", (2,), 100)},
        **{name: bits("int32", (2,), place) for place, name in enumerate(names)},
    }


def pickled() -> dict[str, Any]:
    """Return a value that only pickle can save."""
    return {"day": datetime.date(2026, 11, 21), "step": 7}


def trained(number: int) -> dict[str, Any]:
    """Return the state of the overwritten checkpoint. ``number`` is that of the save."""
    return {"model": {"w": bits("float32", (4, 6), number), "b": bits("bfloat16", (5,), number)}, "step": number}


ROWS, COLUMNS = (13, 6), (5, 8)
"""Shapes that four ranks cut unevenly."""


def part() -> dict[Any, Any]:
    """Return the state in the partial copy: the first and the last entry of a list."""
    state = nested()
    return {"list": [state["list"][0], state["list"][3]], "z": {3: state["z"][3]}}


METADATA = {"step": 7, "val_loss": 2.5, "nan": math.nan, "note": "ü", "nested": {"list": [1, None, True]}}


def _save_plain(folder: Path) -> None:
    state = {"tensors": tensors(), "values": values(), "nested": nested(), "pickle": pickled(), "order": ordered()}
    zarrckpt.save(state, folder, metadata=METADATA)


def _save_part(folder: Path) -> None:
    zarrckpt.save(nested(), folder.with_name("whole"), metadata=METADATA)
    zarrckpt.copy(zarrckpt.open(folder.with_name("whole")).select("list.0", "list.3", "z.3"), folder)


def portable() -> dict[str, Any]:
    """Return dtypes that are also stored as integers, one of them in subchunks."""
    return {"tensors": tensors(), "large": pattern(1600, 2048, dtype=torch.bfloat16), "step": 1}


def _save_portable(folder: Path) -> None:
    zarrckpt.save(portable(), folder, options=zarrckpt.SaveOptions(compression="zstd", portable_dtypes=True))


def large() -> dict[str, Any]:
    """Return tensors of several chunks, most with several subchunks. The chunks do not divide their shapes."""
    return {
        "w": pattern(600, 512),
        "grid": pattern(1100, 1000),
        "cube": pattern(3, 2000, 900),
        "prime": pattern(1021, 521),
        "vector": pattern(1, 700_001, dtype=torch.int32).reshape(-1),
        "bytes": pattern(1, 3_000_017, dtype=torch.uint8).reshape(-1),
        "small": bits("int16", (7, 3)),
        "blob": pattern(1, 4_700_021, dtype=torch.uint8).numpy().tobytes(),
    }


CHUNKS = {"grid": (600, 520), "cube": (2, 1400, 900), "vector": (300_000,), "small": (3, 2)}
"""The chunk shapes of some of them in a copy."""


def _save_subchunks(folder: Path) -> None:
    zarrckpt.save(large(), folder.with_name("uncut"))
    zarrckpt.copy(folder.with_name("uncut"), folder, chunks=CHUNKS)


def _save_chunks(folder: Path) -> None:
    zarrckpt.save(
        {"w": bits("float32", (9, 7)), "x": bits("uint8", (100,))},
        folder,
        options=zarrckpt.SaveOptions(max_chunk_bytes=64),
    )


def compressible() -> dict[str, Any]:
    """Return tensors whose subchunks do not compress equally well."""
    w = pattern(600, 512)
    w[:100] = bits("float32", (100, 512)).nan_to_num()
    return {"w": w, "grid": pattern(1100, 1000), "tensors": tensors(), "npy": values()["npy"], "step": 1}


def _save_compressed(folder: Path, name: str) -> None:
    option = {"zstd": {"name": "zstd", "level": 3, "checksum": True}}.get(name, name)
    zarrckpt.save(compressible(), folder.with_name("uncut"), options=zarrckpt.SaveOptions(compression=option))
    zarrckpt.copy(folder.with_name("uncut"), folder, chunks={"grid": (600, 520)})


def _save_overwritten(folder: Path) -> None:
    for number in range(3):
        zarrckpt.save(trained(number), folder, overwrite=True, metadata={"step": number})


def own_state(rank: int) -> dict[str, Any]:
    """Return the state of each of twelve ranks. Only some have a tensor."""
    tensor = {"state": bits("uint8", (5,), rank)} if rank in (1, 2, *range(4, 12)) else {}
    return {"seed": rank, **tensor}


def _save_many(folder: Path) -> None:
    def save(rank: int, number: int) -> None:
        state = {"rng": zarrckpt.PerRank(own_state(rank)), "w": pattern(701, 1024) + number}
        zarrckpt.save(state, folder, overwrite=True, options=zarrckpt.SaveOptions(compression="zstd"))

    for number in range(2):
        simulate(partial(save, number=number), 12)


def _save_shuffled(folder: Path) -> None:
    """Save with shuffled JSON members, except entries. Another program may write them in any order."""
    zarrckpt.save(ordered(), folder)
    root = json.loads((folder / "zarr.json").read_bytes())
    nodes = root["consolidated_metadata"]["metadata"]
    root["consolidated_metadata"]["metadata"] = dict(reversed(nodes.items()))
    seal(folder, root)


def seal(folder: Path, document: dict[str, Any]) -> Path:
    """Put another root document, with a valid checksum."""
    document["attributes"]["zarrckpt"]["crc32c"] = "00000000"
    data = json.dumps(document, separators=(",", ":")).encode()
    (folder / "zarr.json").write_bytes(data.replace(b"00000000", b"%08x" % google_crc32c.value(data), 1))
    return folder


def _save_on_ranks(folder: Path, options: zarrckpt.SaveOptions | None = None) -> None:
    run_ranks(save_sharded, str(folder), options, world_size=WORLD_SIZE)


def save_sharded(folder: str, options: zarrckpt.SaveOptions | None) -> None:
    """Save on four ranks: DTensors cut by rows and by columns, replicas, and per-rank state."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh, rank = init_device_mesh("cpu", (WORLD_SIZE,)), dist.get_rank()
    rows, columns = bits("float32", ROWS), bits("bfloat16", COLUMNS)
    state = {
        "rows": distribute_tensor(rows, mesh, [Shard(0)]),
        "columns": distribute_tensor(columns, mesh, [Shard(1)]),
        "replica": distribute_tensor(bits("int64", (3,)), mesh, [Replicate()]),
        "step": 3,
        "rng": zarrckpt.PerRank({"seed": rank, "state": bits("uint8", (6,), rank)}),
        "read": zarrckpt.PerRank(bits("int32", (rank + 1,))),
    }
    zarrckpt.save(state, folder, options=options)


CHECKPOINTS: dict[str, Callable[[Path], None]] = {
    "plain": _save_plain,
    "part": _save_part,
    "portable": _save_portable,
    "subchunks": _save_subchunks,
    "chunks": _save_chunks,
    "zstd": lambda folder: _save_compressed(folder, "zstd"),
    "blosc": lambda folder: _save_compressed(folder, "blosc"),
    "overwritten": _save_overwritten,
    "many_ranks": _save_many,
    "shuffled": _save_shuffled,
    "ranks": lambda folder: _save_on_ranks(folder, MergingOptions(min_piece_bytes=0)),
    "ranks_merged": _save_on_ranks,
}


def main() -> None:
    """Write the golden checkpoints that do not exist yet."""
    warnings.simplefilter("ignore")
    GOLDEN.mkdir(exist_ok=True)
    try:
        for name, save in CHECKPOINTS.items():
            archive = GOLDEN / f"{name}.zip"
            if archive.exists():
                print(f"{archive.name} exists and is not written again")
                continue
            with tempfile.TemporaryDirectory() as folder:
                save(Path(folder, "ck"))
                _zip(Path(folder, "ck"), archive)
                archive.with_suffix(".json").write_text(as_lines(description(Path(folder, "ck"))))
            print(f"{archive.name}: {archive.stat().st_size} bytes")
    finally:
        stop_ranks()


def description(folder: Path) -> dict[str, Any]:
    """Return the contents that a reader finds, for the JSON file. ``test_golden.py`` compares all of it
    with the state.
    """
    ckpt, entries = zarrckpt.open(folder, allow_pickle=True), {}
    root = ckpt._catalog.root
    arrays = ckpt.read()
    for fqn in ckpt:
        path = root.state_path(fqn)
        found: dict[str, Any] = {
            "keys": [encode_json(key) for key in path.keys],
            "containers": list(path.containers),
        }
        entry = root.entries[fqn]
        if fqn in arrays:
            array = arrays[fqn]
            found |= {"dtype": array.dtype.name, "shape": list(array.shape), "sha256": sha256(array.tobytes())}
        elif isinstance(entry, BlobEntry):
            blob = Reader(folder).blob(fqn)
            found |= {"encoding": entry.encoding, "kind": entry.kind, "bytes": len(blob), "sha256": sha256(blob)}
            if entry.encoding == "npy":
                array = np.asarray(ckpt[fqn])
                found["npy"] = {
                    "dtype": array.dtype.name,
                    "shape": list(array.shape),
                    "sha256": sha256(array.tobytes()),
                }
        else:
            found["value"] = encode_json(ckpt[fqn])
        if ckpt.entry(fqn).ranks:
            found |= {"ranks": list(ckpt.entry(fqn).ranks), "level": path.rank_at}
        entries[fqn] = found
    return {"tree": bool(ckpt.info.tree), "metadata": encode_json(ckpt.metadata), "entries": entries}


def as_lines(described: dict[str, Any]) -> str:
    """Return JSON with a line for each entry."""
    entries = described.pop("entries").items()
    head = json.dumps(described)[:-1]
    return (
        f'{head}, "entries": {{\n'
        + ",\n".join(f"{json.dumps(fqn)}: {json.dumps(one)}" for fqn, one in entries)
        + "\n}}\n"
    )


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _zip(folder: Path, archive: Path) -> None:
    with zipfile.ZipFile(archive, "x", zipfile.ZIP_DEFLATED, compresslevel=9) as packed:
        for file in sorted(folder.rglob("*")):
            if file.is_file():
                # The same time in all of them: the date of a file means nothing.
                info = zipfile.ZipInfo(str(file.relative_to(folder)), (2026, 11, 22, 0, 0, 0))
                packed.writestr(info, file.read_bytes(), zipfile.ZIP_DEFLATED, 9)


if __name__ == "__main__":
    main()
