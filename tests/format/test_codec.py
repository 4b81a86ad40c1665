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
from harness.internals import (
    DTYPES,
    ArrayNode,
    Box,
    BytesBudget,
    Grid,
    Store,
    StoredArray,
    by_name,
    parse_node,
    run_jobs,
)
from harness.subchunk_shapes import subchunks_of
from hypothesis import given, settings
from hypothesis import strategies as st
from zarr.core.buffer import default_buffer_prototype
from zarr.storage import MemoryStore

from zarrckpt import CorruptCheckpointError
from zarrckpt._format.chunk_codec import ArrayElements, ChunkEncoder, encode_chunk
from zarrckpt._format.chunk_layout import CRC_BYTES, ChunkTable, chunk_object_bytes, raw_dtype, subchunk_bytes
from zarrckpt._format.compression import Blosc, Compression, Zstd
from zarrckpt._format.crc32c import crc32c
from zarrckpt._read.chunks import neighbours, request_ranges


class Objects:
    """The methods of a store that the reading functions need, with a log of the requests."""

    url = "test://objects"
    read = Store.read
    reader = Store.reader
    is_local = False

    def __init__(self) -> None:
        self.data: dict[str, bytes] = {}
        self.requests: list[tuple[str, int, int]] = []

    def read_into(self, key: str, byte_offset: int, buffer: memoryview) -> None:
        self.requests.append((key, byte_offset, len(buffer)))
        buffer[:] = self.data[key][byte_offset : byte_offset + len(buffer)]


compressions = st.one_of(
    st.none(),
    st.builds(Zstd, st.integers(-20, 12), st.booleans()),
    st.builds(
        Blosc,
        st.sampled_from(["blosclz", "lz4", "lz4hc", "zlib", "zstd"]),
        st.integers(0, 9),
        st.sampled_from(["noshuffle", "shuffle", "bitshuffle"]),
        st.sampled_from([0, 512]),
    ),
)
SIZES = st.sampled_from([0, 1, 3, 4, 9, 17, 30])


@st.composite
def nodes(draw: st.DrawFn) -> ArrayNode:
    # Mostly matrices of several subchunks, with some scalars and empty arrays.
    shape = tuple(draw(SIZES) for _ in range(draw(st.sampled_from([2, 2, 3, 1, 0]))))
    chunk = tuple(draw(st.sampled_from([10, 14, 21, 6, 1])) for _ in shape)
    grid = Grid(shape, chunk, draw(subchunks_of(chunk)))
    order = draw(st.permutations(range(len(shape))))
    dtype = by_name(draw(st.sampled_from(sorted(DTYPES))))
    return ArrayNode(
        "a", grid, dtype, compression=draw(compressions), order=() if order == sorted(order) else tuple(order)
    )


