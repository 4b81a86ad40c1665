"""The Job for Kubernetes and the batch script for Slurm, run here with the commands and signals that they would get."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from harness import ROOT

EXAMPLES = ROOT / "examples"
JOB = EXAMPLES / "kubernetes" / "job.yaml"
SCRIPT = EXAMPLES / "slurm" / "train.sbatch"
TORCHRUN = f'exec "{sys.executable}" -m torch.distributed.run "$@"'
# One node that looks for itself under another address than loopback would need a name in DNS.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PET_LOCAL_ADDR": "127.0.0.1"}


@contextmanager
def started(command: list[str], log: Path, **arguments: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command in a process group, which is killed at the end. Its output is appended to ``log``."""
    with log.open("ab") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True, **arguments)
    try:
        yield process
    finally:
        for pid in _descendants(process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


def _descendants(pid: int) -> list[int]:
    """Return a process and those that it has started. torchrun makes a session for each of its workers."""
    children = Path(f"/proc/{pid}/task/{pid}/children")
    found = children.read_text().split() if children.exists() else []
    return [pid, *(below for child in found for below in _descendants(int(child)))]


def wait_for(pattern: str, *logs: Path) -> str:
    """Wait until one of the logs has a match. Return the match."""
    for _ in range(6000):
        texts = [log.read_text() for log in logs]
        found = next(filter(None, (re.search(pattern, text) for text in texts)), None)
        if found:
            return found[0]
        time.sleep(0.02)
    raise AssertionError("\n".join([f"{pattern!r} is not in the logs:", *texts]))


def free_port() -> int:
    """Return a port in the range of the batch script."""
    for port in range(20000 + os.getpid() % 9000, 30000):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port
    raise AssertionError("no port is free")


def script_folder(folder: Path, **programs: str) -> dict[str, str]:
    """Write shell scripts, by their names. Return the environment in which they are found."""
    for name, text in {"torchrun": TORCHRUN, **programs}.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    return {**os.environ, **ENVIRONMENT, "PATH": f"{folder}:{os.environ['PATH']}"}


def test_the_pages_quote_the_files() -> None:
    for page, language, file in (("kubernetes.md", "yaml", JOB), ("slurm.md", "bash", SCRIPT)):
        (quoted,) = re.findall(rf"```{language}\n(.*?)```", (ROOT / "docs" / "how-to" / page).read_text(), re.DOTALL)
        assert set(quoted.splitlines()) <= set(file.read_text().splitlines())


# -- Kubernetes


def read_job() -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the Job and the specification of its pods. Check that they belong to the other objects of the file."""
    account, service, job = yaml.safe_load_all(JOB.read_text())
    pods = job["spec"]["template"]["spec"]
    assert [item["kind"] for item in (account, service, job)] == ["ServiceAccount", "Service", "Job"]
    assert pods["serviceAccountName"] == account["metadata"]["name"]
    assert pods["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": job["metadata"]["name"]}
    assert service["spec"]["clusterIP"] == "None"
    return job, pods


def variables(pods: dict[str, Any]) -> dict[str, str]:
    """Return the environment variables of the container."""
    return {item["name"]: item["value"] for item in pods["containers"][0]["env"]}


def test_the_grace_periods_of_the_job_contain_each_other() -> None:
    _, pods = read_job()
    torchrun = variables(pods)["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]
    (grace,) = [item.partition("=")[2] for item in pods["containers"][0]["command"] if item.startswith("--grace=")]
    assert 25 < int(grace) < int(torchrun) < pods["terminationGracePeriodSeconds"]


def test_a_preempted_pod_saves_and_all_pods_resume(tmp_path: Path) -> None:
    """One pod gets SIGTERM, as from the kubelet. The other one waits for the pod that replaces it."""
    job, pods = read_job()
    command = pods["containers"][0]["command"]
    nodes = job["spec"]["completions"]
    assert nodes == job["spec"]["parallelism"] == 2 and f"--nnodes={nodes}" in command
    name = f"{job['metadata']['name']}-0.{pods['subdomain']}"
    changes = {
        "torchrun": str(tmp_path / "torchrun"),
        "--nproc-per-node=8": "--nproc-per-node=1",
        f"--rdzv-endpoint={name}:29500": f"--rdzv-endpoint=localhost:{free_port()}",
        "s3://bucket/run": str(tmp_path / "run"),
    }
    assert changes.keys() < set(command)
    command = [*(changes.get(item, item) for item in command), "--steps=1000000"]
    # torchrun notices after 3 such intervals that the pod has gone, after 15 s by default. Names show it which pod is
    # the host of the rendezvous, but here both have the same name.
    conf = "keep_alive_interval=1,is_host="
    environment = script_folder(tmp_path) | variables(pods)
    host, other = (environment | {"PET_RDZV_CONF": f"{conf}{value}"} for value in ("true", "false"))
    logs = [tmp_path / f"pod-{index}.log" for index in range(nodes)]
    with started(command, logs[0], cwd=EXAMPLES, env=host) as first:
        with started(command, logs[1], cwd=EXAMPLES, env=other) as second:
            wait_for("saves step 20,", *logs)
            second.send_signal(signal.SIGTERM)
            assert second.wait(120) != 0, logs[1].read_text()  # with 0, the pod would count as finished
        step = wait_for(r"step \d+ is saved", *logs).split()[1]
        with started(command, logs[1], cwd=EXAMPLES, env=other):
            wait_for(f"goes on from step {step}\n", *logs)
        assert first.poll() is None


# -- Slurm

SCONTROL = """
case $1 in
    show) [ "$2" = hostnames ] && echo 127.0.0.1 || echo "   PreemptEligibleTime=2026-11-26T22:33:13 $PREEMPTED" ;;
    requeue) echo "requeue $2" >&2; kill -KILL $PPID ;;
