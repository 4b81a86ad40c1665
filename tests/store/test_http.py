"""Checkpoints on a web server: every client reads every key, and ``verify`` finds the damage and no more."""

from __future__ import annotations

import re
import string
import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import unquote

import numpy as np
import pytest
import tensorstore
import torch
import zarr
from obstore.store import HTTPStore

import zarrckpt
from zarrckpt import CheckpointNotFoundError, CorruptCheckpointError, StorageError

NAMES = [
    *(f"a{char}b" for char in string.punctuation + " "),
    *(
        "",
        ".",
        "..",
        "~root",
        "#1",
        "?x=1",
        "%2F",
        "%252F",
        "a/../b",
        "zarr.json",
        "C:\\x",
        "a::b",
        "{a}[0]",
        ".hidden",
    ),
    *("=2F", "==", " lead", "dot.", "é", "权重", "😀", "line\nbreak", "long%" * 100),
]


class Handler(SimpleHTTPRequestHandler):
    """Serves files, and ranges of them."""

    protocol_version = "HTTP/1.1"
    lists: ClassVar[bool] = True
    ranges: ClassVar[bool] = True
    times_decoded: ClassVar[int] = 1
    fails: ClassVar[str] = ""
    """The end of paths that are answered with 503."""

    def do_GET(self) -> None:
        found = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", "")) if self.ranges else None
        path = Path(self.translate_path(self.path))
        if found is None or not path.is_file():
            super().do_GET()
            return
        data, (first, last) = path.read_bytes(), found.groups()
        begin, end = (int(first), int(last or len(data)) + 1) if first else (len(data) - int(last), len(data))
        part = data[begin:end]
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {begin}-{begin + len(part) - 1}/{len(data)}")
        self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        self.wfile.write(part)

    def send_head(self) -> Any:
        if self.fails and self.path.endswith(self.fails):
            self.send_error(503)
            return None
        return super().send_head()

    def translate_path(self, path: str) -> str:
        for _ in range(self.times_decoded - 1):
            path = unquote(path)
        return super().translate_path(path)

    def list_directory(self, path: Any) -> Any:
        if self.lists:
            return super().list_directory(path)
        self.send_error(403)
        return None

    def log_message(self, *_: Any) -> None:
        """Print nothing."""


Serve = Callable[..., str]


