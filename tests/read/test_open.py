"""``zarrckpt.open``: a mapping that is lazy, checks the bytes that it reads, and needs no torch."""

from __future__ import annotations

import copy
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
import zarr
from harness.hostile import Forgery
from harness.store_servers import S3Place
from safetensors.torch import save_file
from zarr.storage import LocalStore, MemoryStore, WrapperStore

import zarrckpt
from zarrckpt import (
    CheckpointError,
    CheckpointNotFoundError,
    CheckpointReplacedError,
    CorruptCheckpointError,
    ForeignObjectsError,
    KeyMismatchError,
    UnsupportedFormatError,
)


@pytest.fixture
def state() -> dict[str, Any]:
    torch.manual_seed(0)
    return {
        "model": {"w.x": torch.randn(6, 4), "b": torch.randn(4).bfloat16(), "n": torch.tensor(3)},
        "step": 7,
        "rng": np.arange(4),
        "a/b": torch.ones(2),
        "cfg": {"lr": 0.1, "names": ["x", None]},
        "empty": torch.zeros(0, 2),
    }


@pytest.fixture
def url(tmp_path: Path, state: dict[str, Any]) -> str:
    path = str(tmp_path / "ck")
    zarrckpt.save(state, path, options=zarrckpt.SaveOptions(max_chunk_bytes=32))
    return path


@pytest.fixture
def large(tmp_path: Path) -> Iterator[str]:
    """Yield the path of two arrays: one of a chunk with subchunks, one of two plain chunks."""
    path = str(tmp_path / "large")
    zarrckpt.save(
        {"w": torch.randn(4100, 1200), "v": torch.randn(8, 4)}, path, options=zarrckpt.SaveOptions(durable=False)
    )
    yield path
    shutil.rmtree(path)


class CountingStore(WrapperStore[Any]):
    """Records every request: (key, bytes received)."""

    def __init__(self, store: Any) -> None:
        super().__init__(store)
        self.log: list[tuple[str, int]] = []

    def _with_store(self, store: Any) -> CountingStore:
        other = CountingStore(store)
        other.log = self.log
        return other

    async def get(self, key: str, prototype: Any, byte_range: Any = None) -> Any:
        value = await super().get(key, prototype, byte_range)
        self.log.append((key, 0 if value is None else len(value)))
        return value


NAMES = ["model.w.x", "model.b", "model.n", "step", "rng", "a/b", "cfg.lr", "cfg.names", "empty"]


def test_a_checkpoint_is_a_mapping(url: str, state: dict[str, Any]) -> None:
    opened = zarrckpt.open(url)
    assert list(opened) == NAMES and len(opened) == len(NAMES)
    assert list(opened.keys()) == NAMES and len(list(opened.items())) == len(NAMES)
    assert "model.w.x" in opened and "model" not in opened and 3 not in opened
    assert list(opened.tensors) == ["model.w.x", "model.b", "model.n", "a/b", "empty"]
    assert list(opened.non_tensors) == ["step", "rng", "cfg.lr", "cfg.names"]
    assert opened["step"] == 7 and opened["cfg.lr"] == 0.1 and opened["cfg.names"] == ["x", None]
    assert np.array_equal(opened["rng"], state["rng"])
    weight = opened["model.w.x"]
    assert isinstance(weight, zarr.Array) and weight.shape == (6, 4) and weight.chunks == (2, 4)
    assert np.array_equal(weight[1:5, ::2], state["model"]["w.x"][1:5, ::2])
    assert opened["model.n"][()] == 3 and opened["model.n"].shape == ()
    assert opened["empty"][...].shape == (0, 2)
    assert opened["model.b"][...].tobytes() == state["model"]["b"].view(torch.int16).numpy().tobytes()
    assert weight.attrs.asdict() == {} and weight.read_only


def test_a_missing_key_is_a_key_error_with_similar_names(url: str) -> None:
    opened = zarrckpt.open(url)
    with pytest.raises(KeyMismatchError, match=r"no entry 'model\.nothing'"):
        opened["model.nothing"]
    with pytest.raises(KeyError):
        opened["model"]
    assert opened.get("nothing", 5) == 5
    with pytest.raises(KeyMismatchError, match="no tensor 'step'"):
        opened.writers("step")


