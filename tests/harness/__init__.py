"""Servers, ranks, states and oracles that the tests share."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
"""The folder of the repository."""
GOLDEN = ROOT / "tests" / "golden"
"""Checkpoints that earlier versions wrote."""
