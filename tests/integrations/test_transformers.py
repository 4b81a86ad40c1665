"""The Trainer of transformers: killed, resumed, on other numbers of processes; its rules; models from checkpoints."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import transformers_run
from harness.shared_chunks import sharing_small_chunks
from launched import launch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
)
from transformers.trainer_callback import ExportableState

import zarrckpt
from zarrckpt._store import StoreSpec
from zarrckpt.integrations.transformers import ZarrTrainer, export_pretrained, load_pretrained

SCRIPT = Path(transformers_run.__file__)
ROOT = SCRIPT.parents[2]


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run in the test's folder, where the Trainer writes its other files."""
    monkeypatch.chdir(tmp_path)
    transformers.logging.set_verbosity_error()
    yield


def in_processes(ranks: int, *trainings: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    return launch(SCRIPT, json.dumps(trainings), ranks=ranks, timeout=240)


def trained(**given: Any) -> ZarrTrainer:
    return transformers_run.train(given)


def assert_equal(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Compare losses, weights, the optimizer's state and generators bit for bit."""
    assert one["losses"] == other["losses"]
    for part in ("weights", "moments"):
        assert one[part].keys() == other[part].keys()
        different = [name for name, value in one[part].items() if not torch.equal(value, other[part][name])]
        assert not different, (part, different)
    assert all(map(torch.equal, one["rng"], other["rng"]))


# -- killed and resumed


def test_two_processes_with_s3_are_killed_and_resume_bit_for_bit(tmp_path: Path, moto_bucket: Any) -> None:
    store = {"checkpoint_dir": moto_bucket.url("run"), "storage_options": moto_bucket.storage_options}
    given = {"arguments": {"per_device_train_batch_size": 2}}
    killed = {**given, "trainer": {**store, "background": True}, "killed": {"step": 10, "rank": 1}}
    whole = {**given, "trainer": {"checkpoint_dir": "whole"}, "result": "whole.pt"}
    done = in_processes(2, whole, killed)
    assert done.returncode != 0 and "SIGKILL" in done.stderr, done.stderr
    newest = zarrckpt.latest(store["checkpoint_dir"], storage_options=store["storage_options"])
    assert newest is not None and newest.endswith(("step-00000008", "step-00000004"))

    resumed = {**given, "trainer": store, "seed": 2, "resume": True, "result": "resumed.pt"}
    signalled = {**given, "trainer": {"checkpoint_dir": "signalled", "signals": ["SIGTERM"]}}
    # The whole process group of rank 1 gets the signal, with the workers of its DataLoader.
    workers = {"dataloader_num_workers": 2, "dataloader_persistent_workers": True}
    term = {"step": 5, "rank": 1, "number": signal.SIGTERM, "group": True}
    ended = {**signalled, "arguments": {**given["arguments"], **workers}, "killed": term, "result": "ended.pt"}
    done = in_processes(2, resumed, ended, {**signalled, "resume": True, "result": "going-on.pt"})
    assert done.returncode == 0, done.stderr
    expected = torch.load("whole.pt")
    assert_equal(expected, torch.load("resumed.pt"))
    last = torch.load("ended.pt")["step"]
    assert last < 12
    del expected["losses"][last]  # it is saved before the Trainer logs that step
    assert_equal(expected, torch.load("going-on.pt"))
    ckpt = zarrckpt.open(f"{store['checkpoint_dir']}/step-00000012", storage_options=store["storage_options"])
    assert ckpt.info.world_size == 2 and ckpt.entry("trainer.rng.ranks.torch").ranks == (0, 1)
    assert not Path("out").is_dir() or not [*Path("out").glob("*")]


def test_adapters_on_s3_are_killed_and_resume_bit_for_bit(moto_bucket: Any) -> None:
    store = {"storage_options": moto_bucket.storage_options, "adapters_only": True}
    given = {"lora": True, "arguments": {"output_dir": moto_bucket.url("run")}, "trainer": store}
    done = in_processes(1, {**given, "killed": {"step": 10}})
    assert done.returncode == -signal.SIGKILL, done.stderr
    trainer = trained(**given, resume="auto")
    resumed = transformers_run.result(trainer)
    with pytest.raises(zarrckpt.StorageError, match="final"):
        trainer.save_model(moto_bucket.url("final"))
    trainer.save_model("final")
    assert Path("final/adapter_model.safetensors").exists() and not Path("s3:").exists()

    local = {**given, "arguments": {}, "trainer": {"checkpoint_dir": "whole"}}
    with sharing_small_chunks():
        assert_equal(transformers_run.result(trained(**local)), resumed)
    ckpt = zarrckpt.open(moto_bucket.url("run/step-00000012"), storage_options=moto_bucket.storage_options)
    tensors = [name for name in ckpt.tensors if name.startswith(("model.", "optimizer."))]
    assert tensors and all("lora_" in name for name in tensors)
    whole = zarrckpt.open("whole/step-00000012")
    assert ckpt.nbytes < whole.nbytes / 2
    assert whole.info.reused is not None and whole.info.reused.nbytes > whole.nbytes / 2, "frozen weights are linked"


def test_fsdp2_resumes_on_one_process_and_back() -> None:
    still = {"config": {"attention_dropout": 0.0}, "arguments": {"per_device_train_batch_size": 2}}
    alone = {"config": {"attention_dropout": 0.0}}
    first = {**still, "fsdp": True, "trainer": {"checkpoint_dir": "first"}, "result": "first.pt"}
    # Load from one process, and from two that shard.
    trained(**alone, trainer={"checkpoint_dir": "alone"})
    back = {**still, "fsdp": True, "trainer": {"checkpoint_dir": "back"}, "resume": "alone/step-00000008"}
    again = {**still, "fsdp": True, "trainer": {"checkpoint_dir": "again"}, "resume": "first/step-00000008"}
    # Models that transformers shards while loading them work, too.
    LlamaForCausalLM(transformers_run.config(attention_dropout=0.0)).save_pretrained("base")
    own = {**still, "distributed": {"fsdp_size": 2}, "trainer": {"checkpoint_dir": "own"}, "result": "own.pt"}
    own_again = {**own, "trainer": {"checkpoint_dir": "own-again"}, "resume": "own/step-00000008"}
    trainings = [{**first, "model_folder": "unwritten"}, {**back, "result": "back.pt"}, {**again, "result": "again.pt"}]
    done = in_processes(2, *trainings, own, {**own_again, "result": "own-again.pt"})
    assert done.returncode == 0, done.stderr
    assert not Path("unwritten").exists() and "unwritten" in done.stderr
    assert torch.load("own.pt")["is_sharded"]
    assert_equal(torch.load("own.pt"), torch.load("own-again.pt"))
    two = torch.load("first.pt")
    assert two["is_sharded"] and zarrckpt.open("first/step-00000008").info.world_size == 2
    assert_equal(two, torch.load("again.pt"))
    one = transformers_run.result(trained(**alone, trainer={"checkpoint_dir": "one"}, resume="first/step-00000008"))
    for other in (one, torch.load("back.pt")):
        assert other["losses"].keys() == two["losses"].keys()
        assert all(abs(other["losses"][step] - loss) < 1e-4 for step, loss in two["losses"].items())
    # Before the first step, the loaded moments equal the saved ones.
    for folder, other in (("first", one), ("alone", torch.load("back.pt"))):
        saved = zarrckpt.open(f"{folder}/step-00000008").load("optimizer")["optimizer"]["state"]
        moments = {f"{name}.{slot}": value for name, slots in saved.items() for slot, value in slots.items()}
        assert moments.keys() == other["loaded"].keys()
        assert all(torch.equal(value, other["loaded"][name]) for name, value in moments.items())


# -- the Trainer's settings


def steps(folder: str) -> list[int]:
    return sorted(int(path.name[5:]) for path in Path(folder).glob("step-*"))


class Scripted(ZarrTrainer):
    """A Trainer whose evaluations return given losses."""

    scores: dict[int, float]

    def evaluate(self, *args: Any, **named: Any) -> dict[str, float]:
        metrics = {"eval_score": self.scores[self.state.global_step]}
        self.log(dict(metrics))
        return metrics


@pytest.mark.parametrize(
    ("limit", "background", "kept"), [(1, False, [4, 12]), (2, True, [4, 12]), (3, False, [4, 10, 12])]
)
def test_the_best_is_kept_and_loaded(limit: int, background: bool, kept: list[int]) -> None:
    best = {"metric_for_best_model": "score", "greater_is_better": True, "load_best_model_at_end": True}
    args = transformers_run.arguments(save_steps=2, eval_strategy="steps", eval_steps=2, save_total_limit=limit, **best)
    model = LlamaForCausalLM(transformers_run.config())
    sets = {"train_dataset": transformers_run.dataset(), "eval_dataset": transformers_run.dataset(8)}
    trainer = Scripted(model, args, **sets, checkpoint_dir="run", background=background)
    # The first of several equal checkpoints is the best.
    trainer.scores = {2: 0.1, 4: 0.9, 6: 0.3, 8: 0.9, 10: 0.2, 12: 0.2}
    trainer.train()
    assert steps("run") == kept
    assert trainer.state.best_model_checkpoint == str(Path("run/step-00000004").resolve())
    assert zarrckpt.open("run/step-00000004").metadata["eval_score"] == 0.9
    saved = zarrckpt.open("run/step-00000004").load("model")["model"]
    assert all(torch.equal(value, saved[name]) for name, value in model.state_dict().items())

    # After a resume, the earlier best is known, even if the run's folder was moved.
    Path("run").rename("moved")
    args = dataclasses.replace(args, max_steps=14)
    again = Scripted(model, args, **sets, checkpoint_dir="moved")
    again.scores = {**trainer.scores, 14: 0.5}
    again.train(resume_from_checkpoint=True)
    assert again.state.best_model_checkpoint == str(Path("moved/step-00000004").resolve())
    assert 4 in steps("moved") and 14 in steps("moved")


class NamesBest(TrainerCallback):
    """Callback that replaces the name of the best checkpoint in the state that is saved next."""

    def __init__(self, text: str) -> None:
        self.text = text

    def on_step_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        state.best_model_checkpoint = self.text


@pytest.mark.parametrize("form", ["{}", "../evil/step-00000001", "simplecache::file://{}"])
def test_a_best_checkpoint_outside_the_run_is_not_opened(form: str, caplog: pytest.LogCaptureFixture) -> None:
    evil = form.format(Path("evil/step-00000001").resolve())
    model = LlamaForCausalLM(transformers_run.config())
    zarrckpt.save({"model": LlamaForCausalLM(transformers_run.config())}, "evil/step-00000001")
    best = {"metric_for_best_model": "score", "greater_is_better": True, "load_best_model_at_end": True}
    args = transformers_run.arguments(max_steps=3, save_steps=1, eval_strategy="steps", eval_steps=1, **best)
    sets = {"train_dataset": transformers_run.dataset(), "eval_dataset": transformers_run.dataset(8)}
    trainer = Scripted(model, args, **sets, checkpoint_dir="run", callbacks=[NamesBest(evil)])
    trainer.scores = {1: 0.9, 2: 0.1, 3: 0.1}
    trainer.train()
    assert evil in caplog.text  # not at the end of the run that saved it, either

    caplog.clear()
    again = Scripted(model, dataclasses.replace(args, max_steps=5), **sets, checkpoint_dir="run")
    again.scores = {4: 0.3, 5: 0.2}
    again.train(resume_from_checkpoint=True)
    assert evil in caplog.text
    assert again.state.best_model_checkpoint == str(Path("run/step-00000004").resolve())
    saved = zarrckpt.open("run/step-00000004").load("model")["model"]
    assert all(torch.equal(value, saved[name]) for name, value in model.state_dict().items())


def test_the_limit_holds_if_the_best_is_the_newest() -> None:
    best = {"metric_for_best_model": "score", "load_best_model_at_end": True, "save_total_limit": 2}
    args = transformers_run.arguments(save_steps=2, max_steps=8, eval_strategy="steps", eval_steps=2, **best)
    sets = {"train_dataset": transformers_run.dataset(), "eval_dataset": transformers_run.dataset(8)}
    trainer = Scripted(LlamaForCausalLM(transformers_run.config()), args, **sets, checkpoint_dir="run")
    trainer.scores = {2: 0.1, 4: 0.2, 6: 0.3, 8: 0.4}
    trainer.train()
    assert steps("run") == [6, 8]


def test_only_the_model_is_saved_and_resumed() -> None:
    trainer = trained(arguments={"save_only_model": True}, trainer={"checkpoint_dir": "run"})
    ckpt = zarrckpt.open("run/step-00000008")
    assert not [name for name in ckpt if name.startswith(("optimizer", "trainer.scheduler", "trainer.rng"))]
    resumed = trained(arguments={"max_steps": 16}, trainer={"checkpoint_dir": "run"}, resume=True)
    assert resumed.state.global_step == 16 and trainer.state.global_step == 12


class Scaled(ZarrTrainer):
    """A Trainer with a scaler of gradients, which Accelerate makes only on accelerators."""

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        self.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)


def test_the_scaler_is_restored() -> None:
    def scaled(steps: int) -> Scaled:
        transformers.set_seed(1)
        model = LlamaForCausalLM(transformers_run.config())
        args = transformers_run.arguments(max_steps=steps, save_steps=5)
        return Scaled(model, args, train_dataset=transformers_run.dataset(), checkpoint_dir="run")

    scaled(5).train()
    trainer = scaled(6)
    trainer.train(resume_from_checkpoint=True)
    state = zarrckpt.open("run/step-00000006").load("trainer.scaler")["trainer"]["scaler"]
    # It grew after the steps 3 and 6.
    assert (state["scale"], state["_growth_tracker"]) == (32.0, 0) == (trainer.accelerator.scaler.get_scale(), 0)


def test_a_run_rewinds_only_on_request() -> None:
    whole = transformers_run.result(trained(trainer={"checkpoint_dir": "run"}))
    with pytest.raises(ValueError, match="resume_from_checkpoint"):
        trained(trainer={"checkpoint_dir": "run"})
    earlier = {"trainer": {"checkpoint_dir": "run"}, "resume": "run/step-00000004"}
    with pytest.raises(ValueError, match="rewind=True"):
        trained(**earlier)
    back = trained(trainer={"checkpoint_dir": "run", "rewind": True}, resume="run/step-00000004")
    assert_equal(whole, transformers_run.result(back))
    assert steps("run") == [4, 8, 12]
    with pytest.raises(ValueError, match="none"):
        trained(trainer={"checkpoint_dir": "none"}, resume=True)
    assert_equal(whole, transformers_run.result(trained(trainer={"checkpoint_dir": "new"}, resume="auto")))


def test_a_damaged_newest_checkpoint_is_skipped() -> None:
    """The Trainer's state is that of the older one on all ranks. The damaged one is replaced when its step is saved."""
    run = {"fsdp": True, "arguments": {"per_device_train_batch_size": 2}, "trainer": {"checkpoint_dir": "run"}}
    assert in_processes(2, {**run, "result": "whole.pt"}).returncode == 0
    for folder, entry in (("step-00000012", "optimizer"), ("step-00000008", "trainer")):
        for chunk in Path("run", folder, entry).rglob("c.*"):
            size = chunk.stat().st_size
            chunk.unlink()  # Unchanged chunks are links to the files of the older checkpoint.
            chunk.write_bytes(bytes(size))
    with pytest.raises(zarrckpt.CorruptCheckpointError, match="step-00000012"):
        trained(trainer={"checkpoint_dir": "run"}, resume="run/step-00000012")
    done = in_processes(2, {**run, "seed": 2, "resume": True, "result": "resumed.pt"})
    assert done.returncode == 0 and "step-00000012 cannot be restored" in done.stderr, done.stderr
    assert_equal(torch.load("whole.pt"), torch.load("resumed.pt"))
    assert [bool(zarrckpt.open(f"run/step-{step:08d}").verify()) for step in (4, 8, 12)] == [True] * 3


def test_folders_of_a_trainer_may_be_any_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    in_memory, local = f"memory://{tmp_path.name}", f"{tmp_path}/run"
    forms = {"~/run": local, Path("~/run"): local, f"file://{local}": local, str(Path(in_memory)): in_memory}
    for form, expected in forms.items():
        model = LlamaForCausalLM(transformers_run.config())
        for trainer in (
            ZarrTrainer(model, transformers_run.arguments(output_dir=form)),
            ZarrTrainer(model, transformers_run.arguments(), checkpoint_dir=form),
        ):
            assert trainer.checkpoint_dir == expected
        trainer.save_model(f"file://{tmp_path}/model")
        assert (tmp_path / "model" / "config.json").is_file()
        trained(arguments={"max_steps": 4}, trainer={"checkpoint_dir": form}, resume="auto")
        assert (zarrckpt.latest(expected) or "").startswith(f"{expected}/step-")
    assert not [name for name in os.listdir() if ":" in name or "~" in name]


def test_a_folder_that_the_plain_trainer_wrote_is_resumed() -> None:
    best = {"eval_strategy": "steps", "eval_steps": 4, "load_best_model_at_end": True, "greater_is_better": True}
    whole = transformers_run.result(trained(arguments=best, trainer={"checkpoint_dir": "run"}))
    transformers.set_seed(1)
    sets = {"train_dataset": transformers_run.dataset(), "eval_dataset": transformers_run.dataset(8)}
    own = Trainer(LlamaForCausalLM(transformers_run.config()), transformers_run.arguments(**best), **sets)
    own.train()
    own_8 = Path("out/checkpoint-8").absolute().as_uri()
    resumed = trained(arguments=best, trainer={"checkpoint_dir": "new"}, resume=own_8, seed=2)
    assert_equal(whole, transformers_run.result(resumed))
    # The best one is still a folder of the Trainer's.
    assert resumed.state.best_model_checkpoint == own.state.best_model_checkpoint == "out/checkpoint-4"
    assert steps("new") == [12] and Path("out/checkpoint-12").is_dir()


def test_a_signal_ends_training_with_a_save() -> None:
    whole = transformers_run.result(trained(trainer={"checkpoint_dir": "whole"}))
    given = {"trainer": {"checkpoint_dir": "run", "signals": ("SIGTERM",)}}
    ended = trained(**given, killed={"step": 6, "number": signal.SIGTERM})
    assert ended.preempted and 6 < ended.state.global_step == steps("run")[-1] < 12
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    resumed = trained(**given, resume=True)
    assert not resumed.preempted
    # It is saved before the Trainer logs that step.
    whole["losses"].pop(ended.state.global_step)
    assert_equal(whole, transformers_run.result(resumed))


# -- pickles only if allowed


class Counted(TrainerCallback, ExportableState):  # type: ignore[misc]
    """A callback with state."""

    def __init__(self, count: Any = 0) -> None:
        self.count = count

    def on_step_end(self, *args: Any, **named: Any) -> None:
        self.count = self.count + 1

    def state(self) -> dict[str, Any]:
        return {"args": {"count": self.count}, "attributes": {}}


class Opaque:
    """An object that only pickle can save."""

    def __add__(self, other: int) -> Opaque:
        return self


def test_callbacks_are_restored_and_pickles_named() -> None:
    def made(count: Any, steps: int, run: str = "run") -> ZarrTrainer:
        args = transformers_run.arguments(restore_callback_states_from_checkpoint=True, max_steps=steps)
        model = LlamaForCausalLM(transformers_run.config())
        sets = {"train_dataset": transformers_run.dataset(), "callbacks": [Counted(count)]}
        return ZarrTrainer(model, args, checkpoint_dir=run, **sets)

    made(0, 4).train()
    made(100, 8).train(resume_from_checkpoint=True)
    text = json.loads(zarrckpt.open("run/step-00000008")["trainer.state"])
    assert text["stateful_callbacks"]["Counted"]["args"] == {"count": 8}
    with pytest.raises(zarrckpt.UnsupportedValueError, match="stateful_callbacks"):
        made(Opaque(), 4, "opaque").train()

    trainer = made(0, 4, "hooked")
    trainer.create_optimizer()
    trainer.optimizer.param_groups[0]["hook"] = Opaque()
    with pytest.raises(zarrckpt.UnsupportedValueError, match=r"optimizer.param_groups.0.hook. is or has a .*Opaque"):
        trainer.train()
    assert steps("run") == [4, 8] and steps("opaque") == steps("hooked") == []
    trainer._allow_pickle = True
    with pytest.warns(UserWarning, match="pickle"):
        trainer.train()
    trainer.args.max_steps = 5
    trainer.train(resume_from_checkpoint=True)
    assert steps("hooked") == [4, 5]


# -- models from checkpoints

TINY = {"vocab_size": 64, "bos_token_id": 1, "eos_token_id": 2}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", [LlamaForCausalLM, GPT2LMHeadModel, BertForMaskedLM])
def test_models_come_from_checkpoints_and_go_to_folders(kind: Any, tied: bool) -> None:
    configs = {
        LlamaForCausalLM: transformers_run.config(tie_word_embeddings=tied),
        GPT2LMHeadModel: GPT2Config(n_layer=1, n_head=2, n_embd=16, n_positions=32, tie_word_embeddings=tied, **TINY),
        BertForMaskedLM: BertConfig(
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=32,
            tie_word_embeddings=tied,
            **TINY,
        ),
    }
    config = configs[kind]
    model = kind(config).eval()
    numbers = torch.arange(10)[None]
    expected = model(numbers).logits
    zarrckpt.save({"net": {"model": model}}, "ckpt")
    loaded = load_pretrained(kind, "ckpt", prefix="net.model", config=config)
    assert torch.equal(loaded(numbers).logits, expected) and not loaded.training
    assert len([*loaded.parameters()]) == len([*model.parameters()])

    config.architectures = [kind.__name__]
    export_pretrained("ckpt", "folder", prefix="net.model", config=config)
    assert load_file("folder/model.safetensors").keys() == dict(model.named_parameters()).keys()
    assert torch.equal(kind.from_pretrained("folder")(numbers).logits, expected)
    half = load_pretrained(kind, "ckpt", prefix="net.model", config=config, dtype=torch.bfloat16)
    reference = kind.from_pretrained("folder", dtype=torch.bfloat16)
    assert torch.equal(half(numbers).logits, reference(numbers).logits)

    with pytest.raises(ValueError, match="config="):
        load_pretrained(kind, "ckpt", prefix="net.model")
    with pytest.raises(zarrckpt.KeyMismatchError, match="unexpected"):
        load_pretrained(kind, "ckpt", prefix="net", config=config)


def test_a_saved_configuration_names_no_code() -> None:
    config = transformers_run.config()
    code = {"auto_map": {"AutoModelForCausalLM": "evil/repo--modeling.Evil"}, "trust_remote_code": True}
    kernel = {"attn_implementation": "evil/kernel", "_attn_implementation": "evil/kernel", "_name_or_path": "evil/repo"}
    known = {**config.to_dict(), **code, **kernel, "architectures": ["LlamaForCausalLM"], "inner": [{**code, "a": 1}]}
    model = LlamaForCausalLM(config)
    zarrckpt.save({"model": model, "trainer": {"config": json.dumps(known)}}, "ckpt")
    loaded = load_pretrained(AutoModelForCausalLM, "ckpt")
    assert type(loaded) is LlamaForCausalLM and loaded.config._attn_implementation == model.config._attn_implementation
    export_pretrained("ckpt", "folder")
    text = Path("folder/config.json").read_text()
    assert "evil" not in text and json.loads(text)["inner"] == [{"a": 1}]
    zarrckpt.save({"model": model, "trainer": {"config": '{"model_type": "evil"}'}}, "unknown")
    with pytest.raises(zarrckpt.CorruptCheckpointError, match="evil"):
        load_pretrained(AutoModelForCausalLM, "unknown")


@pytest.mark.parametrize("adapters_only", [True, False])
def test_adapters_are_exported_for_peft(adapters_only: bool) -> None:
    from peft import LoraConfig, PeftModel, get_peft_model

    base = LlamaForCausalLM(transformers_run.config())
    base.save_pretrained("base")
    lora = LoraConfig(r=2, target_modules=["q_proj", "up_proj"], modules_to_save=["lm_head"], use_dora=True)
    args = transformers_run.arguments(max_steps=2, save_steps=2)
    model = get_peft_model(base, lora)
    sets = {"train_dataset": transformers_run.dataset(), "adapters_only": adapters_only}
    ZarrTrainer(model, args, checkpoint_dir="run", **sets).train()
    export_pretrained("run/step-00000002", "folder")
    numbers = torch.arange(10)[None]
    read = PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained("base"), "folder")
    assert torch.equal(read.eval()(numbers).logits, model.eval()(numbers).logits)
    model.save_pretrained("expected")
    own, exported = (load_file(f"{folder}/adapter_model.safetensors") for folder in ("expected", "folder"))
    assert own.keys() == exported.keys()
    config = dataclasses.replace(LoraConfig.from_pretrained("expected"), auto_mapping=None)  # names a class
    assert LoraConfig.from_pretrained("folder") == config


