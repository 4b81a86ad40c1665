"""What ranged gets over plain HTTP cost the client: the store's direct reads beside obstore's.

The server sends parts of one piece of memory, so that it is no limit; the client's own processor time counts.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.measure import Options, alternate, medians
from benchmarks.results import Figure, Results

GROUP = "ranged gets of 8 MiB over plain HTTP, four at once"
SIZE = 8 << 20
THREADS = 4
DIRECT, OBSTORE = "direct reads", "obstore"


def run(options: Options) -> Results:
    count = max(8, int(options.gigabytes * 1e9) // SIZE)
    found = Results()
    with _serving() as endpoint:
        cost = medians(alternate(_calls(endpoint, count), options.rounds))
    for way, seconds in cost.items():
        found.figures.append(Figure(GROUP, f"{way}: the client's processor time a GB", seconds, "s"))
    found.figures.append(Figure(GROUP, "obstore's over direct reads'", cost[OBSTORE] / cost[DIRECT], "x"))
    return found


def _calls(endpoint: str, count: int) -> dict[str, Callable[[int], float]]:
    from zarrckpt._store import open_store

    options = {"key": "k", "secret": "s", "endpoint_url": endpoint, "region": "us-east-1"}
    buffers = [memoryview(bytearray(SIZE)) for _ in range(THREADS)]

    def costs(store: Any) -> float:
        def read(thread: int) -> None:
            for _ in range(count // THREADS):
                store.read_into("k", 0, buffers[thread])

        began = _processor_seconds()
        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(read, range(THREADS)))
        return (_processor_seconds() - began) / (count // THREADS * THREADS * SIZE) * 1e9

    def once(direct: bool) -> Callable[[int], float]:
        store: Any = open_store("s3://bucket/run", storage_options=options)
        if not direct:
            store._client.direct.give_up()
        return lambda _: costs(store)

    return {DIRECT: once(True), OBSTORE: once(False)}


def _processor_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


@contextmanager
def _serving() -> Iterator[str]:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(there,), daemon=True)
    process.start()
    try:
        yield here.recv()
    finally:
        process.kill()
        process.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    data = memoryview(os.urandom(SIZE))

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        begin, _, end = self.headers["Range"].removeprefix("bytes=").partition("-")
        part = self.data[int(begin) : int(end) + 1]
        self.send_response(206)
        self.send_header("Content-Length", str(len(part)))
        self.send_header("Content-Range", f"bytes {begin}-{end}/{SIZE}")
        self.send_header("ETag", '"1"')
        self.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
        self.end_headers()
        self.wfile.write(part)


def _serve(pipe: Connection) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    pipe.send(f"http://127.0.0.1:{server.server_address[1]}")
    server.serve_forever()
