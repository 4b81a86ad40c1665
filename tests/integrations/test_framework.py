"""Frameworks that are missing, or of a version that was not tested."""

from __future__ import annotations

import re
import tomllib

import pytest
from harness import ROOT

from zarrckpt.integrations import _framework


@pytest.mark.parametrize(
    ("found", "passes"), [("2.6", True), ("2.6.6", True), ("2.6.0rc1", True), ("2.7.0.dev1", False), ("2.5.9", False)]
)
def test_untested_versions_are_refused_unless_allowed(
    found: str, passes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_framework.metadata, "version", lambda _: found)
    monkeypatch.setitem(_framework.VERSIONS, "lightning", ("2.6", "2.7"))
    if passes:
        _framework.require("lightning")
        return
    with pytest.raises(ImportError, match=found):
        _framework.require("lightning")
    monkeypatch.setenv(_framework.UNTESTED, "1")
    _framework.require("lightning")


def test_a_missing_framework_is_named_with_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(_framework.VERSIONS, "no-such-distribution", ("1", "2"))
    with pytest.raises(ModuleNotFoundError, match=r"zarrckpt\[no-such-distribution\]"):
        _framework.require("no-such-distribution")


def test_modules_extras_and_docs_accept_the_same_versions() -> None:
    accepted = {f"{name}>={first},<{before}" for name, (first, before) in _framework.VERSIONS.items()}
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = {each for name in _framework.VERSIONS for each in extras[name]}
    assert {each for each in named if re.split("[^a-z]", each)[0] in _framework.VERSIONS} == accepted
    page = (ROOT / "docs/reference/api.md").read_text()
    assert set(re.findall("`([a-z]+>=[0-9.]+,<[0-9.]+)`", page)) == accepted
