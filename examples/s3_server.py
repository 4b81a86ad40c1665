"""An S3 server on this machine for demonstrations: moto, in a separate process."""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def s3_server(bucket: str, output: Path) -> Iterator[dict[str, str]]:
    """Run a server with one bucket. Yield the ``AWS_*`` variables with which clients find it.

    Raises SystemExit if moto is not installed or does not start.
    """
    if importlib.util.find_spec("moto") is None or importlib.util.find_spec("flask") is None:
        raise SystemExit("--s3 needs a server to start: pip install 'moto[server]'")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    endpoint = f"http://127.0.0.1:{port}"
    with output.open("wb") as log:
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
        server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
    try:
        _make_bucket(f"{endpoint}/{bucket}", server, output)
        yield {
            "AWS_ENDPOINT_URL": endpoint,
            "AWS_ACCESS_KEY_ID": "demo",
            "AWS_SECRET_ACCESS_KEY": "demo",
            "AWS_REGION": "us-east-1",
            "AWS_DEFAULT_REGION": "us-east-1",
            # No proxy for these requests.
            "NO_PROXY": ",".join(filter(None, [os.environ.get("NO_PROXY"), "127.0.0.1"])),
        }
    finally:
        server.terminate()
        server.wait()


def _make_bucket(url: str, server: subprocess.Popen[bytes], output: Path) -> None:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    deadline = time.monotonic() + 60
    while True:
        try:
            opener.open(urllib.request.Request(url, method="PUT"), timeout=10).close()
            return
        except urllib.error.HTTPError as err:
            raise SystemExit(f"the S3 server refused to make a bucket: {err}") from err
        except OSError:
            if server.poll() is not None or time.monotonic() > deadline:
                told = output.read_text(errors="replace")[-2000:]
                raise SystemExit(f"the S3 server did not start:\n{told}") from None
            time.sleep(0.1)
