"""The records of archives: what other ZIP programs read, limits of 32 bits, what is refused, and equal bytes.

``test_hostile.py`` has the fuzzer. ``test_readers_table.py`` has other Zarr readers.
"""

from __future__ import annotations

import io
import os
import random
import re
import shutil
import struct
import subprocess
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness.bits import bits
from harness.hostile import join_directory, split_directory
from harness.internals import zip_format
from harness.page_reader import Reader
from harness.ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import zarrckpt
from zarrckpt import CorruptCheckpointError, ForeignObjectsError

FAST = zarrckpt.SaveOptions(durable=False)
W = torch.arange(24.0).reshape(6, 4)
STATE: dict[str, Any] = {"model": {"w": W, "b": torch.ones(3).bfloat16()}, "none": torch.zeros(0, 3), "raw": b"x" * 40}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    url = tmp_path_factory.mktemp("saved") / "x.zarr.zip"
    zarrckpt.save(STATE, url, options=FAST)
    return url.read_bytes()


@pytest.fixture
def url(tmp_path: Path, saved: bytes) -> Path:
    (tmp_path / "x.zarr.zip").write_bytes(saved)
    return tmp_path / "x.zarr.zip"


# -- other programs


def test_zip_programs_test_and_unpack_an_archive(url: Path, tmp_path: Path) -> None:
    """The unpacked files are a checkpoint in a folder. It lacks only the claim and the marker."""
    with zipfile.ZipFile(url) as file:
        assert file.testzip() is None
        assert all(info.compress_type == zipfile.ZIP_STORED for info in file.infolist())
        file.extractall(tmp_path / "folder")
    for program, word in (("unzip", "-t"), ("7zz", "t")):
        if shutil.which(program):
            done = subprocess.run([program, word, str(url)], capture_output=True, text=True, timeout=60, check=False)
            assert done.returncode == 0, done.stdout + done.stderr
    ckpt = zarrckpt.open(tmp_path / "folder")
    assert (ckpt["model.w"][...] == W.numpy()).all() and ckpt["raw"] == STATE["raw"]
    assert ckpt.verify() and ckpt.verify(quick=True)
    zarrckpt.save({"new": 1}, ckpt.url, overwrite=True, options=FAST)
    assert zarrckpt.open(ckpt.url).verify()
    zarrckpt.remove(ckpt.url)
    assert not (tmp_path / "folder").exists()


def test_the_code_on_the_format_page_reads_an_archive(url: Path) -> None:
    reader = Reader(url)
    assert all(reader.tensor(fqn)[2] == bits(tensor)[2] for fqn, tensor in (("model.w", W), ("none", STATE["none"])))


def test_data_of_entries_is_aligned(url: Path, saved: bytes) -> None:
    end = 0
    with zipfile.ZipFile(url) as file:
        assert file.infolist()[-1].filename == "zarr.json"
        for info in file.infolist():
            assert info.header_offset == end, "there are bytes between the entries"
            assert (info.extract_version, info.create_system, info.flag_bits) == (20, 3, 0x800)
            begin = info.header_offset + 30 + sum(struct.unpack_from("<2H", saved, info.header_offset + 26))
            end = begin + info.file_size
            assert begin % 64 == 0 and saved[begin:end] == file.read(info)


@pytest.mark.parametrize("size", [2**32 - 2, 2**32 - 1, 2**32 + 5])
def test_entries_around_4_gib_are_read(size: int, tmp_path: Path) -> None:
    """The data is a hole in the file. The entry after it has an offset of more than 4 GiB."""
    small, end = b"small", 0
    entries: dict[str, Any] = {}
    for key, nbytes, crc in (("m/large", size, 7), ("m/größe", 5, zip_format.add_crc32([small]))):
        entries[key] = zip_format.ZipEntry(crc, nbytes, end, begin := zip_format.data_offset(key, nbytes, end))
        end = begin + nbytes
    with open(tmp_path / "x.zip", "wb") as file:
        for key, entry in entries.items():
            file.seek(entry.header_offset)
            file.write(zip_format.encode_header(key, entry))
        file.write(small)
        assert file.tell() == end
        file.write(zip_format.encode_directory(entries, end))
    with zipfile.ZipFile(tmp_path / "x.zip") as archive:
        large, other = archive.infolist()
        assert (large.filename, large.file_size, large.compress_size, large.CRC) == ("m/large", size, size, 7)
        assert (other.filename, other.header_offset) == ("m/größe", entries["m/größe"].header_offset)
        assert archive.read(other) == small and archive.open(large).read(10) == bytes(10)
    with open(tmp_path / "x.zip", "rb") as file:
        assert zip_format.read_directory(file, "x")[0] == entries


