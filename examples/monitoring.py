"""Saves, loads and deletions in Prometheus, OpenTelemetry, Weights & Biases or MLflow: callables for ``on_event``.

    python examples/monitoring.py prometheus run      # a small run; its metrics on stdout
    python examples/monitoring.py opentelemetry run   # its spans and metrics on stdout
    WANDB_MODE=offline python examples/monitoring.py wandb run
    MLFLOW_TRACKING_URI=http://localhost:5000 python examples/monitoring.py mlflow run

Each function needs the package of its tool: prometheus-client, opentelemetry-sdk, wandb, mlflow or mlflow-skinny. The
trackers get the url of each checkpoint, the SHA-256 of its root document and the metrics. No data is uploaded.
"""

from __future__ import annotations

import argparse
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import zarrckpt

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from opentelemetry.metrics import Meter
    from opentelemetry.trace import Span, Tracer
    from prometheus_client import CollectorRegistry
    from wandb import Run

OnEvent = Callable[[zarrckpt.Event], object]
ENDS = ("committed", "loaded", "deleted", "failed")


def prometheus_events(registry: CollectorRegistry) -> OnEvent:
    """Return an ``on_event`` that counts in metrics of Prometheus, on each rank."""
    from prometheus_client import Counter, Gauge, Histogram

    labels, buckets = ("operation", "kind"), (0.01, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000)
    events = Counter("zarrckpt_events", "Events.", labels, registry=registry)
    nbytes = Counter("zarrckpt_bytes", "Bytes that this rank saved or read.", ("operation",), registry=registry)
    seconds = Histogram(
        "zarrckpt_duration_seconds", "From the begin to the event.", labels, registry=registry, buckets=buckets
    )
    step = Gauge("zarrckpt_last_committed_step", "The step of the last commit.", registry=registry)
    committed = Gauge("zarrckpt_last_commit_timestamp_seconds", "The time of the last commit.", registry=registry)

    def on_event(event: zarrckpt.Event) -> None:
        events.labels(event.operation, event.kind).inc()
        if event.kind not in ("begun", "retried", "throttled"):
            seconds.labels(event.operation, event.kind).observe(event.seconds)
        if event.kind in ("written", "loaded") and event.nbytes is not None:
            nbytes.labels(event.operation).inc(event.nbytes)
        if event.kind == "committed":
            committed.set_to_current_time()
            if event.step is not None:
                step.set(event.step)

    return on_event


def opentelemetry_events(tracer: Tracer, meter: Meter) -> OnEvent:
    """Return an ``on_event`` that makes a span of each operation on each rank, and records its bytes and duration."""
    from opentelemetry.trace import StatusCode

    seconds = meter.create_histogram("zarrckpt.operation.duration", "s", "Duration of saves, loads and deletions")
    nbytes = meter.create_counter("zarrckpt.io", "By", "Bytes that this rank saved or read")
    repeats = meter.create_counter("zarrckpt.repeats", "{request}", "Requests that were sent again")
    spans: dict[tuple[str, str], Span] = {}
    lock = threading.Lock()  # The events of a background save come from several threads.

    def begin(event: zarrckpt.Event) -> Span:
        attributes = {"zarrckpt.url": event.url, "zarrckpt.rank": event.rank}
        if event.step is not None:
            attributes["zarrckpt.step"] = event.step
        began = time.time_ns() - int(event.seconds * 1e9)
        return tracer.start_span(f"zarrckpt.{event.operation}", attributes=attributes, start_time=began)

    def on_event(event: zarrckpt.Event) -> None:
        key = (event.operation, event.url)
        outcome: dict[str, str] = {"zarrckpt.operation": event.operation}
        with lock:
            # A deletion has no "begun", so the first event of any kind begins the span.
            if key not in spans:
                spans[key] = begin(event)
            span = spans.pop(key) if event.kind in ENDS else spans[key]
            # The save of another rank through DCP ends with "written". Its span ends when eight others have begun.
            ended = [spans.pop(next(iter(spans)))] if len(spans) > 8 else []
        for other in ended:
            other.end()
        if event.kind in ("written", "loaded"):
            nbytes.add(event.nbytes or 0, outcome)
            span.set_attribute("zarrckpt.bytes", event.nbytes or 0)
        if event.kind in ("retried", "throttled"):
            repeats.add(1, {**outcome, "zarrckpt.kind": event.kind})
        if event.kind == "committed" and isinstance(event.report, zarrckpt.SaveReport):
            span.set_attribute("zarrckpt.root_sha256", event.report.root_sha256)
        if event.kind == "failed" and event.error is not None:
            outcome["error.type"] = type(event.error).__name__
            span.record_exception(event.error)
            span.set_status(StatusCode.ERROR, str(event.error))
        elif event.kind != "begun":
            span.add_event(event.kind, {"error": str(event.error)} if event.error else None)
        if event.kind in ENDS:
            seconds.record(event.seconds, outcome)
            span.end()

    return on_event


