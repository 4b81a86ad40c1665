"""Other libraries reading a checkpoint, in a process that imports zarr and xarray and nothing of this package.

Run as ``python plain_readers.py <out> <json of [[function, arguments], ...]>``; what the functions found is pickled
into ``out``. Most return path -> (name of the data type, shape, elements as bytes in C order).
"""

from __future__ import annotations

import importlib.metadata
import json
import pickle
import subprocess
import sys
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


def _group(url: str, storage_options: Any = None) -> Any:
    import zarr

    group = zarr.open_group(url, mode="r", storage_options=storage_options)
    assert group.metadata.consolidated_metadata is not None
    tree = group.attrs["zarrckpt"]["tree"]
    return group[tree] if tree else group


def zarr_all(url: str, storage_options: Any = None) -> Found:
    """Every array of the group, by zarr-python."""
    import zarr

    members = _group(url, storage_options).members(max_depth=None)
    return {path: _bits(node[...]) for path, node in members if isinstance(node, zarr.Array)}


def zarr_unconsolidated(url: str) -> list[str]:
    """The paths of all nodes that zarr-python finds by listing."""
    import zarr

    group = zarr.open_group(url, mode="r", use_consolidated=False)
    return sorted(path for path, _ in group.members(max_depth=None))


def zarr_parts(url: str, path: str, boxes: list[list[list[int]]]) -> list[Any]:
    """Boxes, each [[start, stop], ...], of one array."""
    array = _group(url)[path]
    return [_bits(array[tuple(slice(*pair) for pair in box)]) for box in boxes]


def zarr_without_the_package(url: str) -> Found:
    """Like ``zarr_all`` where the package is not installed."""
    every = [point for package in importlib.metadata.distributions() for point in package.entry_points]
    others = importlib.metadata.EntryPoints(point for point in every if not point.value.startswith("zarrckpt"))
    importlib.metadata.entry_points = others.select  # type: ignore[assignment]
    sys.modules["zarrckpt"] = None  # type: ignore[assignment]
    return zarr_all(url)


def xarray_tree(url: str, storage_options: Any = None) -> Found:
    """Every variable of the tree, by xarray."""
    import xarray

    options = {} if storage_options is None else {"storage_options": storage_options}
    tree = xarray.open_datatree(url, engine="zarr", **options)
    return {
        f"{node.path.strip('/')}/{name}".strip("/"): _bits(variable.values)
        for node in tree.subtree
        for name, variable in node.ds.variables.items()
    }


def xarray_group(url: str, group: str, storage_options: Any = None) -> Found:
    """Every variable of one group, by xarray."""
    import xarray

    dataset = xarray.open_zarr(url, group=group, storage_options=storage_options)
    return {name: _bits(variable.values) for name, variable in dataset.variables.items()}


def obstore_store(url: str, config: dict[str, str], group: str) -> tuple[Found, Found]:
    """The same by zarr's store on obstore: zarr-python's arrays, and xarray's of one group."""
    import xarray
    import zarr
    from obstore.store import from_url

    store = zarr.storage.ObjectStore(from_url(url, client_options={"allow_http": True}, **config), read_only=True)
    members = zarr.open_group(store, mode="r").members(max_depth=None)
    arrays = {path: _bits(node[...]) for path, node in members if isinstance(node, zarr.Array)}
    dataset = xarray.open_zarr(store, group=group)
    return arrays, {name: _bits(variable.values) for name, variable in dataset.variables.items()}


if __name__ == "__main__":
    found = [globals()[name](**arguments) for name, arguments in json.loads(sys.argv[2])]
    assert "torch" not in sys.modules
    Path(sys.argv[1]).write_bytes(pickle.dumps(found))