@pytest.mark.parametrize("count", [65_534, 65_535])
def test_archives_of_65535_entries_are_read(count: int) -> None:
    entries, parts, end = {}, [], 0
    for number in range(count):
        entry = zip_format.ZipEntry(0, 0, end, zip_format.data_offset(key := f"{number}", 0, end))
        parts.append(zip_format.encode_header(key, entry))
        entries[key], end = entry, entry.data_offset
    stored = b"".join(parts) + zip_format.encode_directory(entries, end)
    with zipfile.ZipFile(io.BytesIO(stored)) as archive:
        assert archive.namelist() == [*entries] and archive.read(f"{count - 1}") == b""
    assert zip_format.read_directory(io.BytesIO(stored), "x")[0] == entries


# -- damage


def test_verify_finds_changed_bytes_everywhere(url: Path, saved: bytes) -> None:
    """Of each kind of record and of data, some bytes. A campaign by hand changed every byte of an archive."""
    rand = random.Random(4)
    places = [*range(0, 14), *range(len(saved) - 22, len(saved)), *rand.sample(range(len(saved)), 120)]
    for place in places:
        changed = bytearray(saved)
        changed[place] ^= 1 << rand.randrange(8)
        url.write_bytes(changed)
        with pytest.raises(zarrckpt.CheckpointError):
            zarrckpt.open(url).verify().raise_if_damaged()


def test_verify_reads_the_records_again(url: Path, saved: bytes) -> None:
    """Of a checkpoint that was opened before the damage."""
    before, _ = split_directory(saved)
    for place in (30, len(before) + 50, len(saved) - 3):
        url.write_bytes(saved)
        ckpt = zarrckpt.open(url)
        assert ckpt.verify()
        url.write_bytes(saved[:place] + bytes([saved[place] ^ 1]) + saved[place + 1 :])
        assert ckpt.verify().damages
    assert [damage.key for damage in ckpt.verify(quick=True).damages] == [str(url)]
    url.unlink()
    with pytest.raises(zarrckpt.CheckpointRemovedError):
        ckpt.verify()


def test_verify_compares_the_crc32_of_the_zip_format(url: Path, saved: bytes) -> None:
    """Other programs compare only this checksum, so it is damage if both records have a wrong one."""
    before, records = split_directory(saved)
    (number,) = (n for n, record in enumerate(records) if record[46:] == b"model/w/c.0.0")
    header = int.from_bytes(records[number][42:46], "little")
    changed = bytearray(before)
    changed[header + 14] ^= 1
    records[number] = records[number][:16] + changed[header + 14 : header + 18] + records[number][20:]
    url.write_bytes(join_directory(bytes(changed), records))
    (damage,) = zarrckpt.open(url).verify().damages
    assert damage.key == "model/w/c.0.0" and "CRC-32" in damage.reason


def test_verify_finds_entries_of_no_checkpoint(url: Path, saved: bytes) -> None:
    with zipfile.ZipFile(url, "a") as archive:
        archive.writestr("model/later/c.0", b"12345678")
    assert (zarrckpt.open(url)["model.w"][...] == W.numpy()).all()
    assert "model/later/c.0" in {damage.key for damage in zarrckpt.open(url).verify().damages}
    for number in range(1, 12):
        url.write_bytes(without(number)(saved))
        assert not zarrckpt.open(url).verify(), "an entry is missing"


def repack(source: Path, target: Path, **options: Any) -> None:
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w", **options) as new:
        new.comment = b"packed again"
        for folder in sorted({name.rpartition("/")[0] for name in old.namelist()} - {""}):
            new.mkdir(folder)
        for name in sorted(old.namelist()):
            new.writestr(name, old.read(name))


class _Pipe(io.BytesIO):
    """A file without a position, so that zipfile puts the numbers of an entry behind its data."""

    def tell(self) -> int:
        raise AttributeError

    def seekable(self) -> bool:
        return False


