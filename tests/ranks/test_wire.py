"""Bytes of messages between ranks: they decode to the same values. Other bytes are errors, and never run code."""

from __future__ import annotations

import contextlib
import copy
import itertools
import pickle
import struct
from collections import Counter, OrderedDict, namedtuple
from collections.abc import Callable, Iterable
from enum import IntEnum
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import torch
from harness.internals import ArrayNode, Box, Grid, by_name
from harness.merging import MergingPlan
from hypothesis import given, settings
from hypothesis import strategies as st

import zarrckpt._save.steps  # noqa: F401 - it registers SaveReport
from zarrckpt import CheckpointError, SaveReport
from zarrckpt._format import wire
from zarrckpt._format.compression import Blosc, Zstd
from zarrckpt._format.root import BlobEntry, ValueEntry
from zarrckpt._format.state_path import DICT, LIST, StatePath
from zarrckpt._load.coverage import Findings
from zarrckpt._plan import description
from zarrckpt._plan.all_descriptions import DescriptionRequest
from zarrckpt._plan.description import DescribedEntry, Description, ParameterGroup
from zarrckpt._plan.plan import PlanOptions
from zarrckpt._plan.shards import Cut, Sharding
from zarrckpt._ranks.control_messages import Message, decode_message, encode_message
from zarrckpt._ranks.errors import MAX_TEXT, Failure
from zarrckpt._runs.coordinator import ChosenCheckpoint
from zarrckpt._save.agree import SentAttempt, _BeginAnswer, _CompareAnswer, _PlanDigests
from zarrckpt._save.base import BaseTables, SentBase
from zarrckpt._save.write import ArrayResult, ObjectResult, RankResults
from zarrckpt._store._archive import ArchivePart

ID = "3f1c6a0e9b7d4c52a8e0f6b1d2c3a495"
NODE = ArrayNode("a/b", Grid((4, 6), (2, 6), (1, 6)), by_name("bfloat16"), True, Zstd(3))
TABLES = BaseTables("0" * 64, *[np.ones(1, "<i8")] * 2, np.ones(1, "<u8"), np.ones(1, "<u4"))
BASE = SentBase("step-1", ID, "", 1, ("a",), TABLES)
RECORDS = [
    Box((0, 1), (2, 3)),
    NODE,
    StatePath(("a", 1, None, (2.5, "b")), (DICT, LIST, DICT, DICT), (0, 5), 2),
    StatePath((), ()),
    DescribedEntry(StatePath(("w",), (DICT,)), "tensor", (3,), "torch.float32", 0, (Box((0,), (3,)),)),
    ParameterGroup(StatePath(("g",), (DICT,)), b"\0\1", "AdamW", False),
    Sharding((0, 1), (2,), (Cut(0), None)),
    Description([DescribedEntry(StatePath(("w",), (DICT,)), "value")], (Sharding((0,), (1,), (None,)),)),
    MergingPlan(Blosc(), fill_bytes=1),
    PlanOptions(Blosc(), 1 << 20, grids={"a": Grid((4,), (2,), (1,))}),
    DescriptionRequest(frozenset({0, 3}), np.array([0, 0, 1], np.uint8)),
    _BeginAnswer(SentAttempt(ID, f"@{ID}", "", "host", True, BASE, {"a": 64})),
    _CompareAnswer(frozenset({b"x"}), {("w", (0, 1)): 3, ("v", None): 1}, {"w": [0, 1]}, True),
    _PlanDigests(b"plan", b"", {("w", None): b"digest"}),
    ArrayResult(np.arange(3), np.arange(6, dtype="<u4"), np.zeros(0, "<u4"), np.zeros(0, "<u8"), 24),
    ObjectResult(value=ValueEntry("v", {"$tuple": [1, "\ud800", [2.5, None, True]]})),
    ObjectResult(blob=BlobEntry(NODE, "npy", "ndarray")),
    RankResults({}, ArchivePart(("a/c.0",), np.ones(1, "<u4"), ID, ("b/c",), np.ones((1, 4), "<i8"))),
    SaveReport("s3://b/c", ID, 24, 1, (24, 0), 1.5),
    Findings(["*.w"], *[np.zeros(2, np.uint8)] * 3),
    ChosenCheckpoint("step-100", 100, True),
    Failure(3, "StorageError", "no space", notes=("a", "b")),
]
"""One of each record that ranks send."""


