"""The table of data types and the zarr-python plugin, against the installed zarr-python and TensorStore."""

from __future__ import annotations

import json
import math
import pickle
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore as ts
import zarr
from harness.internals import DTYPES, ArrayNode, Grid, by_name, by_torch_name
from packaging.version import Version
from zarr.codecs import BytesCodec
from zarr.dtype import data_type_registry

from zarrckpt import UnsupportedValueError
from zarrckpt._read import zarr_dtypes

# One element of each fill value, little-endian. The NaN bits are those of Zarr's specification and the pages of
# zarr-extensions. float8_e4m3fn has no page. Its bits are the type's only NaN without a sign.
FILL_BYTES = {
    "bool": "01",
    "int8": "80",
    "int16": "0080",
    "int32": "00000080",
    "int64": "0000000000000080",
    "uint8": "ff",
    "uint16": "ffff",
    "uint32": "ffffffff",
    "uint64": "ffffffffffffffff",
    "float16": "007e",
    "float32": "0000c07f",
    "float64": "000000000000f87f",
    "complex64": "0000c07f0000c07f",
    "complex128": "000000000000f87f000000000000f87f",
    "bfloat16": "c07f",
    "float8_e4m3fn": "7f",
    "float8_e5m2": "7e",
    "float8_e4m3fnuz": "80",
    "float8_e5m2fnuz": "80",
    "float8_e8m0fnu": "ff",
}
ML_NAMES = [name for name in FILL_BYTES if name.startswith(("bfloat", "float8"))]

every_dtype = pytest.mark.parametrize("name", list(FILL_BYTES))
every_ml_dtype = pytest.mark.parametrize("name", ML_NAMES)


def in_fresh_process(script: str, *args: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", script, *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def succeed(script: str, *args: object) -> str:
    """Run a script in a separate process. Return its output."""
    done = in_fresh_process(script, *args)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


# --- the table -----------------------------------------------------------------------------------------


def test_the_table_has_every_name() -> None:
    assert set(DTYPES) == set(FILL_BYTES)


@pytest.mark.parametrize(
    ("name", "next_step"),
    [
        ("torch.qint8", "int_repr"),
        ("torch.quint4x2", "int_repr"),
        ("torch.complex32", "view_as_real"),
        ("torch.bits8", "uint8"),
        ("torch.float4_e2m1fn_x2", "uint8"),
        ("torch.int4", "uint8"),
        ("torch.uint3", "uint8"),
        ("torch.float12", "float32"),
    ],
)
def test_a_refusal_names_a_supported_dtype(name: str, next_step: str) -> None:
    with pytest.raises(UnsupportedValueError, match=f"{name}.*{next_step}"):
        by_torch_name(name)


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UnsupportedValueError, match=r"'float8_e4m3'.*bfloat16"):
        by_name("float8_e4m3")


@every_dtype
def test_portable_types_are_core_types_of_the_same_size(name: str) -> None:
    dtype = by_name(name)
    expected = {"bfloat16": "uint16"}.get(name, "uint8") if name in ML_NAMES else name
    assert (dtype.core, dtype.portable.name) == (name not in ML_NAMES, expected)
    assert dtype.portable is by_name(expected)
    assert (dtype.portable.core, dtype.portable.itemsize) == (True, dtype.itemsize)
    assert dtype.portable.fill_value == by_name(expected).fill_value


def test_data_types_pickle_as_equals() -> None:
    assert pickle.loads(pickle.dumps(DTYPES)) == DTYPES


# --- readers -------------------------------------------------------------------------------------------


@every_dtype
def test_absent_chunks_read_as_the_fill_value(name: str, tmp_path: Path) -> None:
    node = ArrayNode("a", Grid((3,), (3,)), by_name(name))
    (tmp_path / "a").mkdir()
    (tmp_path / "a/zarr.json").write_bytes(node.document_bytes())
    (tmp_path / "zarr.json").write_text('{"zarr_format": 3, "node_type": "group"}')
    array = zarr.open_group(tmp_path, mode="r")["a"]
    other = ts.open({"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{tmp_path}/a"}}, read=True).result()
    assert array.dtype.name == other.dtype.name == name
    assert array[...].tobytes() == other.read().result().tobytes() == 3 * bytes.fromhex(FILL_BYTES[name])