def test_exported_adapters_name_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "planted.py").write_text("raise SystemExit")
    monkeypatch.syspath_prepend(tmp_path)
    data = {"peft_type": "LORA", "r": 2, "rank_pattern": {"q": 2}, "target_modules": ["q"], "later_option": [1, 2.5]}
    code = {
        "megatron_core": "planted",
        "megatron_config": {"tensor_model_parallel_size": 1},
        "auto_mapping": {"parent_library": "planted", "base_model_class": "Model"},
        "tokenizer_kwargs": {"trust_remote_code": True},
        "later_code": ["planted"],
    }
    from peft import PeftModel

    weights = {f"base_model.model.q.lora_{part}.default.weight": torch.ones(2, 2) for part in "AB"}
    described = {"peft_config": json.dumps({"default": {**data, **code}})}
    zarrckpt.save({"model": weights, "trainer": described}, "checkpoint")
    with pytest.warns(UserWarning, match=r"'later_code'.*'megatron_core'.*may name code"):
        export_pretrained("checkpoint", "folder")
    assert json.loads(Path("folder/adapter_config.json").read_text()) == {**data, "inference_mode": True}
    model = torch.nn.Module()
    model.q = torch.nn.Linear(2, 2)
    PeftModel.from_pretrained(model, "folder")
    assert "planted" not in sys.modules


