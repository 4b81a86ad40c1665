"""Values: type and value are restored exactly, and hostile bytes neither run nor crash anything."""

from __future__ import annotations

import argparse
import datetime
import enum
import io
import json
import math
import os
import pathlib
import pickle
import struct
import subprocess
import sys
import tracemalloc
import warnings
import zipfile
from collections import Counter, OrderedDict, defaultdict, namedtuple
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from harness import ROOT
from harness.bits import same
from harness.hostile import Bomb
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as stnp

from zarrckpt import (
    CheckpointError,
    CorruptCheckpointError,
    UnsafeValueError,
    UnsupportedFormatError,
    UnsupportedValueError,
)
from zarrckpt._format.json_values import MAX_DEPTH, NOT_JSON, decode_json, encode_json, json_size
from zarrckpt._format.values import Blob, EncodedValue, decode_blob, encode_blob, find_tensors


def through_text(document: object) -> object:
    """Return a JSON form as another program reads it: strict JSON, ASCII or UTF-8."""
    text = json.dumps(document, allow_nan=False, ensure_ascii=False)
    return json.loads(text.encode(), parse_constant=pytest.fail)


def through_blob(value: object, encoding: str | None = None, *, allow_pickle: bool = False) -> Any:
    blob = EncodedValue(blob=encode_blob("some_key", value)).blob_to_store("some_key")
    assert blob is not None and type(blob.payload) is bytes
    assert encoding is None or blob.encoding == encoding
    payload = bytearray(blob.payload)
    restored = decode_blob("some_key", blob.encoding, blob.kind, payload, allow_pickle=allow_pickle)
    payload[:] = bytes(len(payload))  # no restored value may refer to these bytes
    return restored


FLOATS = st.one_of(
    st.floats(),
    st.sampled_from([math.nan, -math.nan, math.inf, -math.inf, -0.0, 0.0, 5e-324, 1.7976931348623157e308]),
    st.integers(0x7FF8000000000000, 0x7FFFFFFFFFFFFFFF).map(lambda n: struct.unpack(">d", n.to_bytes(8))[0]),
)
INTS = st.one_of(
    st.integers(),
    st.integers(-3, 3).map(lambda n: 2**53 + n),
    st.integers(-3, 3).map(lambda n: n - 2**53),
    st.integers(0, 20000).map(lambda n: -(3**n)),
)
TEXT = st.one_of(
    st.text(st.characters(exclude_categories=())),
    st.text(alphabet="$\0\ud800\udc00a", max_size=4),
    st.sampled_from(["$tuple", "$", "", "$int", "\ud83d\ude00", "NaN", "\u2028"]),
)
LEAVES = st.one_of(st.none(), st.booleans(), INTS, FLOATS, TEXT, st.complex_numbers())
HASHABLE = st.recursive(
    LEAVES,
    lambda inner: st.one_of(st.tuples(inner), st.tuples(inner, inner), st.frozensets(inner, max_size=3)),
    max_leaves=4,
)


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.sets(HASHABLE, max_size=4),
        st.dictionaries(TEXT, inner, max_size=4),
        st.dictionaries(HASHABLE, inner, max_size=4),
        st.dictionaries(TEXT, inner, max_size=4).map(OrderedDict),
    )


JSONABLE = st.recursive(LEAVES, containers, max_leaves=20)
ITEMS = st.one_of(
    LEAVES,
    st.binary(max_size=20),
    st.binary(max_size=20).map(bytearray),
    st.binary(max_size=20).map(io.BytesIO),
    stnp.arrays(stnp.scalar_dtypes(), stnp.array_shapes(min_dims=0, min_side=0, max_side=3)),
    stnp.arrays(stnp.scalar_dtypes().filter(lambda dtype: dtype.kind not in "SU"), ()).map(lambda a: a[()]),
)


# JSON -------------------------------------------------------------------------------------------------------


@given(JSONABLE)
@settings(max_examples=150)
def test_json_round_trip(value: Any) -> None:
    document = encode_json(value)
    assert document is not NOT_JSON
    assert same(decode_json(through_text(document)), value)
    assert json_size(document) == len(json.dumps(document, separators=(",", ":")))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "null"),
        (True, "true"),
        (7, "7"),
        (2**53 - 1, "9007199254740991"),
        (2**53, '{"$int": "0x20000000000000"}'),
        (-(2**53), '{"$int": "-0x20000000000000"}'),
        (1.0, "1.0"),
        (-0.0, "-0.0"),
        (0.1, "0.1"),
        (math.nan, '{"$float": "nan"}'),
        (-math.inf, '{"$float": "-inf"}'),
        (-math.nan, '{"$float": "0xfff8000000000000"}'),
        (1 + 2j, '{"$complex": [1.0, 2.0]}'),
        ("a\ud800", '{"$str": "61eda080"}'),
        ([], "[]"),
        ((), '{"$tuple": []}'),
        ({}, "{}"),
        ({"b": 1, "a": (2, [3])}, '{"b": 1, "a": {"$tuple": [2, [3]]}}'),
        ({1: "x", (0, None): []}, '{"$dict": [[1, "x"], [{"$tuple": [0, null]}, []]]}'),
        ({"$int": 1}, '{"$dict": [["$int", 1]]}'),
        (OrderedDict(b=1), '{"$ordereddict": [["b", 1]]}'),
        ({10, 9, "a"}, '{"$set": ["a", 10, 9]}'),
        (frozenset(), '{"$frozenset": []}'),
    ],
)
def test_json_forms(value: Any, text: str) -> None:
    assert json.dumps(encode_json(value)) == text
    assert same(decode_json(json.loads(text)), value)


