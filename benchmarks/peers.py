"""The peers: for each, a function that saves a state at a url and one that loads it into a target, in place.

The tables name peers that are not installed. Local peers get a path. Peers on S3 get a url, and find the server by the
usual AWS_ variables.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

import zarrckpt
from zarrckpt._jobs import DEFAULT_MAX_INFLIGHT_BYTES

State = dict[str, Any]
Transfer = Callable[[State, str], object]

BLOCK = 16 << 20
"""Bytes of TensorStore's chunks, which are rows, so that it can transfer several at a time."""


@dataclass(frozen=True)
class Contender:
    """A name, the package that it needs, and functions to save and to load. ``kind`` is "ours", "peer" or "limit"."""

    name: str
    needs: str
    save: Transfer
    load: Transfer | None
    """None for a limit of saves alone."""
    kind: str = "peer"

    @property
    def installed(self) -> bool:
        return importlib.util.find_spec(self.needs) is not None


# -- zarrckpt


def ours(
    durable: bool = True, max_inflight_bytes: int = DEFAULT_MAX_INFLIGHT_BYTES, **place: Any
) -> tuple[Transfer, Transfer]:
    saving = zarrckpt.SaveOptions(durable=durable, max_inflight_bytes=max_inflight_bytes)
    loading = zarrckpt.LoadOptions(max_inflight_bytes=max_inflight_bytes)

    def save(state: State, url: str) -> None:
        zarrckpt.save(state, url, options=saving, **place)

    def load(target: State, url: str) -> None:
        zarrckpt.load(target, url, options=loading, **place)

    return save, load


# -- DCP, and libraries based on it


def dcp_save(state: State, path: str) -> None:
    dcp.save(state, storage_writer=dcp.FileSystemWriter(path))


def dcp_save_fast(state: State, path: str) -> None:
    dcp.save(state, storage_writer=dcp.FileSystemWriter(path, thread_count=2, sync_files=False))


def dcp_load(target: State, path: str) -> None:
    dcp.load(target, storage_reader=dcp.FileSystemReader(path))


def _s3fs_options() -> dict[str, Any]:
    """Return s3fs's options for the server that the environment names."""
    kwargs = {"region_name": os.environ["AWS_REGION"]}
    secrets = {"key": os.environ["AWS_ACCESS_KEY_ID"], "secret": os.environ["AWS_SECRET_ACCESS_KEY"]}
    return {**secrets, "endpoint_url": os.environ["AWS_ENDPOINT_URL"], "client_kwargs": kwargs}


def fsspec_save(state: State, url: str) -> None:
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

    dcp.save(state, storage_writer=FsspecWriter(url, **_s3fs_options()))


def fsspec_load(target: State, url: str) -> None:
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

    dcp.load(target, storage_reader=FsspecReader(url, **_s3fs_options()))


def connector_save(state: State, url: str) -> None:
    from s3torchconnector.dcp import S3StorageWriter

    dcp.save(state, storage_writer=S3StorageWriter(region=os.environ["AWS_REGION"], path=f"{url}/"))


def connector_load(target: State, url: str) -> None:
    from s3torchconnector.dcp import S3StorageReader

    dcp.load(target, storage_reader=S3StorageReader(region=os.environ["AWS_REGION"], path=f"{url}/"))


# -- formats without shards


def safetensors_save(state: State, path: str) -> None:
    from safetensors.torch import save_file

    os.makedirs(path, exist_ok=True)
    save_file(state, f"{path}/model.safetensors")


def safetensors_load(target: State, path: str) -> None:
    from safetensors import safe_open

    with safe_open(f"{path}/model.safetensors", "pt") as file:
        for name, tensor in target.items():
            tensor.copy_(file.get_tensor(name))


def plain(tensor: torch.Tensor) -> Any:
    """Return a tensor as a numpy array, with bfloat16 as unsigned integers."""
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def zarr_save(state: State, path: str) -> None:
    import zarr

    group = zarr.open_group(path, mode="w", zarr_format=3)
    for name, tensor in state.items():
        data = plain(tensor)
        array = group.create_array(name, shape=data.shape, dtype=data.dtype, chunks=data.shape, compressors=None)
        array[...] = data


def zarr_load(target: State, path: str) -> None:
    import zarr

    group = zarr.open_group(path, mode="r", zarr_format=3)
    for name, tensor in target.items():
        found: Any = group[name]
        plain(tensor)[...] = found[...]


def _tensorstore(state: State, url: str, create: bool) -> list[tuple[Any, Any]]:
    """Return (array in the store, array in memory) of every tensor."""
    import tensorstore

    pairs = []
    context = tensorstore.Context()
    for name, tensor in state.items():
        data = plain(tensor)
        if url.startswith("s3://"):
            bucket, _, path = url.removeprefix("s3://").partition("/")
            store = {"driver": "s3", "bucket": bucket, "path": f"{path}/{name}/"}
            store |= {"endpoint": os.environ["AWS_ENDPOINT_URL"], "aws_region": os.environ["AWS_REGION"]}
        else:
            store = {"driver": "file", "path": f"{url}/{name}/"}
        spec: dict[str, Any] = {"driver": "zarr3", "kvstore": store}
        if create:
            rows = max(1, min(len(data), BLOCK * len(data) // max(1, data.nbytes)))
            grid = {"name": "regular", "configuration": {"chunk_shape": [rows, *data.shape[1:]]}}
            codecs = [{"name": "bytes", "configuration": {"endian": "little"}}]
            facts = {"shape": list(data.shape), "data_type": str(data.dtype), "chunk_grid": grid, "codecs": codecs}
            spec["metadata"] = facts
        pairs.append((tensorstore.open(spec, create=create, open=not create, context=context), data))
    return [(future.result(), data) for future, data in pairs]


def tensorstore_save(state: State, url: str) -> None:
    for write in [array.write(data) for array, data in _tensorstore(state, url, True)]:
        write.result()


def tensorstore_load(target: State, url: str) -> None:
    import tensorstore

    for read in [tensorstore.array(data).write(array) for array, data in _tensorstore(target, url, False)]:
        read.result()


# -- lists


SIGNED = "zarrckpt, payload signed"


def local_contenders(world: int) -> list[Contender]:
    """Return the contenders on local files. With several processes, leave out formats without shards."""
    found = [
        Contender("zarrckpt", "zarrckpt", *ours(), kind="ours"),
        Contender("zarrckpt, durable=False", "zarrckpt", *ours(durable=False), kind="ours"),
        Contender("DCP FileSystem", "torch", dcp_save, dcp_load),
        Contender("DCP FileSystem, 2 threads, no sync", "torch", dcp_save_fast, dcp_load),
    ]
    if world == 1:
        found += [
            Contender("TensorStore zarr3", "tensorstore", tensorstore_save, tensorstore_load),
            Contender("safetensors", "safetensors", safetensors_save, safetensors_load),
            Contender("zarr-python", "zarr", zarr_save, zarr_load),
        ]
    return found


def s3_contenders() -> list[Contender]:
    """Return the contenders on S3, for one process."""
    return [
        Contender("zarrckpt", "zarrckpt", *ours(), kind="ours"),
        # The default over plain HTTP to another machine. s3torchconnector hashes no payload there either.
        Contender(SIGNED, "zarrckpt", *ours(storage_options={"unsigned_payload": False}), kind="ours"),
        Contender("s3torchconnector", "s3torchconnector", connector_save, connector_load),
        Contender("DCP + s3fs", "s3fs", fsspec_save, fsspec_load),
        Contender("TensorStore zarr3", "tensorstore", tensorstore_save, tensorstore_load),
    ]
