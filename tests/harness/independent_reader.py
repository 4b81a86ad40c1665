"""A reader written from ``docs/reference/format.md`` alone: it imports neither zarrckpt nor zarr.

If a test that uses it fails, either the library or the page is wrong. ``Reader(folder)`` reads a checkpoint on a local
disk. Every check of the page is an ``assert`` or an exception.
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
import ml_dtypes
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
            assert PORTABLE[self.dtype] == stored != self.dtype
        assert same(document, self._form(stored)), document
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
        assert is_int(self.own["format"]) == 1 and self.own["features"] == []
        self.save_id: str = self.own["save_id"]
        self.tree: str = self.own["tree"]
        assert self.tree in ("", f"@{self.save_id}")
        assert len(self.own["history"]) <= 16
        assert all(re.fullmatch("[0-9a-f]{32}", one) for one in [self.save_id, *self.own["history"]])
        assert re.fullmatch(r"[0-9]{4}(-[0-9]{2}){2}T([0-9]{2}:){2}[0-9]{2}\.[0-9]{6}Z", self.own["created"])
        assert all(isinstance(version, str) for version in self.own["software"].values())
        assert is_int(self.own["world_size"]) >= 1
        self.metadata: dict[str, Any] = self._metadata(self.own.get("metadata", {}))
        consolidated = root["consolidated_metadata"]
        assert set(consolidated) == {"kind", "must_understand", "metadata"}
        assert consolidated["kind"] == "inline" and consolidated["must_understand"] is False
        self.arrays = self._arrays(consolidated["metadata"])
        self.entries: dict[str, Any] = self.own["entries"]
        self._check_entries()
        self._check_keys()
        compressed = {path: array for path, array in self.arrays.items() if array.compressor is not None}
        assert set(self.own["tables"]) == ({"checksums", "sizes"} if compressed else {"checksums"})
        self.checksums = self.table("checksums")
        self.sizes = self.table("sizes") if compressed else {}
        for path, array in compressed.items():
            n = array.subchunk_bytes
            assert ((self.sizes[path] >= 5) & (self.sizes[path] <= n + n // 256 + 68)).all()

    @staticmethod
    def _metadata(metadata: Any) -> dict[str, Any]:
        def plain(value: Any) -> bool:
            if isinstance(value, dict):
                return all(map(plain, value.values()))
            return (
                all(map(plain, value))
                if isinstance(value, list)
                else type(value) in (type(None), bool, int, float, str)
            )

        decoded = decode_json(metadata)
        assert type(decoded) is dict and plain(decoded) and len(compact(metadata)) <= 64 * 1024
        return decoded

    def _arrays(self, nodes: dict[str, Any]) -> dict[str, Array]:
        prefix = f"{self.tree}/" if self.tree else ""
        arrays, groups = {}, set()
        for path, document in nodes.items():
            if document["node_type"] == "array":
                assert path.startswith(prefix)
                check_path(path.removeprefix(prefix))
                arrays[path.removeprefix(prefix)] = Array(document)
            else:
                assert same(document, {"zarr_format": 3, "node_type": "group", "attributes": {}})
                groups.add(path)
        above = {prefix + path[:end] for path in arrays for end in range(len(path)) if path[end] == "/"}
        assert groups == above | ({self.tree} - {""})
        return dict(sorted(arrays.items()))

    def _check_entries(self) -> None:
        used = []
        for fqn, entry in self.entries.items():
            check_path(entry["path"])
            if "value" in entry:
                assert set(entry) == {"path", "value"}
                continue
            array = self.arrays[entry["path"]]
            used.append(entry["path"])
            if "encoding" in entry:
                assert entry["encoding"] in ("raw", "npy", "tree", "torch", "pickle")
                assert set(entry) == {"path", "encoding", *(["kind"] if entry["encoding"] != "tree" else [])}
                assert array.dtype == "uint8" and len(array.shape) == 1 and isinstance(entry.get("kind", ""), str)
            elif set(entry) != {"path"}:
                assert set(entry) == {"path", "ranks", "level"}
                bounds = [is_int(bound) for begin, end in entry["ranks"] for bound in (begin, end)]
                assert bounds[0] >= 0 and all(a < b for a, b in itertools.pairwise(bounds))
                assert sum(end - begin for begin, end in entry["ranks"]) == array.shape[0] <= 2**20
                assert 0 <= is_int(entry["level"]) <= entry["path"].count("/")
                assert self.keys(fqn)[entry["level"]][1] == "ranks"
        assert sorted(used) == list(self.arrays)

    def _check_keys(self) -> None:
        assert set(self.own["keys"]) <= set(self.entries)
        by_keys: dict[tuple[Any, ...], str] = {}
        by_path: dict[str, tuple[Any, ...]] = {}
        leaves, containers = set(), set()
        for fqn, entry in self.entries.items():
            levels, names = self.keys(fqn), entry["path"].split("/")
            keys = tuple(same_nan(key) for _, key in levels)
            assert ".".join(str(key) for _, key in levels) == fqn
            for depth in range(len(keys) + 1):
                path = "/".join(names[:depth])
                assert by_keys.setdefault(keys[:depth], path) == path
                assert by_path.setdefault(path, keys[:depth]) == keys[:depth]
                if depth < len(keys):
                    containers.add(path)
            assert entry["path"] not in leaves
            leaves.add(entry["path"])
        assert not leaves & containers
        assert set(self.own["containers"]) <= containers - {""}
        assert set(self.own["containers"].values()) <= {"list", "OrderedDict"}

    def table(self, name: str) -> dict[str, np.ndarray]:
        """Return path -> its part of a table: (chunks, subchunks)."""
        assert set(self.own["tables"][name]) == {"length", "crc32c"}
        length, crc = is_int(self.own["tables"][name]["length"]), is_int(self.own["tables"][name]["crc32c"])
        data = b""
        if length:
            stored = (self.folder / f"@zarrckpt/{self.save_id}/{name}/c.0").read_bytes()
            data = stored[:-4]
            assert stored[-4:] == struct.pack("<I", crc)
            assert len(stored) == 4 * length + 4
        assert len(data) == 4 * length and crc32c(data) == crc, f"the {name} are damaged"
        numbers, parts = np.frombuffer(data, "<u4"), {}
        for path, array in self.arrays.items():
            if name == "sizes" and array.compressor is None:
                continue
            shape = math.prod(array.counts), math.prod(array.sub_counts)
            parts[path], numbers = numbers[: math.prod(shape)].reshape(shape), numbers[math.prod(shape) :]
        assert len(numbers) == 0
        return parts

    def raw(self, path: str) -> np.ndarray:
        """Return the elements of an array as bytes: its shape, and one more dimension of the element's bytes."""
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
        """Return the data of a chunk's subchunks in C order."""
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
        """Return a tensor as the name of its type, its shape, and its elements in C order."""
        entry = self.entries[fqn]
        assert "encoding" not in entry
        array = self.arrays[entry["path"]]
        return array.dtype, array.shape, self.raw(entry["path"]).tobytes()

    def value(self, fqn: str) -> Any:
        """Return a value or a blob. Torch and pickle blobs are ``(encoding, kind, bytes)``."""
        entry = self.entries[fqn]
        if "value" in entry:
            return decode_json(entry["value"])
        return decode_blob(entry["encoding"], entry.get("kind"), self.blob(fqn))

    def blob(self, fqn: str) -> bytes:
        """Return the bytes of a blob."""
        return self.raw(self.entries[fqn]["path"]).tobytes()

    def ranks(self, fqn: str) -> list[int]:
        """Return the ranks whose tensors an entry stacks."""
        return [rank for begin, end in self.entries[fqn].get("ranks", []) for rank in range(begin, end)]

    def keys(self, fqn: str) -> list[tuple[str, Any]]:
        """Return the (container, key) of each level that leads to an entry."""
        names = self.entries[fqn]["path"].split("/")
        keys = [decode_json(key) for key in self.own["keys"].get(fqn, names)]
        assert len(keys) == len(names) and all(map(is_key, keys))
        containers = [self.own["containers"].get("/".join(names[:d]), "dict") for d in range(len(names))]
        return [(kind, position(key) if kind == "list" else key) for kind, key in zip(containers, keys, strict=True)]

    def nested(self) -> Any:
        """Return the saved state dict, with the fqn of each entry instead of the entry."""
        return _build([(self.keys(fqn), fqn) for fqn in self.entries])


