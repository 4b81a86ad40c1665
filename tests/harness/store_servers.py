"""Servers for the tests, all on the loopback interface, and the buckets in them.

- moto, a mock of AWS, as a separate process: reached over HTTP as AWS would be.
- Ceph's gateway, a real S3 server: one monitor, one store in memory, one gateway (``ceph`` group).
- S3Server, a small S3 server with faults to choose, in this process or in a separate one (``s3_server.py``).

``tests/conftest.py`` makes fixtures of these. Any test module may use them.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import functools
import ipaddress
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REGION = "us-east-1"
CEPH_PROGRAMS = ("radosgw", "radosgw-admin", "ceph-mon", "ceph-osd", "ceph", "monmaptool")


@dataclass(frozen=True)
class S3Place:
    """A bucket on a test server, and the options to reach it."""

    endpoint: str
    bucket: str
    key: str = "test"
    secret: str = "testsecret"

    def url(self, path: str = "") -> str:
        """Return the url of a path in the bucket."""
        return f"s3://{self.bucket}/{path}".rstrip("/")

    @property
    def storage_options(self) -> dict[str, Any]:
        """The package's options for the bucket."""
        return {"key": self.key, "secret": self.secret, "endpoint_url": self.endpoint, "region": REGION}

    @property
    def s3fs_options(self) -> dict[str, Any]:
        """The same for s3fs."""
        keys = {"key": self.key, "secret": self.secret, "endpoint_url": self.endpoint}
        return {**keys, "client_kwargs": {"region_name": REGION}}

    @property
    def fsspec_options(self) -> dict[str, Any]:
        """The same for the package with s3fs."""
        return {**self.s3fs_options, "backend": "fsspec"}

    @property
    def environment(self) -> dict[str, str]:
        """The same as environment variables for another process."""
        return {
            "AWS_ACCESS_KEY_ID": self.key,
            "AWS_SECRET_ACCESS_KEY": self.secret,
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_REGION": REGION,
        }

    def client(self) -> Any:
        """Return a boto3 client: another implementation, to inspect stored objects."""
        return _boto3_client(self.endpoint, self.key, self.secret)


@functools.cache
def _boto3_client(endpoint: str, key: str, secret: str) -> Any:
    import boto3

    return boto3.client(
        "s3", endpoint_url=endpoint, aws_access_key_id=key, aws_secret_access_key=secret, region_name=REGION
    )


def new_bucket(endpoint: str, key: str = "test", secret: str = "testsecret") -> S3Place:
    """Return a new bucket. Tests never share one, and no server is ever reset."""
    place = S3Place(endpoint, f"test-{uuid.uuid4().hex}", key, secret)
    place.client().create_bucket(Bucket=place.bucket)
    return place


def free_port() -> int:
    """Return a port on which no process listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def wait_until_up(url: str, seconds: float, still_running: Callable[[], bool]) -> None:
    """Return when the url answers anything at all over HTTP."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and still_running():
        try:
            urllib.request.urlopen(url, timeout=2).close()
            return
        except urllib.error.HTTPError:
            return
        except OSError:
            time.sleep(0.1)
    raise RuntimeError(f"no server came up at {url} within {seconds:.0f} s")


# -- one server for all the workers of a test run


@contextlib.contextmanager
def shared_server(folder: Path, launch: Callable[[Path], tuple[str, list[int]]]) -> Iterator[str]:
    """Yield the endpoint of a server that the first of several processes starts and the last one stops."""
    folder.mkdir(parents=True, exist_ok=True)
    state = folder / "state.json"
    with _file_lock(folder / "lock"):
        known = json.loads(state.read_text()) if state.exists() else None
        if known is None:
            endpoint, pids = launch(folder)
            known = {"endpoint": endpoint, "pids": pids, "users": 0}
        known["users"] += 1
        state.write_text(json.dumps(known))
    try:
        yield known["endpoint"]
    finally:
        with _file_lock(folder / "lock"):
            known = json.loads(state.read_text())
            known["users"] -= 1
            if known["users"]:
                state.write_text(json.dumps(known))
            else:
                state.unlink()
                stop(known["pids"])


