"""Runs with Accelerate that are killed and resumed, the state of an accelerator, and wrong use."""

from __future__ import annotations

import json
import signal
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, DistributedType, GradientState
from accelerate.utils import ProjectConfiguration
from harness.models import NewLayer
from launched import launch, rows_in

import zarrckpt
from zarrckpt.integrations import _values
from zarrckpt.integrations.accelerate import load_state, restoring, save_state, state_of

SCRIPT = Path(__file__).with_name("accelerate_run.py")


def run(ranks: int, env: dict[str, str] | None = None, **fields: Any) -> list[dict[str, Any]]:
    """Return the script's output on these ranks, by rank and in order. It may kill itself if the fields request it."""
    done = launch(SCRIPT, json.dumps(fields), ranks=ranks, timeout=120, env=env)
    killed = done.returncode == -signal.SIGKILL if ranks == 1 else "SIGKILL" in done.stderr
    assert killed if "kill_at" in fields else done.returncode == 0, done.stderr[-4000:]
    return rows_in(done.stdout)


CASES = {
    "alone": (1, {"scaler": True, "hooks": True}),
    "ddp with a manager": (2, {"manager": True, "stateful": find_spec("torchdata") is not None}),
    "fsdp2 in the background": (2, {"fsdp2": True, "hooks": True, "background": True}),
}


@pytest.mark.parametrize("name", CASES)
def test_a_killed_run_resumes_bit_for_bit(name: str, tmp_path: Path, moto_bucket: Any) -> None:
    ranks, fields = CASES[name]
    # Runs are on S3, except those that may be killed during a save.
    local = "background" in fields
    url, env = (str(tmp_path), {}) if local else (moto_bucket.url("run"), moto_bucket.environment)
    options = None if local else moto_bucket.storage_options
    killed = run(ranks, env, url=url, steps=99, kill_at=9, **fields)
    # An older checkpoint leaves more steps to compare.
    newest = zarrckpt.latest(url, storage_options=options)
    assert newest is not None and newest[-1] in "68"
    if newest[-1] == "8":
        zarrckpt.remove(newest, storage_options=options)
    # With another seed, all state that is not from the checkpoint differs.
    resumed = run(ranks, env, url=url, steps=9, seed=1, **fields)

    assert [row["restored"] for row in resumed if "restored" in row] == [6] * ranks
    assert [row for row in resumed if "step" in row] == [row for row in killed if row.get("step", 0) > 6]
    assert [row["hooked"] for row in resumed if "hooked" in row] == [{"models": 1}] * ranks * ("hooks" in fields)


def test_a_run_resumes_on_other_numbers_of_processes(tmp_path: Path) -> None:
    fields = {"url": str(tmp_path), "dropout": 0.0}
    whole = {row["step"]: row for row in run(1, steps=8, **fields) if "step" in row}
    for step in (8, 6, 4):
        zarrckpt.remove(str(tmp_path / f"step-{step}"))
    before = whole[2]
    for ranks, steps, more in [(2, 4, {"fsdp2": True}), (4, 6, {"fsdp2": True}), (1, 8, {"seed": 1})]:
        rows = run(ranks, steps=steps, **fields, **more)
        restored = [row for row in rows if "restored" in row]
        assert [row["restored"] for row in restored] == [steps - 2] * ranks
        # All moments, bit for bit.
        assert all(row[key] == before[key] for row in restored for key in ("moments", "ema", "own", "lr"))
        for row in rows:
            if "step" in row:
                assert row["loss"] == pytest.approx(whole[row["step"]]["loss"], rel=1e-4)
                before = row


# -- in this process


@pytest.fixture(autouse=True)
def _a_fresh_accelerator() -> Iterator[None]:
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


