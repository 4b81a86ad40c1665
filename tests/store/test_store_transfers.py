"""Transfers to an S3 server in a separate process: numbers of requests and connections, and faults."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from harness import ROOT
from harness.internals import Store, open_store
from harness.s3_server import Served, served

import zarrckpt
from zarrckpt._store._base import BESIDE_TRAINING


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make objects of 2 MiB large enough to be uploaded in parts."""
    from zarrckpt._store import _obstore

    monkeypatch.setattr(_obstore, "SPLIT", 2 << 20)
    monkeypatch.setattr(_obstore, "PART", 1 << 20)


def store_of(server: Served, concurrency: int | None = None, **options: Any) -> Store:
    return open_store("s3://bucket/run", storage_options=server.storage_options | options, concurrency=concurrency)


def at_once(store: Store, work: Callable[[int], object], count: int) -> None:
    """Run as many threads as the store allows, as a save or load does."""
    with ThreadPoolExecutor(store.max_concurrency) as pool:
        list(pool.map(work, range(count)))


def a_state(seed: int) -> dict[str, Any]:
    """Return small tensors, tensors of several subchunks, and one that is uploaded in parts."""
    generator = torch.Generator().manual_seed(seed)
    small = {f"small.{i}": torch.randn(64, 64, generator=generator) for i in range(80)}
    large = {f"large.{i}": torch.randn(512, 1500, generator=generator) for i in range(3)}
    # More than 16 MiB: subchunks.
    return {**small, **large, "huge": torch.randn(1100, 4096, generator=generator), "step": seed}


def loaded(url: str, state: dict[str, Any], **options: Any) -> bool:
    target = {key: torch.zeros_like(value) if torch.is_tensor(value) else None for key, value in state.items()}
    zarrckpt.load(target, url, **options)
    return all(torch.equal(target[k], v) if torch.is_tensor(v) else target[k] == v for k, v in state.items())


class Transfers:
    """Counts puts and reads under way. (A server notices an end a little late.)"""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = self.most = 0
        self._lock = threading.Lock()
        from zarrckpt._store._obstore import ObstoreStore

        for name in ("put", "get", "read"):
            monkeypatch.setattr(ObstoreStore, name, self._counted(getattr(ObstoreStore, name)))

    def _counted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any) -> Any:
            with self._lock:
                self.now += 1
                self.most = max(self.most, self.now)
            try:
                return call(*args)
            finally:
                with self._lock:
                    self.now -= 1

        return counted


@pytest.mark.parametrize("concurrency", [1, 20])
def test_a_given_number_is_reached_and_never_exceeded(concurrency: int, monkeypatch: pytest.MonkeyPatch) -> None:
    state = a_state(3)
    transfers = Transfers(monkeypatch)
    # Long enough for twenty threads to begin on a busy machine.
    with served(latency=0.005 if concurrency == 1 else 0.2) as server:
        where = server.storage_options
        saving = zarrckpt.SaveOptions(concurrency=concurrency)
        zarrckpt.save(state, "s3://bucket/run", storage_options=where, options=saving)
        assert transfers.most == concurrency
        transfers.most = 0
        loading = zarrckpt.LoadOptions(concurrency=concurrency)
        assert loaded("s3://bucket/run", state, storage_options=where, options=loading)
        assert transfers.most == concurrency


def test_one_thread_receives_all_answers() -> None:
    """In a process that has read nothing yet."""
    script = """
import sys, threading, torch, zarrckpt
sys.path.append("tests")
from harness.s3_server import served

with served() as server:
    state, where = {f"w{i}": torch.ones(100_000) for i in range(40)}, server.storage_options
    zarrckpt.save(state, "s3://bucket/run", storage_options=where)
    zarrckpt.load(state, "s3://bucket/run", storage_options=where)
    print([thread.name for thread in threading.enumerate()].count("zarrckpt-obstore"))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.stdout.split() == ["1"], done.stderr


def test_parts_of_large_objects_are_uploaded_concurrently() -> None:
    data = os.urandom((4 << 20) + 100)
    with served(latency=0.2) as server:
        for concurrency, expected in ((1, 1), (24, 3), (None, 5)):
            store = store_of(server, concurrency)
            server.reset()
            began = time.monotonic()
            store.put("big", [data[:200], memoryview(data)[200:]])
            # Begin, five parts, end.
            assert time.monotonic() - began >= 0.2 * (2 + math.ceil(5 / expected))
            stats = server.stats()
            assert expected <= stats["most_requests"] <= expected + 1
            assert stats["requests"]["part"] == 5
        assert store.get("big") == data


def test_connections_are_used_again() -> None:
    with served() as server:
        store = store_of(server, 4)
        for number in range(40):
            store.put(f"k{number}", [b"x" * 1000])
            assert len(store.read(f"k{number}", 0, 1000)) == 1000
        assert server.stats()["most_connections"] <= 8
        at_once(store, lambda number: store.put(f"k{number}", [bytes(1 << 20)]), 100)
        assert server.stats()["most_connections"] <= 24


def test_concurrency_is_pickled_with_its_spec() -> None:
    import pickle

    from zarrckpt._store import StoreSpec
    from zarrckpt._store._obstore import CONCURRENCY

    own, given = StoreSpec("memory://a"), StoreSpec("memory://a", concurrency=3)
    assert own != given
    assert own.open().max_concurrency == Store.max_concurrency
    assert given.child("b").open().max_concurrency == pickle.loads(pickle.dumps(given)).open().max_concurrency == 3
    options = {"key": "k", "secret": "s", "region": "x"}
    assert StoreSpec("s3://bucket", storage_options=options).open().max_concurrency == CONCURRENCY
    assert StoreSpec("s3://bucket", storage_options=options, concurrency=7).open().max_concurrency == 7


@pytest.mark.parametrize("nbytes", [1000, 3 << 20])
def test_few_objects_are_encoded_at_once_beside_training(nbytes: int) -> None:
    making, most, lock = 0, 0, threading.Lock()

    def groups() -> Any:
        nonlocal making, most
        with lock:
            making += 1
            most = max(most, making)
        time.sleep(0.02)
        yield [bytes(nbytes)]
        with lock:
            making -= 1

    with served() as server:
        store = store_of(server, concurrency=8)
        store.beside_training = True
        at_once(store, lambda number: store.put_parts(f"{number}", groups), 16)
        assert most == BESIDE_TRAINING
        store.beside_training = False
        at_once(store, lambda number: store.put_parts(f"{number}", groups), 16)
        assert most == min(4, os.cpu_count() or 1)