@pytest.fixture
def group(tmp_path: Path) -> Path:
    values = np.ones(2, by_name("bfloat16").numpy)
    zarr.create_group(tmp_path / "group").create_array("w", data=values, dimension_names=["x"])
    return tmp_path / "group"


@pytest.mark.parametrize(
    "expression",
    [
        "zarr.open_group(url, mode='r')['w']",
        "xr.open_zarr(url, consolidated=False)['w']",
        "zarr.create_group({}).create_array('a', shape=(2,), dtype='bfloat16')",
    ],
)
def test_opening_a_group_loads_the_plugin(group: Path, expression: str) -> None:
    script = f"import sys, zarr, xarray as xr; url = sys.argv[1]; print({expression}.dtype)"
    assert succeed(script, group) == "bfloat16"


def test_opening_an_array_first_needs_a_newer_zarr(group: Path) -> None:
    script = "import sys, zarr; print(zarr.open_array(sys.argv[1], mode='r').dtype)"
    done = in_fresh_process(script, group / "w")
    if Version(zarr.__version__) >= Version("3.4.1"):
        assert done.stdout.strip() == "bfloat16"
    else:
        assert done.returncode == 1
        assert "No Zarr data type found that matches 'bfloat16'" in done.stderr


# --- zarr-python as the writer -------------------------------------------------------------------------


def ml_values(name: str) -> np.ndarray[Any, Any]:
    """Return every element of a type, as a matrix."""
    dtype = by_name(name)
    bits = np.arange(1 << 8 * dtype.itemsize, dtype=f"<u{dtype.itemsize}")
    values: np.ndarray[Any, Any] = bits.view(dtype.numpy).reshape(16, -1)
    return values


# zarr compares chunks with the fill value. numpy warns of that for signalling NaNs.
@pytest.mark.filterwarnings("ignore:invalid value encountered in equal")
@pytest.mark.parametrize("layout", ["plain", "sharded"])
@every_ml_dtype
def test_arrays_written_by_zarr_are_read_by_both(tmp_path: Path, name: str, layout: str) -> None:
    values = ml_values(name)
    half = tuple(size // 2 for size in values.shape)
    shards = {"shards": values.shape} if layout == "sharded" else {}
    array = zarr.create_array(tmp_path, shape=values.shape, chunks=half, dtype=name, fill_value="NaN", **shards)
    array[...] = values
    again = zarr.open_array(tmp_path, mode="r")
    assert again.dtype == values.dtype
    assert again[...].tobytes() == values.tobytes()
    assert json.loads((tmp_path / "zarr.json").read_text())["fill_value"] == "NaN"
    kvstore = {"driver": "file", "path": str(tmp_path)}
    other = ts.open({"driver": "zarr3", "kvstore": kvstore}, read=True).result()
    assert other.read().result().tobytes() == values.tobytes()


@every_ml_dtype
def test_numpy_dtypes_name_the_type_too(name: str) -> None:
    for dtype in (by_name(name).numpy, by_name(name).numpy.newbyteorder(">")):
        array = zarr.create_array({}, shape=(3,), dtype=dtype)
        assert array.metadata.to_dict()["data_type"] == name


@pytest.mark.filterwarnings("ignore:invalid value encountered in equal")
def test_bfloat16_in_big_endian_chunks(tmp_path: Path) -> None:
    values = ml_values("bfloat16")
    array = zarr.create_array(
        tmp_path,
        shape=values.shape,
        dtype="bfloat16",
        chunks=values.shape,
        serializer=BytesCodec(endian="big"),
        compressors=None,
        fill_value="NaN",
    )
    array[...] = values
    assert (tmp_path / "c" / "0" / "0").read_bytes() == values.view("<u2").astype(">u2").tobytes()
    read = zarr.open_array(tmp_path, mode="r")[...]
    assert read.astype(values.dtype).tobytes() == values.tobytes()
    kvstore = {"driver": "file", "path": str(tmp_path)}
    other = ts.open({"driver": "zarr3", "kvstore": kvstore}, read=True).result()
    assert other.read().result().tobytes() == values.tobytes()


@every_ml_dtype
def test_types_without_a_format_2_name_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}.*zarr_format=3"):
        zarr.create_array({}, shape=(2,), dtype=name, zarr_format=2)


