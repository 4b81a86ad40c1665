"""Saves with a base: unchanged chunks are linked or copied, all others are written, and nothing is lost.

``tests/store/test_store_reuse.py`` has the links and copies themselves.
"""

from __future__ import annotations

import dataclasses
import grp
import json
import os
import pwd
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import zarr
from harness.faulty_store import FAIL, Call, Fault, FaultyStore
from harness.internals import LocalStore, open_store
from harness.memory_peaks import traced_peak_of
from harness.merging import MergingOptions
from harness.random_tensors import random_tensor
from harness.ranks import all_ranks_raise, run_ranks
from harness.s3_server import S3Server
from harness.shared_chunks import not_sharing_small_chunks, sharing_small_chunks
from harness.store_servers import S3Place
from harness.torch_internals import RankSave
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import zarrckpt
from zarrckpt._format import chunk_codec
from zarrckpt._format.crc32c import crc32c
from zarrckpt._ops import verify
from zarrckpt._plan import chunking
from zarrckpt._save import reuse, staging
from zarrckpt._store._linkable import LinkableFile

State = dict[str, Any]

ON = zarrckpt.SaveOptions(reuse="on", durable=False, max_chunk_bytes=1 << 12)
MERGING = MergingOptions(reuse="on", durable=False, max_chunk_bytes=1 << 12)


@pytest.fixture(autouse=True)
def _share_small_chunks() -> Iterator[None]:
    with sharing_small_chunks():
        yield


# -- any change of any chunk

READ_BY_ZARR = ("float32", "float64", "int16", "uint8", "bool", "complex64")
DTYPES = (*READ_BY_ZARR, "bfloat16", "float8_e4m3fn")
SHAPES = st.lists(st.integers(0, 9), max_size=3).map(tuple)
BLOBS = st.binary(min_size=1, max_size=40)


@contextmanager
def small_subchunks() -> Iterator[None]:
    """Give chunks of a few bytes subchunks and padding."""
    sizes = {"SUBCHUNK_ABOVE": 60, "SUBCHUNK_BYTES": 30, "USUAL_SUBCHUNK": (20, 80), "ANY_SUBCHUNK": (4, 160)}
    chunking._subchunks.cache_clear()
    with patch.multiple(chunking, **sizes, _ODD_GRID_MIN_CHUNK=20, _PADDING=4):
        yield
    chunking._subchunks.cache_clear()


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    torch.manual_seed(draw(st.integers(0, 1 << 20)))
    return random_tensor(draw(st.sampled_from(DTYPES)), draw(SHAPES))


