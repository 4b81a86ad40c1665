"""The workflows of GitHub in ``.github`` call targets of the Makefile, and fixed versions of actions."""

from __future__ import annotations

import re

import pytest
from harness import ROOT

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TARGETS = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


@pytest.mark.parametrize("workflow", [file.read_text() for file in WORKFLOWS], ids=[file.name for file in WORKFLOWS])
def test_workflows_call_existing_targets_and_fixed_actions(workflow: str) -> None:
    called = set(re.findall(r"\bmake ([\w-]+)$|\btarget: ([\w-]+)", workflow, re.MULTILINE))
    assert called and {first or second for first, second in called} <= TARGETS
    actions = re.findall(r"uses: *(.*)", workflow)
    assert [action for action in actions if not re.fullmatch(r"[\w/-]+@[0-9a-f]{40}  # v[\d.]+", action)] == []
