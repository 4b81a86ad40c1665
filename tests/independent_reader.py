"""A reader written from ``docs/reference/format.md`` alone: it imports neither zarrckpt nor zarr.

If a test that uses it fails, either the library or the page is wrong. ``Reader(folder)`` reads a checkpoint on a local
disk; every check of the page is an ``assert`` or an exception.
"""

from __future__ import annotations

import io
import itertools
import json
import math
import re
import struct
from collections import OrderedDict
from pathlib import Path
from typing import Any

import google_crc32c
import numcodecs.blosc
import numcodecs.zstd
import numpy as np

ITEMSIZE = {
    **{"bool": 1, "int8": 1, "int16": 2, "int32": 4, "int64": 8, "uint8": 1, "uint16": 2, "uint32": 4, "uint64": 8},
    **{"float16": 2, "float32": 4, "float64": 8, "complex64": 8, "complex128": 16, "bfloat16": 2},
    **dict.fromkeys(["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"], 1),
}
PORTABLE = {"bfloat16": "uint16", **{name: "uint8" for name in ITEMSIZE if name.startswith("float8")}}


def fill_value(name: str) -> Any:
    bits = 8 * ITEMSIZE[name]
    if name == "bool":
        return True
    if name.startswith("int"):
        return -(2 ** (bits - 1))
    if name.startswith("uint"):
        return 2**bits - 1
    return ["NaN", "NaN"] if name.startswith("complex") else "NaN"


def strict_json(data: bytes) -> Any:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        assert len(dict(pairs)) == len(pairs), "a member twice"
        return dict(pairs)

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is no JSON")

    return json.loads(data.decode("utf-8"), object_pairs_hook=unique, parse_constant=refuse)


def crc32c(data: bytes) -> int:
    return google_crc32c.value(data)