class Level(enum.IntEnum):
    LOW = 1


class Name(str):
    pass


Pair = namedtuple("Pair", "a b")


@dataclass
class Config:
    width: int = 1
    weight: Any = None


@pytest.mark.parametrize(
    "value",
    [
        *(Level.LOW, Name("x"), Pair(1, 2), defaultdict(int, a=1), Counter("ab"), np.float64(1.5)),
        np.bool_(1),
        *(b"x", bytearray(), io.BytesIO(), np.zeros(2), range(3), object, print, Config(), torch.Size([1])),
        *(torch.zeros(1), datetime.date(2020, 1, 1), pathlib.PurePosixPath("/"), torch.float32),
    ],
    ids=lambda value: type(value).__name__,
)
def test_other_types_are_not_json(value: Any) -> None:
    assert encode_json(value) is NOT_JSON
    assert encode_json([{"a": (1, value)}]) is NOT_JSON
    if isinstance(value, (int, str, tuple, bytes, float)):
        assert encode_json({value: 1}) is NOT_JSON


def nested(depth: int, wrap: Any) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = wrap(value)
    return value


WRAPS = [lambda v: [v], lambda v: (v,), lambda v: {"a": v}, lambda v: {0: v}, lambda v: OrderedDict(a=v)]
WRAPS += [lambda v: frozenset([v]), lambda v: {v: 0} if not isinstance(v, dict) else {(1,): v}]


@pytest.mark.parametrize("wrap", WRAPS)
def test_depth_limit_is_the_same_on_both_sides(wrap: Any) -> None:
    document = encode_json(nested(MAX_DEPTH, wrap))
    assert same(decode_json(through_text(document)), nested(MAX_DEPTH, wrap))
    assert document is not NOT_JSON
    text = json.dumps(document)
    assert max_nesting(text) < 110
    assert encode_json(nested(MAX_DEPTH + 1, wrap)) is NOT_JSON
    with pytest.raises(CorruptCheckpointError):
        decode_json([document])


def max_nesting(text: str) -> int:
    depth = deepest = 0
    for char in text:
        depth += (char in "[{") - (char in "]}")
        deepest = max(deepest, depth)
    return deepest


def test_values_that_contain_themselves_are_refused() -> None:
    loop: list[Any] = [1]
    loop.append({"again": (loop,)})
    assert encode_json(loop) is NOT_JSON
    doubling: Any = []
    for _ in range(30):
        doubling = [doubling, doubling]
    assert encode_json(doubling) is NOT_JSON
    restored = through_blob(loop, "torch")
    assert restored[1]["again"][0] is restored
    betas = (0.9, 0.999)
    assert same(decode_json(encode_json([betas] * 1000)), [betas] * 1000)


MALFORMED = [
    *('{"$what": 1}', '{"$blob": {}}', '{"a": 1, "$tuple": []}', '{"$tuple": [], "$list": []}', '{"$": []}'),
    *('{"$tuple": 1}', '{"$tuple": {}}', '{"$tuple": "ab"}', '{"$tuple": null}'),
    *('{"$int": 5}', '{"$int": "5"}', '{"$int": "0x"}', '{"$int": "0xG"}', '{"$int": "0x1_0"}'),
    *('{"$int": " 0x1"}', '{"$int": "0x1\\n"}', '{"$int": "+0x1"}', '{"$int": "0X1"}', '{"$int": []}'),
    *('{"$float": 1.0}', '{"$float": "1.0"}', '{"$float": "infinity"}', '{"$float": "0x7ff0000000000000"}'),
    *('{"$float": "0x3ff0000000000000"}', '{"$float": ["nan"]}', '{"$float": "NaN"}'),
    *('{"$str": "6"}', '{"$str": "zz"}', '{"$str": "ff"}', '{"$str": "61 62"}', '{"$str": 1}'),
    '{"$str": "FF"}',
    *('{"$complex": [1.0]}', '{"$complex": [1, 2]}', '{"$complex": [1.0, "nan"]}', '{"$complex": 1.0}'),
    *('{"$complex": [1.0, {"$complex": [1.0, 2.0]}]}', '{"$complex": [1.0, {"$float": "nan", "a": 1}]}'),
    *('{"$dict": {}}', '{"$dict": [1]}', '{"$dict": [[1]]}', '{"$dict": [[1, 2, 3]]}', '{"$dict": ["ab"]}'),
    *('{"$dict": [[[], 1]]}', '{"$dict": [[1, 1], [true, 2]]}', '{"$ordereddict": [["a", 1], ["a", 2]]}'),
    *('{"$set": [[]]}', '{"$set": [1, 1]}', '{"$frozenset": [1, 1.0]}', '{"$set": 1}'),
    *("9007199254740992", "-9007199254740992", "1e999", "-1e999"),
    # Values that have another, canonical form.
    *('{"$int": "0x1"}', '{"$int": "0x1fffffffffffff"}', '{"$int": "0x020000000000000"}', '{"$str": "61"}'),
    *('{"$float": "0x7ff8000000000000"}', '{"$dict": [["a", 1]]}', '{"$dict": []}', '{"$set": [2, 1]}'),
]


