"""Golden checkpoints of format version 1: ``python tests/make_golden.py`` writes those that are missing.

They were written once, by the version that made the format, and must open for ever: an existing one is never written
again. What is in them is computed here, from numbers only, and compared by ``test_golden.py``.
"""

from __future__ import annotations

import datetime
import io
import math
import sys
import tempfile
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))  # also in the processes that run_ranks starts

from portable import save_portable
from ranks import run_ranks, stop_ranks

import zarrckpt

GOLDEN = Path(__file__).parent / "golden"
WORLD_SIZE = 4
DTYPES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128", "bfloat16"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
)
SIZES = {"complex64": 8, "complex128": 16}


def bits(name: str, shape: tuple[int, ...], number: int = 0) -> torch.Tensor:
    """A tensor whose bytes count up by 37, so infinities and NaNs of some kinds are among them."""
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
    """Every dtype, in a matrix, without dimensions, and empty."""
    shapes = {"matrix": (3, 5), "scalar": (), "empty": (0, 3)}
    return {kind: {name: bits(name, shape) for name in DTYPES} for kind, shape in shapes.items()}


def pattern(rows: int, columns: int) -> torch.Tensor:
    """Numbers that a zip file compresses well, no two rows alike."""
    return (torch.arange(rows).reshape(-1, 1) + torch.arange(columns) % 8).float()


def values() -> dict[str, Any]:
    """Every kind of value, and blobs of every encoding but pickle."""
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
        "json": "0123456789" * 7000,
        "tree": ("MT19937", np.arange(5, dtype="<u4"), 3, 0, 0.5),
        "torch": (torch.arange(3), torch.Size([2])),
    }


def nested() -> dict[Any, Any]:
    """Containers, keys that are no strings, names that need escapes."""
    one = torch.ones(1)
    return {
        "z": {3: one, "a": {True: 1, None: one, (1, "x"): 2}},
        "ordered": OrderedDict(b=one, a=OrderedDict(c=1)),
        "list": [one, {"k": [[one], 5]}, "text", OrderedDict(y=1)],
        **{"empty": {}, "nothing": OrderedDict(), "no_items": []},
        "names": {name: one for name in ("", ".", "a/b", "@x", "zarr.json", "c.0", "ü", "x" * 300, "__y", "50%")},
    }


def pickled() -> dict[str, Any]:
    """What only pickle takes."""
    return {"day": datetime.date(2026, 11, 21), "step": 7}


def trained(number: int) -> dict[str, Any]:
    """What the overwritten checkpoint holds; ``number`` is that of the save."""
    return {"model": {"w": bits("float32", (4, 6), number), "b": bits("bfloat16", (5,), number)}, "step": number}


ROWS, COLUMNS = (13, 6), (5, 8)
"""Shapes that four ranks cut unevenly."""


def _save_plain(folder: Path) -> None:
    zarrckpt.save({"tensors": tensors(), "values": values(), "nested": nested(), "pickle": pickled()}, folder)


def _save_portable(folder: Path) -> None:
    save_portable({"tensors": tensors(), "step": 1}, folder)


def _save_subchunks(folder: Path) -> None:
    zarrckpt.save({"w": pattern(600, 512), "small": bits("int16", (7, 3))}, folder)


def _save_chunks(folder: Path) -> None:
    zarrckpt.save({"w": bits("float32", (9, 7)), "x": bits("uint8", (100,))}, folder, max_chunk_bytes=64)


def _save_compressed(folder: Path, name: str) -> None:
    state = {"w": pattern(600, 512), "tensors": tensors(), "npy": values()["npy"], "step": 1}
    zarrckpt.save(state, folder, compression={"zstd": {"name": "zstd", "level": 3, "checksum": True}}.get(name, name))


def _save_overwritten(folder: Path) -> None:
    for number in range(3):
        zarrckpt.save(trained(number), folder, overwrite=True)


def _save_on_ranks(folder: Path, **options: Any) -> None:
    run_ranks(save_sharded, str(folder), options, world_size=WORLD_SIZE)


def save_sharded(folder: str, options: dict[str, Any]) -> None:
    """On each of four ranks: DTensors cut by rows and by columns, replicas, and state of each rank's own."""
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
    }
    zarrckpt.save(state, folder, **options)


CHECKPOINTS: dict[str, Callable[[Path], None]] = {
    "plain": _save_plain,
    "portable": _save_portable,
    "subchunks": _save_subchunks,
    "chunks": _save_chunks,
    "zstd": lambda folder: _save_compressed(folder, "zstd"),
    "blosc": lambda folder: _save_compressed(folder, "blosc"),
    "overwritten": _save_overwritten,
    "ranks": lambda folder: _save_on_ranks(folder, min_piece_bytes=0),
    "ranks_merged": lambda folder: _save_on_ranks(folder),
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
            print(f"{archive.name}: {archive.stat().st_size} bytes")
    finally:
        stop_ranks()


def _zip(folder: Path, archive: Path) -> None:
    with zipfile.ZipFile(archive, "x", zipfile.ZIP_DEFLATED, compresslevel=9) as packed:
        for file in sorted(folder.rglob("*")):
            if file.is_file():
                # The same time in all of them: the date of a file says nothing.
                info = zipfile.ZipInfo(str(file.relative_to(folder)), (2026, 11, 22, 0, 0, 0))
                packed.writestr(info, file.read_bytes(), zipfile.ZIP_DEFLATED, 9)


if __name__ == "__main__":
    main()