def test_repr_and_properties_describe_a_checkpoint(url: str, tmp_path: Path) -> None:
    opened = zarrckpt.open(url)
    assert opened.url == url and opened.info.tree == "" and opened.info.world_size == 1
    assert opened.nbytes == 6 * 4 * 4 + 4 * 2 + 8 + 2 * 4 + len(Path(url, "rng/c.0").read_bytes()) - 4
    assert opened.entry("a/b").node_path == "a=2Fb"
    assert opened.writers("model.w.x").tolist() == [[0], [0], [0]]
    assert opened.writers("model.n").shape == () and opened.writers("empty").shape == (0, 1)
    assert repr(opened).startswith(f"<zarrckpt.Checkpoint {url!r}: 5 tensors, 4 values, ")
    for kind in (Path(url), f"file://{url}"):
        assert zarrckpt.open(kind).save_id == opened.save_id
    report = zarrckpt.save({"model": {"w": torch.zeros(2)}}, url, overwrite=True)
    again = zarrckpt.open(url)
    assert again.save_id == report.save_id != opened.save_id
    path = again.entry("model.w").node_path
    assert again.info.tree == f"@{report.save_id}" and path == f"@{report.save_id}/model/w"
    assert again["model.w"][...].tolist() == [0, 0] and again.info.created > opened.info.created


def test_opening_takes_one_request_and_reads_fetch_few_bytes(large: str) -> None:
    store = CountingStore(LocalStore(large))
    opened = zarrckpt.open(store)
    list(opened), repr(opened), opened.entry("w").node_path, opened["w"].shape, opened["v"].metadata
    assert [key for key, _ in store.log] == ["zarr.json"]
    store.log.clear()
    opened["w"][5:6, 300:301]
    fetched = [(key, size) for key, size in store.log if key.startswith("w/")]
    assert {key for key, _ in fetched} == {"w/c.0.0"} and sum(size for _, size in fetched) < 4 << 20
    (table,) = {key for key, _ in store.log} - {"w/c.0.0"}
    assert table == f"@zarrckpt/{opened.save_id}/checksums/c.0"
    store.log.clear()
    opened["v"][...]
    assert [key for key, _ in store.log] == ["v/c.0.0"]


def test_a_store_in_memory(state: dict[str, Any]) -> None:
    store = MemoryStore()
    zarrckpt.save(state, zarr.storage.StorePath(store, "runs/one"))
    opened = zarrckpt.open(zarr.storage.StorePath(store, "runs/one"))
    assert list(opened) == NAMES and np.array_equal(opened["model.w.x"][...], state["model"]["w.x"])


def test_a_checkpoint_can_be_pickled(tmp_path: Path) -> None:
    weight = torch.randn(6, 4)
    zarrckpt.save({"model": {"weight": weight}, "step": 3}, tmp_path / "one")
    checkpoint = zarrckpt.open(tmp_path / "one")
    copied, array = pickle.loads(pickle.dumps((checkpoint, checkpoint["model.weight"])))
    assert copied["model.weight"][:2].tolist() == array[:2].tolist() == weight[:2].tolist() and len(copied) == 2
    assert copy.deepcopy(checkpoint)["step"] == 3
    zarrckpt.save({"model": {"weight": weight + 1}}, tmp_path / "one", overwrite=True)
    # A copy is the same checkpoint, not the one at the url now.
    with pytest.raises(zarrckpt.CheckpointReplacedError):
        pickle.loads(pickle.dumps(checkpoint))["model.weight"][:]


def test_latest_of_a_checkpoints_url_is_an_error(url: str) -> None:
    with pytest.warns(UserWarning, match="pass the folder that holds it"):
        assert zarrckpt.latest(url) is None


# -- urls without a checkpoint


def test_an_empty_url_has_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file.txt").write_text("x")
    for path in (tmp_path / "absent", tmp_path / "folder"):
        for call in (zarrckpt.open, lambda path: zarrckpt.load({}, path)):
            with pytest.raises(CheckpointNotFoundError, match="nothing is committed") as error:
                call(path)
            assert isinstance(error.value, FileNotFoundError)


TENSORS = {"w": torch.ones(3)}
FOREIGN: dict[str, tuple[Callable[[str], Any], str]] = {
    "file of torch.save": (lambda path: torch.save(TENSORS, path), "import {}"),
    "old file of torch.save": (
        lambda path: torch.save(TENSORS, path, _use_new_zipfile_serialization=False),
        "import {}",
    ),
    "safetensors file": (lambda path: save_file(TENSORS, path), "import {}"),
    "renamed archive": (
        lambda path: os.rename(zarrckpt.save(TENSORS, f"{path}.zarr.zip").url, path),
        r"must end with \.zarr\.zip",
    ),
    "folder of DCP": (lambda path: dcp.save(dict(TENSORS), checkpoint_id=path, no_dist=True), "import {}"),
    "folder of safetensors": (
        lambda path: (os.mkdir(path), save_file(TENSORS, f"{path}/model-00001-of-00001.safetensors")),
        "import {}",
    ),
    "folder of torch.save": (
        lambda path: (os.mkdir(path), torch.save(TENSORS, f"{path}/pytorch_model.bin")),
        "import {}",
    ),
    "run": (lambda path: zarrckpt.save(TENSORS, f"{path}/step-7"), r"step-7\. .*zarrckpt\.latest\({!r}\)"),
    "run of archives": (lambda path: zarrckpt.save(TENSORS, f"{path}/step-7.zarr.zip"), "step-7.zarr.zip"),
    "folder of runs": (lambda path: zarrckpt.save(TENSORS, f"{path}/one/step-7"), r"It has 'one'.* zarrckpt ls {}"),
}