def tree(text: bytes, items: bytes = b"") -> bytes:
    """Return the bytes of a tree with this JSON and these items."""
    return len(text).to_bytes(8, "little") + text + items


@pytest.mark.parametrize("text", MALFORMED)
def test_malformed_json_values(text: str) -> None:
    for before, after in (
        ("", ""),
        ("[", "]"),
        ('{"a":', "}"),
        ('{"$tuple":[', "]}"),
        ('{"$dict":[[0,', "]]}"),
    ):
        wrapped = before + text + after
        with pytest.raises(CorruptCheckpointError):
            decode_json(json.loads(wrapped))
        with pytest.raises(CorruptCheckpointError, match="some_key"):
            decode_blob("some_key", "tree", None, tree(wrapped.encode()))


def test_objects_that_no_json_parser_returns_are_refused() -> None:
    for found in (object(), b"x", (1,), math.nan, 10**5000, {1: 2}, {"a": {1}}, {None: 0, "b": 1}):
        with pytest.raises(CorruptCheckpointError):
            decode_json(found)


@pytest.mark.parametrize("tag", ["[", '{"a":', '{"$tuple":[', '{"$dict":[[0,', '{"$complex":[0.5,', '{"$set":['])
def test_hostile_nesting(tag: str) -> None:
    close = "".join({"[": "]", "{": "}"}[char] for char in reversed(tag) if char in "[{")
    for depth in (100, 5000, 300_000):
        text = tag * depth + "1" + close * depth
        with pytest.raises(CorruptCheckpointError):
            decode_blob("some_key", "tree", None, tree(text.encode()))
    obj: Any = 1
    for _ in range(5000):
        obj = {"$complex": [0.5, obj]} if "complex" in tag else [obj]
    with pytest.raises(CorruptCheckpointError):
        decode_json(obj)


TAGS = ["$tuple", "$dict", "$ordereddict", "$int", "$float", "$str", "$set", "$frozenset", "$complex", "$blob"]
JSON_DOCUMENTS = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.sampled_from(["", "nan", "0x1", "a"])),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(st.lists(inner, min_size=2, max_size=2), max_size=2),
        st.dictionaries(st.text(max_size=2), inner, max_size=2),
        st.dictionaries(st.sampled_from(TAGS), inner, max_size=2),
    ),
    max_leaves=10,
)


@given(JSON_DOCUMENTS)
@settings(max_examples=200)
def test_hostile_json_values(document: Any) -> None:
    try:
        value = decode_json(document)
    except CheckpointError:
        return
    # Every accepted document is the form of a value.
    assert same(decode_json(encode_json(value)), value)


# Blobs without pickle ---------------------------------------------------------------------------------------


