"""Start the training under torchrun, follow its reports, kill it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

Event = dict[str, Any]


class TrainingFailed(Exception):
    """The training ended with an error. The message has the last output of its processes."""


class Training:
    """One run of ``train_fsdp2.py --worker`` on several processes. Leaving the ``with`` block ends all of them."""

    def __init__(self, processes: int, options: list[str], logs: Path) -> None:
        logs.mkdir(parents=True)
        self.logs, self.records, self.output = logs, logs / "records.jsonl", logs / "torchrun.log"
        self.pids: list[int] = []
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
        torchrun += ["--nproc-per-node", str(processes), "--redirects", "3", "--log-dir", str(logs / "ranks")]
        worker = [str(Path(__file__).with_name("train_fsdp2.py")), "--worker", "--records", str(self.records)]
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, *torchrun, *worker, *options],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )

    def events(self) -> Iterator[Event]:
        """Yield rank 0's records until the training ends. Raise TrainingFailed if it ends by an error."""
        read = 0
        while True:
            ended = self.process.poll() is not None
            lines = self.records.read_text().splitlines(keepends=True) if self.records.exists() else []
            for line in lines[read:]:
                if line.endswith("\n"):
                    read += 1
                    event: Event = json.loads(line)
                    self.pids = event.get("pids", self.pids)
                    yield event
            if ended:
                break
            time.sleep(0.03)
        if self.process.returncode:
            raise TrainingFailed(self._failure())

    def kill(self) -> None:
        """End all workers at once with SIGKILL, like a machine that fails."""
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def _failure(self) -> str:
        """Return the last output of the first rank with a traceback, otherwise of torchrun."""
        ranks = sorted(self.logs.glob("ranks/**/stderr.log"))
        told = next((path for path in ranks if "Traceback" in path.read_text(errors="replace")), self.output)
        lines = told.read_text(errors="replace").splitlines()[-30:]
        return "\n".join([f"the training ended with exit status {self.process.returncode}; from {told}:", *lines])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.terminate()  # if the workers are not known yet, torchrun ends them
            self.kill()