@pytest.mark.parametrize("name", ["../../victim", "/victim", "a/b", "..", ".", ""])
def test_names_of_adapters_stay_inside_the_folder(tmp_path: Path, name: str) -> None:
    name = f"{tmp_path}{name}" if name.startswith("/") else name
    described = {"peft_config": json.dumps({name: {"peft_type": "LORA"}}), "config": "{}"}
    zarrckpt.save({"model": {f"a.lora_A.{name}.weight": torch.ones(2, 2)}, "trainer": described}, "checkpoint")
    for folder in (tmp_path / "x/y/out", f"memory://{tmp_path}"):
        with pytest.raises(zarrckpt.CorruptCheckpointError, match="adapter"):
            export_pretrained("checkpoint", folder)
    assert not [*tmp_path.rglob("adapter*")]


def test_existing_files_are_replaced_only_with_overwrite(tmp_path: Path) -> None:
    described = {"peft_config": json.dumps({"default": {"peft_type": "LORA"}, "other": {"peft_type": "LORA"}})}
    weights = {f"a.lora_A.{name}.weight": torch.ones(2, 2) for name in ("default", "other")}
    zarrckpt.save({"model": weights, "trainer": described}, "adapters")
    config = transformers_run.config()
    zarrckpt.save({"model": LlamaForCausalLM(config)}, "model")
    cases = [("adapters", {}, "adapter_config.json"), ("adapters", {}, "other/adapter_config.json")]
    for number, (source, options, name) in enumerate([*cases, ("model", {"config": config}, "config.json")]):
        own = tmp_path / f"{number}" / name
        own.parent.mkdir(parents=True)
        own.write_text("mine")
        with pytest.raises(zarrckpt.StorageError, match=name):
            export_pretrained(source, tmp_path / f"{number}", **options)
        assert [path for path in (tmp_path / f"{number}").rglob("*") if path.is_file()] == [own]
        export_pretrained(source, tmp_path / f"{number}", overwrite=True, **options)
        assert own.read_text() != "mine"
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "other").symlink_to(tmp_path / "0")
    with pytest.raises(zarrckpt.StorageError, match="link"):
        export_pretrained("adapters", tmp_path / "linked", overwrite=True)


