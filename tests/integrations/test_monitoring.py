"""The examples of ``on_event`` with Prometheus, OpenTelemetry, Weights & Biases and MLflow themselves."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import ROOT

import zarrckpt


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / "examples")
    torch.manual_seed(0)
    return importlib.import_module("monitoring")


@pytest.fixture
def thread() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as thread:
        yield thread


def train(example: Any, run: Path, on_event: Callable[[zarrckpt.Event], object]) -> list[zarrckpt.Event]:
    """Save three steps, of which two are kept, and load. Return the commits."""
    commits = []

    def call(event: zarrckpt.Event) -> None:
        if event.kind == "committed":
            commits.append(event)
        on_event(event)

    example.train(str(run), call)
    assert [event.step for event in commits] == [1, 2, 3]
    return commits


def digest(run: Path, step: int) -> str:
    return hashlib.sha256((run / f"step-{step:08}" / "zarr.json").read_bytes()).hexdigest()


def test_prometheus_gets_counts_bytes_durations_and_the_last_step(example: Any, tmp_path: Path) -> None:
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry()
    *_, last = train(example, tmp_path / "run", example.prometheus_events(registry))
    lines = generate_latest(registry).decode().splitlines()
    for line in (
        'zarrckpt_events_total{kind="committed",operation="save"} 3.0',
        'zarrckpt_events_total{kind="deleted",operation="delete"} 1.0',
        'zarrckpt_events_total{kind="loaded",operation="load"} 1.0',
        'zarrckpt_duration_seconds_count{kind="staged",operation="save"} 3.0',
        "zarrckpt_last_committed_step 3.0",
    ):
        assert line in lines, "\n".join(lines)
    for operation, times in (("save", 3), ("load", 1)):
        found = registry.get_sample_value("zarrckpt_bytes_total", {"operation": operation})
        assert last.nbytes is not None and found == times * last.nbytes > 0
    assert registry.get_sample_value("zarrckpt_last_commit_timestamp_seconds") == pytest.approx(
        (tmp_path / "run" / "step-00000003" / "zarr.json").stat().st_mtime, abs=60
    )


def test_opentelemetry_gets_a_span_of_each_operation(example: Any, tmp_path: Path) -> None:
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, reader, traces, run = InMemorySpanExporter(), InMemoryMetricReader(), TracerProvider(), tmp_path / "run"
    traces.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = traces.get_tracer("test")
    on_event = example.opentelemetry_events(tracer, MeterProvider([reader]).get_meter("test"))
    *_, last = train(example, run, on_event)
    with tracer.start_as_current_span("training step") as parent, pytest.raises(zarrckpt.CheckpointExistsError):
        zarrckpt.save({"n": 1}, run / "step-00000003", options=zarrckpt.SaveOptions(on_event=on_event))

    spans = {(span.name, span.attributes["zarrckpt.url"][-1]): span for span in exporter.get_finished_spans()[:-2]}
    assert sorted(spans) == [*(("zarrckpt." + kind, step) for kind, step in KINDS)]
    save, load = spans["zarrckpt.save", "3"], spans["zarrckpt.load", "3"]
    assert [event.name for event in save.events] == ["staged", "written", "committed"]
    assert save.attributes["zarrckpt.root_sha256"] == digest(run, 3)
    assert save.attributes["zarrckpt.step"] == 3 and load.attributes["zarrckpt.bytes"] > 0
    assert all(span.status.is_ok and span.start_time < span.end_time for span in spans.values())

    failed, _ = exporter.get_finished_spans()[-2:]
    assert failed.parent.span_id == parent.get_span_context().span_id
    assert not failed.status.is_ok and failed.events[0].attributes["exception.type"].endswith("CheckpointExistsError")
    points = {
        (metric.name, *point.attributes.values()): point
        for resource in reader.get_metrics_data().resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
        for point in metric.data.data_points
    }
    assert points["zarrckpt.operation.duration", "save"].count == 3
    assert points["zarrckpt.operation.duration", "save", "CheckpointExistsError"].count == 1
    assert points["zarrckpt.io", "save"].value == sum(last.report.rank_bytes) * 3


KINDS = [("delete", "1"), ("load", "3"), ("save", "1"), ("save", "2"), ("save", "3")]


def test_wandb_gets_a_reference_and_no_data(
    example: Any, thread: ThreadPoolExecutor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the run is offline. The file that a later ``wandb sync`` sends is read as bytes."""
    monkeypatch.setenv("WANDB_SILENT", "true")
    import wandb

    with wandb.init(mode="offline", dir=tmp_path, project="test") as run:
        on_event = example.wandb_events(run, thread)
        *_, last = train(example, tmp_path / "run", on_event)
        on_event(dataclasses.replace(last, rank=1, url="of-another-rank"))
        thread.shutdown()
    wandb.teardown()  # The file is complete when wandb's own process has ended.
    (stored,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    data = stored.read_bytes()
    for step in (2, 3):
        assert (tmp_path / "run" / f"step-{step:08}" / "zarr.json").as_uri().encode() in data
        assert f'"root_sha256":"{digest(tmp_path / "run", step)}"'.encode() in data
    assert b'"loss":' in data and b"of-another-rank" not in data
    weight = zarrckpt.open(tmp_path / "run" / "step-00000003").read("model.weight")["model.weight"]
    files = [path for path in (tmp_path / "wandb").rglob("*") if path.is_file()]
    assert not any(weight.tobytes()[:64] in path.read_bytes() for path in files)


def test_mlflow_gets_the_url_the_digest_and_the_metrics(
    example: Any,
    thread: ThreadPoolExecutor,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """If the tracker fails, training continues, and the errors are logged."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    from mlflow import MlflowClient

    client = MlflowClient((tmp_path / "tracking").as_uri())
    run = client.create_run(client.create_experiment("test")).info
    commits = train(example, tmp_path / "run", example.mlflow_events(client, run.run_id, thread))
    train(example, tmp_path / "other", example.mlflow_events(client, "f" * 32, thread))
    thread.shutdown()
    found = client.get_run(run.run_id).data
    assert found.tags["checkpoint.url"] == str(tmp_path / "run" / "step-00000003")
    assert found.tags["checkpoint.root_sha256"] == digest(tmp_path / "run", 3)
    losses = client.get_metric_history(run.run_id, "checkpoint/loss")
    assert [(metric.step, metric.value) for metric in losses] == [
        (event.step, event.metadata["loss"]) for event in commits if event.metadata is not None
    ]
    folder = Path(client.download_artifacts(run.run_id, "checkpoints"))
    facts = sorted((json.loads(path.read_text()) for path in folder.iterdir()), key=lambda facts: facts["step"])
    assert [(each["url"], each["step"]) for each in facts] == [(event.url, event.step) for event in commits]
    assert [record.name for record in caplog.records if "was not recorded" in record.message] == ["monitoring"] * 3
