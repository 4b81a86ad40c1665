"""zarr-python, TensorStore and xarray read the saved numbers without this package's help."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest
import tensorstore
import torch
import zarr
from harness import ROOT, plain_readers
from harness.internals import DTYPES
from harness.random_tensors import random_tensor
from harness.s3_server import S3Server
from harness.store_servers import REGION, S3Place
from obstore.exceptions import NotSupportedError

import zarrckpt

RECIPES = ROOT / "docs" / "how-to" / "read.md"
NAMES = ["layers.0.weight", "a%b", "a/b", "@home", "__meta", "c", "c.0", "ünï✓", "zarr.json", "x y", "q?*#1"]


def bits(tensor: torch.Tensor) -> tuple[str, tuple[int, ...], bytes]:
    flat = tensor.contiguous().reshape(-1)
    raw = (torch.view_as_real(flat) if flat.is_complex() else flat).view(torch.uint8)
    return str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), raw.numpy().tobytes()


@dataclass
class Saved:
    """A checkpoint: its url, the path of its tree with a trailing "/", and fqn -> tensor."""

    url: str
    tree: str
    tensors: dict[str, torch.Tensor]

    def expected(self, prefix: str = "") -> dict[str, tuple[str, tuple[int, ...], bytes]]:
        """Return the expected contents below the tree: path -> type, shape, bytes."""
        ckpt = zarrckpt.open(self.url)
        found = {
            ckpt.entry(fqn).node_path.removeprefix(self.tree): bits(tensor) for fqn, tensor in self.tensors.items()
        }
        return {path.removeprefix(prefix): item for path, item in found.items() if path.startswith(prefix)}


def a_state() -> dict[str, Any]:
    torch.manual_seed(3)
    return {
        "square": {name: random_tensor(name, (8, 8)) for name in DTYPES},
        "scalar": {name: random_tensor(name, ()) for name in DTYPES},
        "empty": {name: random_tensor(name, (0, 3)) for name in DTYPES},
        "model": {name: torch.randn(3, 5) for name in NAMES} | {"cube": torch.randn(3, 3, 3), "bias": torch.randn(5)},
        "large": {"w": torch.randn(4100, 1200), "v": torch.randn(257, 33)},
        "deep": {"er": {"and": {"deeper": torch.ones(2)}}},
        "step": 3,
    }


def flat(state: dict[str, Any], prefix: str = "") -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for key, value in state.items():
        if isinstance(value, dict):
            found |= flat(value, f"{prefix}{key}.")
        elif isinstance(value, torch.Tensor):
            found[f"{prefix}{key}"] = value
    return found


@pytest.fixture(scope="module", params=["fresh", "overwritten"])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    url = str(tmp_path_factory.mktemp("ck") / "run")
    over = request.param != "fresh"
    if over:
        zarrckpt.save({"model": {"old": torch.zeros(4)}, "other": torch.ones(1)}, url)
    state = a_state()
    zarrckpt.save(state, url, overwrite=True, options=zarrckpt.SaveOptions(durable=False))
    tree = zarrckpt.open(url).info.tree
    assert bool(tree) == over
    # For arrays with shards, zarr-python's "chunks" are this package's subchunks.
    large = zarr.open_group(url, mode="r")[f"{tree}/large/w" if tree else "large/w"]
    assert isinstance(large, zarr.Array) and large.shards is not None and large.chunks[1] == large.shape[1]
    return Saved(url, f"{tree}/" if tree else "", flat(state))


BOXES = [[[0, 4100], [0, 1]], [[7, 9], [0, 1200]], [[1000, 3000], [100, 900]], [[4099, 4100], [1199, 1200]]]


@pytest.fixture(scope="module")
def found(saved: Saved, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return what zarr-python and xarray read in a process that imports only them and treats warnings as errors."""
    url = {"url": saved.url}
    steps = [
        ("zarr_all", url),
        ("zarr_parts", {**url, "path": "large/w", "boxes": BOXES}),
        ("zarr_unconsolidated", url),
        ("xarray_tree", url),
        ("xarray_group", {**url, "group": f"{saved.tree}model"}),
    ]
    answers = plain_readers.call(tmp_path_factory.mktemp("found"), *steps)
    return {name: answer for (name, _), answer in zip(steps, answers, strict=True)}


def test_zarr_reads_every_array(saved: Saved, found: dict[str, Any]) -> None:
    assert found["zarr_all"] == saved.expected()


def test_zarr_reads_parts(saved: Saved, found: dict[str, Any]) -> None:
    """Parts of an array with subchunks."""
    whole = saved.tensors["large.w"]
    assert found["zarr_parts"] == [bits(whole[tuple(slice(*pair) for pair in box)]) for box in BOXES]


