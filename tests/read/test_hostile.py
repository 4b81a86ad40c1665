"""A hostile checkpoint raises only CheckpointErrors. Reading it runs no code from it and accesses nothing else.

``hostile.py`` has the fuzzers, and describes large campaigns. Their earlier findings are named tests here.
``test_compression.py`` has compressed bytes that decompress to something else.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import shutil
import struct
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner
from harness import hostile
from harness.hostile import Forgery

import zarrckpt
from zarrckpt import (
    CheckpointError,
    CorruptCheckpointError,
    StorageError,
    UnsafeValueError,
    UnsupportedFormatError,
    UnsupportedValueError,
)
from zarrckpt._format import json_values
from zarrckpt.cli import main


def test_fuzzed_checkpoints_do_no_harm() -> None:
    """Documents that claim terabytes or thousands of dimensions also fail soon, and with little memory."""
    words = "documents 50 shapes 20 markers 15 archives 500"
    options = [*words.split(), "--seed", "5", "--address-space", "3000000000"]
    command = [sys.executable, str(Path(hostile.__file__)), *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
    assert done.returncode == 0, f"{done.stdout[-8000:]}\n{done.stderr[-3000:]}"
    lines = done.stdout.splitlines()
    assert len(lines) == len(words.split()) // 2 and all(", 0 faults" in line for line in lines)
    assert all(int(line.split("cases, ")[1].split()[0]) for line in lines)  # some of each kind open


# -- findings of the fuzzers


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hostile.make(tmp_path_factory.mktemp("original") / "ck", "plain")


@pytest.fixture
def forgery(plain: Path, tmp_path: Path) -> Forgery:
    return Forgery(shutil.copytree(plain, tmp_path / "ck"))


def put(forgery: Forgery, fqn: str, path: str, keys: list[Any], value: Any = 1) -> None:
    """Add a value with the given keys."""
    forgery.own["entries"][fqn] = {"path": path, "value": value}
    names = path.split("/")
    for depth, (key, name) in enumerate(zip(keys, names, strict=False)):
        if key != name:
            forgery.own["keys"]["/".join(names[: depth + 1])] = key


def shape(forgery: Forgery, path: str, *extents: int, chunks: int | None = None) -> None:
    """Give an array another shape, in one chunk or in chunks of one element, with tables that fit."""
    node = forgery.nodes[path]
    node["shape"] = list(extents)
    node["chunk_grid"]["configuration"]["chunk_shape"] = [chunks or max(n, 1) for n in extents]
    node["dimension_names"] = [f"dim{axis}_{n}" for axis, n in enumerate(extents)]
    forgery.own["tables"]["checksums"]["length"] = hostile._subchunks(forgery.nodes)


def tree(forgery: Forgery, name: str) -> None:
    """Move all nodes into a tree of some name."""
    forgery.own["tree"] = name
    nodes = {f"{name}/{path}": node for path, node in forgery.nodes.items()}
    nodes[name] = {"zarr_format": 3, "node_type": "group", "attributes": {}}
    forgery.document["consolidated_metadata"]["metadata"] = nodes


def nest(depth: int) -> list[Any]:
    found: list[Any] = []
    for _ in range(depth):
        found = [found]
    return found


def stack(forgery: Forgery, path: str, level: int, ranks: list[list[int]]) -> None:
    """Turn an array into a stack of several ranks' tensors."""
    shape(forgery, path, 4000)
    forgery.own["entries"][path.replace("/", ".")].update(ranks=ranks, level=level)


def empty_stack(forgery: Forgery, number: int) -> None:
    """Add a stack of a million ranks' empty tensors, which takes no table and no chunk."""
    path = f"s{number}/ranks"
    forgery.nodes[f"s{number}"] = {"zarr_format": 3, "node_type": "group", "attributes": {}}
    forgery.nodes[path] = json.loads(json.dumps(forgery.nodes["model/w"]))
    shape(forgery, path, 2**20, 0)
    forgery.own["entries"][f"s{number}.ranks"] = {"path": path, "ranks": [[number, number + 2**20]], "level": 1}


ONE_HASH = [n * (2**61 - 1) for n in range(2**20, 2**20 + 300)]
"""Integers with the hash 0: a dict of n of them takes n * n comparisons."""


def tagged(number: int) -> dict[str, str]:
    return {"$int": hex(number)}