def stop(pids: list[int]) -> None:
    """End processes at once. Their data is lost."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 10
    while any(_runs(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.02)


def _runs(pid: int) -> bool:
    # A child of this process stays a zombie until it is waited for.
    with contextlib.suppress(ChildProcessError):
        if os.waitpid(pid, os.WNOHANG)[0] == pid:
            return False
    # A child of another test worker stays one as long as that worker runs.
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


@contextlib.contextmanager
def _file_lock(path: Path) -> Iterator[None]:
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


# -- moto


def launch_moto(folder: Path) -> tuple[str, list[int]]:
    """Start moto's server as a process. Return its endpoint and process ids."""
    port = free_port()
    endpoint = f"http://127.0.0.1:{port}"
    with open(folder / "moto.log", "w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    wait_until_up(f"{endpoint}/moto-api/", 60, lambda: process.poll() is None)
    return endpoint, [process.pid]


# -- Ceph's gateway

_CEPH_CONF = """
[global]
fsid = {fsid}
mon host = v2:127.0.0.1:{monitor}
mon initial members = a
public addr = 127.0.0.1
cluster addr = 127.0.0.1
ms bind ipv6 = false
ms type = async+posix
auth cluster required = none
auth service required = none
auth client required = none
run dir = {folder}/run
admin socket = {folder}/run/$name.asok
pid file = {folder}/run/$name.pid
log file = {folder}/run/$name.log
mon cluster log file = {folder}/run/cluster.log
log to stderr = false
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 8
osd pool default pgp num = 8
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
mon allow pool size one = true
mon max pg per osd = 2000
mon warn on pool no redundancy = false
osd objectstore = memstore
memstore device bytes = 8589934592
osd memory target = 939524096
osd max object size = 1073741824
[mon.a]
mon data = {folder}/mon
[osd.0]
osd data = {folder}/osd
osd uuid = {osd}
[client.rgw]
# Without this the gateway refuses a monitor that runs without authentication.
ms mon client mode = crc secure
# Without tcp_nodelay every small answer waits 40 ms.
rgw frontends = beast endpoint=127.0.0.1:{gateway} tcp_nodelay=1
rgw data = {folder}/rgw
rgw enable apis = s3, admin
rgw thread pool size = 64
"""


def ceph_is_installed() -> bool:
    """Whether the programs of the ``ceph`` group are on the path."""
    return all(shutil.which(program) for program in CEPH_PROGRAMS)


def launch_ceph(folder: Path) -> tuple[str, list[int]]:
    """Start a monitor, a store and a gateway, in about 15 s. Access key "test", secret "testsecret"."""
    # The daemons' sockets are in this folder, and a socket's name has at most 108 bytes.
    home = Path("/tmp") / f"zarrckpt-ceph-{uuid.uuid4().hex[:12]}"
    for name in ("mon", "osd", "run", "rgw"):
        (home / name).mkdir(parents=True)
    (folder / "home").write_text(str(home))
    ids = {"fsid": str(uuid.uuid4()), "osd": str(uuid.uuid4())}
    ports = {"monitor": free_port(), "gateway": free_port()}
    conf = home / "ceph.conf"
    conf.write_text(_CEPH_CONF.format(folder=home, **ids, **ports))
    endpoint = f"http://127.0.0.1:{ports['gateway']}"
    try:
        _start_ceph(home, str(conf), ids, ports["monitor"])
        wait_until_up(endpoint, 60, lambda: True)
    except BaseException:
        stop(_ceph_pids(home))
        raise
    return endpoint, _ceph_pids(home)


def _start_ceph(home: Path, conf: str, ids: dict[str, str], monitor: int) -> None:
    address = f"[v2:127.0.0.1:{monitor}]"
    _call("monmaptool", "--create", "--clobber", "--fsid", ids["fsid"], "--addv", "a", address, f"{home}/monmap")
    _call("ceph-mon", "-c", conf, "--mkfs", "-i", "a", "--monmap", f"{home}/monmap")
    _call("ceph-mon", "-c", conf, "-i", "a")
    _call("ceph", "-c", conf, "--connect-timeout", "20", "osd", "new", ids["osd"], "0")
    _call("ceph-osd", "-c", conf, "-i", "0", "--mkfs", "--osd-uuid", ids["osd"])
    _call("ceph", "-c", conf, "osd", "crush", "add", "osd.0", "1.0", "host=localhost", "root=default")
    _call("ceph-osd", "-c", conf, "-i", "0")
    user = ("--uid", "t", "--display-name", "t", "--access-key", "test", "--secret-key", "testsecret")
    _call("radosgw-admin", "-c", conf, "user", "create", *user)
    _call("radosgw", "-c", conf, "-n", "client.rgw")


def _call(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed ({done.returncode}): {done.stderr[-2000:]}")


def _ceph_pids(home: Path) -> list[int]:
    # The gateway first, the monitor last.
    order = ("client", "osd", "mon")
    files = sorted((home / "run").glob("*.pid"), key=lambda path: order.index(path.name.split(".")[0]))
    return [int(file.read_text()) for file in files]


def remove_ceph(folder: Path) -> None:
    """Remove the files that a stopped gateway left on disk."""
    home = folder / "home"
    if home.exists() and not (folder / "state.json").exists():
        shutil.rmtree(home.read_text(), ignore_errors=True)


# -- TLS

AUTHORITY, CERTIFICATE, KEY = "authority.pem", "certificate.pem", "key.pem"


def make_certificate(folder: Path) -> None:
    """Write a certificate for 127.0.0.1, its key, and the certificate of its authority, which no machine trusts."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    authority, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    names = [x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)]) for text in ("tests", "127.0.0.1")]
    now, day = datetime.datetime.now(datetime.UTC), datetime.timedelta(days=1)
    builder = x509.CertificateBuilder().issuer_name(names[0]).not_valid_before(now - day).not_valid_after(now + day)
    own = builder.subject_name(names[0]).public_key(authority.public_key()).serial_number(1)
    own = own.add_extension(x509.BasicConstraints(True, None), True)
    server = builder.subject_name(names[1]).public_key(key.public_key()).serial_number(2)
    address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    server = server.add_extension(address, False).add_extension(x509.BasicConstraints(False, None), True)
    pem = serialization.Encoding.PEM
    plain = (serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (folder / AUTHORITY).write_bytes(own.sign(authority, hashes.SHA256()).public_bytes(pem))
    (folder / CERTIFICATE).write_bytes(server.sign(authority, hashes.SHA256()).public_bytes(pem))
    (folder / KEY).write_bytes(key.private_bytes(pem, *plain))


def server_context(folder: Path) -> ssl.SSLContext:
    """Return the TLS context of a server with the certificate in a folder."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / CERTIFICATE, folder / KEY)
    return context
