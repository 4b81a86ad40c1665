"""Every option in the pages of stores is one that opens."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest
from store_servers import make_certificate

from zarrckpt._store import open_store

PAGES = [Path(__file__).parent.parent / "docs" / folder / "stores.md" for folder in ("how-to", "reference")]


class _Named(ast.NodeTransformer):
    """A function of the page becomes its name."""

    def visit_Name(self, node: ast.Name) -> ast.Constant:
        return ast.Constant(node.id)


def calls() -> list[tuple[str, dict[str, Any]]]:
    """(url, storage_options) of every call on the pages."""
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
    """The files that the page names -> what stands for them here."""
    folder = tmp_path_factory.mktemp("files")
    certificate, private = make_certificate()
    (folder / "ca.pem").write_text(certificate)
    account = {
        "private_key": private,
        "private_key_id": "1",
        "client_email": "x@example.com",
        "gcs_base_url": "http://x",
    }
    (folder / "account.json").write_text(json.dumps({"type": "service_account", **account}))
    return {
        "/etc/ssl/our-ca.pem": str(folder / "ca.pem"),
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
        options["credential_provider"] = dict  # any callable: it is asked when the first request is made
    assert open_store(url, storage_options=options).url == url
