"""AWS's configuration: region and endpoint as botocore resolves them, and credentials that are renewed."""

from __future__ import annotations

import datetime
import json
import ssl
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Barrier, Thread
from typing import Any
from urllib.parse import SplitResult, parse_qs, urlsplit

import botocore.session
import obstore
import pytest
from botocore.config import Config
from botocore.loaders import create_loader
from harness.internals import ObstoreStore, Store, open_store
from harness.s3_server import Request, S3Server, Strike
from harness.store_servers import server_context

from zarrckpt import StorageError
from zarrckpt._store import _aws, _obstore

KEYS = {"AWS_ACCESS_KEY_ID": "of-environment", "AWS_SECRET_ACCESS_KEY": "s"}
SERVICES = "\nservices = mine"
PROFILE_KEYS = "aws_access_key_id = of-profile\naws_secret_access_key = s\n"
TRUE = "true"
LOADER = create_loader()


def write_config(folder: Path, monkeypatch: pytest.MonkeyPatch, settings: str) -> None:
    """A configuration whose default profile and profile ``p`` have these settings, and separate keys."""
    path = folder / "config"
    services = "[services mine]\ns3 =\n  endpoint_url = http://127.0.0.1:9009\n[services other]\nec2 =\n  x = y\n"
    path.write_text(f"[default]\n{PROFILE_KEYS}{settings}\n[profile p]\n{PROFILE_KEYS}{settings}\n{services}")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(path))


def url_of_botocore(options: dict[str, Any], style: str) -> SplitResult:
    session = botocore.session.Session(profile=options.get("profile"))
    client = session.create_client(
        "s3",
        region_name=options.get("region"),
        endpoint_url=options.get("endpoint_url"),
        config=Config(signature_version="s3v4", s3={"addressing_style": style}),
    )
    return urlsplit(client.generate_presigned_url("get_object", Params={"Bucket": "research", "Key": "run/k"}))


def url_of_zarrckpt(options: dict[str, Any]) -> SplitResult:
    store = open_store("s3://research/run", storage_options=options)
    assert isinstance(store, ObstoreStore)
    return urlsplit(obstore.sign(store._bucket.persistent, "GET", "run/k", datetime.timedelta(hours=1)))


def signed_for(url: SplitResult) -> list[str]:
    """Key and region of a signature."""
    key, _, region, *_ = parse_qs(url.query)["X-Amz-Credential"][0].split("/")
    return [key, region]


