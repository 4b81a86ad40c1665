"""Checkpoints forged with bad intent, and a watch over the effects of reading them.

The author of a checkpoint can compute all of its checksums. So documents are changed and sealed again.

python tests/harness/hostile.py documents 12000 shapes 500 markers 1500 --seed 1 --address-space 3000000000

These are campaigns. The tests run some cases of each in a separate process, because its audit hook cannot be removed.

This module uses only zarrckpt's public names: it computes seals and tables itself.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import copy
import dataclasses
import io
import json
import os
import pickle
import random
import re
import resource
import shutil
import signal
import struct
import sys
import tempfile
import time
import traceback
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import torch

import zarrckpt
from zarrckpt import CheckpointError

SEAL = b'{"zarr_format":3,"node_type":"group","attributes":{"zarrckpt":{"crc32c":"'
SECONDS = 60
"""A case that takes longer counts as a hang."""


# -- documents and chunks, sealed by hand


def sealed(data: bytes) -> bytes:
    """Return the bytes with a valid checksum in their seal, if they begin as zarrckpt's documents do."""
    if not data.startswith(SEAL):
        return data
    rest = data[len(SEAL) + 8 :]
    return SEAL + b"%08x" % google_crc32c.value(SEAL + b"00000000" + rest) + rest


def text_of(document: Any) -> bytes:
    """Return JSON, also of values that have no JSON: NaN, nesting that json.dumps refuses, members that occur twice."""
    data = json.dumps(document, separators=(",", ":")).encode()
    for depth in DEPTHS:
        data = data.replace(b'"__deep_%d__"' % depth, b"[" * depth + b"]" * depth)
        data = data.replace(b'"__dict_%d__"' % depth, b'{"a":' * depth + b"1" + b"}" * depth)
    return data.replace(b'"__digits__"', b"9" * 5000).replace(b'"__huge__"', b"1e999").replace(b"__twice__", b"path")


DEPTHS = (40, 130, 300, 900, 950, 970, 980, 985, 990, 995, 20000)


class Forgery:
    """A checkpoint with one plain chunk per array. Any part can be changed with valid checksums."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.document = json.loads((folder / "zarr.json").read_bytes())

    @property
    def own(self) -> dict[str, Any]:
        own: dict[str, Any] = self.document["attributes"]["zarrckpt"]
        return own

    @property
    def nodes(self) -> dict[str, Any]:
        nodes: dict[str, Any] = self.document["consolidated_metadata"]["metadata"]
        return nodes

    def write(self) -> None:
        """Put the root document."""
        (self.folder / "zarr.json").write_bytes(sealed(text_of(self.document)))

    def blob(self, fqn: str, payload: bytes, encoding: str, kind: str | None = None) -> None:
        """Give a blob entry other bytes, declared with another encoding or kind."""
        entry = self.own["entries"][fqn]
        entry["encoding"] = encoding
        entry.pop("kind", None)
        if kind is not None:
            entry["kind"] = kind
        node = self.nodes[entry["path"]]
        node["shape"] = node["chunk_grid"]["configuration"]["chunk_shape"] = [len(payload)]
        node["dimension_names"] = [f"dim0_{len(payload)}"]
        self.chunk(entry["path"], payload)

    def chunk(self, path: str, stored: bytes) -> None:
        """Give an array of one chunk other stored bytes. Update their checksum everywhere."""
        crc = google_crc32c.value(stored)
        (chunk,) = (self.folder / path).glob("c*")
        chunk.write_bytes(stored + struct.pack("<I", crc))
        arrays = sorted(name for name, node in self.nodes.items() if 0 not in node.get("shape", [0]))
        self.table("checksums", arrays.index(path), crc)
        if "sizes" in self.own["tables"]:
            compressed = [name for name in arrays if len(self.nodes[name]["codecs"]) == 3]
            if path in compressed:
                self.table("sizes", compressed.index(path), len(stored) + 4)

    def table(self, name: str, place: int, number: int) -> None:
        """Change an element of a table."""
        file = self.folder / "@zarrckpt" / self.own["save_id"] / name / "c.0"
        numbers = bytearray(file.read_bytes()[:-4])
        numbers[4 * place : 4 * place + 4] = struct.pack("<I", number)
        crc = google_crc32c.value(bytes(numbers))
        file.write_bytes(bytes(numbers) + struct.pack("<I", crc))
        self.own["tables"][name]["crc32c"] = crc


# -- the saved state


class Opaque:
    """A value that only pickle can save."""


def state(number: int = 0) -> dict[Any, Any]:
    """Return a state with entries of all kinds. Its numbers differ by ``number``."""
    return {
        "model": {
            "w": torch.arange(24.0).reshape(6, 4) + number,
            "half": torch.arange(5).bfloat16() + number,
            "scalar": torch.tensor(3 + number),
            "empty": torch.zeros(0, 3),
            "columns": torch.arange(6.0).reshape(2, 3).t() + number,
            "flags": torch.tensor([True, False]),
        },
        "layers": [torch.ones(2), {"b": torch.ones(1), "n": number}, "text"],
        3: {"int": 1, (1, 2): torch.ones(2, dtype=torch.uint8)},
        "ordered": OrderedDict(b=torch.ones(1), a=1),
        "long" * 80: torch.ones(1),
        "step": number,
        "values": ({"lr": 0.1, "betas": (0.9, 0.999)}, None, {1, 2}, float("inf"), 2**70),
        "raw": b"bytes",
        "npy": np.arange(4) + number,
        "tree": (np.arange(3), b"x", [1]),
        "json": "x" * 70000,
        "torch": (torch.arange(3), torch.Size([2])),
        "pickle": Opaque(),
    }


KINDS = ("plain", "zstd", "blosc", "tree")


def make(folder: Path, kind: str) -> Path:
    """Save a checkpoint. The kind "blosc" has portable arrays.

    The kind "tree" has a tree that is not the canonical one, digests, and chunks of the checkpoint that it replaced.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compression = kind if kind in ("zstd", "blosc") else None
        options = zarrckpt.SaveOptions(compression=compression, portable_dtypes=kind == "blosc", durable=False)
        base = None
        if kind == "tree":
            options, base = dataclasses.replace(options, reuse="on"), folder
            zarrckpt.save(state(1), folder, options=options)
        zarrckpt.save(state(), folder, overwrite=kind == "tree", base=base, options=options)
    return folder