@pytest.fixture(scope="module")
def serve() -> Iterator[Serve]:
    """Serve a folder by a handler with the given attributes. The result is its url."""
    servers = []

    def start(folder: Path, **attributes: Any) -> str:
        handler = type("_Handler", (Handler,), attributes)
        servers.append(ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, directory=str(folder))))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{servers[-1].server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of all names, and a tensor of several subchunks."""
    folder = tmp_path_factory.mktemp("served")
    names = {name: torch.full((2,), float(number)) for number, name in enumerate(NAMES)}
    zarrckpt.save(
        {"model": names, "large": torch.ones(1100, 1000)},
        folder / "ck",
        options=zarrckpt.SaveOptions(durable=False, compression="zstd"),
    )
    return folder


@pytest.fixture(scope="module")
def url(folder: Path, serve: Serve) -> str:
    """The checkpoint on a server that decodes paths once too often, and lists nothing."""
    return f"{serve(folder, times_decoded=2, lists=False)}/ck"


def obstore_store(url: str) -> zarr.storage.ObjectStore[HTTPStore]:
    return zarr.storage.ObjectStore(HTTPStore.from_url(url, client_options={"allow_http": True}), read_only=True)


STORES: dict[str, Callable[[str], Any]] = {
    "url": str,
    "fsspec": lambda url: zarr.storage.FsspecStore.from_url(url, read_only=True),
    "wrapped fsspec": lambda url: zarr.storage.LoggingStore(zarr.storage.FsspecStore.from_url(url), log_level="ERROR"),
    "wrapped obstore": lambda url: zarr.storage.LoggingStore(obstore_store(url), log_level="ERROR"),
}


@pytest.mark.parametrize("store", STORES)
def test_every_name_is_read_and_verified(url: str, folder: Path, store: str) -> None:
    opened = zarrckpt.open(STORES[store](url))
    loaded = opened.load()
    assert [float(loaded["model"][name][1]) for name in NAMES] == [*range(len(NAMES))]
    assert (loaded["large"] == 1).all()
    for quick in (True, False):
        here, there = zarrckpt.open(folder / "ck").verify(quick=quick), opened.verify(quick=quick)
        assert (there.damages, there.objects, there.nbytes) == ((), here.objects, here.nbytes)


def by_zarr(store: Any) -> Callable[[str], Any]:
    group = zarr.open_group(store, mode="r")
    return lambda path: group[path][...]  # type: ignore[index, unused-ignore]


def by_tensorstore(url: str) -> Callable[[str], Any]:
    def read(path: str) -> Any:
        kvstore = {"driver": "http", "base_url": f"{url}/", "path": f"{path}/"}
        return tensorstore.open({"driver": "zarr3", "kvstore": kvstore}, read=True).result().read().result()

    return read


READERS: dict[str, Callable[[str], Callable[[str], Any]]] = {
    "zarr through fsspec": lambda url: by_zarr(url),
    "zarr through obstore": lambda url: by_zarr(obstore_store(url)),
    "tensorstore": by_tensorstore,
}


@pytest.mark.parametrize("reader", READERS)
def test_other_readers_find_every_name(url: str, folder: Path, reader: str) -> None:
    """By the stored paths, unchanged."""
    opened, read = zarrckpt.open(folder / "ck"), READERS[reader](url)
    paths = [opened.entry(f"model.{name}").node_path for name in NAMES]
    assert not re.search(r"[^\w./=-]", "".join(paths).replace("😀", ""))
    for number, path in enumerate(paths):
        assert np.asarray(read(path)).tolist() == [number, number], path
    assert (np.asarray(read("large")) == 1).all()


@pytest.mark.parametrize("lists", [True, False])
def test_damage_is_found_as_on_disk(lists: bool, serve: Serve, tmp_path: Path) -> None:
    zarrckpt.save({name: torch.ones(3) for name in ("a%", "b/", "c d", "e", "f")}, tmp_path / "ck")
    (tmp_path / "ck/a=25/c.0").unlink()
    (tmp_path / "ck/b=2F/c.0").write_bytes(b"x" * 17)
    (tmp_path / "ck/c=20d/c.0").write_bytes(b"x" * 16)
    (tmp_path / "ck/e/zarr.json").unlink()
    url = f"{serve(tmp_path, lists=lists)}/ck"
    for quick in (True, False):
        here, there = zarrckpt.open(tmp_path / "ck").verify(quick=quick), zarrckpt.open(url).verify(quick=quick)
        assert len(here.damages) == (3 if quick else 4)
        assert there.damages == here.damages


def test_errors_of_a_server_are_not_damage(folder: Path, serve: Serve) -> None:
    opened = zarrckpt.open(f"{serve(folder, fails='/large/zarr.json')}/ck")
    with pytest.raises(StorageError, match="503") as caught:
        opened.verify(quick=True)
    assert not isinstance(caught.value, CorruptCheckpointError)


def test_a_server_without_ranges_is_named(folder: Path, serve: Serve) -> None:
    opened = zarrckpt.open(f"{serve(folder, ranges=False)}/ck")
    assert opened["model.a%b"][0] == NAMES.index("a%b")
    with pytest.raises(StorageError, match="ranges") as caught:
        opened["large"][:1]
    assert not isinstance(caught.value, CorruptCheckpointError)


def test_the_links_of_a_page_are_a_listing(serve: Serve, tmp_path: Path) -> None:
    with zarrckpt.CheckpointManager(tmp_path / "run") as manager:
        for number in (1, 2):
            manager.save(number, {"w": torch.ones(2)})
    zarrckpt.save({"w": torch.ones(2)}, tmp_path / "run" / "50% of 1")
    url = serve(tmp_path)
    assert zarrckpt.latest(f"{url}/run") == f"{url}/run/step-00000002"
    with pytest.raises(CheckpointNotFoundError, match="folder of 3 checkpoints"):
        zarrckpt.open(f"{url}/run")
