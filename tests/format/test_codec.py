"""Chunk bytes: zarr-python and TensorStore decode encoded chunks, and reads return numpy's slices."""

from __future__ import annotations

import itertools
import json
import math
import struct
import threading
import time
import weakref
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pytest
import tensorstore
import zarr
from harness.internals import DTYPES, ArrayNode, Box, BytesBudget, Grid, Store, by_name, dumps, run_jobs
from harness.subchunk_shapes import subchunks_of
from hypothesis import given, settings
from hypothesis import strategies as st
from zarr.core.buffer import default_buffer_prototype
from zarr.storage import MemoryStore

from zarrckpt import CorruptCheckpointError, ObjectNotFoundError
from zarrckpt._format.chunk_codec import ArrayElements, ChunkEncoder, encode_chunk
from zarrckpt._format.chunk_layout import CRC_BYTES, chunk_object_bytes, raw_dtype, subchunk_bytes
from zarrckpt._format.crc32c import crc32c
from zarrckpt._read.chunks import StoredArray, neighbours, request_ranges

Ints = tuple[int, ...]


class Objects:
    """The methods of a store that the reading functions need, with a log of the requests."""

    url = "test://objects"
    read = Store.read
    reader = Store.reader

    def __init__(self, is_local: bool = False) -> None:
        self.is_local = is_local
        self.data: dict[str, bytes] = {}
        self.requests: list[tuple[str, int, int]] = []

    def read_into(self, key: str, byte_offset: int, buffer: memoryview) -> None:
        self.requests.append((key, byte_offset, len(buffer)))
        if key not in self.data:
            raise ObjectNotFoundError(key)
        found = self.data[key][byte_offset : byte_offset + len(buffer)]
        if len(found) != len(buffer):
            raise CorruptCheckpointError(f"{key} is short")
        buffer[:] = found


@st.composite
def nodes(draw: st.DrawFn) -> ArrayNode:
    shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
    chunk = tuple(draw(st.integers(1, 9)) for _ in shape)
    grid = Grid(shape, chunk, draw(subchunks_of(chunk)))
    return ArrayNode("a", grid, by_name(draw(st.sampled_from(sorted(DTYPES)))))


def random_elements(node: ArrayNode, seed: int = 0) -> np.ndarray[Any, Any]:
    size = node.dtype.itemsize
    raw = np.random.default_rng(seed).integers(0, 256, (math.prod(node.grid.shape) * size,), np.uint8)
    if node.dtype.name == "bool":
        raw &= 1
    return raw.view(raw_dtype(size)).reshape(node.grid.shape)


def store_array(node: ArrayNode, elements: np.ndarray[Any, Any]) -> tuple[Objects, np.ndarray[Any, Any]]:
    """Encode a whole array. Return its objects and its part of the checksum table."""
    objects, table = Objects(), []
    for index in itertools.product(*map(range, node.grid.counts)):
        buffers, checksums = encode_chunk(node, elements[node.grid.chunk_box(index).slices()])
        objects.data[node.chunk_key(index)] = b"".join(bytes(buffer) for buffer in buffers)
        table += checksums
    return objects, np.array(table, "<u4")


def as_bytes(array: np.ndarray[Any, Any]) -> bytes:
    return np.ascontiguousarray(array).tobytes()


@settings(max_examples=150, deadline=None)
@given(nodes())
def test_zarr_decodes_encoded_chunks(node: ArrayNode) -> None:
    elements = random_elements(node)
    objects, table = store_array(node, elements)
    assert len(table) == node.grid.num_subchunks
    make = default_buffer_prototype().buffer.from_bytes
    stored = {"a/zarr.json": make(dumps(node.document()))} | {k: make(v) for k, v in objects.data.items()}
    group = make(b'{"zarr_format": 3, "node_type": "group"}')
    root = zarr.open_group(MemoryStore({"zarr.json": group, **stored}), mode="r")
    array = root["a"]
    assert isinstance(array, zarr.Array)
    assert array.dtype == node.dtype.numpy
    assert as_bytes(np.asarray(array[...])) == as_bytes(elements)


@settings(max_examples=60, deadline=None)
@given(nodes())
def test_tensorstore_decodes_encoded_chunks(node: ArrayNode) -> None:
    elements = random_elements(node)
    objects, _ = store_array(node, elements)
    context = tensorstore.Context()
    memory = tensorstore.KvStore.open({"driver": "memory"}, context=context).result()
    for key, data in {"a/zarr.json": dumps(node.document()), **objects.data}.items():
        memory[key] = data
    spec = {"driver": "zarr3", "kvstore": {"driver": "memory", "path": "a"}}
    array = tensorstore.open(spec, context=context, read=True).result()
    assert as_bytes(array.read().result()) == as_bytes(elements)