@st.composite
def changed(draw: st.DrawFn, before: torch.Tensor) -> torch.Tensor:
    """Return a tensor with a few flipped bits, an equal one, or another one."""
    if draw(st.integers(0, 7)) == 0:
        return draw(tensors())
    after = before.clone()
    raw = after.reshape(-1).view(torch.uint8)
    if len(raw):
        size = 1 if after.dtype == torch.bool else 8
        for bit in draw(st.lists(st.integers(0, len(raw) * size - 1), max_size=4)):
            raw[bit // size] ^= 1 << bit % size
    return after


@st.composite
def following(draw: st.DrawFn, before: State) -> State:
    """Return the next state of a training: entries change, stay, come and go."""
    kept = {name: value for name, value in before.items() if name == "step" or draw(st.integers(0, 7))}
    after: State = {}
    for name, value in kept.items():
        if isinstance(value, torch.Tensor):
            after[name] = draw(changed(value))
        else:
            after[name] = value if draw(st.booleans()) else draw(BLOBS)
    if draw(st.booleans()):
        after["new"] = draw(tensors())
    return after


@st.composite
def trainings(draw: st.DrawFn) -> list[State]:
    first: State = {f"t{number}": draw(tensors()) for number in range(draw(st.integers(1, 4)))}
    first |= {"large": random_tensor("float32", (37, 13)), "blob": draw(BLOBS), "step": b"1" * 3}
    second = draw(following(first))
    return [first, second, draw(following(second))]


def raw_bytes(value: Any) -> Any:
    """Return the dtype, shape and bits of a tensor, or any other value unchanged."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.dtype, value.shape, value.contiguous().reshape(-1).view(torch.uint8).tolist()


def check_content(url: Any, state: State, **options: Any) -> None:
    """Check that a checkpoint is undamaged and has exactly this state."""
    found: State = {}
    for name, value in state.items():
        found[name] = torch.zeros_like(value) if isinstance(value, torch.Tensor) else None
    zarrckpt.load(found, url, **options)
    assert {name: raw_bytes(value) for name, value in found.items()} == {
        name: raw_bytes(value) for name, value in state.items()
    }
    checkpoint = zarrckpt.open(url, **options)
    checkpoint.verify().raise_if_damaged()
    assert {*checkpoint} == {*state}


def chunk_files(url: Path) -> dict[str, Path]:
    """Return the files of all chunks by key, without those of tables."""
    tree = url / zarrckpt.open(url).info.tree
    files = (path for path in tree.rglob("c*") if path.is_file() and path.name != "zarr.json")
    found = {str(path.relative_to(tree)): path for path in files}
    return {key: path for key, path in found.items() if not key.startswith("@")}


def linked(url: Path, base: Path) -> set[str]:
    """Return the keys of chunks that are the same file in both checkpoints."""
    old, new = chunk_files(base), chunk_files(url)
    return {key for key in old.keys() & new.keys() if new[key].samefile(old[key])}


def equal_chunks(url: Path, base: Path) -> set[str]:
    """Return the keys of chunks of equal bytes in arrays of equal documents."""
    old, new = chunk_files(base), chunk_files(url)

    def equal(key: str) -> bool:
        documents = [files[key].parent.joinpath("zarr.json").read_bytes() for files in (old, new)]
        return documents[0] == documents[1] and old[key].read_bytes() == new[key].read_bytes()

    return {key for key in old.keys() & new.keys() if equal(key)}


def check_by_zarr(url: Path, state: State) -> None:
    group = zarr.open_group(url, mode="r", zarr_format=3)
    for name, value in state.items():
        if isinstance(value, torch.Tensor) and str(value.dtype).removeprefix("torch.") in READ_BY_ZARR:
            found: Any = group[name]
            assert np.asarray(found[...]).tobytes() == value.numpy().tobytes()


@settings(max_examples=15)
@given(trainings(), st.sampled_from((64, 200, 1 << 20)), st.sampled_from((None, None, "zstd", "blosc")))
def test_exactly_the_unchanged_chunks_are_reused(states: list[State], limit: int, compression: Any) -> None:
    options = dataclasses.replace(ON, max_chunk_bytes=limit, compression=compression)
    with tempfile.TemporaryDirectory() as folder, small_subchunks():
        base = None
        for number, state in enumerate(states):
            url = Path(folder, str(number))
            report = zarrckpt.save(state, url, base=base, options=options)
            check_content(url, state)
            check_by_zarr(url, state)
            if base is not None:
                keys = linked(url, base)
                assert keys == equal_chunks(url, base)
                assert report.linked_bytes == sum(chunk_files(url)[key].stat().st_size for key in keys)
                assert report.sent_bytes == report.nbytes - report.linked_bytes and report.copied_bytes == 0
                assert report.base == (str(base) if keys else "")
                check_content(base, states[number - 1])
            base = url


# -- bases that agree in part or not at all


def frozen_and(number: int) -> State:
    """Return 4 chunks that never change, and one more, a value and a blob that show their number."""
    frozen = torch.arange(4096, dtype=torch.float32).reshape(16, 256)
    return {"frozen": frozen, "adapter": torch.full((8,), float(number)), "step": number, "blob": b"%d" % number * 50}


FROZEN_BYTES = 4 * (4096 + 4)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """Return a base in a local folder."""
    zarrckpt.save(frozen_and(1), tmp_path / "base", options=ON)
    return tmp_path / "base"


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_only_changed_chunks_are_written(base: Path, tmp_path: Path) -> None:
    before = contents(base)
    report = zarrckpt.save(frozen_and(2), tmp_path / "new", base=base)
    assert (report.linked_bytes, report.base) == (FROZEN_BYTES, str(base)), "the grid of the base is kept"
    report = zarrckpt.save(frozen_and(3), tmp_path / "newer", base=base, options=ON)
    assert (report.linked_bytes, report.base) == (FROZEN_BYTES, str(base))
    check_content(tmp_path / "newer", frozen_and(3))
    assert contents(base) == before
    zarrckpt.remove(base)
    check_content(tmp_path / "newer", frozen_and(3))


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda state: {**state, "frozen": state["frozen"].view(torch.int32)}, id="dtype"),
        pytest.param(lambda state: {**state, "frozen": state["frozen"].reshape(256, 16)}, id="shape"),
        pytest.param(lambda state: {**state, "frozen": state["frozen"][:9]}, id="fewer rows"),
        pytest.param(lambda state: {**state, "frozen": b"".join([state["frozen"].numpy().tobytes()])}, id="blob"),
        pytest.param(lambda state: {"deep": state}, id="name"),
    ],
)
def test_other_arrays_are_written(change: Callable[[State], State], base: Path, tmp_path: Path) -> None:
    state = change(frozen_and(1))
    report = zarrckpt.save(state, tmp_path / "new", base=base, options=ON)
    assert not any(key.startswith(("frozen", "deep")) for key in linked(tmp_path / "new", base))
    assert report.linked_bytes < FROZEN_BYTES
    if "deep" not in state:
        check_content(tmp_path / "new", state)
    zarrckpt.open(tmp_path / "new").verify().raise_if_damaged()


@pytest.mark.parametrize("changes", [{"compression": "zstd"}, {"max_chunk_bytes": 1 << 11}])
def test_a_base_of_other_options_is_not_used(changes: dict[str, Any], base: Path, tmp_path: Path) -> None:
    options = dataclasses.replace(ON, **changes)
    report = zarrckpt.save(frozen_and(1), tmp_path / "new", base=base, options=options)
    assert not any(key.startswith("frozen") for key in linked(tmp_path / "new", base))
    check_content(tmp_path / "new", frozen_and(1))
    again = zarrckpt.save(frozen_and(1), tmp_path / "again", base=tmp_path / "new", options=options)
    assert again.linked_bytes == again.nbytes == report.nbytes


def test_portable_and_real_dtypes_are_not_mixed(tmp_path: Path) -> None:
    state = {"w": torch.arange(64, dtype=torch.bfloat16)}
    portable = dataclasses.replace(ON, portable_dtypes=True)
    zarrckpt.save(state, tmp_path / "base", options=portable)
    assert zarrckpt.save(state, tmp_path / "new", base=tmp_path / "base", options=ON).linked_bytes == 0
    report = zarrckpt.save(state, tmp_path / "same", base=tmp_path / "base", options=portable)
    assert report.linked_bytes == report.nbytes
    check_content(tmp_path / "same", state)


def _damage_root(base: Path) -> None:
    (base / "zarr.json").write_bytes((base / "zarr.json").read_bytes()[:-10])


def _pack(base: Path) -> None:
    zarrckpt.copy(base, f"{base}.zarr.zip")


@pytest.mark.parametrize("prepare", [_damage_root, zarrckpt.remove, _pack], ids=lambda prepare: prepare.__name__)
def test_without_a_usable_base_everything_is_written(
    prepare: Callable[[Path], object], base: Path, tmp_path: Path
) -> None:
    prepare(base)
    given = f"{base}.zarr.zip" if prepare is _pack else base
    report = zarrckpt.save(frozen_and(2), tmp_path / "new", base=given, options=ON)
    assert (report.linked_bytes, report.base) == (0, "") and str(given) in report.base_problem
    check_content(tmp_path / "new", frozen_and(2))


class Bucket:
    """A bucket with a base."""

    def __init__(self, place: S3Place) -> None:
        self.place = place
        self.options = {"storage_options": place.storage_options}
        self.save(1)

    def url(self, number: int) -> str:
        return self.place.url(str(number))

    def save(self, number: int, base: int | None = None, **options: Any) -> zarrckpt.SaveReport:
        given = None if base is None else self.url(base)
        return zarrckpt.save(
            frozen_and(number), self.url(number), base=given, **self.options, options=dataclasses.replace(ON, **options)
        )

    def change(self, part: str, change: Callable[[bytes], bytes | None]) -> None:
        """Replace or delete the object of the base with a key, or whose key contains a text."""
        client = self.place.client()
        keys = [item["Key"] for item in client.list_objects_v2(Bucket=self.place.bucket)["Contents"]]
        (key,) = [part] if part in keys else (key for key in keys if key.startswith("1/") and part in key)
        data = change(client.get_object(Bucket=self.place.bucket, Key=key)["Body"].read())
        if data is None:
            client.delete_object(Bucket=self.place.bucket, Key=key)
        else:
            client.put_object(Bucket=self.place.bucket, Key=key, Body=data)


@pytest.fixture
def bucket(s3_stub: S3Server) -> Bucket:
    return Bucket(s3_stub.bucket())


def flipped(data: bytes) -> bytes:
    return bytes([data[0] ^ 1]) + data[1:]


@pytest.mark.parametrize(("part", "change"), [("digests/c.0", flipped), ("checksums/c.0", lambda data: None)])
def test_a_base_with_damaged_tables_is_not_copied(
    part: str, change: Callable[[bytes], bytes | None], bucket: Bucket
) -> None:
    bucket.change(part, change)
    report = bucket.save(2, base=1)
    assert (report.copied_bytes, report.base) == (0, "") and "table" in report.base_problem
    check_content(bucket.url(2), frozen_and(2), **bucket.options)


def test_a_base_without_digests_is_named_and_its_successor_reused(
    bucket: Bucket, caplog: pytest.LogCaptureFixture
) -> None:
    bucket.save(2, reuse="off")
    caplog.clear()
    report = bucket.save(3, base=2, reuse="auto")
    assert (report.copied_bytes, report.base) == (0, "")
    (record,) = caplog.records
    assert record.levelname == "WARNING" and record.getMessage() == report.base_problem
    assert bucket.url(2) in report.base_problem and "reuse='on'" in report.base_problem
    report = bucket.save(4, base=3, reuse="auto")
    assert (report.copied_bytes, report.base, report.base_problem) == (FROZEN_BYTES, bucket.url(3), "")
    check_content(bucket.url(4), frozen_and(4), **bucket.options)


@pytest.mark.parametrize("equal", ["crc32c", "crc64"])
def test_both_checks_of_a_chunk_must_agree(equal: str, bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (chunk_codec, verify):
        monkeypatch.setattr(module, "crc64", lambda data, before=0: 7)
    bucket.save(2)
    state, url = frozen_and(2), bucket.url(3)
    if equal == "crc32c":
        monkeypatch.undo()
    else:
        state = {"frozen": state["frozen"] + 1, "adapter": state["adapter"] + 1, "step": 1, "blob": b"3" * 50}
    report = zarrckpt.save(state, url, base=bucket.url(2), **bucket.options, options=ON)
    assert report.copied_bytes == 0
    check_content(url, state, **bucket.options)


@pytest.mark.parametrize("size", [0, 100, 5000])
def test_a_base_chunk_of_another_size_is_not_reused(size: int, base: Path, tmp_path: Path) -> None:
    chunk = base / "frozen" / "c.0.0"
    chunk.write_bytes(b"\0" * size)
    report = zarrckpt.save(frozen_and(2), tmp_path / "new", base=base, options=ON)
    assert report.linked_bytes == FROZEN_BYTES * 3 // 4
    check_content(tmp_path / "new", frozen_and(2))


def test_removed_base_chunks_are_written(base: Path, tmp_path: Path) -> None:
    for number in (1, 3):
        (base / "frozen" / f"c.{number}.0").unlink()
    assert zarrckpt.save(frozen_and(2), tmp_path / "new", base=base, options=ON).linked_bytes == FROZEN_BYTES // 2
    check_content(tmp_path / "new", frozen_and(2))


def test_an_overwrite_may_reuse_what_it_replaces(base: Path) -> None:
    for number in (2, 3):
        report = zarrckpt.save(frozen_and(number), base, base=base, overwrite=True, options=ON)
        assert report.linked_bytes == FROZEN_BYTES
        check_content(base, frozen_and(number))
    zarrckpt.recover(base, stopped=True)
    check_content(base, frozen_and(3))
    zarrckpt.remove(base)
    assert not base.exists()


# -- local files: what is linked was compared


def _flip_bits(chunk: Path) -> None:
    data = bytearray(chunk.read_bytes())
    data[0] ^= 1
    data[-1] ^= 1
    chunk.write_bytes(data)


def _link_elsewhere(chunk: Path) -> None:
    chunk.rename(f"{chunk}-moved")
    chunk.symlink_to(f"{chunk}-moved")


def _make_private(chunk: Path) -> None:
    chunk.chmod(0o600)


def _let_others_write(chunk: Path) -> None:
    chunk.chmod(0o646)


def _forge(chunk: Path) -> None:
    chunk.write_bytes(with_equal_checksum(chunk.read_bytes()))


@pytest.mark.parametrize("last", [0, 2])
@pytest.mark.parametrize(
    "prepare",
    [_forge, _flip_bits, _link_elsewhere, _make_private, _let_others_write, Path.unlink],
    ids=lambda prepare: prepare.__name__,
)
def test_files_of_other_bytes_or_rights_are_written(
    prepare: Callable[[Path], object], last: int, base: Path, tmp_path: Path
) -> None:
    for number in range(last, 4):
        prepare(base / "frozen" / f"c.{number}.0")
    report = zarrckpt.save(frozen_and(2), tmp_path / "new", base=base, options=ON)
    assert report.linked_bytes == last * FROZEN_BYTES // 4
    check_content(tmp_path / "new", frozen_and(2))
    assert all(not path.is_symlink() and path.stat().st_nlink <= 2 for path in chunk_files(tmp_path / "new").values())


@pytest.mark.parametrize(("before", "after"), [(0o077, 0o022), (0o022, 0o077), (0o022, 0o002), (0o002, 0o022)])
def test_linked_files_have_the_mode_of_new_ones(before: int, after: int, tmp_path: Path) -> None:
    own = os.umask(before)
    try:
        zarrckpt.save(frozen_and(1), tmp_path / "base", options=ON)
        os.umask(after)
        reports = [
            zarrckpt.save(frozen_and(2), tmp_path / name, base=tmp_path / base, options=ON)
            for name, base in (("new", "base"), ("newer", "new"))
        ]
    finally:
        os.umask(own)
    shared = reports[1].nbytes if after != 0o002 or is_private() else 0
    assert [report.linked_bytes for report in reports] == [0, shared]
    for name in ("new", "newer"):
        modes = {path.stat().st_mode & 0o777 for path in (tmp_path / name).rglob("*") if path.is_file()}
        assert modes == {0o666 & ~after}
        check_content(tmp_path / name, frozen_and(2))


def is_private() -> bool:
    """Whether this user's group has the user's name."""
    return grp.getgrgid(os.getegid()).gr_name == pwd.getpwuid(os.geteuid()).pw_name


def test_files_of_another_group_are_written(base: Path, tmp_path: Path) -> None:
    """A setgid folder gives its group to new files."""
    new = tmp_path / "new"
    new.mkdir()
    try:
        os.chown(new, -1, 12345)
    except PermissionError:
        pytest.skip("only root may use any group")
    new.chmod(0o2775)
    report = zarrckpt.save(frozen_and(2), new, base=base, options=ON)
    assert report.linked_bytes == 0 and "group" in report.base_problem
    assert {path.stat().st_gid for path in new.rglob("*")} == {12345}


def test_a_file_that_is_replaced_after_the_comparison_is_written(base: Path, tmp_path: Path) -> None:
    chunk = base / "frozen" / "c.0.0"

    def replace() -> None:
        data = chunk.read_bytes()
        chunk.unlink()
        chunk.write_bytes(flipped(data))

    store = FaultyStore(tmp_path / "new", at_reuse(0, replace))
    store.max_concurrency = 1
    zarrckpt.save(frozen_and(2), store, base=base, options=ON)
    check_content(tmp_path / "new", frozen_and(2))


def test_a_base_that_is_read_slowly_is_written(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = []
    real = LinkableFile.has_next

    def has_next(self: LinkableFile, *args: Any) -> bool:
        reads.append(self.path)
        time.sleep(0.3)
        return real(self, *args)

    monkeypatch.setattr(LinkableFile, "has_next", has_next)
    monkeypatch.setattr(reuse, "_SLOW_SECONDS", 0.5)
    monkeypatch.setattr(LocalStore, "max_concurrency", 1)
    report = zarrckpt.save(frozen_and(2), tmp_path / "new", base=base, options=ON)
    assert len(reads) == 2 and report.linked_bytes == 0 and "longer" in report.base_problem
    check_content(tmp_path / "new", frozen_and(2))


def test_the_comparison_stays_within_the_memory_bound(tmp_path: Path) -> None:
    state = {f"w{number}": torch.randn(1 << 20) for number in range(16)}
    options = zarrckpt.SaveOptions(durable=False, max_inflight_bytes=1 << 20)
    zarrckpt.save(state, tmp_path / "base", options=options)
    state["w3"][-1] += 1
    reports = []
    peak = traced_peak_of(
        lambda: reports.append(zarrckpt.save(state, tmp_path / "new", base=tmp_path / "base", options=options))
    )
    assert reports[0].linked_bytes > 15 << 22 and peak < 2 << 20
    check_content(tmp_path / "new", state)


def test_small_chunks_are_not_shared(tmp_path: Path) -> None:
    sizes = {"below": (64 << 10) - 5, "at": (64 << 10) - 4}
    state = {name: torch.ones(size, dtype=torch.uint8) for name, size in sizes.items()}
    quick = zarrckpt.SaveOptions(durable=False)
    with not_sharing_small_chunks():
        zarrckpt.save(state, tmp_path / "base", options=quick)
        zarrckpt.save(state, tmp_path / "new", base=tmp_path / "base", options=quick)
    assert linked(tmp_path / "new", tmp_path / "base") == {"at/c.0"}


# -- the base changes while its chunks are copied


def _remove(url: Any, options: dict[str, Any]) -> None:
    zarrckpt.remove(url, **options)


def _save_again(url: Any, options: dict[str, Any]) -> None:
    """Remove the base and save at its url, with other bytes in each chunk of the same size."""
    zarrckpt.remove(url, **options)
    zarrckpt.save(_other(), url, **options, options=ON)


def _save_half(url: Any, options: dict[str, Any]) -> None:
    """The same, but the second save does not end."""
    zarrckpt.remove(url, **options)
    store = FaultyStore(
        url, lambda call: FAIL if call.verb in ("create", "delete") and call.key != CLAIM else None, **options
    )
    with pytest.raises(zarrckpt.CheckpointError):
        zarrckpt.save(_other(), store, options=ON)


def _overwrite(url: Any, options: dict[str, Any]) -> None:
    zarrckpt.save(_other(), url, **options, overwrite=True, options=ON)


def _pin(url: Any, options: dict[str, Any]) -> None:
    zarrckpt.pin(url, **options)


CLAIM = "@zarrckpt/zarr.json"
CHANGES = (_remove, _save_again, _save_half, _overwrite, _pin)


def _other() -> State:
    return {name: -value if name == "frozen" else value for name, value in frozen_and(7).items()}


def at_reuse(number: int, action: Callable[[], object]) -> Callable[[Call], Fault | None]:
    """Return a rule that runs an action right before a reuse, counted from 0."""
    left = [number]

    def rule(call: Call) -> None:
        if call.verb == "reuse":
            left[0] -= 1
            if left[0] == -1:
                action()

    return rule


@pytest.mark.parametrize("number", [0, 2, 3])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("where", ["local", "s3"])
def test_a_base_may_change_while_it_is_copied(
    where: str, change: Callable[..., None], number: int, tmp_path: Path, s3_stub: S3Server
) -> None:
    urls: list[Any] = [tmp_path / "base", tmp_path / "new"]
    options: dict[str, Any] = {}
    if where == "s3":
        place = s3_stub.bucket()
        urls, options = [place.url("base"), place.url("new")], {"storage_options": place.storage_options}
    base, new = urls
    zarrckpt.save(frozen_and(1), base, **options, options=ON)
    happened = []

    def action() -> None:
        happened.append(change(base, options))

    store = FaultyStore(new, at_reuse(number, action), **options)
    store.max_concurrency = 1
    report = zarrckpt.save(frozen_and(2), store, base=FaultyStore(base, **options), options=ON)
    assert len(happened) == 1
    check_content(new, frozen_and(2), **options)
    if change is _pin:
        assert report.sent_bytes < FROZEN_BYTES
    if change in (_save_again, _overwrite):
        check_content(base, _other(), **options)


def test_a_chunk_that_cannot_be_written_again_ends_the_save(bucket: Bucket) -> None:
    """Only if the base was changed by hand: a removal deletes the tables before any chunk."""
    state, url = frozen_and(1), bucket.url(2)

    def spoil() -> None:
        bucket.change("1/blob/c.0", flipped)
        bucket.change("1/zarr.json", lambda data: None)

    store = FaultyStore(url, at_reuse(0, spoil), **bucket.options)
    store.max_concurrency = 1
    with pytest.raises(zarrckpt.IncompleteSaveError, match="Save again, without this base"):
        zarrckpt.save(state, store, base=FaultyStore(bucket.url(1), **bucket.options), options=ON)
    with pytest.raises(zarrckpt.CheckpointNotFoundError):
        zarrckpt.open(url, **bucket.options)
    zarrckpt.save(state, url, **bucket.options, options=ON)
    check_content(url, state, **bucket.options)


def test_a_copy_of_a_value_is_not_used_without_the_tables_of_the_base(bucket: Bucket) -> None:
    """Without the tables, the base is being removed, and its chunks may be those of another save."""

    def begin_removal() -> None:
        bucket.change("digests/zarr.json", lambda data: None)
        bucket.change("1/blob/c.0", flipped)

    store = FaultyStore(bucket.url(2), at_reuse(0, begin_removal), **bucket.options)
    store.max_concurrency = 1
    zarrckpt.save(frozen_and(1), store, base=FaultyStore(bucket.url(1), **bucket.options), options=ON)
    check_content(bucket.url(2), frozen_and(1), **bucket.options)


# -- the base never changes


@pytest.mark.parametrize("end", ["overwritten", "removed", "failed", "recovered"])
def test_the_base_keeps_its_bytes_whatever_happens_to_the_new(end: str, base: Path, tmp_path: Path) -> None:
    before, new = contents(base), tmp_path / "new"
    if end in ("failed", "recovered"):
        fails = ("sync", "delete") if end == "recovered" else ("sync",)
        store = FaultyStore(new, lambda call: FAIL if call.verb in fails and "frozen" in call.key else None)
        with pytest.raises(zarrckpt.StorageError):
            zarrckpt.save(frozen_and(2), store, base=base, options=ON)
        assert end == "failed" or len([*new.rglob("c.?.0")]) == 4
        zarrckpt.recover(new, stopped=True)
        assert not [*new.rglob("c.*")]
    else:
        zarrckpt.save(frozen_and(2), new, base=base, options=ON)
        assert all((new / "frozen" / f"c.{number}.0").stat().st_nlink == 2 for number in range(4))
        if end == "overwritten":
            zarrckpt.save(_other(), new, overwrite=True, options=ON)
            check_content(new, _other())
        else:
            zarrckpt.remove(new)
            assert not new.exists()
    assert contents(base) == before
    assert all((base / "frozen" / f"c.{number}.0").stat().st_nlink == 1 for number in range(4))
    check_content(base, frozen_and(1))


# -- options


def test_digests_are_stored_only_for_reuse_in_object_stores(bucket: Bucket, tmp_path: Path) -> None:
    def has_digests(url: str, **options: Any) -> bool:
        return "digests" in json.loads(open_store(url, **options).get("zarr.json"))["attributes"]["zarrckpt"]["tables"]

    for number, (base, mode, stored) in enumerate(((None, "auto", False), (2, "auto", True), (3, "off", False)), 2):
        report = bucket.save(number, base=base, reuse=mode)
        assert has_digests(bucket.url(number), **bucket.options) == stored and not report.copied_bytes
    zarrckpt.copy(zarrckpt.open(bucket.url(3), **bucket.options), bucket.url(5), **bucket.options)
    assert not has_digests(bucket.url(5), **bucket.options)
    check_content(bucket.url(5), frozen_and(3), **bucket.options)
    zarrckpt.save(frozen_and(1), tmp_path / "local", options=ON)
    assert not has_digests(str(tmp_path / "local"))


def test_every_nth_save_writes_all_chunks(tmp_path: Path) -> None:
    options = dataclasses.replace(ON, reuse_full_every=3)
    base, reused = None, []
    for number in range(8):
        report = zarrckpt.save(frozen_and(number), tmp_path / str(number), base=base, options=options)
        reused.append(report.linked_bytes > 0)
        base = tmp_path / str(number)
    assert reused == [False, True, True, False, True, True, False, True]


@pytest.mark.parametrize(
    ("wrong", "error"),
    [({"reuse": "yes"}, ValueError), ({"reuse_full_every": 0}, ValueError), ({"reuse_full_every": 1.5}, TypeError)],
)
def test_wrong_options_are_named(wrong: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error, match=next(iter(wrong))):
        zarrckpt.SaveOptions(**wrong)


# -- damage


def test_damage_of_a_shared_chunk_is_found_in_both(base: Path, tmp_path: Path) -> None:
    zarrckpt.save(frozen_and(2), tmp_path / "new", base=base, options=ON)
    chunk = base / "frozen" / "c.2.0"
    data = bytearray(chunk.read_bytes())
    data[100] ^= 4
    chunk.write_bytes(data)
    for url in (base, tmp_path / "new"):
        assert [damage.key for damage in zarrckpt.open(url).verify().damages] == ["frozen/c.2.0"]
    state = frozen_and(0)
    with pytest.raises(zarrckpt.CorruptCheckpointError, match=r"frozen/c\.2\.0"):
        zarrckpt.load(state, tmp_path / "new")


def test_damage_of_the_base_ends_with_the_next_save(base: Path, tmp_path: Path) -> None:
    _flip_bits(base / "frozen" / "c.2.0")
    report = zarrckpt.save(frozen_and(1), base, base=base, overwrite=True, options=ON)
    assert report.linked_bytes == report.nbytes - FROZEN_BYTES // 4
    check_content(base, frozen_and(1))


def with_equal_checksum(data: bytes) -> bytes:
    """Return other bytes with the same crc32c behind them. Its last 4 bytes are chosen, since crc32c is linear."""
    other = flipped(data[:-8])
    nothing = crc32c(other + bytes(4))
    left, patch = nothing ^ crc32c(data[:-4]), 0
    rows = [(crc32c(other + (1 << bit).to_bytes(4, "little")) ^ nothing, 1 << bit) for bit in range(32)]
    for bit in range(31, -1, -1):
        pivot = next(row for row in rows if row[0] >> bit & 1)
        rows = [
            (row[0] ^ pivot[0], row[1] ^ pivot[1]) if row[0] >> bit & 1 else row for row in rows if row is not pivot
        ]
        if left >> bit & 1:
            left, patch = left ^ pivot[0], patch ^ pivot[1]
    return other + patch.to_bytes(4, "little") + data[-4:]


def test_verify_compares_digests_with_objects(bucket: Bucket) -> None:
    def damages() -> dict[str, str]:
        found = zarrckpt.open(bucket.url(1), **bucket.options).verify().damages
        return {damage.key: damage.reason for damage in found}

    bucket.change("1/adapter/c.0", with_equal_checksum)
    assert damages() == {"adapter/c.0": "its digest differs from the save"}
    bucket.change("digests/c.0", flipped)
    assert [key for key in damages() if "digests" in key] == [*damages()]
    bucket.change("digests/zarr.json", lambda data: None)
    assert len(damages()) == 2


def test_the_root_counts_what_was_reused(base: Path, tmp_path: Path) -> None:
    zarrckpt.save(frozen_and(2), tmp_path / "new", base=base, options=ON)
    own = json.loads((tmp_path / "new" / "zarr.json").read_bytes())["attributes"]["zarrckpt"]
    expected = {"save_id": zarrckpt.open(base).save_id, "objects": 4, "nbytes": FROZEN_BYTES, "saves": 1}
    assert own["reused"] == expected
    assert "reused" not in json.loads((base / "zarr.json").read_bytes())["attributes"]["zarrckpt"]


# -- tensors that share memory


class Tied(nn.Module):
    """A model whose output layer has the weights of its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(32, 32), nn.Linear(32, 32, bias=False)
        self.head.weight = self.embed.weight


TIED_BYTES = 32 * 32 * 4 + 4


def save_at_once(state: State, url: Path, **options: Any) -> zarrckpt.SaveReport:
    return zarrckpt.save(state, url, options=dataclasses.replace(ON, **options))


def save_in_background(state: State, url: Path, **options: Any) -> zarrckpt.SaveReport:
    with patch.object(staging, "_SHARED_BYTES", 1):
        return zarrckpt.async_save(state, url, options=dataclasses.replace(ON, **options)).result()


@pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")
def save_by_dcp(state: State, url: Path, **options: Any) -> zarrckpt.SaveReport:
    writer = zarrckpt.ZarrStorageWriter(url, options=dataclasses.replace(ON, **options))
    report: Any = dcp.save({"model": state["model"].state_dict()}, storage_writer=writer).storage_data
    return report


@pytest.mark.parametrize("compression", [None, "zstd"])
@pytest.mark.parametrize("save", [save_at_once, save_in_background, save_by_dcp])
def test_tied_weights_are_one_file(save: Callable[..., Any], compression: Any, tmp_path: Path) -> None:
    model = Tied()
    report = save({"model": model}, tmp_path / "one", compression=compression)
    chunks = chunk_files(tmp_path / "one")
    embed, head = chunks.values()
    assert embed.samefile(head) and report.linked_bytes == report.sent_bytes == report.nbytes // 2
    assert report.base == report.base_problem == ""
    # The same bytes as without a link, and checkpoints that do not depend on it.
    apart = {"model": {name: tensor.clone() for name, tensor in model.state_dict().items()}}
    zarrckpt.save(apart, tmp_path / "apart", options=dataclasses.replace(ON, compression=compression))
    assert [path.read_bytes() for path in chunks.values()] == [
        path.read_bytes() for path in chunk_files(tmp_path / "apart").values()
    ]
    zarrckpt.copy(tmp_path / "one", tmp_path / "two")
    again = zarrckpt.save(apart, tmp_path / "three", base=tmp_path / "one", options=ON if not compression else None)
    assert compression or again.linked_bytes == again.nbytes
    zarrckpt.remove(tmp_path / "one")
    for name in ("two", "three"):
        loaded = {"model": {name: torch.zeros(32, 32) for name in apart["model"]}}
        zarrckpt.load(loaded, tmp_path / name)
        assert all(torch.equal(loaded["model"][name], tensor) for name, tensor in apart["model"].items())
        zarrckpt.open(tmp_path / name).verify().raise_if_damaged()


def test_a_copy_in_memory_keeps_all_ties_that_become_links(tmp_path: Path) -> None:
    weight = torch.rand(128, 128)
    report = zarrckpt.async_save({"a": weight, "b": weight}, tmp_path / "one").result()
    assert report.linked_bytes == report.sent_bytes == report.nbytes // 2


def test_tied_weights_of_a_base_are_reused(tmp_path: Path) -> None:
    state = {"model": Tied(), "step": 1}
    zarrckpt.save(state, tmp_path / "base", options=ON)
    report = zarrckpt.save(state, tmp_path / "new", base=tmp_path / "base", options=ON)
    assert report.linked_bytes == report.nbytes == 2 * TIED_BYTES
    own = json.loads((tmp_path / "new" / "zarr.json").read_bytes())["attributes"]["zarrckpt"]
    assert own["reused"]["objects"] == 2
    with torch.no_grad():
        state["model"].embed.weight += 1
    report = zarrckpt.save(state, tmp_path / "newer", base=tmp_path / "new", options=ON)
    assert (report.linked_bytes, report.base) == (TIED_BYTES, "")
    check = {"model": Tied(), "step": 0}
    zarrckpt.load(check, tmp_path / "newer")
    assert torch.equal(check["model"].head.weight, state["model"].embed.weight)


WHOLE_ROWS = torch.arange(4096.0).reshape(64, 64)


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(WHOLE_ROWS.T, id="strides"),
        pytest.param(WHOLE_ROWS[:32], id="fewer rows"),
        pytest.param(WHOLE_ROWS[1:], id="offset"),
        pytest.param(WHOLE_ROWS.view(torch.int32), id="dtype"),
        pytest.param(WHOLE_ROWS.reshape(4096), id="shape"),
        pytest.param(torch.view_as_complex(WHOLE_ROWS.reshape(64, 32, 2)).conj(), id="conjugate"),
        pytest.param(WHOLE_ROWS.clone(), id="equal"),
    ],
)
def test_other_views_of_one_memory_are_not_links(other: torch.Tensor, tmp_path: Path) -> None:
    state = {"a": WHOLE_ROWS, "b": other, "step": 1}
    assert zarrckpt.save(state, tmp_path / "one", options=ON).linked_bytes == 0
    check_content(tmp_path / "one", {**state, "b": other.resolve_conj()})


