"""Urls and paths: never mangled, understood or refused with a reason."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
import zarr
from click.testing import CliRunner
from harness.faulty_store import FaultyStore
from harness.internals import StoreSpec, join_url, open_store

import zarrckpt
from zarrckpt import StorageError, ZarrStorageReader, ZarrStorageWriter
from zarrckpt._store._url import ParsedUrl, normalize, parse
from zarrckpt.cli import main


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("s3://bucket/run/step-7", "s3://bucket/run/step-7"),
        ("s3://bucket/run/step-7//", "s3://bucket/run/step-7"),
        (Path("s3://bucket/run"), "s3://bucket/run"),
        (str(Path("gs://bucket/run")), "gs://bucket/run"),
        (Path("az://container/run"), "az://container/run"),
        (Path("abfss://c@account.dfs.core.windows.net/run"), "abfss://c@account.dfs.core.windows.net/run"),
        (Path("memory://run"), "memory://run"),
        (Path("sftp://host/run"), "sftp://host/run"),
        (Path("file:///tmp/run"), "/tmp/run"),
        ("~root/run", os.path.expanduser("~root/run")),
        (Path("~root/run"), os.path.expanduser("~root/run")),
        ("file:///tmp/a%20b", "/tmp/a b"),
        (Path("/tmp/a b").as_uri(), "/tmp/a b"),
        ("file://localhost/tmp/run", "/tmp/run"),
        ("file:/tmp/run", "/tmp/run"),
        ("local:///tmp/run", "/tmp/run"),
        ("/tmp/run/", "/tmp/run"),
        ("/tmp/x/../run", "/tmp/run"),
        ("/tmp/per%20cent", "/tmp/per%20cent"),
        ("memory://", "memory://"),
        ("simplecache::s3://bucket/run", "simplecache::s3://bucket/run"),
        (Path("simplecache::s3://bucket/run"), "simplecache::s3://bucket/run"),
    ],
)
def test_urls_are_normalized(typed: str | Path, expected: str) -> None:
    assert normalize(typed) == expected


def test_a_colon_is_not_a_protocol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert normalize("run:1/step") == str(tmp_path / "run:1/step")
    assert normalize("step:/x") == str(tmp_path / "step:/x")


@pytest.mark.parametrize(
    ("base", "name", "expected"),
    [
        ("s3://bucket", "run", "s3://bucket/run"),
        ("s3://bucket/", "run/step-7", "s3://bucket/run/step-7"),
        (Path("s3://bucket/run"), "step-7", "s3://bucket/run/step-7"),
        ("s3://bucket/a b#%", "c", "s3://bucket/a b#%/c"),
        ("/", "run", "/run"),
        ("/tmp", "a/b/", "/tmp/a/b"),
        ("/tmp", "", "/tmp"),
        (Path("/tmp"), "run", "/tmp/run"),
        ("memory://", "run", "memory://run"),
        ("memory://run", "x", "memory://run/x"),
        ("file:///tmp", "x", "/tmp/x"),
    ],
)
def test_urls_are_joined(base: str | Path, name: str, expected: str) -> None:
    assert join_url(base, name) == expected


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("s3://bucket/a//b/", ParsedUrl("s3", "s3://bucket/a//b", "bucket", "a//b")),
        ("s3a://bucket", ParsedUrl("s3", "s3a://bucket", "bucket", "")),
        ("gcs://bucket/x", ParsedUrl("gs", "gcs://bucket/x", "bucket", "x")),
        ("az://container/x", ParsedUrl("az", "az://container/x", "container", "x")),
        (
            "abfss://c@acc.dfs.core.windows.net/x",
            ParsedUrl("az", "abfss://c@acc.dfs.core.windows.net/x", "c", "x", "acc"),
        ),
        ("sftp://host/x", ParsedUrl("fsspec", "sftp://host/x")),
        ("/tmp", ParsedUrl("local", "/tmp", path="/tmp")),
    ],
)
def test_parses(typed: str, expected: ParsedUrl) -> None:
    assert parse(typed) == expected


@pytest.mark.parametrize(
    ("typed", "reason"),
    [
        ("", "empty"),
        ("s3://", "names no bucket"),
        ("s3:///run", "names no bucket"),
        ("file://tmp/run", "three slashes"),
        (b"/tmp", "not bytes"),
        (7, "not int"),
        ("s3://b/\udcc3", "lone surrogate"),
    ],
)
def test_invalid_urls_are_refused(typed: str, reason: str) -> None:
    with pytest.raises(StorageError, match=reason):
        parse(typed)


@pytest.mark.parametrize("path", ["lr::0.1/step-1", "data::a", "run:1::2", "a//b::c", "C:\\x"])
def test_a_path_without_a_protocol_is_local_as_a_whole(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for number, name in enumerate((path, f"{path}::2")):
        zarrckpt.save({"w": torch.full((1,), number)}, name)
    assert zarrckpt.open(path)["w"][:] == 0 and Path(path, "zarr.json").exists()


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("arn:aws:s3:::bucket/x", "'s3://bucket/x'"),
        ("arn:aws-cn:s3:::bucket", "'s3://bucket'"),
        ("arn:aws:s3:eu-west-1:123:accesspoint/a/x", "'s3://bucket/path'"),
        ("s3:bkt/x", "'s3://bkt/x'"),
        ("s3//bkt/x", "'s3://bkt/x'"),
        ("S3::bkt/x", "'s3://bkt/x'"),
        (" s3://bkt/x", "'s3://bkt/x'"),
        ("run/gs://bkt/x", "'gs://bkt/x'"),
        ("file:x", "'file:///x'"),
    ],
)
def test_a_mistyped_url_is_refused_with_the_right_form(
    typed: str, meant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for use in (zarrckpt.open, zarrckpt.latest, partial(zarrckpt.save, {})):
        with pytest.raises(StorageError, match=re.escape(meant)):
            use(typed)
    assert not [*tmp_path.iterdir()]


STATE = {"w": torch.ones(2)}


def run_command(*words: Any) -> None:
    """Run the command line. Raise StorageError if the command prints one."""
    found = CliRunner().invoke(main, [*map(str, words)], catch_exceptions=False)
    if found.exit_code:
        raise StorageError(found.stderr) if "StorageError" in found.stderr else AssertionError(found.output)


def load_dcp(**place: Any) -> None:
    dcp.load({"w": torch.zeros(2)}, no_dist=True, **place)


# Entry points that accept any kind of url. They use a checkpoint "run/one", and a new url.
ANYWHERE: dict[str, Callable[[Any], Any]] = {
    "save": lambda at: zarrckpt.save(STATE, at("run/new")),
    "async_save": lambda at: zarrckpt.async_save(STATE, at("run/new")).result(),
    "open": lambda at: zarrckpt.open(at("run/one")),
    "load": lambda at: zarrckpt.load({"w": torch.zeros(2)}, at("run/one")),
    "latest": lambda at: zarrckpt.open(zarrckpt.latest(at("run")) or ""),
    "best": lambda at: zarrckpt.open(zarrckpt.best(at("run"), "loss") or ""),
    "recover": lambda at: zarrckpt.recover(at("run/one")),
    "remove": lambda at: zarrckpt.remove(at("run/two")),
    "copy": lambda at: zarrckpt.copy(at("run/one"), at("run/new")),
    "diff": lambda at: zarrckpt.diff(at("run/one"), at("run/one")),
    "manager": lambda at: zarrckpt.CheckpointManager(at("new"), signals=(), background=False).save(1, STATE),
    "import to": lambda at: zarrckpt.import_checkpoint(Path.home() / "x.pt", at("run/new")),
    "DCP writer": lambda at: dcp.save(STATE, storage_writer=ZarrStorageWriter(at("run/new")), no_dist=True),
    "DCP writer's id": lambda at: dcp.save(
        STATE, storage_writer=ZarrStorageWriter(), checkpoint_id=at("run/new"), no_dist=True
    ),
    "DCP reader": lambda at: load_dcp(storage_reader=ZarrStorageReader(at("run/one"))),
    "DCP reader's id": lambda at: load_dcp(storage_reader=ZarrStorageReader(), checkpoint_id=at("run/one")),
    "faulty": lambda at: zarrckpt.save(STATE, FaultyStore(at("run/new"), lambda operation: None)),
    **{
        command: lambda at, command=command: run_command(command, at("run/one"))  # type: ignore[misc]
        for command in ("ls", "tree", "info", "stats", "verify", "doctor", "recover")
    },
    "rm": lambda at: run_command("rm", at("run/two"), "--yes"),
    "cat": lambda at: run_command("cat", at("run/one"), "w"),
    "diff, command": lambda at: run_command("diff", at("run/one"), at("run/one")),
    "cp": lambda at: run_command("cp", at("run/one"), at("run/new")),
    "import to, command": lambda at: run_command("import", "~/x.pt", at("run/new")),
}
# Entry points that accept only local paths.
LOCAL: dict[str, Callable[[Any], Any]] = {
    "to_safetensors": lambda at: zarrckpt.to_safetensors("~/run/one", at("run/new")),
    "to_safetensors, file": lambda at: zarrckpt.to_safetensors("~/run/one", at("run/new.safetensors")),
    "to_torch_save": lambda at: zarrckpt.to_torch_save("~/run/one", at("run/new.pt")),
    "to_dcp": lambda at: zarrckpt.to_dcp("~/run/one", at("run/new")),
    "report": lambda at: zarrckpt.report("~/run/one", at("run/new.html")),
    "import from": lambda at: zarrckpt.import_checkpoint(at("x.pt"), "~/run/new"),
    **{
        f"export {kind}": lambda at, kind=kind: run_command(  # type: ignore[misc]
            "export", "~/run/one", at("run/new"), "--format", kind
        )
        for kind in ("safetensors", "torch", "dcp")
    },
    "report, command": lambda at: run_command("report", "~/run/one", "-o", at("run/new.html")),
    "import from, command": lambda at: run_command("import", at("x.pt"), "~/run/new"),
}
CHANGE_NOTHING = ("open", "load", "latest", "best", "recover", "DCP reader", "DCP reader's id")
CHANGE_NOTHING += ("ls", "tree", "info", "stats", "verify", "doctor", "cat", "diff", "diff, command")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home with two checkpoints and a file of torch.save. The working folder is an empty one beside it."""
    for name in ("home", "work"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "work")
    for place in (tmp_path / "home", f"memory://{tmp_path.name}"):
        for name in ("one", "two"):
            zarrckpt.save(STATE, join_url(place, f"run/{name}"), metadata={"loss": 1.0})
    torch.save(STATE, tmp_path / "home" / "x.pt")
    return tmp_path / "home"


