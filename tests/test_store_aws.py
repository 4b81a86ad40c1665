"""AWS's configuration: region and endpoint as botocore resolves them, and credentials that are renewed."""

from __future__ import annotations

import datetime
import sys
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, parse_qs, urlsplit

import botocore.session
import obstore
import pytest
from botocore.config import Config
from botocore.loaders import create_loader

from zarrckpt import StorageError
from zarrckpt._store import _aws
from zarrckpt._store._obstore import ObstoreStore
from zarrckpt._store._spec import open_store

KEYS = {"AWS_ACCESS_KEY_ID": "of-environment", "AWS_SECRET_ACCESS_KEY": "s"}
SERVICES = "\nservices = mine"
PROFILE_KEYS = "aws_access_key_id = of-profile\naws_secret_access_key = s\n"
TRUE = "true"
LOADER = create_loader()


def write_config(folder: Path, monkeypatch: pytest.MonkeyPatch, settings: str) -> None:
    """A configuration whose default profile and profile ``p`` have these settings, and keys of their own."""
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
        ("region = eu-west-3", KEYS, {}),
        ("region = eu-west-3", {**KEYS, "AWS_DEFAULT_REGION": "ap-south-1"}, {}),
        ("region = eu-west-3", {**KEYS, "AWS_DEFAULT_REGION": "ap-south-1"}, {"region": "sa-east-1"}),
        ("", KEYS, {}),
        ("region = eu-west-3\nendpoint_url = http://127.0.0.1:9001", {}, {"profile": "p"}),
        ("region = eu-west-3\nendpoint_url = http://127.0.0.1:9001", KEYS, {}),
        ("region = eu-west-3" + SERVICES, {}, {"profile": "p"}),
        ("region = eu-west-3" + SERVICES, {**KEYS, "AWS_PROFILE": "p"}, {}),
        ("endpoint_url = http://127.0.0.1:9001" + SERVICES, KEYS, {}),
        ("endpoint_url = https://objects.example.com/s3\nservices = other", KEYS, {}),
        ("region = eu-west-3" + SERVICES, {**KEYS, "AWS_ENDPOINT_URL": "http://127.0.0.1:9002"}, {}),
        (SERVICES, {"AWS_ENDPOINT_URL": "http://127.0.0.1:9", "AWS_ENDPOINT_URL_S3": "http://127.0.0.1:9003"}, {}),
        (SERVICES, {"AWS_ENDPOINT_URL": ""}, {"profile": "p"}),
        (SERVICES, KEYS, {"endpoint_url": "http://127.0.0.1:9004"}),
        ("region = eu-west-3" + SERVICES, {**KEYS, "AWS_IGNORE_CONFIGURED_ENDPOINT_URLS": TRUE}, {}),
        ("", {**KEYS, "AWS_ENDPOINT_URL_S3": "http://127.0.0.1:9", "AWS_IGNORE_CONFIGURED_ENDPOINT_URLS": TRUE}, {}),
        ("ignore_configured_endpoint_urls = true", {"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}, {"region": "eu-west-3"}),
        (SERVICES, {"AWS_IGNORE_CONFIGURED_ENDPOINT_URLS": TRUE}, {"endpoint_url": "http://127.0.0.1:9005"}),
        ("region = eu-west-3", {"AWS_USE_DUALSTACK_ENDPOINT": TRUE}, {}),
        ("region = eu-west-3\nuse_dualstack_endpoint = true", KEYS, {}),
        ("region = eu-west-3\ns3 =\n  use_dualstack_endpoint = true", KEYS, {}),
        ("region = us-west-2", {**KEYS, "AWS_USE_FIPS_ENDPOINT": TRUE}, {}),
        ("region = us-west-2\nuse_fips_endpoint = true\nuse_dualstack_endpoint = true", {}, {"profile": "p"}),
        ("region = cn-north-1", KEYS, {}),
        ("region = cn-northwest-1\nuse_dualstack_endpoint = true", {}, {}),
        ("", KEYS, {"region": "us-gov-west-1"}),
        ("", {**KEYS, "AWS_DEFAULT_REGION": "us-gov-east-1", "AWS_USE_FIPS_ENDPOINT": TRUE}, {}),
        ("region = us-iso-east-1", KEYS, {}),
        ("region = eusc-de-east-1", KEYS, {}),
        ("region = eu-west-3\ns3 =\n  addressing_style = virtual", KEYS, {}),
        ("endpoint_url = https://objects.example.com\ns3 =\n  addressing_style = virtual", KEYS, {}),
        ("region = eu-west-3\ns3 =\n  use_accelerate_endpoint = true", {}, {"profile": "p"}),
    ],
)
def test_server_region_and_keys_are_those_of_botocore(
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
    with pytest.raises(StorageError, match=r"'default' gives no endpoint.*absent"):
        open_store("s3://research/run")
    # Both are given: the files do not matter.
    open_store("s3://research/run", storage_options={"endpoint_url": "http://127.0.0.1:9", "region": "eu-west-3"})


def test_without_botocore_the_environment_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
