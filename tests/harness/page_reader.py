"""The reader of ``docs/reference/format.md``, and that page's rules for keys and values. No zarrckpt, no zarr.

If a test that uses it fails, either the library or the page is wrong. Tensors are read by the code on the page itself.
"""

from __future__ import annotations

import io
import json
import re
import struct
from collections import OrderedDict
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

PAGE = Path(__file__).resolve().parents[2] / "docs/reference/format.md"


class Layout(NamedTuple):
    """The geometry of an array: its shape, chunks and subchunks, and the name of its compressor."""

    shape: list[int]
    chunk: list[int]
    counts: list[int]
    sub: list[int]
    compressor: str | None


class Reader:
    """A checkpoint in a local folder. ``old`` is a text of the page's code that is replaced by ``new``."""

    def __init__(self, folder: Path, old: str = "", new: str = "") -> None:
        code = re.search("```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
        assert code is not None and code[1].count("\n") <= 60 and old in code[1]
        names: dict[str, Any] = {}
        exec(code[1].replace(old, new) if old else code[1], names)
        self._page: Any = names["Reader"](folder)
        self.own: dict[str, Any] = self._page.own
        self.entries: dict[str, Any] = self.own["entries"]
        self.save_id: str = self.own["save_id"]
        self.tree: str = self.own["tree"]
        self.metadata: dict[str, Any] = decode_json(self.own.get("metadata", {}))

    def is_tensor(self, fqn: str) -> bool:
        """Whether an entry is a tensor, or a stack of the ranks' tensors."""
        return not {"value", "encoding"} & self.entries[fqn].keys()

    def layout(self, fqn: str) -> Layout:
        """Return the geometry of a tensor or blob."""
        return Layout(*self._page.geometry(self.entries[fqn]["path"]))

    def tensor(self, fqn: str) -> tuple[str, list[int], bytes]:
        """Return a tensor as the name of its type, its shape, and its elements in C order."""
        assert self.is_tensor(fqn)
        array = self._page.read(self.entries[fqn]["path"])
        return array.dtype.name, list(array.shape), array.tobytes()

    def value(self, fqn: str) -> Any:
        """Return a value or a blob. Torch and pickle blobs are ``(encoding, kind, bytes)``."""
        entry = self.entries[fqn]
        if "value" in entry:
            return decode_json(entry["value"])
        return decode_blob(entry["encoding"], entry.get("kind", ""), self.blob(fqn))

    def blob(self, fqn: str) -> bytes:
        """Return the bytes of a blob."""
        data: bytes = self._page.read(self.entries[fqn]["path"]).tobytes()
        return data

    def ranks(self, fqn: str) -> list[int]:
        """Return the ranks whose tensors an entry stacks."""
        return [rank for begin, end in self.entries[fqn].get("ranks", []) for rank in range(begin, end)]

    def keys(self, fqn: str) -> list[tuple[str, Any]]:
        """Return the (container, key) of each level that leads to an entry."""
        names = self.entries[fqn]["path"].split("/")
        paths = ["/".join(names[: depth + 1]) for depth in range(len(names))]
        stored = self.own["keys"]
        keys = [decode_json(stored[path]) if path in stored else name for path, name in zip(paths, names, strict=True)]
        containers = [self.own["containers"].get("/".join(names[:depth]), "dict") for depth in range(len(names))]
        levels = zip(containers, keys, strict=True)
        return [(container, int(key) if container == "list" else key) for container, key in levels]

    def versions(self, state_dict: str) -> dict[str, int]:
        """Return the versions of modules of a state dict."""
        prefix = f"{state_dict}." if state_dict else ""
        found: dict[str, Any] = {"": 1}
        for fqn in self.entries:
            levels = fqn.removeprefix(prefix).split(".")[:-1] if fqn.startswith(prefix) else []
            within = 128 - len(prefix.split(".")) + 1
            found |= {".".join(levels[:end]): 1 for end in range(1, min(len(levels), within) + 1)}
        found |= self.own["versions"][state_dict]
        return {path: version for path, version in found.items() if version is not None}

    def nested(self) -> Any:
        """Return the saved state dict, with the fqn of each entry instead of the entry."""
        return _build([(self.keys(fqn), fqn) for fqn in self.entries])


def _build(rows: list[tuple[list[tuple[str, Any]], str]]) -> Any:
    if not rows[0][0]:
        return rows[0][1]
    children: dict[Any, list[Any]] = {}
    for ((_, key), *deeper), fqn in rows:
        children.setdefault(key, []).append((deeper, fqn))
    built = {key: _build(below) for key, below in children.items()}
    container = rows[0][0][0][0]
    if container == "list":
        return [built[position] for position in sorted(built)]  # without gaps
    return OrderedDict(built) if container == "OrderedDict" else built


def decode_json(obj: Any, items: bytes = b"") -> Any:
    """Return a value from its JSON form. ``items`` are the bytes behind the JSON of a tree."""
    if isinstance(obj, list):
        return [decode_json(item, items) for item in obj]
    if not isinstance(obj, dict):
        return obj
    tag = next(iter(obj)) if len(obj) == 1 else ""
    if not tag.startswith("$"):
        return {key: decode_json(item, items) for key, item in obj.items()}
    content = obj[tag]
    match tag:
        case "$str":
            return bytes.fromhex(content).decode("utf-8", "surrogatepass")
        case "$int":
            return int(content, 16)
        case "$float":
            named = content in ("nan", "inf", "-inf")
            return float(content) if named else struct.unpack(">d", bytes.fromhex(content[2:]))[0]
        case "$complex":
            return complex(*map(decode_json, content))
        case "$blob":
            begin = content["byte_offset"]
            return decode_blob(content["encoding"], content["kind"], items[begin : begin + content["byte_size"]])
    parts = decode_json(content, items)
    kinds: dict[str, Any] = {"$tuple": tuple, "$set": set, "$frozenset": frozenset}
    kinds |= {"$dict": dict, "$ordereddict": OrderedDict}
    return kinds[tag](parts)


def decode_blob(encoding: str, kind: str, data: bytes) -> Any:
    """Return the value of a blob or of an item of a tree."""
    match encoding:
        case "raw":
            return {"bytes": bytes, "bytearray": bytearray, "BytesIO": io.BytesIO}[kind](data)
        case "npy":
            container, _, dtype = kind.partition(":")
            array = np.load(io.BytesIO(data), allow_pickle=False)
            array = array.view(getattr(ml_dtypes, dtype)) if dtype else array
            return array[()] if container == "scalar" else array
        case "tree":
            (size,) = struct.unpack("<Q", data[:8])
            return decode_json(json.loads(data[8 : 8 + size]), data[8 + size :])
    assert encoding in ("torch", "pickle")
    return encoding, kind, data