def zip_r(source: Path, target: Path) -> None:
    with zipfile.ZipFile(source) as old:
        old.extractall(target.parent / "unpacked")
    subprocess.run(["zip", "-q", "-0", "-r", str(target), "."], cwd=target.parent / "unpacked", check=True)


def stream(source: Path, target: Path) -> None:
    pipe = _Pipe()
    repack(source, pipe)  # type: ignore[arg-type]
    target.write_bytes(pipe.getvalue())


@pytest.mark.parametrize("pack", [repack, stream, zip_r])
def test_an_archive_of_another_program_is_whole(pack: Callable[[Path, Path], None], url: Path, tmp_path: Path) -> None:
    """With entries of folders, a comment, or other fields. The copy is like a save."""
    if pack is zip_r and not shutil.which("zip"):
        pytest.skip("zip is not installed")
    pack(url, tmp_path / "again.zarr.zip")
    ckpt = zarrckpt.open(tmp_path / "again.zarr.zip")
    assert (ckpt["model.w"][...] == W.numpy()).all() and ckpt.verify(quick=True) and ckpt.verify().damages == ()
    target = {"model": {"w": torch.zeros(6, 4), "b": torch.zeros(3).bfloat16()}}
    zarrckpt.load(target, ckpt.url, keys=["model"])
    assert torch.equal(target["model"]["w"], W)
    zarrckpt.copy(ckpt.url, tmp_path / "copy.zarr.zip")
    assert zarrckpt.open(tmp_path / "copy.zarr.zip").verify()
    changed = bytearray((tmp_path / "again.zarr.zip").read_bytes())
    changed[changed.index(W.numpy().tobytes()) + 5] ^= 1
    (tmp_path / "again.zarr.zip").write_bytes(changed)
    assert "model/w/c.0.0" in {damage.key for damage in zarrckpt.open(ckpt.url).verify().damages}


def two_contents(saved: bytes, other: bytes) -> bytes:
    """Return an archive in which the data of ``other`` are between the headers and the data of ``saved``."""
    out, records, ends = b"", b"", zipfile.ZipFile(io.BytesIO(other))
    with zipfile.ZipFile(io.BytesIO(saved)) as archive:
        for info in archive.infolist():
            data, name = archive.read(info), info.filename.encode()
            first = ends.read(info.filename) if info.filename.startswith("model/w/c") else b""
            numbers = (zlib.crc32(first or data), len(data), len(data), len(name), 0)
            fields = (20, 2048, 0, 0, 33, *numbers)
            end = (0, 0, 0, 0o100644 << 16, len(out))
            records += struct.pack("<4s6H3I5H2I", b"PK\1\2", 788, *fields, *end) + name
            out += struct.pack("<4s5H3I2H", b"PK\3\4", *fields) + name + first + data
        count = len(archive.namelist())
    return out + records + struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, count, count, len(records), len(out), 0)


def test_an_archive_has_one_content_for_all_readers(url: Path, saved: bytes, tmp_path: Path) -> None:
    zarrckpt.save({**STATE, "model": {"w": W + 1, "b": torch.ones(3).bfloat16()}}, tmp_path / "b.zarr.zip")
    url.write_bytes(two_contents(saved, (tmp_path / "b.zarr.zip").read_bytes()))
    with zipfile.ZipFile(url) as archive:
        assert archive.testzip() is None and archive.read("model/w/c.0.0")[:96] == (W + 1).numpy().tobytes()
    with pytest.raises(CorruptCheckpointError):
        zarrckpt.load({"model": {"w": torch.zeros(6, 4)}}, url, keys=["model.w"])


def test_a_second_directory_behind_zip64_records_is_refused(url: Path, saved: bytes) -> None:
    """zipfile reads the directory of the ZIP64 records, and other programs read that of the end record."""
    size, begin = struct.unpack("<2I", saved[-10:-2])
    directory, end, (count,) = saved[begin : begin + size], saved[-22:], struct.unpack("<H", saved[-12:-10])
    numbers = (44, 45, 45, 0, 0, count, count, size, begin + size)
    records = struct.pack("<4sQ2H2I4Q", b"PK\6\6", *numbers) + struct.pack("<4sIQI", b"PK\6\7", 0, begin + 2 * size, 1)
    url.write_bytes(saved[:-22] + directory + records + end)
    assert zipfile.ZipFile(url).testzip() is None
    with pytest.raises(CorruptCheckpointError, match="different directories"):
        zarrckpt.open(url)


