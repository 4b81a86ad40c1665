"""Mutation tests: change one place of a module at a time, run tests, and list the changes that no test notices.

``python tools/mutants.py _commit.attempts _plan.geometry`` mutates these modules with mutmut, and writes the survivors
with their diffs to ``build/mutants/<module>.diff``. Without arguments: all modules of the packages in ``TESTS``.

A mutant that mypy rejects is not run. Tests that would start a process are skipped, so that a mutant that hangs leaves
no process behind when it is ended. ``mutants.md`` has the results.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing.util
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build" / "mutants"
MUTMUT = Path(sys.executable).with_name("mutmut")
PACKAGE = "zarrckpt"

TESTS = {
    "_commit": (
        "tests/commit/test_guard.py",
        "tests/commit/test_leftovers.py",
        "tests/commit/test_pins.py",
        "tests/commit/test_races.py",
        "tests/commit/test_removal.py",
        "tests/commit/test_runs.py",
        "tests/commit/test_interleavings.py::test_two_first_saves_in_every_interleaving",
        "tests/commit/test_interleavings.py::test_two_overwrites_in_every_interleaving",
        "tests/commit/test_crash_points.py::test_every_fault_at_every_operation_in_memory",
        "tests/save/test_failed_saves.py",
    ),
    "_plan": ("tests/plan",),
    "_save": ("tests/save", "tests/commit/test_crash_points.py::test_every_fault_at_every_operation_in_memory"),
    "_load": ("tests/load",),
}
"""Tests that are run for the mutants of each package."""

TEST_SECONDS = 15.0
"""Maximum time of the tests that are run for one mutant. The slowest ones that execute its function are left out."""

STATUS = {
    0: "survived",
    1: "killed",
    3: "killed",
    5: "no test",
    33: "no test",
    37: "rejected by mypy",
    -signal.SIGXCPU: "timeout",
}
"""Statuses by mutmut's exit codes. Any other code is of a mutant that ended the process."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="*", help="modules to mutate, for example _commit.attempts; default: all")
    chosen = parser.parse_args().modules or all_modules()
    if unknown := set(chosen) - set(all_modules()):
        parser.error(f"there is no module {unknown.pop()}: choose from {', '.join(all_modules())}")
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that mutmut is ended too
    for package in TESTS:
        modules = [module for module in chosen if module.partition(".")[0] == package]
        if modules:
            mutate(package, modules)
        for module in modules:
            counts = write_survivors(package, module)
            print(f"{module}: {counts.total()} mutants: {dict(counts)}, see {FOLDER}/{module}.diff", flush=True)


def all_modules() -> list[str]:
    """Return the modules of all packages in ``TESTS``, as arguments of this script."""
    return [f"{name}.{path.stem}" for name in TESTS for path in sorted((ROOT / PACKAGE / name).glob("[a-z]*.py"))]


def source(module: str) -> str:
    """Return a module's path in the repository."""
    return f"{PACKAGE}/{module.replace('.', '/')}.py"


def mutate(package: str, modules: Sequence[str]) -> None:
    """Run mutmut on a copy of package and tests, in which only these modules of one package are mutated."""
    folder = FOLDER / package
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name in (PACKAGE, "tests", "tools"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "pyproject.toml").write_text(configuration(package, modules))
    # A process group of its own: when mutmut ends or is interrupted, everything that it started is ended too.
    process = subprocess.Popen(
        [MUTMUT, "run", "--max-children", "1"],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT / "tools"), "OMP_NUM_THREADS": "1"},
        stdout=(folder / "log.txt").open("w"),
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        if process.wait():
            raise SystemExit(f"mutmut failed on {', '.join(modules)}: see {folder / 'log.txt'}")
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def configuration(package: str, modules: Sequence[str]) -> str:
    """Return the ``pyproject.toml`` of the copy: that of the repository, and the configuration of mutmut."""
    paths = [source(module) for module in modules]
    # The generated code between the mutants has "type: ignore", mostly without need.
    mypy = [sys.executable, "-m", "mypy", "--output", "json", "--no-warn-unused-ignores"]
    options: dict[str, Any] = {
        "source_paths": [PACKAGE],
        "only_mutate": paths,
        # Lines of a message that continues over several lines.
        "do_not_mutate_patterns": [r'^\s*f?"[^"]* [^"]*"\)?,?$'],
        "also_copy": ["tools"],
        "type_check_command": [*mypy, "--cache-dir", str(FOLDER / "mypy"), *paths],
        "pytest_add_cli_args": ["-p", "mutants", "-p", "no:cacheprovider"],
        "pytest_add_cli_args_test_selection": list(TESTS[package]),
        # Torch and the stores' clients have threads, which do not survive a fork of the process that ran the tests.
        "process_isolation": "forkserver",
        # Seconds until a mutant is taken as one that hangs: 3 times (5 + the time of its tests).
        "timeout_constant": 5.0,
        "timeout_multiplier": 3.0,
        "use_git_change_detection": False,
    }
    lines = [f"{name} = {json.dumps(value)}" for name, value in options.items()]
    return (ROOT / "pyproject.toml").read_text() + "\n[tool.mutmut]\n" + "\n".join(lines) + "\n"


def write_survivors(package: str, module: str) -> Counter[str]:
    """Write the mutants that no test noticed, with their diffs, and return the number of mutants by status."""
    folder = FOLDER / package
    codes = json.loads((folder / "mutants" / f"{source(module)}.meta").read_text())["exit_code_by_key"]
    statuses = {name: STATUS.get(code, "ended the process") for name, code in codes.items()}
    shown = [
        subprocess.run([MUTMUT, "show", name], cwd=folder, capture_output=True, text=True, check=True).stdout
        for name, status in statuses.items()
        if status in ("survived", "no test")
    ]
    (FOLDER / f"{module}.diff").write_text("\n".join(shown))
    return Counter(statuses.values())


# This module is also a plugin of the pytest that runs the mutants.


def pytest_configure() -> None:
    """Skip tests that start processes, and let Hypothesis report a failure without looking for a smaller one."""
    from hypothesis import Phase, settings

    settings.register_profile("mutants", phases=[Phase.explicit, Phase.generate], database=None)
    settings.load_profile("mutants")

    def skip(*args: Any, **options: Any) -> NoReturn:
        import pytest

        pytest.skip("starts a process")

    subprocess.Popen.__init__ = skip  # type: ignore[method-assign]
    multiprocessing.util.spawnv_passfds = skip


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Run the fastest tests first, and at most ``TEST_SECONDS`` of them."""
    measured = Path("mutmut-stats.json")
    if measured.exists():
        times = json.loads(measured.read_text())["duration_by_test"]
        items.sort(key=lambda item: times[item.nodeid])
        sums = accumulate(times[item.nodeid] for item in items)
        items[:] = [item for item, total in zip(items, sums, strict=True) if total <= TEST_SECONDS]


if __name__ == "__main__":
    main()
