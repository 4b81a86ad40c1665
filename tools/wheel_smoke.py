"""Use the installed zarrckpt as a new user would: ``check_wheel.py`` runs this in fresh environments.

``python -I wheel_smoke.py ROOT`` takes the repository's folder, for a golden checkpoint and the README. It writes files
into the current folder. Without torch it reads the checkpoint; with torch it also runs the README's first program.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
import subprocess
import sys
import zipfile
from importlib.metadata import version
from pathlib import Path


def main(root: Path) -> None:
    golden = root / "tests" / "golden"
    with zipfile.ZipFile(golden / "plain.zip") as archive:
        archive.extractall("golden")
    read_with_zarr(json.loads((golden / "plain.json").read_text())["entries"])
    read_checkpoint()
    run_commands()
    if importlib.util.find_spec("torch"):
        save_and_load(re.findall(r"^```python\n(.*?)^```$", (root / "README.md").read_text(), re.DOTALL | re.MULTILINE))


def read_with_zarr(entries: dict[str, dict[str, str]]) -> None:
    """Read all dtypes with zarr alone. It finds those of zarrckpt by entry points."""
    import zarr

    group = zarr.open_group("golden", mode="r")
    for name in ("bfloat16", "float8_e4m3fn", "float8_e8m0fnu", "float32", "complex128"):
        array = group[f"tensors/matrix/{name}"][...]
        assert str(array.dtype) == name and array.shape == (3, 5), (name, array.dtype, array.shape)
        assert hashlib.sha256(array.tobytes()).hexdigest() == entries[f"tensors.matrix.{name}"]["sha256"], name


def read_checkpoint() -> None:
    """Open and verify the checkpoint. Only what is installed may be imported."""
    import zarrckpt

    assert Path(zarrckpt.__file__).is_relative_to(sys.prefix), zarrckpt.__file__
    assert zarrckpt.__version__ == version("zarrckpt")
    ckpt = zarrckpt.open("golden")
    assert ckpt["tensors.matrix.bfloat16"][...].shape == (3, 5) and ckpt.metadata["step"] == 7
    assert ckpt.verify()


def run_commands() -> None:
    """Run commands of the installed program. ``report`` needs files of the package that are not Python."""
    for command in (["--help"], ["info", "golden"], ["verify", "golden"], ["report", "golden", "-o", "report.html"]):
        subprocess.run([Path(sys.executable).with_name("zarrckpt"), *command], check=True, stdout=subprocess.DEVNULL)
    assert Path("report.html").stat().st_size > 100_000


def save_and_load(programs: list[str]) -> None:
    """Run the README's first program, and save to and load from memory and an archive."""
    import torch

    import zarrckpt

    Path("readme.py").write_text(programs[0])
    subprocess.run([sys.executable, "-I", "readme.py"], check=True, stdout=subprocess.DEVNULL)
    assert zarrckpt.open("run/step-100").verify()
    for url in ("memory://run/step-1", "run/step-300.zarr.zip"):
        saved = {"w": torch.arange(1_000_000, dtype=torch.bfloat16), "step": 1}
        loaded = {"w": torch.zeros(1_000_000, dtype=torch.bfloat16), "step": 0}
        zarrckpt.save(saved, url)
        zarrckpt.load(loaded, url)
        assert torch.equal(loaded["w"], saved["w"]) and loaded["step"] == 1 and zarrckpt.open(url).verify(), url


if __name__ == "__main__":
    main(Path(sys.argv[1]))