REUSED = {"save_id": "0" * 32, "objects": 1, "nbytes": 4, "saves": 1}

REFUSED: dict[str, Callable[[Forgery], Any]] = {
    "reuse from no save": lambda f: f.own.update(reused={**REUSED, "save_id": "../base"}),
    "less than no reused object": lambda f: f.own.update(reused={**REUSED, "objects": -1}),
    "a share of a reused byte": lambda f: f.own.update(reused={**REUSED, "nbytes": 1.5}),
    "reuse after a number of saves that is a text": lambda f: f.own.update(reused={**REUSED, "saves": "1"}),
    "reuse with another member": lambda f: f.own.update(reused={**REUSED, "url": "/etc"}),
    "reuse without its number of saves": lambda f: f.own.update(reused={"save_id": "0" * 32, "objects": 1}),
    "reuse that is a list": lambda f: f.own.update(reused=[REUSED]),
    "fewer digests than chunks": lambda f: f.own["tables"].update(digests={"length": 1, "crc32c": 0}),
    "more digests than chunks": lambda f: f.own["tables"].update(digests={"length": 2**40, "crc32c": 0}),
    "digests that are a list": lambda f: f.own["tables"].update(digests=[1]),
    "a key with more digits than Python shows": lambda f: put(f, "x", "x", [{"$int": "0x" + "f" * 5000}]),
    "a key that no dict takes": lambda f: put(f, "[1]", "x", [[1]]),
    "a key that holds what no dict takes": lambda f: put(f, "([1],)", "x", [{"$tuple": [[1]]}]),
    "an entry below a value": lambda f: put(f, "step.x", "step/x", ["step", "x"]),
    "a value where others have entries": lambda f: put(f, "model", "model", ["model"]),
    "equal keys": lambda f: (put(f, "x.1", "x/1", ["x", 1]), put(f, "x.True", "x/True", ["x", True])),
    "a list for some": lambda f: (
        f.own["containers"].update(p="list"),
        put(f, "k.1", "p/1", ["k", 1]),
        put(f, "k.z", "q/z", ["k", "z"]),
    ),
    "a position far away": lambda f: put(f, "layers.999999999", "layers/999999999", ["layers", "999999999"]),
    "a position before the first": lambda f: put(f, "layers.-1", "layers/-1", ["layers", -1]),
    "a path into the reserved group": lambda f: put(f, "x", "@zarrckpt/x", ["x"]),
    "a value deeper than any": lambda f: put(f, "x", "x", ["x"], nest(200)),
    "a value that Python can just parse": lambda f: put(f, "x", "x", ["x"], "__deep_950__"),
    "software as deep": lambda f: f.own["software"].update(torch="__deep_950__"),
    "a save id as deep": lambda f: f.own.update(save_id="__deep_950__"),
    "sixty-four dimensions": lambda f: shape(f, "model/w", *[1] * 64),
    "thousands of dimensions": lambda f: shape(f, "model/w", *[1] * 5000),
    "hundreds of thousands of dimensions": lambda f: f.nodes["model/w"].update(shape=[1] * 200_000),
    "a path of a thousand names": lambda f: put(f, ".".join("a" * 1000), "/".join("a" * 1000), ["a"] * 1000),
    "a number beyond any float": lambda f: put(f, "x", "x", ["x"], [1.5, {"a": "__huge__"}]),
    "a value at the path of an array": lambda f: put(f, "v", "model/w", ["v", "w"]),
    "a value at the path of a group": lambda f: put(f, "v", "model", ["v"]),
    "two values at one path": lambda f: (put(f, "v", "x", ["v"]), put(f, "u", "x", ["u"])),
    "one container at two paths": lambda f: (put(f, "k.1", "p/1", ["k", "1"]), put(f, "k.z", "q/z", ["k", "z"])),
    "a container that is the state itself": lambda f: f.own["containers"].update({"": "OrderedDict"}),
    "a key that is no Unicode": lambda f: put(f, "\ud800", "x", [{"$str": "eda080"}]),
    "a frozenset as a key": lambda f: put(f, "frozenset({1})", "x", [{"$frozenset": [1]}]),
    "a type of its own as portable": lambda f: f.nodes["model/w"].update(attributes={"zarrckpt": {"dtype": "float32"}}),
    "a kind that is null": lambda f: f.own["entries"]["npy"].update(encoding="torch", kind=None),
    "a stack at a key that is none": lambda f: stack(f, "model/w", 0, [[0, 4000]]),
    "ranks of one stack too many": lambda f: stack(f, "model/w", 1, [[0, 2**40]]),
    "ranks of many stacks": lambda f: [empty_stack(f, number) for number in range(6)],
    "another save's tree": lambda f: tree(f, f"@{'0' * 32}"),
    "a number that is none of a whole": lambda f: f.nodes["model/w"].update(zarr_format=3.0),
    "chunks of one more dimension": lambda f: f.nodes["model/w"]["chunk_grid"]["configuration"]["chunk_shape"].append(
        1
    ),
    "no list of features": lambda f: f.own.pop("features"),
    "more bytes than any array": lambda f: shape(f, "model/w", 2**61),
    "more bytes than any array but for a zero": lambda f: shape(f, "model/w", 0, 2**61),
    "a value longer than any": lambda f: put(f, "x", "x", ["x"], "a" * 65_535),
    "keys with one hash": lambda f: [put(f, f"x.{n}", f"x/{n}", ["x", tagged(n)]) for n in ONE_HASH],
    "containers whose keys have one hash": lambda f: [
        put(f, f"x.{n}.{n}", f"x/{n}/{n}", ["x", tagged(n), str(n)]) for n in ONE_HASH
    ],
    "more lists than any document": lambda f: [put(f, f"x{n}", f"x{n}", [f"x{n}"], [[]] * 20_000) for n in range(80)],
}


