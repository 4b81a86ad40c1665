"""Tensors one by one, as an inference engine takes them: each is copied to memory that exists, and then dropped.

On local files, and on S3 over TLS. ``zarrckpt.load`` fills the same memory in place, or new tensors. Only zarrckpt
checks the bytes.
"""

from __future__ import annotations

import importlib.util
import os
import tempfile
import warnings
from collections.abc import Callable, Iterable
from typing import Any

from harness.s3_server import served

from benchmarks.measure import Options, alternate, fresh, medians, seconds, trust
from benchmarks.results import Figure, Results

LOAD, LOAD_NEW = "zarrckpt.load, in place", "zarrckpt.load, into new tensors"
ITERATE, DROP = "iter_tensors", "iter_tensors, without the copy"
SAFETENSORS, RUNAI = "safetensors, safe_open", "Run:ai streamer"
Pairs = Iterable[tuple[str, Any]]


def run(options: Options) -> Results:
    found = Results()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        found.add(fresh(_measure, options, folder, None))
    with served(tls=True) as server:
        # Run:ai's client names the bucket in the path of a url.
        own = {"RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING": "0", "RUNAI_STREAMER_S3_ENDPOINT": server.endpoint}
        found.add(fresh(_measure, options, "s3://bench", server.authority, env={**server.environment, **own}))
    return found


def _measure(options: Options, folder: str, authority: str | None) -> Results:
    if authority is not None:
        trust(authority)
    import torch
    from safetensors.torch import save_file

    import zarrckpt
    from benchmarks import state as states
    from zarrckpt._store import open_store
    from zarrckpt._store._whole_files import upload_files

    warnings.filterwarnings("ignore")
    state = states.make_state(options.gigabytes, options.dtype)
    target = states.like(state)
    zarrckpt.save(state, f"{folder}/checkpoint")
    with tempfile.TemporaryDirectory(dir=options.folder) as local:
        save_file(state, f"{local}/model.safetensors")
        is_s3 = folder.startswith("s3:")
        if is_s3:
            upload_files(local, open_store(f"{folder}/files"))
        else:
            os.rename(f"{local}/model.safetensors", f"{folder}/model.safetensors")
    file = f"{folder}/files/model.safetensors" if is_s3 else f"{folder}/model.safetensors"

    def load_new() -> Pairs:
        zarrckpt.load({name: torch.empty_like(tensor) for name, tensor in target.items()}, f"{folder}/checkpoint")
        return ()

    contenders: dict[str, Callable[[], Pairs] | None] = {
        LOAD: lambda: zarrckpt.load(target, f"{folder}/checkpoint") and (),
        LOAD_NEW: load_new,
        ITERATE: lambda: zarrckpt.open(f"{folder}/checkpoint").iter_tensors(),
        DROP: lambda: zarrckpt.open(f"{folder}/checkpoint").iter_tensors(),
        RUNAI: (lambda: _runai(file)) if importlib.util.find_spec("runai_model_streamer") else None,
        SAFETENSORS: None if is_s3 else lambda: _safetensors(file),
    }

    def once(name: str, read: Callable[[], Pairs]) -> float:
        states.clear(target)

        def take_all() -> None:
            for key, tensor in read():
                if name != DROP:
                    target[key].copy_(tensor)

        took = seconds(take_all)
        if name not in (DROP, LOAD_NEW) and not states.equal(target, state):
            raise RuntimeError(f"{name} read other data than were saved")
        return took

    calls = {name: (lambda _, name=name, read=read: once(name, read)) for name, read in contenders.items() if read}
    for call in calls.values():
        call(-1)  # imports and threads
    found = medians(alternate(calls, options.rounds))
    group = f"tensors one by one, {'S3 over TLS' if is_s3 else 'local files'}"
    size = states.nbytes(state) / 1e9
    figures = [Figure(group, name, size / found[name], "GB/s") for name in found]
    figures += [Figure(group, name, None, note="not installed") for name in (RUNAI,) if name not in found]
    for peer, goal in ((LOAD, 0.9), (LOAD_NEW, None)):
        figures.append(Figure(group, f"{DROP}, against {peer}", found[peer] / found[DROP], "x", goal))
    for peer in (RUNAI, SAFETENSORS):
        if peer in found:
            figures.append(Figure(group, f"{ITERATE}, against {peer}", found[peer] / found[ITERATE], "x"))
    return Results([], figures)


def _safetensors(path: str) -> Pairs:
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        for name in file.keys():  # noqa: SIM118 - not a mapping
            yield name, file.get_tensor(name)


def _runai(path: str) -> Pairs:
    from runai_model_streamer import SafetensorsStreamer

    with SafetensorsStreamer() as streamer:
        streamer.stream_file(path)
        yield from streamer.get_tensors()
