"""The checkpoint workload of MLPerf Storage, run by DLIO: zarrckpt against DLIO's own classes for PyTorch.

A Llama 3 8B with all widths an eighth and 16 layers per GB, ZeRO stage 3 on two MPI ranks: 2 bytes of model and 12 of
optimizer per parameter. The times are those of DLIO's ``summary.json``: for each run the mean of three saves, then of
three loads from the file cache. On S3, DLIO's own class is s3torchconnector with ``torch.save``. No extra of zarrckpt
installs DLIO and an MPI: ``docs/explanation/speed.md`` has the commands.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import ssl
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

from harness.s3_server import Served, served

from benchmarks.measure import Options, alternate, fresh, trust, warm
from benchmarks.results import Results, Speed, faster

RANKS = 2
CHECKPOINTS = 3
BUCKET = "bench"
OURS, OURS_QUICK = "zarrckpt", "zarrckpt, durable=False"
DLIO_SYNCED, DLIO_QUICK = "DLIO torch.save, synced", "DLIO torch.save"
DLIO_S3 = "DLIO torch.save to s3torchconnector"
CLASSES = {
    OURS: "benchmarks.dlio_checkpointing.ZarrCheckpointing",
    OURS_QUICK: "benchmarks.dlio_checkpointing.ZarrCheckpointing",
    DLIO_SYNCED: "benchmarks.dlio_checkpointing.SyncedPyTorchCheckpointing",
}
"""Contender -> its class. The others are DLIO's default classes."""
PAIRS = {
    f"DLIO, Llama, local, {RANKS} processes": ((OURS, DLIO_SYNCED), (OURS_QUICK, DLIO_QUICK)),
    f"DLIO, Llama, S3 over TLS, {RANKS} processes": ((OURS, DLIO_S3),),
}
"""Group -> pairs of contenders that sync alike."""


def run(options: Options) -> Results:
    local, remote = PAIRS
    found = fresh(_measure, options, local, None)
    with served(tls=True) as server:
        found.add(fresh(_measure, options, remote, server, env=server.environment))
    return found


def _measure(options: Options, group: str, server: Served | None) -> Results:
    contenders = [name for pair in PAIRS[group] for name in pair]
    times: dict[str, list[dict[str, float]]] = {}
    # DLIO's client for S3 trusts only the system's authorities. It lists the checkpoints of every contender.
    if server is not None and not trust(str(server.authority)):
        return Results()
    if importlib.util.find_spec("dlio_benchmark") and _mpiexec():
        calls = {name: _contender(options, name, server) for name in contenders}
        times = alternate(calls, options.rounds if server is None else min(options.rounds, 3))
    speeds = []
    for name in contenders:
        found = times.get(name, [])
        size = int(found[0]["checkpoint_size_GB"] * 2**30) if found else 0
        kind = "ours" if name in (OURS, OURS_QUICK) else "peer"
        saves, loads = (
            [one[f"{which}_checkpoint_duration_mean_seconds"] for one in found] for which in ("save", "load")
        )
        speeds.append(Speed(group, name, kind, size, saves, loads))
    return Results(speeds, [faster(speeds, *pair, which, 1.0) for pair in PAIRS[group] for which in ("save", "load")])


def _contender(options: Options, name: str, server: Served | None) -> Callable[[int], dict[str, float]]:
    """Return a function that runs DLIO once with a class, and returns the metrics of its summary."""

    def once(number: int) -> dict[str, float]:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            output = f"{folder}/output"
            url = f"{folder}/checkpoints" if server is None else f"s3://{BUCKET}/checkpoints"
            settings = _settings(options, name, url) | {"output.folder": output}
            if server is not None:
                settings |= _s3_settings(server)
                _let_dlio_count(server, url)
            given = [f"++workload.{key}={value}" for key, value in settings.items()]
            command = [str(_mpiexec()), "-n", str(RANKS), sys.executable, "-m", "dlio_benchmark.main"]
            command += ["workload=llama_8b_zero3", *given, f"hydra.run.dir={output}"]
            root = str(Path(__file__).resolve().parent.parent)
            paths = {"PYTHONPATH": f"{root}:{os.environ.get('PYTHONPATH', '')}", "OMP_NUM_THREADS": "1"}
            os.sync()  # no contender waits for the writes of another one
            warm(int((CHECKPOINTS + 2) * 1e9 * options.gigabytes))
            done = subprocess.run(command, env=os.environ | paths, capture_output=True, text=True)
            if done.returncode != 0:
                raise RuntimeError(f"DLIO failed with {name}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}")
            if server is not None:
                server.clear(BUCKET)
            found: dict[str, float] = json.loads(Path(f"{output}/summary.json").read_text())["metric"]
            return found

    return once


def _mpiexec() -> str | None:
    """Return the path of MPI's launcher, first of all that of the packages mpich and openmpi in this environment."""
    return shutil.which("mpiexec", path=f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}")


def _settings(options: Options, name: str, url: str) -> dict[str, object]:
    """Return DLIO's settings by name, below those of its workload ``llama_8b_zero3``."""
    widths = {"vocab_size": 16032, "hidden_size": 512, "ffn_hidden_size": 1792}
    heads = {"num_attention_heads": 8, "num_kv_heads": 2}
    checkpoint = {
        "checkpoint_folder": url,
        "num_checkpoints_write": CHECKPOINTS,
        "num_checkpoints_read": CHECKPOINTS,
        "time_between_checkpoints": 0,
        "rank_sync": True,  # the times are those until the last rank has finished
        "fsync": name in (OURS, DLIO_SYNCED),
    }
    if name in CLASSES:
        checkpoint["checkpoint_mechanism_classname"] = CLASSES[name]
    return {
        "model.num_layers": max(1, round(16 * options.gigabytes)),
        **{f"model.transformer.{key}": value for key, value in (widths | heads).items()},
        **{f"checkpoint.{key}": value for key, value in checkpoint.items()},
    }


def _s3_settings(server: Served) -> dict[str, str]:
    given = server.environment
    return {
        "storage.storage_type": "s3",
        "storage.storage_root": BUCKET,
        "storage.storage_options.endpoint_url": server.endpoint,
        "storage.storage_options.access_key_id": given["AWS_ACCESS_KEY_ID"],
        "storage.storage_options.secret_access_key": given["AWS_SECRET_ACCESS_KEY"],
        "storage.storage_options.region": given["AWS_REGION"],
        "dataset.format": "npz",
    }


def _let_dlio_count(server: Served, url: str) -> None:
    """Put an empty object for each checkpoint where DLIO counts them before it loads: below the whole url as a key."""
    context = ssl.create_default_context(cafile=server.authority)
    for number in range(CHECKPOINTS):
        target = f"{server.endpoint}/{BUCKET}/{quote(f'{url}/{number}', safe='')}"
        urllib.request.urlopen(urllib.request.Request(target, b"", method="PUT"), context=context).close()