@pytest.mark.parametrize(
    ("settings", "environment", "options"),
    [
        ("region = eu-west-3", {}, {"profile": "p"}),
        ("region = eu-west-3", {"AWS_PROFILE": "p"}, {}),
        ("region = eu-west-3", {**KEYS, "AWS_DEFAULT_REGION": "ap-south-1"}, {}),
        ("region = eu-west-3", {**KEYS, "AWS_DEFAULT_REGION": "ap-south-1"}, {"region": "sa-east-1"}),
        ("", KEYS, {}),
        ("region = eu-west-3\nendpoint_url = http://127.0.0.1:9001", {}, {"profile": "p"}),
        ("region = eu-west-3" + SERVICES, {}, {"profile": "p"}),
        ("endpoint_url = http://127.0.0.1:9001" + SERVICES, KEYS, {}),
        ("endpoint_url = https://objects.example.com/s3\nservices = other", KEYS, {}),
        ("region = eu-west-3" + SERVICES, {**KEYS, "AWS_ENDPOINT_URL": "http://127.0.0.1:9002"}, {}),
        (SERVICES, {"AWS_ENDPOINT_URL": "http://127.0.0.1:9", "AWS_ENDPOINT_URL_S3": "http://127.0.0.1:9003"}, {}),
        (SERVICES, {"AWS_ENDPOINT_URL": ""}, {"profile": "p"}),
        (SERVICES, KEYS, {"endpoint_url": "http://127.0.0.1:9004"}),
        ("region = eu-west-3" + SERVICES, {**KEYS, "AWS_IGNORE_CONFIGURED_ENDPOINT_URLS": TRUE}, {}),
        ("", {**KEYS, "AWS_ENDPOINT_URL_S3": "http://127.0.0.1:9", "AWS_IGNORE_CONFIGURED_ENDPOINT_URLS": TRUE}, {}),
        ("ignore_configured_endpoint_urls = true", {"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}, {"region": "eu-west-3"}),
        ("region = eu-west-3", {"AWS_USE_DUALSTACK_ENDPOINT": TRUE}, {}),
        ("region = eu-west-3\nuse_dualstack_endpoint = true", KEYS, {}),
        ("region = eu-west-3\ns3 =\n  use_dualstack_endpoint = true", KEYS, {}),
        ("region = us-west-2", {**KEYS, "AWS_USE_FIPS_ENDPOINT": TRUE}, {}),
        ("region = us-west-2\nuse_fips_endpoint = true\nuse_dualstack_endpoint = true", {}, {"profile": "p"}),
        ("region = cn-north-1", KEYS, {}),
        ("region = cn-northwest-1\nuse_dualstack_endpoint = true", {}, {}),
        ("", KEYS, {"region": "us-gov-west-1"}),
        ("region = eusc-de-east-1", KEYS, {}),
        ("region = eu-west-3\ns3 =\n  addressing_style = virtual", KEYS, {}),
        ("endpoint_url = https://objects.example.com\ns3 =\n  addressing_style = virtual", KEYS, {}),
        ("region = eu-west-3\ns3 =\n  use_accelerate_endpoint = true", {}, {"profile": "p"}),
    ],
)
def test_endpoint_region_and_keys_equal_botocores(
    settings: str,
    environment: dict[str, str],
    options: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Sessions would each read botocore's data anew.
    monkeypatch.setattr("botocore.session.create_loader", lambda *_: LOADER)
    write_config(tmp_path, monkeypatch, settings)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    expected = url_of_botocore(options, "virtual" if "virtual" in settings or "accelerate" in settings else "path")
    found = url_of_zarrckpt(options)
    # Two names of one server.
    host = expected.netloc.replace("s3.amazonaws.com", "s3.us-east-1.amazonaws.com")
    assert (found.scheme, found.netloc, found.path) == (expected.scheme, host, expected.path)
    assert signed_for(found) == signed_for(expected)


def test_a_broken_configuration_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_config(tmp_path, monkeypatch, "services = absent")
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(StorageError, match=r"reading the endpoint for S3 .*'default' failed.*absent"):
        open_store("s3://research/run")
    # Both are given: the files do not matter.
    open_store("s3://research/run", storage_options={"endpoint_url": "http://127.0.0.1:9", "region": "eu-west-3"})


def test_without_botocore_only_the_environment_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_config(tmp_path, monkeypatch, "region = eu-west-3\nendpoint_url = http://127.0.0.1:9001")
    monkeypatch.setitem(sys.modules, "botocore.session", None)
    _aws._ask_botocore.cache_clear()
    variables = {**KEYS, "AWS_DEFAULT_REGION": "ap-south-1", "AWS_ENDPOINT_URL_S3": "http://127.0.0.1:9002"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    found = url_of_zarrckpt({})
    assert (found.netloc, signed_for(found)) == ("127.0.0.1:9002", ["of-environment", "ap-south-1"])
    monkeypatch.setenv("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", TRUE)
    assert url_of_zarrckpt({}).netloc == "s3.ap-south-1.amazonaws.com"
    _aws._ask_botocore.cache_clear()


class Rotation:
    """A server that accepts the latest key alone, and the source of that key."""

    def __init__(self, stub: S3Server, source: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.stub, self._source, self._folder, self._monkeypatch = stub, source, folder, monkeypatch
        self.key, self.asked = "key-0", 0
        self.options: dict[str, Any] = {"endpoint_url": stub.endpoint}
        if source == "profile":
            self.options["profile"] = "p"
        elif source == "provider":
            self.options["credential_provider"] = self._credentials
        stub.faults.accepts_key = lambda key, request: key == self.key
        self.rotate()

    def _credentials(self) -> dict[str, Any]:
        self.asked += 1
        return {"access_key_id": self.key, "secret_access_key": "s", "token": None, "expires_at": None}

    def rotate(self) -> None:
        """Refuse the key, and give another one to the source."""
        self.key = f"key-{int(self.key[4:]) + 1}"
        keys = f"aws_access_key_id = {self.key}\naws_secret_access_key = s\n"
        if self._source == "profile":
            (self._folder / "config").write_text(f"[profile p]\nregion = eu-west-3\n{keys}")
            self._monkeypatch.setenv("AWS_CONFIG_FILE", str(self._folder / "config"))
        elif self._source == "environment":
            for name, value in {**KEYS, "AWS_ACCESS_KEY_ID": self.key}.items():
                self._monkeypatch.setenv(name, value)


REQUESTS: dict[str, tuple[Callable[[Store], Any], Any]] = {
    "get": (lambda store: store.get("a/k"), b"0123"),
    "range": (lambda store: bytes(store.read("a/k", 1, 2)), b"12"),
    "versioned": (lambda store: store.get_versioned("a/k").data, b"0123"),
    "list": (lambda store: [info.key for info in store.list()], ["a/k"]),
    "list_dir": (lambda store: store.list_dir(), ([], ["a"])),
    "put": (lambda store: store.put("a/k", [b"0123"]), None),
    "multipart": (lambda store: store.put("a/big", [b"0123" * 2]), None),
    "create": (lambda store: store.create("a/new", b"new"), None),
    "replace": (lambda store: store.replace("a/new", b"newer", store.get_versioned("a/new").version), None),
    "delete": (lambda store: store.delete(["a/big", "a/new"]), None),
    "absent": (lambda store: store.read_if_any("a/new"), None),
}


@pytest.mark.parametrize(
    ("backend", "source"),
    [
        ("obstore", "environment"),
        ("obstore", "profile"),
        ("obstore", "provider"),
        ("fsspec", "environment"),
        ("fsspec", "profile"),
    ],
)
def test_every_request_survives_rotated_keys(
    backend: str, source: str, s3_stub: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_obstore, "SPLIT", 8)
    monkeypatch.setattr("botocore.session.create_loader", lambda *_: LOADER)
    rotation = Rotation(s3_stub, source, tmp_path, monkeypatch)
    store = open_store("s3://research/run", storage_options={"backend": backend, **rotation.options})
    store.put("a/k", [b"0123"])
    for name, (request, expected) in REQUESTS.items():
        rotation.rotate()
        assert request(store) == expected, name
    assert s3_stub.objects["research/run/a/k"].data == b"0123"


def test_a_provider_for_google_is_asked_again(s3_stub: S3Server) -> None:
    tokens = iter(["first", "second"])

    def provider() -> dict[str, Any]:
        return {"token": next(tokens), "expires_at": None}

    options = {"endpoint_url": s3_stub.endpoint, "credential_provider": provider}
    s3_stub.faults.strike = Strike("put", 401, "AuthenticationRequired")
    open_store("gs://research/run", storage_options=options).put("k", [b"x"])
    assert s3_stub.requests[-1].headers["authorization"] == "Bearer second"


def test_an_upload_whose_key_ends_begins_anew(
    s3_stub: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rotation = Rotation(s3_stub, "provider", tmp_path, monkeypatch)
    store = open_store("s3://research/run", storage_options=rotation.options)

    def accepts(key: str, request: Request) -> bool:
        if "partNumber=2" in request.target and rotation.key == "key-1":
            rotation.rotate()
        return key == rotation.key

    s3_stub.faults.accepts_key = accepts
    monkeypatch.setattr(_obstore, "SPLIT", 8 * 2**20)
    data = bytes(range(256)) * 2**16
    store.put("k", [data, data[:100]])
    assert s3_stub.objects["research/run/k"].data == data + data[:100]


def test_requests_that_fail_together_share_one_renewal(
    s3_stub: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rotation = Rotation(s3_stub, "provider", tmp_path, monkeypatch)
    store = open_store("s3://research/run", storage_options=rotation.options)
    store.put("k", [b"x"])
    rotation.rotate()
    rotation.asked, barrier = 0, Barrier(16)

    def read(_: int) -> bytes:
        barrier.wait()
        return store.get("k")

    with ThreadPoolExecutor(16) as threads:
        assert [*threads.map(read, range(16))] == [b"x"] * 16
    # One by the client for all, and one by that for the first requests.
    assert rotation.asked <= 2


@pytest.mark.parametrize("backend", ["obstore", "fsspec"])
def test_keys_that_cannot_be_renewed_are_named(
    backend: str, s3_stub: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(options: dict[str, Any]) -> str:
        store = open_store("s3://research/run", storage_options={"endpoint_url": s3_stub.endpoint, **options})
        s3_stub.requests.clear()
        with pytest.raises(StorageError) as caught:
            store.get_bounded("k", 3)
        return str(caught.value)

    s3_stub.faults.accepts_key = lambda key, request: False
    text = refused({"backend": backend, "key": "given", "secret": "s"})
    assert "option key " in text and "credential_provider" in text
    assert len(s3_stub.requests) == 1
    for name, value in {**KEYS, "AWS_ENDPOINT_URL": s3_stub.endpoint}.items():
        monkeypatch.setenv(name, value)
    assert "again from their source" in refused({"backend": backend})
    assert len(s3_stub.requests) == 2
    if backend == "obstore":
        # New keys are for the server that they come with.
        store = open_store("s3://research/run")
        monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
        with pytest.raises(StorageError, match="another endpoint"):
            store.get("k")


STS = """<AssumeRoleWithWebIdentityResponse><AssumeRoleWithWebIdentityResult><Credentials>
<AccessKeyId>of-role</AccessKeyId><SecretAccessKey>s</SecretAccessKey><SessionToken>t</SessionToken><Expiration>2099-01-01T00:00:00Z</Expiration>
</Credentials></AssumeRoleWithWebIdentityResult></AssumeRoleWithWebIdentityResponse>"""
AGENT = {"AccessKeyId": "of-role", "SecretAccessKey": "s", "Token": "t", "Expiration": "2099-01-01T00:00:00Z"}


@contextmanager
def credentials_server(tls: ssl.SSLContext | None) -> Iterator[tuple[str, list[str]]]:
    """Serve a role's credentials: over TLS as AWS's token service, otherwise as EKS's agent. Yield url and tokens."""
    tokens: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def answer(self, token: str, body: str) -> None:
            tokens.append(token)
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body.encode())

        def do_GET(self) -> None:
            self.answer(self.headers["Authorization"], json.dumps(AGENT))

        def do_POST(self) -> None:
            form = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
            self.answer(parse_qs(form or urlsplit(self.path).query)["WebIdentityToken"][0], STS)

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http{'s' * (tls is not None)}://127.0.0.1:{server.server_port}", tokens
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("how", ["web identity", "agent"])
def test_a_pod_gets_the_credentials_of_its_role(
    how: str, s3_stub: S3Server, certificate: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the variables that EKS sets: those of IRSA, or those of Pod Identity."""
    token = tmp_path / "token"
    token.write_text("of-pod")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", s3_stub.endpoint)
    tls = server_context(certificate.parent) if how == "web identity" else None
    with credentials_server(tls) as (url, tokens):
        variables = {
            "web identity": {
                "AWS_ROLE_ARN": "arn:aws:iam::111122223333:role/train",
                "AWS_WEB_IDENTITY_TOKEN_FILE": str(token),
                "AWS_ENDPOINT_URL_STS": url,
                "AWS_CA_BUNDLE": str(certificate),
            },
            "agent": {
                "AWS_CONTAINER_CREDENTIALS_FULL_URI": f"{url}/v1/credentials",
                "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE": str(token),
            },
        }[how]
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        open_store("s3://bucket/run").put("k", [b"x"])
    assert tokens == ["of-pod"]
    assert all("Credential=of-role/" in request.headers["authorization"] for request in s3_stub.requests)
