"""Serve the newest checkpoint of a run over HTTP, and switch to each newer one without a restart.

    pip install fastapi uvicorn
    python examples/resume_run.py run &        # a training that saves checkpoints; s3://bucket/run does as well
    python examples/serve_fastapi.py run
    curl localhost:8000/checkpoint
    curl -X POST localhost:8000/predict -H 'Content-Type: application/json' -d "[[$(seq -s, 16)]]"

A request uses one checkpoint from its beginning to its end. The memory of the old one is freed after its last request.
"""

from __future__ import annotations

import argparse
import logging
import threading
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import torch

import zarrckpt

log = logging.getLogger("serve")


class Served(NamedTuple):
    """A model, and the url of the checkpoint that it has."""

    url: str
    model: torch.nn.Module


def load_model(url: str) -> torch.nn.Module:
    """Build the model of resume_run.py on the meta device, and give it the tensors of a checkpoint."""
    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 1))
    weights = zarrckpt.open(url).select("model").iter_tensors(rename={"model.": ""})
    model.load_state_dict(dict(weights), assign=True)
    return model.eval()


class NewestModel:
    """The model of the newest checkpoint of a run. A thread replaces it."""

    def __init__(self, run: str, interval: float = 30.0) -> None:
        self.current: Served | None = None
        self._run = run
        self._interval = interval
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="follow")

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()

    def _follow(self) -> None:
        for url in zarrckpt.watch(self._run, newest_only=True, interval=self._interval, stop=self._stop):
            try:
                self.current = Served(url, load_model(url))  # one assignment, so each request sees either model
                log.info("serves %s", url)
            except (zarrckpt.CheckpointError, RuntimeError):
                # For example, the run has deleted it meanwhile. The old model stays, and the next one is awaited.
                log.exception("%s was not loaded", url)


def make_app(newest: NewestModel) -> Any:
    """Return the FastAPI application."""
    from fastapi import FastAPI, HTTPException

    @asynccontextmanager
    async def follow_while_running(app: Any) -> Any:
        newest.start()
        yield
        newest.close()

    app = FastAPI(lifespan=follow_while_running)

    def served() -> Served:
        if newest.current is None:
            raise HTTPException(503, "no checkpoint has been committed yet")
        return newest.current

    @app.get("/checkpoint")  # type: ignore[untyped-decorator]
    def checkpoint() -> dict[str, str]:
        return {"url": served().url}

    @app.post("/predict")  # type: ignore[untyped-decorator]
    def predict(rows: list[list[float]]) -> dict[str, Any]:
        found = served()
        with torch.inference_mode():
            return {"checkpoint": found.url, "predictions": found.model(torch.tensor(rows)).squeeze(1).tolist()}

    return app


if __name__ == "__main__":
    import uvicorn

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="folder of the run's checkpoints: a path, or s3://bucket/run")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--interval", type=float, default=30.0, help="seconds between listings of the run's folder")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO)
    uvicorn.run(make_app(NewestModel(args.run, args.interval)), port=args.port)