# -- mutations


NASTY: list[Any] = [
    *(None, True, False, 0, -0.0, 1, -1, 1.0, 1.5, 2, 2**31, 2**32, 2**53, 2**62, 2**62 + 1, 2**63, 2**64, -(2**63)),
    *(10**30, 1e308, float("nan"), float("inf"), "__huge__", "__digits__"),
    *("", "a", "x" * 300, "../x", "../../canary/secret", "/etc/passwd", "..", ".", "a//b", "a/", "/a", "%2e%2e%2fx"),
    *("a/../b", "a/./b", "%2F", "..%2Fx", "%252e", "@zarrckpt", "@zarrckpt/zarr.json", "@" + "0" * 32, "~", "C:\\x"),
    *("file:///etc/passwd", "c.0", "c", "zarr.json", "model", "model/w", "model/w/c.0.0", "a\x00b", "\ud800", "\ufffe"),
    *("é", "NaN", "uint8", "float32", "object", "|O", "bfloat16", "zstd", "sharding_indexed", "list", "OrderedDict"),
    *("raw", "npy", "torch", "tree", "pickle", "exec", "ndarray:bfloat16", "ranks", "0" * 32, "1" * 8, "00000000"),
    *([], {}, [[]], [{}], [0], [1], [2**62], [2**40, 2**40], [2**31, 2**31], [-1], [1.0], [True], ["1"], [1] * 70),
    *([1] * 5000, [0] * 100, [2**62, 0], ["a", "b"], [["a", 1]], [None], {"a": 1}, {"": ""}, {"$x": 1}),
    *({"$int": "0x" + "f" * 5000}, {"$int": "0x1"}, {"$int": 5}, {"$float": "nan"}, {"$float": []}, {"$str": "zz"}),
    *({"$str": "eda080"}, {"$tuple": [1, [2]]}, {"$set": [[1]]}, {"$dict": [[[1], 2]]}, {"$dict": [[1, 2], [1, 3]]}),
    *({"$complex": [1, 2]}, {"$complex": [1.0, {"$float": "inf"}]}, {"$frozenset": [1]}, {"$ordereddict": [["a", 1]]}),
    *({"$blob": {"encoding": "npy", "kind": "ndarray", "byte_offset": 0, "byte_size": 9}}, {"$a": 1, "$b": 2}),
    *({"name": "gzip"}, {"name": "bytes"}, {"name": "crc32c"}, {"name": "zstd", "configuration": {"level": 10**9}}),
    *({"name": "blosc", "configuration": {"cname": "x"}}, {"name": "regular", "configuration": {"chunk_shape": [1]}}),
    *({"path": "../x", "value": 1}, {"path": "x"}, {"path": "step", "encoding": "pickle"}, {"length": 2**62}),
    *(f"__deep_{depth}__" for depth in DEPTHS),
    *(f"__dict_{depth}__" for depth in DEPTHS),
]


NASTY_KEYS: list[tuple[Any, str]] = [
    *((1, "1"), (True, "True"), (None, "None"), (1.0, "1.0"), (-1, "-1"), (10**15, str(10**15)), ("", ""), ("1", "1")),
    *(({"$int": "0x" + "f" * 5000}, "x"), ({"$tuple": [1, 2]}, "(1, 2)"), ({"$tuple": [[1]]}, "([1],)"), ([1], "[1]")),
    *(({"a": 1}, "{'a': 1}"), ({"$set": [1]}, "{1}"), ({"$float": "nan"}, "nan"), ("999999999", "999999999")),
    *(
        ("../x", "../x"),
        ("@zarrckpt", "@zarrckpt"),
        ("a.b", "a.b"),
        ("\ud800", "\ud800"),
        ("w", "w"),
        (0, "0"),
        (7, "7"),
    ),
    *(({"$frozenset": [1]}, "frozenset({1})"), ({"$ordereddict": [["a", 1]]}, "OrderedDict([('a', 1)])")),
]
"""The JSON forms of keys, and the texts that Python shows for them."""