def test_every_record_round_trips() -> None:
    shown = repr(RECORDS)
    for cls in wire._by_class:
        assert f"{cls.__name__}(" in shown or cls is StatePath or not cls.__module__.startswith("zarrckpt")
    for one in RECORDS:
        assert repr(wire.decode(wire.encode(one))) == repr(one) and type(one) is type(wire.decode(wire.encode(one)))


numbers = st.integers() | st.floats(allow_nan=False)
scalars = st.none() | st.booleans() | numbers | st.text(st.characters(), max_size=5) | st.binary(max_size=9)
keys = st.text(max_size=3) | st.binary(max_size=3) | st.integers(0, 2**31 - 1) | st.tuples(st.text(max_size=2))
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(keys, inner, max_size=4)
        | st.frozensets(keys, max_size=1)
        | st.sets(keys, max_size=1)
    ),
    max_leaves=20,
)


@given(values)
def test_values_round_trip(value: Any) -> None:
    found = wire.decode(wire.encode(value))
    assert found == value and repr(found) == repr(value)


@pytest.mark.parametrize("bits", ["7ff8000000000000", "fff8000000000001", "7ff0000000000abc"])
def test_nans_keep_their_bits(bits: str) -> None:
    (nan,) = struct.unpack(">d", bytes.fromhex(bits))
    assert struct.pack(">d", wire.decode(wire.encode([(nan,)]))[0][0]).hex() == bits


def test_values_of_subclasses_arrive_as_plain_values() -> None:
    sent = [np.float32(1.5), np.bool_(True), np.str_("a"), torch.Size((2, 3)), Counter("aa"), OrderedDict(b=1), Key(2)]
    assert repr(wire.decode(wire.encode(sent))) == repr([1.5, True, "a", (2, 3), {"a": 2}, {"b": 1}, 2])


@pytest.mark.parametrize("dtype", ["?", "<u1", "<u4", ">i8", "<f2", "<f8"])
def test_arrays_round_trip(dtype: str) -> None:
    for array in (np.zeros((), dtype), np.zeros((2, 0), dtype), np.arange(6).astype(dtype).reshape(2, 3).T):
        found = wire.decode(wire.encode({"a": [array]}))["a"][0]
        assert found.dtype == array.dtype and found.shape == array.shape and (found == array).all()
        assert found.flags.writeable


@given(st.binary(max_size=200))
def test_invalid_bytes_are_errors(data: bytes) -> None:
    _refused(data)


@settings(max_examples=150)
@given(st.data())
def test_altered_messages_are_errors_or_messages(data: st.DataObject) -> None:
    encoded = bytearray(wire.encode(data.draw(st.sampled_from(RECORDS))))
    for _ in range(data.draw(st.integers(1, 3))):
        encoded[data.draw(st.integers(0, len(encoded) - 1))] = data.draw(st.integers(0, 255))
    _refused(bytes(encoded[: data.draw(st.integers(0, len(encoded)))]))


def _refused(data: bytes) -> None:
    """Check that only CheckpointError is raised, if any."""
    for decode in (wire.decode, decode_message, Description.unpacked):
        with contextlib.suppress(CheckpointError):
            decode(data)


def tagged(name: bytes, *fields: Any) -> bytes:
    """Return a message with a record of this name."""
    return wire.encode([msgpack.ExtType(0, name), *fields])


def forged(record: Any = BASE, **changes: Any) -> bytes:
    """Return a message with a record that no rank would send."""
    forged = copy.copy(record)
    forged.__dict__.update(changes)
    return wire.encode(forged)


