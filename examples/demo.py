"""The demonstration: train, kill a second training, resume it on other processes, compare, read the checkpoint."""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from findings import Findings
from launch import Event, Training, TrainingFailed
from look_inside import look_inside
from s3_server import s3_server


def demonstrate(args: argparse.Namespace) -> int:
    """Run the demonstration. Return the exit status."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # shows progress through a pipe, too
    with ExitStack() as stack:
        folder = Path(args.dir or stack.enter_context(tempfile.TemporaryDirectory(prefix="zarrckpt-demo-"))).absolute()
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise SystemExit(f"--dir {folder} is not an empty folder: name a new one")
        folder.mkdir(parents=True, exist_ok=True)
        url = str(folder / "run")
        if args.s3:
            # Set in this process: the workers inherit the environment, and zarr and xarray read it at the end.
            os.environ.update(stack.enter_context(s3_server("demo", folder / "s3-server.log")))
            url = "s3://demo/run"
        try:
            return Demo(args, folder, url).run()
        except TrainingFailed as err:
            print(f"\n{err}")
        except KeyboardInterrupt:
            print("\ninterrupted")
        return 1


class Demo:
    """Three training runs, and the comparison of their losses and states."""

    def __init__(self, args: argparse.Namespace, folder: Path, url: str) -> None:
        self.args, self.folder, self.url = args, folder, url
        self.found = Findings()

    def run(self) -> int:
        """Run the four parts of the demonstration, and print the result."""
        args, found, began = self.args, self.found, time.monotonic()
        print(f"1. Train on {args.processes} processes ({_mesh(args.tp)}) without a break, to compare with")
        self.train_uninterrupted()
        how = "saved in the background " if args.background else ""
        print(f"\n2. The same, with a checkpoint {how}every {args.every} steps to {self.url}")
        self.train_and_kill()
        where = f"{args.resume_on} processes ({_mesh(args.resume_tp)})"
        print(f"\n3. Resume on {where}, from zarrckpt.latest({self.url!r})")
        self.resume()
        if not found.resumed:
            raise TrainingFailed("the training was over before it was killed: use more --steps, or a smaller --kill-at")
        print(f"\n4. Look into {found.resumed_from}, without torch")
        found.inside = look_inside(found.resumed_from)
        if found.rank_bytes:
            print("   Bytes written by rank:", ", ".join(f"{rank}: {n:,}" for rank, n in enumerate(found.rank_bytes)))
        self.conclude(time.monotonic() - began)
        if args.json:
            Path(args.json).write_text(json.dumps(found.as_json(), indent=1))
        return 0 if found.continues else 1

    def training(self, name: str, processes: int, tp: int, *more: object) -> Training:
        args = self.args
        options = ["--tp", tp, "--steps", args.steps, "--width", args.width, "--layers", args.layers]
        options += ["--length", args.length, "--batch", args.batch, "--lr", args.lr, *more]
        return Training(processes, list(map(str, options)), self.folder / "logs" / name)

    def saving_options(self) -> list[object]:
        background = ["--async"] if self.args.background else []
        return ["--checkpoints", self.url, "--every", self.args.every, *background]

    def train_uninterrupted(self) -> None:
        lines = Lines(self.args.every)
        with self.training("uninterrupted", self.args.processes, self.args.tp, "--every", 0) as training:
            for event in training.events():
                if event["event"] == "start":
                    text = f"{event['text']:,} bytes of the Python standard library's source"
                    print(f"   {event['parameters']:,} parameters; data: {text}", flush=True)
                elif event["event"] == "step":
                    self.found.uninterrupted[event["step"]] = event["loss"]
                    lines.loss(event)
        lines.end()

    def train_and_kill(self) -> None:
        found, lines = self.found, Lines(self.args.every)
        with self.training("killed", self.args.processes, self.args.tp, *self.saving_options()) as training:
            for event in training.events():
                if event["event"] == "step":
                    found.killed[event["step"]] = event["loss"]
                    lines.loss(event)
                elif event["event"] == "saving":
                    found.states[event["step"]] = event["state"]
                elif event["event"] == "saved":
                    found.saves.append(event)
                    size = f"{event['nbytes'] / 1e6:.1f} MB in {event['objects']} objects"
                    lines.remark(f"{event['url'].rsplit('/', 1)[1]} saved: {size}, {event['seconds']:.1f} s")
                if found.saves and max(found.killed) >= self.args.kill_at:
                    training.kill()
                    lines.remark(f"all {self.args.processes} processes killed (SIGKILL)")
                    return
        raise TrainingFailed("the training was over before it was killed: use more --steps, or a smaller --kill-at")

    def resume(self) -> None:
        found = self.found
        # With another seed, all equal state must be from the checkpoint.
        options = [*self.saving_options(), "--resume", "--seed", 1]
        with self.training("resumed", self.args.resume_on, self.args.resume_tp, *options) as training:
            for event in training.events():
                if event["event"] == "start":
                    self.check_start(event)
                    print(f"   step    loss on {self.args.resume_on}    uninterrupted   relative difference")
                elif event["event"] == "step":
                    step = event["step"]
                    found.resumed[step] = event["loss"]
                    both = f"{event['loss']:.7f}    {found.uninterrupted[step]:.7f}"
                    print(f"   {step:4d}    {both}   {found.difference(step):15.1e}", flush=True)

    def check_start(self, event: Event) -> None:
        """Whether the resumed run began with exactly the saved state."""
        if not event["resumed_from"]:
            raise TrainingFailed(f"zarrckpt.latest found no checkpoint below {self.url}")
        found = self.found
        found.resume(event["resumed_from"], event["state"])
        if max(found.states) > found.resumed_step:
            print(f"   The save of step {max(found.states)} was killed before its commit: it is passed over.")
        exactly = "bit for bit as saved" if found.restored_exactly else "NOT what was saved"
        print(f"   It is {found.resumed_from}; all tensors of model and optimizer: {exactly}")

    def conclude(self, seconds: float) -> None:
        args, found, first = self.args, self.found, min(self.found.resumed)
        same = "identical" if found.repeatable else "NOT identical"
        exactly = "exactly what was saved" if found.restored_exactly else "SOMETHING ELSE THAN WAS SAVED"
        continues = "continues where it was" if found.continues else "DOES NOT CONTINUE"
        kept = f"Everything is kept in {self.folder}." if args.dir else "Use --dir DIR to keep everything."
        losses = "Its losses are identical to those of run 1."
        if found.largest_difference:
            losses = (
                f"Its loss differs by\n   {found.difference(first):.0e} at step {first} and by "
                f"{found.largest_difference:.0e} at most, relative to run 1."
            )
        if found.continues and found.largest_difference:
            losses += " That is fp32 rounding: another\n   number of processes adds up the same terms in another order."
        print(
            f"\nWhat was seen\n"
            f"   Runs 1 and 2, both on {args.processes} processes: losses {same}.\n"
            f"   Run 3, on {args.resume_on} processes, began with {exactly}. {losses}\n"
            f"   The loss curve {continues}.\n"
            f"   {kept} This took {seconds:.0f} s."
        )


def _mesh(tp: int) -> str:
    return f"FSDP2 x TP {tp}" if tp > 1 else "FSDP2"


class Lines:
    """Losses, several on a line, printed when they arrive."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.shown = 0

    def loss(self, event: Event) -> None:
        if self.shown == self.width:
            self.end()
        if not self.shown:
            print(f"   from step {event['step']:3d}  loss", end="")
        print(f" {event['loss']:.4f}", end="", flush=True)
        self.shown += 1

    def remark(self, text: str) -> None:
        print(f"{' ' if self.shown else '   '}| {text}", end="")
        self.end()

    def end(self) -> None:
        print(flush=True)
        self.shown = 0
