"""Lightning's Trainer and Fabric with checkpoints of zarrckpt: real runs, killed, and resumed elsewhere."""

from __future__ import annotations

import json
import os
import re
import runpy
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fabric_run import load_raw_with_fabric, load_with_fabric, save_with_fabric
from harness.models import NewLayer
from harness.ranks import RankError, all_ranks_raise, run_ranks
from harness.store_servers import S3Place
from launched import launch
from lightning.fabric import Fabric
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint, StochasticWeightAveraging
from lightning.pytorch.plugins import AsyncCheckpointIO, CheckpointIO, TorchCheckpointIO
from lightning.pytorch.strategies import (
    DDPStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
    Strategy,
)
from lightning_run import DATA, Tiny, saved_state, train_on_ranks
from torchdata.stateful_dataloader import StatefulDataLoader

import zarrckpt
from zarrckpt.integrations.lightning import (
    ZarrCheckpointIO,
    ZarrFSDPStrategy,
    ZarrModelCheckpoint,
    ZarrModelParallelStrategy,
    _plugin_of,
    load_from_checkpoint,
)

HERE = Path(__file__).parent


def fit(world: int, env: dict[str, str] | None = None, **fields: Any) -> list[dict[str, Any]]:
    return run_ranks(train_on_ranks, fields, world_size=world, group=fields.get("strategy", "auto") != "auto", env=env)


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Compare weights and moments bit for bit."""
    for kind in ("weights", "moments"):
        assert one[kind].keys() == other[kind].keys()
        assert all(torch.equal(value, other[kind][name]) for name, value in one[kind].items())
    assert any(name.endswith("exp_avg_sq") for name in one["moments"])


def status_of(world: int, fields: dict[str, Any], result: Path, env: dict[str, str]) -> int:
    """Run the script in separate processes. Return the exit status."""
    torchrun, arguments = fields["strategy"] != "auto", (json.dumps(fields), str(result))
    return launch(
        HERE / "lightning_run.py", *arguments, ranks=world, timeout=100, env=env, torchrun=torchrun
    ).returncode


@pytest.mark.parametrize(
    ("strategy", "killed_on", "loaded_on", "background"), [("auto", 1, 1, False), ("fsdp2", 2, 1, True)]
)
def test_a_killed_run_on_s3_resumes_from_last_bit_for_bit(
    strategy: str, killed_on: int, loaded_on: int, background: bool, tmp_path: Path, moto_bucket: S3Place
) -> None:
    """Kill it in the third epoch, resume on the same number of processes, and compare bit for bit.

    With saves in the background, the model has a sharded average, too.
    """
    env, log, result = moto_bucket.environment, tmp_path / "losses", tmp_path / "result"
    (whole, *_) = fit(killed_on, folder=str(tmp_path / "whole"), strategy=strategy, epochs=3, average=background)
    fields = {"folder": moto_bucket.url("run"), "strategy": strategy, "background": background, "log": str(log)}
    fields |= {"epochs": 3, "resume": "last", "average": background}
    assert status_of(killed_on, {**fields, "die_after": 9}, result, env) != 0
    assert not result.exists()
    killed = len(log.read_text().splitlines())
    assert status_of(loaded_on, fields, result, env) == 0

    lines = [line.split() for line in log.read_text().splitlines()]
    losses = [(int(step), float(loss)) for step, loss in lines]
    assert [step for step, _ in losses[:killed]] == [*range(1, 10)]
    first = losses[killed][0]
    assert first in (5, 9)  # the last save may have been in flight
    assert [step for step, _ in losses[killed:]] == [*range(first, 13)]
    for step, loss in losses:
        same = killed_on == loaded_on or step < first
        assert loss == (whole["losses"][step] if same else pytest.approx(whole["losses"][step], rel=1e-4))
    printed = json.loads(result.read_text())
    assert printed["resumed_from"] == f"{moto_bucket.url('run')}/last.ckpt/zarr.json"
    assert printed["seen"] == 12 and printed["lr"] == whole["lr"]
    assert printed["stopping"] == pytest.approx(whole["stopping"], rel=1e-4)
    assert printed["best"] == f"{moto_bucket.url('run')}/epoch=2-step=12.ckpt"


def test_lightning_state_comes_back_and_expired_ones_go(tmp_path: Path) -> None:
    run, env = str(tmp_path / "run"), {}
    (whole,) = fit(1, env, folder=str(tmp_path / "whole"), top_k=2)
    (first,) = fit(1, env, folder=run, epochs=2, top_k=2, resume="last")
    assert first["resumed_from"] is None  # there was no checkpoint
    (again,) = fit(1, env, folder=run, top_k=2, resume="last")
    assert again["resumed_from"] == f"{run}/last.ckpt"
    assert {**first["losses"], **again["losses"]} == whole["losses"]
    for name in ("seen", "lr", "stopping", "epoch"):
        assert again[name] == whole[name], name
    assert {Path(path).name: score for path, score in again["scores"].items()} == {
        Path(path).name: score for path, score in whole["scores"].items()
    }
    assert {path.name for path in Path(run).iterdir()} == {Path(path).name for path in again["scores"]} | {"last.ckpt"}
    metadata = {path: zarrckpt.open(path).metadata for path in again["scores"]}
    assert metadata[again["best"]] == {"val_loss": again["scores"][again["best"]], "step": 16, "epoch": 3}
    assert {path: found["val_loss"] for path, found in metadata.items()} == again["scores"]
    assert zarrckpt.best(run, "val_loss") == again["best"]
    assert zarrckpt.best(run, "val_loss", "max") == max(again["scores"], key=again["scores"].__getitem__)
    (best,) = fit(1, env, folder=str(tmp_path / "other"), epochs=5, resume=again["best"])
    assert [*best["losses"]] == [17, 18, 19, 20]


@pytest.mark.parametrize(
    ("strategy", "saved_on", "loaded_on"),
    [("fsdp2", 2, 2), ("fsdp2", 2, 1), ("fsdp2", 2, 4), ("fsdp2", 1, 2), ("fsdp1", 2, 1), ("ddp", 2, 2), ("tp", 2, 1)],
)
def test_a_run_resumes_on_any_number_of_processes(strategy: str, saved_on: int, loaded_on: int, tmp_path: Path) -> None:
    (whole, *_) = fit(saved_on, folder=str(tmp_path / "whole"), strategy=strategy, epochs=3)
    (first, *_) = fit(saved_on, folder=str(tmp_path / "run"), strategy=strategy, epochs=2, background=True)
    assert zarrckpt.best(tmp_path / "run", "val_loss") == first["best"]
    saved = saved_state(f"{tmp_path}/run/last.ckpt")
    for other in fit(loaded_on, folder=str(tmp_path / "run"), strategy=strategy, epochs=3, resume="last"):
        assert_same(other["restored"], saved)
        assert [*other["losses"]] == [9, 10, 11, 12]
        for step, loss in other["losses"].items():
            expected = whole["losses"][step]
            assert loss == (expected if saved_on == loaded_on else pytest.approx(expected, rel=1e-4))


@pytest.mark.parametrize(
    ("one", "worlds", "other"),
    [
        ("ddp", (2, 2), "fsdp2"),
        ("auto", (1, 2), "tp"),
        ("fsdp2", (2, 1), "auto"),
        ("fsdp2", (2, 2), "fsdp1"),
        ("fsdp1", (2, 1), "auto"),
    ],
)
def test_a_run_resumes_under_another_strategy(one: str, worlds: tuple[int, int], other: str, tmp_path: Path) -> None:
    fit(worlds[0], folder=str(tmp_path), strategy=one, epochs=2)
    saved = saved_state(f"{tmp_path}/last.ckpt")
    for result in fit(worlds[1], folder=str(tmp_path), strategy=other, resume=f"{tmp_path}/last.ckpt"):
        assert_same(result["restored"], saved)
        assert [*result["losses"]] == [*range(9, 17)] and result["seen"] == 16


def test_fsdp1_refuses_optimizer_state_of_ddp(tmp_path: Path) -> None:
    fit(2, folder=str(tmp_path), strategy="ddp", epochs=1)
    fields = {"folder": str(tmp_path), "strategy": "fsdp1", "resume": "last"}
    assert "FSDP2" in all_ranks_raise(zarrckpt.UnsupportedLayoutError, train_on_ranks, fields, world_size=2)


def test_hyperparameters_that_need_pickle_are_named_at_the_save(tmp_path: Path) -> None:
    """The error is raised on all ranks at the first save, before a write. Pickles are written only if allowed."""
    hyperparameters = {"width": 16, "path": Path("data"), "nested": {"loss": torch.nn.MSELoss()}}
    with pytest.raises(
        RankError, match=r"'hyper_parameters.hyperparameters.path' is or has a pathlib.PosixPath"
    ) as failed:
        fit(1, folder=str(tmp_path / "one"), hyperparameters=hyperparameters)
    assert "nested.loss' is or has a torch.nn.modules.loss.MSELoss" in str(failed.value)
    fields = {"folder": str(tmp_path / "two"), "strategy": "fsdp2", "hyperparameters": hyperparameters}
    message = all_ranks_raise(zarrckpt.UnsupportedValueError, train_on_ranks, fields, world_size=2)
    assert "path" in message and "allow_pickle" in message
    with pytest.raises(zarrckpt.UnsupportedValueError):  # a callback whose state_key is a class
        ZarrCheckpointIO().save_checkpoint({"callbacks": {Tiny: {"seen": 1}}}, tmp_path / "one")
    assert not (tmp_path / "one").exists() and not (tmp_path / "two").exists()

    del hyperparameters["nested"]
    fit(1, folder=str(tmp_path / "one"), hyperparameters=hyperparameters, epochs=1, allow_pickle=True)
    io = ZarrCheckpointIO()
    with pytest.raises(zarrckpt.UnsafeValueError, match=r"hyper_parameters\.hyperparameters\.path"):
        io.load_checkpoint(f"{tmp_path}/one/last.ckpt")
    io.allow_pickle = True
    loaded = io.load_checkpoint(f"{tmp_path}/one/last.ckpt")
    assert loaded["hyper_parameters"]["hyperparameters"] == hyperparameters


@pytest.mark.parametrize("of", ["", "datamodule_"])
def test_hyperparameters_of_omegaconf_are_kept_as_data(of: str, tmp_path: Path) -> None:
    omegaconf = pytest.importorskip("omegaconf")
    config = omegaconf.OmegaConf.create({"layers": [{"width": 8}, {"width": "${layers.0.width}"}]})
    checkpoint = {f"{of}hyper_parameters": config, f"{of}hparams_type": type(config), "epoch": 1}
    ZarrCheckpointIO().save_checkpoint(checkpoint, tmp_path / "a.ckpt")
    loaded = ZarrCheckpointIO().load_checkpoint(tmp_path / "a.ckpt")
    assert omegaconf.OmegaConf.create(loaded[f"{of}hyper_parameters"]) == config


def test_a_failed_background_save_is_raised_and_replaces_nothing(tmp_path: Path) -> None:
    io = ZarrCheckpointIO(background=True)
    old, new, foreign = (str(tmp_path / name) for name in ("old.ckpt", "new.ckpt", "foreign.ckpt"))
    io.save_checkpoint({"w": torch.ones(3)}, old)
    io.save_checkpoint({"w": torch.ones(3)}, new)
    io.remove_checkpoint(old)
    io.wait()
    assert not os.path.exists(old) and os.path.exists(new)

    Path(foreign).mkdir()
    Path(foreign, "zarr.json").write_text("{}")
    io.save_checkpoint({"w": torch.ones(3)}, foreign)
    io.remove_checkpoint(new)
    with pytest.raises(zarrckpt.ForeignObjectsError):
        io.save_checkpoint({"w": torch.ones(3)}, old)
    assert io.load_checkpoint(new)["w"].sum() == 3
    io.teardown()


@pytest.mark.parametrize("background", [False, True])
def test_unchanged_weights_are_linked_to_the_last_checkpoint(background: bool, tmp_path: Path) -> None:
    io, frozen = ZarrCheckpointIO(background=background), torch.rand(20_000)
    urls = [str(tmp_path / name) for name in ("a.ckpt", "b.ckpt", "c.ckpt")]
    for step, url in enumerate(urls):
        io.save_checkpoint({"frozen": frozen, "trained": torch.full((1000,), float(step))}, url)
    io.remove_checkpoint(urls[0])
    io.wait()
    assert [Path(url, "frozen/c.0").stat().st_nlink for url in urls[1:]] == [2, 2]
    assert [Path(url, "trained/c.0").stat().st_nlink for url in urls[1:]] == [1, 1]
    resumed = ZarrCheckpointIO()
    assert resumed.load_checkpoint(urls[1])["frozen"].equal(frozen)
    resumed.save_checkpoint({"frozen": frozen}, str(tmp_path / "d.ckpt"))
    assert Path(urls[1], "frozen/c.0").stat().st_nlink == 3


def test_a_checkpoint_that_cannot_be_removed_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    io, url = ZarrCheckpointIO(), str(tmp_path / "a.ckpt")
    io.save_checkpoint({"epoch": 1}, url)
    pin = zarrckpt.pin(url, "needed")
    io.remove_checkpoint(url)
    assert "CheckpointPinnedError" in caplog.text and io.load_checkpoint(url) == {"epoch": 1}
    zarrckpt.unpin(url, pin)
    io.remove_checkpoint(url)
    io.remove_checkpoint(url)  # like OnExceptionCheckpoint if it has saved no checkpoint
    assert not os.path.exists(url)


def test_last_is_found_in_object_stores_past_unfinished_saves(
    tmp_path: Path, moto_bucket: S3Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in moto_bucket.environment.items():
        monkeypatch.setenv(name, value)
    trainer = Trainer(logger=False, accelerator="cpu", enable_checkpointing=False)
    for folder in (str(tmp_path), moto_bucket.url("run")):
        found = ZarrModelCheckpoint(folder)
        assert found._find_last_checkpoints(trainer) == set()
        ZarrCheckpointIO().save_checkpoint({"epoch": 1}, f"{folder}/last.ckpt")
        (path,) = found._find_last_checkpoints(trainer)
        assert ZarrCheckpointIO().load_checkpoint(path) == {"epoch": 1}
        assert found._fs.modified(path)
        zarrckpt.save({"epoch": 1}, f"{folder}/last-v1.ckpt")
        found._fs.rm(f"{folder}/last-v1.ckpt/zarr.json")
        assert found._find_last_checkpoints(trainer) == {path}
        assert found.file_exists(f"{folder}/last.ckpt", trainer)
        assert not found.file_exists(f"{folder}/last-v1.ckpt", trainer)  # the next save there cleans up
    # The reason for this class: if this assertion fails, Lightning's own class would do.
    assert {*map(os.path.exists, ModelCheckpoint(moto_bucket.url("run"))._find_last_checkpoints(trainer))} == {False}


def test_folders_and_checkpoints_may_be_any_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    trainer = Trainer(logger=False, accelerator="cpu", enable_checkpointing=False)
    io, in_memory = ZarrCheckpointIO(), f"memory://{tmp_path.name}"
    forms = {"~/a": f"{tmp_path}/a", Path(f"file://{tmp_path}/b"): f"{tmp_path}/b", "c": f"{tmp_path}/c"}
    for form, expected in {**forms, Path(in_memory): in_memory}.items():
        folder = ZarrModelCheckpoint(form)
        io.save_checkpoint({"epoch": 1}, f"{form}/last.ckpt")
        assert folder.dirpath == expected and len(folder._find_last_checkpoints(trainer)) == 1
        assert io.load_checkpoint(Path(form, "last.ckpt")) == {"epoch": 1}
        io.remove_checkpoint(f"{form}/last.ckpt")
        with pytest.raises(zarrckpt.CheckpointNotFoundError):
            zarrckpt.open(f"{expected}/last.ckpt")
    torch.save({"epoch": 2}, tmp_path / "a" / "file.ckpt")
    for own in ("~/a/file.ckpt", f"file://{tmp_path}/a/file.ckpt"):
        assert io.load_checkpoint(own) == {"epoch": 2}
    assert {*os.listdir()} <= {"a", "b", "c"}


@pytest.mark.parametrize("averaging", ["ema", "swa"])
def test_averages_of_weights_are_restored_bit_for_bit(averaging: str, tmp_path: Path) -> None:
    """EMA within an epoch and an accumulation of gradients, with torchdata's loader; SWA between two epochs."""
    amid = averaging == "ema"

    class Broken(Callback):
        """Callback that ends a run by an error after the seventh batch, or before the fourth epoch."""

        def __init__(self) -> None:
            self.losses: dict[tuple[int, int], float] = {}

        def on_train_epoch_start(self, trainer: Trainer, module: LightningModule) -> None:
            if trainer.max_epochs == 40 and trainer.current_epoch == 3:
                raise KeyError

        def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, index: int) -> None:
            self.losses[trainer.current_epoch, index] = outputs["loss"].item()
            if amid and trainer.max_epochs == 40 and len(self.losses) == 7:
                raise KeyError

    def fit_here(name: str, epochs: int) -> tuple[Any, ...]:
        average = EMAWeightAveraging(decay=0.9) if amid else StochasticWeightAveraging(1e-2, 2, annealing_epochs=3)
        every = {"every_n_train_steps": 1} if amid else {"every_n_epochs": 1}
        watch, checkpoints = Broken(), ZarrModelCheckpoint(tmp_path / name, save_last=True, **every)
        quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "accelerator": "cpu"}
        parts = {"plugins": [ZarrCheckpointIO(background=True)], "callbacks": [average, watch, checkpoints]}
        trainer = Trainer(max_epochs=epochs, accumulate_grad_batches=2, num_sanity_val_steps=0, **parts, **quiet)
        module, loader = Tiny("auto", {}), StatefulDataLoader(DATA, batch_size=8)
        module.configure_model()  # SWA copies the module before Lightning calls it
        with suppress(KeyError):
            trainer.fit(module, loader, loader, ckpt_path="last")
        return module.state_dict(), average._average_model.state_dict(), watch.losses

    whole, broken, resumed = fit_here("whole", 5), fit_here("run", 40), fit_here("run", 5)
    assert resumed[2] and {**broken[2], **resumed[2]} == whole[2]
    assert min(resumed[2]) == ((1, 2) if amid else (3, 0))
    for one, other in zip(whole[:2], resumed[:2], strict=True):
        assert all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.mark.parametrize("plugin", [AsyncCheckpointIO(ZarrCheckpointIO()), TorchCheckpointIO()])
