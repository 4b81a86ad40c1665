"""Send real signals to real trainings under torchrun at random moments, and resume each on another number of ranks.

python tools/signal_campaign.py --signals 300            # a temporary folder, and an S3 server started for the campaign

Each job trains a sharded tensor whose values show the step, with a :class:`zarrckpt.CheckpointManager` that saves and
deletes. It gets several signals. Each has an episode with a separate manager. A signal goes to one rank, to all, or two
come at a time, during the restore, a save or a deletion. The last one ends the job: SIGTERM to torchrun itself, or
SIGKILL to one rank or all. After each signal all ranks must have stopped at one step, which then is the newest
checkpoint. After a kill the newest must be the last that was committed, or a later one. The next episode must begin
there, bit for bit.

The command prints a line for each job, and exits with 1 if a check failed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

sys.path.extend(str(Path(__file__).resolve().parents[1] / name) for name in ("", "tests", "tools"))

from harness import ROOT
from harness.s3_server import served

import zarrckpt

ROWS, COLUMNS = 62, 17
KEEP = zarrckpt.Keep(newest=2, best=1, metric="loss", every_steps=500)
SAVE_EVERY = 15
SIGNALS = ("SIGTERM", "SIGUSR1")
PATIENCE = 60.0
"""Seconds after which a case counts as a hang."""

KINDS = ("one", "all", "twice", "two", "one", "all")
ENDS = ("agent", "kill", "kill all")


def worker(run: str, folder: Path, background: bool) -> None:
    """Run one rank of a job: train until it is pre-empted, repeatedly, until the folder has the file ``end``."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    events = open(folder / f"events-{rank}", "a", buffering=1)  # noqa: SIM115 - open as long as the process

    def say(what: str, **more: Any) -> None:
        events.write(json.dumps({"what": what, "rank": rank, **more}) + "\n")

    def saved(step: int, future: Any) -> None:
        if future.exception() is None:
            say("saved", step=step)

    whole = torch.arange(ROWS * COLUMNS, dtype=torch.float64).reshape(ROWS, COLUMNS)
    mesh = init_device_mesh("cpu", (size,))
    options = zarrckpt.SaveOptions(timeout=PATIENCE / 2, durable=False)
    for name in SIGNALS:  # the second of two signals may arrive after its manager was closed
        signal.signal(signal.Signals[name], signal.SIG_IGN)
    episode = 0
    while not (folder / "end").exists():
        episode += 1
        weight = distribute_tensor(torch.zeros_like(whole), mesh, [Shard(0)])
        drawn = zarrckpt.PerRank({"drawn": torch.zeros(3)}, new_ranks="wrap")
        state: dict[str, Any] = {"w": weight, "step": 0, "own": drawn}
        manager = zarrckpt.CheckpointManager(
            run,
            keep=KEEP,
            save_every=SAVE_EVERY,
            signals=("SIGTERM", "SIGUSR1"),
            background=background,
            options=options,
        )
        say("made", episode=episode, pid=os.getpid())
        begin = manager.restore(state)
        expected = whole + begin if begin is not None else torch.zeros_like(whole)
        right = torch.equal(weight.to_local(), distribute_tensor(expected, mesh, [Shard(0)]).to_local())
        say("began", episode=episode, step=begin, right=right and state["step"] == (begin or 0))
        if begin is None:
            weight.to_local().copy_(distribute_tensor(whole, mesh, [Shard(0)]).to_local())
        step = begin or 0
        while not manager.preempted:
            step += 1
            if step % 3 == 0:
                dist.all_reduce(torch.ones(4))
            time.sleep(random.random() * 0.003)
            weight.to_local().add_(1)
            state["step"] = step
            future = manager.step(step, state, metrics={"loss": abs(step % 70 - 30)})
            if future is not None and rank == 0:
                future.add_done_callback(partial(saved, step))
        manager.close()
        say("stopped", episode=episode, step=step)
        while not any((folder / name).exists() for name in (f"looked-{episode}", "end")):
            time.sleep(0.01)
    dist.barrier()
    dist.destroy_process_group()


