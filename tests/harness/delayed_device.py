"""An accelerator without hardware, "delayed", which ``delayed_device.cpp`` describes. It has two devices.

``build`` compiles it, with the C++ compiler ``$CXX`` (default g++), once per change into the folder ``build``.
``register`` makes it torch's accelerator for the rest of a process, so each test runs in a process of ``run_ranks``.
"""

from __future__ import annotations

import functools
import hashlib
import os
import subprocess
import types
from pathlib import Path

import pytest
import torch
from torch.utils.cpp_extension import include_paths, library_paths

_SOURCE = Path(__file__).with_suffix(".cpp")


def build() -> str:
    """Return the path of the compiled device. Fails with an explanation if there is no C++20 compiler."""
    key = hashlib.sha256(_SOURCE.read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    library = Path(__file__).parents[2] / "build" / f"delayed_device-{key}.so"
    if library.exists():
        return str(library)
    library.parent.mkdir(exist_ok=True)
    made = library.with_suffix(f".{os.getpid()}")
    command = [os.environ.get("CXX", "g++"), "-std=c++20", "-O0", "-fPIC", "-shared", str(_SOURCE), "-o", str(made)]
    paths = [*(f"-I{path}" for path in include_paths()), *(f"-L{path}" for path in library_paths())]
    try:
        subprocess.run([*command, *paths, "-ltorch_cpu", "-lc10"], check=True, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.fail(f"tests of accelerators need a C++20 compiler, but {command[0]!r} was not found: install g++")
    except subprocess.CalledProcessError as err:
        pytest.fail(f"{_SOURCE.name} cannot be compiled with torch {torch.__version__}: {err.stderr:.4000}")
    made.replace(library)
    return str(library)


@functools.cache
def register(library: str) -> None:
    """Make the device the accelerator of this process."""
    torch.utils.rename_privateuse1_backend("delayed")
    torch.ops.load_library(library)
    state = torch.zeros(16, dtype=torch.uint8)
    module = types.SimpleNamespace(
        is_available=lambda: True,
        is_initialized=lambda: True,
        device_count=lambda: 2,
        current_device=torch.accelerator.current_device_index,
        set_device=torch.accelerator.set_device_index,
        device=lambda device: torch.accelerator.device_index(torch.device(device).index),
        current_stream=torch.accelerator.current_stream,
        Stream=lambda priority=0: torch.Stream("delayed"),
        stream=lambda stream: stream,
        Event=lambda: torch.Event("delayed"),
        _is_in_bad_fork=lambda: False,
        manual_seed_all=lambda seed: state.fill_(seed % 256),
        get_rng_state=lambda index=0: state.clone(),
        set_rng_state=lambda new, index=0: state.copy_(new),
        get_rng_state_all=lambda: [state.clone()] * 2,
    )
    torch._register_device_module("delayed", module)
    torch.utils.generate_methods_for_privateuse1_backend()
    torch.distributed.Backend.default_device_backend_map["delayed"] = "fake"
    from torch.testing._internal.distributed import fake_pg  # noqa: F401 - registers the backend