@pytest.mark.parametrize("name", REFUSED)
def test_forged_roots_are_refused_on_opening(name: str, forgery: Forgery) -> None:
    REFUSED[name](forgery)
    forgery.write()
    with pytest.raises((CorruptCheckpointError, UnsupportedFormatError)):
        zarrckpt.open(forgery.folder)


def test_the_unchanged_root_opens(forgery: Forgery) -> None:
    put(forgery, "x", "x", ["x"], nest(20))
    forgery.own["reused"] = REUSED
    forgery.write()
    ckpt = zarrckpt.open(forgery.folder)
    assert ckpt["x"] == nest(20)
    assert ckpt.verify()
    tree(forgery, f"@{forgery.own['save_id']}")
    forgery.write()
    assert zarrckpt.open(forgery.folder)["x"] == nest(20)


@pytest.mark.parametrize(
    ("extents", "chunks"), [([2**58], None), ([2**40], 2**20), ([2**30], 1), ([2**45], 1), ([2**15, 2**15], 1)]
)
def test_claimed_sizes_allocate_no_memory(
    extents: list[int], chunks: int | None, forgery: Forgery, tmp_path: Path
) -> None:
    """Nothing is listed or allocated for chunks that are not stored, and nothing waits forever for memory."""
    shape(forgery, "model/w", *extents, chunks=chunks)
    forgery.write()
    ckpt = zarrckpt.open(forgery.folder)
    copied, part = tmp_path / "copy", ckpt.select("model.w")
    reads: list[Callable[[], Any]] = [
        lambda: zarrckpt.copy(part, copied),
        lambda: zarrckpt.copy(part, copied, dtype={"model.w": "float16"}),
        lambda: zarrckpt.copy(part, copied, chunks=[1] * len(extents)),
        lambda: zarrckpt.copy(part, tmp_path / "copy.zarr.zip", max_chunk_bytes=4096),
        lambda: zarrckpt.report(part, tmp_path / "page.html"),
        lambda: zarrckpt.diff(part, part),
        lambda: part.stats(),
        lambda: [*part.iter_tensors()],
        lambda: zarrckpt.to_dcp(part, tmp_path / "dcp"),
        lambda: zarrckpt.to_safetensors(part, tmp_path / "safetensors"),
        lambda: ckpt["model.w"][...],
        lambda: ckpt.read(["model.w"]),
        lambda: zarrckpt.load({"model": None}, forgery.folder),
        lambda: ckpt.verify().raise_if_damaged(),
        lambda: ckpt.verify(quick=True).raise_if_damaged(),
    ]
    began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for read in reads:
        with pytest.raises(CheckpointError):
            read()
    assert time.monotonic() - began < 30 and resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000
    if chunks is not None:
        assert not copied.exists() and not (tmp_path / "copy.zarr.zip").exists()  # refused before anything is written
        with pytest.raises(CheckpointError):
            ckpt.writers("model.w")