def test_a_sharded_strategy_refuses_other_plugins(plugin: CheckpointIO) -> None:
    with pytest.raises(TypeError, match=f"ZarrFSDPStrategy needs a ZarrCheckpointIO.*{type(plugin).__name__}"):
        ZarrFSDPStrategy(checkpoint_io=plugin)
    with pytest.raises(TypeError, match=f"needs a ZarrCheckpointIO.*{type(plugin).__name__}"):
        ZarrModelParallelStrategy().checkpoint_io = plugin
    own = ZarrCheckpointIO()
    assert ZarrFSDPStrategy(checkpoint_io=own).checkpoint_io is own


@pytest.mark.parametrize(
    ("strategy", "named"),
    [
        (SingleDeviceStrategy(), "TorchCheckpointIO"),
        (DDPStrategy(checkpoint_io=AsyncCheckpointIO()), "TorchCheckpointIO"),
        (ModelParallelStrategy(), "ModelParallelStrategy"),
        (FSDPStrategy(checkpoint_io=ZarrCheckpointIO()), "FSDPStrategy"),
        (DDPStrategy(checkpoint_io=AsyncCheckpointIO(ZarrCheckpointIO())), None),
        (ZarrModelParallelStrategy(), None),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Strategy) else str(value),
)
def test_fit_refuses_a_trainer_that_saves_without_zarr(strategy: Strategy, named: str | None, tmp_path: Path) -> None:
    callback = ZarrModelCheckpoint(tmp_path)
    trainer = SimpleNamespace(strategy=strategy, is_global_zero=True, checkpoint_callbacks=[callback])
    callback.setup(trainer, None, "validate")
    with nullcontext() if named is None else pytest.raises(TypeError, match=f"{tmp_path}.*{named}"):
        callback.setup(trainer, None, "fit")
        assert _plugin_of(strategy).folders == {str(tmp_path)}


