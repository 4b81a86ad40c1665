"""Reading without torch: stored checkpoints, by zarrckpt and other readers, whole and damaged, with any zarr-python.

``make test-readers`` runs this in an environment without torch. The expected contents come from the
reader on the format page. ``test_golden.py`` compares them with the saved state.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import pickle
import shutil
import struct
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import google_crc32c
import numcodecs.blosc
import numcodecs.zstd
import numpy as np
import pytest
import tensorstore as ts
import xarray as xr
import zarr
from click.testing import CliRunner
from harness import GOLDEN
from harness.page_reader import Reader
from packaging.version import Version
from zarr.abc import store as zarr_abc
from zarr.abc.store import OffsetByteRequest, RangeByteRequest, Store, SuffixByteRequest
from zarr.core import codec_pipeline
from zarr.core.buffer import default_buffer_prototype
from zarr.storage import LocalStore, MemoryStore, WrapperStore, ZipStore

import zarrckpt
from zarrckpt import CheckpointReplacedError, CorruptCheckpointError
from zarrckpt.cli import main

NAMES = sorted(file.stem for file in GOLDEN.glob("*.zip"))
PROTOTYPE = default_buffer_prototype()
PIPELINES = [name for name in ("BatchedCodecPipeline", "FusedCodecPipeline") if hasattr(codec_pipeline, name)]

every_golden = pytest.mark.parametrize("name", NAMES)


@pytest.fixture(params=PIPELINES)
def pipeline(request: pytest.FixtureRequest) -> Iterator[str]:
    """Configure each of zarr-python's own ways to read chunks."""
    with zarr.config.set({"codec_pipeline.path": f"zarr.core.codec_pipeline.{request.param}"}):
        yield request.param


def unpacked(name: str, folder: Path) -> Path:
    with zipfile.ZipFile(GOLDEN / f"{name}.zip") as archive:
        archive.extractall(folder / name)
    return folder / name


def opened(folder: Path | str) -> zarrckpt.Checkpoint:
    return zarrckpt.open(folder, allow_pickle=True)


def found(array: Any) -> tuple[str, list[int], bytes]:
    values = np.asarray(array)
    return values.dtype.name, list(values.shape), np.ascontiguousarray(values).tobytes()


def ask(question: Any) -> Any:
    """Return the answer to one call of a store."""

    async def answer() -> Any:
        return [item async for item in question] if hasattr(question, "__aiter__") else await question

    return asyncio.run(answer())


