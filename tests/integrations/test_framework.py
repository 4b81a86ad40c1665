"""Frameworks that are missing, or of a version that was not tested."""

from __future__ import annotations

import pytest

from zarrckpt.integrations import _framework


@pytest.mark.parametrize(
    ("found", "passes"), [("2.6", True), ("2.6.6", True), ("2.6.0rc1", True), ("2.7.0.dev1", False), ("2.5.9", False)]
)
def test_untested_versions_are_refused_unless_allowed(
    found: str, passes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_framework.metadata, "version", lambda _: found)
    if passes:
        _framework.require("lightning", "2.6", "2.7", "lightning")
        return
    with pytest.raises(ImportError, match=found):
        _framework.require("lightning", "2.6", "2.7", "lightning")
    monkeypatch.setenv(_framework.UNTESTED, "1")
    _framework.require("lightning", "2.6", "2.7", "lightning")


def test_a_missing_framework_is_named_with_the_install_command() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"zarrckpt\[transformers\]"):
        _framework.require("no-such-distribution", "1", "2", "transformers")