@pytest.mark.parametrize("entry", [*ANYWHERE, *LOCAL])
def test_every_entry_point_accepts_the_same_urls(entry: str, home: Path) -> None:
    """A path with "~" and a file url mean the file. A url is a url, also as a Path."""
    use, before = (ANYWHERE | LOCAL)[entry], sorted(home.rglob("*"))
    forms: list[Callable[[str], Any]] = [
        lambda name: f"~/{name}",
        lambda name: Path(f"file://{home}/{name}"),
        lambda name: os.path.relpath(home / name),
    ]
    for at in forms:
        shutil.copytree(home, home.with_name("kept"))
        use(at)
        assert (sorted(home.rglob("*")) == before) == (entry in CHANGE_NOTHING)
        assert not [name for name in os.listdir(home) if name not in ("run", "new", "x.pt")]
        shutil.rmtree(home)
        home.with_name("kept").rename(home)
    in_memory: list[Callable[[str], Any]] = [
        lambda name: Path(f"memory://{home.parent.name}/{name}"),
        lambda name: str(Path(f"memory://{home.parent.name}/{name}")),
    ]
    for at in in_memory[: 1 if entry in ANYWHERE and entry not in CHANGE_NOTHING else 2]:
        with nullcontext() if entry in ANYWHERE else pytest.raises(StorageError, match="is a url"):
            use(at)
    for text in ("memory:{}", "s3//{}", "x/memory://{}"):
        with pytest.raises((StorageError, dcp.api.CheckpointException), match="looks like a mistyped url"):
            use(text.format)
    assert sorted(home.rglob("*")) == before and not os.listdir()