@given(st.recursive(ITEMS, containers, max_leaves=15))
@settings(max_examples=150)
def test_blob_round_trip(value: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a pickle would warn
        assert same(through_blob(value), value)


@pytest.mark.parametrize("value", [b"", b"\0\1", bytearray(b"ab"), io.BytesIO(b"abc")])
def test_raw(value: Any) -> None:
    if isinstance(value, io.BytesIO):
        value.seek(2)
    restored = through_blob(value, "raw")
    assert same(restored, value)
    if isinstance(value, io.BytesIO):
        assert value.tell() == 2 and restored.tell() == 0 and restored.read() == b"abc"


def test_payloads_do_not_follow_the_value() -> None:
    for value in (bytearray(b"abcd"), io.BytesIO(b"abcd"), np.frombuffer(bytearray(b"abcd"), np.uint8)):
        blob = encode_blob("k", value)
        before = bytes(blob.payload)
        if isinstance(value, io.BytesIO):
            value.write(b"xxxxxxxx")
        elif isinstance(value, bytearray):
            value.extend(b"x")  # would raise if it were still exported
            value[0] = 0
        else:
            value[0] = 0
        assert blob.payload == before


ARRAYS = [
    np.arange(6).reshape(2, 3),
    np.arange(6, dtype=">f4").reshape(2, 3).T,
    np.asfortranarray(np.arange(24.0).reshape(2, 3, 4)),
    np.arange(20)[::3],
    np.zeros((0, 3), np.float16),
    np.array(5.5),
    np.array([True, False]),
    np.array(["ab", "\ud800"]),
    np.array([b"a", b"bc"]),
    np.array(["2020-01-01", "NaT"], "M8[ns]"),
    np.array([1, 2], "m8[D]"),
    np.array([1j], np.complex64),
    np.array([(1, [2.0, 3.0])], [("a", "<i2"), ("b", ">f8", (2,))]),
    np.zeros(2, np.dtype([("a", "u1"), ("b", "<f8")], align=True)),
    np.zeros(3, "V0"),
    np.frombuffer(b"abcd", "V2"),
    np.array([np.nan, -0.0, np.inf]),
]


@pytest.mark.parametrize("array", ARRAYS, ids=lambda array: f"{array.dtype}-{array.shape}")
def test_npy(array: Any) -> None:
    restored = through_blob(array, "npy")
    assert same(restored, array)
    assert restored.flags.writeable and restored.flags.owndata
    assert restored.flags.f_contiguous >= array.flags.f_contiguous
    if array.dtype.itemsize:
        stored = np.load(io.BytesIO(encode_blob("k", array).payload), allow_pickle=False)
        assert stored.dtype == array.dtype  # numpy's own reader is the oracle
        np.testing.assert_array_equal(stored, array)
    scalar = array.ravel()[0] if array.size and array.dtype.itemsize else None
    if isinstance(scalar, np.generic):
        assert same(through_blob(scalar, "npy"), scalar)
    assert same(through_blob([1, array], "tree"), [1, array])


@pytest.mark.parametrize(
    "name", ["bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"]
)
def test_types_of_ml_dtypes_need_no_pickle(name: str) -> None:
    dtype, every = getattr(ml_dtypes, name), np.arange(256, dtype=np.uint16) * 257
    array = every.astype(np.uint8).view(dtype) if name != "bfloat16" else every.view(dtype)
    for value in (
        array,
        array[::-3],
        np.asfortranarray(array.reshape(16, 16)),
        array[:0],
        np.array(array[7]),
        array[7],
    ):
        blob = encode_blob("k", value)
        assert (blob.encoding, blob.kind) == (
            "npy",
            f"{'ndarray' if isinstance(value, np.ndarray) else 'scalar'}:{name}",
        )
        restored = decode_blob("k", "npy", blob.kind, blob.payload)
        assert type(restored) is type(value) and restored.dtype == value.dtype and restored.shape == value.shape
        assert restored.tobytes() == value.tobytes()
    restored = through_blob((array, 1), "tree")
    assert restored[0].tobytes() == array.tobytes() and restored[0].flags.writeable
    for kind in (f"ndarray:{name}x", "ndarray:float32", "ndarray:", "scalar:uint8"):
        with pytest.raises(CorruptCheckpointError, match="some_key"):
            decode_blob("some_key", "npy", kind, encode_blob("k", array).payload)
    with pytest.raises(CorruptCheckpointError, match="some_key"):  # an array of another width
        decode_blob("some_key", "npy", f"ndarray:{name}", encode_blob("k", np.zeros(4, np.int32)).payload)


@pytest.mark.parametrize(
    "value",
    [
        np.array([1, "a", None], object),
        np.array(["a", "bcd"], np.dtypes.StringDType()),
        np.zeros(2, {"names": ["b", "a"], "formats": ["i4", "i2"], "offsets": [0, 2]}),
        np.zeros(2, [("权重", "i4")]),
        np.zeros(1, [(f"field{i:09}", "i4") for i in range(500)]),
        np.rec.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f4")]),
        np.ma.masked_array([1, 2], [True, False]),
    ],
    ids=lambda value: f"{type(value).__name__}-{value.dtype}"[:40],
)
def test_arrays_that_npy_cannot_represent_are_pickled(value: Any) -> None:
    with pytest.warns(UserWarning, match="some_key"):
        restored = through_blob(value, "pickle", allow_pickle=True)
    assert type(restored) is type(value) and restored.dtype == value.dtype
    assert repr(restored) == repr(value)


@pytest.mark.parametrize("value", [np.str_("a\0"), np.bytes_(b"\0\0")], ids=["str", "bytes"])
@pytest.mark.parametrize("inside", [lambda value: value, lambda value: {"a": [value]}], ids=["alone", "in-a-dict"])
def test_numpy_strings_that_end_in_nulls_are_refused(value: Any, inside: Any) -> None:
    assert pickle.loads(pickle.dumps(value)) != value
    with pytest.raises(UnsupportedValueError, match="'some_key'"):
        encode_blob("some_key", inside(value))


def test_rng_states_need_no_pickle() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for kind in (
            np.random.PCG64,
            np.random.PCG64DXSM,
            np.random.MT19937,
            np.random.Philox,
            np.random.SFC64,
        ):
            source, target = np.random.Generator(kind(7)), np.random.Generator(kind(8))
            source.integers(9, dtype=np.uint32)
            restored = through_blob(source.bit_generator.state, "tree")
            assert same(restored, source.bit_generator.state)
            target.bit_generator.state = restored
            assert same(source.random(9), target.random(9))


def damaged(document: Any, data: bytes) -> bytes:
    return tree(json.dumps(document).encode(), data)


def at(offset: Any, size: Any, encoding: Any = "raw", kind: Any = "bytes") -> Any:
    return {"$blob": {"encoding": encoding, "kind": kind, "byte_offset": offset, "byte_size": size}}


@pytest.mark.parametrize(
    "payload",
    [
        *(b"", b"\0" * 7, b"\xff" * 8, b"\2" + bytes(7) + b"[", damaged([], b"x"), damaged([at(0, 1)], b"xy")),
        *(damaged([at(0, 2), at(1, 2)], b"xyz"), damaged([at(0, 2)] * 2, b"xy"), damaged([at(1, 1)], b"xy")),
        *(damaged([at(-1, 1)], b"x"), damaged([at(0, -1)], b"x"), damaged([at(0, 2)], b"x")),
        damaged([at(2**62, 2**62)], b"x"),
        *(damaged([at(0.0, 1)], b"x"), damaged([at(False, 1)], b"x"), damaged([at("0", 1)], b"x")),
        damaged([at(0, None)], b"x"),
        *(damaged([at(0, 1, "pickle", None)], b"x"), damaged([at(0, 1, "torch")], b"x")),
        damaged([at(0, 1, [], {})], b"x"),
        *(damaged([at(0, 1, "raw", "str")], b"x"), damaged([at(0, 1, "npy", "ndarray")], b"x")),
        *(damaged([{"$blob": [0, 1]}], b"x"), damaged([{"$blob": {"byte_offset": 0, "byte_size": 1}}], b"x")),
        damaged({"$set": [at(0, 1, "raw", "bytearray")]}, b"x"),
        damaged({"$dict": [[at(0, 1, kind="BytesIO")]]}, b"x"),
    ],
)
def test_damaged_trees(payload: bytes) -> None:
    with pytest.raises(CorruptCheckpointError, match="some_key"):
        decode_blob("some_key", "tree", None, payload)


def npy(header: str, data: bytes = b"") -> bytes:
    text = header.encode("latin1").ljust(118) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + data


def header(descr: str, shape: str, order: str = "False") -> str:
    return f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}}}"


