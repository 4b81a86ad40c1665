"""Conversions need memory for the bytes under way, not for the model (except files of ``torch.save``)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

MIB = 1 << 20
LARGEST_BYTES = 120 * MIB
LIMIT_BYTES = 110 * MIB

# For exports, the peak is the memory in use by the process. For imports, it is the private memory after each chunk: the
# system can reclaim the pages of the mapped files. Each kind of conversion runs once with a tiny state before it is
# measured, so that its imports are made.
PROGRAM = """
import json, sys
from pathlib import Path
import torch
import zarrckpt

folder, nbytes = Path(sys.argv[1]), int(sys.argv[2])
SAVING = zarrckpt.SaveOptions(max_chunk_bytes=16 << 20, durable=False)

def status(name):
    return next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith(name))

def convert(size):
    ckpt = zarrckpt.open(folder / size)
    less = {"max_inflight_bytes": 48 << 20}
    yield "to dcp", lambda: zarrckpt.to_dcp(ckpt, folder / f"{size}.dcp", **less)
    yield "to safetensors", lambda: zarrckpt.to_safetensors(ckpt, folder / f"{size}.safetensors", **less)
    zarrckpt.to_torch_save(ckpt, folder / f"{size}.pt")
    for kind in ("pt", "dcp", "safetensors"):
        source = folder / f"{size}.{kind}"
        yield f"from {kind}", lambda s=source: zarrckpt.import_checkpoint(s, f"{s}.back", progress=note, options=SAVING)

private = []

def note(done, total):
    private.append(status("RssAnon"))

for size, count in (("small", 1 << 10), ("large", nbytes // 4)):
    # One tensor alone is larger than what may be used.
    state = {"a": torch.zeros(count), "b": [torch.zeros(count // 64, 4), torch.zeros(4, count // 128, 2)]}
    zarrckpt.save(state, folder / size, options=SAVING)
    del state
    peaks = {}
    for name, run in convert(size):
        Path("/proc/self/clear_refs").write_text("5")  # begins a new peak
        private[:] = [status("RssAnon")]
        before = status("VmRSS")
        run()
        peaks[name] = max(private) - private[0] if len(private) > 1 else status("VmHWM") - before
        if name.startswith("from"):
            report = zarrckpt.open(folder / f"{size}.{name[5:]}.back")
            assert report.tensors.nbytes == zarrckpt.open(folder / size).tensors.nbytes
print(json.dumps(peaks))
"""


def test_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, tmp_path, str(LARGEST_BYTES)]
    # Memory is returned to the system as soon as it is free, so that the peak is the memory that was needed.
    env = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "1000000"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    peaks = json.loads(done.stdout)
    assert len(peaks) == 5
    assert {name: peak // MIB for name, peak in peaks.items() if peak > LIMIT_BYTES} == {}