class Mutator:
    """Changes JSON documents at random places, mostly where the reader interprets them."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def changed(self, document: Any, focus: tuple[str, ...] = ()) -> bytes:
        """Return the bytes after one to four changes."""
        document = copy.deepcopy(document)
        for _ in range(self.random.choice((1, 1, 1, 2, 2, 4))):
            if "consolidated_metadata" in document and self.random.random() < 0.4:
                with contextlib.suppress(KeyError, TypeError, AttributeError, IndexError):  # of earlier changes
                    self.fitting(document["attributes"]["zarrckpt"])
            else:
                self.change(document, focus)
        return text_of(document)

    def fitting(self, own: dict[str, Any]) -> None:
        """Change an entry in such a way that the rest of the document still fits it."""
        rand, entries = self.random, own["entries"]
        fqn = rand.choice([*entries])
        entry = entries[fqn]
        pick = rand.randrange(8)
        if pick == 0:
            values = [one for one in entries.values() if "value" in one]
            rand.choice(values)["value"] = copy.deepcopy(rand.choice(NASTY))
        elif pick == 1:
            blob = rand.choice([one for one in entries.values() if "encoding" in one])
            blob["encoding"] = rand.choice(("raw", "json", "npy", "torch", "tree", "pickle"))
            blob["kind"] = rand.choice(("bytes", "bytearray", "BytesIO", "ndarray", "scalar", "", "x"))
        elif pick == 2:
            names = rand.choice([*entries.values()])["path"].split("/")
            path = "/".join(names[: rand.randrange(len(names))])
            own["containers"][path] = rand.choice(("list", "dict", "OrderedDict"))
        elif pick == 3:
            self.other_key(own, fqn)
        elif pick == 4:
            key, name = copy.deepcopy(rand.choice(NASTY_KEYS))
            entries[f"{fqn}.{name}"] = {"path": f"{entry['path']}/k", "value": 1}
            own["keys"][f"{entry['path']}/k"] = rand.choice((key, copy.deepcopy(rand.choice(NASTY_KEYS)[0])))
        elif pick == 5:
            other = rand.choice([*entries])
            for one, path in ((fqn, entries[other]["path"]), (other, entry["path"])):
                own["keys"][path] = one.rpartition(".")[2]
            entry["path"], entries[other]["path"] = entries[other]["path"], entry["path"]
        elif pick == 6:
            if "value" in entry:
                entry["path"] = rand.choice([one for one in NASTY if isinstance(one, str)])
            own["keys"][entry["path"]] = fqn.rpartition(".")[2]
        else:
            member = rand.choice(("software", "created", "world_size", "history", "later"))
            own[member] = copy.deepcopy(rand.choice(NASTY))

    def other_key(self, own: dict[str, Any], fqn: str) -> None:
        """Give an entry or a container above it another key, and the entries below it the fqn that fits."""
        names = own["entries"][fqn]["path"].split("/")
        level = self.random.randrange(len(names))
        path = "/".join(names[: level + 1])
        own["keys"][path], name = copy.deepcopy(self.random.choice(NASTY_KEYS))
        for one, entry in [*own["entries"].items()]:
            parts = one.split(".")
            if f"{entry['path']}/".startswith(f"{path}/") and level < len(parts):
                own["entries"][".".join([*parts[:level], name, *parts[level + 1 :]])] = own["entries"].pop(one)

    def change(self, document: Any, focus: tuple[str, ...] = ()) -> None:
        """Make one change in place, mostly below a focus."""
        top = document
        if self.random.random() < 0.8:
            with contextlib.suppress(KeyError, TypeError):
                for name in focus:
                    top = top[name]
        parent, key = self.place(top)
        if parent is None:
            return
        self.random.choice((self.replace, self.replace, self.replace, self.remove, self.rename, self.tweak, self.move))(
            parent, key, document
        )

    def place(self, top: Any) -> tuple[Any, Any]:
        """Return a container and a key in it. All depths have about the same chance."""
        found, parent, key = top, None, None
        while isinstance(found, dict | list) and found:
            parent = found
            key = self.random.choice([*found]) if isinstance(found, dict) else self.random.randrange(len(found))
            found = parent[key]
            if self.random.random() < 0.25:
                break
        return parent, key

    def replace(self, parent: Any, key: Any, document: Any) -> None:
        parent[key] = copy.deepcopy(self.random.choice(NASTY))

    def remove(self, parent: Any, key: Any, document: Any) -> None:
        del parent[key]

    def rename(self, parent: Any, key: Any, document: Any) -> None:
        """Rename a member, repeat it under its name, or add one."""
        texts = [item for item in NASTY if isinstance(item, str) and not item.startswith("__")]
        if isinstance(parent, list):
            parent.insert(key, copy.deepcopy(self.random.choice((parent[key], self.random.choice(NASTY)))))
        elif self.random.random() < 0.3:
            parent["__twice__" if key == "path" else self.random.choice(texts)] = copy.deepcopy(parent[key])
        else:
            parent[self.random.choice(texts)] = parent.pop(key)

    def tweak(self, parent: Any, key: Any, document: Any) -> None:
        """Change a value slightly."""
        value = parent[key]
        if isinstance(value, bool) or value is None:
            parent[key] = not value
        elif isinstance(value, int | float):
            change = self.random.choice((lambda n: n + 1, lambda n: n - 1, lambda n: -n, float, str, bool))
            parent[key] = self.random.choice((change(value), value * 2 ** self.random.randrange(64), value // 2))
        elif isinstance(value, str):
            place = self.random.randrange(len(value) + 1)
            insert = self.random.choice(("/", "..", "../", "%", "@", "\x00", ".", "\ud800", "0", "__", " ", "\\"))
            parent[key] = self.random.choice((value[:place] + insert + value[place:], value[:place], f"../{value}"))
        elif isinstance(value, list):
            parent[key] = self.random.choice((value * 2, value[:-1], [value], value[::-1], value * 3000))
        else:
            parent[key] = [value]

    def move(self, parent: Any, key: Any, document: Any) -> None:
        """Replace a value by one from another place of the document."""
        other, place = self.place(document)
        if other is not None:
            parent[key] = copy.deepcopy(other[place])


# -- the watch


class Watch:
    """When armed, records every file that this process opens, lists or changes and all that it runs, except allowed
    ones.
    """

    def __init__(self, sandbox: Path) -> None:
        self.armed = False
        self.seen: list[str] = []
        self.unpickled: set[tuple[str, str]] = set()
        """Classes that may be unpickled."""
        here = Path(__file__).resolve().parents[2]
        self._mine = (str(sandbox.resolve()) + os.sep,)
        modules = {os.path.realpath(place) for place in (sys.prefix, sys.base_prefix, here, *sys.path) if place}
        self._readable = (*(f"{place}/" for place in modules), "/proc/", "/sys/", "/dev/", "/usr/lib/")
        sys.addaudithook(self._hook)

    def _hook(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.armed:
            return
        if event == "pickle.find_class" and args in self.unpickled:
            return
        if event in ("pickle.find_class", "subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork"):
            self.seen.append(f"{event} {args!r:.200}")
        elif event in ("open", "os.listdir", "os.scandir", "os.chdir", "os.truncate"):
            reads = event != "os.truncate" and not (event == "open" and _writes(args))
            self._look(event, args[0], reads)
        elif event in ("os.remove", "os.rmdir", "os.mkdir", "os.chmod", "os.rename", "os.link", "os.symlink"):
            for name in args[: 2 if event in ("os.rename", "os.link", "os.symlink") else 1]:
                self._look(event, name, False)

    def _look(self, event: str, name: Any, reads: bool) -> None:
        if not isinstance(name, str | bytes | os.PathLike):
            return
        path = os.path.abspath(os.fsdecode(name)) + os.sep
        if path.startswith(self._mine) or (reads and path.startswith(self._readable)):
            return
        self.seen.append(f"{event} {path}")


def _writes(args: tuple[Any, ...]) -> bool:
    mode, flags = args[1], args[2]
    return bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)) if mode is None else any(c in mode for c in "wax+")


@contextlib.contextmanager
def watched(watch: Watch, found: list[str], what: str) -> Iterator[None]:
    """Record a hang, access to forbidden files, and every exception of a block other than CheckpointError."""

    def hangs(*_: Any) -> None:
        raise TimeoutError(f"no end within {SECONDS} s")

    signal.signal(signal.SIGALRM, hangs)
    signal.alarm(SECONDS)
    watch.seen.clear()
    watch.armed = True
    began = time.monotonic()
    try:
        yield
    except CheckpointError:
        pass
    except BaseException as err:
        if isinstance(err, KeyboardInterrupt):
            raise
        frames = traceback.extract_tb(err.__traceback__)
        own = [f"{Path(f.filename).name}:{f.lineno}" for f in frames if "zarrckpt" in f.filename]
        found.append(f"{what}: {type(err).__name__}: {err!s:.300} at {own[-2:]}, {frames[-1].filename}")
    finally:
        watch.armed = False
        signal.alarm(0)
        if time.monotonic() - began > SECONDS:
            found.append(f"{what}: took more than {SECONDS} s")
    found += [f"{what}: touched {event}" for event in watch.seen]


# -- uses of a checkpoint


def targets() -> list[dict[Any, Any]]:
    """Return plausible targets of a load."""
    everything = state(7)
    del everything["pickle"]
    names = ("model", "layers", "ordered", "step", "values", "raw", "npy", "tree", "json", "torch")
    return [everything, {"model": everything["model"]}, {name: None for name in names}]


def use(watch: Watch, url: Path, found: list[str], *, deep: bool) -> bool:
    """Open a checkpoint and use all that it offers. Return whether it opened. ``deep`` adds the slow uses."""
    ckpt: Any = None
    with watched(watch, found, "open"):
        ckpt = zarrckpt.open(url)
    if ckpt is None:
        return False
    with watched(watch, found, "look"):
        assert len([*ckpt]) == len(ckpt)
        assert repr(ckpt) and ckpt.nbytes >= 0 and ckpt.save_id and ckpt.info
    for quick in (True, False):
        with watched(watch, found, f"verify(quick={quick})"):
            ckpt.verify(quick=quick).raise_if_damaged()
    with watched(watch, found, "read"):
        ckpt.read()
    for fqn in ckpt:
        with watched(watch, found, f"ckpt[{fqn!r:.60}]"):
            value = ckpt[fqn]
            if fqn in ckpt.tensors:
                assert ckpt.entry(fqn).node_path and repr(value)
                # numcodecs raises RuntimeError for changed compressed bytes whose checksums are valid.
                with contextlib.suppress(*[RuntimeError] if value.compressors else []):
                    value[...]
        with watched(watch, found, f"read({fqn!r:.60})"):
            ckpt.read([fqn])
    with watched(watch, found, "writers"):
        [ckpt.writers(fqn) for fqn in ckpt.tensors]
    for number, target in enumerate(targets()):
        with watched(watch, found, f"load {number}"):
            zarrckpt.load(target, url, strict=number != 2)
    with watched(watch, found, "latest"):
        zarrckpt.latest(url.parent)
    if deep:
        use_others(watch, url, found)
    return True


WITHOUT_SYNC = zarrckpt.SaveOptions(durable=False)


def use_others(watch: Watch, url: Path, found: list[str]) -> None:
    """Reuse its chunks, and read with DCP's own planner and with plain zarr-python.

    The last two may raise any error but must access nothing else.
    """
    import torch.distributed.checkpoint as dcp
    import zarr
    from torch.distributed.checkpoint.api import CheckpointException

    # DCP's planner unpickles the bytes that zarrckpt's reader makes of decoded values.
    watch.unpickled = {("numpy._core.multiarray", "_reconstruct"), ("numpy", "ndarray"), ("numpy", "dtype")}
    watch.unpickled |= {("torch._utils", "_rebuild_tensor_v2"), ("torch", "Size"), ("collections", "OrderedDict")}
    watch.unpickled |= {("__builtin__", name) for name in ("bytearray", "complex", "set", "frozenset")}
    watch.unpickled |= {("_codecs", "encode"), ("numpy._core.multiarray", "scalar"), ("_io", "BytesIO")}
    for target in ({"model": state(7)["model"]}, {"step": 0, "tree": None, "torch": None, "npy": None}):
        with watched(watch, found, "dcp.load"):
            try:
                dcp.load(target, storage_reader=zarrckpt.ZarrStorageReader(url), no_dist=True)
            except CheckpointException as err:
                causes = {type(cause) for cause, _ in err.failures.values()}
                # DCP's planner raises RuntimeError and ValueError for missing keys and different shapes.
                if not all(issubclass(cause, CheckpointError | RuntimeError | ValueError) for cause in causes):
                    raise
    watch.unpickled = set()
    with watched(watch, found, "save with this base"):
        model = {"model": state(7)["model"]}
        zarrckpt.save(model, url.parent / "reused", overwrite=True, base=url, options=WITHOUT_SYNC)
        assert zarrckpt.open(url.parent / "reused").read()["model.w"].tolist() == model["model"]["w"].tolist()
    with watched(watch, found, "zarr"), contextlib.suppress(Exception):
        group = zarr.open_group(url, mode="r", zarr_format=3)
        for _, node in group.members(max_depth=None):
            if isinstance(node, zarr.Array) and node.nbytes < 1 << 20:
                node[...]


# -- campaigns: each returns (number of cases, number of cases that opened, faults)


Result = tuple[int, int, list[str]]


def documents(watch: Watch, sandbox: Path, count: int, seed: int) -> Result:
    """Change root documents, seal most of them, and use those that open."""
    mutator, found, opened = Mutator(seed), [], 0
    own = ("attributes", "zarrckpt")
    focuses = [own, (*own, "entries"), (*own, "keys"), (*own, "containers"), (*own, "tables")]
    focuses += [("consolidated_metadata", "metadata")] * 3 + [()]
    kinds = []
    for kind in KINDS:
        folder = make(sandbox / kind / "ck", kind)
        document = json.loads((folder / "zarr.json").read_bytes())
        kinds.append((folder, document))
        (folder / "zarr.json").write_bytes(sealed(text_of(document)))
        warm: list[str] = []
        if not use(watch, folder, warm, deep=True) or not zarrckpt.open(folder).verify():
            raise AssertionError(f"without a change it does not open: {warm}")
    for number in range(count):
        folder, document = kinds[number % len(kinds)]
        data = mutator.changed(document, mutator.random.choice(focuses))
        if mutator.random.random() < 0.97:
            data = sealed(data)
        (folder / "zarr.json").write_bytes(data)
        faults: list[str] = []
        opened += use(watch, folder, faults, deep=number % 5 == 0)
        if faults:
            note(sandbox, f"{seed}-{number}", data)
            found += [f"case {number}: {fault}" for fault in faults]
    return count, opened, found


def note(sandbox: Path, name: str, data: bytes) -> None:
    """Keep a document that shows a fault, if ZARRCKPT_KEEP names a folder."""
    kept = os.environ.get("ZARRCKPT_KEEP")
    if kept:
        Path(kept, name).write_bytes(data)


def shapes(watch: Watch, sandbox: Path, count: int, seed: int) -> Result:
    """Run documents that claim more than is stored: terabytes, products that overflow, thousands of dimensions."""
    rand, found, opened = random.Random(seed), [], 0
    folder = make(sandbox / "shapes", "plain")
    original = (folder / "zarr.json").read_bytes()
    use(watch, folder, [], deep=True)
    big = [0, 1, 2, 3, 2**20, 2**28, 2**33, 2**40, 2**50, 2**61, 2**62]  # sizes between may fit into memory
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in range(count):
        forgery = Forgery(folder)
        path = rand.choice(["model/w", "model/half", "model/flags", "npy", "raw"])
        node = forgery.nodes[path]
        dims = 1 if path in ("npy", "raw") else rand.choice((0, 1, 1, 1, 2, 2, 3, 31, 33, 64, 65, 70, 3000))
        shape = [rand.choice(big) if dims < 20 else 1 for _ in range(dims)]
        chunk = [max(1, n) if rand.random() < 0.8 else rand.choice(big[1:]) for n in shape]
        inner = node["codecs"]
        if dims and rand.random() < 0.3:
            sub = [rand.choice([d for d in (1, c, max(1, c // 2)) if c % d == 0]) for c in chunk]
            index = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]
            node["codecs"] = [
                {
                    "name": "sharding_indexed",
                    "configuration": {
                        **{"chunk_shape": sub, "codecs": inner, "index_codecs": index, "index_location": "end"},
                    },
                }
            ]
        node["shape"], node["chunk_grid"]["configuration"]["chunk_shape"] = shape, chunk
        node["dimension_names"] = [f"dim{axis}_{n}" for axis, n in enumerate(shape)]
        forgery.own["tables"]["checksums"]["length"] = _subchunks(forgery.nodes)
        forgery.write()
        data = (folder / "zarr.json").read_bytes()
        faults: list[str] = []
        opened += use(watch, folder, faults, deep=number % 5 == 0)
        if faults:
            note(sandbox, f"shapes-{seed}-{number}", data)
            found += [f"case {number} {path} {shape!r:.90} {chunk!r:.90}: {fault}" for fault in faults]
        (folder / "zarr.json").write_bytes(original)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10
    if grown > 300:
        found.append(f"{grown} MiB of memory were used")
    return count, opened, found


def _subchunks(nodes: dict[str, Any]) -> int:
    """Return the number of subchunks of all arrays, as the documents claim."""
    subchunks = 0
    for node in nodes.values():
        if node["node_type"] == "array":
            chunk, own = node["chunk_grid"]["configuration"]["chunk_shape"], 1
            for n, c in zip(node["shape"], chunk, strict=True):
                own *= -(-n // c)
            if node["codecs"][0]["name"] == "sharding_indexed":
                for c, s in zip(chunk, node["codecs"][0]["configuration"]["chunk_shape"], strict=True):
                    own *= c // s
            subchunks += own
    return subchunks


def markers(watch: Watch, sandbox: Path, count: int, seed: int) -> Result:
    """Run changed claims and markers below a committed checkpoint. The cleanup must delete none of its objects."""
    mutator, found, opened = Mutator(seed), [], 0
    kinds = [make(sandbox / kind / "original", kind) for kind in ("plain", "tree")]
    work = sandbox / "work"
    (sandbox / "neighbour").mkdir()
    (sandbox / "neighbour" / "c.0").write_bytes(b"not ours")
    for number in range(count):
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(kinds[number % 2], work)
        own = zarrckpt.open(work).save_id
        _plant(mutator, work, own)
        faults: list[str] = []
        opened += _clean_up(watch, work, faults, mutator.random.choice(("recover", "stopped", "overwrite", "remove")))
        if (sandbox / "neighbour" / "c.0").read_bytes() != b"not ours":
            faults.append("a neighbour was changed")
        found += [f"case {number}: {fault}" for fault in faults]
    return count, opened, found


def _plant(mutator: Mutator, work: Path, own: str) -> None:
    """Put changed markers, and sometimes a changed claim."""
    rand, reserved = mutator.random, work / "@zarrckpt"
    for _ in range(rand.choice((1, 1, 3))):
        attempt = f"{rand.getrandbits(128):032x}"
        tree = rand.choice(("", f"@{attempt}", f"@{own}", "@zarrckpt", "..", "/"))
        names = ["model/w", "../neighbour", str(work.parent / "neighbour"), f"@{own}/model/w", "@zarrckpt", "npy"]
        names += [f"@zarrckpt/{own}/checksums", f"@zarrckpt/{own}", "..", ".", "", "model", "@zarrckpt/zarr.json"]
        document = {
            **{"zarr_format": 3, "node_type": "group"},
            "attributes": {
                "zarrckpt": {
                    **{"crc32c": "00000000", "format": 1, "tree": tree, "started": "2026-01-01T00:00:00.000000Z"},
                    **{"attempt": rand.choice((attempt, attempt, own)), "base": rand.choice(("", own, "0" * 32))},
                    "arrays": rand.sample(names, rand.choice((1, 1, 2))),
                    "groups": rand.sample(names, rand.choice((0, 1))),
                }
            },
        }
        if rand.random() < 0.6:  # a valid one that names objects of others
            tree = rand.choice(("", "", f"@{attempt}"))
            arrays = rand.sample(["model/w", "npy", "model/empty", "raw", "model/scalar"], 2)
            document["attributes"]["zarrckpt"].update(tree=tree, arrays=arrays, groups=["model"])
        data = text_of(document)
        if rand.random() < 0.3:
            data = mutator.changed(document, ("attributes", "zarrckpt"))
        folder = reserved / rand.choice((attempt, attempt, attempt, "x", "probe-1"))
        folder.mkdir(exist_ok=True)
        (folder / "zarr.json").write_bytes(sealed(data))
    if rand.random() < 0.3:
        claim = reserved / "zarr.json"
        document = json.loads(claim.read_bytes())
        claim.write_bytes(sealed(mutator.changed(document, ("attributes", "zarrckpt"))))


def _clean_up(watch: Watch, work: Path, faults: list[str], how: str) -> bool:
    """Clean up and return whether it succeeded. Unless it was removed, the committed checkpoint must stay whole."""
    done = False
    with watched(watch, faults, how):
        if how == "overwrite":
            zarrckpt.save({"w": torch.ones(3)}, work, overwrite=True, options=zarrckpt.SaveOptions(durable=False))
        elif how == "remove":
            zarrckpt.remove(work)
        else:
            zarrckpt.recover(work, stopped=how == "stopped")
        done = True
    if how != "remove":
        report = zarrckpt.open(work).verify()
        # Do not count the claim and the documents that ``_plant`` may have changed.
        damages = [damage for damage in report.damages if damage.key != "@zarrckpt/zarr.json"]
        if damages:
            faults.append(f"{how}: what is committed is damaged: {damages[:2]}")
    return done


# -- archives


def archives(watch: Watch, sandbox: Path, count: int, seed: int) -> Result:
    """Change bytes and records of archives. Reads give the saved values or an error, and ``verify`` finds each change.

    The original archives have equal sizes and places of all entries, or the same entries compressed.
    """
    rand, found, opened = random.Random(seed), [], 0
    originals, values = [], []
    for number in (0, 1, 2):
        url = sandbox / f"{number}.zarr.zip"
        kept = {name: value for name, value in state(number).items() if name in ("model", "step", "raw", "tree")}
        zarrckpt.save(kept, url, options=dataclasses.replace(WITHOUT_SYNC, compression="zstd" if number == 2 else None))
        originals.append(url.read_bytes())
        values.append(_read_archive(url))
        if not zarrckpt.open(url).verify():
            raise AssertionError("without a change it is damaged")
    url = sandbox / "changed.zarr.zip"
    for number in range(count):
        data, other = rand.choice(((0, 1), (1, 0), (2, 0)))
        changed = changed_archive(rand, originals[data], originals[other])
        if changed in originals:
            continue
        url.write_bytes(changed)
        faults: list[str] = []
        for read in (_read_archive, _load_archive):
            with watched(watch, faults, read.__name__):
                got = read(url)
                opened += read is _read_archive
                if not any(got.items() <= expected.items() for expected in values):
                    faults.append(f"{read.__name__}: other values")
        with watched(watch, faults, "verify"):
            if zarrckpt.open(url).verify():
                faults.append("verify: no damage found")
        if faults:
            note(sandbox, f"archive-{seed}-{number}", changed)
            found += [f"case {number}: {fault}" for fault in faults]
    return count, opened, found


def _read_archive(url: Path) -> dict[str, str]:
    ckpt = zarrckpt.open(url)
    return _bits(ckpt.read() | {fqn: ckpt[fqn] for fqn in ckpt if fqn not in ckpt.tensors})


def _load_archive(url: Path) -> dict[str, str]:
    target = {"w": torch.zeros(6, 4), "half": torch.zeros(5, dtype=torch.bfloat16)}
    zarrckpt.load({"model": target}, url)
    return _bits({f"model.{name}": tensor.float().numpy() for name, tensor in target.items()})


def _bits(values: dict[str, Any]) -> dict[str, str]:
    """Return a text for each value. Elements of tensors are shown as float32, others as they are."""
    arrays = {fqn: value for fqn, value in values.items() if isinstance(value, np.ndarray)}
    return {fqn: repr(value) for fqn, value in values.items()} | {
        fqn: f"{array.shape} {array.astype(np.float32).tobytes().hex()}" for fqn, array in arrays.items()
    }


NUMBERS = [0, 1, 20, 22, 45, 64, 2**15, 2**16 - 1, 2**16, 2**31, 2**32 - 2, 2**32 - 1, 2**32, 2**62, 2**64 - 1]


def changed_archive(rand: random.Random, data: bytes, other: bytes) -> bytes:
    """Return an archive after one to three changes of its bytes, or of the records in its central directory."""
    for _ in range(rand.choice((1, 1, 1, 2, 3))):
        data = rand.choice((_change_bytes, _change_bytes, _change_records))(rand, data, other)
    return data


def _change_bytes(rand: random.Random, data: bytes, other: bytes) -> bytes:
    # Half of the changes are near the beginning of a record.
    places = [*(match.start() for match in re.finditer(b"PK[\1-\7][\2-\7]", data)), len(data) - 22]
    place = rand.randrange(len(data) + 1) if rand.random() < 0.5 else rand.choice(places) + rand.randrange(60)
    begin = min(max(place, 0), len(data))
    end = min(len(data), begin + rand.choice((1, 2, 4, 30, 46, 64, 300, len(data))))
    source = rand.randrange(len(data) + 1)
    size = rand.choice((2, 4, 8))
    pick = rand.randrange(9)
    if pick == 0 and begin < len(data):
        return data[:begin] + bytes([data[begin] ^ 1 << rand.randrange(8)]) + data[begin + 1 :]
    if pick == 1:
        return data[:begin] + data[end:]
    if pick == 2:
        return data[:begin] + rand.choice((bytes(end - begin), rand.randbytes(end - begin))) + data[begin:]
    if pick == 3:
        return data[:begin] + data[begin:end] + data[begin:]
    if pick == 4:  # swap two ranges
        first, second = sorted((begin, source))
        middle = rand.randint(first, second)
        return data[:first] + data[middle:second] + data[first:middle] + data[second:]
    if pick == 5:
        return data[:begin] + (rand.choice(NUMBERS) % 256**size).to_bytes(size, "little") + data[begin + size :]
    if pick == 6:
        return data[:begin] + other[rand.choice((begin, begin, source)) :]
    if pick == 7:
        return data[:begin] + other[begin:end] + data[end:]
    return rand.choice((other + data, data + other, data[:begin], data[begin:]))


def split_directory(data: bytes) -> tuple[bytes, list[bytes]]:
    """Return the bytes before the central directory of an archive, and the records in it."""
    offset = data.find(b"PK\1\2")
    split = [part for part in re.split(rb"(?=PK\x01\x02)", data[offset:-22]) if part]
    return data[:offset], split


def join_directory(before: bytes, split: list[bytes]) -> bytes:
    """Return an archive whose end record fits these records."""
    size = sum(map(len, split))
    end = struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, len(split), len(split), size, len(before), 0)
    return before + b"".join(split) + end


def _change_records(rand: random.Random, data: bytes, other: bytes) -> bytes:
    """Change records of the central directory in such a way that the end record fits them."""
    before, split = split_directory(data)
    if len(split) < 2 or min(map(len, split)) < 46 or len(before) >= 2**32:
        return data
    one, two = rand.sample(range(len(split)), 2)
    first, second = split[one], split[two]
    name, taken = first[46:], rand.choice((second[46:], *NAMES))
    pick = rand.randrange(6)
    if pick == 0:
        split[one], split[two] = second, first
    elif pick == 1:
        split.insert(two, first)
    elif pick == 2:
        del split[one]
    elif pick == 3:
        split[one] = first[:28] + struct.pack("<H", len(taken)) + first[30:46] + taken
        if rand.random() < 0.5:
            split[two] = second[:28] + struct.pack("<H", len(name)) + second[30:46] + name
    elif pick == 4:  # exchange the offsets, sizes or checksums
        begin, end = rand.choice(((16, 20), (20, 28), (42, 46), (16, 28)))
        split[one] = first[:begin] + second[begin:end] + first[end:]
        split[two] = second[:begin] + first[begin:end] + second[end:]
    else:
        begin, size = rand.choice(((8, 2), (10, 2), (16, 4), (20, 4), (24, 4), (34, 2), (38, 4), (42, 4)))
        number = rand.choice((*NUMBERS, int.from_bytes(first[begin : begin + size], "little") + rand.choice((-1, 1))))
        split[one] = first[:begin] + (number % 256**size).to_bytes(size, "little") + first[begin + size :]
    return join_directory(before, split)


NAMES = [b"", b"/etc/passwd", b"../canary/secret", b"model/../zarr.json", b"zarr.json", b"model\\w", b"model/"]
NAMES += [b"C:\\x", b"\xff", b"a\0b", b"@zarrckpt/zarr.json", b"x" * 300, b"model//w", b"./zarr.json"]


# -- bombs


class Bomb:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.write_text, (self.path, "hit"))


def bombs(target: Path) -> dict[str, bytes]:
    """Return bytes that write a file when they are unpickled, each a valid form of some file."""
    bomb = Bomb(target)
    saved, legacy, archive, header = io.BytesIO(), io.BytesIO(), io.BytesIO(), io.BytesIO()
    torch.save({"a": torch.ones(1), "b": bomb}, saved)
    torch.save({"a": bomb}, legacy, _use_new_zipfile_serialization=False)
    np.save(archive, np.array([bomb], object), allow_pickle=True)
    text = f"{{'descr': __import__('pathlib').Path({str(target)!r}).write_text('hit'), 'shape': ()}}".encode()
    header.write(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text)
    plain, npy = pickle.dumps(bomb), archive.getvalue()
    structured = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        structured, {"descr": [("a", "|O"), ("b", "<i4")], "fortran_order": False, "shape": (1,)}
    )
    structured.write(plain)
    found = {"saved": saved.getvalue(), "legacy": legacy.getvalue(), "npy": npy, "header": header.getvalue()}
    found["structured"] = structured.getvalue()
    for name, encoding, kind, item in (("npy", "npy", "ndarray", npy), ("pickle", "pickle", "Bomb", plain)):
        where = {"encoding": encoding, "kind": kind, "byte_offset": 0, "byte_size": len(item)}
        skeleton = json.dumps([{"$blob": where}]).encode()
        found[f"{name} in a tree"] = struct.pack("<Q", len(skeleton)) + skeleton + item
    return {**found, "plain": plain}


CAMPAIGNS: dict[str, Callable[[Watch, Path, int, int], Result]] = {
    "documents": documents,
    "shapes": shapes,
    "markers": markers,
    "archives": archives,
}


def main(arguments: list[str]) -> int:
    """Run campaigns. Print the faults and the number of cases."""
    parser = argparse.ArgumentParser(description="Fuzz checkpoints: documents 12000 shapes 500 ...")
    parser.add_argument("campaigns", nargs="+", metavar="NAME COUNT", help=f"of {', '.join(CAMPAIGNS)}")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--address-space", type=int, default=0, help="bytes that may be allocated beside what is now")
    options = parser.parse_args(arguments)
    pairs = list(zip(options.campaigns[::2], map(int, options.campaigns[1::2]), strict=True))
    warnings.simplefilter("ignore")
    found: list[str] = []
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as folder:
        canary = Path(folder, "canary", "secret")
        canary.parent.mkdir()
        canary.write_text("secret")
        watch = Watch(Path(folder, "sandbox"))
        if options.address_space:
            limit = _address_space() + options.address_space
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        for name, count in pairs:
            sandbox = Path(folder, "sandbox", name)
            sandbox.mkdir(parents=True)
            cases, opened, faults = CAMPAIGNS[name](watch, sandbox, count, options.seed)
            print(f"{name}: {cases} cases, {opened} of them opened, {len(faults)} faults", flush=True)
            found += faults
        if canary.read_text() != "secret" or len(os.listdir(canary.parent)) != 1:
            found.append("the canary was touched")
    kinds = collections.Counter(fault.partition(": ")[2] for fault in found)
    for fault, times in kinds.most_common(40):
        print(f"{times} x {fault}")
    for fault in found[:20]:
        print(fault)
    return 1 if found else 0


def _address_space() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