@pytest.mark.parametrize(
    ("one", "worlds", "other"), [("auto", (1, 1), "auto"), ("auto", (1, 2), "fsdp2"), ("fsdp2", (2, 2), "fsdp2")]
)
def test_a_run_that_lightning_began_resumes(one: str, worlds: tuple[int, int], other: str, tmp_path: Path) -> None:
    """Resume from Lightning's file, or its folder of a sharded model. Retention then counts them as checkpoints."""
    run = tmp_path / "run"
    (whole, *_) = fit(worlds[0], folder=str(tmp_path / "whole"), strategy=one)
    (first, *_) = fit(worlds[0], folder=str(run), strategy=one, epochs=2, plain=True, top_k=2)
    for epochs, steps in [(3, range(9, 13)), (4, range(13, 17))]:
        saved = saved_state(f"{run}/last.ckpt") if one == "auto" else None
        for result in fit(worlds[1], folder=str(run), strategy=other, epochs=epochs, top_k=2, resume="last"):
            assert [*result["losses"]] == [*steps] and result["seen"] == steps[-1]
            assert result["resumed_from"] == f"{run}/last.ckpt"
            if saved:
                assert_same(result["restored"], saved)
            if worlds[0] == worlds[1]:
                assert result["losses"] == {step: whole["losses"][step] for step in steps}
    assert len(result["scores"]) == 2 and not set(first["scores"]) & set(result["scores"])
    kept = {Path(path).name for path in result["scores"]} | {"last.ckpt", "last-lightning.ckpt"}
    assert {path.name for path in run.iterdir()} == kept
    assert zarrckpt.open(f"{run}/last.ckpt").metadata["step"] == 16