def test_chunks_of_tied_tensors_are_links_one_by_one(tmp_path: Path) -> None:
    state = {"a": WHOLE_ROWS, "b": WHOLE_ROWS.view(64, 64), "c": WHOLE_ROWS.detach(), "step": 1}
    report = zarrckpt.save(state, tmp_path / "one", options=ON)
    assert report.linked_bytes * 3 == report.nbytes * 2
    assert {path.stat().st_nlink for path in chunk_files(tmp_path / "one").values()} == {3}
    check_content(tmp_path / "one", state)


@pytest.mark.parametrize("where", ["s3", "archive", "no links"])
def test_tied_weights_are_stored_twice_elsewhere(
    where: str, tmp_path: Path, s3_stub: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = s3_stub.bucket()
    url: Any = {"s3": place.url("one"), "archive": tmp_path / "one.zarr.zip", "no links": tmp_path / "one"}[where]
    options = {"storage_options": place.storage_options} if where == "s3" else {}
    if where == "no links":
        monkeypatch.setattr(LocalStore, "link", lambda *args: False)
    model = Tied()
    report = zarrckpt.save({"model": model}, url, **options, options=ON)
    assert report.linked_bytes == 0 and report.sent_bytes == report.nbytes == 2 * TIED_BYTES
    check = Tied()
    zarrckpt.load({"model": check}, url, **options)
    assert torch.equal(check.embed.weight, model.embed.weight)


# -- other ways to save


def test_async_save_reuses_chunks(base: Path, tmp_path: Path) -> None:
    state = frozen_and(2)
    future = zarrckpt.async_save(state, tmp_path / "new", base=base, options=ON)
    future.copied()
    state["frozen"] += 1
    assert future.result().linked_bytes == FROZEN_BYTES
    check_content(tmp_path / "new", frozen_and(2))


@pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")
def test_dcps_writer_reuses_chunks(base: Path, tmp_path: Path) -> None:
    state = {key: value for key, value in frozen_and(2).items() if key != "blob"}
    dcp.save(state, storage_writer=zarrckpt.ZarrStorageWriter(tmp_path / "new", base=base, options=ON))
    assert linked(tmp_path / "new", base) == {f"frozen/c.{number}.0" for number in range(4)}
    check_content(tmp_path / "new", state)


# -- several ranks

ROWS = 64
WHOLE = torch.arange(ROWS * 64, dtype=torch.float32).reshape(ROWS, 64)


def _model(number: int) -> State:
    """Return the state of a model with a frozen layer and an adapter, sharded by FSDP2."""
    model = nn.Sequential(nn.Linear(64, ROWS), nn.Linear(ROWS, 8, bias=False))
    with torch.no_grad():
        for parameter, value in ((model[0].weight, WHOLE), (model[0].bias, WHOLE[0]), (model[1].weight, number)):
            parameter.copy_(torch.as_tensor(value, dtype=torch.float32).expand_as(parameter))
    fully_shard(model.requires_grad_(False), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return {"model": model.state_dict(), "step": number}


def _check_model(url: Path, number: int) -> None:
    checkpoint = zarrckpt.open(url)
    checkpoint.verify().raise_if_damaged()
    found = checkpoint.read()
    assert np.array_equal(found["model.0.weight"], WHOLE.numpy())
    assert np.array_equal(found["model.0.bias"], WHOLE[0].numpy())
    assert (found["model.1.weight"] == number).all() and checkpoint["step"] == number


def _save_on_ranks(folder: str, numbers: Sequence[int], options: zarrckpt.SaveOptions) -> list[zarrckpt.SaveReport]:
    """Save some numbers, each with the one before as its base."""
    with sharing_small_chunks():
        return [
            zarrckpt.save(_model(number), f"{folder}/{number}", base=f"{folder}/{number - 1}", options=options)
            for number in numbers
        ]


@pytest.mark.parametrize("pieces", ["whole chunks", "moved pieces", "shards"])
def test_ranks_reuse_chunks_of_equal_grids(pieces: str, tmp_path: Path) -> None:
    """Four ranks, then two. Chunks of 16 rows are pieces of one rank, those of 32 rows are merged from two ranks.

    Without limits, two ranks would have chunks of 32 rows. They keep the grid of four.
    """
    size = 32 if pieces == "moved pieces" else 16
    least = None if size == 32 else 1024
    options = dataclasses.replace(MERGING, min_piece_bytes=least)
    if pieces != "shards":
        options = dataclasses.replace(MERGING, max_chunk_bytes=size * 256, fill_bytes=size * 256, min_piece_bytes=least)
    reports = run_ranks(_save_on_ranks, str(tmp_path), (1, 2), options, world_size=4)
    assert all(found == reports[0] for found in reports)
    reports += run_ranks(_save_on_ranks, str(tmp_path), (3,), options, world_size=2)
    frozen = WHOLE.nbytes + 4 * ROWS // size
    found = [report.linked_bytes for report in (*reports[0], *reports[-1])]
    assert found[0] == 0 and frozen < found[1] == found[2] <= frozen + 64 * 4 + 4 * 4
    for number in (1, 2, 3):
        _check_model(tmp_path / str(number), number)


def _save_while_the_base_is_replaced(folder: str, options: zarrckpt.SaveOptions) -> zarrckpt.SaveReport:
    real = RankSave.write

    def write(self: RankSave, *args: Any) -> Any:
        if dist.get_rank() == 0:
            with patch.object(RankSave, "write", real):
                zarrckpt.remove(f"{folder}/1")
                other = {"model.0.weight": -WHOLE, "model.0.bias": -WHOLE[0], "model.1.weight": torch.ones(8, ROWS)}
                zarrckpt.save(other, f"{folder}/1", no_dist=True, options=options)
        dist.barrier()
        return real(self, *args)

    with patch.object(RankSave, "write", write), sharing_small_chunks():
        return zarrckpt.save(_model(2), f"{folder}/2", base=f"{folder}/1", options=options)


def test_ranks_notice_a_base_that_was_replaced(tmp_path: Path) -> None:
    options = dataclasses.replace(MERGING, max_chunk_bytes=32 * 256, fill_bytes=32 * 256)
    run_ranks(_save_on_ranks, str(tmp_path), (1,), options, world_size=4)
    run_ranks(_save_while_the_base_is_replaced, str(tmp_path), options, world_size=4)
    _check_model(tmp_path / "2", 2)
    zarrckpt.open(tmp_path / "1").verify().raise_if_damaged()


def _save_with_a_base_on_rank_0(folder: str) -> None:
    base = f"{folder}/1" if dist.get_rank() == 0 else None
    zarrckpt.save(_model(2), f"{folder}/2", base=base, options=ON)


def test_ranks_must_pass_the_same_base(tmp_path: Path) -> None:
    run_ranks(_save_on_ranks, str(tmp_path), (1,), ON, world_size=2)
    message = all_ranks_raise(zarrckpt.CheckpointError, _save_with_a_base_on_rank_0, str(tmp_path), world_size=2)
    assert "this rank does not" in message
    assert not [*tmp_path.glob("2/**/c.*")]
