"""To safetensors and from other libraries' files: bits, names, layout; with the own loaders of these libraries."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import zarrckpt
from zarrckpt.cli import main

FLOATS = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
INTEGERS = ("int64", "int32", "int16", "int8", "uint8", "uint16", "uint32", "uint64", "bool")


def bits(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tuple(tensor.shape), bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return {name: bits(tensor) for name, tensor in one.items()} == {name: bits(other[name]) for name in other}


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    found = {f"a.{name}": torch.randn(7, 5).to(getattr(torch, name)) for name in FLOATS}
    found |= {f"b.{name}": torch.randint(0, 2, (3, 2, 3)).to(getattr(torch, name)) for name in INTEGERS}
    found |= {"c.empty": torch.zeros(0, 4), "c.scalar": torch.tensor(2.5), "c.nan": torch.tensor([float("nan"), -0.0])}
    return {**found, "c.large": torch.randn(900, 700)}


def test_every_dtype_goes_there_and_back(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    zarrckpt.save({"model": tensors, "step": 3}, tmp_path / "one", max_chunk_bytes=1 << 19)
    report = zarrckpt.open(tmp_path / "one").to_safetensors(tmp_path / "out", "model", strip="model")
    assert report.files == ("model.safetensors",) and report.tensors == len(tensors)
    assert same(load_file(tmp_path / "out" / "model.safetensors"), tensors)
    zarrckpt.import_checkpoint(tmp_path / "out" / "model.safetensors", tmp_path / "two", prefix="model")
    assert same(zarrckpt.open(tmp_path / "two").load()["model"], tensors)
    assert zarrckpt.open(tmp_path / "one").diff(zarrckpt.open(tmp_path / "two"), "model")


def test_several_files_have_an_index_and_bounded_sizes(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    state = {f"{i}.w": torch.randn(100, 25) for i in range(9)} | {"head": torch.randn(100, 250)}
    zarrckpt.save(state, tmp_path / "one")
    seen: list[tuple[int, int]] = []
    ckpt = zarrckpt.open(tmp_path / "one")
    report = ckpt.to_safetensors(tmp_path / "out", max_file_bytes=30_000, progress=lambda *done: seen.append(done))
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == ckpt.nbytes == seen[-1][0] == seen[-1][1]
    found = {}
    for name in report.files[:-1]:
        with safe_open(tmp_path / "out" / name, framework="pt") as file:
            part = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - it is no mapping
        assert all(index["weight_map"][key] == name for key in part)
        assert len(part) == 1 or sum(tensor.nbytes for tensor in part.values()) <= 30_000
        found |= part
    assert same(found, state)
    zarrckpt.import_checkpoint(tmp_path / "out", tmp_path / "two", compression="zstd")
    assert ckpt.diff(zarrckpt.open(tmp_path / "two"))


def test_what_is_there_stays(tmp_path: Path) -> None:
    zarrckpt.save({"w": torch.ones(3), "z": torch.ones(2, dtype=torch.complex128)}, tmp_path / "one")
    ckpt = zarrckpt.open(tmp_path / "one")
    with pytest.raises(zarrckpt.UnsupportedValueError):
        ckpt.to_safetensors(tmp_path / "out")
    ckpt.to_safetensors(tmp_path / "out", "w")
    before = (tmp_path / "out" / "model.safetensors").read_bytes()
    with pytest.raises(zarrckpt.StorageError):
        ckpt.to_safetensors(tmp_path / "out", "w")
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == before
    zarrckpt.save({"a": {"w": torch.ones(1)}, "w": torch.ones(1)}, tmp_path / "two")
    with pytest.raises(zarrckpt.UnsupportedValueError):
        zarrckpt.open(tmp_path / "two").to_safetensors(tmp_path / "out2", strip="a")


def test_a_damaged_chunk_leaves_no_file(tmp_path: Path) -> None:
    zarrckpt.save({"w": torch.ones(300)}, tmp_path / "one")
    (tmp_path / "one" / "w" / "c.0").write_bytes(b"x" * 1204)
    with pytest.raises(zarrckpt.CorruptCheckpointError):
        zarrckpt.open(tmp_path / "one").to_safetensors(tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())


def test_files_of_torch_save(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    model[1].weight = model[0].weight
    optim = torch.optim.Adam(model.parameters())
    model(torch.ones(4)).sum().backward()
    optim.step()
    torch.save({"model": model.state_dict(), "optim": optim.state_dict(), "t": tensors, "step": 4}, tmp_path / "x.pt")
    zarrckpt.import_checkpoint(tmp_path / "x.pt", tmp_path / "one")
    found = zarrckpt.open(tmp_path / "one").load()
    assert same(found["t"], tensors) and found["step"] == 4
    assert same(found["model"], dict(model.state_dict()))
    moments = optim.state_dict()["state"][0]
    assert torch.equal(found["optim"]["state"][0]["exp_avg"], moments["exp_avg"])
    torch.save({"w": torch.ones(2), "code": Path("x")}, tmp_path / "y.pt")
    with pytest.raises(zarrckpt.UnsafeValueError):
        zarrckpt.import_checkpoint(tmp_path / "y.pt", tmp_path / "two")
    zarrckpt.import_checkpoint(tmp_path / "y.pt", tmp_path / "two", keys=("w",), allow_pickle=True)
    assert list(zarrckpt.open(tmp_path / "two")) == ["w"]


@pytest.mark.parametrize("kind", ["absent", "cut", "index", "escape", "twice", "empty folder", "list"])
def test_bad_sources_are_refused_and_nothing_is_saved(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    source: Path = folder
    if kind == "absent":
        source = tmp_path / "nothing.safetensors"
    elif kind == "cut":
        save_file({"w": torch.ones(100)}, folder / "model.safetensors")
        source = folder / "model.safetensors"
        source.write_bytes(source.read_bytes()[:-9])
    elif kind == "twice":
        for name in ("a", "b"):
            save_file({"w": torch.ones(100)}, folder / f"{name}.safetensors")
    elif kind == "list":
        source = tmp_path / "x.pt"
        torch.save([torch.ones(2)], source)
    elif kind != "empty folder":
        save_file({"w": torch.ones(100)}, tmp_path / "outside.safetensors")
        target = "../outside.safetensors" if kind == "escape" else "gone.safetensors"
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": target}}))
    with pytest.raises(zarrckpt.CheckpointError):
        zarrckpt.import_checkpoint(source, tmp_path / "one")
    assert not (tmp_path / "one").exists()


def test_from_the_terminal(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    def run(*arguments: object) -> Any:
        return CliRunner().invoke(main, list(map(str, arguments)), catch_exceptions=False)

    save_file(tensors, tmp_path / "in.safetensors")
    assert run("import", tmp_path / "in.safetensors", tmp_path / "one", "--prefix", "model").exit_code == 0
    assert run("import", tmp_path / "in.safetensors", tmp_path / "one").exit_code == 3
    found = run("export", tmp_path / "one", tmp_path / "out", "model", "--strip", "model", "--json")
    assert json.loads(found.stdout)["tensors"] == len(tensors)
    assert same(load_file(tmp_path / "out" / "model.safetensors"), tensors)
    assert run("export", tmp_path / "one", tmp_path / "out").exit_code == 3
    assert run("import", tmp_path / "gone", tmp_path / "two").exit_code == 2