@pytest.mark.parametrize(
    "payload",
    [
        *(b"", b"\x93NUMPY", b"\x93NUMPY\x02\x00\0\0\0\0", npy("")[:30], npy("{}"), npy("1")),
        npy("(" * 9000),
        *(npy(header("'<i4'", "(2,)"), b"1234567"), npy(header("'<i4'", "(2,)"), b"123456789")),
        *(npy(header("'<i4'", "(-1,)"), b"1234"), npy(header("'<i4'", "(-1, -1)"), b"1234")),
        *(npy(header("'<i4'", "(True,)"), b"1234"), npy(header("'<i4'", "(2**70,)"))),
        npy(header("'<i4'", "'1'")),
        *(npy(header("'<i4'", f"({2**62},)")), npy(header("'<i4'", f"({2**32}, {2**32})"), b"1234")),
        *(npy(header("'V0'", f"({2**62}, {2**62})")), npy(header("'<i4'", f"(0, {10**30})"))),
        npy(header("'O'", "(1,)"), pickle.dumps(np.array([1], object))),
        *(npy(header("[('a', 'O')]", "()"), b"x" * 8), npy(header("'O'", "(0,)"))),
        *(npy(header("'what'", "()")), npy(header("'<i4'", "(1,)", "7"), b"1234")),
        npy(header("print(1)", "()")),
        *(npy(header("'-' * 9", "()")), npy("-" * 60000), npy(header("'<i4'", "()") + "\0", b"1234")),
    ],
)
def test_damaged_npy(payload: bytes) -> None:
    for kind in ("ndarray", "scalar"):
        with pytest.raises(CorruptCheckpointError, match="some_key"):
            decode_blob("some_key", "npy", kind, payload)


def test_types_without_a_size() -> None:
    """numpy makes types of one byte of them, with arbitrary memory."""
    for descr in ("'|S0'", "'<U0'", "('<i4', (3,))"):
        for shape in ("(2,)", "()", f"({10**12},)"):
            with pytest.raises(CorruptCheckpointError, match="some_key"):
                decode_blob(
                    "some_key", "npy", "ndarray", npy(header(descr, shape), bytes(24) if "i4" in descr else b"")
                )
    empty = np.zeros(3, [("a", "S0"), ("b", "i4")])["a"]
    assert encode_blob("k", empty).encoding == "pickle"


