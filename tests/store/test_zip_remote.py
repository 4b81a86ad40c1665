"""Archives on object stores and other remote stores: requests of reads, errors, and saves by one process."""

from __future__ import annotations

import os
import threading
import zipfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.server import ThreadingHTTPServer
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import zarr
from harness.bits import same
from harness.ranks import run_ranks
from harness.s3_server import S3Server, Strike
from harness.store_servers import S3Place
from torch.distributed.checkpoint.api import CheckpointException

import zarrckpt
from zarrckpt import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    CheckpointReplacedError,
    CorruptCheckpointError,
    SaveOptions,
    StorageError,
    ZarrStorageWriter,
)
from zarrckpt._store import _zip_streamed

STATE: dict[str, Any] = {
    "w": torch.arange(300_000.0).reshape(600, 500),
    "small": {f"t{i}": torch.full((100,), float(i)) for i in range(20)},
    "step": 7,
    "blob": ["a", {"b": torch.ones(3)}],
}


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make archives of more than 0.5 MB long ones, which are uploaded in parts."""
    monkeypatch.setattr(_zip_streamed, "MAX_KEPT_BYTES", 500_000)


@pytest.fixture
def web(tmp_path: Path) -> Iterator[tuple[str, Path, list[str]]]:
    """A web server with byte ranges: its url, its folder, and the requests that it gets."""
    from test_http import Handler

    asked: list[str] = []

    class Recorder(Handler):
        def send_response(self, code: int, message: str | None = None) -> None:
            asked.append(f"{self.command} {self.headers.get('Range', '')} {code:d}".replace("  ", " "))
            super().send_response(code, message)

        def send_head(self) -> Any:
            if "secret" in self.path and (self.command == "HEAD" or not self.path.endswith("=a%2Fb")):
                return self.send_error(403)
            return super().send_head()

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Recorder, directory=str(tmp_path)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", tmp_path, asked
    server.shutdown()
    server.server_close()


@pytest.fixture
def place(s3_stub: S3Server) -> tuple[str, dict[str, Any]]:
    """The url of an absent archive on the S3 server of this process, and the options to reach it."""
    bucket = s3_stub.bucket()
    return bucket.url("x.zarr.zip"), bucket.storage_options


def kinds(stub: S3Server) -> dict[str, int]:
    """Return the number of requests by kind since the last call."""
    found = Counter(request.kind for request in stub.requests)
    assert all("range" in request.headers for request in stub.requests if request.kind == "get")
    stub.requests.clear()
    return dict(found)


def keys(stub: S3Server) -> list[str]:
    return sorted(path.partition("/")[2] for path in stub.objects)


def test_reads_request_only_the_needed_ranges(s3_stub: S3Server) -> None:
    place = s3_stub.bucket()
    url, options = place.url("run/x.zarr.zip"), place.storage_options
    many = {f"t{i:04}": torch.full((10,), float(i)) for i in range(2000)}
    zarrckpt.save(STATE, url, storage_options=options)
    zarrckpt.save(many, place.url("many.zarr.zip"), storage_options=options)
    s3_stub.requests.clear()
    opened = zarrckpt.open(url, storage_options=options)
    assert kinds(s3_stub) == {"head": 1, "get": 1}
    opened.load(["step"])
    assert kinds(s3_stub) == {}
    opened.load(["w"])
    assert kinds(s3_stub) == {"get": 1}
    assert same(opened.load(), STATE)
    assert kinds(s3_stub) == {"get": 1}  # the end that was read has all other chunks
    opened = zarrckpt.open(place.url("many.zarr.zip"), storage_options=options)
    assert kinds(s3_stub) == {"head": 1, "get": 2}  # the end and the directory
    opened.load(["t0001", "t0002"])
    assert kinds(s3_stub) == {"get": 1 + 2}  # the table of checksums and two chunks
    opened.load()
    assert kinds(s3_stub) == {"get": 2000}  # one for each chunk object


def test_a_web_server_sends_only_the_needed_ranges(web: tuple[str, Path, list[str]]) -> None:
    url, folder, asked = web
    zarrckpt.save(STATE, folder / "x.zarr.zip")
    size = (folder / "x.zarr.zip").stat().st_size
    opened = zarrckpt.open(f"{url}/x.zarr.zip")
    assert asked == ["HEAD 200", f"GET bytes={size - (256 << 10)}-{size - 1} 206"]
    asked.clear()
    assert same(opened.load(), STATE)
    assert len(asked) == 22 and all(request.endswith("206") for request in asked)
    assert opened.verify().damages == ()


def test_a_presigned_url_signs_every_request(web: tuple[str, Path, list[str]]) -> None:
    """The server refuses HEAD, and all requests without the query, as S3 does."""
    url, folder, _ = web
    zarrckpt.save(STATE, folder / "secret-x.zarr.zip")
    zarrckpt.save({"w": 1}, folder / "secret-folder")
    signed = f"{url}/secret-x.zarr.zip?X-Amz-Expires=60&X-Amz-Signature=a%2Fb"
    opened = zarrckpt.open(signed)
    assert same(opened.load(), STATE) and opened.verify()
    assert "a%2Fb" not in opened.url and "secret-x.zarr.zip?" in opened.url
    zarrckpt.copy(signed, folder / "copy.zarr.zip")
    assert zarrckpt.open(folder / "copy.zarr.zip").verify()
    with pytest.raises(StorageError, match=r"403.*presigned urls are for one object: sign the url of an archive"):
        zarrckpt.open(f"{url}/secret-folder?X-Amz-Signature=other")


def test_other_files_at_the_url_are_named(web: tuple[str, Path, list[str]]) -> None:
    url, folder, _ = web
    zarrckpt.save(STATE, folder / "x.zarr.zip")
    data = (folder / "x.zarr.zip").read_bytes()
    (folder / "cut.zarr.zip").write_bytes(data[:-1000])
    (folder / "login.zarr.zip").write_text("<!doctype html><html><body>Sign in</body></html>\n")
    with pytest.raises(CorruptCheckpointError, match=r"/cut\.zarr\.zip is damaged: .*it was cut"):
        zarrckpt.open(f"{url}/cut.zarr.zip")
    with pytest.raises(CorruptCheckpointError, match=r"/login\.zarr\.zip is damaged: it is a web page.*login"):
        zarrckpt.open(f"{url}/login.zarr.zip")
    with pytest.raises(CheckpointNotFoundError, match=r"/absent\.zarr\.zip"):
        zarrckpt.open(f"{url}/absent.zarr.zip")
    with pytest.raises(StorageError, match=r"'secret\.zarr\.zip' in .*403"):
        zarrckpt.open(f"{url}/secret.zarr.zip")


def test_a_refused_read_from_s3_names_url_and_key(s3_stub: S3Server, place: tuple[str, dict[str, Any]]) -> None:
    s3_stub.faults.refusal = "no"
    with pytest.raises(StorageError, match=r"'x\.zarr\.zip' in s3://stub-.*PermissionDenied"):
        zarrckpt.open(place[0], storage_options=place[1])


@pytest.mark.parametrize("size", [10, 400_000, 900_000], ids=["shorter", "similar", "longer"])
def test_an_archive_that_is_replaced_while_open_is_named(size: int) -> None:
    url = f"memory://replaced-{size}.zarr.zip"
    state = {"w": torch.arange(400_000.0), "b": torch.arange(100_000.0)}
    zarrckpt.save(state, url)
    opened = zarrckpt.open(url)
    zarrckpt.save({"b": torch.zeros(1000), "w": torch.zeros(size)}, url, overwrite=True)
    with pytest.raises(CheckpointReplacedError, match=r"replaced-\d+\.zarr\.zip .*open it again"):
        opened.load()


def make_target(kind: str, request: pytest.FixtureRequest) -> tuple[Any, dict[str, Any]]:
    """Return the url of an archive in an empty place of a kind of store, and the options."""
    if kind == "memory":
        return f"memory://{os.urandom(8).hex()}.zarr.zip", {}
    if kind == "zarr-memory":
        return zarr.storage.StorePath(zarr.storage.MemoryStore(), "x.zarr.zip"), {}
    if kind == "gcs":
        stub: S3Server = request.getfixturevalue("s3_stub")
        return "gs://bucket/x.zarr.zip", {"bearer_token": "t", "endpoint_url": stub.endpoint}
    place: S3Place = request.getfixturevalue("moto_bucket")
    return place.url("x.zarr.zip"), place.storage_options if kind == "s3" else place.fsspec_options


@pytest.mark.parametrize(
    ("kind", "compression"),
    [("s3", None), ("s3", "zstd"), ("s3fs", None), ("gcs", "zstd"), ("memory", None), ("zarr-memory", "zstd")],
)
def test_archives_are_saved_replaced_and_copied(
    kind: str, compression: Any, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    url, options = make_target(kind, request)
    with pytest.raises(CheckpointNotFoundError):
        zarrckpt.open(url, storage_options=options)
    zarrckpt.save({"old": 1}, url, storage_options=options)
    with pytest.raises(CheckpointExistsError):
        zarrckpt.save(STATE, url, storage_options=options)
    how = SaveOptions(compression=compression)
    zarrckpt.async_save(STATE, url, overwrite=True, storage_options=options, options=how).result()
    opened = zarrckpt.open(url, storage_options=options)
    assert same(opened.load(), STATE)
    assert opened.verify().damages == ()
    zarrckpt.copy(opened, tmp_path / "folder")
    zarrckpt.copy(tmp_path / "folder", url, overwrite=True, storage_options=options)
    zarrckpt.copy(zarrckpt.open(url, storage_options=options), tmp_path / "file.zarr.zip")
    assert same(zarrckpt.open(tmp_path / "file.zarr.zip").load(), STATE)
    assert zarrckpt.open(tmp_path / "file.zarr.zip").verify().damages == ()


@pytest.mark.usefixtures("kept")
@pytest.mark.parametrize("kind", ["s3", "gcs"])
def test_a_long_archive_is_uploaded_in_parts(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    url, options = make_target(kind, request)
    state = {**STATE, "large": torch.rand(5_000_000)}
    dcp.save(state, storage_writer=ZarrStorageWriter(url, storage_options=options), no_dist=True)
    opened = zarrckpt.open(url, storage_options=options)
    assert same(opened.load(), state)
    assert opened.verify().damages == ()
    with pytest.raises(StorageError, match=r"x\.zarr\.zip cannot be written: .*500,000 to replace.*folder"):
        zarrckpt.save(state, url, overwrite=True, storage_options=options)
    assert same(zarrckpt.open(url, storage_options=options).load(), state)


@pytest.mark.usefixtures("kept")
def test_one_of_two_long_archives_is_committed(s3_stub: S3Server, place: tuple[str, dict[str, Any]]) -> None:
    url, options = place
    barrier = threading.Barrier(2)

    def save(number: int) -> bool:
        barrier.wait()
        try:
            return bool(zarrckpt.save({**STATE, "step": number}, url, storage_options=options))
        except CheckpointExistsError:
            return False

    with ThreadPoolExecutor(2) as pool:
        assert sorted(pool.map(save, range(2))) == [False, True]
    assert zarrckpt.open(url, storage_options=options).verify().damages == ()
    zarrckpt.recover(url, stopped=True, storage_options=options)
    assert keys(s3_stub) == ["x.zarr.zip"]


@pytest.mark.usefixtures("kept")
@pytest.mark.parametrize("kind", ["part", "end", "copy"])
def test_a_failed_upload_leaves_nothing_after_recover(
    s3_stub: S3Server, place: tuple[str, dict[str, Any]], kind: str
) -> None:
    url, options = place
    first = url.replace("x.zarr.zip", "first.zarr.zip")
    zarrckpt.save(STATE, first, storage_options=options)  # tests what the server supports
    s3_stub.faults.strike = Strike(kind, 403, "AccessDenied")
    state = {**STATE, "large": torch.rand(5_000_000)}
    with pytest.raises(StorageError, match=r"@x\.zarr\.zip/.*in s3://"):
        zarrckpt.save(state, url, storage_options=options)
    assert "x.zarr.zip" not in keys(s3_stub)
    zarrckpt.recover(url, stopped=True, storage_options=options)
    assert keys(s3_stub) == ["first.zarr.zip"]
    zarrckpt.save(state, url, storage_options=options)
    assert same(zarrckpt.open(url, storage_options=options).load(), state)
    assert keys(s3_stub) == ["first.zarr.zip", "x.zarr.zip"]


@pytest.mark.usefixtures("kept")
def test_a_lost_answer_to_the_commit_is_a_success(s3_stub: S3Server) -> None:
    place = s3_stub.bucket()
    for name, state in (("small", {"a": 1}), ("long", STATE)):
        zarrckpt.save(state, place.url(f"first-{name}.zarr.zip"), storage_options=place.storage_options)
        s3_stub.faults.strike = Strike("end", sent=0.0) if name == "long" else Strike("put", sent=0.0, spared=1)
        url = place.url(f"{name}.zarr.zip")
        zarrckpt.save(state, url, storage_options=place.storage_options)
        assert s3_stub.faults.strike is None
        assert same(zarrckpt.open(url, storage_options=place.storage_options).load(), state)
    assert keys(s3_stub) == ["first-long.zarr.zip", "first-small.zarr.zip", "long.zarr.zip", "small.zarr.zip"]


@pytest.mark.usefixtures("kept")
def test_long_archives_need_conditional_copies(sloppy_bucket: S3Place) -> None:
    url, options = sloppy_bucket.url("x.zarr.zip"), sloppy_bucket.storage_options
    for state in (STATE, {"w": b"x" * 600_000}):
        with pytest.raises(StorageError, match=r"x\.zarr\.zip cannot be written: .*at most 500,000.*folder"):
            zarrckpt.save(state, url, storage_options=options)
    with pytest.raises(CheckpointNotFoundError):
        zarrckpt.open(url, storage_options=options)
    with pytest.warns(UserWarning, match="best effort"):
        zarrckpt.save({"a": 1}, url, storage_options=options)
    assert zarrckpt.open(url, storage_options=options).load() == {"a": 1}


def _save_on_two_ranks(url: str, options: dict[str, Any]) -> None:
    state = {"w": torch.ones(10)}
    with pytest.raises(StorageError, match=r"x\.zarr\.zip cannot be written by 2 ranks.* Save to a folder"):
        zarrckpt.save(state, url, storage_options=options)
    with pytest.raises(CheckpointException, match=r"x\.zarr\.zip cannot be written by 2 ranks.* Save to a folder"):
        dcp.save(state, storage_writer=ZarrStorageWriter(url, storage_options=options))


def test_several_ranks_are_refused_before_a_put(s3_stub: S3Server, place: tuple[str, dict[str, Any]]) -> None:
    run_ranks(_save_on_two_ranks, *place, world_size=2)
    assert keys(s3_stub) == []


def test_a_manager_alone_keeps_archives(s3_stub: S3Server, place: tuple[str, dict[str, Any]]) -> None:
    folder = place[0].removesuffix("/x.zarr.zip")
    with zarrckpt.CheckpointManager(
        folder, format="zip", keep=zarrckpt.Keep(newest=1), storage_options=place[1]
    ) as manager:
        for step in (1, 2):
            manager.save(step, {"step": step})
    assert keys(s3_stub) == ["@run/zarr.json", "step-00000002.zarr.zip"]


def test_equal_states_give_equal_entries(s3_stub: S3Server, place: tuple[str, dict[str, Any]]) -> None:
    found = []
    for _ in range(2):
        zarrckpt.save(STATE, place[0], overwrite=True, storage_options=place[1])
        (stored,) = s3_stub.objects.values()
        with zipfile.ZipFile(BytesIO(stored.data)) as archive:
            assert archive.testzip() is None
            infos = archive.infolist()
        assert infos[-1].filename == "zarr.json"
        own = [(info.filename, info.header_offset, info.CRC) for info in infos if "@zarrckpt" not in info.filename]
        found.append(own[:-1])  # the root has the save id
    assert found[0] == found[1]