@pytest.mark.parametrize("place", [6, 8, 14, 18, 22, 26, 30])
def test_a_local_header_of_another_entry_is_refused(place: int, url: Path, saved: bytes) -> None:
    """Flags, method, CRC-32, sizes, length of the name, name. Programs that unpack a stream use only this header."""
    with zipfile.ZipFile(url) as archive:
        begin = archive.getinfo("model/w/c.0.0").header_offset + place
    url.write_bytes(saved[:begin] + bytes([saved[begin] ^ 1]) + saved[begin + 1 :])
    with pytest.raises(CorruptCheckpointError, match=r"local header|overlaps"):
        zarrckpt.open(url)["model.w"][...]


# -- refusals


def patch(record: int, place: int, change: bytes) -> Callable[[bytes], bytes]:
    """Return a change of a record of the central directory."""

    def work(data: bytes) -> bytes:
        before, records = split_directory(data)
        one = records[record]
        records[record] = one[:place] + change + one[place + len(change) :]
        return join_directory(before, records)

    return work


def rename(name: bytes) -> Callable[[bytes], bytes]:
    def work(data: bytes) -> bytes:
        before, records = split_directory(data)
        one = records[0]
        records[0] = one[:28] + struct.pack("<H", len(name)) + one[30:46] + name
        return join_directory(before, records)

    return work


def without(record: int) -> Callable[[bytes], bytes]:
    def work(data: bytes) -> bytes:
        before, records = split_directory(data)
        del records[record]
        return join_directory(before, records)

    return work


def count(change: int) -> Callable[[bytes], bytes]:
    """Return a change of the number of entries in the end record."""

    def work(data: bytes) -> bytes:
        number = int.from_bytes(data[-14:-12], "little") + change
        return data[:-14] + struct.pack("<2H", number, number) + data[-10:]

    return work


def twice(data: bytes) -> bytes:
    before, records = split_directory(data)
    return join_directory(before, [*records, records[0]])


def forged_zip64_end(data: bytes) -> bytes:
    """Numbers of which Python's zipfile raises a struct.error or a ValueError."""
    end = struct.pack("<4sQ2H2I4Q", b"PK\6\6", 44, 3 << 8 | 45, 45, 0, 0, 1, 1, 2**63, 2**63)
    end += struct.pack("<4sIQI", b"PK\6\7", 0, 0, 1)
    return data + end + struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, 1, 1, 2**32 - 1, 2**32 - 1, 0)


def second_name(data: bytes) -> bytes:
    """Info-ZIP's field with a Unicode name, which some programs use instead of the entry's name."""
    before, records = split_directory(data)
    name = records[0][46:]
    extra = struct.pack("<2HBI", 0x7075, 5 + 5, 1, zlib.crc32(name)) + b"other"
    records[0] = records[0][:30] + struct.pack("<H", len(extra)) + records[0][32:] + extra
    return join_directory(before, records)


NAMES = (b"/etc/passwd", b"../x", b"a/../b", b"./a", b"a//b", b"later/", b"a\\b", b"C:x", b"a\0b", b"\xff", b"")
REFUSED: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "prepended bytes": (lambda data: b"#!/bin/sh\n" + data, "precede"),
    "a first entry elsewhere": (without(0), "precede"),
    "appended bytes": (lambda data: data + b"\0", "appended"),
    "a cut file": (lambda data: data[:-1], "cut"),
    "an empty file": (lambda data: b"", "cut"),
    "an overlap": (patch(1, 42, bytes(4)), "overlaps"),
    "a size beyond the file": (patch(0, 20, b"\xf0\xff\xff\xff" * 2), "overlaps"),
    "an entry twice": (twice, "overlaps"),
    "a compressed entry": (patch(0, 10, b"\x08\0"), "compressed"),
    "an encrypted entry": (patch(0, 8, b"\1\x08"), "encrypted"),
    "a link": (patch(0, 40, b"\xff\xa1"), "link"),
    "sizes that differ": (patch(0, 20, b"\1\0\0\0"), "compressed"),
    "another disk": (patch(0, 34, b"\1\0"), "split"),
    "no ZIP64 field": (patch(0, 42, b"\xff\xff\xff\xff"), "is damaged"),
    "too many entries": (count(1000), "number of entries"),
    "an entry more": (count(1), "number of entries"),
    "an entry less": (count(-1), "number of entries"),
    "no root document": (without(-1), "zarr.json"),
    "a forged ZIP64 end": (forged_zip64_end, "cut"),
    "a name in two encodings": (second_name, "UTF-8"),
    **{f"the name {name!r}": (rename(name), "is damaged") for name in NAMES},
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_archive_is_refused_with(name: str, url: Path, saved: bytes) -> None:
    change, message = REFUSED[name]
    url.write_bytes(change(saved))
    with pytest.raises(CorruptCheckpointError, match=re.escape(message)):
        zarrckpt.open(url)