def test_an_empty_tensor_of_many_claimed_chunks_costs_nothing(forgery: Forgery, tmp_path: Path) -> None:
    shape(forgery, "model/empty", 2**40, 0, chunks=1)
    forgery.write()
    (forgery.folder / "model/empty/zarr.json").write_bytes(hostile.text_of(forgery.nodes["model/empty"]))
    part = zarrckpt.open(forgery.folder).select("model.empty")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    zarrckpt.report(part, tmp_path / "page.html")
    zarrckpt.copy(part, tmp_path / "copy", dtype={"model.empty": "float16"})
    assert part.verify() and zarrckpt.open(tmp_path / "copy").read()["model.empty"].shape == (2**40, 0)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000


def test_a_chunk_claimed_to_be_huge_fails_soon(forgery: Forgery) -> None:
    """A load does not wait for memory that it can never get."""
    for path in ("model/w", "model/half", "layers/0"):
        shape(forgery, path, 3, chunks=2**58)
    forgery.write()
    target = {"model": {"w": torch.zeros(3), "half": torch.zeros(3).bfloat16()}, "layers": [torch.zeros(3)]}
    with pytest.raises(CheckpointError):
        zarrckpt.load(target, forgery.folder, strict=False)


def test_impossible_sizes_are_damage_of_their_table(tmp_path: Path) -> None:
    forgery = Forgery(hostile.make(tmp_path / "ck", "zstd"))
    forgery.table("sizes", 2, 2**31)
    forgery.write()
    ckpt = zarrckpt.open(forgery.folder)
    for quick in (False, True):
        (damage,) = ckpt.verify(quick=quick).damages
        assert damage.key == f"@zarrckpt/{ckpt.save_id}/sizes/c.0"


def test_tensors_of_many_dimensions(tmp_path: Path) -> None:
    """A tensor is saved if it has at most as many dimensions as can be read."""
    for dimensions in (32, 33, 63):
        tensor = torch.arange(2.0).reshape(2, *[1] * (dimensions - 1))
        zarrckpt.save({"w": tensor}, tmp_path / str(dimensions))
        target = torch.zeros_like(tensor)
        zarrckpt.load({"w": target}, tmp_path / str(dimensions))
        ckpt = zarrckpt.open(tmp_path / str(dimensions))
        assert torch.equal(target, tensor) and ckpt.verify()
        assert (ckpt.read()["w"] == tensor.numpy()).all() and (ckpt["w"][...] == tensor.numpy()).all()
    with pytest.raises(UnsupportedValueError, match="64 dimensions"):
        zarrckpt.save({"w": torch.ones([1] * 64)}, tmp_path / "64")


def test_large_tensors_of_many_dimensions(tmp_path: Path) -> None:
    """With several subchunks, they are saved, put whole or in parts, and read."""
    tensor = torch.arange(512 * 1024).reshape(512, *[1] * 61, 1024)
    for url in (str(tmp_path / "local"), f"memory://{tmp_path.name}"):
        zarrckpt.save({"w": tensor}, url)
        target = torch.zeros_like(tensor)
        zarrckpt.load({"w": target}, url)
        ckpt = zarrckpt.open(url)
        assert torch.equal(target, tensor) and ckpt.verify()
        assert (ckpt.read()["w"] == tensor.numpy()).all()
        assert (ckpt["w"][3:300, ..., 5:300] == tensor[3:300, ..., 5:300].numpy()).all()


def test_values_whose_items_have_one_hash(forgery: Forgery) -> None:
    items = sorted(map(tagged, ONE_HASH), key=lambda item: json.dumps(item, separators=(",", ":")))
    for value in ({"$set": items}, {"$dict": [[item, 1] for item in items]}, {"$frozenset": items}):
        put(forgery, "x", "x", ["x"], value)
        skeleton = json.dumps(value, separators=(",", ":")).encode()
        forgery.blob("tree", struct.pack("<Q", len(skeleton)) + skeleton, "tree")
        forgery.write()
        ckpt = zarrckpt.open(forgery.folder)
        for name in ("x", "tree"):
            with pytest.raises(CorruptCheckpointError, match=f"'{name}'.*256"):
                ckpt[name]


