"""Compressed tensors: zarr-python, TensorStore and xarray read them. Damage and hostile bytes are found."""

from __future__ import annotations

import itertools
import json
import math
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import google_crc32c
import numcodecs.blosc
import numcodecs.zstd
import numpy as np
import pytest
import tensorstore
import torch
import zarr
from harness import plain_readers
from harness.independent_reader import Reader
from harness.internals import DTYPES, ArrayNode, Box, BytesBudget, Grid, Store, StoredArray, by_name, dumps, parse_array
from harness.memory_peaks import traced_peak_of
from harness.random_tensors import random_tensor
from harness.ranks import run_ranks
from harness.store_servers import S3Place
from harness.subchunk_shapes import subchunks_of
from hypothesis import given, settings
from hypothesis import strategies as st
from zarr.codecs import BloscCodec, ZstdCodec
from zarr.core.buffer import default_buffer_prototype
from zarr.storage import MemoryStore

import zarrckpt
from zarrckpt import CorruptCheckpointError, UnsupportedFormatError
from zarrckpt._format.chunk_codec import ArrayElements, ChunkEncoder
from zarrckpt._format.chunk_layout import ChunkTable, raw_dtype
from zarrckpt._format.compression import (
    MAX_BYTES,
    Blosc,
    Compression,
    DecodeError,
    Zstd,
    max_compressed_bytes,
    parse_option,
)

CODECS: list[tuple[Any, Any]] = [
    ("zstd", ZstdCodec(level=1)),
    ({"name": "zstd", "level": 19, "checksum": True}, ZstdCodec(level=19, checksum=True)),
    ({"name": "zstd", "level": -7}, ZstdCodec(level=-7)),
    ("blosc", BloscCodec(typesize=4, cname="lz4", clevel=5, shuffle="bitshuffle")),
    (
        {"name": "blosc", "cname": "zstd", "clevel": 5, "shuffle": "shuffle"},
        BloscCodec(typesize=4, cname="zstd", shuffle="shuffle"),
    ),
    (
        {"name": "blosc", "cname": "zlib", "clevel": 1, "shuffle": "noshuffle", "blocksize": 4096},
        BloscCodec(typesize=4, cname="zlib", clevel=1, shuffle="noshuffle", blocksize=4096),
    ),
    ({"name": "blosc", "clevel": 0}, BloscCodec(typesize=4, cname="lz4", clevel=0, shuffle="bitshuffle")),
]


@pytest.mark.parametrize(("option", "codec"), CODECS, ids=lambda value: str(value)[:40])
def test_options_become_zarrs_codecs(option: Any, codec: Any) -> None:
    compression = parse_option(option)
    assert compression is not None and compression.codec(4) == codec.to_dict()


WRONG: list[tuple[Any, type[Exception], str]] = [
    ("gzip", ValueError, "'gzip'"),
    (True, TypeError, "of type bool"),
    ({"level": 3}, ValueError, "'zstd', 'blosc'"),
    ({"name": ["zstd"]}, ValueError, "'zstd', 'blosc'"),
    ({"name": "zstd", "clevel": 3}, ValueError, "no option 'clevel'. Its options are level, checksum"),
    ({"name": "zstd", "level": 23}, ValueError, "level must be from -131072 to 22, got 23"),
    ({"name": "zstd", "level": "3"}, TypeError, "level must be an int"),
    ({"name": "zstd", "checksum": 1}, TypeError, "checksum must be a bool"),
    ({"name": "blosc", "cname": "snappy"}, ValueError, "cname must be one of blosclz, lz4"),
    ({"name": "blosc", "clevel": 10}, ValueError, "clevel must be from 0 to 9"),
    ({"name": "blosc", "shuffle": 1}, ValueError, "shuffle must be one of noshuffle"),
    ({"name": "blosc", "blocksize": -1}, ValueError, "blocksize must be from 0"),
    ({"name": "blosc", "typesize": 4}, ValueError, "no option 'typesize'"),
]