@settings(max_examples=150, deadline=None)
@given(nodes())
def test_every_chunk_object_has_the_size_and_checksums_of_the_format(node: ArrayNode) -> None:
    objects, table = store_array(node, random_elements(node))
    for number, index in enumerate(itertools.product(*map(range, node.grid.counts))):
        data = objects.data[node.chunk_key(index)]
        assert len(data) == chunk_object_bytes(node)
        part = subchunk_bytes(node) + CRC_BYTES
        count = node.grid.subchunks_per_chunk
        for place in range(count):
            stored = data[place * part : (place + 1) * part]
            own = int.from_bytes(stored[-4:], "little")
            assert google_crc32c.value(stored[:-4]) == own == table[number * count + place]


def test_the_bytes_of_a_padded_chunk_with_subchunks() -> None:
    """By hand, from the format page: a chunk of 2 x 4 bytes in subchunks of 1 x 2, of which the array has 2 x 3."""
    node = ArrayNode("a", Grid((2, 3), (2, 4), (1, 2)), by_name("uint8"))
    encoder = ChunkEncoder(node, ArrayElements(np.array([[1, 2, 3], [4, 5, 6]], np.uint8)))
    # Bytes of another chunk in the scratch memory must not get into this one.
    groups = [*encoder.groups(np.full(encoder.memory(in_parts=False)[0], 0xFF, np.uint8))]
    parts = [bytes([1, 2]), bytes([3, 0]), bytes([4, 5]), bytes([6, 0])]
    stored = b"".join(part + struct.pack("<I", google_crc32c.value(part)) for part in parts)
    index = struct.pack("<8Q", 0, 6, 6, 6, 12, 6, 18, 6)
    assert b"".join(map(bytes, itertools.chain(*groups))) == stored + index + struct.pack(
        "<I", google_crc32c.value(index)
    )
    assert encoder.checksums == [google_crc32c.value(part) for part in parts]


def test_crc32c_uses_castagnolis_polynomial() -> None:
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(np.frombuffer(b"123456789", np.uint8)) == 0xE3069283
    assert crc32c(b"") == 0


@st.composite
def node_and_box(draw: st.DrawFn) -> tuple[ArrayNode, Box]:
    node = draw(nodes())
    starts = tuple(draw(st.integers(0, n)) for n in node.grid.shape)
    sizes = tuple(draw(st.integers(0, n - start)) for n, start in zip(node.grid.shape, starts, strict=True))
    return node, Box(starts, sizes)