esac"""


def test_the_warning_of_slurm_leaves_time_for_the_save() -> None:
    text = SCRIPT.read_text()
    (warned,) = re.findall(r"^#SBATCH --signal=B:USR1@(\d+)$", text, re.MULTILINE)
    (torchrun,) = re.findall(r"^export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=(\d+)", text, re.MULTILINE)
    (grace,) = re.findall(r"--grace (\d+)", text)
    assert 25 < int(grace) < int(torchrun) < int(warned)
    assert {"#SBATCH --requeue", "#SBATCH --open-mode=append"} <= set(text.splitlines())


def test_a_job_of_slurm_requeues_itself_and_resumes(tmp_path: Path) -> None:
    """After the warning before the time limit, on one node. Slurm is replaced by stubs."""
    environment = script_folder(tmp_path, srun='exec "$@"', scontrol=SCONTROL) | {
        "SLURM_JOB_ID": str(free_port() - 20000),
        "SLURM_JOB_NODELIST": "n1",
        "SLURM_JOB_NUM_NODES": "1",
    }
    command = ["bash", str(SCRIPT), str(tmp_path / "run"), "--steps", "1000000"]
    log = tmp_path / "train.log"
    with started(command, log, cwd=EXAMPLES, env=environment) as job:
        wait_for("saves step 20,", log)
        job.send_signal(signal.SIGUSR1)
        assert job.wait(120) == -signal.SIGKILL, log.read_text()
    step = wait_for(r"step \d+ is saved", log).split()[1]
    wait_for(f"requeue {environment['SLURM_JOB_ID']}\n", log)
    with started(command, log, cwd=EXAMPLES, env=environment):
        wait_for(f"goes on from step {step}\n", log)


def test_only_a_preempted_job_of_slurm_is_requeued_after_a_failure(tmp_path: Path) -> None:
    for preempted, status in (("PreemptTime=2026-11-26T22:33:30", -signal.SIGKILL), ("PreemptTime=None", 3)):
        environment = script_folder(tmp_path, srun="exit 3", scontrol=SCONTROL)
        environment |= {"SLURM_JOB_ID": "7", "PREEMPTED": preempted}
        with started(["bash", str(SCRIPT)], tmp_path / "log", env=environment) as job:
            assert job.wait(120) == status
