"""Time of a new process to import the package, and of the command line to print its help."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable

from benchmarks.measure import Options, alternate, medians, seconds
from benchmarks.results import Figure, Results

GROUP = "start-up"
HEAVY = ("torch", "zarr", "obstore", "numpy")


def run(options: Options) -> Results:
    commands = {"bare": ["-c", "pass"], "import": ["-c", "import zarrckpt"]}
    if importlib.util.find_spec("zarrckpt.cli"):
        commands["help"] = ["-m", "zarrckpt.cli", "--help"]
    calls = {name: _timed(command) for name, command in commands.items()}
    found = medians(alternate(calls, max(3, options.rounds)))
    code = f"import sys, zarrckpt; print(*[name for name in {HEAVY!r} if name in sys.modules])"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    note = f"loads {loaded}" if loaded else f"loads none of {', '.join(HEAVY)}"
    figures = [
        Figure(GROUP, "import zarrckpt, beyond an empty process", found["import"] - found["bare"], "s", note=note)
    ]
    if "help" in found:
        figures.append(Figure(GROUP, "zarrckpt --help, the whole process", found["help"], "s", 0.3, most=True))
    return Results(figures=figures)


def _timed(arguments: list[str]) -> Callable[[int], float]:
    def call(number: int) -> float:
        return seconds(lambda: subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL))

    return call