def check_compressor(codec: dict[str, Any], itemsize: int) -> None:
    """Check that a codec is one of the two of the page, with exactly its members."""
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
    children: dict[Any, tuple[Any, list[Any]]] = {}
    for ((_, key), *deeper), fqn in rows:
        children.setdefault(same_nan(key), (key, []))[1].append((deeper, fqn))
    built = [(key, _build(below)) for key, below in children.values()]
    kind = rows[0][0][0][0]
    if kind == "list":
        return [value for _, value in sorted(built, key=lambda item: int(item[0]))]  # without gaps
    return OrderedDict(built) if kind == "OrderedDict" else dict(built)


def same_nan(key: Any) -> Any:
    """Return a key that compares NaNs by their bits, and all else as Python does."""
    if isinstance(key, tuple):
        return tuple(map(same_nan, key))
    return ("nan", struct.pack(">d", key)) if isinstance(key, float) and key != key else key


def is_key(key: Any) -> bool:
    if isinstance(key, tuple):
        return all(map(is_key, key))
    if isinstance(key, str):
        return is_unicode(key)
    return key is None or type(key) in (bool, float) or (type(key) is int and key.bit_length() <= 512)


def position(key: Any) -> int:
    """Return the position of an entry in a list."""
    assert type(key) is int or (type(key) is str and re.fullmatch("0|[1-9][0-9]*", key))
    assert 0 <= int(key) < 2**20
    return int(key)