def commits_in_thread(thread: Executor, record: Callable[[zarrckpt.Event], None]) -> OnEvent:
    """Return an ``on_event`` that calls ``record`` for each commit of rank 0, in a thread.

    Trackers make requests to their server. The save does not wait for them, and their errors are only logged.
    """

    def record_or_log(event: zarrckpt.Event) -> None:
        try:
            record(event)
        except Exception:
            logging.getLogger(__name__).exception("the commit of %s was not recorded", event.url)

    def on_event(event: zarrckpt.Event) -> None:
        if event.kind == "committed" and event.rank == 0:
            thread.submit(record_or_log, event)

    return on_event


def describe_commit(event: zarrckpt.Event) -> dict[str, Any]:
    """Return the facts of a commit: the url, the SHA-256 of the root document, the user's metrics, and the size."""
    assert isinstance(event.report, zarrckpt.SaveReport)
    facts = {"root_sha256": event.report.root_sha256, "save_id": event.report.save_id}
    size = {"nbytes": event.report.nbytes, "seconds": event.report.seconds}
    return {"url": event.url, "step": event.step, **facts, **size, "metadata": dict(event.metadata or {})}


def wandb_events(run: Run, thread: Executor) -> OnEvent:
    """Return an ``on_event`` that logs each commit as a version of an artifact that refers to the root."""
    import wandb

    def record(event: zarrckpt.Event) -> None:
        artifact = wandb.Artifact(f"checkpoint-{run.id}", type="model", metadata=describe_commit(event))
        url = event.url if "://" in event.url else Path(event.url).as_uri()
        root = url if url.endswith(".zip") else f"{url}/zarr.json"
        artifact.add_reference(root, checksum=False)  # A checksum would need a request to the store.
        run.log_artifact(artifact, aliases=["latest", f"step-{event.step}"])

    return commits_in_thread(thread, record)


def mlflow_events(client: MlflowClient, run_id: str, thread: Executor) -> OnEvent:
    """Return an ``on_event`` that logs each commit to a run: a small JSON file, metrics, and the newest as tags.

    A client is passed, because the active run of ``mlflow.start_run`` belongs to the thread that started it.
    """
    from mlflow.entities import Metric, RunTag

    def record(event: zarrckpt.Event) -> None:
        facts, now = describe_commit(event), int(time.time() * 1000)
        numbers = {"nbytes": facts["nbytes"], "seconds": facts["seconds"], **facts["metadata"]}
        metrics = [
            Metric(f"checkpoint/{name}", value, now, event.step or 0)
            for name, value in numbers.items()
            if isinstance(value, int | float) and name != "step"
        ]
        tags = [RunTag(f"checkpoint.{name}", str(facts[name])) for name in ("url", "step", "root_sha256")]
        client.log_dict(run_id, facts, f"checkpoints/{facts['save_id']}.json")
        client.log_batch(run_id, metrics=metrics, tags=tags)

    return commits_in_thread(thread, record)


def train(url: str, on_event: OnEvent) -> None:
    """Train for three steps, save each, keep two, and resume."""
    model = torch.nn.Linear(8, 8)
    optim = torch.optim.AdamW(model.parameters())
    state = {"model": model, "optim": optim}
    options = zarrckpt.SaveOptions(on_event=on_event)
    with zarrckpt.CheckpointManager(url, keep=zarrckpt.Keep(newest=2), save_every=1, options=options) as manager:
        first = manager.restore(state) or 0
        for step in range(first + 1, first + 4):
            loss = model(torch.randn(4, 8)).square().mean()
            loss.backward()
            optim.step()
            manager.step(step, state, metrics={"loss": loss})
    with zarrckpt.CheckpointManager(url, options=options) as manager:
        manager.restore(state)


def main(tool: str, url: str) -> None:
    """Train with events to one tool."""
    if tool == "prometheus":
        from prometheus_client import CollectorRegistry, generate_latest

        # A long run serves them: prometheus_client.start_http_server(9400 + local_rank, registry=registry)
        registry = CollectorRegistry()
        train(url, prometheus_events(registry))
        print(generate_latest(registry).decode())
    elif tool == "opentelemetry":
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import ConsoleMetricExporter, PeriodicExportingMetricReader
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter

        # In place of the console, the package opentelemetry-exporter-otlp sends to a collector.
        traces, meters = TracerProvider(), MeterProvider([PeriodicExportingMetricReader(ConsoleMetricExporter())])
        traces.add_span_processor(BatchSpanProcessor(ConsoleSpanExporter()))
        train(url, opentelemetry_events(traces.get_tracer("zarrckpt"), meters.get_meter("zarrckpt")))
        traces.shutdown()
        meters.shutdown()
    elif tool == "wandb":
        import wandb

        with wandb.init(project="zarrckpt") as run, ThreadPoolExecutor(1) as thread:
            train(url, wandb_events(run, thread))
    else:
        import mlflow

        with mlflow.start_run() as active, ThreadPoolExecutor(1) as thread:
            train(url, mlflow_events(mlflow.MlflowClient(), active.info.run_id, thread))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tool", choices=["prometheus", "opentelemetry", "wandb", "mlflow"])
    parser.add_argument("url", help="folder of the run's checkpoints: a path, or s3://bucket/run")
    arguments = parser.parse_args()
    main(arguments.tool, arguments.url)