# --- whole checkpoints -----------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Object at @zarrckpt is not recognized:zarr.errors.ZarrUserWarning")
@every_golden
def test_every_reader_reads_every_bit(name: str, tmp_path: Path, pipeline: str) -> None:
    folder = unpacked(name, tmp_path)
    ckpt, reader = opened(folder), Reader(folder)
    assert list(ckpt) == list(reader.entries) and ckpt.verify() and ckpt.verify(quick=True)
    arrays, group = ckpt.read(), zarr.open_group(folder, mode="r")
    for fqn in ckpt.tensors:
        expected, path = reader.tensor(fqn), ckpt.entry(fqn).node_path
        assert found(arrays[fqn]) == expected, fqn
        for lazy in (ckpt[fqn], group[path], zarr.open_array(ckpt[fqn].store, path=path)):
            assert isinstance(lazy, zarr.Array)
            # Portable arrays are the integers that hold the bits.
            assert found(lazy[...])[1:] == expected[1:], fqn
            last = np.s_[tuple(slice(size // 2, size) for size in lazy.shape)]
            assert found(lazy[last])[2] == found(np.asarray(arrays[fqn])[last])[2], fqn
        kvstore = {"driver": "file", "path": f"{folder}/{path}"}
        assert found(ts.open({"driver": "zarr3", "kvstore": kvstore}).result().read().result())[1:] == expected[1:], fqn
    for tree, top in ((ckpt.to_xarray(), ckpt.info.tree), (xr.open_datatree(str(folder), engine="zarr"), "")):
        for fqn in ckpt.tensors:
            variable = tree[ckpt.entry(fqn).node_path.removeprefix(f"{top}/" if top else "")]
            assert found(variable.values)[1:] == reader.tensor(fqn)[1:], fqn
    for copy in (pickle.loads(pickle.dumps(ckpt)), ckpt):
        assert all(found(copy[fqn][...])[2] == reader.tensor(fqn)[2] for fqn in ckpt.tensors)


@pytest.mark.parametrize("name", ["plain", "subchunks", "overwritten"])
def test_zipped_checkpoints_open(name: str, tmp_path: Path, pipeline: str) -> None:
    expected = opened(unpacked(name, tmp_path)).read()
    shutil.copy(GOLDEN / f"{name}.zip", tmp_path / "x.zip")
    for mode in ("r", "a"):
        ckpt = zarrckpt.open(ZipStore(tmp_path / "x.zip", mode=mode))
        assert ckpt.verify() and expected.keys() == ckpt.read().keys()
        for fqn, array in expected.items():
            assert found(ckpt.read([fqn])[fqn]) == found(array)
            assert found(ckpt[fqn][...])[1:] == found(array)[1:]
        assert zarrckpt.open(ckpt[fqn].store).save_id == ckpt.save_id
    with pytest.raises(zarrckpt.CheckpointError, match=r"no\.zip"):
        zarrckpt.open(ZipStore(tmp_path / "no.zip", mode="r"))


def test_stores_inside_each_other_answer_many_calls_at_once(tmp_path: Path) -> None:
    """Each call of the outer store waits for one of the inner store, so they must not share threads."""
    inner = opened(unpacked("chunks", tmp_path))["w"].store
    outer = opened(inner)["w"].store

    async def get_many() -> list[Any]:
        return await asyncio.gather(*(outer.get("w/c.0.0", PROTOTYPE) for _ in range(200)))

    answers = zarr.core.sync.sync(asyncio.wait_for(get_many(), 60))
    assert {answer.to_bytes() for answer in answers} == {(tmp_path / "chunks" / "w" / "c.0.0").read_bytes()}


def test_documents_of_other_saves_are_not_read(tmp_path: Path) -> None:
    """zarr-python and xarray ask the store for documents. After an overwrite these are another save's."""
    folder = unpacked("chunks", tmp_path)
    ckpt = opened(folder)
    store, expected = ckpt["w"].store, ckpt["w"][...]
    other = unpacked("subchunks", tmp_path)
    for file in other.rglob("*"):
        if file.is_file():
            (folder / file.relative_to(other)).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, folder / file.relative_to(other))
    assert zarr.open_group(folder, mode="r")["w"].shape != expected.shape
    assert (zarr.open_group(store, mode="r")["w"][1:] == expected[1:]).all()
    assert (ckpt.to_xarray()["w"][1:].values == expected[1:]).all()
    (folder / "w" / "c.0.0").unlink()
    for read in (lambda: ckpt.to_xarray()["w"].values, lambda: zarr.open_group(store, mode="r")["w"][:1]):
        with pytest.raises(CheckpointReplacedError, match="open it again"):
            read()


# --- changed checkpoints ---------------------------------------------------------------------------------

SUBCHUNKS = 2
"""Number of subchunks in the one chunk of the array ``w`` of three of the checkpoints."""


CODECS: dict[str, tuple[Callable[[bytes], bytes], Callable[[bytes], bytes]]] = {
    "subchunks": (bytes, bytes),
    "zstd": (numcodecs.zstd.decompress, lambda data: numcodecs.zstd.compress(data, 0)),
    "blosc": (numcodecs.blosc.decompress, lambda data: numcodecs.blosc.compress(data, b"zstd", 5, 1)),
}


def _of_another_save(data: bytes, name: str) -> bytes:
    """Return the chunk with one added to each number, and with a valid index and checksums."""
    decode, encode = CODECS[name]
    body, places = b"", b""
    for start, size in np.frombuffer(data[-4 - 16 * SUBCHUNKS : -4], "<u8").reshape(SUBCHUNKS, 2).tolist():
        numbers = np.frombuffer(decode(data[start : start + size - 4]), "<f4")
        part = encode((numbers + 1).tobytes())
        places += struct.pack("<QQ", len(body), len(part) + 4)
        body += part + struct.pack("<I", google_crc32c.value(part))
    return body + places + struct.pack("<I", google_crc32c.value(places))


def _flipped(data: bytes, place: int) -> bytes:
    return data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :]


DAMAGE: dict[str, Callable[[bytes, str], bytes | None]] = {
    "missing": lambda data, name: None,
    "empty": lambda data, name: b"",
    "short": lambda data, name: data[: len(data) // 50],
    "flipped": lambda data, name: _flipped(data, 9),
    "another save's": _of_another_save,
}
PARTS = [np.s_[...], np.s_[:, :64], np.s_[3:5, 60:70], np.s_[:, 10:200], np.s_[7, 5:400:63]]


@pytest.mark.parametrize("name", ["subchunks", "zstd", "blosc"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_every_read_of_a_damaged_chunk_raises(damage: str, name: str, tmp_path: Path, pipeline: str) -> None:
    folder = unpacked(name, tmp_path)
    array, tree, file = opened(folder)["w"], opened(folder).to_xarray(), folder / "w" / "c.0.0"
    saved = array[...]
    damaged = DAMAGE[damage](file.read_bytes(), name)
    file.unlink() if damaged is None else file.write_bytes(damaged)
    if damage == "another save's":
        # Readers without the table of checksums read it like any other chunk.
        assert (zarr.open_group(folder, mode="r")["w"][:, :64] == saved[:, :64] + 1).all()
    for part in PARTS:
        for read in (lambda part=part: array[part], lambda part=part: tree["w"][part].values):
            with pytest.raises(CorruptCheckpointError, match=r"w/c\.0\.0"):
                read()
    assert not opened(folder).verify()


# --- every call of a zarr store --------------------------------------------------------------------------

Question = Callable[[Any, str, Any], Any]
CONTENT: dict[str, Question] = {
    "get": lambda store, key, part: store.get(key, PROTOTYPE, part),
    "get_partial_values": lambda store, key, part: store.get_partial_values(PROTOTYPE, [(key, part)]),
    "get_ranges": lambda store, key, part: store.get_ranges(key, [part], prototype=PROTOTYPE),
    "_get_many": lambda store, key, part: store._get_many([(key, PROTOTYPE, part)]),
    "_get_bytes": lambda store, key, part: store._get_bytes(key, prototype=PROTOTYPE, byte_range=part),
    "_get_json": lambda store, key, part: store._get_json(key, prototype=PROTOTYPE, byte_range=part),
}
"""Calls that return stored bytes, by name in zarr-python."""

SYNCHRONOUS = {"get_sync", "get_ranges_sync", "_supports_sync_io"}
"""The same calls outside of zarr's event loop. This store does not have them."""

OVER_OTHERS = {"_get_bytes_sync", "_get_json_sync"}
"""Calls that wait for one of ``CONTENT``."""

FACTS = {"exists", "getsize", "getsize_prefix", "list", "list_prefix", "list_dir", "is_empty"}
WRITING = {
    *("set", "set_if_not_exists", "_set_many", "delete", "delete_dir", "clear", "set_sync", "delete_sync"),
    *("_check_writable", "read_only", "with_read_only"),
}
REST = {
    *("open", "_open", "_ensure_open", "_is_open", "close", "_with_store"),
    *("supports_writes", "supports_deletes", "supports_listing", "supports_partial_writes"),
    "supports_consolidated_metadata",
}


def test_every_method_of_a_zarr_store_is_covered() -> None:
    """A newer zarr-python may have another way to read. It must be checked like the rest, and listed above."""
    protocols = [kind for name, kind in vars(zarr_abc).items() if name.startswith("Supports")]
    asked = {
        name
        for kind in (Store, WrapperStore, *protocols)
        for name, value in vars(kind).items()
        if (callable(value) or isinstance(value, property | classmethod)) and not name.startswith(("__", "_abc_"))
    }
    known = {*CONTENT, *SYNCHRONOUS, *OVER_OTHERS, *FACTS, *WRITING, *REST}
    assert not asked - known - {"_is_protocol"}, "new in this zarr-python"


@pytest.mark.parametrize("way", [way for way in CONTENT if hasattr(Store, way)])
def test_every_method_of_reading_checks_checksums(way: str, tmp_path: Path) -> None:
    folder = unpacked("subchunks", tmp_path)
    store, key, question = opened(folder)["w"].store, "w/c.0.0", CONTENT[way]
    file = folder / key
    data = file.read_bytes()
    size = (len(data) - 16 * SUBCHUNKS - 4) // SUBCHUNKS
    ranges = [
        None,
        RangeByteRequest(0, 10),
        RangeByteRequest(size - 5, size + 5),
        RangeByteRequest(size // 2, size // 2 + 1),
        OffsetByteRequest(3),
        SuffixByteRequest(len(data) - 1),
    ]
    if way != "_get_json":
        for part in [*ranges, SuffixByteRequest(7), RangeByteRequest(size, 2 * size)]:
            (plain,), (answer,) = (_bytes(ask(question(asked, key, part))) for asked in (LocalStore(folder), store))
            assert answer == plain, part
    for damage in DAMAGE.values():
        damaged = damage(data, "subchunks")
        file.unlink() if damaged is None else file.write_bytes(damaged)
        for part in ranges:
            with pytest.raises(CorruptCheckpointError, match=r"w/c\.0\.0"):
                ask(question(store, key, part))


def _bytes(answer: Any) -> list[bytes]:
    """Return the stored bytes in an answer of a store, in any wrapping."""
    if isinstance(answer, bytes):
        return [answer]
    if hasattr(answer, "to_bytes") and not isinstance(answer, int):
        return [answer.to_bytes()]
    return [data for item in answer for data in _bytes(item)] if isinstance(answer, list | tuple) else []


def test_no_zarr_method_bypasses_the_checks(tmp_path: Path) -> None:
    store = opened(unpacked("chunks", tmp_path))["w"].store
    for name in SYNCHRONOUS - {"get_ranges_sync"}:
        assert not hasattr(store, name)
    if hasattr(store, "get_ranges_sync"):
        with pytest.raises(TypeError, match="synchronous"):
            store.get_ranges_sync("w/c.0.0", [None], prototype=PROTOTYPE)
    assert store.read_only and store.with_read_only(True) is store
    with pytest.raises(ValueError, match="read-only"):
        store.with_read_only(False)
    value = PROTOTYPE.buffer.from_bytes(b"1")
    for write in (store.set("x", value), store.set_if_not_exists("x", value), store._set_many([("x", value)])):
        with pytest.raises(ValueError, match="read-only"):
            ask(write)
    for remove in (store.delete("w/c.0.0"), store.delete_dir("w"), store.clear()):
        with pytest.raises((ValueError, NotImplementedError)):
            ask(remove)
    assert ask(store.exists("w/c.0.0")) and not ask(store.exists("w/c.100.0"))
    assert ask(store.get("w/c.100.0", PROTOTYPE)) is None and ask(store.get("w/.zarray", PROTOTYPE)) is None
    assert {"w", "x", "zarr.json"} <= {*ask(store.list_dir(""))} and "w/c.3.0" in ask(store.list_prefix("w/"))
    assert ask(store.getsize("w/c.0.0")) == 7 * 4 + 4 and not ask(store.is_empty("w"))
    assert opened(tmp_path / "chunks")["x"].store == store


class Refusing(MemoryStore):
    """Raises an error with a secret on every call, once ``refuses`` is set."""

    refuses = False

    def __getattribute__(self, name: str) -> Any:
        call = super().__getattribute__(name)
        if name in {*CONTENT, *FACTS} and inspect.ismethod(call) and self.refuses:
            raise OSError("refused: token=abc123")
        return call


def test_errors_of_a_store_become_checkpoint_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inside = Refusing()
    folder = unpacked("chunks", tmp_path)
    for file in folder.rglob("*"):
        if file.is_file():
            data = PROTOTYPE.buffer.from_bytes(file.read_bytes())
            ask(inside.set(f"run/{file.relative_to(folder).as_posix()}", data))
    array = zarrckpt.open(zarr.storage.StorePath(inside, "run"))["w"]
    assert found(array[...]) == found(opened(folder)["w"][...])
    monkeypatch.setattr(Refusing, "refuses", True)
    for question in (
        lambda: array[...],
        lambda: ask(array.store.exists("w/c.0.0")),
        lambda: ask(array.store.getsize("w/c.0.0")),
        lambda: ask(array.store.list_dir("w")),
        lambda: ask(array.store.list()),
    ):
        with pytest.raises(zarrckpt.StorageError, match="refused"):
            question()


# --- claims of the documentation about other readers -----------------------------------------------------


def test_zarr_can_be_configured_to_raise_for_absent_chunks(tmp_path: Path, pipeline: str) -> None:
    for name, key, part in (("chunks", "c.3.0", np.s_[2:5]), ("subchunks", "c.0.0", np.s_[:, 60:70])):
        folder = unpacked(name, tmp_path)
        (folder / "w" / key).unlink()
        assert np.isnan(zarr.open_group(folder, mode="r")["w"][part]).any()
        if Version(zarr.__version__) < Version("3.2"):
            continue
        with zarr.config.set({"array.read_missing_chunks": False}):
            array = zarr.open_group(folder, mode="r")["w"]
            tree = xr.open_datatree(str(folder), engine="zarr")
            for read in (lambda part=part: array[part], lambda: array[...], lambda: tree["w"].values):  # noqa: B023
                with pytest.raises(zarr.errors.ChunkNotFoundError, match=key):
                    read()


# --- copies of checkpoints -------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [{}, {"compression": "zstd"}, {"dtype": "float64"}])
def test_copies_are_complete(changes: dict[str, Any], tmp_path: Path) -> None:
    source = opened(unpacked("subchunks", tmp_path))
    zarrckpt.copy(source, tmp_path / "copy", **changes)
    copy = opened(tmp_path / "copy")
    assert copy.verify() and Reader(tmp_path / "copy").tensor("w")[1] == [600, 512]
    assert (copy["w"][...] == source["w"][...]).all() and (copy["small"][...] == source["small"][...]).all()
    zarrckpt.remove(tmp_path / "copy")


def test_the_command_line_reads_every_kind(tmp_path: Path) -> None:
    one, other = (str(unpacked(name, tmp_path)) for name in ("ranks", "ranks_merged"))

    def run(*arguments: str) -> str:
        ran = CliRunner().invoke(main, arguments, catch_exceptions=False)
        assert ran.exit_code == 0, (arguments, ran.output)
        return ran.stdout

    assert json.loads(run("info", one, "--json"))["world_size"] == 4
    for command in ("ls", "tree", "stats", "doctor"):
        assert "columns" in run(command, one) or command == "doctor"
    assert "float32" in run("cat", one, "rows") and "0 damaged" not in run("verify", one)
    run("diff", one, other)
    run("report", one, "-o", str(tmp_path / "page.html"))
    run("cp", one, str(tmp_path / "copy"))
    run("verify", str(tmp_path / "copy"))
    run("rm", str(tmp_path / "copy"), "--yes")
    assert not (tmp_path / "copy" / "zarr.json").exists()