@pytest.mark.parametrize("kind", FOREIGN)
@pytest.mark.parametrize("backend", ["local", "s3", "memory"])
def test_other_kinds_of_files_are_named_with_the_next_step(
    kind: str, backend: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    make, step = FOREIGN[kind]
    local = tmp_path / "what"
    make(str(local))
    url, options = str(local), {}
    files = {
        f"what{str(path).removeprefix(str(local))}": path.read_bytes()
        for path in [local, *local.rglob("*")]
        if path.is_file()
    }
    if backend == "s3":
        bucket: S3Place = request.getfixturevalue("moto_bucket")
        url, options = bucket.url("runs/what"), {"storage_options": bucket.storage_options}
        for name, data in files.items():
            bucket.client().put_object(Bucket=bucket.bucket, Key=f"runs/{name}", Body=data)
    elif backend == "memory":
        url = f"memory://{tmp_path.name}/what"
        fsspec.filesystem("memory").pipe({f"/{tmp_path.name}/{name}": data for name, data in files.items()})
    if step == "import {}":
        step = (
            r"`zarrckpt import {}\S* NEW_URL`" if backend == "local" else r"Download {}\S*\. .*`zarrckpt import FILE "
        )
    for call in (zarrckpt.open, lambda url, **more: zarrckpt.load({"w": torch.zeros(3)}, url, **more)):
        with pytest.raises(CheckpointNotFoundError, match=step.replace("{}", url).replace("{!r}", repr(url))):
            call(url, **options)


def test_runs_are_not_begun_beside_other_kinds_of_files_silently(tmp_path: Path) -> None:
    for kind in ("file of torch.save", "folder of DCP"):
        FOREIGN[kind][0](str(tmp_path / kind))
        with pytest.warns(UserWarning, match="found no checkpoint.* zarrckpt import|import"):
            assert zarrckpt.latest(tmp_path / kind) is None
    job = zarrckpt.CheckpointManager(tmp_path / "file of torch.save", signals=())
    with pytest.raises(ForeignObjectsError, match=r"is not the folder of a run\..* import"):
        job.restore({"w": torch.zeros(3)})
    job = zarrckpt.CheckpointManager(tmp_path / "folder of DCP", signals=())
    with pytest.warns(UserWarning, match="no checkpoint is restored.* import"):
        assert job.restore({"w": torch.zeros(3)}) is None
    with pytest.raises(CheckpointNotFoundError, match="import"):
        zarrckpt.CheckpointManager(tmp_path / "new", init_from=tmp_path / "file of torch.save", signals=()).restore(
            {"w": torch.zeros(3)}
        )


def test_an_unfinished_save(url: str) -> None:
    os.unlink(f"{url}/zarr.json")
    with pytest.raises(CheckpointNotFoundError, match="never committed"):
        zarrckpt.open(url)
    with pytest.raises(CheckpointNotFoundError, match="never committed"):
        zarrckpt.load({}, url)


def test_groups_and_arrays_of_other_programs_are_refused(tmp_path: Path) -> None:
    zarr.create_group(tmp_path / "group", attributes={"zarrckpt": "no object"})
    zarr.create_array(tmp_path / "array", shape=(3,), dtype="int8")
    for name in ("group", "array"):
        with pytest.raises(ForeignObjectsError, match="not written by zarrckpt"):
            zarrckpt.open(tmp_path / name)


CONTRADICTIONS: dict[str, Any] = {
    "tree outside": lambda own: own.update(tree="../other"),
    "tree of another save": lambda own: own.update(tree="@" + "0" * 32),
    "save id": lambda own: own.update(save_id="X" * 32),
    "no entries": lambda own: own.update(entries=[]),
    "array without entry": lambda own: own["entries"].pop("model.b"),
    "entry without array": lambda own: own["entries"].update(new={"path": "model/new"}),
    "array of two entries": lambda own: own["entries"].update(new={"path": "model/b"}),
    "blob that is a matrix": lambda own: own["entries"].update({"model.w.x": {"path": "model/w.x", "encoding": "raw"}}),
    "unknown encoding": lambda own: own["entries"]["rng"].update(encoding="exec"),
    "kind": lambda own: own["entries"]["rng"].update(kind=3),
    "path upwards": lambda own: own["entries"]["step"].update(path="../../etc/passwd"),
    "another name's path": lambda own: own["entries"].update(step2=own["entries"].pop("step")),
    "table too long": lambda own: own["tables"]["checksums"].update(length=2**40),
    "table missing": lambda own: own["tables"].pop("checksums"),
    "another table": lambda own: own["tables"].update(writers={"length": 7, "crc32c": 0}),
    "another member of a table": lambda own: own["tables"]["checksums"].update(chunks=1),
    "another member of an entry": lambda own: own["entries"]["step"].update(dtype="int64"),
    "another member of a tensor": lambda own: own["entries"]["model.b"].update(shape=[1]),
    "encoding that is no string": lambda own: own["entries"]["rng"].update(encoding=[]),
    "misspelled encoding": lambda own: own["entries"]["rng"].update(encodng=own["entries"]["rng"].pop("encoding")),
    "kind left out": lambda own: own["entries"]["rng"].pop("kind"),
    "no time": lambda own: own.update(created="yesterday"),
    "software": lambda own: own.update(software={"torch": 2.13}),
    "no ranks": lambda own: own.update(world_size=0),
    "world size": lambda own: own.update(world_size=1.0),
    "too long a history": lambda own: own.update(history=["0" * 32] * 17),
    "metadata": lambda own: own.update(metadata=[]),
    "ranks of no stack": lambda own: own["entries"]["model.b"].update(ranks=[[0, 9]], level=0),
    "path of a document": lambda own: own["entries"]["step"].update(path="zarr.json"),
    "crc no integer": lambda own: own["tables"]["checksums"].update(crc32c=True),
    "keys": lambda own: own["keys"].update({"step": ["a", "b"]}),
    "keys of nothing": lambda own: own["keys"].update({"nothing": ["a"]}),
    "container": lambda own: own["containers"].update({"model": "set"}),
    "list of names": lambda own: own["containers"].update({"model": "list"}),
    "history": lambda own: own.update(history=["x"]),
    "versions in a list": lambda own: own.update(versions=[]),
    "versions of a state dict in a list": lambda own: own.update(versions={"model": []}),
    "versions of nothing": lambda own: own.update(versions={"mode": {}}),
    "versions of a value": lambda own: own.update(versions={"step": {}}),
    "version that is no integer": lambda own: own.update(versions={"model": {"a": 1.0}}),
    "version that is a bool": lambda own: own.update(versions={"model": {"a": True}}),
    "version that is too large": lambda own: own.update(versions={"model": {"a": 2**63}}),
    "other metadata of a module": lambda own: own.update(versions={"model": {"a": {"assign_to_params_buffers": True}}}),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_a_root_that_contradicts_itself(url: str, name: str) -> None:
    forgery = Forgery(Path(url))
    CONTRADICTIONS[name](forgery.own)
    forgery.write()
    with pytest.raises(CorruptCheckpointError, match=r"zarr\.json|entry"):
        zarrckpt.open(url)


def test_roots_without_the_edits_open(url: str) -> None:
    """The same procedure without a change opens."""
    Forgery(Path(url)).write()
    assert list(zarrckpt.open(url)) == NAMES


@pytest.mark.parametrize(
    "change",
    [
        {"shape": [6, 5]},
        {"codecs": [{"name": "bytes"}]},
        {"chunk_grid": None},
        {"shape": [2**63, 1]},
        {"fill_value": 0},
    ],
)
def test_an_array_document_of_another_form(url: str, change: dict[str, Any]) -> None:
    forgery = Forgery(Path(url))
    forgery.nodes["model/w.x"].update(change)
    forgery.write()
    with pytest.raises((CorruptCheckpointError, UnsupportedFormatError), match=r"model/w\.x|tables?"):
        zarrckpt.open(url)


# -- damage


def flip(path: Path, position: int, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1 << bit
    path.write_bytes(bytes(data))


def test_every_flipped_byte_of_the_root_is_found(url: str) -> None:
    """Each byte in turn. Most changes would read as another name, number or value."""
    file = Path(url, "zarr.json")
    whole = file.read_bytes()
    for position in range(0, len(whole), 7):
        file.write_bytes(whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :])
        with pytest.raises(CheckpointError):
            zarrckpt.open(url)
    # A value, whose change only the checksum can show.
    file.write_bytes(whole.replace(b'"value":7', b'"value":6'))
    with pytest.raises(CorruptCheckpointError, match="checksum"):
        zarrckpt.open(url)


def read_all(url: str) -> None:
    for value in zarrckpt.open(url).values():
        if isinstance(value, zarr.Array):
            value[...]


def load_all(url: str, state: dict[str, Any]) -> None:
    zarrckpt.load({"model": {name: torch.zeros_like(item) for name, item in state["model"].items()}, "rng": None}, url)


def test_a_damaged_table_of_writers_is_found_when_it_is_read(url: str, state: dict[str, Any]) -> None:
    flip(Path(url, f"@zarrckpt/{zarrckpt.open(url).save_id}/writers/c.0"), 0)
    read_all(url)
    load_all(url, state)
    with pytest.raises(CorruptCheckpointError, match="writers"):
        zarrckpt.open(url).writers("model.b")


def test_node_documents_are_not_needed(url: str, state: dict[str, Any]) -> None:
    """They are for other Zarr readers: the root has all of them, under its checksum."""
    for path in Path(url).rglob("zarr.json"):
        if path.parent != Path(url):
            path.write_bytes(b"{")
    read_all(url)
    load_all(url, state)


def test_a_load_does_not_need_the_index_of_subchunks(large: str) -> None:
    """zarrckpt computes the byte offsets."""
    flip(Path(large, "w/c.0.0"), -30)
    with pytest.raises(CorruptCheckpointError, match=r"w/c\.0\.0"):
        zarrckpt.open(large)["w"][:2, :2]
    zarrckpt.load({"w": torch.zeros(4100, 1200)}, large)


def test_undamaged_parts_can_be_read(large: str) -> None:
    """Only the bytes that are read are checked."""
    whole = zarrckpt.open(large)["w"][...]
    flip(Path(large, "w/c.0.0"), 5)
    assert np.array_equal(zarrckpt.open(large)["w"][600:], whole[600:])


def test_a_checkpoint_replaced_while_it_is_read_is_an_error(url: str, state: dict[str, Any]) -> None:
    opened = zarrckpt.open(url)
    weight, part = opened["model.w.x"], opened["model.b"][...]
    zarrckpt.save(state, url, overwrite=True)
    with pytest.raises(CheckpointReplacedError, match="open it again"):
        weight[...]
    for fqn in ("rng", "model.b"):
        with pytest.raises(CheckpointReplacedError):
            opened[fqn][...]
    with pytest.raises(CheckpointReplacedError):
        opened.writers("model.b")
    assert opened["step"] == 7  # in the root, which was read before
    assert np.array_equal(zarrckpt.open(url)["model.b"][...], part)


def test_damage_in_a_store_in_memory(state: dict[str, Any]) -> None:
    """The store's own calls wait on the event loop from which the check is called."""
    store = MemoryStore()
    zarrckpt.save(state, zarr.storage.StorePath(store, "one"))
    opened = zarrckpt.open(zarr.storage.StorePath(store, "one"))
    weight = opened["model.w.x"]
    del store._store_dict["one/model/w.x/c.0.0"]
    with pytest.raises(CorruptCheckpointError, match=r"model/w\.x/c\.0\.0"):
        weight[...]
    zarrckpt.save(state, zarr.storage.StorePath(store, "one"), overwrite=True)
    with pytest.raises(CheckpointReplacedError):
        weight[...]


# -- the package itself


def run_python(code: str, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, timeout=120)


def test_a_checkpoint_opens_without_torch(url: str, tmp_path: Path) -> None:
    code = f"""
import sys
sys.modules["torch"] = None
import zarrckpt
opened = zarrckpt.open({url!r})
assert opened["step"] == 7 and opened["model.w.x"][:].shape == (6, 4) and len(opened["rng"]) == 4
assert zarrckpt.latest({os.path.dirname(url)!r}) == {url!r}
for name in ("save", "load", "async_save", "ZarrStorageReader", "ZarrStorageWriter", "ZarrSavePlanner"):
    try:
        getattr(zarrckpt, name)
    except ModuleNotFoundError as error:
        assert "pip install 'zarrckpt[torch]'" in str(error), error
    else:
        raise AssertionError(name)
"""
    run_python(code, tmp_path)


def test_public_names_are_exported() -> None:
    assert sorted(dir(zarrckpt)) == sorted(zarrckpt.__all__)
    for name in zarrckpt.__all__:
        assert getattr(zarrckpt, name) is not None
    with pytest.raises(AttributeError, match="nothing_of_this_name"):
        getattr(zarrckpt, "nothing_of_this_name")  # noqa: B009 - mypy knows that it does not exist