def test_values_that_readers_refuse_are_not_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets of equal hashes are saved in another encoding. Keys of equal hashes, and very many lists, are refused."""
    values = {"set": {*ONE_HASH}, "dict": {"inner": (dict.fromkeys(ONE_HASH),)}}
    zarrckpt.save(values, tmp_path / "ck")
    ckpt = zarrckpt.open(tmp_path / "ck")
    assert ckpt["set"] == values["set"] and ckpt["dict.inner"] == values["dict"]["inner"]
    monkeypatch.setattr(json_values, "_FREE_CONTAINERS", 100)
    for refused in (dict.fromkeys(ONE_HASH, 1), {"x": [[] for _ in range(5_000)]}):
        with pytest.raises(UnsupportedValueError):
            zarrckpt.save(refused, tmp_path / "refused")


# -- code


def test_no_blob_runs_code(forgery: Forgery, tmp_path: Path) -> None:
    """Each bomb under each encoding, by every entry point. Only ``allow_pickle`` opens the one declared as a pickle."""
    target = tmp_path / "hit"
    for payload in hostile.bombs(target).values():
        for encoding, kind in [
            *[("raw", "bytes"), ("npy", "ndarray"), ("npy", "scalar"), ("npy", "scalar:bfloat16"), ("tree", None)],
            *[("torch", "x"), ("pickle", "x"), ("exec", None)],
        ]:
            forgery.blob("npy", payload, encoding, kind)
            forgery.write()
            for allow in (False,) if encoding == "pickle" else (False, True):
                _read_bomb(forgery.folder, allow)
            assert not target.exists(), encoding
    forgery.blob("npy", hostile.bombs(target)["plain"], "pickle", "x")
    forgery.write()
    with pytest.raises(UnsafeValueError, match="'npy'"):
        zarrckpt.load({"npy": None}, forgery.folder)
    assert not target.exists()
    zarrckpt.load({"npy": None}, forgery.folder, allow_pickle=True)
    assert target.read_text() == "hit"  # the bomb does work


def _read_bomb(folder: Path, allow: bool) -> None:
    ways: list[Callable[[], Any]] = [
        lambda: zarrckpt.open(folder, allow_pickle=allow)["npy"],
        lambda: zarrckpt.load({"npy": None}, folder, allow_pickle=allow),
    ]
    for way in ways:
        try:
            way()
        except CheckpointError as err:
            assert "npy" in str(err)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reader = zarrckpt.ZarrStorageReader(folder, allow_pickle=allow)
        try:
            dcp.load({"npy": np.zeros(1)}, storage_reader=reader, no_dist=True)
        except dcp.api.CheckpointException as err:
            assert all(isinstance(cause, CheckpointError) for cause, _ in err.failures.values()), err


# -- clean-up


def plant(folder: Path, where: str, **members: Any) -> None:
    """Put a marker that is valid except for its contents."""
    own = {"crc32c": "00000000", "format": 1, "attempt": where, "tree": "", "base": "0" * 32}
    own["started"] = "2026-11-21T15:01:31.559302Z"
    attributes = {"zarrckpt": {**own, "arrays": [], "groups": [], **members}}
    document = {"zarr_format": 3, "node_type": "group", "attributes": attributes}
    (folder / "@zarrckpt" / where).mkdir(exist_ok=True)
    data = json.dumps(document, separators=(",", ":")).encode()
    (folder / "@zarrckpt" / where / "zarr.json").write_bytes(hostile.sealed(data))


CLEAN_UPS: dict[str, Callable[[Path], Any]] = {
    "recover": lambda folder: zarrckpt.recover(folder, stopped=True),
    "overwrite": lambda folder: zarrckpt.save({"w": torch.ones(3)}, folder, overwrite=True),
}


@pytest.mark.parametrize("how", CLEAN_UPS)
def test_a_forged_marker_deletes_no_committed_object(how: str, tmp_path: Path) -> None:
    """Markers that name a committed tree's arrays, another save's tree, or another attempt's objects."""
    for kind in ("plain", "tree"):
        folder = hostile.make(tmp_path / kind, kind)
        own = zarrckpt.open(folder)
        arrays = [own.entry(fqn).node_path for fqn in own.tensors]
        plant(folder, "1" * 32, arrays=arrays, groups=["model"])
        plant(folder, "2" * 32, arrays=[f"@{own.save_id}/model/w", f"@zarrckpt/{own.save_id}/checksums"])
        plant(folder, "3" * 32, attempt=own.save_id, tree=own.info.tree, arrays=["model/w"])
        plant(folder, "4" * 32, tree=f"@{own.save_id}", arrays=["model/w"])
        CLEAN_UPS[how](folder)
        zarrckpt.open(folder).verify().raise_if_damaged()