@pytest.mark.parametrize(("option", "error", "message"), WRONG, ids=lambda value: str(value)[:40])
def test_a_wrong_option_is_refused_before_a_write(
    tmp_path: Path, option: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        zarrckpt.save({"w": torch.ones(2)}, tmp_path / "ck", options=zarrckpt.SaveOptions(compression=option))
    assert not (tmp_path / "ck").exists()


# -- bytes


class Objects:
    """The methods of a store that the reading functions need."""

    url = "test://objects"
    reader, read = Store.reader, Store.read

    def __init__(self, data: dict[str, bytes], is_local: bool = False) -> None:
        self.data, self.is_local, self.fetched = data, is_local, 0

    def read_into(self, key: str, byte_offset: int, buffer: memoryview) -> None:
        buffer[:] = self.data[key][byte_offset : byte_offset + len(buffer)]
        self.fetched += len(buffer)


compressions = st.one_of(
    st.builds(Zstd, st.integers(-20, 12), st.booleans()),
    st.builds(
        Blosc,
        st.sampled_from(["blosclz", "lz4", "lz4hc", "zlib", "zstd"]),
        st.integers(0, 9),
        st.sampled_from(["noshuffle", "shuffle", "bitshuffle"]),
        st.sampled_from([0, 512]),
    ),
)


@st.composite
def nodes(draw: st.DrawFn) -> ArrayNode:
    # Mostly matrices of several subchunks, with some scalars and empty arrays.
    shape = tuple(draw(st.sampled_from([30, 17, 4, 1, 0])) for _ in range(draw(st.sampled_from([2, 3, 1, 0]))))
    chunk = tuple(draw(st.sampled_from([10, 14, 21, 6, 1])) for _ in shape)
    grid = Grid(shape, chunk, draw(subchunks_of(chunk)))
    return ArrayNode("a", grid, by_name(draw(st.sampled_from(sorted(DTYPES)))), compression=draw(compressions))


@st.composite
def node_and_box(draw: st.DrawFn) -> tuple[ArrayNode, Box]:
    node = draw(nodes())
    parts = [draw(st.sampled_from([(0, n), (n // 3, n), (n // 2, min(n // 2 + 1, n))])) for n in node.grid.shape]
    return node, Box(tuple(begin for begin, _ in parts), tuple(end - begin for begin, end in parts))


def elements_of(node: ArrayNode) -> np.ndarray[Any, Any]:
    """Return noise, with zeros in the first half, so that stored sizes differ from subchunk to subchunk."""
    size = node.dtype.itemsize
    raw = np.random.default_rng(0).integers(0, 256, (math.prod(node.grid.shape), size), np.uint8)
    raw[: len(raw) // 2] = 0
    if node.dtype.name == "bool":
        raw &= 1
    return raw.reshape(-1).view(raw_dtype(size)).reshape(node.grid.shape)


def encoded(node: ArrayNode, elements: np.ndarray[Any, Any]) -> tuple[dict[str, bytes], Any, Any]:
    """Return a whole array's objects, and its parts of the tables of checksums and sizes."""
    objects, checksums, sizes = {}, [], []
    assert node.compression is not None
    for index in itertools.product(*map(range, node.grid.counts)):
        encoder = ChunkEncoder(node, ArrayElements(elements[node.grid.chunk_box(index).region()]))
        scratch, most = encoder.memory(in_parts=False)
        data = b"".join(bytes(buffer) for group in encoder.groups(np.empty(scratch, np.uint8)) for buffer in group)
        assert len(data) == encoder.nbytes <= most + 16 * len(encoder.sizes) + 4
        objects[node.chunk_key(index)] = data
        checksums += encoder.checksums
        sizes += encoder.sizes
    return objects, np.array(checksums, "<u4"), np.array(sizes, "<u4")


def as_bytes(array: Any) -> bytes:
    return np.ascontiguousarray(array).tobytes()


@settings(max_examples=25, deadline=None)
@given(nodes())
def test_zarr_and_tensorstore_decode_compressed_chunks(node: ArrayNode) -> None:
    elements = elements_of(node)
    objects, _, _ = encoded(node, elements)
    stored = {"a/zarr.json": dumps(node.document()), **objects}
    make = default_buffer_prototype().buffer.from_bytes
    group = make(b'{"zarr_format": 3, "node_type": "group"}')
    root = zarr.open_group(MemoryStore({"zarr.json": group, **{k: make(v) for k, v in stored.items()}}), mode="r")
    array = root["a"]
    assert isinstance(array, zarr.Array)
    assert as_bytes(np.asarray(array[...])) == as_bytes(elements)
    context = tensorstore.Context()
    memory = tensorstore.KvStore.open({"driver": "memory"}, context=context).result()
    for key, data in stored.items():
        memory[key] = data
    spec = {"driver": "zarr3", "kvstore": {"driver": "memory", "path": "a"}}
    assert as_bytes(tensorstore.open(spec, context=context, read=True).result().read().result()) == as_bytes(elements)


@settings(max_examples=120, deadline=None)
@given(node_and_box(), st.booleans())
def test_reading_a_box_equals_numpys_slice_and_reads_few_bytes(case: tuple[ArrayNode, Box], local: bool) -> None:
    node, box = case
    elements = elements_of(node)
    data, checksums, sizes = encoded(node, elements)
    objects: Any = Objects(data, local)
    assert as_bytes(StoredArray(objects, node, checksums, sizes).read(box)) == as_bytes(elements[box.slices()])
    # Only the subchunks that share an element with the box. The tables are in C order.
    marks = np.zeros(node.grid.shape, bool)
    marks[box.slices()] = True
    sub, needed = node.grid.subchunk_shape or node.grid.chunk_shape, 0
    cells = itertools.product(*map(range, node.grid.counts), *map(range, node.grid.sub_counts))
    for cell, size in zip(cells, sizes.tolist(), strict=True):
        places = zip(cell[: len(sub)], node.grid.chunk_shape, cell[len(sub) :], sub, strict=True)
        at = tuple(slice(c * n + i * m, c * n + (i + 1) * m) for c, n, i, m in places)
        needed += size if marks[at].any() else 0
    assert objects.fetched == needed


@given(nodes())
def test_a_document_with_a_compressor_is_read_back(node: ArrayNode) -> None:
    assert parse_array("a", json.loads(dumps(node.document()))) == node


def test_a_strided_target_is_filled_in_place() -> None:
    node = ArrayNode("a", Grid((6, 8), (6, 8), (2, 8)), by_name("float32"), compression=Blosc())
    elements = elements_of(node)
    data, checksums, sizes = encoded(node, elements)
    memory = np.zeros((8, 12), "<u4")
    target = memory[1:7:2, ::-2][:, :4]
    box = Box((2, 3), (3, 4))
    (chunk,) = node.grid.chunks_of(box)
    array = StoredArray(Objects(data), node, checksums, sizes)  # type: ignore[arg-type]
    for job in array.chunk_jobs(chunk, box, target, BytesBudget(1 << 20)):
        job()
    assert (target == elements[2:5, 3:7]).all() and np.count_nonzero(memory) <= target.size


@pytest.mark.parametrize("sub", [None, (2, 4)])
@pytest.mark.parametrize("compression", [Zstd(), Blosc()], ids=["zstd", "blosc"])
def test_every_flipped_bit_of_a_chunk_is_found(compression: Compression, sub: tuple[int, ...] | None) -> None:
    node = ArrayNode("a", Grid((3, 4), (4, 4), sub), by_name("int16"), compression=compression)
    data, checksums, sizes = encoded(node, elements_of(node))
    ((key, whole),) = data.items()
    table = ChunkTable(node, checksums, sizes)
    assert table.object_size == len(whole) and table.check(0, np.frombuffer(whole, np.uint8))
    for bit in range(8 * len(whole)):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        assert not table.check(0, np.frombuffer(flipped, np.uint8))
        if bit // 8 < table.begin(len(checksums)):
            with pytest.raises(CorruptCheckpointError, match=r"a/c\.0\.0"):
                StoredArray(Objects({key: bytes(flipped)}), node, checksums, sizes).read()  # type: ignore[arg-type]


def zstd_frame(data: bytes, size: int | None, last: bool = True) -> bytes:
    """Return a frame of one raw block, made by hand (RFC 8878), with any content size, or none."""
    block = (len(data) << 3 | last).to_bytes(3, "little") + data
    head = b"\x28\xb5\x2f\xfd" + (b"\x00\x58" if size is None else b"\xa0" + size.to_bytes(4, "little"))
    return head + block


def blosc_of(data: bytes, **header: int) -> bytes:
    """Return a blosc buffer with numbers of its header changed."""
    stored = bytearray(numcodecs.blosc.compress(data, b"lz4", 5, 1, 0, 1))
    for name, place in (("size", 4), ("block", 8), ("whole", 12)):
        if name in header:
            stored[place : place + 4] = struct.pack("<I", header[name])
    return bytes(stored)


N = 4000
HOSTILE: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "zstd: less": ("zstd", lambda data: bytes(numcodecs.zstd.compress(data[:-1]))),
    "zstd: more": ("zstd", lambda data: bytes(numcodecs.zstd.compress(data + b"x"))),
    "zstd: nothing": ("zstd", lambda data: bytes(numcodecs.zstd.compress(b""))),
    "zstd: a bomb": ("zstd", lambda data: bytes(numcodecs.zstd.compress(bytes(1 << 28)))),
    "zstd: size missing": ("zstd", lambda data: zstd_frame(data, None)),
    "zstd: size right, too little in it": ("zstd", lambda data: zstd_frame(data[:-4], N)),
    "zstd: size right, too much in it": ("zstd", lambda data: zstd_frame(data + b"more", N)),
    "zstd: not the end": ("zstd", lambda data: zstd_frame(data, N, last=False)),
    "zstd: two frames": ("zstd", lambda data: zstd_frame(data, N) * 2),
    "zstd: an empty frame behind": ("zstd", lambda data: zstd_frame(data, N) + zstd_frame(b"", 0)),
    "zstd: a frame to skip behind": ("zstd", lambda data: zstd_frame(data, N) + b"\x50\x2a\x4d\x18\1\0\0\0x"),
    "zstd: a byte behind": ("zstd", lambda data: zstd_frame(data, N) + b"x"),
    "zstd: cut in its last block": ("zstd", lambda data: zstd_frame(data, N)[:-1]),
    "zstd: terabytes": ("zstd", lambda data: b"\x28\xb5\x2f\xfd\xe0" + (1 << 42).to_bytes(8, "little") + b"\1\0\0"),
    "zstd: noise": ("zstd", lambda data: bytes(range(250))),
    "zstd: one byte": ("zstd", lambda data: b"\x28"),
    "blosc: less": ("blosc", lambda data: blosc_of(data[:-1])),
    "blosc: more": ("blosc", lambda data: blosc_of(data + b"x")),
    "blosc: a bomb": ("blosc", lambda data: blosc_of(bytes(1 << 28))),
    "blosc: longer than it is": ("blosc", lambda data: blosc_of(data, whole=1 << 20)),
    "blosc: shorter than it is": ("blosc", lambda data: blosc_of(data)[:-9]),
    "blosc: says that it is right": ("blosc", lambda data: blosc_of(data * 4, size=N)),
    "blosc: blocks of a gigabyte": ("blosc", lambda data: blosc_of(data, block=1 << 30)),
    "blosc: header only": ("blosc", lambda data: blosc_of(data)[:15]),
    "blosc: noise": (
        "blosc",
        lambda data: blosc_of(data)[:16] + bytes(n % 251 for n in range(len(blosc_of(data)) - 16)),
    ),
}


def test_frames_written_by_hand_are_valid_zstd() -> None:
    """So the hostile frames fail because of their content size."""
    for size in (None, 5):
        assert bytes(numcodecs.zstd.decompress(zstd_frame(b"hello", size))) == b"hello"


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_bytes_with_valid_checksums_are_errors(tmp_path: Path, case: str) -> None:
    """Bytes that decompress to anything but the subchunk are damage. No more memory than the subchunk is allocated."""
    name, make = HOSTILE[case]
    tensor = (torch.arange(N) // 32).to(torch.uint8)
    zarrckpt.save({"w": tensor}, tmp_path / "ck", options=zarrckpt.SaveOptions(compression=name))
    assert (zarrckpt.open(tmp_path / "ck")["w"][:] == tensor.numpy()).all()  # imports the codecs, too
    forge(tmp_path / "ck", "w", make(tensor.numpy().tobytes()))
    target = torch.zeros(N, dtype=torch.uint8)

    def read() -> None:
        with pytest.raises(CorruptCheckpointError, match=r"w/c\.0|sizes"):
            zarrckpt.load({"w": target}, tmp_path / "ck")
        with pytest.raises((CorruptCheckpointError, RuntimeError)):  # the latter is raised by numcodecs in zarr-python
            zarrckpt.open(tmp_path / "ck")["w"][:]

    assert traced_peak_of(read) < 16 << 20


def forge(checkpoint: Path, path: str, data: bytes) -> None:
    """Put other compressed bytes into the only array, of one chunk, as a hostile writer would."""
    crc = google_crc32c.value(data)
    (checkpoint / path / "c.0").write_bytes(data + struct.pack("<I", crc))
    set_table(checkpoint, "checksums", struct.pack("<I", crc))
    set_table(checkpoint, "sizes", struct.pack("<I", len(data) + 4))


def set_table(checkpoint: Path, name: str, numbers: bytes) -> None:
    """Put another table, and a root with its checksum."""
    crc = google_crc32c.value(numbers)

    def change(document: Any) -> None:
        own = document["attributes"]["zarrckpt"]
        own["tables"][name]["crc32c"] = crc
        table = checkpoint / "@zarrckpt" / own["save_id"] / name / "c.0"
        table.write_bytes(numbers + struct.pack("<I", crc))

    edit_root(checkpoint, change)


def edit_root(checkpoint: Path, change: Callable[[Any], None]) -> None:
    document = json.loads((checkpoint / "zarr.json").read_bytes())
    change(document)
    document["attributes"]["zarrckpt"]["crc32c"] = "00000000"
    data = json.dumps(document, separators=(",", ":")).encode()
    (checkpoint / "zarr.json").write_bytes(data.replace(b"00000000", b"%08x" % google_crc32c.value(data), 1))


@pytest.mark.parametrize("size", [0, 4, 2**32 - 1, max_compressed_bytes(4 * N) + 5])
def test_hostile_sizes_are_errors(tmp_path: Path, size: int) -> None:
    zarrckpt.save({"w": torch.randn(N)}, tmp_path / "ck", options=zarrckpt.SaveOptions(compression="zstd"))
    set_table(tmp_path / "ck", "sizes", struct.pack("<I", size))
    for read in (
        lambda: zarrckpt.load({"w": torch.zeros(N)}, tmp_path / "ck"),
        lambda: zarrckpt.open(tmp_path / "ck")["w"][:],
    ):
        with pytest.raises(
            CorruptCheckpointError, match=rf"has a size of {size} bytes for a subchunk of array 'w', expected 5 to"
        ):
            read()


@pytest.mark.parametrize("more", [-1, 1])
def test_plausible_wrong_sizes_are_errors(tmp_path: Path, more: int) -> None:
    zarrckpt.save({"w": torch.randn(N)}, tmp_path / "ck", options=zarrckpt.SaveOptions(compression="zstd"))
    size = (tmp_path / "ck/w/c.0").stat().st_size + more
    set_table(tmp_path / "ck", "sizes", struct.pack("<I", size))
    with pytest.raises(CorruptCheckpointError, match=r"w/c\.0"):
        zarrckpt.load({"w": torch.zeros(N)}, tmp_path / "ck")
    with pytest.raises(CorruptCheckpointError, match=r"w/c\.0"):
        zarrckpt.open(tmp_path / "ck")["w"][:]


DAMAGE: dict[str, Callable[[Path], Any]] = {
    "missing": lambda path: path.unlink(),
    "short": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "flipped": lambda path: path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:]),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_table_of_sizes_is_found(tmp_path: Path, kind: str) -> None:
    zarrckpt.save({"w": torch.randn(N)}, tmp_path / "ck", options=zarrckpt.SaveOptions(compression="zstd"))
    (table,) = (tmp_path / "ck/@zarrckpt").glob("*/sizes/c.0")
    DAMAGE[kind](table)
    with pytest.raises(CorruptCheckpointError, match="sizes table"):
        zarrckpt.load({"w": torch.zeros(N)}, tmp_path / "ck")
    with pytest.raises(CorruptCheckpointError, match="sizes table"):
        zarrckpt.open(tmp_path / "ck")["w"][:]


def test_missing_sizes_of_subchunks_are_errors(tmp_path: Path) -> None:
    zarrckpt.save({"w": torch.randn(N)}, tmp_path / "ck", options=zarrckpt.SaveOptions(compression="zstd"))
    edit_root(tmp_path / "ck", lambda root: root["attributes"]["zarrckpt"]["tables"]["sizes"].update(length=0))
    with pytest.raises(CorruptCheckpointError, match="'sizes' is 0, expected 1"):
        zarrckpt.open(tmp_path / "ck")
    edit_root(tmp_path / "ck", lambda root: root["attributes"]["zarrckpt"]["tables"].pop("sizes"))
    with pytest.raises(CorruptCheckpointError, match="sizes"):
        zarrckpt.open(tmp_path / "ck")


def test_a_swapped_chunk_is_found(tmp_path: Path) -> None:
    tensor = torch.arange(4096.0)
    zarrckpt.save(
        {"w": tensor}, tmp_path / "ck", options=zarrckpt.SaveOptions(compression="blosc", max_chunk_bytes=8192)
    )
    one, other = tmp_path / "ck/w/c.0", tmp_path / "ck/w/c.1"
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(second)
    other.write_bytes(first)
    with pytest.raises(CorruptCheckpointError, match=r"w/c\."):
        zarrckpt.load({"w": torch.zeros(4096)}, tmp_path / "ck")
    with pytest.raises(CorruptCheckpointError, match=r"w/c\.1"):
        zarrckpt.open(tmp_path / "ck")["w"][3000:]


@pytest.mark.parametrize(
    ("codec", "name"),
    [
        ({"name": "gzip", "configuration": {"level": 5}}, "'gzip'"),
        ({"name": "zstd", "configuration": {"level": 3, "checksum": False, "window": 1}}, "'codecs'"),
        ({"name": "zstd", "configuration": {"level": 99, "checksum": False}}, "level must be from"),
        ({"name": "blosc"}, "'blosc' has no configuration"),
        ("rot13", "rot13|None"),
    ],
)
@pytest.mark.parametrize("subchunks", [False, True])
def test_an_unknown_codec_is_refused_by_name(tmp_path: Path, codec: Any, name: str, subchunks: bool) -> None:
    tensor = torch.zeros((2048, 1024) if subchunks else (3, 4))
    zarrckpt.save({"w": tensor}, tmp_path / "ck", options=zarrckpt.SaveOptions(compression="zstd"))

    def change(root: Any) -> None:
        document = root["consolidated_metadata"]["metadata"]["w"]
        inner = document["codecs"][0]["configuration"]["codecs"] if subchunks else document["codecs"]
        assert inner[1]["name"] == "zstd"
        inner[1] = codec

    edit_root(tmp_path / "ck", change)
    with pytest.raises(UnsupportedFormatError, match=name):
        zarrckpt.open(tmp_path / "ck")


def test_data_too_long_for_a_codec_is_stored_uncompressed() -> None:
    """Only planned: no test machine has that much memory."""
    node = ArrayNode("a", Grid((2**31,), (2**31,)), by_name("uint8"), compression=Zstd())
    with pytest.raises(CorruptCheckpointError, match="too long to be compressed"):
        parse_array("a", node.document())
    most = Grid((MAX_BYTES,), (MAX_BYTES,))
    assert parse_array("a", ArrayNode("a", most, by_name("uint8"), compression=Zstd()).document()).grid == most


@pytest.mark.parametrize("compression", [Zstd(), Blosc()], ids=["zstd", "blosc"])
def test_compressed_noise_grows_only_slightly(compression: Compression) -> None:
    for count in (1, 3, 100, 4096, 300_001):
        noise = np.random.default_rng(count).integers(0, 256, count, np.uint8)
        stored = np.frombuffer(compression.encode(noise, 1), np.uint8)
        assert len(stored) <= max_compressed_bytes(count)
        out = np.zeros_like(noise)
        compression.decode(stored, out)
        assert (out == noise).all()
        with pytest.raises(DecodeError):
            compression.decode(stored, np.zeros(count + 1, np.uint8))


# -- whole checkpoints


def bits(tensor: torch.Tensor) -> tuple[str, tuple[int, ...], bytes]:
    flat = tensor.contiguous().reshape(-1)
    raw = (torch.view_as_real(flat) if flat.is_complex() else flat).view(torch.uint8)
    return str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), raw.numpy().tobytes()


def a_state() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    state = {name: random_tensor(name, (5, 7)) for name in DTYPES}
    state |= {"scalar": torch.tensor(2.5), "empty": torch.zeros(0, 3), "zeros": torch.zeros(300, 300)}
    state |= {"subchunks": torch.randn(2048, 1024) * 0.02, "halves": (torch.randn(3000, 2048) * 0.02).bfloat16()}
    return state | {"padded": torch.randn(1001, 1030) * 0.02, "strided": torch.randn(64, 48).t()}


def stored_bytes(checkpoint: Path) -> int:
    """Return the size of all chunk objects but the tables'."""
    files = (path for path in checkpoint.rglob("c*") if path.is_file() and "@zarrckpt" not in path.parts)
    return sum(path.stat().st_size for path in files if path.name != "zarr.json")


BOX = [[100, 1900], [500, 530]]


@pytest.mark.parametrize("option", ["zstd", {"name": "blosc", "cname": "zstd", "clevel": 3}], ids=["zstd", "blosc"])
def test_every_reader_reads_every_tensor(tmp_path: Path, option: Any) -> None:
    state, url = a_state(), tmp_path / "ck"
    report = zarrckpt.save(
        {**state, "step": 3, "raw": b"x" * 99},
        url,
        options=zarrckpt.SaveOptions(compression=option, max_chunk_bytes=3 << 20),
    )
    assert report.nbytes == stored_bytes(url)
    assert report.nbytes < sum(tensor.nbytes for tensor in state.values())
    expected = {name: bits(tensor) for name, tensor in state.items()}

    reader = Reader(url)  # from the format page alone
    assert reader.arrays["subchunks"].sub is not None and reader.arrays["raw"].compressor is None
    assert math.prod(reader.arrays["padded"].counts) > 1
    for name, (dtype, shape, data) in expected.items():
        assert reader.tensor(name) == (dtype, list(shape), data), name
    assert reader.value("raw") == b"x" * 99

    where = {"url": str(url)}
    found = plain_readers.call(
        tmp_path,
        ("zarr_all", where),
        ("zarr_parts", {**where, "path": "subchunks", "boxes": [BOX]}),
        ("xarray_tree", where),
    )
    part = tuple(slice(*pair) for pair in BOX)
    assert {path: item for path, item in found[0].items() if path != "raw"} == expected
    assert found[1] == [bits(state["subchunks"][part])]
    assert {path: item for path, item in found[2].items() if path != "raw"} == expected

    for name in state:
        if name.startswith("float8") or name == "empty":
            continue
        spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{url}/{name}/"}}
        array = tensorstore.open(spec, read=True).result()
        assert as_bytes(array.read().result()) == expected[name][2], name
        if name == "subchunks":
            assert as_bytes(array[part].read().result()) == bits(state[name][part])[2]

    opened = zarrckpt.open(url)
    assert {name: as_bytes(np.asarray(opened[name][...])) for name in state} == {n: e[2] for n, e in expected.items()}
    assert as_bytes(opened["subchunks"][part]) == bits(state["subchunks"][part])[2]
    targets = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    zarrckpt.load({**targets, "step": 0, "raw": None}, url)
    assert {name: bits(tensor) for name, tensor in targets.items()} == expected


def test_compressible_data_is_stored_in_few_bytes(tmp_path: Path) -> None:
    state = {"w": torch.zeros(1024, 1024), "normal": (torch.randn(1024, 1024) * 0.02).bfloat16()}
    plain = zarrckpt.save(state, tmp_path / "plain").nbytes
    small = zarrckpt.save(
        {"w": state["w"]}, tmp_path / "zeros", options=zarrckpt.SaveOptions(compression="zstd")
    ).nbytes
    assert small < plain / 200
    assert zarrckpt.save(
        {"normal": state["normal"]}, tmp_path / "bf16", options=zarrckpt.SaveOptions(compression="blosc")
    ).nbytes < 0.8 * (2 << 20)


def test_overwriting_may_change_the_compression(tmp_path: Path) -> None:
    states = [{"w": torch.full((1000,), float(number))} for number in range(3)]
    for state, option in zip(states, [None, "zstd", None], strict=True):
        zarrckpt.save(state, tmp_path / "ck", overwrite=True, options=zarrckpt.SaveOptions(compression=option))
        target = {"w": torch.zeros(1000)}
        zarrckpt.load(target, tmp_path / "ck")
        assert torch.equal(target["w"], state["w"])
        assert Reader(tmp_path / "ck").tensor("w")[2] == bits(state["w"])[2]
    # The tables of the replaced saves were deleted with them.
    assert len(list((tmp_path / "ck").rglob("sizes"))) == 0


def test_compressed_checkpoints_work_on_s3(moto_bucket: S3Place, tmp_path: Path) -> None:
    """Through an object store's puts and ranged reads, by zarrckpt and by zarr-python."""
    url, options = moto_bucket.url("run"), moto_bucket.storage_options
    state = {"large": torch.randn(2048, 1024) * 0.02, "small": torch.randn(5)}
    zarrckpt.save(state, url, options=zarrckpt.SaveOptions(compression="blosc"), storage_options=options)
    target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    report = zarrckpt.load(target, url, storage_options=options)
    assert all(torch.equal(target[name], tensor) for name, tensor in state.items())
    assert 0 < report.nbytes < 0.95 * state["large"].nbytes
    part = tuple(slice(*pair) for pair in BOX)
    opened = zarrckpt.open(url, storage_options=options)["large"]
    assert as_bytes(opened[part]) == bits(state["large"][part])[2]
    found = plain_readers.call(tmp_path, ("zarr_all", {"url": url, "storage_options": moto_bucket.s3fs_options}))[0]
    assert found == {name: bits(tensor) for name, tensor in state.items()}


def test_portable_dtypes_are_compressed(tmp_path: Path) -> None:
    tensor = random_tensor("bfloat16", (300, 20))
    options = zarrckpt.SaveOptions(compression="blosc", portable_dtypes=True)
    zarrckpt.save({"w": tensor}, tmp_path / "ck", options=options)
    target = torch.zeros_like(tensor)
    zarrckpt.load({"w": target}, tmp_path / "ck")
    assert (
        bits(target)
        == bits(tensor)
        == bits(
            torch.from_numpy(zarrckpt.open(tmp_path / "ck")["w"][:])
            .view_as(tensor.view(torch.uint16))
            .view(torch.bfloat16)
        )
    )


def _across_ranks(folder: str) -> tuple[int, ...]:
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    full = {"large": torch.randn(1024, 1024) * 0.02, "small": torch.randn(50, 30), "odd": torch.randn(1025, 333)}
    state = {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in full.items()}
    state["plain"] = full["plain"] = torch.arange(3000.0)[None]
    saves = [
        zarrckpt.save(state, f"{folder}/merged", options=zarrckpt.SaveOptions(compression="blosc")),
        zarrckpt.save(
            state,
            f"{folder}/apart",
            options=zarrckpt.SaveOptions(compression="zstd", min_piece_bytes=0, max_inflight_bytes=1 << 20),
        ),
        zarrckpt.async_save(state, f"{folder}/async", options=zarrckpt.SaveOptions(compression="zstd")).result(),
    ]
    dcp.save(
        state,
        storage_writer=zarrckpt.ZarrStorageWriter(f"{folder}/dcp", options=zarrckpt.SaveOptions(compression="blosc")),
        no_dist=False,
    )
    loads = [("merged", Shard(1), True), ("merged", Replicate(), False), ("apart", Shard(1), False)]
    for where, placement, share in [
        *loads,
        ("apart", Replicate(), True),
        ("async", Shard(0), True),
        ("dcp", Shard(0), False),
    ]:
        target = {n: distribute_tensor(torch.zeros_like(t), mesh, [placement]) for n, t in full.items()}
        zarrckpt.load(
            target, f"{folder}/{where}", options=zarrckpt.LoadOptions(share_reads=share, max_inflight_bytes=8 << 20)
        )
        for name, tensor in full.items():
            assert torch.equal(target[name].full_tensor(), tensor), (where, placement, share, name)
    return tuple(report.nbytes for report in saves)


def test_ranks_compress_their_chunks(tmp_path: Path) -> None:
    """Merged and unmerged chunks, in the background and through DCP. Shared reads fetch the stored bytes."""
    sizes = run_ranks(_across_ranks, str(tmp_path), world_size=4)
    assert len({*sizes}) == 1
    for where in ("merged", "apart", "async", "dcp"):
        reader = Reader(tmp_path / where)
        assert all(array.compressor is not None for array in reader.arrays.values())
        assert reader.tensor("plain")[2] == bits(torch.arange(3000.0))[2]
    # The reports have the exact sizes of the objects, summed over the ranks.
    for where, nbytes in zip(("merged", "apart", "async"), sizes[0], strict=True):
        assert nbytes == stored_bytes(tmp_path / where)


def test_codecs_are_imported_only_for_compression(tmp_path: Path) -> None:
    code = """
    import sys, torch, zarrckpt
    state = {"w": torch.ones(3)}
    zarrckpt.save(state, "ck")
    zarrckpt.load(state, "ck")
    assert "numcodecs" not in sys.modules and "zarr" not in sys.modules
    """
    lines = "\n".join(line.strip() for line in code.strip().splitlines())
    subprocess.run([sys.executable, "-c", lines], cwd=tmp_path, check=True, timeout=120)