def test_a_link_to_the_last_checkpoint_is_valid_and_removed_alone(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for epochs, background in [(2, False), (4, True)]:
        fit(1, folder=str(run), epochs=epochs, background=background, save_last="link", resume="last")
        names = {path.name: path.is_symlink() for path in run.iterdir()}
        assert names == {"last.ckpt": True, f"epoch={epochs - 1}-step={4 * epochs}.ckpt": False}
        assert zarrckpt.open(str(run / "last.ckpt")).metadata["step"] == 4 * epochs
    io, link, led_to = ZarrCheckpointIO(), str(run / "last.ckpt"), str(run / "epoch=3-step=16.ckpt")
    io.save_checkpoint({"epoch": 9}, link)
    assert io.load_checkpoint(link) == {"epoch": 9} and io.load_checkpoint(led_to)["epoch"] == 3
    io.link_checkpoint(led_to, link)
    assert io.load_checkpoint(link)["epoch"] == 3
    io.remove_checkpoint(link)
    assert not os.path.lexists(link) and io.load_checkpoint(led_to)["epoch"] == 3


def test_best_finds_what_any_model_checkpoint_monitors(tmp_path: Path) -> None:
    """Two of Lightning's own callbacks with metrics of their own, of which each names its checkpoints only."""
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "accelerator": "cpu"}
    options = {"save_top_k": -1, "save_last": True}
    losses = ModelCheckpoint(tmp_path / "losses", monitor="val_loss", **options)
    steps = ModelCheckpoint(tmp_path / "steps", monitor="step", mode="max", **options)
    trainer = Trainer(plugins=[ZarrCheckpointIO()], callbacks=[losses, steps], max_epochs=3, **quiet)
    loader = torch.utils.data.DataLoader(DATA, batch_size=8)
    trainer.fit(Tiny("auto", {}), loader, loader)
    for mode, choose in (("min", min), ("max", max)):
        expected = choose(losses.best_k_models, key=losses.best_k_models.__getitem__)
        assert zarrckpt.best(tmp_path / "losses", "val_loss", mode) == expected
    found = zarrckpt.checkpoints(tmp_path / "losses")
    assert {one.url: one.metrics.get("val_loss") for one in found if one.name != "last.ckpt"} == {
        path: score.item() for path, score in losses.best_k_models.items()
    }
    assert zarrckpt.open(tmp_path / "losses" / "last.ckpt").metadata == {"step": trainer.global_step, "epoch": 2}
    assert zarrckpt.open(steps.best_model_path).metadata == {"step": trainer.global_step, "epoch": 2}