class Array:
    """One array document, in exactly the form of the page."""

    def __init__(self, document: dict[str, Any]) -> None:
        self.shape: list[int] = document["shape"]
        self.chunk: list[int] = document["chunk_grid"]["configuration"]["chunk_shape"]
        codec = document["codecs"][0]
        sharded = codec["name"] == "sharding_indexed"
        self.sub: list[int] | None = codec["configuration"]["chunk_shape"] if sharded else None
        inner = codec["configuration"]["codecs"] if sharded else document["codecs"]
        self.compressor: dict[str, Any] | None = inner[1] if len(inner) == 3 else None
        stored = document["data_type"]
        self.dtype: str = stored
        if document["attributes"]:
            self.dtype = document["attributes"]["zarrckpt"]["dtype"]
            assert PORTABLE[self.dtype] == stored
        assert document == self._form(stored), document
        self.itemsize = ITEMSIZE[self.dtype]
        if self.compressor is not None:
            check_compressor(self.compressor, self.itemsize)
            assert self.subchunk_bytes <= 2**31 - 17
        assert len(self.shape) == len(self.chunk) and all(c >= 1 for c in self.chunk)
        assert math.prod(self.shape) <= 2**62 and math.prod(self.chunk) <= 2**62
        if self.sub is not None:
            assert not any(c % s for c, s in zip(self.chunk, self.sub, strict=True))
            cut = next((d for d, s in enumerate(self.sub) if s > 1), len(self.sub))
            assert self.sub[cut + 1 :] == self.chunk[cut + 1 :], "subchunks are runs of elements"

    def _form(self, stored: str) -> dict[str, Any]:
        to_bytes: dict[str, Any] = {"name": "bytes"}
        if ITEMSIZE[stored] > 1:
            to_bytes["configuration"] = {"endian": "little"}
        compressor = [] if self.compressor is None else [self.compressor]
        codecs: list[Any] = [to_bytes, *compressor, {"name": "crc32c"}]
        if self.sub is not None:
            index = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]
            inner = {"chunk_shape": self.sub, "codecs": codecs, "index_codecs": index, "index_location": "end"}
            codecs = [{"name": "sharding_indexed", "configuration": inner}]
        return {
            "zarr_format": 3,
            "node_type": "array",
            "shape": self.shape,
            "data_type": stored,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": self.chunk}},
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
            "fill_value": fill_value(stored),
            "codecs": codecs,
            "dimension_names": [f"dim{d}_{n}" for d, n in enumerate(self.shape)],
            "attributes": {} if stored == self.dtype else {"zarrckpt": {"dtype": self.dtype}},
        }

    @property
    def subchunk_bytes(self) -> int:
        return math.prod(self.sub or self.chunk) * self.itemsize

    @property
    def counts(self) -> list[int]:
        return [-(-n // c) for n, c in zip(self.shape, self.chunk, strict=True)]

    @property
    def sub_counts(self) -> list[int]:
        return [c // s for c, s in zip(self.chunk, self.sub or self.chunk, strict=True)]


class Reader:
    """A checkpoint in a local folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        data = (folder / "zarr.json").read_bytes()
        begin = b'{"zarr_format":3,"node_type":"group","attributes":{"zarrckpt":{"crc32c":"'
        assert data.startswith(begin)
        digits, rest = data[len(begin) : len(begin) + 8], data[len(begin) + 8 :]
        assert int(digits, 16) == crc32c(begin + b"00000000" + rest), "the root is damaged"
        root = strict_json(data)
        assert root["zarr_format"] == 3 and root["node_type"] == "group"
        self.own: dict[str, Any] = root["attributes"]["zarrckpt"]
        assert self.own["format"] == 1 and self.own.get("features", []) == []
        self.save_id: str = self.own["save_id"]
        assert re.fullmatch("[0-9a-f]{32}", self.save_id)
        self.tree: str = self.own["tree"]
        assert self.tree in ("", f"@{self.save_id}")
        self.arrays = self._arrays(root["consolidated_metadata"]["metadata"])
        self.entries: dict[str, Any] = self.own["entries"]
        used = sorted(entry["path"] for entry in self.entries.values() if "value" not in entry)
        assert used == list(self.arrays)
        self.checksums = self.table("checksums")
        compressed = {path: array for path, array in self.arrays.items() if array.compressor is not None}
        assert ("sizes" in self.own["tables"]) == bool(compressed)
        self.sizes = self.table("sizes") if compressed else {}
        for path, array in compressed.items():
            n = array.subchunk_bytes
            assert ((self.sizes[path] >= 5) & (self.sizes[path] <= n + n // 256 + 68)).all()

    def _arrays(self, nodes: dict[str, Any]) -> dict[str, Array]:
        prefix = f"{self.tree}/" if self.tree else ""
        arrays = {}
        for path, document in nodes.items():
            if document["node_type"] == "array":
                assert path.startswith(prefix)
                check_path(path.removeprefix(prefix))
                arrays[path.removeprefix(prefix)] = Array(document)
            else:
                assert document == {"zarr_format": 3, "node_type": "group", "attributes": {}}
        return dict(sorted(arrays.items()))

    def table(self, name: str) -> dict[str, np.ndarray]:
        """Path -> its part of a table: (chunks, subchunks) of checksums or sizes, or (chunks,) of writers."""
        length, crc = self.own["tables"][name]["length"], self.own["tables"][name]["crc32c"]
        data = b""
        if length:
            stored = (self.folder / f"@zarrckpt/{self.save_id}/{name}/c.0").read_bytes()
            data = stored[:-4]
            assert stored[-4:] == struct.pack("<I", crc)
        assert len(data) == 4 * length and crc32c(data) == crc, f"the {name} are damaged"
        numbers, parts = np.frombuffer(data, "<u4"), {}
        for path, array in self.arrays.items():
            if name == "sizes" and array.compressor is None:
                continue
            chunks, subchunks = math.prod(array.counts), math.prod(array.sub_counts)
            shape = (chunks,) if name == "writers" else (chunks, subchunks)
            parts[path], numbers = numbers[: math.prod(shape)].reshape(shape), numbers[math.prod(shape) :]
        assert len(numbers) == 0
        return parts

    def raw(self, path: str) -> np.ndarray:
        """The elements of an array as bytes: its shape, and one more dimension of the element's bytes."""
        array = self.arrays[path]
        sub = array.sub or array.chunk
        padded = [n * c for n, c in zip(array.counts, array.chunk, strict=True)]
        out = np.zeros([*padded, array.itemsize], np.uint8)
        for number, chunk in enumerate(itertools.product(*map(range, array.counts))):
            key = self.folder / (self.tree or ".") / path / ".".join(["c", *map(str, chunk)])
            sizes = self.sizes[path][number] if path in self.sizes else None
            for cell, data in enumerate(self._subchunks(array, key.read_bytes(), self.checksums[path][number], sizes)):
                inside = np.unravel_index(cell, array.sub_counts) if sub else ()
                at = [c * n + int(i) * s for c, n, i, s in zip(chunk, array.chunk, inside, sub, strict=True)]
                where = tuple(slice(a, a + s) for a, s in zip(at, sub, strict=True))
                out[where] = np.frombuffer(data, np.uint8).reshape([*sub, array.itemsize])
        return out[tuple(slice(0, n) for n in array.shape)]

    def _subchunks(self, array: Array, stored: bytes, table: np.ndarray, sizes: np.ndarray | None) -> list[bytes]:
        """The data of a chunk's subchunks in C order."""
        total = math.prod(array.sub_counts)
        stored_bytes = [array.subchunk_bytes + 4] * total if sizes is None else sizes.tolist()
        begin = [0, *itertools.accumulate(stored_bytes)]
        if array.sub is None:
            assert len(stored) == begin[-1]
        else:
            assert len(stored) == begin[-1] + total * 16 + 4
            index = stored[begin[-1] : -4]
            assert index == b"".join(struct.pack("<QQ", *pair) for pair in zip(begin, stored_bytes, strict=False))
            assert stored[-4:] == struct.pack("<I", crc32c(index))
        out = []
        for number in range(total):
            part = stored[begin[number] : begin[number + 1]]
            assert crc32c(part[:-4]) == struct.unpack("<I", part[-4:])[0] == table[number], "damaged"
            out.append(decompress(array, part[:-4]))
        return out

    def tensor(self, fqn: str) -> tuple[str, list[int], bytes]:
        """A tensor as the name of its type, its shape, and its elements in C order."""
        entry = self.entries[fqn]
        assert set(entry) == {"path"}
        array = self.arrays[entry["path"]]
        return array.dtype, array.shape, self.raw(entry["path"]).tobytes()

    def value(self, fqn: str) -> Any:
        """A value or a blob. Of torch and pickle blobs ``(encoding, kind, bytes)``."""
        entry = self.entries[fqn]
        if "value" in entry:
            return decode_json(entry["value"])
        array = self.arrays[entry["path"]]
        assert array.dtype == "uint8" and len(array.shape) == 1
        return decode_blob(entry["encoding"], entry.get("kind"), self.raw(entry["path"]).tobytes())

    def keys(self, fqn: str) -> list[tuple[str, Any]]:
        """The (container, key) of each level that leads to an entry."""
        names = self.entries[fqn]["path"].split("/")
        keys = [decode_json(key) for key in self.own["keys"][fqn]] if fqn in self.own["keys"] else None
        keys = keys or [unescape(name) for name in names]
        assert len(keys) == len(names)
        containers = [self.own["containers"].get("/".join(names[:d]), "dict") for d in range(len(names))]
        return [(kind, int(key) if kind == "list" else key) for kind, key in zip(containers, keys, strict=True)]

    def nested(self) -> Any:
        """The state dict as it was saved, with the fqn of each entry in the place of the entry."""
        return _build([(self.keys(fqn), fqn) for fqn in self.entries])


def check_compressor(codec: dict[str, Any], itemsize: int) -> None:
    """One of the two codecs of the page, with exactly its members."""
    assert set(codec) == {"name", "configuration"}
    options = codec["configuration"]
    if codec["name"] == "zstd":
        assert set(options) == {"level", "checksum"}
        assert -131072 <= options["level"] <= 22 and options["checksum"] in (False, True)
        return
    assert codec["name"] == "blosc" and set(options) == {"typesize", "cname", "clevel", "shuffle", "blocksize"}
    assert options["typesize"] == itemsize and 0 <= options["clevel"] <= 9 and 0 <= options["blocksize"] <= 2147483631
    assert options["cname"] in ("blosclz", "lz4", "lz4hc", "zlib", "zstd")
    assert options["shuffle"] in ("noshuffle", "shuffle", "bitshuffle")


def decompress(array: Array, data: bytes) -> bytes:
    if array.compressor is None:
        return data
    codec = numcodecs.zstd if array.compressor["name"] == "zstd" else numcodecs.blosc
    out = codec.decompress(data)
    assert len(out) == array.subchunk_bytes
    return out


def _build(rows: list[tuple[list[tuple[str, Any]], str]]) -> Any:
    if not rows[0][0]:
        assert len(rows) == 1
        return rows[0][1]
    children: dict[Any, Any] = {}
    for keys, fqn in rows:
        children.setdefault(keys[0][1], []).append((keys[1:], fqn))
    built = {key: _build(below) for key, below in children.items()}
    kind = rows[0][0][0][0]
    if kind == "list":
        return [built[position] for position in range(len(built))]
    return OrderedDict(built) if kind == "OrderedDict" else built


def check_path(path: str) -> None:
    for name in path.split("/"):
        assert name not in ("", ".", "..") and len(name.encode()) <= 255
        assert not re.search(r'[\\:*?"<>|\x00-\x1f\x7f-\x9f\ufffe\uffff\ud800-\udfff]', name)


def unescape(name: str) -> str:
    if name == "%7E":
        return ""
    return re.sub("(?:%[0-9A-F]{2})+", lambda m: bytes.fromhex(m[0].replace("%", "")).decode("utf-8"), name)


def decode_json(obj: Any, items: bytes | None = None) -> Any:
    if isinstance(obj, list):
        return [decode_json(item, items) for item in obj]
    if not isinstance(obj, dict):
        return obj
    if len(obj) != 1 or not next(iter(obj)).startswith("$"):
        assert not any(key.startswith("$") for key in obj)
        return {key: decode_json(item, items) for key, item in obj.items()}
    ((tag, content),) = obj.items()
    if tag == "$str":
        return bytes.fromhex(content).decode("utf-8", "surrogatepass")
    if tag == "$int":
        return int(content, 16)
    if tag == "$float":
        return struct.unpack(">d", bytes.fromhex(content[2:]))[0] if content.startswith("0x") else float(content)
    if tag == "$complex":
        return complex(*[decode_json(part) for part in content])
    if tag == "$blob":
        assert items is not None and content["encoding"] in ("raw", "npy")
        start, size = content["byte_offset"], content["byte_size"]
        return decode_blob(content["encoding"], content["kind"], items[start : start + size])
    if tag in ("$dict", "$ordereddict"):
        pairs = [(decode_json(key, items), decode_json(item, items)) for key, item in content]
        return dict(pairs) if tag == "$dict" else OrderedDict(pairs)
    kinds: dict[str, Any] = {"$tuple": tuple, "$set": set, "$frozenset": frozenset}
    return kinds[tag](decode_json(item, items) for item in content)


def decode_blob(encoding: str, kind: str | None, data: bytes) -> Any:
    if encoding == "raw":
        assert kind is not None
        return {"bytes": bytes, "bytearray": bytearray, "BytesIO": io.BytesIO}[kind](data)
    if encoding == "npy":
        array = np.load(io.BytesIO(data), allow_pickle=False)
        return array[()] if kind == "scalar" else array
    if encoding == "json":
        return decode_json(strict_json(data))
    if encoding == "tree":
        (n,) = struct.unpack("<Q", data[:8])
        return decode_json(strict_json(data[8 : 8 + n]), data[8 + n :])
    assert encoding in ("torch", "pickle")
    return encoding, kind, data
