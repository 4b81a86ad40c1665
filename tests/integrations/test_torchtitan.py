"""Runs of torchtitan's trainer that are killed and resumed, and its settings."""

from __future__ import annotations

import json
import os
import pickle
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launched import launch, rows_in
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan_run import write_assets

import zarrckpt
from zarrckpt.integrations.torchtitan import ZarrCheckpointManager

SCRIPT = Path(__file__).with_name("torchtitan_run.py")


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("assets")
    write_assets(folder)
    return str(folder)


def run(ranks: int, env: dict[str, str] | None = None, **fields: Any) -> list[dict[str, Any]]:
    """Return the script's output on these ranks, by rank and in order. It may kill itself if the fields request it."""
    done = launch(SCRIPT, json.dumps(fields), ranks=ranks, timeout=180, env=env, torchrun=True)
    assert "SIGKILL" in done.stderr if "kill_at" in fields else done.returncode == 0, done.stderr[-4000:]
    return rows_in(done.stdout)


def test_a_killed_run_resumes_bit_for_bit(assets: str, moto_bucket: Any) -> None:
    url = moto_bucket.url("titan")
    fields = {"folder": url, "assets": assets, "batch": 1, "checkpoint": {"keep_latest_k": 2, "async_mode": "async"}}
    killed = run(2, moto_bucket.environment, steps=10, kill_at=9, **fields)
    # An older checkpoint leaves more steps to compare.
    options = moto_bucket.storage_options
    newest = zarrckpt.latest(url, storage_options=options)
    assert newest is not None and newest[-1] in "68"
    if newest[-1] == "8":
        zarrckpt.remove(newest, storage_options=options)
    # With another seed, all state that is not from the checkpoint differs.
    resumed = run(2, moto_bucket.environment, steps=10, seed=1, **fields)

    assert [row["restored"] for row in resumed if "restored" in row] == [6, 6]
    assert [row for row in resumed if 6 < row.get("step", 0) < 10] == [row for row in killed if row.get("step", 0) > 6]
    manager = zarrckpt.CheckpointManager(url, signals=(), storage_options=options)
    assert manager.steps() == [8, 10]
    checkpoint = zarrckpt.open(f"{url}/step-00000010", storage_options=options)
    assert checkpoint["dataloader.world_size"] == 2 and "dataloader.dp_rank_1" in checkpoint


def test_a_run_resumes_on_other_numbers_of_processes(assets: str, tmp_path: Path) -> None:
    fields = {"folder": str(tmp_path), "assets": assets}
    whole = {row["step"]: row for row in run(1, steps=6, **fields) if "step" in row}
    for step in (6, 4):
        zarrckpt.remove(str(tmp_path / f"step-{step:08}"))
    digest = whole[2]["digest"]
    # The batches are equal if the number of data parallel ranks is.
    for ranks, steps, more in [(2, 4, {"tensor_parallel": 2}), (1, 6, {"seed": 1})]:
        rows = run(ranks, steps=steps, **fields, **more)
        assert [(row["restored"], row["digest"]) for row in rows if "restored" in row] == [(steps - 2, digest)] * ranks
        for row in rows:
            if "step" in row:
                assert row["loss"] == pytest.approx(whole[row["step"]]["loss"], rel=1e-4)
                digest = row["digest"]


# -- in this process, with stand-ins for torchtitan's model, optimizer and trainer


class Part:
    """An object with a state to save."""

    def __init__(self, **state: Any) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


class Adapter:
    """Adapter that adds a prefix to names, for Hugging Face's names."""

    fqn_to_index_mapping = None
    hf_assets_path = None

    def to_hf(self, state: dict[str, Any]) -> dict[str, Any]:
        return {f"model.{name}": value for name, value in state.items()}


