"""Install the wheel in ``dist`` into fresh environments, and run ``wheel_smoke.py`` there: ``make test-wheel``.

``newest`` has the newest versions of the dependencies, ``oldest`` the lower bounds of ``pyproject.toml``. ``torch`` has
the newest versions, and PyTorch as in ``constraints.txt``. ``oldest`` needs Python 3.11 or 3.12, for NumPy 2.0.
The environments are deleted.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import tempfile
import tomllib
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def requirements(wheel: Path, environment: str) -> list[str]:
    """Return the arguments for pip that install the wheel."""
    if environment == "oldest":
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        return [str(wheel), *(bound.replace(">=", "==") for bound in project["dependencies"])]
    if environment == "torch":
        return [f"{wheel}[torch]", *re.findall("^torch==.*", (ROOT / "constraints.txt").read_text(), re.MULTILINE)]
    return [str(wheel)]


def check_files(wheel: Path) -> None:
    """Compare the wheel's files with those of the repository's package."""
    files = {file.relative_to(ROOT).as_posix() for file in (ROOT / "zarrckpt").rglob("*") if file.is_file()}
    expected = {name for name in files if "__pycache__" not in name}
    found = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    if found != expected:
        sys.exit(f"{wheel} differs from the folder zarrckpt: {sorted(found ^ expected)}")


def check_wheel(wheel: Path, environment: str, pip_args: list[str]) -> None:
    """Install the wheel into a new environment and use it in an empty folder."""
    with tempfile.TemporaryDirectory(prefix="zarrckpt-wheel-") as folder:
        work = Path(folder, "work")
        work.mkdir()
        venv.create(Path(folder, "venv"), symlinks=True, with_pip=True)
        python = Path(folder, "venv", "bin", "python")
        install = [python, "-m", "pip", "install", "-qq", *pip_args, *requirements(wheel, environment)]
        subprocess.run(install, cwd=work, check=True)
        subprocess.run([python, "-m", "pip", "check"], cwd=work, check=True)
        subprocess.run([python, "-I", ROOT / "tools" / "wheel_smoke.py", ROOT], cwd=work, check=True)
        listed = [python, "-m", "pip", "list", "--format", "freeze"]
        versions = subprocess.run(listed, cwd=work, check=True, stdout=subprocess.PIPE, text=True).stdout
        print(f"{wheel.name} works in the environment {environment!r}: {', '.join(versions.split())}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("environments", nargs="*", default=["newest", "oldest", "torch"])
    environments = parser.parse_args().environments
    if unknown := set(environments).difference(["newest", "oldest", "torch"]):
        parser.error(f"unknown environments {sorted(unknown)}: choose from newest, oldest and torch")
    (wheel,) = (ROOT / "dist").glob("*.whl")
    check_files(wheel)
    for environment in environments:
        check_wheel(wheel, environment, shlex.split(os.environ.get("PIP_ARGS", "")))


if __name__ == "__main__":
    main()