class Holder:
    """A registered object that returns a given state."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def accelerator_with(*custom: Any) -> tuple[Accelerator, torch.nn.Module]:
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = accelerator.prepare(model, optimizer)
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    accelerator.register_for_checkpointing(*custom)
    return accelerator, model


def test_objects_that_need_pickle_are_named_at_the_save(tmp_path: Path) -> None:
    state = {"plain": [1, (2.5, "x")], "seen": Counter("aab"), "when": {"path": Path("x")}, "end": (1, signal.SIGTERM)}
    holder = Holder(state)
    accelerator, _ = accelerator_with(holder)
    with pytest.raises(
        zarrckpt.UnsupportedValueError, match=r"custom\.0\.seen' is or has a collections.Counter"
    ) as err:
        save_state(accelerator, str(tmp_path / "a"))
    assert "custom.0.when.path" in str(err.value) and "custom.0.end" in str(err.value)
    assert "signal.Signals" in str(err.value) and "plain" not in str(err.value)
    assert zarrckpt.latest(str(tmp_path)) is None

    with pytest.warns(UserWarning, match="custom"):
        save_state(accelerator, str(tmp_path / "a"), allow_pickle=True)
    holder.state = {}
    with pytest.raises(zarrckpt.UnsafeValueError):
        load_state(accelerator, str(tmp_path / "a"))
    load_state(accelerator, str(tmp_path / "a"), allow_pickle=True)
    assert holder.state == state and type(holder.state["seen"]) is Counter


def test_extra_state_that_is_not_data_is_named_at_the_save(tmp_path: Path) -> None:
    class Extra(torch.nn.Linear):
        def get_extra_state(self) -> Any:
            return {"made": Path("x")}

        def set_extra_state(self, state: Any) -> None:
            pass

    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(Extra(2, 2))
    accelerator.prepare(torch.optim.SGD([{"params": model.parameters(), "hook": print}], lr=0.1))
    with pytest.raises(zarrckpt.UnsupportedValueError, match=r"model.*made") as err:
        save_state(accelerator, str(tmp_path / "a"))
    assert "optimizer.param_groups.0.hook" in str(err.value)


def test_registered_objects_get_their_saved_state(tmp_path: Path) -> None:
    module, growing = torch.nn.Linear(2, 2), Holder({"losses": {"1": 0.5}, "shadow": {"w": torch.ones(2)}, "none": {}})
    unused = torch.optim.lr_scheduler.MultiStepLR(torch.optim.SGD(module.parameters()), [1, 2])
    own = Holder({"own": zarrckpt.PerRank({"n": 1})})
    accelerator, model = accelerator_with(module, growing, unused, own)
    accelerator.step, weights = 5, {key: value.clone() for key, value in model.state_dict().items()}
    future = save_state(accelerator, str(tmp_path / "a"))
    future.copied(0)
    assert future.result(0).url == str(tmp_path / "a")
    assert accelerator.save_iteration == 1

    saved, growing.state, memory = growing.state, {"losses": {"0": 0.1}}, module.weight.data_ptr()
    expected, own.state = module.weight.detach().clone(), {"own": zarrckpt.PerRank({"n": 0})}
    with torch.no_grad():
        for parameter in [*module.parameters(), *model.parameters()]:
            parameter.zero_()
    accelerator.step = accelerator.project_configuration.iteration = 0
    load_state(accelerator, str(tmp_path / "a"))
    assert (accelerator.step, accelerator.save_iteration) == (5, 1)
    assert module.weight.equal(expected) and module.weight.data_ptr() == memory
    assert growing.state.keys() == saved.keys() and growing.state["shadow"]["w"].equal(torch.ones(2))
    assert growing.state["losses"] == {"1": 0.5} and growing.state["none"] == {}
    assert type(unused.milestones) is Counter and own.state["own"].value == {"n": 1}
    assert all(value.equal(weights[key]) for key, value in model.state_dict().items())


class Average:
    def __init__(self) -> None:
        self.net = NewLayer()

    def state_dict(self) -> dict[str, Any]:
        return self.net.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.net.load_state_dict(state)


def test_registered_objects_get_the_versions_of_modules(tmp_path: Path) -> None:
    """As with Accelerate's own save_state."""
    average, module = Average(), NewLayer()
    accelerator, _ = accelerator_with(average, module)
    for background in (False, True):
        save_state(accelerator, str(tmp_path / f"{background}"), background=background).result()
        load_state(accelerator, str(tmp_path / f"{background}"))
        assert torch.equal(average.net.w, NewLayer().w) and torch.equal(module.w, NewLayer().w)


def test_the_project_configuration_sets_names_and_limit(moto_bucket: Any) -> None:
    options = moto_bucket.storage_options
    accelerator, model = accelerator_with()
    with pytest.raises(ValueError, match="automatic_checkpoint_naming"):
        save_state(accelerator)
    url = moto_bucket.url("project")
    project = {"project_dir": url, "automatic_checkpoint_naming": True, "total_limit": 2}
    accelerator.project_configuration = ProjectConfiguration(**project)
    with pytest.raises(zarrckpt.CheckpointNotFoundError):
        load_state(accelerator, storage_options=options)

    for _ in range(3):
        save_state(accelerator, storage_options=options)
    expected = model.weight.detach().clone()
    # Earlier checkpoints stay until this one is committed.
    save_state(accelerator, storage_options=options, background=True).result()
    with torch.no_grad():
        model.weight.zero_()
    accelerator.project_configuration.iteration = 0
    report = load_state(accelerator, storage_options=options)
    assert model.weight.equal(expected) and accelerator.save_iteration == 4
    assert report.url == f"{url}/checkpoints/checkpoint_3"
    zarrckpt.open(f"{url}/checkpoints/checkpoint_1", storage_options=options)
    with pytest.raises(zarrckpt.CheckpointNotFoundError):
        zarrckpt.open(f"{url}/checkpoints/checkpoint_0", storage_options=options)


def test_the_projects_folder_may_be_any_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    accelerator, _ = accelerator_with()
    in_memory = f"memory://{tmp_path.name}"
    forms = {"~/a": f"{tmp_path}/a", f"file://{tmp_path}/b": f"{tmp_path}/b", Path(in_memory): in_memory}
    for form, expected in forms.items():
        accelerator.project_configuration = ProjectConfiguration(str(form), automatic_checkpoint_naming=True)
        assert save_state(accelerator).result().url == f"{expected}/checkpoints/checkpoint_0"
        assert load_state(accelerator).url == f"{expected}/checkpoints/checkpoint_0"