def test_the_source_run_of_another_run_stays_whole(
    moto_bucket: S3Place, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With Lightning's own ModelCheckpoint, the first save warns and uses this package's class instead."""
    for name, value in moto_bucket.environment.items():
        monkeypatch.setenv(name, value)

    def fit_here(kind: type[ModelCheckpoint], name: str, epochs: int, start: str | None = None) -> ModelCheckpoint:
        callback = kind(moto_bucket.url(name), save_last=True)
        quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "accelerator": "cpu"}
        trainer = Trainer(plugins=[ZarrCheckpointIO()], callbacks=[callback], max_epochs=epochs, **quiet)
        trainer.fit(Tiny("auto", {}), torch.utils.data.DataLoader(torch.ones(8, 8), batch_size=8), ckpt_path=start)
        return callback

    old = fit_here(ModelCheckpoint, "one", 1)
    assert moto_bucket.url("one") in caplog.text and "ZarrModelCheckpoint" in caplog.text
    caplog.clear()
    new = fit_here(ZarrModelCheckpoint, "one", 2, "last")
    assert new.last_model_path == old.last_model_path
    assert zarrckpt.open(new.last_model_path).metadata == {"step": 2, "epoch": 1}
    with pytest.raises(zarrckpt.CheckpointNotFoundError):
        zarrckpt.open(old.best_model_path)
    other = fit_here(ZarrModelCheckpoint, "other", 3, new.best_model_path)
    for path in (new.best_model_path, other.best_model_path):
        zarrckpt.open(path)
    assert not caplog.text


def test_stored_paths_of_checkpoints_elsewhere_are_ignored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Lightning would delete and open the paths in a ModelCheckpoint's state."""
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "accelerator": "cpu"}
    run, victim, io = str(tmp_path / "run"), "memory://victim/last.ckpt", ZarrCheckpointIO()
    zarrckpt.save({"epoch": 1}, victim)

    def fit_here(kind: type[ModelCheckpoint], folder: str, epochs: int, start: str | None = None) -> Trainer:
        trainer = Trainer(plugins=[io], callbacks=[kind(folder, save_last=True)], max_epochs=epochs, **quiet)
        trainer.fit(Tiny("auto", {}), torch.utils.data.DataLoader(torch.ones(8, 8), batch_size=8), ckpt_path=start)
        return trainer

    fit_here(ModelCheckpoint, run, 1)
    forged = io.load_checkpoint(f"{run}/last.ckpt")
    (state,) = (state for state in forged["callbacks"].values() if "best_model_path" in state)
    state |= dict.fromkeys(("best_model_path", "kth_best_model_path", "last_model_path"), victim)
    state["best_k_models"] = {victim: torch.tensor(0.0)}
    io.save_checkpoint(forged, f"{run}/forged.ckpt")
    for epochs, kind in enumerate((ModelCheckpoint, ZarrModelCheckpoint), start=2):
        caplog.clear()
        found = fit_here(kind, run, epochs, f"{run}/forged.ckpt").checkpoint_callback
        assert victim in caplog.text
        for path in (found.best_model_path, found.last_model_path, *found.best_k_models):
            assert Path(path).parent == Path(run)
        assert zarrckpt.open(victim).load() == {"epoch": 1}