def test_items_are_decoded_once() -> None:
    """A blob that names one item a thousand times allocates no memory."""
    item = encode_blob("k", np.zeros(1 << 20, np.uint8)).payload
    text = json.dumps([at(0, len(item), "npy", "ndarray")] * 1000).encode()
    tracemalloc.start()
    with pytest.raises(CorruptCheckpointError, match="some_key"):
        decode_blob("some_key", "tree", None, tree(text, item))
    assert tracemalloc.get_traced_memory()[1] < 10 << 20
    tracemalloc.stop()


def test_damaged_scalars() -> None:
    for payload in (npy(header("'<i4'", "(1,)"), b"1234"), npy(header("'<U1'", "()"), b"\xff" * 4)):
        with pytest.raises(CorruptCheckpointError, match="some_key"):
            decode_blob("some_key", "npy", "scalar", payload)


def test_unknown_encodings_and_kinds() -> None:
    with pytest.raises(UnsupportedFormatError, match="some_key"):
        decode_blob("some_key", "zip", None, b"")
    for encoding in ("raw", "npy"):
        for kind in (None, "", "object", "BytesIO2"):
            with pytest.raises(CorruptCheckpointError, match="some_key"):
                decode_blob("some_key", encoding, kind, b"")


def test_big_json_values() -> None:
    value = {"losses": [0.25] * 50_000, 7: ("x" * 100_000, 3**100_000)}
    assert same(through_blob(value, "tree"), value)
    for text in (b"NaN", b"[1", b"\xff", b"", b"\xef\xbb\xbf1", b"1" * 5000, '"ü"'.encode("utf-16"), b'{"a":1,"a":1}'):
        with pytest.raises(CorruptCheckpointError, match="some_key"):
            decode_blob("some_key", "tree", None, tree(text))


VALID = [
    encode_blob("k", value)
    for value in (
        {"a": [1, (2.5, None)], 3: 10**30},
        np.arange(6.0).reshape(2, 3),
        (np.arange(3), b"abc", {"x": io.BytesIO(b"yz")}),
        (torch.arange(3), torch.Size([2])),
    )
]
SAFE = st.sampled_from(["raw", "npy", "tree", "torch"])


@given(st.sampled_from(VALID), st.data())
@settings(max_examples=200)
def test_altered_blobs_raise_only_our_errors(blob: Blob, data: st.DataObject) -> None:
    payload = bytearray(blob.payload)
    for _ in range(data.draw(st.integers(1, 3))):
        position = data.draw(st.integers(0, len(payload)))
        change = data.draw(st.binary(max_size=4))
        payload[position : position + data.draw(st.integers(0, 4))] = change
    encoding = data.draw(st.one_of(st.just(blob.encoding), SAFE))
    kind = data.draw(st.one_of(st.just(blob.kind), st.sampled_from([None, "ndarray", "scalar", "bytes"])))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            decode_blob("k", encoding, kind, bytes(payload))
        except CheckpointError as err:
            assert "'k'" in str(err)


