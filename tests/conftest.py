"""Fixtures of the whole test suite: servers, and buckets in them (see ``store_servers.py``)."""

from __future__ import annotations

import gc
import os
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from harness import store_servers
from harness.ranks import stop_ranks
from harness.s3_server import Faults, S3Server
from harness.store_servers import S3Place, shared_server

if TYPE_CHECKING:
    from harness.hub_gateway import HubGateway

with suppress(ImportError):  # make test-integrations does not install it.
    from hypothesis import settings

    # A busy machine may take any time for an example.
    settings.register_profile("untimed", deadline=None)
    settings.load_profile("untimed")

# Each full collection would visit all objects of torch's modules and of the collected tests.
gc.disable()


def pytest_collection_finish() -> None:
    """Collect garbage from now on, but only among objects that the tests make."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def _no_credentials_of_the_machine() -> Iterator[None]:
    """Hide the machine's credentials, profiles and endpoints from the tests, and from processes that they start."""
    saved = {name: value for name, value in os.environ.items() if name.startswith(("AWS_", "GOOGLE_", "AZURE_"))}
    for name in saved:
        del os.environ[name]
    nowhere = {"AWS_EC2_METADATA_DISABLED": "true", "AWS_CONFIG_FILE": "/nonexistent"}
    os.environ.update(nowhere, AWS_SHARED_CREDENTIALS_FILE="/nonexistent")
    yield
    for name in (*nowhere, "AWS_SHARED_CREDENTIALS_FILE"):
        os.environ.pop(name, None)
    os.environ.update(saved)


@pytest.fixture(scope="session")
def _servers_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.getbasetemp()
    # Workers of pytest-xdist have a folder each, below one for all.
    return (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "servers"


@pytest.fixture(scope="session")
def moto_endpoint(_servers_folder: Path) -> Iterator[str]:
    """The url of a moto server in a separate process, one for the whole run."""
    with shared_server(_servers_folder / "moto", store_servers.launch_moto) as endpoint:
        yield endpoint


@pytest.fixture
def moto_bucket(moto_endpoint: str) -> S3Place:
    """A new bucket on moto."""
    return store_servers.new_bucket(moto_endpoint)


@pytest.fixture(scope="session")
def ceph_endpoint(_servers_folder: Path) -> Iterator[str]:
    """The url of Ceph's S3 gateway, one for the whole run. Tests that use it have the marker ``ceph``."""
    if not store_servers.ceph_is_installed():
        pytest.skip("Ceph's gateway is not installed (packages radosgw, ceph-mon, ceph-osd, ceph-common)")
    folder = _servers_folder / "ceph"
    with shared_server(folder, store_servers.launch_ceph) as endpoint:
        yield endpoint
    store_servers.remove_ceph(folder)


@pytest.fixture
def ceph_bucket(ceph_endpoint: str) -> S3Place:
    """A new bucket on Ceph's gateway."""
    return store_servers.new_bucket(ceph_endpoint)


@pytest.fixture(params=["folder", "zip"])
def each_format(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a test of ``CheckpointManager`` once with folders and once with archives."""
    monkeypatch.setattr("harness.managed.saved_format", request.param)


@pytest.fixture
def s3_stub() -> Iterator[S3Server]:
    """A small S3 server in this process whose faults the test chooses (``s3_stub.faults``)."""
    with S3Server() as stub:
        yield stub


@pytest.fixture
def hub_gateway() -> Iterator[HubGateway]:
    """A stand-in for the S3 gateway of Hugging Face's Storage Buckets."""
    from harness.hub_gateway import HubGateway  # botocore, which readers do not have

    with HubGateway() as gateway:
        yield gateway


@pytest.fixture(scope="session")
def _shared_hub_gateway() -> Iterator[HubGateway]:
    from harness.hub_gateway import HubGateway

    with HubGateway() as gateway:
        yield gateway


@pytest.fixture
def hub_bucket(_shared_hub_gateway: HubGateway) -> S3Place:
    """A new bucket on a stand-in that tests share: each of its clients takes a tenth of a second to start."""
    return _shared_hub_gateway.bucket()


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The authority of a certificate for 127.0.0.1, beside that and its key. No machine trusts it."""
    folder = tmp_path_factory.mktemp("tls")
    store_servers.make_certificate(folder)
    return folder / store_servers.AUTHORITY


@pytest.fixture
def tls_stub(certificate: Path) -> Iterator[S3Server]:
    """The same as ``s3_stub``, over TLS."""
    with S3Server(tls=store_servers.server_context(certificate.parent)) as stub:
        yield stub


@pytest.fixture(scope="session")
def sloppy_endpoint() -> Iterator[str]:
    """The url of an S3 server that accepts conditional puts and ignores the condition."""
    with S3Server(Faults(ignore_conditions=True)) as stub:
        yield stub.endpoint


@pytest.fixture
def sloppy_bucket(sloppy_endpoint: str) -> S3Place:
    """A new bucket on the server that ignores conditions."""
    return store_servers.new_bucket(sloppy_endpoint)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A filesystem of 4 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", folder], capture_output=True).returncode:
        pytest.skip("this process may not mount")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


@pytest.fixture(scope="session", autouse=True)
def _rank_processes() -> Iterator[None]:
    """End the processes of ``ranks.run_ranks`` with the session."""
    yield
    stop_ranks()
