"""Compressed tensors: zarr-python, TensorStore and xarray read them. Damage and hostile bytes are found."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numcodecs.blosc
import numcodecs.zstd
import numpy as np
import pytest
import torch
from harness.bits import bits
from harness.hostile import Forgery
from harness.internals import DTYPES, ArrayNode, Grid, by_name, parse_node
from harness.memory_peaks import traced_peak_of
from harness.merging import MergingOptions
from harness.page_reader import Reader
from harness.random_tensors import random_tensor
from harness.ranks import run_ranks
from zarr.codecs import BloscCodec, ZstdCodec

import zarrckpt
from zarrckpt import CorruptCheckpointError, UnsupportedFormatError
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
    forgery = Forgery(tmp_path / "ck")
    forgery.chunk("w", make(tensor.numpy().tobytes()))
    forgery.write()
    target = torch.zeros(N, dtype=torch.uint8)

    def read() -> None:
        with pytest.raises(CorruptCheckpointError, match=r"w/c\.0|sizes"):
            zarrckpt.load({"w": target}, tmp_path / "ck")
        with pytest.raises(CorruptCheckpointError, match=r"w/c\.0|sizes"):
            zarrckpt.open(tmp_path / "ck").read()
        with pytest.raises((CorruptCheckpointError, RuntimeError)):  # the latter is raised by numcodecs in zarr-python
            zarrckpt.open(tmp_path / "ck")["w"][:]

    assert traced_peak_of(read) < 16 << 20


def with_size(checkpoint: Path, size: int) -> None:
    """Put another stored size of the only subchunk, with valid checksums."""
    forgery = Forgery(checkpoint)
    forgery.table("sizes", 0, size)
    forgery.write()


@pytest.mark.parametrize("size", [0, 4, 2**32 - 1, max_compressed_bytes(4 * N) + 5])
def test_hostile_sizes_are_errors(tmp_path: Path, size: int) -> None:
    zarrckpt.save({"w": torch.randn(N)}, tmp_path / "ck", options=zarrckpt.SaveOptions(compression="zstd"))
    with_size(tmp_path / "ck", size)
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
    with_size(tmp_path / "ck", size)
    with pytest.raises(CorruptCheckpointError, match=r"w/c\.0"):
        zarrckpt.load({"w": torch.zeros(N)}, tmp_path / "ck")
    with pytest.raises(CorruptCheckpointError, match=r"w/c\.0"):
        zarrckpt.open(tmp_path / "ck")["w"][:]


def test_missing_sizes_of_subchunks_are_errors(tmp_path: Path) -> None:
    zarrckpt.save({"w": torch.randn(N)}, tmp_path / "ck", options=zarrckpt.SaveOptions(compression="zstd"))
    forgery = Forgery(tmp_path / "ck")
    forgery.own["tables"]["sizes"]["length"] = 0
    forgery.write()
    with pytest.raises(CorruptCheckpointError, match="'sizes' is 0, expected 1"):
        zarrckpt.open(tmp_path / "ck")
    del forgery.own["tables"]["sizes"]
    forgery.write()
    with pytest.raises(CorruptCheckpointError, match="sizes"):
        zarrckpt.open(tmp_path / "ck")


@pytest.mark.parametrize(
    ("codec", "name"),
    [
        ({"name": "gzip", "configuration": {"level": 5}}, "'gzip'"),
        ({"name": "zstd", "configuration": {"level": 3, "checksum": False, "window": 1}}, "'codecs'"),
        ({"name": "zstd", "configuration": {"level": 99, "checksum": False}}, "level must be from"),
        ({"name": "blosc"}, "'codecs'"),
        ("rot13", "codecs"),
    ],
)
@pytest.mark.parametrize("subchunks", [False, True])
def test_an_unknown_codec_is_refused_by_name(tmp_path: Path, codec: Any, name: str, subchunks: bool) -> None:
    tensor = torch.zeros((2048, 1024) if subchunks else (3, 4))
    zarrckpt.save({"w": tensor}, tmp_path / "ck", options=zarrckpt.SaveOptions(compression="zstd"))
    forgery = Forgery(tmp_path / "ck")
    codecs = forgery.nodes["w"]["codecs"]
    inner = codecs[0]["configuration"]["codecs"] if subchunks else codecs
    assert inner[1]["name"] == "zstd"
    inner[1] = codec
    forgery.write()
    with pytest.raises(UnsupportedFormatError, match=name):
        zarrckpt.open(tmp_path / "ck")


def test_data_too_long_for_a_codec_is_stored_uncompressed() -> None:
    """Only planned: no test machine has that much memory."""
    node = ArrayNode("a", Grid((2**31,), (2**31,)), by_name("uint8"), compression=Zstd())
    with pytest.raises(UnsupportedFormatError, match="too long to be compressed"):
        parse_node("a", node.document_bytes())
    most = Grid((MAX_BYTES,), (MAX_BYTES,))
    node = ArrayNode("a", most, by_name("uint8"), compression=Zstd())
    assert parse_node("a", node.document_bytes()) == node


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


@pytest.mark.parametrize(
    "options",
    [
        zarrckpt.SaveOptions(compression="zstd", max_chunk_bytes=3 << 20),
        zarrckpt.SaveOptions(compression={"name": "blosc", "cname": "zstd", "clevel": 3}, portable_dtypes=True),
    ],
    ids=["zstd", "blosc, portable"],
)
def test_every_tensor_is_compressed_and_read(tmp_path: Path, options: zarrckpt.SaveOptions) -> None:
    """``test_readers_table.py`` has the other readers."""
    state, url = a_state(), tmp_path / "ck"
    report = zarrckpt.save({**state, "step": 3, "raw": b"x" * 99}, url, options=options)
    assert report.nbytes == stored_bytes(url) < sum(tensor.nbytes for tensor in state.values())
    expected = {name: bits(tensor) for name, tensor in state.items()}
    reader = Reader(url)
    assert reader.layout("subchunks").sub != reader.layout("subchunks").chunk
    assert reader.layout("raw").compressor is None and reader.value("raw") == b"x" * 99
    assert options.portable_dtypes or math.prod(reader.layout("padded").counts) > 1
    opened, targets = zarrckpt.open(url), {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    zarrckpt.load({**targets, "step": 0, "raw": None}, url)
    for name, (dtype, shape, data) in expected.items():
        assert reader.tensor(name) == (dtype, list(shape), data), name
        assert np.ascontiguousarray(opened[name][...]).tobytes() == data and bits(targets[name]) == expected[name]
    part = opened["subchunks"][100:1900, 500:530]
    assert np.ascontiguousarray(part).tobytes() == bits(state["subchunks"][100:1900, 500:530])[2]


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
            options=MergingOptions(compression="zstd", min_piece_bytes=0, max_inflight_bytes=1 << 20),
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
        assert all(reader.layout(fqn).compressor is not None for fqn in reader.entries)
        assert reader.tensor("plain")[2] == bits(torch.arange(3000.0))[2]
    # The reports have the exact sizes of the objects, summed over the ranks.
    for where, nbytes in zip(("merged", "apart", "async"), sizes[0], strict=True):
        assert nbytes == stored_bytes(tmp_path / where)