def elements_of(node: ArrayNode) -> np.ndarray[Any, Any]:
    """Return noise, with zeros in the first half, so that stored sizes differ from subchunk to subchunk."""
    size = node.dtype.itemsize
    raw = np.random.default_rng(0).integers(0, 256, (math.prod(node.grid.shape), size), np.uint8)
    raw[: len(raw) // 2] = 0
    if node.dtype.name == "bool":
        raw &= 1
    return raw.reshape(-1).view(raw_dtype(size)).reshape(node.grid.shape)


def encoded(node: ArrayNode, elements: np.ndarray[Any, Any]) -> tuple[Any, Any, Any]:
    """Encode a whole array. Return its objects, and its parts of the tables of checksums and sizes."""
    objects, checksums, sizes = Objects(), list[int](), list[int]()
    for index in itertools.product(*map(range, node.grid.counts)):
        encoder = ChunkEncoder(node, ArrayElements(elements[node.grid.chunk_box(index).region()]))
        scratch, most = encoder.memory(in_parts=False)
        data = b"".join(bytes(buffer) for group in encoder.groups(np.empty(scratch, np.uint8)) for buffer in group)
        assert len(data) == encoder.nbytes
        assert node.compression is None or len(data) <= most + 16 * len(encoder.sizes) + CRC_BYTES
        objects.data[node.chunk_key(index)] = data
        checksums += encoder.checksums
        sizes += encoder.sizes
    return objects, np.array(checksums, "<u4"), np.array(sizes, "<u4")


def stored_array(node: ArrayNode, objects: Any, checksums: Any, sizes: Any) -> StoredArray:
    return StoredArray(objects, node, checksums, None if node.compression is None else sizes)


def as_bytes(array: Any) -> bytes:
    return np.ascontiguousarray(array).tobytes()


@settings(max_examples=80)
@given(nodes())
def test_zarr_and_tensorstore_decode_encoded_chunks(node: ArrayNode) -> None:
    elements = elements_of(node)
    objects, _, _ = encoded(node, elements)
    stored = {"a/zarr.json": node.document_bytes(), **objects.data}
    make = default_buffer_prototype().buffer.from_bytes
    group = make(b'{"zarr_format": 3, "node_type": "group"}')
    root = zarr.open_group(MemoryStore({"zarr.json": group, **{k: make(v) for k, v in stored.items()}}), mode="r")
    array = root["a"]
    assert isinstance(array, zarr.Array) and array.dtype == node.dtype.numpy
    assert as_bytes(array[...]) == as_bytes(elements)
    context = tensorstore.Context()
    memory = tensorstore.KvStore.open({"driver": "memory"}, context=context).result()
    for key, data in stored.items():
        memory[key] = data
    spec = {"driver": "zarr3", "kvstore": {"driver": "memory", "path": "a"}}
    assert as_bytes(tensorstore.open(spec, context=context, read=True).result().read().result()) == as_bytes(elements)


@settings(max_examples=80)
@given(nodes())
def test_chunks_consist_of_subchunks_with_their_checksums(node: ArrayNode) -> None:
    objects, checksums, sizes = encoded(node, elements_of(node))
    assert len(checksums) == len(sizes) == node.grid.num_subchunks
    table = iter(zip(checksums.tolist(), sizes.tolist(), strict=True))
    for index in itertools.product(*map(range, node.grid.counts)):
        data = objects.data[node.chunk_key(index)]
        assert node.compression is not None or len(data) == chunk_object_bytes(node)
        for _ in range(node.grid.subchunks_per_chunk):
            checksum, size = next(table)
            assert node.compression is not None or size == subchunk_bytes(node) + CRC_BYTES
            assert google_crc32c.value(data[: size - 4]) == checksum == int.from_bytes(data[size - 4 : size], "little")
            data = data[size:]


@given(nodes())
def test_the_document_of_an_array_is_read_back(node: ArrayNode) -> None:
    assert parse_node("a", node.document_bytes()) == node


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


@settings(max_examples=120)
@given(node_and_box(), st.booleans())
def test_reading_a_box_equals_numpys_slice_and_reads_few_bytes(case: tuple[ArrayNode, Box], local: bool) -> None:
    node, box = case
    elements = elements_of(node)
    objects, checksums, sizes = encoded(node, elements)
    objects.is_local = local
    found = stored_array(node, objects, checksums, sizes).read(box)
    assert as_bytes(found) == as_bytes(elements[box.slices()])
    # Only the subchunks that share an element with the box, each once. The tables are in C order.
    marks = np.zeros(node.grid.shape, bool)
    marks[box.slices()] = True
    sub, needed = node.grid.subchunk_shape or node.grid.chunk_shape, 0
    cells = itertools.product(*map(range, node.grid.counts), *map(range, node.grid.sub_counts))
    for cell, size in zip(cells, sizes.tolist(), strict=True):
        places = zip(cell[: len(sub)], node.grid.chunk_shape, cell[len(sub) :], sub, strict=True)
        at = tuple(slice(c * n + i * m, c * n + (i + 1) * m) for c, n, i, m in places)
        needed += size if marks[at].any() else 0
    assert sum(nbytes for _, _, nbytes in objects.requests) == needed


@pytest.mark.parametrize("compression", [None, Blosc()])
def test_a_strided_target_is_filled_in_place(compression: Compression | None) -> None:
    node = ArrayNode("a", Grid((6, 8), (6, 8), (2, 8)), by_name("float32"), compression=compression)
    elements = elements_of(node)
    array = stored_array(node, *encoded(node, elements))
    memory = np.zeros((8, 12), "<u4")
    target = memory[1:7:2, ::-2][:, :4]
    box = Box((2, 3), (3, 4))
    (chunk,) = node.grid.chunks_of(box)
    for job in array.chunk_jobs(chunk, box, target, BytesBudget(1 << 20)):
        job()
    assert (target == elements[2:5, 3:7]).all() and np.count_nonzero(memory) <= target.size


def test_a_band_of_rows_is_one_request() -> None:
    node = ArrayNode("a", Grid((8, 8), (8, 8), (2, 8)), by_name("float32"))
    objects, checksums, sizes = encoded(node, elements_of(node))
    stored_array(node, objects, checksums, sizes).read(Box((3, 4), (4, 4)))
    part = subchunk_bytes(node) + CRC_BYTES
    assert objects.requests == [("a/c.0.0", part, 3 * part)]


@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("sub", [None, (2, 4)])
@pytest.mark.parametrize("compression", [None, Zstd(), Blosc()])
def test_every_flipped_bit_of_a_chunk_is_found(
    compression: Compression | None, sub: tuple[int, ...] | None, local: bool
) -> None:
    node = ArrayNode("a", Grid((3, 4), (4, 4), sub), by_name("int16"), compression=compression)
    objects, checksums, sizes = encoded(node, elements_of(node))
    objects.is_local = local
    ((key, whole),) = objects.data.items()
    table = ChunkTable(node, checksums, None if compression is None else sizes)
    assert table.object_size == len(whole) and table.check(0, np.frombuffer(whole, np.uint8))
    for bit in range(8 * len(whole)):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        assert not table.check(0, np.frombuffer(flipped, np.uint8))
        if bit // 8 < sizes.sum():
            objects.data[key] = bytes(flipped)
            with pytest.raises(CorruptCheckpointError, match=r"a/c\.0\.0"):
                stored_array(node, objects, checksums, sizes).read()


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
    assert document == json.loads(node.document_bytes())


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
