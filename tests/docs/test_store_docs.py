"""Every option in the pages of stores opens a store."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import moto.settings
import pytest
import torch
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from harness import ROOT
from harness.internals import open_store
from harness.store_servers import AUTHORITY, REGION, S3Place, make_certificate
from moto.s3.responses import S3Response
from moto.server import ThreadedMotoServer

import zarrckpt
from zarrckpt import StorageError

PAGES = [ROOT / "docs" / folder / "stores.md" for folder in ("how-to", "reference")]


class _Named(ast.NodeTransformer):
    """Replaces a function of the page by its name."""

    def visit_Name(self, node: ast.Name) -> ast.Constant:
        return ast.Constant(node.id)


def calls() -> list[tuple[str, dict[str, Any]]]:
    """Return (url, storage_options) of every call on the pages."""
    found = []
    text = "".join(page.read_text() for page in PAGES)
    for block in re.findall(r"```python no-run\n(.*?)```", text, re.DOTALL):
        nodes = [*ast.walk(ast.parse(block))]
        known = {ast.unparse(node.targets[0]): node.value for node in nodes if isinstance(node, ast.Assign)}
        for node in nodes:
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("zarrckpt.save", "zarrckpt.open"):
                url = next(arg.value for arg in node.args if isinstance(arg, ast.Constant))
                options = [word.value for word in node.keywords if word.arg == "storage_options"]
                options = [known.get(ast.unparse(value), value) for value in options]
                found.append((str(url), ast.literal_eval(_Named().visit(options[0])) if options else {}))
    return found


def test_the_pages_have_examples() -> None:
    assert {url.partition(":")[0] for url, _ in calls()} >= {"s3", "gs", "az", "abfss", "sftp", "/scratch/run/step-7"}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The files that the page names -> files that replace them here."""
    folder = tmp_path_factory.mktemp("files")
    make_certificate(folder)
    key = rsa.generate_private_key(65537, 2048)
    plain = (serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    account = {
        "private_key": key.private_bytes(serialization.Encoding.PEM, *plain).decode(),
        "private_key_id": "1",
        "client_email": "x@example.com",
        "gcs_base_url": "http://x",
    }
    (folder / "account.json").write_text(json.dumps({"type": "service_account", **account}))
    return {
        "/etc/ssl/our-ca.pem": str(folder / AUTHORITY),
        "/secrets/service-account.json": str(folder / "account.json"),
    }


@pytest.mark.parametrize(("url", "options"), [call for call in calls() if not call[0].startswith("sftp")])
def test_every_example_opens(
    url: str, options: dict[str, Any], files: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "acct")
    config = tmp_path / "config"
    config.write_text("[profile research]\naws_access_key_id = key\naws_secret_access_key = secret\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    text = repr(options)
    for name, instead in files.items():
        text = text.replace(name, instead)
    options = ast.literal_eval(text)
    if "credential_provider" in options:
        options["credential_provider"] = dict  # any callable: it is called for the first request
    assert open_store(url, storage_options=options).url == url


@pytest.fixture
def enforcing(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Place]:
    """A server in this process, which enforces IAM policies once ``INITIAL_NO_AUTH_ACTION_COUNT`` is 0."""
    monkeypatch.setattr(moto.settings, "INITIAL_NO_AUTH_ACTION_COUNT", float("inf"))
    server = ThreadedMotoServer(port=0, verbose=False)
    server.start()
    try:
        place = S3Place("http://{}:{}".format(*server.get_host_and_port()), "bucket")
        place.client().create_bucket(Bucket="bucket", ObjectLockEnabledForBucket=True)
        yield place
    finally:
        server.stop()


def test_the_policy_of_the_page_is_sufficient(enforcing: S3Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each statement is needed for the page's purpose, and no other is. Each put has a checksum for Object Lock."""
    (block,) = re.findall(r"```json\n(.*?)```", PAGES[0].read_text(), re.DOTALL)
    policy = json.loads(block)
    iam = boto3.client(
        "iam",
        endpoint_url=enforcing.endpoint,
        aws_access_key_id="root",
        aws_secret_access_key="root",
        region_name=REGION,
    )

    def user(*statements: str) -> dict[str, Any]:
        name = "-".join(statements)
        iam.create_user(UserName=name)
        chosen = [statement for statement in policy["Statement"] if statement["Sid"] in statements]
        document = json.dumps({**policy, "Statement": chosen})
        iam.put_user_policy(UserName=name, PolicyName="page", PolicyDocument=document)
        key = iam.create_access_key(UserName=name)["AccessKey"]
        own = {"key": key["AccessKeyId"], "secret": key["SecretAccessKey"], "retry_config": {"max_retries": 1}}
        # moto compares the policy of one DeleteObjects with the bucket's name.
        return {**enforcing.storage_options, **own, "disable_bulk_delete": True, "checksum_algorithm": "SHA256"}

    puts: list[tuple[str, str | None]] = []

    def record(kind: str) -> None:
        answer = getattr(S3Response, kind)

        def put(response: Any, *args: Any) -> Any:
            puts.append((kind, response.headers.get("x-amz-checksum-sha256")))
            return answer(response, *args)

        monkeypatch.setattr(S3Response, kind, put)

    record("put_object")
    record("upload_part")
    no_list = user("Read", "Save", "Delete")
    reads, saves, all_of_it = user("List", "Read"), user("List", "Read", "Save"), user("List", "Read", "Save", "Delete")
    monkeypatch.setattr(moto.settings, "INITIAL_NO_AUTH_ACTION_COUNT", 0)
    url, state = "s3://bucket/run/step-1", {"w": torch.ones(5_000_000)}
    for refused in (no_list, reads):
        with pytest.raises(StorageError):
            zarrckpt.save(state, url, storage_options=refused)
    zarrckpt.save(state, url, storage_options=saves)
    with pytest.raises(StorageError):
        zarrckpt.save(state, "s3://bucket/other", storage_options=saves)
    assert zarrckpt.latest("s3://bucket/run", storage_options=reads) == url
    zarrckpt.open(url, storage_options=reads).verify().raise_if_damaged()
    zarrckpt.save(state, url, storage_options=saves, overwrite=True)
    for refused in (reads, saves):
        with pytest.raises(StorageError):
            zarrckpt.remove(url, storage_options=refused)
    zarrckpt.remove(url, storage_options=all_of_it)
    zarrckpt.save(state, url, storage_options=all_of_it)
    zarrckpt.save(state, url, storage_options=all_of_it, overwrite=True)
    assert {kind for kind, _ in puts} == {"put_object", "upload_part"}
    assert all(checksum for _, checksum in puts)