def test_zarr_finds_the_same_nodes_by_listing(saved: Saved, found: dict[str, Any]) -> None:
    """zarr-python warns of no object, and the listing has the same nodes as the root."""
    paths = {*saved.expected()}
    groups = {"/".join(path.split("/")[:depth]) for path in paths for depth in range(1, path.count("/") + 1)}
    nodes = {f"{saved.tree}{path}" for path in paths | groups} | ({saved.tree[:-1]} if saved.tree else set())
    ours = {path for path in found["zarr_unconsolidated"] if path.startswith("@zarrckpt")}
    assert {*found["zarr_unconsolidated"]} - ours == nodes
    assert len(ours) == 4  # the claim, the marker, two tables


def test_xarray_opens_the_tree(saved: Saved, found: dict[str, Any]) -> None:
    assert found["xarray_tree"] == {f"{saved.tree}{path}": item for path, item in saved.expected().items()}


def test_xarray_opens_a_group(saved: Saved, found: dict[str, Any]) -> None:
    assert found["xarray_group"] == saved.expected("model/")


def test_portable_dtypes_need_no_package(tmp_path: Path) -> None:
    url, state = str(tmp_path / "ck"), {name: random_tensor(name, (3, 4)) for name in DTYPES}
    zarrckpt.save(state, url, options=zarrckpt.SaveOptions(portable_dtypes=True))
    (found,) = plain_readers.call(tmp_path, ("zarr_without_the_package", {"url": url}))
    for name, tensor in state.items():
        _, shape, data = bits(tensor)
        assert found[name] == (DTYPES[name].portable.name, shape, data)


def test_bfloat16_fails_groups_without_the_package(tmp_path: Path) -> None:
    """The calls that ``docs/how-to/read.md`` names, and no others."""
    url, w = str(tmp_path / "ck"), torch.arange(3.0)
    zarrckpt.save({"plain": {"w": w}, "mixed": {"w": w, "half": w.bfloat16()}}, url)
    (found,) = plain_readers.call(tmp_path, ("calls_without_the_package", {"url": url}))
    works = {"zarr, use_consolidated", "zarr, array", "xarray, consolidated"}
    assert {name for name, answer in found.items() if answer == w.tolist()} == works
    assert {answer for name, answer in found.items() if name not in works} == {
        "No Zarr data type found that matches 'bfloat16'"
    }


@pytest.mark.parametrize("overwritten", [False, True])
def test_the_recipe_for_http_reads(overwritten: bool, tmp_path: Path, s3_stub: S3Server) -> None:
    """The code of ``docs/how-to/read.md``, at a server that serves ranges and at one that does not."""
    names = {"norm": torch.ones(16), "größe": torch.ones(2), "large": torch.ones(1100, 600)}
    for _ in range(1 + overwritten):
        zarrckpt.save({"model": names}, tmp_path / "ck", overwrite=True)
    for file in filter(Path.is_file, (tmp_path / "ck").rglob("*")):
        s3_stub.put_object(f"run/{file.relative_to(tmp_path / 'ck').as_posix()}", file.read_bytes())
    tree = zarrckpt.open(tmp_path / "ck").info.tree
    (recipe,) = re.findall(r"```python no-run\n(import.*?HTTPStore.*?)```", RECIPES.read_text(), re.DOTALL)
    found: dict[str, Any] = {}
    code = recipe.replace("https://example.org/run/step-100", f"{s3_stub.endpoint}/run")
    exec(code.replace("model/norm", f"{tree}/model/norm".lstrip("/")), found)
    group, model, url = found["group"], f"{tree}/model".lstrip("/"), found["url"]
    assert (found["norm"] == 1).all() and (found["same"] == 1).all() and found["norm"].shape == (16,)
    assert (group[f"{model}/größe"][...] == 1).all() and (group[f"{model}/large"][:3] == 1).all()
    assert (found["tree"][model]["large"][5:9].values == 1).all()
    assert (zarrckpt.open(url)["model.large"][:3] == 1).all()

    def by_tensorstore(name: str) -> Any:
        return tensorstore.open({"driver": "zarr3", "kvstore": f"{url}/{model}/{name}/"}, read=True).result()

    assert (by_tensorstore(quote("größe")).read().result() == 1).all()
    assert (by_tensorstore("large")[:3].read().result() == 1).all()
    s3_stub.faults.ignore_ranges = True
    with pytest.raises(NotSupportedError, match="Range"):
        group[f"{model}/large"][:3]
    with pytest.raises(ValueError, match="byte range"):
        by_tensorstore("large")[:3].read().result()


def tensorstore_array(saved: Saved, path: str) -> Any:
    kvstore = {"driver": "file", "path": f"{saved.url}/{saved.tree}{path}/"}
    return tensorstore.open({"driver": "zarr3", "kvstore": kvstore}, read=True).result()


def test_tensorstore_reads_every_array(saved: Saved) -> None:
    for path, expected in saved.expected().items():
        array = tensorstore_array(saved, path)
        found = np.asarray(array.read().result())
        assert (array.dtype.name, found.shape, np.ascontiguousarray(found).tobytes()) == expected, path
        assert list(array.domain.labels) == [f"dim{axis}_{n}" for axis, n in enumerate(expected[1])]