def test_an_optimizer_may_train_two_models(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    # Chunks of 64 KiB and more are linked.
    first, second = accelerator.prepare(torch.nn.Linear(2, 20_000), torch.nn.Linear(20_000, 1))
    optimizers = [torch.optim.AdamW([*first.parameters(), *second.parameters()]), torch.optim.SGD(second.parameters())]
    both, _ = accelerator.prepare(*optimizers)
    second(first(torch.ones(2))).sum().backward()
    both.step()
    save_state(accelerator, str(tmp_path / "a"))
    # Accelerate counts micro-batches and saves, not steps of the training.
    assert zarrckpt.open(tmp_path / "a").info.step is None
    saved = save_state(accelerator, str(tmp_path / "b"), metadata={"step": 7}).result()
    assert saved.base == str(tmp_path / "a") and saved.linked_bytes > saved.sent_bytes
    assert zarrckpt.open(tmp_path / "b").info.step == 7
    moment = both.state[second.weight]["exp_avg"].clone()
    both.state.clear()
    load_state(accelerator, str(tmp_path / "a"))
    assert both.state[second.weight]["exp_avg"].equal(moment)
    assert {"model", "optimizer", "optimizer_1"} <= {*zarrckpt.open(str(tmp_path / "a")).load()}


def test_a_load_with_other_objects_is_an_error(tmp_path: Path) -> None:
    accelerator, _ = accelerator_with(Holder({"a": 1}), Holder({"b": 2}))
    save_state(accelerator, str(tmp_path / "a"))
    accelerator._custom_objects.pop()
    with pytest.raises(zarrckpt.KeyMismatchError, match="'registered objects': 2"):
        load_state(accelerator, str(tmp_path / "a"))
    load_state(accelerator, str(tmp_path / "a"), strict=False)


def test_an_error_in_the_background_is_raised_by_the_next_save(tmp_path: Path) -> None:
    holder = Holder({"a": object()})
    accelerator, _ = accelerator_with(holder)
    future = save_state(accelerator, str(tmp_path / "a"), background=True)
    holder.state = {}
    with pytest.raises(zarrckpt.UnsupportedValueError, match=r"custom\.0\.a"):
        save_state(accelerator, str(tmp_path / "b"), background=True)
    assert isinstance(future.exception(), zarrckpt.UnsupportedValueError)
    save_state(accelerator, str(tmp_path / "b"), background=True).result()


def test_device_generators_are_restored_on_fewer_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    states = [torch.tensor([1]), torch.tensor([2])]
    restored: dict[int, int] = {}
    devices = SimpleNamespace(
        get_rng_state_all=lambda: list(states),
        device_count=lambda: len(states),
        set_rng_state=lambda state, device: restored.update({device: state.item()}),
    )
    monkeypatch.setattr(torch, "get_device_module", lambda device: devices)
    saved = _values.random_state(torch.device("cuda", 0))
    _values.set_random_state(torch.device("cuda", 0), saved)
    assert restored == {0: 1, 1: 2}
    restored.clear()
    del states[1]
    _values.set_random_state(torch.device("cuda", 0), saved)
    assert restored == {0: 1}


def test_wrong_use_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator, _ = accelerator_with()
    with restoring(accelerator):  # no load, so the accelerator is unchanged
        pass
    save_state(accelerator, str(tmp_path / "a"))
    with pytest.raises(zarrckpt.UnsupportedValueError, match="restoring"):
        zarrckpt.load(state_of(accelerator), str(tmp_path / "a"))
    monkeypatch.setattr(type(accelerator), "distributed_type", DistributedType.DEEPSPEED)
    for call in (save_state, load_state):
        with pytest.raises(zarrckpt.UnsupportedValueError, match="DEEPSPEED"):
            call(accelerator, str(tmp_path / "b"))
    content = torch.zeros(1, dtype=torch.uint8)
    (tmp_path / "folder").mkdir()
    for files in ({"../x": content}, {"a\0": content}, {"folder": content}, {"x" * 300: content}, {"y": 3}, [content]):
        with pytest.raises(zarrckpt.CorruptCheckpointError):
            _values.write_files(str(tmp_path), files)  # type: ignore[arg-type]
    assert not (tmp_path.parent / "x").exists()


def test_a_stateful_loader_is_refused_on_another_number_of_processes(tmp_path: Path) -> None:
    pytest.importorskip("torchdata")
    from accelerate.utils import DataLoaderConfiguration

    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True))
    loader = accelerator.prepare(torch.utils.data.DataLoader(torch.arange(12.0), batch_size=2))
    batches = iter(loader)
    next(batches), next(batches)
    save_state(accelerator, str(tmp_path / "a"))
    expected = [*batches]
    load_state(accelerator, str(tmp_path / "a"))
    assert [x.tolist() for x in loader] == [x.tolist() for x in expected]
    accelerator.state.num_processes = 2
    with pytest.raises(zarrckpt.KeyMismatchError, match="saved by 1 processes, got 2"):
        load_state(accelerator, str(tmp_path / "a"))
    load_state(accelerator, str(tmp_path / "a"), dataloaders=False)