RESOLVED = ["reference://::file://{}", "reference://{}", "zip://::file://{}", "zip://{}", "simplecache::file://{}"]
RESOLVED += ["filecache::file://{}", "blockcache://{}", "dir://{}", "generic://{}", "async_wrapper://{}", "dask://{}"]
RESOLVED += ["memory://a::file://{}", "Reference://{}", "reference:/{}", "aliased://{}"]


@pytest.mark.parametrize("form", RESOLVED)
def test_chained_urls_are_refused(form: str, tmp_path: Path) -> None:
    """Templates in the file of a reference filesystem can run code."""
    fsspec.register_implementation("aliased", "fsspec.implementations.reference.ReferenceFileSystem", clobber=True)
    evil, ran = tmp_path / "evil.json", tmp_path / "ran"
    code = f"{{{{ cycler.__init__.__globals__.os.system('touch {ran}') }}}}"
    made = [{"key": code, "url": "x", "dimensions": {"i": {"stop": 1}}}]
    evil.write_text(json.dumps({"version": 1, "templates": {}, "gen": made, "refs": {}}))
    url = form.format(evil)
    for use in (zarrckpt.open, zarrckpt.latest, partial(zarrckpt.save, {})):
        with pytest.raises(StorageError, match="allow_chains"):
            use(url)
    with pytest.raises(StorageError, match="allow_chains"):
        zarrckpt.open("s3://bucket/a::file:///x", storage_options={"backend": "fsspec", "anon": True})
    assert not ran.exists()


