"""Other libraries reading a checkpoint, in a process that imports zarr and xarray but not this package.

Run as ``python plain_readers.py <out> <json of [[function, arguments], ...]>``. The results are pickled into ``out``.
Most functions return path -> (name of the data type, shape, elements as bytes in C order).
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import os
import pickle
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

Found = dict[str, tuple[str, tuple[int, ...], bytes]]


def call(tmp_path: Path, *steps: tuple[str, dict[str, Any]]) -> list[Any]:
    """Run functions of this module with their arguments in a new process, in which warnings are errors."""
    out = tmp_path / "found.pickle"
    command = [sys.executable, "-W", "error", __file__, str(out), json.dumps(steps)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert done.returncode == 0, done.stderr
    found: list[Any] = pickle.loads(out.read_bytes())
    return found


def _bits(array: Any) -> tuple[str, tuple[int, ...], bytes]:
    import numpy as np

    array = np.asarray(array)
    return array.dtype.name, array.shape, np.ascontiguousarray(array).tobytes()


def zarr_without_the_package(url: str) -> Found:
    """Return every array of the group, read by zarr-python without the package installed."""
    _hide_the_package()
    import zarr

    group = zarr.open_group(url, mode="r")
    assert group.metadata.consolidated_metadata is not None
    members = group.members(max_depth=None)
    return {path: _bits(node[...]) for path, node in members if isinstance(node, zarr.Array)}


def zarr_unconsolidated(url: str) -> list[str]:
    """Return the paths of all nodes that zarr-python finds by listing."""
    import zarr

    group = zarr.open_group(url, mode="r", use_consolidated=False)
    return sorted(path for path, _ in group.members(max_depth=None))


def _hide_the_package() -> None:
    """Hide the package from this process, as if it were not installed."""
    every = [point for package in importlib.metadata.distributions() for point in package.entry_points]
    others = importlib.metadata.EntryPoints(point for point in every if not point.value.startswith("zarrckpt"))
    importlib.metadata.entry_points = others.select  # type: ignore[assignment]
    sys.modules["zarrckpt"] = None  # type: ignore[assignment]


def calls_without_the_package(url: str) -> dict[str, Any]:
    """Read ``plain/w`` and ``mixed/w`` without the package: call -> elements as a list, or the error.

    The group ``mixed`` also has a tensor ``half`` of bfloat16.
    """
    _hide_the_package()
    import xarray
    import zarr

    group = {"group": "mixed", "consolidated": False}
    calls: dict[str, Callable[[], Any]] = {
        "zarr": lambda: zarr.open_group(url, mode="r")["plain/w"][:],
        "zarr, use_consolidated": lambda: zarr.open_group(url, mode="r", use_consolidated=False)["mixed/w"][:],
        "zarr, half": lambda: zarr.open_group(url, mode="r", use_consolidated=False)["mixed/half"][:],
        "zarr, array": lambda: zarr.open_array(url, path="mixed/w", mode="r")[:],
        "zarr, members": lambda: zarr.open_group(url, mode="r", use_consolidated=False)["mixed"].members(),
        "xarray": lambda: xarray.open_zarr(url, group="plain")["w"].values,
        "xarray, consolidated": lambda: xarray.open_zarr(url, group="plain", consolidated=False)["w"].values,
        "xarray, mixed": lambda: xarray.open_zarr(url, **group)["w"].values,
        "xarray, drop_variables": lambda: xarray.open_zarr(url, drop_variables="half", **group)["w"].values,
        "xarray, tree": lambda: xarray.open_datatree(url, engine="zarr", consolidated=False)["plain/w"].values,
    }
    found = {}
    for name, call in calls.items():
        try:
            found[name] = call().tolist()
        except ValueError as err:
            found[name] = str(err)
    return found


def _zarr_array(place: Any, path: str, **options: Any) -> Any:
    import zarr

    return zarr.open_group(place, mode="r", **options)[path]


def _zarrs_array(place: Any, path: str, **options: Any) -> Any:
    import zarr
    import zarrs  # noqa: F401 - the codec pipeline that is named below

    zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"})
    return _zarr_array(place, path, **options)


def _xarray_dataset(place: Any, path: str, **options: Any) -> Any:
    import xarray

    group, _, name = path.rpartition("/")
    return xarray.open_zarr(place, group=group or None, **options)[name]


def _xarray_tree(place: Any, path: str, **options: Any) -> Any:
    import xarray

    return xarray.open_datatree(place, engine="zarr", **options)[path]


def _dask_array(place: Any, path: str, **options: Any) -> Any:
    import dask.array
    import zarr

    # A group is opened first: before that, zarr 3.1 has no bfloat16.
    return dask.array.from_zarr(zarr.open_group(place, mode="r", **options)[path])


def _tensorstore_array(place: str, path: str, storage_options: dict[str, Any] | None = None) -> Any:
    import tensorstore

    kvstore: dict[str, Any] = {"driver": "file", "path": f"{place}/{path}/"}
    if place.endswith(".zip"):
        kvstore = {"driver": "zip", "base": {"driver": "file", "path": place}, "path": f"{path}/"}
    if storage_options is not None:
        bucket, _, key = place.removeprefix("s3://").partition("/")
        options = {"endpoint": storage_options["endpoint_url"], "aws_region": os.environ["AWS_REGION"]}
        credentials = {"aws_credentials": {"type": "environment"}}
        kvstore = {"driver": "s3", "bucket": bucket, "path": f"{key}/{path}/", **options, **credentials}
    return tensorstore.open({"driver": "zarr3", "kvstore": kvstore}, read=True).result()


def _our_array(place: Any, path: str, **options: Any) -> Any:
    import zarrckpt

    ckpt = zarrckpt.open(place, **options)
    return next(ckpt[fqn] for fqn in ckpt.tensors if ckpt.entry(fqn).node_path == path)


READERS: dict[str, Callable[..., Any]] = {
    "zarrckpt": _our_array,
    "zarr": _zarr_array,
    "zarrs": _zarrs_array,
    "xarray": _xarray_dataset,
    "datatree": _xarray_tree,
    "dask": _dask_array,
    "tensorstore": _tensorstore_array,
}


@functools.cache
def _obstore(text: str) -> Any:
    import zarr
    from obstore.store import from_url

    config = json.loads(text)
    store = from_url(config.pop("url"), client_options={"allow_http": True}, **config)
    return zarr.storage.ObjectStore(store, read_only=True)


@functools.cache
def _zip(path: str) -> Any:
    import zarr

    return zarr.storage.ZipStore(path, mode="r")


def probe(reader: str, cases: list[dict[str, Any]], environment: dict[str, str] | None = None) -> list[tuple[str, Any]]:
    """Read parts of arrays: ("read", elements), ("warned", elements), or ("raised", the error's type).

    A case has the ``place`` that the reader opens or the config of an ``obstore`` store, the ``path`` of an array, and
    may have ``options`` and a ``box``.
    """
    os.environ.update(environment or {})
    found: list[tuple[str, Any]] = []
    for case in cases:
        place = _obstore(json.dumps(case["obstore"])) if "obstore" in case else case["place"]
        if str(place).endswith(".zip") and reader not in ("zarrckpt", "tensorstore"):
            place = _zip(place)
        box = tuple(slice(*pair) for pair in case["box"]) if "box" in case else ...
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            try:
                part = READERS[reader](place, case["path"], **case.get("options", {}))[box]
                what = _bits(part.read().result() if reader == "tensorstore" else part)
                found.append(("warned" if seen else "read", what))
            except Exception as err:
                found.append(("raised", f"{type(err).__name__}: {err}"))
    return found


if __name__ == "__main__":
    found = [globals()[name](**arguments) for name, arguments in json.loads(sys.argv[2])]
    assert "torch" not in sys.modules
    Path(sys.argv[1]).write_bytes(pickle.dumps(found))