def is_int(number: Any) -> int:
    assert type(number) is int
    return number


def same(one: Any, other: Any) -> bool:
    """Whether JSON values are equal: 1, 1.0 and true are different."""
    return bool(one == other and compact(one) == compact(other))


def compact(obj: Any) -> str:
    return json.dumps(obj, separators=(",", ":"), sort_keys=True)


def check_path(path: str) -> None:
    for name in path.split("/"):
        assert name not in ("", "zarr.json") and len(name.encode()) <= 255
        assert not name.startswith(("__", ".")) and not name.endswith(".")
        assert re.fullmatch(r"([A-Za-z0-9._=-]|[^\x00-\xa0\ud800-\udfff\ufeff\ufffe\uffff])*", name)
        assert not re.search("[\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]", name)


def decode_json(obj: Any, items: bytes | None = None) -> Any:
    """Return a value from its JSON form, which must be the page's form for it. ``items`` are those of a tree."""
    used: list[tuple[int, int]] = []
    value = _decode(obj, items, used, 0)
    end = 0
    for begin, size in sorted(used):  # they cover all bytes, and none twice
        assert begin == end
        end += size
    assert end == len(items or b"")
    return value


def _decode(obj: Any, items: bytes | None, used: list[tuple[int, int]], depth: int) -> Any:
    if isinstance(obj, int | float):
        assert math.isfinite(obj) and (isinstance(obj, float) or abs(obj) <= 2**53 - 1)
    if isinstance(obj, str):
        assert is_unicode(obj)
    if isinstance(obj, list):
        assert depth < 32
        return [_decode(item, items, used, depth + 1) for item in obj]
    if not isinstance(obj, dict):
        return obj
    tag = next(iter(obj)) if len(obj) == 1 else ""
    if not tag.startswith("$"):
        assert depth < 32
        assert not any(key.startswith("$") or not is_unicode(key) for key in obj)
        return {key: _decode(item, items, used, depth + 1) for key, item in obj.items()}
    content = obj[tag]
    if tag == "$str":
        assert re.fullmatch("([0-9a-f]{2})+", content)
        text = bytes.fromhex(content).decode("utf-8", "surrogatepass")
        assert not is_unicode(text)
        return text
    if tag == "$int":
        assert hex(int(content, 16)) == content and abs(int(content, 16)) > 2**53 - 1
        return int(content, 16)
    if tag == "$float":
        if content in ("nan", "inf", "-inf"):
            return float(content)
        assert re.fullmatch("0x[0-9a-f]{16}", content) and content != "0x7ff8000000000000"
        (number,) = struct.unpack(">d", bytes.fromhex(content[2:]))
        assert number != number
        return number
    if tag == "$complex":
        parts = [_decode(part, None, [], 0) for part in content]
        assert [type(part) for part in parts] == [float, float]
        return complex(*parts)
    if tag == "$blob":
        assert items is not None and content["encoding"] in ("raw", "npy")
        assert set(content) == {"encoding", "kind", "byte_offset", "byte_size"}
        begin, size = is_int(content["byte_offset"]), is_int(content["byte_size"])
        assert begin >= 0 and size >= 0
        used.append((begin, size))
        return decode_blob(content["encoding"], content["kind"], items[begin : begin + size])
    assert depth < 32 and isinstance(content, list)
    if tag in ("$dict", "$ordereddict"):
        assert all(len(pair) == 2 for pair in content)
        pairs = [tuple(_decode(part, items, used, depth + 1) for part in pair) for pair in content]
        built = dict(pairs) if tag == "$dict" else OrderedDict(pairs)
        assert len(built) == len(pairs)
        # Others are plain objects.
        assert tag != "$dict" or any(type(k) is not str or k[:1] == "$" or not is_unicode(k) for k in built)
        return built
    kinds: dict[str, Any] = {"$tuple": tuple, "$set": set, "$frozenset": frozenset}
    value = kinds[tag](_decode(item, items, used, depth + 1) for item in content)
    if tag != "$tuple":
        texts = [json.dumps(item, separators=(",", ":")) for item in content]
        assert len(value) == len(content) and texts == sorted(texts)
    return value