def test_chained_urls_are_opened_if_allowed(tmp_path: Path) -> None:
    zarrckpt.save({"w": torch.ones(2)}, tmp_path / "one")
    shutil.make_archive(str(tmp_path / "two"), "zip", tmp_path / "one")
    for url in (f"simplecache::file://{tmp_path}/one", f"zip://::file://{tmp_path}/two.zip"):
        options = {"backend": "fsspec", "allow_chains": True}
        assert pickle.loads(pickle.dumps(StoreSpec(url, options))).open().get("zarr.json")
        assert zarrckpt.open(url, storage_options=options)["w"][:].tolist() == [1, 1]
    for wrong in ("yes", 1, None):
        with pytest.raises(StorageError, match="allow_chains"):
            open_store("memory://x", storage_options={"allow_chains": wrong})


def test_two_colons_in_a_url_of_one_protocol_are_part_of_a_name() -> None:
    for number in (1, 2):
        zarrckpt.save({"w": torch.full((1,), number)}, f"memory://colons/lr::0.{number}/step-1")
    assert zarrckpt.latest("memory://colons/lr::0.1") == "memory://colons/lr::0.1/step-1"
    assert zarrckpt.open("memory://colons/lr::0.1/step-1")["w"][:] == 1
    assert StoreSpec("http://[::1]:9/x").open().url == "http://[::1]:9/x"


@pytest.mark.parametrize("text", ["/tmp/a\0b", "/tmp/\ud800", "s3://b/\ud800", "memory://x\0y", "file:///tmp/a%00b"])
def test_texts_that_name_no_url_are_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(StorageError):
        StoreSpec(text)
    with pytest.raises(StorageError):
        StoreSpec(zarr.storage.LocalStore(tmp_path)).at(text.rpartition("/")[2].replace("%00", "\0"))


def test_paths_may_contain_undecodable_bytes(tmp_path: Path) -> None:
    path = os.fsdecode(bytes(tmp_path) + b"/\xff")
    open_store(path).put("k", [b"x"])
    assert os.listdir(path) == ["k"]


@pytest.mark.parametrize(
    "options", [{5: 1}, "abc", [1], 7, {"client_options": {5: 1}}, {"tags": {5: [1]}, "x": {5: 1}}]
)
def test_options_that_are_not_a_dict_are_refused(options: Any) -> None:
    with pytest.raises(StorageError):
        open_store("s3://bucket", storage_options=options)


def test_bytes_paths_are_refused() -> None:
    class BytesPath(os.PathLike):  # type: ignore[type-arg]
        def __fspath__(self) -> bytes:
            return b"/tmp"

    with pytest.raises(StorageError, match="fsdecode"):
        parse(BytesPath())  # type: ignore[arg-type]


def test_credentials_in_a_bucket_url_are_refused_without_being_shown() -> None:
    for secret in ("hunter2secret", "hunter2/secret", "9hunter/2/secret"):
        with pytest.raises(StorageError, match="storage_options") as caught:
            open_store(f"s3://AKIAKEY:{secret}@bucket/run")
        assert "hunter" not in str(caught.value) and "secret" not in str(caught.value)
    with pytest.raises(StorageError, match="three slashes") as caught:
        open_store("file://user:hunter2secret@host/run")
    assert "hunter2secret" not in str(caught.value)


def test_a_port_is_not_a_password() -> None:
    assert StoreSpec("sftp://host:22/run@noon").url == "sftp://host:22/run@noon"


def test_an_unknown_protocol_is_an_error() -> None:
    with pytest.raises(StorageError, match="nosuch://x/y"):
        open_store("nosuch://x/y")


@pytest.mark.parametrize("url", ["s3://bucket", "memory://x", "/tmp/x"])
def test_an_unknown_backend_is_refused(url: str) -> None:
    for backend in ("boto", "", 7, *(["obstore"] if url != "s3://bucket" else [])):
        with pytest.raises(StorageError, match="fsspec"):
            open_store(url, storage_options={"backend": backend})


def test_local_paths_take_no_options(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="has no storage_options"):
        open_store(tmp_path, storage_options={"key": "x"})
