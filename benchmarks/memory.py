"""Peak memory beyond the state: the kernel's high-water mark of a fresh process, for bounds that the user sets."""

from __future__ import annotations

import ctypes
import gc
import tempfile
import warnings
from collections.abc import Callable

from harness.s3_server import served

from benchmarks.measure import Options, fresh
from benchmarks.results import Figure, Results

BOUNDS = (64 << 20, 512 << 20)
MIB = 1 << 20
CONNECTIONS = 32 * MIB
"""Additional memory of 64 threads and connections to S3, independent of the bound."""


def run(options: Options) -> Results:
    found = Results()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder, served() as server:
        for place, base in (("local files", folder), ("S3", "s3://bench")):
            for bound in BOUNDS:
                peaks = fresh(_peaks, options, base, bound, env=server.environment)
                for which, peak in zip(("save", "load"), peaks, strict=True):
                    what = f"{place}, {which}, max_inflight_bytes of {bound // MIB} MiB"
                    goal = 1.1 * bound + (CONNECTIONS if place == "S3" else 0)
                    figure = Figure("memory beyond the state", what, peak / MIB, "MiB", goal / MIB, most=True)
                    found.figures.append(figure)
            dcp = fresh(_dcp_peaks, options, f"{base}/dcp", env=server.environment)
            for which, peak in zip(("save", "load"), dcp, strict=True):
                name = "DCP FileSystem" if place == "local files" else "DCP + s3fs"
                found.figures.append(Figure("memory beyond the state", f"{place}, {which}, {name}", peak / MIB, "MiB"))
    return found


def _peaks(options: Options, base: str, bound: int) -> tuple[int, int]:
    from benchmarks.peers import ours

    save, load = ours(durable=True, max_inflight_bytes=bound)
    return _measure(options, f"{base}/{bound}", save, load)


def _dcp_peaks(options: Options, path: str) -> tuple[int, int]:
    from benchmarks import peers

    if path.startswith("s3:"):
        return _measure(options, path, peers.fsspec_save, peers.fsspec_load)
    return _measure(options, path, peers.dcp_save, peers.dcp_load)


def _measure(options: Options, url: str, save: Callable[..., object], load: Callable[..., object]) -> tuple[int, int]:
    from benchmarks import state as states

    warnings.filterwarnings("ignore")
    state = states.make_state(options.gigabytes, options.dtype)
    small = states.make_state(0.001)
    save(small, f"{url}-small")  # code and clients are loaded once, and are not counted
    load(states.like(small), f"{url}-small")
    saved = _peak(lambda: save(state, f"{url}-large"))
    states.clear(state)  # from here on it is the target
    return saved, _peak(lambda: load(state, f"{url}-large"))


def _peak(call: Callable[[], object]) -> int:
    """Return the bytes of memory that a call needs beyond those of the process before."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # reset the high-water mark
    before = _status("VmRSS")
    call()
    return _status("VmHWM") - before


def _status(name: str) -> int:
    with open("/proc/self/status") as file:
        for line in file:
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) << 10
    raise RuntimeError(f"/proc/self/status has no line {name}")
