"""Read a checkpoint with zarrckpt, plain zarr and xarray, without torch and a process group."""

from __future__ import annotations

import sys
from typing import Any

import obstore
import xarray as xr
import zarr

import zarrckpt

SHOWN = (
    "model.embedding.weight",
    "model.blocks.0.attention.query.weight",
    "model.blocks.0.down.weight",
    "model.norm.weight",
    "optim.state.blocks.0.down.weight.exp_avg",
    "optim.state.blocks.0.down.weight.step",
    "rng.torch",
)


def zarr_place(url: str) -> Any:
    """Return a store for zarr and xarray: a path unchanged, a url through obstore.

    They also open a url itself, through s3fs. It leaves its sessions open, and warns of that at exit.
    """
    if "://" not in url:
        return url
    return zarr.storage.ObjectStore(obstore.store.from_url(url, client_options={"allow_http": True}), read_only=True)


def look_inside(url: str) -> dict[str, Any]:
    """Print a checkpoint's contents and the ranks that wrote them. Return the same for a program."""
    checkpoint = zarrckpt.open(url)
    print(
        f"   zarrckpt.open: {len(checkpoint.tensors)} tensors, {len(checkpoint.non_tensors)} values, "
        f"{checkpoint.nbytes:,} bytes, saved by {checkpoint.info.world_size} ranks"
    )
    print(f"      {'name':42s} {'shape':11s} {'dtype':8s} {'chunks':11s} written by rank")
    for name in SHOWN:
        array = checkpoint[name]
        ranks = " ".join(map(str, checkpoint.writers(name).ravel()))
        print(f"      {name:42s} {array.shape!s:11s} {array.dtype!s:8s} {array.chunks!s:11s} {ranks}")
    print(
        f"      ... and {len(checkpoint) - len(SHOWN)} more; values: "
        + ", ".join(f"{name} = {checkpoint[name]}" for name in ("step", "data.position", "schedule.last_epoch"))
    )
    path = checkpoint.entry("model.head.weight").node_path
    place = zarr_place(url)
    weight = zarr.open_group(place, mode="r")[path]
    assert isinstance(weight, zarr.Array)
    print(f"   zarr.open_group(place)[{path!r}]: first numbers", weight[0, :4])
    model = xr.open_zarr(place, group="model")
    mean = float(abs(model["blocks.0.up.weight"]).mean())
    print(
        f"   xr.open_zarr(place, group='model'): {len(model.data_vars)} variables; mean |blocks.0.up.weight| {mean:.5f}"
    )
    assert "torch" not in sys.modules
    return {"tensors": len(checkpoint.tensors), "step": checkpoint["step"], "xarray_variables": len(model.data_vars)}