@pytest.mark.parametrize("how", [*CLEAN_UPS, "remove"])
def test_no_object_outside_is_deleted(how: str, tmp_path: Path) -> None:
    """Paths that lead upwards or are absolute, and another program's array that a marker does not name in full."""
    folder = hostile.make(tmp_path / "ck", "plain")
    outside = tmp_path / "outside"
    outside.mkdir()
    for name in ("zarr.json", "c.0", "c"):
        (outside / name).write_bytes(b"not ours")
    for number, path in enumerate(("../outside", str(outside), "a/../../outside", "model/../../outside", "..", "")):
        plant(folder, f"{number}" * 32, arrays=[path], groups=[path])
    (folder / "other/c/0").mkdir(parents=True)
    (folder / "other/c/0/0").write_bytes(b"not ours")
    (folder / "other/.zattrs").write_bytes(b"not ours")
    plant(folder, "a" * 32, arrays=["other"])
    {**CLEAN_UPS, "remove": zarrckpt.remove}[how](folder)
    kept = [outside / "zarr.json", outside / "c.0", outside / "c", folder / "other/c/0/0", folder / "other/.zattrs"]
    assert all(file.read_bytes() == b"not ours" for file in kept)


@pytest.mark.parametrize("how", [*CLEAN_UPS, "remove"])
def test_links_out_of_the_folder_are_not_followed(how: str, tmp_path: Path) -> None:
    folder = hostile.make(tmp_path / "ck", "plain")
    outside = tmp_path / "outside"
    outside.mkdir()
    for name in ("zarr.json", "c.0"):
        (outside / name).write_bytes(b"not ours")
    (folder / "evil").symlink_to(outside)
    plant(folder, "1" * 32, arrays=["evil"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an overwrite is committed, and warns that it could not clean up
        try:
            {**CLEAN_UPS, "remove": zarrckpt.remove}[how](folder)
        except StorageError as err:
            assert "evil" in str(err)
    found = {file.name: file.read_bytes() for file in outside.iterdir()}
    assert found == {"zarr.json": b"not ours", "c.0": b"not ours"}


def test_no_lock_is_taken_through_a_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zarrckpt._store._local_commit._LOCK_SECONDS", 0.1)
    zarrckpt.save({"w": torch.ones(3)}, tmp_path / "ck")
    lock = tmp_path / "ck" / f".zarrckpt-{hashlib.sha256(b'zarr.json').hexdigest()[:16]}.lock"
    lock.symlink_to(tmp_path / "outside")
    with pytest.raises(StorageError, match=lock.name):
        zarrckpt.save({"w": torch.zeros(3)}, tmp_path / "ck", overwrite=True)
    assert not (tmp_path / "outside").exists() and zarrckpt.open(tmp_path / "ck")["w"][:].sum() == 3


def test_no_file_is_written_through_a_link(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (tmp_path / "ck").mkdir()
    (tmp_path / "ck/@zarrckpt").symlink_to(outside)
    with pytest.raises(StorageError, match="link"):
        zarrckpt.save({"w": torch.ones(3)}, tmp_path / "ck")
    assert not list(outside.iterdir())
    # A checkpoint's own folder, and the folders above it, may be links.
    (tmp_path / "real").mkdir()
    (tmp_path / "alias").symlink_to(tmp_path / "real")
    for _ in range(2):
        zarrckpt.save({"w": torch.ones(3)}, tmp_path / "alias", overwrite=True)
    zarrckpt.open(tmp_path / "alias").verify().raise_if_damaged()
    shutil.rmtree(tmp_path / "real")


# -- files that never end


def special_file(path: Path, kind: str) -> None:
    """Replace a file by a FIFO without a writer, a device, or a file of a terabyte."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.touch()
        os.truncate(path, 2**40)


def ended(work: Callable[[], Any]) -> Any:
    """Return what a call returned, or the CheckpointError that it raised. It must end within 30 s."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(work())
        except CheckpointError as err:
            outcome.append(err)
        except BaseException as err:
            outcome.append(AssertionError(f"raised {err!r}"))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(30)
    assert outcome, "it waits"
    if isinstance(outcome[0], AssertionError):
        raise outcome[0]
    return outcome[0]


READS: dict[str, Callable[[Path], Any]] = {
    "open": zarrckpt.open,
    "load": lambda url: zarrckpt.load({"w": torch.zeros(4)}, url),
    "read": lambda url: zarrckpt.open(url).read(),
    "zarr": lambda url: zarrckpt.open(url)["w"][:],
    "verify": lambda url: zarrckpt.open(url).verify().raise_if_damaged(),
    "copy": lambda url: zarrckpt.copy(url, url.parent / "copy"),
    "export": lambda url: zarrckpt.to_torch_save(url, url.parent / "out.pt"),
    "dcp": lambda url: zarrckpt.ZarrStorageReader(url).read_metadata().state_dict_metadata,
    "overwrite": lambda url: zarrckpt.save({"w": torch.ones(4)}, url, overwrite=True),
    "save": lambda url: zarrckpt.save({"w": torch.ones(4)}, url),
    "latest": lambda url: zarrckpt.latest(url.parent),
    "best": lambda url: zarrckpt.best(url.parent, "loss"),
    "ls": lambda url: CliRunner().invoke(main, ["ls", str(url.parent)]).output,
    "restore": lambda url: zarrckpt.CheckpointManager(url.parent, signals=()).restore({"w": torch.ones(4)}),
    "below": lambda url: zarrckpt.save({"w": torch.ones(4)}, url / "a/b"),
    "open below": lambda url: zarrckpt.open(url / "a"),
    "recover": zarrckpt.recover,
    "remove": zarrckpt.remove,
}
_DATA = ["load", "read", "zarr", "verify", "copy", "export"]
SPECIAL: dict[str, tuple[list[str], list[str]]] = {
    "zarr.json": (
        [*_DATA, "open", "dcp", "overwrite", "save", "restore", "recover", "remove", "open below"],
        ["latest", "best", "ls", "below"],
    ),
    "@zarrckpt/zarr.json": (["verify", "save", "open below"], ["overwrite", "below", "recover", "remove"]),
    "w/c.0": (_DATA, []),
    "@zarrckpt/{}/checksums/c.0": (_DATA, []),
    "@zarrckpt/{}/zarr.json": (["verify"], ["overwrite", "recover", "remove"]),
    f"@zarrckpt/pins/{'0' * 32}/zarr.json": (["overwrite", "remove"], []),
    "../@run/zarr.json": (["restore"], ["ls"]),
}
"""File below a checkpoint -> the entry points that raise an error for it, and those that continue without it."""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "kind"), [*((name, kind) for name in SPECIAL for kind in ("fifo", "sparse")), ("w/c.0", "device")]
)
def test_special_files_are_refused(kind: str, name: str, tmp_path: Path) -> None:
    """Each entry point that reads such a file raises an error, or continues as with a damaged file."""
    zarrckpt.save({"w": torch.ones(4)}, tmp_path / "original/step-1")
    save_id = zarrckpt.open(tmp_path / "original/step-1").save_id
    refused, passed = SPECIAL[name]
    for read in [*refused, *passed]:
        run = tmp_path / read
        shutil.copytree(tmp_path / "original", run)
        special_file(run / "step-1" / name.format(save_id), kind)
        outcome = ended(partial(READS[read], run / "step-1"))
        assert isinstance(outcome, CheckpointError) == (read in refused), (read, outcome)


@pytest.mark.parametrize("kind", ["fifo", "sparse"])
@pytest.mark.parametrize("name", ["model.safetensors.index.json", "model.safetensors", "weights.pt", ".metadata"])
def test_imports_refuse_special_files(kind: str, name: str, tmp_path: Path) -> None:
    special_file(tmp_path / "in" / name, kind)
    source = tmp_path / "in" / (name if name == "weights.pt" else "")
    assert isinstance(ended(lambda: zarrckpt.import_checkpoint(source, tmp_path / "out")), CheckpointError)