def colliding_keys(kind: Callable[[Iterable[Any]], Any]) -> bytes:
    """Return a message whose keys have one hash, which Python does not randomise for tuples of integers."""
    prime, modulus = 14029467366897019727, 2**64
    keys: list[Any] = []
    for first in itertools.count():
        lane = (2870177450012600261 + first * prime) % modulus
        rotated = (lane << 31 | lane >> 33) % modulus * 11400714785074694791 % modulus
        second = (12345 - rotated) * pow(prime, -1, modulus) % modulus
        if second < 2**61 - 1:
            keys.append((first, second))
        if len(keys) == 1000:
            return wire.encode(kind(keys))
    raise AssertionError


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\xdb\xff\xff\xff\xffx",
        b"\xc6\xff\xff\xff\xffx",
        b"\xdd\xff\xff\xff\xff\1",
        b"\xdf\xff\xff\xff\xff\1",
        (b"\xdd\0\x0f\0\0" * 1000).ljust(2**20, b"\1"),
        b"\x91" * 100_000,
        b"\x91" * 2000 + b"\1",
        b"\1more",
        b"\x81\x90\1",
        colliding_keys(dict.fromkeys),
        colliding_keys(set),
        tagged(b"int", "1" * 100_000),
        tagged(b"int", "f" * 100_000, 16),
        tagged(b"ndarray", "<f8", [2**40, 2**40], b""),
        tagged(b"ndarray", "<f8", [-1, -1], b"8 bytes."),
        tagged(b"ndarray", "|O", [1], b"8 bytes."),
        tagged(b"ndarray", "<f8", [2], b"8 bytes."),
        tagged(b"ndarray", "<f8", [0], b"8 bytes."),
        tagged(b"ndarray", "<f8", [2**40], None),
        tagged(b"ndarray", "<f8", [0] * 70, b""),
        tagged(b"frozenset", {}),
        tagged(b"Unknown", 1),
        tagged(b"os.system", "true"),
        tagged(b"\xff", 1),
        tagged(b"Box", (1,)),
        tagged(b"Box", (1,), ("1",)),
        tagged(b"Box", [1], [1]),
        tagged(b"DType", "object"),
        tagged(b"DType", []),
        tagged(b"Zstd", 99, True),
        tagged(b"StatePath", "set", None, None, "a"),
        tagged(b"StatePath", "dict", 1, None, "a"),
        tagged(b"ChosenCheckpoint", "../other", 1, False, False),
        tagged(b"SentAttempt", ID, "@../..", "", "host", False, None, {}),
        forged(name=".."),
        forged(name="a/b"),
        forged(tree="@../.."),
        forged(paths=()),
        forged(TABLES, digests=np.ones(2, "<u8")),
    ],
    ids=lambda data: repr(data[:40]),
)
def test_forged_messages_are_refused(data: bytes) -> None:
    with pytest.raises(CheckpointError):
        wire.decode(data)


def test_objects_of_other_classes_are_not_sent() -> None:
    loop: list[Any] = []
    loop.append(loop)
    pair = namedtuple("pair", "a b")(1, 2)
    for value in (print, Path("x"), np.array([None]), 1j, loop, np.dtype("f4"), pair, 10**5000):
        with pytest.raises(CheckpointError):
            wire.encode([value])


class Key(IntEnum):
    """An integer of another class."""

    B = 2


class Bomb:
    """Fails the test when it is unpickled."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return pytest.fail, ("code ran",)


def test_pickles_are_refused() -> None:
    bomb = pickle.dumps(Bomb())
    for decode in (wire.decode, decode_message, Description.unpacked):
        with pytest.raises(CheckpointError):
            decode(bomb)


@pytest.mark.parametrize(
    "message",
    [
        ("unreadable", 1, 1, "x"),
        ("results", 1, 1, ({0: ("result", None)}, {}, False)),
        ("results", 1, 1, ({"0": ("result", b"")}, {}, False)),
        ("answer", 1, 1, ("failed", [], False)),
        ("answer", 1, 1, ("stopped", None, False)),
        ("answer", 1, 1, ([], b"", False)),
        ([], 1, 1, None),
        ("abort", 1, 1, ([], None)),
        ("error", 1, 1, None),
        ("heartbeat", 1, 1, ["x"]),
        ("heartbeat", 1.0, 1, []),
        ("stop", 1, 1),
    ],
)
def test_control_messages_of_another_form_are_refused(message: Any) -> None:
    with pytest.raises(CheckpointError):
        decode_message(wire.encode(message))


def test_texts_of_peers_are_cut_and_cleaned() -> None:
    text = "a\nb\t\x1b]0;x\x07\x9b\u202e\u2028\ud800\r"
    failure = Failure(1, "K\x1b[2J" * 99, text + "x" * 2**20, notes=("\x1b",) * 99)
    bodies = {
        "answer": ("failed", [failure], False),
        "abort": ([failure], None),
        "error": failure,
        "results": ({1: ("failed", failure)}, {}, False),
    }
    for kind, body in bodies.items():
        found = repr(decode_message(encode_message(Message(kind, 1, 1, body))).body)
        assert repr(r"]0;x\x07\x9b\u202e\u2028\ud800\rxx")[1:-1] in found
        assert len(found) < 2 * MAX_TEXT


def test_a_description_does_not_grow_beyond_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = Description((), version="x" * 1000).packed
    assert Description.unpacked(packed).version == "x" * 1000
    monkeypatch.setattr(description, "_MAX_BYTES", 500)
    for refused in (lambda: Description.unpacked(packed), lambda: Description((), version="x" * 1000).packed):
        with pytest.raises(CheckpointError):
            refused()