@dataclass
class Campaign:
    """Jobs of one run, one after the other."""

    run: str
    folder: Path
    random: random.Random
    signals: int = 0
    jobs: int = 0
    wrongs: list[str] = field(default_factory=list)
    newest: int | None = None
    """The step of the newest checkpoint that must be found."""

    def job(self, episodes: int) -> None:
        """Run one job under torchrun, with a signal in each episode. The last one ends it."""
        self.jobs += 1
        size = self.random.randint(1, 4)
        where = self.folder / f"job-{self.jobs}"
        where.mkdir()
        background = self.random.random() < 0.8
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
        command += ["--nproc-per-node", str(size), str(Path(__file__).resolve())]
        command += ["--worker", self.run, "--folder", str(where)] + (["--background"] if background else [])
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}"}
        with open(where / "log", "w") as log:
            agent = subprocess.Popen(command, stdout=log, stderr=log, cwd=ROOT, env=environment)
        try:
            for episode in range(1, episodes + 1):
                kind = self.random.choice(ENDS if episode == episodes else KINDS)
                if not self._episode(agent, where, size, episode, kind):
                    break
            agent.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self._wrong(where, "torchrun did not end")
        finally:
            agent.kill()
        print(f"job {self.jobs}: {size} ranks, {'background' if background else 'foreground'}, newest {self.newest}")

    def _episode(self, agent: subprocess.Popen[bytes], where: Path, size: int, episode: int, kind: str) -> bool:
        made = self._wait(agent, where, size, "made", episode)
        if not made:
            return False
        # From the beginning of the restore on, or far into the training.
        time.sleep(self.random.random() ** 2 * 1.5)
        began = self._wait(agent, where, size, "began", episode) if self.random.random() < 0.7 else {}
        pids = [made[rank]["pid"] for rank in range(size)]
        if kind in ENDS:
            (where / "end").touch()
        self._send(agent, pids, kind)
        self.signals += 1
        if kind in ("kill", "kill all"):
            agent.wait(PATIENCE)
            self._look(where, exactly=False)
            return False
        stopped = self._wait(agent, where, size, "stopped", episode)
        began = began or self._wait(agent, where, size, "began", episode)
        if not stopped or not began:
            return False
        steps = {event["step"] for event in stopped.values()}
        if {event["step"] for event in began.values()} != {self.newest} or not all(e["right"] for e in began.values()):
            self._wrong(where, f"episode {episode} began at {began}, not at {self.newest}")
        if len(steps) != 1:
            self._wrong(where, f"episode {episode}: the ranks stopped at {steps}")
        self.newest = max(steps)
        self._look(where, exactly=True)
        (where / f"looked-{episode}").touch()
        return True

    def _send(self, agent: subprocess.Popen[bytes], pids: list[int], kind: str) -> None:
        number = self.random.choice((signal.SIGTERM, signal.SIGUSR1))
        one = self.random.choice(pids)
        with contextlib.suppress(ProcessLookupError):
            if kind == "agent":
                agent.send_signal(signal.SIGTERM)
            elif kind == "kill":
                os.kill(one, signal.SIGKILL)
            elif kind == "kill all":
                for pid in (agent.pid, *pids):
                    os.kill(pid, signal.SIGKILL)
            else:
                to = {"one": [one], "all": pids, "twice": [one, one], "two": [one, self.random.choice(pids)]}[kind]
                for pid in to:
                    os.kill(pid, number)
                    time.sleep(self.random.random() * 0.02)
                    number = number if kind != "two" else signal.SIGUSR1

    def _look(self, where: Path, exactly: bool) -> None:
        """Compare the stored checkpoints with the expected ones."""
        found = zarrckpt.latest(self.run)
        step = None if found is None else zarrckpt.open(found).metadata["step"]
        committed = max((event["step"] for event in self._events(where) if event["what"] == "saved"), default=None)
        least = max((known for known in (self.newest, committed) if known is not None), default=None)
        if step != self.newest if exactly else (least is not None and (step is None or step < least)):
            self._wrong(where, f"the newest checkpoint is {step}, expected {self.newest if exactly else least}")
        if found is not None and not zarrckpt.open(found).verify():
            self._wrong(where, f"{found} is damaged")
        self.newest = step

    def _events(self, where: Path) -> list[dict[str, Any]]:
        lines = [line for path in sorted(where.glob("events-*")) for line in path.read_text().splitlines()]
        found = []
        for line in lines:
            with contextlib.suppress(ValueError):  # cut short by a kill
                found.append(json.loads(line))
        return found

    def _wait(
        self, agent: subprocess.Popen[bytes], where: Path, size: int, what: str, episode: int
    ) -> dict[int, dict[str, Any]]:
        """Return each rank's event of an episode, or {} if the job ends before that or hangs."""
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until:
            ended = agent.poll() is not None
            found = {e["rank"]: e for e in self._events(where) if e["what"] == what and e.get("episode") == episode}
            if len(found) == size:
                return found
            if ended:
                break
            time.sleep(0.02)
        self._wrong(where, f"episode {episode}: no {what!r} of all ranks, only {found}")
        return {}

    def _wrong(self, where: Path, text: str) -> None:
        self.wrongs.append(f"{where}: {text}\n{(where / 'log').read_text()[-6000:]}")
        print(self.wrongs[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--signals", type=int, default=300, help="number of signals (default 300)")
    parser.add_argument("--episodes", type=int, default=10, help="signals of each job (default 10)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--background", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args.worker, args.folder, args.background)
        return
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        os.environ |= stack.enter_context(served()).environment
        campaigns = []
        for place, run in enumerate((f"{folder}/run", "s3://bucket/signals")):
            (folder / str(place)).mkdir()
            campaigns.append(Campaign(run, folder / str(place), random.Random(args.seed + place)))
        while sum(campaign.signals for campaign in campaigns) < args.signals:
            for campaign in campaigns:
                campaign.job(args.episodes)
                if campaign.wrongs or sum(each.signals for each in campaigns) >= args.signals:
                    break
            if any(campaign.wrongs for campaign in campaigns):
                break
    wrongs = [wrong for campaign in campaigns for wrong in campaign.wrongs]
    signals, jobs = (sum(getattr(campaign, name) for campaign in campaigns) for name in ("signals", "jobs"))
    print(f"{signals} signals in {jobs} jobs, {len(wrongs)} wrong")
    sys.exit(bool(wrongs))


if __name__ == "__main__":
    main()