@pytest.fixture(autouse=True)
def _one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/init", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Run:
    """A manager and its states, in which every number is ``value``."""

    def __init__(self, folder: Path | str, value: float = 0.0, kind: type = ZarrCheckpointManager, **settings: Any):
        self.model = torch.nn.Linear(3, 2)
        for parameter in self.model.parameters():
            torch.nn.init.constant_(parameter, value)
        self.optimizers = Part(**{"state.weight.exp_avg": torch.full((2, 3), float(value))})
        self.train_state = Part(step=int(value))
        self.manager = kind.Config(**{"enable": True, "interval": 1, "folder": str(folder), **settings}).build(
            dataloader=Part(dp_rank_0=b"%d" % value, world_size=1),
            model_parts=[self.model],
            optimizers=self.optimizers,
            lr_schedulers=Part(last_epoch=int(value)),
            states={"train_state": self.train_state},
            sd_adapter=Adapter(),
        )

    def values(self) -> tuple[float, float, int]:
        """Return the current values of the model, the optimizer and the trainer."""
        moments = self.optimizers.state["state.weight.exp_avg"]
        return self.model.weight[0, 0].item(), moments[0, 0].item(), self.train_state.state["step"]


def saved(folder: Path | str, *steps: int, kind: type = ZarrCheckpointManager, **settings: Any) -> None:
    """Save checkpoints of a run. All numbers of step n are n."""
    for step in steps:
        run = Run(folder, step, kind, **settings)
        run.manager.load()
        for parameter in run.model.parameters():
            torch.nn.init.constant_(parameter, step)
        run.optimizers.state["state.weight.exp_avg"].fill_(step)
        run.train_state.state = {"step": step}
        assert run.manager.save(step)
        run.manager.close()


def loaded(folder: Path | str, step: int = -1, **settings: Any) -> tuple[float, float, int]:
    run = Run(folder, -1.0, load_step=step, **settings)
    assert run.manager.load(step)
    run.manager.close()
    return run.values()


def steps_of(folder: Path | str) -> list[int]:
    return zarrckpt.CheckpointManager(str(folder), signals=()).steps()


def test_a_chosen_step_loads_and_later_steps_go_only_on_request(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2, 3)
    assert loaded(tmp_path) == (3, 3, 3) and loaded(tmp_path, 2) == (2, 2, 2)
    assert loaded(tmp_path, exclude_from_loading=["optimizer", "train_state"]) == (3, -1, -1)
    with pytest.raises(zarrckpt.CheckpointExistsError):
        saved(tmp_path, 3)
    assert loaded(tmp_path, 2, rewind=True) == (2, 2, 2) and steps_of(tmp_path) == [1, 2]
    with pytest.raises(ValueError, match="load_step"):
        ZarrCheckpointManager.Config(rewind=True)
    with pytest.raises(FileNotFoundError):
        loaded(tmp_path, 7)


def test_folders_may_be_any_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    in_memory = f"memory://{tmp_path.name}"
    forms = {"~/a": tmp_path / "a", Path(f"file://{tmp_path}/b"): tmp_path / "b", "c": tmp_path / "c"}
    for form, expected in {**forms, Path(in_memory): in_memory}.items():
        saved(form, 1)
        assert steps_of(expected) == [1]
    for first in ("~/a/step-00000001", f"file:{tmp_path}/b/step-00000001"):
        assert loaded("new", initial_load_path=first)[0] == 1
    with pytest.raises(zarrckpt.StorageError, match="looks like a mistyped url"):
        saved("s3//bucket/run", 1)
    assert {*os.listdir()} <= {"a", "b", "c", "init", "new"}


def test_a_damaged_checkpoint_is_skipped_unless_it_was_chosen(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2)
    (tmp_path / "step-00000002" / "weight" / "c.0.0").write_bytes(b"")
    with pytest.warns(UserWarning, match="step-00000002"):
        assert loaded(tmp_path) == (1, 1, 1)
    with pytest.raises(zarrckpt.CorruptCheckpointError):
        loaded(tmp_path, 2)