@settings(max_examples=150, deadline=None)
@given(node_and_box())
def test_reading_a_box_equals_numpys_slice_and_reads_bytes_once(case: tuple[ArrayNode, Box]) -> None:
    node, box = case
    elements = random_elements(node)
    objects, table = store_array(node, elements)
    found = StoredArray(objects, node, table).read(box)  # type: ignore[arg-type]
    assert as_bytes(found) == as_bytes(elements[box.slices()])
    requests = objects.requests.copy()
    objects.is_local = True
    assert as_bytes(StoredArray(objects, node, table).read(box)) == as_bytes(found)  # type: ignore[arg-type]
    # Exactly the subchunks that share an element with the box, each once.
    part = subchunk_bytes(node) + CRC_BYTES
    fetched = [(key, place) for key, start, n in requests for place in range(start // part, (start + n) // part)]
    assert all(start % part == 0 and n % part == 0 for _, start, n in requests)
    assert len(fetched) == len({*fetched}) == sum(1 for _ in overlapping(node.grid, box))


def overlapping(grid: Grid, box: Box) -> Iterator[tuple[Ints, Ints]]:
    sub = grid.subchunk_shape or grid.chunk_shape
    touched = np.zeros(grid.shape, bool)
    touched[box.slices()] = True
    for chunk in itertools.product(*map(range, grid.counts)):
        for cell in itertools.product(*map(range, grid.sub_counts)):
            offset = [c * n + i * s for c, n, i, s in zip(chunk, grid.chunk_shape, cell, sub, strict=True)]
            if touched[tuple(slice(o, o + s) for o, s in zip(offset, sub, strict=True))].any():
                yield chunk, cell


def test_a_strided_target_is_filled_in_place() -> None:
    node = ArrayNode("a", Grid((6, 8), (6, 8), (2, 8)), by_name("float32"))
    elements = random_elements(node)
    objects, table = store_array(node, elements)
    memory = np.zeros((8, 12), "<u4")
    target = memory[1:7:2, ::-2][:, :4]
    box = Box((2, 3), (3, 4))
    (chunk,) = node.grid.chunks_of(box)
    array = StoredArray(objects, node, table)  # type: ignore[arg-type]
    for job in array.chunk_jobs(chunk, box, target, BytesBudget(1 << 20)):
        job()
    assert (target == elements[2:5, 3:7]).all() and np.count_nonzero(memory) <= target.size


def test_a_band_of_rows_is_one_request() -> None:
    node = ArrayNode("a", Grid((8, 8), (8, 8), (2, 8)), by_name("float32"))
    objects, table = store_array(node, random_elements(node))
    StoredArray(objects, node, table).read(Box((3, 4), (4, 4)))  # type: ignore[arg-type]
    part = subchunk_bytes(node) + CRC_BYTES
    assert objects.requests == [("a/c.0.0", part, 3 * part)]


@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("sub", [None, (2, 4)])
def test_every_flipped_bit_of_a_subchunk_is_found(sub: Ints | None, local: bool) -> None:
    node = ArrayNode("a", Grid((3, 4), (4, 4), sub), by_name("int16"))
    objects, table = store_array(node, random_elements(node))
    objects.is_local = local
    (key,) = objects.data
    whole = objects.data[key]
    covered = node.grid.subchunks_per_chunk * (subchunk_bytes(node) + CRC_BYTES)
    for bit in range(8 * covered):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        objects.data[key] = bytes(flipped)
        with pytest.raises(CorruptCheckpointError, match=r"a/c\.0\.0"):
            StoredArray(objects, node, table).read()  # type: ignore[arg-type]


@pytest.mark.parametrize("local", [False, True])
def test_a_chunk_under_the_key_of_another_is_found(local: bool) -> None:
    node = ArrayNode("a", Grid((4,), (2,)), by_name("int16"))
    objects, table = store_array(node, np.arange(4, dtype="<u2"))
    objects.is_local = local
    one, other = objects.data["a/c.0"], objects.data["a/c.1"]
    objects.data |= {"a/c.0": other, "a/c.1": one}
    with pytest.raises(CorruptCheckpointError):
        StoredArray(objects, node, table).read()  # type: ignore[arg-type]


@pytest.mark.parametrize("local", [False, True])
def test_a_missing_or_short_chunk_is_found(local: bool) -> None:
    node = ArrayNode("a", Grid((4,), (2,)), by_name("int16"))
    objects, table = store_array(node, np.arange(4, dtype="<u2"))
    objects.is_local = local
    objects.data["a/c.1"] = objects.data["a/c.1"][:-1]
    with pytest.raises(CorruptCheckpointError):
        StoredArray(objects, node, table).read()  # type: ignore[arg-type]
    del objects.data["a/c.1"]
    with pytest.raises(CorruptCheckpointError):
        StoredArray(objects, node, table).read()  # type: ignore[arg-type]


def test_a_whole_contiguous_chunk_is_not_copied() -> None:
    piece = np.arange(12, dtype="<u4").reshape(3, 4)
    for sub in (None, (1, 4), (1, 2)):
        buffers, _ = encode_chunk(ArrayNode("a", Grid((3, 4), (3, 4), sub), by_name("float32")), piece)
        assert np.shares_memory(np.frombuffer(buffers[0], np.uint8), piece)


@given(st.lists(st.integers(0, 40), unique=True).map(sorted), st.integers(1, 6))
def test_adjacent_elements_form_one_range(numbers: list[int], longest: int) -> None:
    found = neighbours(numbers, longest)
    assert [number for run in found for number in run] == numbers
    assert all(1 <= len(run) <= longest for run in found)
    for one, after in itertools.pairwise(found):
        assert one.stop < after.start or len(one) == longest


def test_array_documents_equal_zarr_pythons(tmp_path: Path) -> None:
    """The document equals zarr-python's own for an array made with these parameters, field by field."""
    node = ArrayNode("a", Grid((8, 6), (4, 6), (2, 6)), by_name("float32"))
    zarr.create_array(
        tmp_path / "z",
        shape=(8, 6),
        shards=(4, 6),
        chunks=(2, 6),
        dtype="float32",
        fill_value=np.nan,
        compressors=zarr.codecs.Crc32cCodec(),
        chunk_key_encoding={"name": "default", "separator": "."},
        dimension_names=["dim0_8", "dim1_6"],
    )
    document = json.loads((tmp_path / "z/zarr.json").read_bytes())
    document.pop("storage_transformers", None)
    assert document == node.document()


either = pytest.mark.parametrize("caller_draws", [False, True])


@either
def test_run_jobs_keeps_order_and_takes_jobs_as_threads_finish(caller_draws: bool) -> None:
    drawn, gate = [], threading.Event()

    def jobs() -> Iterator[Any]:
        for i in range(50):
            drawn.append(i)
            yield lambda i=i: gate.wait(10) and i

    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.extend(run_jobs(jobs(), 3, caller_draws=caller_draws)))
    thread.start()
    thread.join(0.3)
    assert len(drawn) <= 8
    gate.set()
    thread.join()
    assert found == list(range(50))


@either
def test_run_starts_no_more_jobs_than_are_useful(caller_draws: bool) -> None:
    useful, lock, under_way, most = 2, threading.Lock(), 0, {2: 0, 5: 0}

    def job(i: int) -> int:
        nonlocal useful, under_way
        with lock:
            under_way += 1
            most[useful] = max(most[useful], under_way)
        time.sleep(0.005)
        with lock:
            under_way -= 1
            if i == 20:
                useful = 5
        return i

    jobs = (partial(job, i) for i in range(60))
    assert run_jobs(jobs, lambda: useful, caller_draws=caller_draws) == list(range(60))
    assert most == {2: 2, 5: 5}


@either
def test_run_raises_the_first_error_and_starts_no_more_jobs(caller_draws: bool) -> None:
    started = []

    def job(i: int) -> None:
        started.append(i)
        if i == 3:
            raise KeyError(i)

    with pytest.raises(KeyError):
        run_jobs(((lambda i=i: job(i)) for i in range(1000)), 2, caller_draws=caller_draws)
    assert len(started) < 1000


@either
def test_run_jobs_finishes_started_jobs_if_the_iterator_raises(caller_draws: bool) -> None:
    ended = []

    def jobs() -> Iterator[Any]:
        for i in range(3):
            yield lambda i=i: time.sleep(0.05) or ended.append(i)
        raise KeyError("no more")

    with pytest.raises(KeyError):
        run_jobs(jobs(), 2, caller_draws=caller_draws)
    count = len(ended)
    time.sleep(0.2)
    assert len(ended) == count <= 3


def test_run_jobs_takes_jobs_here_or_in_its_threads() -> None:
    here = threading.get_ident()

    def jobs() -> Iterator[Any]:
        for _ in range(20):
            drawing.add(threading.get_ident())
            yield lambda: time.sleep(0.01) or working.add(threading.get_ident())

    drawing: set[int] = set()
    working: set[int] = set()
    run_jobs(jobs(), 3)
    assert drawing == working and here in working and len(working) == 3
    drawing.clear()
    working.clear()
    run_jobs(jobs(), 3, caller_draws=True)
    assert drawing == {here} and here not in working and len(working) == 3
    # One job needs no thread.
    assert run_jobs([threading.get_ident], 8) == [here]


def test_run_works_if_no_more_threads_can_start(monkeypatch: pytest.MonkeyPatch) -> None:
    start, left = threading.Thread.start, [2]

    def scarce(thread: threading.Thread) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", scarce)
    assert run_jobs([partial(int, n) for n in range(50)], 8) == list(range(50))
    assert run_jobs([partial(int, n) for n in range(50)], 8) == list(range(50))


@either
def test_run_releases_finished_jobs(caller_draws: bool) -> None:
    class Held:
        pass

    alive: weakref.WeakSet[Held] = weakref.WeakSet()
    most = 0

    def jobs() -> Iterator[Any]:
        nonlocal most
        for _ in range(50):
            held = Held()
            alive.add(held)
            most = max(most, len(alive))
            yield partial(len, [held])
            del held

    run_jobs(jobs(), 2, caller_draws=caller_draws)
    assert most <= 8


def test_requests_are_longer_if_memory_allows() -> None:
    node = ArrayNode("w", Grid((1 << 26,), (1 << 26,), (1 << 18,)), by_name("uint8"))
    for limit, expected in ((1 << 20, 32), (256 << 20, 32), (384 << 20, 48), (512 << 20, 64), (1 << 40, 64)):
        counts = [len(run) for run in request_ranges(node, range(256), BytesBudget(limit))]
        assert sum(counts) == 256 and max(counts) == expected


def test_the_budget_bounds_bytes_and_admits_one_large_job() -> None:
    budget, used, most, lock = BytesBudget(100), 0, 0, threading.Lock()

    def job(nbytes: int) -> None:
        nonlocal used, most
        with budget.hold(nbytes):
            with lock:
                used += nbytes
                most = max(most, used)
                assert used <= 100 or used == nbytes
            with lock:
                used -= nbytes

    run_jobs(((lambda n=n: job(n)) for n in [30, 60, 250, 50, 100, 1] * 20), 8)
    assert most == 250
