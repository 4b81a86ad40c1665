"""Run a test's script in separate processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def launch(
    script: Path,
    *arguments: str,
    ranks: int,
    timeout: float,
    env: Mapping[str, str] | None = None,
    torchrun: bool | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a script in ``ranks`` processes. ``torchrun`` defaults to True for more than one."""
    command = [sys.executable, str(script), *arguments]
    if ranks > 1 if torchrun is None else torchrun:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
        command[1:1] = [*launcher, "--nproc-per-node", str(ranks)]
    own = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, env={**os.environ, **(env or {}), **own}, capture_output=True, text=True, timeout=timeout
    )


def rows_in(output: str) -> list[dict[str, Any]]:
    """Return the lines of JSON that the processes printed, sorted by rank, in order within a rank."""
    rows = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    return sorted(rows, key=lambda row: row["rank"])