def test_a_job_that_only_loads_does_not_take_over_the_run(tmp_path: Path) -> None:
    run = Run(tmp_path, 1.0)
    run.manager.save(1)
    assert loaded(tmp_path, load_only=True) == loaded(tmp_path, 1, load_only=True) == (1, 1, 1)
    assert run.manager.save(2) and steps_of(tmp_path) == [1, 2]
    assert loaded(tmp_path) == (1, 1, 1)
    with pytest.raises(zarrckpt.RunTakenOverError):
        run.manager.save(3)
    run.manager.close()


def test_a_run_begins_with_weights_of_another_checkpoint(tmp_path: Path) -> None:
    seed = Run(tmp_path / "seed", 5.0, create_seed_checkpoint=True)
    assert seed.manager.save(0, last_step=True)
    assert {*zarrckpt.open(tmp_path / "seed" / "step-00000000").keys()} == {"weight", "bias"}
    assert loaded(tmp_path / "seed") == (5, -1, -1)

    saved(tmp_path / "zarr", 6)
    saved(tmp_path / "dcp", 7, kind=CheckpointManager)
    for value, source in ((6, "zarr/step-00000006"), (7, "dcp/step-7")):
        settings = {"initial_load_path": str(tmp_path / source)}
        assert loaded(tmp_path / "new", **settings) == (value, -1, -1)
        assert loaded(tmp_path / "new", initial_load_model_only=False, **settings) == (value,) * 3
        without = {"initial_load_model_only": False, "exclude_from_loading": ["optimizer"], **settings}
        assert loaded(tmp_path / "new", **without) == (value, -1, value)


def test_a_run_that_torchtitan_began_resumes(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2, kind=CheckpointManager)
    assert loaded(tmp_path) == (2, 2, 2) and loaded(tmp_path, 1) == (1, 1, 1)
    saved(tmp_path, 3)
    assert loaded(tmp_path) == (3, 3, 3)


def test_the_last_step_follows_torchtitans_settings(tmp_path: Path) -> None:
    settings = {"async_mode": "async_with_pinned_mem", "export_dtype": "bfloat16"}
    run = Run(tmp_path, 4.0, **settings)
    assert run.manager.save(4) and run.manager.save(5, last_step=True) and steps_of(tmp_path) == [4, 5]
    run.manager.close()
    last = zarrckpt.open(tmp_path / "step-00000005").load()
    assert {*last} == {"weight", "bias"} and last["weight"].dtype == torch.bfloat16 and last["bias"][0] == 4
    # A checkpoint with only weights cannot be resumed.
    with pytest.raises(zarrckpt.KeyMismatchError, match="optimizer"):
        loaded(tmp_path)
    assert loaded(tmp_path, 4) == (4, 4, 4)

    run = Run(tmp_path / "hf", 4.0, last_save_in_hf=True)
    assert run.manager.save(5, last_step=True)
    run.manager.close()
    assert [*(tmp_path / "hf" / "step-5").glob("*.safetensors")] and steps_of(tmp_path / "hf") == []


def test_a_pickle_in_the_data_loaders_state_runs_no_code(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "ran"),)

    for name, value in (("evil", Evil()), ("plain", {"a": [1, OrderedDict(b={2.0, "c"})]})):
        made = Run(tmp_path / name, 1.0)
        made.manager.states["dataloader"].state_dict()["dp_rank_0"] = pickle.dumps(value)
        made.manager.load()
        assert made.manager.save(1)
        made.manager.close()
    with pytest.raises(zarrckpt.UnsafeValueError, match="mkdir"):
        loaded(tmp_path / "evil")
    assert not (tmp_path / "ran").exists()
    assert loaded(tmp_path / "plain") == loaded(tmp_path / "evil", allow_pickle=True) == (1.0, 1.0, 1)


def test_a_disabled_manager_does_nothing(tmp_path: Path) -> None:
    run = Run(tmp_path, enable=False)
    assert not run.manager.load() and not run.manager.save(1)
    run.manager.close()