# --- fill values in JSON -------------------------------------------------------------------------------


@every_ml_dtype
def test_every_element_survives_as_a_fill_value_in_json(name: str) -> None:
    zdtype = data_type_registry.get(name)()
    for scalar in ml_values(name).reshape(-1):
        spelling = json.loads(json.dumps(zdtype.to_json_scalar(scalar, zarr_format=3), allow_nan=False))
        assert zdtype.from_json_scalar(spelling, zarr_format=3).tobytes() == scalar.tobytes(), spelling


def test_spellings_of_fill_values() -> None:
    bfloat16 = data_type_registry.get("bfloat16")()
    for spelling, bits in {1: "803f", -0.0: "0080", "Infinity": "807f", "0x7fc1": "c17f"}.items():
        assert bfloat16.from_json_scalar(spelling, zarr_format=3).tobytes().hex() == bits
    for scalar, spelling in {1: 1.0, "2.5": 2.5, -math.inf: "-Infinity", math.nan: "NaN"}.items():
        assert bfloat16.to_json_scalar(scalar, zarr_format=3) == spelling
    assert float(bfloat16.default_scalar()) == 0.0
    assert math.isnan(float(data_type_registry.get("float8_e8m0fnu")().default_scalar()))


@every_ml_dtype
@pytest.mark.parametrize("bad", ["zero", "0x123456", "0xzz", None, [1], "1.5"])
def test_a_damaged_fill_value_is_an_error(name: str, bad: object) -> None:
    # A string that is no number would crash this process in a scalar type of ml_dtypes 0.6.0.
    with pytest.raises((TypeError, ValueError)):
        data_type_registry.get(name)().from_json_scalar(bad, zarr_format=3)


@every_ml_dtype
@pytest.mark.parametrize("bad", ["zero", None, [1], 1j, object()])
def test_objects_that_are_not_numbers_are_refused(name: str, bad: object) -> None:
    with pytest.raises(TypeError, match=name):
        data_type_registry.get(name)().cast_scalar(bad)


# --- entry points --------------------------------------------------------------------------------------


def test_each_type_that_zarr_lacks_has_an_entry_point() -> None:
    ours = [entry for entry in entry_points(group="zarr.data_type") if entry.dist.name == "zarrckpt"]
    assert {entry.name for entry in ours} == set(ML_NAMES)
    for entry in ours:
        assert entry.load()._zarr_v3_name == entry.name
        assert entry.load() is data_type_registry.get(entry.name)


def test_the_second_entry_point_returns_zarrs_own_buffer() -> None:
    (entry,) = (entry for entry in entry_points(group="zarr.buffer") if entry.dist.name == "zarrckpt")
    assert entry.load() is zarr_dtypes.Buffer is zarr.buffer.cpu.Buffer


TAKEN = """
from importlib.metadata import entry_points
from zarr.dtype import Float16, data_type_registry
class Theirs(Float16):
    _zarr_v3_name = "bfloat16"
data_type_registry.register("bfloat16", Theirs)
for entry in entry_points(group="zarr.data_type"):
    # As zarr >= 3.4.1 does it.
    data_type_registry.register(entry.load()._zarr_v3_name, entry.load())
assert data_type_registry.contents["bfloat16"] is Theirs
print(data_type_registry.contents["float8_e5m2"].__module__)
"""


def test_types_that_zarr_already_has_are_not_replaced() -> None:
    assert succeed(TAKEN) == "zarrckpt._read.zarr_dtypes"