@pytest.mark.parametrize("pairs", [True, False])
def test_hyperparameters_that_name_code_are_refused(pairs: bool, tmp_path: Path) -> None:
    named, url = {"_instantiator": "os.system", "strategy": "auto"}, str(tmp_path / "a.ckpt")
    listed = {"hparams": [[*pair] for pair in named.items()], "hyper_parameters": {}}
    state = {**(listed if pairs else {"hyper_parameters": named}), "pytorch-lightning_version": "2.6.6"}
    ZarrCheckpointIO().save_checkpoint({**state, "state_dict": {}}, url)
    with pytest.raises(zarrckpt.UnsafeValueError, match="hparams" if pairs else "hyper_parameters"):
        load_from_checkpoint(Tiny, url)
    with pytest.raises(ValueError, match="allowlist"):  # Lightning's own
        load_from_checkpoint(Tiny, url, allow_pickle=True)


def test_load_from_checkpoint_needs_only_a_checkpoint(tmp_path: Path) -> None:
    fit(2, folder=str(tmp_path), strategy="fsdp2", epochs=1, hyperparameters={"sizes": {1, 2}})
    url = f"{tmp_path}/last.ckpt"
    model = load_from_checkpoint(Tiny, url, strategy="auto")
    assert model.hparams.strategy == "auto" and model.hparams.hyperparameters == {"sizes": {1, 2}}
    saved = saved_state(url)["weights"]
    assert all(torch.equal(value, saved[name]) for name, value in model.state_dict().items())