def test_tensorstore_reads_parts(saved: Saved) -> None:
    array, whole = tensorstore_array(saved, "large/w"), saved.tensors["large.w"].numpy()
    for box in (np.s_[:, 7:8], np.s_[11:13], np.s_[1000:3000:7, 100:900]):
        assert np.array_equal(array[box].read().result(), whole[box])


@pytest.mark.parametrize("path", ["square/float32", "large/w"])
def test_both_readers_check_their_reads(saved: Saved, path: str) -> None:
    """A flipped bit raises in both, because the checksums are codecs of Zarr."""
    file = Path(saved.url, f"{saved.tree}{path}", "c.0.0")
    original = file.read_bytes()
    file.write_bytes(bytes([original[0] ^ 1]) + original[1:])
    try:
        with pytest.raises(ValueError, match="Digest mismatch"):
            tensorstore_array(saved, path)[:2, :2].read().result()
        with pytest.raises(ValueError, match="checksum"):
            zarr.open_group(saved.url, mode="r")[f"{saved.tree}{path}"][:2, :2]
    finally:
        file.write_bytes(original)


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_absent_chunks_read_as_a_distinct_fill_value(name: str, tmp_path: Path) -> None:
    """A missing chunk reads as a value that no weight has, the same in both."""
    url = str(tmp_path / "ck")
    zarrckpt.save({"w": random_tensor(name, (3,))}, url)
    Path(url, "w", "c.0").unlink()
    by_zarr = np.asarray(zarr.open_group(url, mode="r")["w"][...])
    by_tensorstore = np.asarray(tensorstore_array(Saved(url, "", {}), "w").read().result())
    assert by_zarr.tobytes() == by_tensorstore.tobytes()
    kind = DTYPES[name].kind
    if kind in ("float", "complex"):
        assert np.isnan(by_zarr).all()
    elif kind == "bool":
        assert by_zarr.all()
    else:
        limits = np.iinfo(by_zarr.dtype)
        assert (by_zarr == (limits.min if kind == "int" else limits.max)).all()


@pytest.fixture(params=["fresh", "overwritten"])
def on_s3(request: pytest.FixtureRequest, moto_bucket: S3Place) -> tuple[str, Saved]:
    url, options = moto_bucket.url("runs/step 7"), moto_bucket.storage_options
    if request.param == "overwritten":
        zarrckpt.save({"model": {"old": torch.zeros(4)}}, url, storage_options=options)
    torch.manual_seed(4)
    state = {
        "model": {name: torch.randn(3, 5) for name in NAMES} | {"bias": random_tensor("bfloat16", (5,))},
        "large": torch.randn(4100, 1200),
    }
    zarrckpt.save(state, url, overwrite=True, storage_options=options)
    tree = zarrckpt.open(url, storage_options=options).info.tree
    return url, Saved(url, f"{tree}/" if tree else "", flat(state))


def test_readers_read_from_s3(on_s3: tuple[str, Saved], moto_bucket: S3Place, tmp_path: Path) -> None:
    url, saved = on_s3
    options = moto_bucket.storage_options
    opened = zarrckpt.open(url, storage_options=options)
    expected = {opened.entry(fqn).node_path: bits(tensor) for fqn, tensor in saved.tensors.items()}
    model = f"{saved.tree}model"
    in_model = {p.removeprefix(f"{model}/"): item for p, item in expected.items() if p.startswith(f"{model}/")}

    fsspec = {"url": url, "storage_options": moto_bucket.s3fs_options}
    keys = {"access_key_id": moto_bucket.key, "secret_access_key": moto_bucket.secret}
    by_zarr, tree, group, by_obstore = plain_readers.call(
        tmp_path,
        ("zarr_all", fsspec),
        ("xarray_tree", fsspec),
        ("xarray_group", {**fsspec, "group": model}),
        (
            "obstore_store",
            {"url": url, "config": {**keys, "endpoint": moto_bucket.endpoint, "region": REGION}, "group": model},
        ),
    )
    assert {f"{saved.tree}{path}": item for path, item in by_zarr.items()} == expected
    assert tree == expected
    assert group == in_model
    assert by_obstore == (expected, in_model)


def test_tensorstore_on_s3(on_s3: tuple[str, Saved], moto_bucket: S3Place, monkeypatch: pytest.MonkeyPatch) -> None:
    url, saved = on_s3
    for name, value in moto_bucket.environment.items():
        monkeypatch.setenv(name, value)
    opened = zarrckpt.open(url)
    for fqn, tensor in saved.tensors.items():
        path = f"{url.removeprefix(f's3://{moto_bucket.bucket}/')}/{opened.entry(fqn).node_path}/"
        place = {"bucket": moto_bucket.bucket, "endpoint": moto_bucket.endpoint, "aws_region": REGION}
        kvstore = {"driver": "s3", "path": path, "aws_credentials": {"type": "environment"}, **place}
        found = tensorstore.open({"driver": "zarr3", "kvstore": kvstore}, read=True).result().read().result()
        assert np.ascontiguousarray(found).tobytes() == bits(tensor)[2], fqn
