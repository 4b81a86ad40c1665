"""The fixtures of the whole test suite, for the tests that need a framework each."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

pytest_plugins = ["conftest_shared"]