def test_a_save_finishes_before_slurm_requeues_the_job(tmp_path: Path) -> None:
    io = ZarrCheckpointIO(background=True)
    io.save_checkpoint({"w": torch.ones(1_000_000)}, f"{tmp_path}/hpc_ckpt_1.ckpt")
    assert len(zarrckpt.open(f"{tmp_path}/hpc_ckpt_1.ckpt")) == 1
    io.wait()


def test_a_partly_saved_model_loads_in_part(tmp_path: Path) -> None:
    fit(2, folder=str(tmp_path), strategy="fsdp2", epochs=2, leave_out="net.0.")
    saved = zarrckpt.open(f"{tmp_path}/last.ckpt")
    assert "state_dict.net.2.weight" in saved and "state_dict.net.0.weight" not in saved
    assert "optimizer_0.state.net.0.weight.exp_avg" in saved
    left = saved_state(f"{tmp_path}/last.ckpt")
    for result in fit(2, folder=str(tmp_path), strategy="fsdp2", resume="last", leave_out="net.0."):
        weights = result["restored"]["weights"]
        assert_same({**result["restored"], "weights": {name: weights[name] for name in left["weights"]}}, left)


@pytest.mark.parametrize(
    ("one", "worlds", "other"), [("fsdp2", (2, 1), "fsdp2"), ("ddp", (2, 2), "fsdp2"), ("fsdp1", (2, 1), "fsdp1")]
)
def test_fabric_loads_on_other_numbers_of_processes(
    one: str, worlds: tuple[int, int], other: str, moto_bucket: S3Place
) -> None:
    env, url = moto_bucket.environment, moto_bucket.url("fabric/step-3")
    saved = run_ranks(save_with_fabric, one, url, world_size=worlds[0], env=env)
    for loaded in run_ranks(load_with_fabric, other, url, world_size=worlds[1], env=env):
        assert loaded["remainder"] == {"notes": {"by": "a test"}}
        assert loaded["step"] == 3 and loaded["scheduler"] == saved[0]["scheduler"]
        assert_same(loaded, saved[0])


def test_the_page_and_the_example_run_and_resume(
    tmp_path: Path, moto_bucket: S3Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in moto_bucket.environment.items():
        monkeypatch.setenv(name, value)
    root = Path(zarrckpt.__file__).resolve().parents[1]
    monkeypatch.chdir(tmp_path)
    page = (root / "docs" / "how-to" / "lightning.md").read_text().replace("s3://bucket", moto_bucket.url("page"))
    trainer_code, fabric_code, preemption_code, alone_code, amid_code, average_code = re.findall(
        r"```python no-run\n(.*?)```", page, re.DOTALL
    )
    for last in (None, moto_bucket.url("page/run/last.ckpt/zarr.json")):
        names: dict[str, Any] = {"__name__": "page"}
        exec(trainer_code + alone_code + fabric_code, names)
        exec(f"import lightning, signal\n{preemption_code}", names)  # PREEMPTED has a copy that runs
        assert names["trainer"].ckpt_path == last and names["trainer"].global_step == 80
        assert zarrckpt.latest(moto_bucket.url("page/fabric")) == moto_bucket.url("page/fabric/step-100")
    exec(amid_code + average_code, names)
    assert zarrckpt.open(moto_bucket.url("page/averaged/last.ckpt")).metadata == {"step": 10, "epoch": 1}
    try:
        for epochs in (1, 2):
            callback = ZarrModelCheckpoint("sharded", save_last=True)
            strategy = ZarrModelParallelStrategy(1, 1)
            options = {"accelerator": "cpu", "devices": 1, "logger": False, "enable_progress_bar": False}
            trainer = Trainer(strategy=strategy, callbacks=[callback], max_epochs=epochs, **options)
            trainer.fit(names["Averaged"](), names["data"], names["data"], ckpt_path="last")
            assert zarrckpt.open("sharded/last.ckpt").load()["state_dict"]["average.n_averaged"] == 8 * epochs
    finally:
        torch.distributed.destroy_process_group()
    example = runpy.run_path(str(root / "examples" / "lightning_run.py"), run_name="example")
    for _ in range(2):
        example["train"](str(tmp_path))
        assert "after epoch 10" in capsys.readouterr().out


def test_fabric_loads_raw_weights_from_a_url_or_a_torch_file(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 3))
    weights = model.state_dict()
    zarrckpt.save(weights, str(tmp_path / "zarr"))
    torch.save(weights, tmp_path / "file.pt")
    for strategy, name in [("fsdp2", "zarr"), ("fsdp2", "file.pt"), ("ddp", "zarr"), ("ddp", "file.pt")]:
        for loaded in run_ranks(load_raw_with_fabric, strategy, str(tmp_path / name), world_size=2):
            assert all(torch.equal(value, loaded[key]) for key, value in weights.items())