def is_unicode(text: str) -> bool:
    return not re.search("[\ud800-\udfff]", text)


def decode_blob(encoding: str, kind: str | None, data: bytes) -> Any:
    if encoding == "raw":
        assert kind is not None
        return {"bytes": bytes, "bytearray": bytearray, "BytesIO": io.BytesIO}[kind](data)
    if encoding == "npy":
        assert kind is not None
        return decode_npy(*kind.split(":"), data=data)
    if encoding == "tree":
        (n,) = struct.unpack("<Q", data[:8])
        return decode_json(strict_json(data[8 : 8 + n]), data[8 + n :])
    assert encoding in ("torch", "pickle")
    return encoding, kind, data


def decode_npy(kind: str, dtype: str | None = None, *, data: bytes) -> Any:
    stream = io.BytesIO(data)
    assert np.lib.format.read_magic(stream) == (1, 0)
    shape, _, stored = np.lib.format.read_array_header_1_0(stream)
    assert np.empty(0, stored).dtype == stored
    assert stored.itemsize * math.prod(shape) == len(data) - stream.tell()
    array = np.load(io.BytesIO(data), allow_pickle=False)
    if dtype is not None:
        assert array.dtype == PORTABLE[dtype]
        array = array.view(getattr(ml_dtypes, dtype))
    assert kind == "ndarray" or (kind == "scalar" and array.shape == ())
    return array[()] if kind == "scalar" else array