def test_compressed_archives_of_others_are_kept(url: Path, tmp_path: Path) -> None:
    """They can be neither read nor replaced."""
    repack(url, other := tmp_path / "other.zarr.zip", compression=zipfile.ZIP_DEFLATED)
    before = other.read_bytes()
    with pytest.raises(CorruptCheckpointError, match="Unpack it"):
        zarrckpt.open(other)
    with pytest.raises(ForeignObjectsError, match="no zarrckpt save wrote"):
        zarrckpt.save(STATE, other, overwrite=True, options=FAST)
    assert other.read_bytes() == before and os.listdir(tmp_path).count("@other.zarr.zip") == 0


# -- equal bytes


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def mixed() -> dict[str, Any]:
    """Return a state with chunks, subchunks, values and blobs of several encodings."""
    layers = {f"{n}.w": noise(40, 30) + n for n in range(20)}
    values = {"step": 3, "raw": b"x" * 999, "npy": np.arange(50), "json": "y" * 70000, "lr": 0.1}
    return {**layers, "large": noise(1100, 600).bfloat16(), **values}


def neutral(url: Path) -> list[tuple[Any, ...]]:
    """Return the entries of an archive and their places, without what identifies the save."""
    ckpt = zarrckpt.open(url)
    assert ckpt.verify()
    variable = {ckpt.save_id.encode(): b"id", ckpt.info.created.encode(): b"time"}
    found: list[tuple[Any, ...]] = []
    with zipfile.ZipFile(url) as archive:
        for info in archive.infolist():
            name, data = info.filename.replace(ckpt.save_id, "id"), archive.read(info)
            crc = info.CRC if name != "zarr.json" else None
            for text, word in variable.items():
                data = data.replace(text, word)
            found.append((name, info.header_offset, crc, re.sub(rb'"crc32c":"[0-9a-f]{8}"', b"", data)))
    return found


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_equal_states_give_equal_archives(compression: str | None, tmp_path: Path) -> None:
    found = []
    for number, threads in enumerate((1, 8, 8)):
        options = zarrckpt.SaveOptions(durable=False, compression=compression, concurrency=threads)
        zarrckpt.save(mixed(), tmp_path / f"{number}.zarr.zip", options=options)
        found.append(neutral(tmp_path / f"{number}.zarr.zip"))
    assert found[0] == found[1] == found[2]


def save_sharded(folder: str) -> None:
    mesh = init_device_mesh("cpu", (2,))
    for compression in (None, "zstd"):
        for number in range(2):
            state = {name: value for name, value in mixed().items() if not isinstance(value, torch.Tensor)}
            for name, tensor in mixed().items():
                if isinstance(tensor, torch.Tensor):
                    state[name] = distribute_tensor(tensor, mesh, [Shard(0)])
            options = zarrckpt.SaveOptions(durable=False, compression=compression)
            zarrckpt.save(state, f"{folder}/{compression}-{number}.zarr.zip", options=options)


def test_equal_states_of_two_ranks_give_equal_archives(tmp_path: Path) -> None:
    run_ranks(save_sharded, str(tmp_path), world_size=2)
    for compression in (None, "zstd"):
        one, other = (neutral(tmp_path / f"{compression}-{number}.zarr.zip") for number in range(2))
        assert one == other