class Versioned(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = NewLayer()

    def training_step(self, batch: Any, _: int) -> Any:
        return (batch @ self.layer.w).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


@pytest.mark.parametrize("plugin", [TorchCheckpointIO, ZarrCheckpointIO])
def test_modules_get_the_versions_of_their_weights(plugin: Callable[[], CheckpointIO], tmp_path: Path) -> None:
    options: Any = {"accelerator": "cpu", "plugins": [plugin()]}
    features = ("progress_bar", "checkpointing", "model_summary")
    quiet: Any = {"logger": False, **{f"enable_{name}": False for name in features}}
    data, weight, url = torch.utils.data.DataLoader(torch.ones(4, 3)), NewLayer().w, str(tmp_path / "a.ckpt")
    trainer = Trainer(max_epochs=1, **options, **quiet)
    trainer.fit(Versioned(), data)
    trainer.save_checkpoint(url)
    resumed = Versioned()
    Trainer(max_epochs=2, **options, **quiet).fit(resumed, data, ckpt_path=url)
    assert torch.equal(resumed.layer.w, weight)
    if plugin is ZarrCheckpointIO:
        assert torch.equal(load_from_checkpoint(Versioned, url).layer.w, weight)

    fabric = Fabric(devices=1, **options)
    module = fabric.setup_module(torch.nn.Sequential(NewLayer(), torch.nn.Linear(3, 3)))
    fabric.save(tmp_path / "fabric", {"m": module})
    fabric.load(tmp_path / "fabric", {"m": module})
    assert torch.equal(next(module.parameters()), weight)
    (zarrckpt.save if plugin is ZarrCheckpointIO else torch.save)(module.state_dict(), tmp_path / "raw")
    fabric.load_raw(tmp_path / "raw", module)
    assert torch.equal(next(module.parameters()), weight)


def test_other_shapes_are_refused_by_name(tmp_path: Path) -> None:
    fit(1, folder=str(tmp_path), epochs=1)
    module = Tiny("auto", {})
    module.net = torch.nn.Sequential(torch.nn.Linear(8, 4))
    trainer = Trainer(logger=False, accelerator="cpu", plugins=[ZarrCheckpointIO()], enable_progress_bar=False)
    with pytest.raises(RuntimeError, match=r"net\.2\.weight"):
        trainer.validate(module, torch.utils.data.DataLoader(torch.ones(8, 8)), ckpt_path=f"{tmp_path}/last.ckpt")
    with pytest.raises(zarrckpt.CheckpointNotFoundError):
        trainer.validate(module, torch.utils.data.DataLoader(torch.ones(8, 8)), ckpt_path=f"{tmp_path}/none.ckpt")


PREEMPTED = """
import os, signal, sys, lightning, torch, zarrckpt

class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
    def training_step(self, batch, index):
        return self.layer(batch).sum()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.0)

class Saves(lightning.Callback):
    def setup(self, trainer, module, stage):
        self.manager = zarrckpt.CheckpointManager(sys.argv[1])
        self.handler = signal.getsignal(signal.SIGTERM)
    def on_train_start(self, trainer, module):
        signal.signal(signal.SIGTERM, self.handler)
    def on_train_batch_end(self, trainer, module, *batch):
        if trainer.global_step == 5 and trainer.global_rank == 0:
            os.killpg(os.getpgrp(), signal.SIGTERM)  # as torchrun does
        self.manager.step(trainer.global_step, {"model": module, "step": trainer.global_step})
        trainer.should_stop = self.manager.preempted
    def on_train_end(self, trainer, module):
        self.manager.close()

def main():
    loader = torch.utils.data.DataLoader(
        torch.ones(4000, 1), num_workers=2, persistent_workers=True, multiprocessing_context="fork"
    )
    trainer = lightning.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, callbacks=[Saves()], logger=False,
        enable_checkpointing=False, enable_progress_bar=False,
    )
    trainer.fit(Model(), loader)

if __name__ == "__main__":
    main()
"""


def test_workers_live_until_the_save_before_preemption(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(PREEMPTED)
    done = launch(script, str(tmp_path / "run"), ranks=2, timeout=120)
    assert done.returncode == 0, done.stderr
    state = {"step": 0}
    zarrckpt.load(state, str(zarrckpt.latest(tmp_path / "run")), strict=False)
    assert 5 <= state["step"] < 1000