@pytest.mark.parametrize("text", ["[]", "{", "[" * 100_000, '{"model_type": "none"}', '{"model_type": []}', "3", b"x"])
def test_configurations_of_other_types_are_checkpoint_errors(text: Any) -> None:
    model = LlamaForCausalLM(transformers_run.config())
    zarrckpt.save({"model": model, "trainer": {"config": text}}, "other")
    with pytest.raises((zarrckpt.CheckpointError, ValueError), match="other"):
        load_pretrained(LlamaForCausalLM, "other")
    zarrckpt.save({"model": model, "trainer": {"peft_config": text}}, "adapters")
    with pytest.raises(zarrckpt.CheckpointError, match="adapters"):
        export_pretrained("adapters", "folder")


def _export_in_bfloat16_to_s3(url: str, bucket: Any, tokenizer: Any) -> None:
    options: Any = {"dtype": torch.bfloat16, "storage_options": bucket.storage_options, "max_file_bytes": 6_000}
    first = export_pretrained(url, bucket.url("hub"), tokenizer=tokenizer, **options)
    assert first.folder == bucket.url("hub") and len(first.files) > 2 and not first.uncast
    with pytest.raises(zarrckpt.StorageError, match="exists"):
        export_pretrained(url, bucket.url("hub"), **options)
    del options["max_file_bytes"]
    export_pretrained(url, bucket.url("hub"), overwrite=True, **options)
    store, folder = StoreSpec(bucket.url("hub"), bucket.storage_options).open(), Path("from-s3")
    folder.mkdir()
    for item in store.list():
        (folder / item.key).write_bytes(store.get(item.key))
    assert {path.name for path in folder.glob("*.safetensors*")} == {"model.safetensors"}
    read = AutoModelForCausalLM.from_pretrained("from-s3")
    loaded = load_pretrained(AutoModelForCausalLM, url, dtype=torch.bfloat16, storage_options=bucket.storage_options)
    numbers = torch.arange(10)[None]
    assert read.dtype is torch.bfloat16 and torch.equal(read(numbers).logits, loaded(numbers).logits)


def test_a_training_is_exported_for_from_pretrained(moto_bucket: Any) -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    options = moto_bucket.storage_options
    url = moto_bucket.url("run")
    trainer = trained(arguments={"bf16": False}, trainer={"checkpoint_dir": url, "storage_options": options})
    numbers = torch.arange(10)[None]
    model = trainer.model.eval()
    loaded = load_pretrained(AutoModelForCausalLM, f"{url}/step-00000012", storage_options=options)
    assert type(loaded) is LlamaForCausalLM and torch.equal(loaded(numbers).logits, model(numbers).logits)

    words = Tokenizer(models.WordLevel({"a": 0, "b": 1, "[UNK]": 2}, unk_token="[UNK]"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]")
    export_pretrained(f"{url}/step-00000012", "folder", tokenizer=tokenizer, storage_options=options)
    _export_in_bfloat16_to_s3(f"{url}/step-00000012", moto_bucket, tokenizer)
    assert json.loads(Path("folder/config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    assert Path("folder/generation_config.json").is_file()
    read = AutoModelForCausalLM.from_pretrained("folder")
    assert torch.equal(read(numbers).logits, model(numbers).logits)
    assert AutoTokenizer.from_pretrained("folder")("b").input_ids == [1]