# Torch ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [
        *(torch.Size([2, 3]), torch.bfloat16, torch.device("cuda", 3), torch.strided, Counter("abb")),
        *((torch.arange(3), {"a": torch.ones(2, dtype=torch.bfloat16)}), [torch.Size([1]), b"raw", {1, 2}]),
        OrderedDict(state=(torch.zeros(0), None), size=torch.Size([])),
    ],
    ids=lambda value: type(value).__name__,
)
def test_torch_values(value: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert same(through_blob(value, "torch"), value)


def test_older_forms_of_torch_files_are_refused() -> None:
    stream = io.BytesIO()
    torch.save([1, 2], stream, _use_new_zipfile_serialization=False)
    for data in (stream.getvalue(), b"PK\x03\x04"):
        with pytest.raises(CorruptCheckpointError, match="'k'"):
            decode_blob("k", "torch", None, data)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_sparse_tensors_must_fit_their_shape() -> None:
    """torch reads and writes out of bounds if an index is outside, and does not check indices."""
    for layout, options in (
        (torch.sparse_coo_tensor, (torch.tensor([[100]]), torch.ones(1))),
        (torch.sparse_csr_tensor, (torch.tensor([0, 1, 1, 1]), torch.tensor([100]), torch.ones(1))),
    ):
        size = (3,) if layout is torch.sparse_coo_tensor else (3, 3)
        stream = io.BytesIO()
        torch.save((layout(*options, size, check_invariants=False),), stream)
        with pytest.raises(CorruptCheckpointError, match="'k'"):
            decode_blob("k", "torch", "builtins.tuple", stream.getvalue())
        assert not torch.sparse.check_sparse_tensor_invariants.is_enabled()
    good = torch.sparse_coo_tensor(torch.tensor([[2]]), torch.ones(1), (3,), check_invariants=True)
    assert torch.equal(through_blob((good,), "torch")[0].to_dense(), good.to_dense())


def _packed(value: object, method: int, largest: int = 1 << 30) -> tuple[bytes, int]:
    """Return an archive of torch.save, packed again, and where its directory begins. Larger members become empty."""
    stream, packed = io.BytesIO(), io.BytesIO()
    torch.save(value, stream)
    with zipfile.ZipFile(stream) as whole, zipfile.ZipFile(packed, "w", method) as archive:
        for info in whole.infolist():
            archive.writestr(info.filename, whole.read(info) if info.file_size < largest else b"")
    data = packed.getvalue()
    return data, struct.unpack_from("<I", data, len(data) - 6)[0]


def _with_two_directories(value: object) -> bytes:
    """Return an archive whose members are compressed for torch, and stored for Python's zipfile.

    Python takes the directory before the end record, torch the one at the offset in it.
    """
    bomb, at = _packed(value, zipfile.ZIP_DEFLATED)
    plain, plain_at = _packed(value, zipfile.ZIP_STORED, 999)
    end, own = bomb[-22:], bytearray(plain[plain_at:-22])
    offset, shift = 0, len(bomb) - 22 - (len(bomb) - 22 + plain_at - at)
    while offset < len(own):  # Python adds the distance of the directory from its place to the offsets of members.
        place = struct.unpack_from("<I", own, offset + 42)[0]
        struct.pack_into("<I", own, offset + 42, place + shift)
        offset += 46 + sum(struct.unpack_from("<3H", own, offset + 28))
    return bomb[:-22] + plain[:plain_at] + bytes(own) + end


def _with_one_member_for_many_names(value: list[torch.Tensor]) -> bytes:
    """Return an archive whose pickle names one member in upper and lower case letters, for torch the same name."""
    stream, packed = io.BytesIO(), io.BytesIO()
    torch.save(value, stream)
    with zipfile.ZipFile(stream) as whole, zipfile.ZipFile(packed, "w") as archive:
        code = whole.read("archive/data.pkl")
        for number in range(len(value)):
            name = "".join("aA"[number >> bit & 1] for bit in range(6))
            old = b"X" + struct.pack("<I", len(str(number))) + str(number).encode()
            code = code.replace(old, b"X" + struct.pack("<I", 6) + name.encode())
        members = {"data.pkl": code, "data/aaaaaa": whole.read("archive/data/0")}
        members |= {name: whole.read(f"archive/{name}") for name in ("version", "byteorder")}
        for name, data in members.items():
            archive.writestr(f"archive/{name}", data)
    return packed.getvalue()


def test_compressed_torch_archives_are_refused() -> None:
    large = (torch.zeros(1 << 20),)
    for payload in (_packed(large, zipfile.ZIP_DEFLATED)[0], _with_two_directories(large)):
        with pytest.raises(CorruptCheckpointError, match=r"'k'.*compressed"):
            decode_blob("k", "torch", "builtins.tuple", payload)


def test_members_of_torch_archives_are_read_once() -> None:
    payload = _with_one_member_for_many_names([torch.full((250_000,), float(n)) for n in range(64)])
    assert len(torch.load(io.BytesIO(payload))) == 64  # 64 MB of 1 MB
    with pytest.raises(CorruptCheckpointError, match=r"'k' is damaged"):
        decode_blob("k", "torch", "builtins.list", payload)


def test_loads_are_safe_despite_torchs_environment_variable(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    stream = io.BytesIO()
    torch.save([Bomb(tmp_path / "hit")], stream)
    with pytest.raises(UnsafeValueError):
        decode_blob("k", "torch", None, stream.getvalue())
    assert not (tmp_path / "hit").exists()


@pytest.fixture
def mesh() -> Iterator[Any]:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore:Please use DTensor:FutureWarning")
def test_sharded_tensors_inside_are_refused(mesh: Any) -> None:
    from torch.distributed._shard import sharded_tensor
    from torch.distributed.tensor import distribute_tensor

    dtensor = distribute_tensor(torch.arange(4.0), mesh)
    sharded = sharded_tensor.zeros(sharding_spec(), 4)
    for tensor in (dtensor, sharded):
        for value in (
            (1, tensor),
            Config(weight=tensor),
            {"a": {1: ({0: tensor},)}},
            argparse.Namespace(x=[tensor]),
        ):
            assert [found is tensor for found in find_tensors(value)] == [True]
            with pytest.raises(UnsupportedValueError, match=r"'opt\.ema'.*a dict or a list") as caught:
                encode_blob("opt.ema", value)
            assert type(tensor).__name__ in str(caught.value)
    assert same(through_blob((torch.ones(2),), "torch"), (torch.ones(2),))


def sharding_spec() -> Any:
    from torch.distributed._shard.sharding_spec import ChunkShardingSpec

    return ChunkShardingSpec(dim=0, placements=["rank:0/cpu"])


def test_find_tensors() -> None:
    one, two = torch.ones(1), torch.nn.Parameter(torch.ones(2))
    found = find_tensors([one, {"a": (two, {3: Config(weight=one)})}, {torch.Size([1])}, np.ones(9)])
    assert [id(tensor) for tensor in found] == [id(one), id(two), id(one)]
    assert find_tensors([1, "a", None, np.ones(3), b"x"]) == []
    assert find_tensors((one, lambda: None)) == [one]  # can't be pickled, but was found before
    assert find_tensors(one) == [one]
    module = torch.nn.Linear(2, 2)
    assert {id(tensor) for tensor in find_tensors(module)} == {id(module.weight), id(module.bias)}


def test_classes_that_this_process_allows_are_unsafe_elsewhere() -> None:
    with torch.serialization.safe_globals([Config]):
        blob = encode_blob("cfg", Config(3))
        assert (blob.encoding, blob.kind) == ("torch", f"{__name__}.Config")
        assert decode_blob("cfg", blob.encoding, blob.kind, blob.payload) == Config(3)
    with pytest.raises(UnsafeValueError, match=r"'cfg'.*Config.*add_safe_globals"):
        decode_blob("cfg", blob.encoding, blob.kind, blob.payload)


WITHOUT_TORCH = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "zarr"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Refuse())
from zarrckpt._format import names
from zarrckpt._format import values as _values
from zarrckpt._errors import CheckpointError, CorruptCheckpointError, UnsafeValueError
assert _values.find_tensors([1]) == []
blob = _values.encode_blob("k", {"a": (1, b"x")})
assert _values.decode_blob("k", blob.encoding, blob.kind, blob.payload) == {"a": (1, b"x")}
payload = sys.stdin.buffer.read()
try:
    _values.decode_blob("k", "torch", None, payload)
except CheckpointError as err:
    assert not isinstance(err, (CorruptCheckpointError, UnsafeValueError)), err
    assert "zarrckpt[torch]" in str(err) and "'k'" in str(err)
    print("printed")
"""


def test_without_torch() -> None:
    payload = encode_blob("k", torch.Size([1])).payload
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH],
        input=payload,
        capture_output=True,
        env=environment,
        check=False,
    )
    assert done.stdout == b"printed\n", done.stderr.decode()


# Pickle -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [
        *(Config(2), argparse.Namespace(lr=0.1), pathlib.PurePosixPath("/a/b"), Level.LOW, Pair(1, 2)),
        range(3),
        *(datetime.datetime(2020, 1, 2), Name("x"), defaultdict(int, a=1), {"k": [Config()]}, datetime.date),
    ],
    ids=lambda value: type(value).__name__,
)
def test_pickle(value: Any) -> None:
    with pytest.warns(UserWarning, match=rf"'opt\.cfg' of type {type(value).__module__}.*allow_pickle=True"):
        blob = EncodedValue.of("opt.cfg", value).blob_to_store("opt.cfg")
    assert blob is not None
    assert (blob.encoding, blob.kind) == ("pickle", f"{type(value).__module__}.{type(value).__qualname__}")
    with pytest.raises(UnsafeValueError, match=rf"'opt\.cfg'.*{type(value).__name__}.*allow_pickle=True"):
        decode_blob("opt.cfg", "pickle", blob.kind, blob.payload)
    assert same(decode_blob("opt.cfg", "pickle", blob.kind, blob.payload, allow_pickle=True), value)


def test_the_pickle_warning_points_at_the_caller() -> None:
    with pytest.warns(UserWarning) as caught:
        EncodedValue.of("k", Config()).blob_to_store("k")
    assert caught[0].filename == __file__


def test_unsupported_values_are_refused() -> None:
    closed = io.BytesIO()
    closed.close()
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    for value in (lambda: None, memoryview(b"x"), closed, (i for i in range(3)), deep, [1, {"a": open}, sys]):
        with pytest.raises(UnsupportedValueError, match=r"'some_key'"):
            encode_blob("some_key", value)


def test_damaged_pickles() -> None:
    for payload in (b"", b"\x80\x05", pickle.dumps([1])[:-3], b"garbage"):
        with pytest.raises(CorruptCheckpointError, match="some_key"):
            decode_blob("some_key", "pickle", None, payload, allow_pickle=True)
    for payload in (b"cno_such_module\nx\n.", b"cos\nno_such_name\n."):
        with pytest.raises(CheckpointError, match=r"some_key.*no_such") as caught:
            decode_blob("some_key", "pickle", None, payload, allow_pickle=True)
        assert not isinstance(caught.value, CorruptCheckpointError)
