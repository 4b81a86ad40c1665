"""Every change of a stored object is found: ``verify`` names it, and no read returns wrong numbers.

Objects of real checkpoints are damaged at random, one or two at a time. The suite does some hundred. A campaign:

ZARRCKPT_DAMAGES=3000 python -m pytest tests/read/test_damage.py

One seed (``ZARRCKPT_SEED``) gives one sequence. A failure names the number of its damage.

Three changes are not among the damages. No stored byte could show the whole root document of an earlier save at the
same url, which then is the committed one, or the claim of another save if the checkpoint has a tree that is not the
canonical one. A missing claim or marker is no damage, because only writers need them.
"""

from __future__ import annotations

import os
import random
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness.bits import same
from harness.internals import Store, open_store
from harness.s3_server import served

import zarrckpt
from zarrckpt import CheckpointError, CheckpointNotFoundError

DAMAGES = int(os.environ.get("ZARRCKPT_DAMAGES", "300"))
SEED = int(os.environ.get("ZARRCKPT_SEED", "1"))
ROOT, CLAIM = "zarr.json", "@zarrckpt/zarr.json"


# -- checkpoints of several kinds


def _noise(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def small(number: int) -> dict[str, Any]:
    """Return chunks of 64 bytes, tensors without dimensions and without elements, values, and blobs of
    each encoding.
    """
    return {
        "model": {"w": _noise(number, 6, 8), "v": _noise(number + 10, 6, 8), "b": _noise(number + 20, 5)},
        "scalar": torch.tensor(3.5 + number),
        "empty": torch.zeros(0, 3),
        "list": [_noise(number + 30, 3), {"n": number}],
        "step": number,
        "values": ({"lr": 0.1 * number}, None, float("inf")),
        "raw": bytes([number]) * 200,
        "npy": np.arange(40) + number,
        "tree": (np.arange(9) + number, b"x", 5),
        "json": f"{number}" * 70000,
        "torch": (torch.arange(3) + number, torch.Size([2])),
    }


def large(number: int) -> dict[str, Any]:
    """Return chunks with subchunks, two of each size."""
    return {"w": _noise(number, 600, 512), "v": _noise(number + 10, 600, 512), "x": _noise(number + 20, 8), "step": 3}


def compressible(number: int) -> dict[str, Any]:
    """Return subchunks of different stored sizes."""
    rows = torch.arange(700).reshape(-1, 1) // (9 + number)
    w, x = rows + torch.arange(500) % (5 + number), torch.arange(500) % (3 + number)
    return {"w": w.float(), "x": x, "raw": b"raw"}


def narrow(number: int) -> dict[str, Any]:
    """Return tensors of dtypes that are stored as integers of their size."""
    kinds = (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
    state = {str(kind): _noise(number + place, 9, 4, dtype=kind) for place, kind in enumerate(kinds)}
    return {**state, "step": number, "npy": np.arange(5) * number}


@dataclass(frozen=True)
class Kind:
    state: Callable[[int], dict[str, Any]]
    options: zarrckpt.SaveOptions
    overwritten: bool = False


PLAIN = zarrckpt.SaveOptions(durable=False)

KINDS = {
    "plain": Kind(small, replace(PLAIN, max_chunk_bytes=64)),
    "subchunks": Kind(large, PLAIN),
    "zstd": Kind(compressible, replace(PLAIN, compression="zstd")),
    "blosc": Kind(compressible, replace(PLAIN, compression="blosc", max_chunk_bytes=300_000)),
    "portable": Kind(narrow, replace(PLAIN, portable_dtypes=True)),
    "tree": Kind(small, replace(PLAIN, max_chunk_bytes=256), overwritten=True),
}


@dataclass
class Subject:
    """A checkpoint, its saved state, and its objects."""

    kind: str
    url: str
    storage_options: dict[str, Any] | None
    store: Store
    expected: dict[str, Any]
    objects: dict[str, bytes]
    """The objects of the checkpoint: key -> bytes."""
    older: dict[str, bytes]
    """Objects of an earlier save, under the keys that correspond to them in this one."""

    @property
    def args(self) -> dict[str, Any]:
        return {} if self.storage_options is None else {"storage_options": self.storage_options}

    def put(self, key: str, data: bytes | None) -> None:
        if data is None:
            self.store.delete([key])
        else:
            self.store.put(key, [data])


def subject(kind: str, url: str, storage_options: dict[str, Any] | None = None) -> Subject:
    """Save twice: to two urls, or over each other."""
    made, options = KINDS[kind], {"options": KINDS[kind].options, "storage_options": storage_options}
    first = url if made.overwritten else f"{url}-older"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        old = zarrckpt.save(made.state(1), first, **options)
        store, other = (open_store(place, storage_options=storage_options, durable=False) for place in (url, first))
        earlier = {info.key: other.get(info.key) for info in other.list()}
        report = zarrckpt.save(made.state(2), url, **options, **({"overwrite": True} if made.overwritten else {}))
    prefixes = (report.save_id, f"@{report.save_id}/") if made.overwritten else (report.save_id, "")
    objects = {info.key: store.get(info.key) for info in store.list() if _belongs(info.key, *prefixes)}
    older = {}
    for name, data in earlier.items():
        key = name.replace(old.save_id, report.save_id)
        key = f"{prefixes[1]}{key}" if not key.startswith("@") and key != ROOT else key
        if key in objects and key not in (ROOT, CLAIM):
            older[key] = data
    assert len(older) > 3 and any("/c" in key for key in older)
    return Subject(kind, url, storage_options, store, flat(made.state(2)), objects, older)


def _belongs(key: str, save_id: str, tree: str) -> bool:
    reserved = key in (ROOT, CLAIM) or key.startswith(f"@zarrckpt/{save_id}/")
    return reserved or (key.startswith(tree) and (bool(tree) or not key.startswith("@")))


def flat(state: Any, prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in state.items() if isinstance(state, dict) else enumerate(state):
        if isinstance(value, dict) or (isinstance(value, list) and isinstance(value[0], torch.Tensor)):
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


def blank(state: Any) -> Any:
    """Return a target of the state's shape with other contents."""
    if isinstance(state, torch.Tensor):
        return torch.full_like(state.float(), 77).to(state.dtype)
    if isinstance(state, dict):
        return {key: blank(value) for key, value in state.items()}
    return [blank(item) for item in state] if isinstance(state, list) else None


# -- damages

Changes = dict[str, bytes | None]
"""Key -> new bytes, or None for a deleted object."""


class Damager:
    """Draws damages. Each changes something."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def draw(self, subject: Subject) -> tuple[str, Changes]:
        kinds = (self.flip, self.flip, self.truncate, self.extend, self.delete, self.swap, self.other, self.old)
        kinds += (self.block, self.block, self.shift, self.inner_swap)
        while True:
            change = self.random.choice(kinds)
            key = self.key(subject)
            made = change(subject, key)
            if made and any(data != subject.objects[name] for name, data in made.items()):
                return f"{change.__name__} {key}", {n: d for n, d in made.items() if d != subject.objects[n]}

    def key(self, subject: Subject) -> str:
        """Return a key: mostly of chunks of tensors and blobs, sometimes of any object."""
        keys = sorted(subject.objects)
        chunks = [key for key in keys if key.rpartition("/")[2].startswith("c") and "@zarrckpt" not in key]
        return self.random.choice(chunks if self.random.random() < 0.6 else keys)

    def flip(self, subject: Subject, key: str) -> Changes:
        data = bytearray(subject.objects[key])
        data[self.random.randrange(len(data))] ^= 1 << self.random.randrange(8)
        return {key: bytes(data)}

    def truncate(self, subject: Subject, key: str) -> Changes:
        data = subject.objects[key]
        kept = self.random.choice((0, 1, len(data) - 1, len(data) - 4, self.random.randrange(len(data))))
        return {key: data[: max(kept, 0)]}

    def extend(self, subject: Subject, key: str) -> Changes:
        data, more = subject.objects[key], self.random.choice((1, 4, 100))
        return {key: data + self.random.choice((bytes(more), self.random.randbytes(more), data[:more], b" " * more))}

    def delete(self, subject: Subject, key: str) -> Changes:
        # Only writers need the claim and the marker.
        return {} if key in _unsized(subject) - {ROOT} else {key: None}

    def swap(self, subject: Subject, key: str) -> Changes:
        """Swap with an object of the same size, if there is any."""
        other = self._like(subject, key)
        return {key: subject.objects[other], other: subject.objects[key]}

    def other(self, subject: Subject, key: str) -> Changes:
        """Replace by another object's bytes."""
        return {key: subject.objects[self._like(subject, key)]}

    def _like(self, subject: Subject, key: str) -> str:
        own = subject.objects[key]
        others = [name for name, data in subject.objects.items() if data != own]
        same = [name for name in others if len(subject.objects[name]) == len(own)]
        return self.random.choice(sorted(same or others))

    def old(self, subject: Subject, key: str) -> Changes:
        """Replace by the corresponding object of an earlier save."""
        return {key: subject.older[key]} if key in subject.older else {}

    def block(self, subject: Subject, key: str) -> Changes:
        """Overwrite a part with zeros, ones or noise."""
        data = bytearray(subject.objects[key])
        size = min(len(data), self.random.choice((1, 16, 512, 4096, len(data))))
        place = self.random.randrange(len(data) - size + 1)
        data[place : place + size] = self.random.choice((bytes(size), b"\xff" * size, self.random.randbytes(size)))
        return {key: bytes(data)}

    def shift(self, subject: Subject, key: str) -> Changes:
        """Lose or double a byte in the middle."""
        data, place = subject.objects[key], self.random.randrange(len(subject.objects[key]))
        return {key: data[:place] + self.random.choice((b"", data[place : place + 1] * 2)) + data[place + 1 :]}

    def inner_swap(self, subject: Subject, key: str) -> Changes:
        """Swap two parts of one object, each with its checksum, as if two subchunks were swapped."""
        data = subject.objects[key]
        size = self.random.choice((4, 12, len(data) // 2, 131076))
        if not 0 < 2 * size <= len(data):
            return {}
        one = self.random.randrange(len(data) // size - 1) * size
        return {key: data[:one] + data[one + size : one + 2 * size] + data[one : one + size] + data[one + 2 * size :]}


# -- damage that must be found


def check(subject: Subject, state: dict[str, Any], changes: Changes) -> list[str]:
    """Damage, read, repair. Return the damages that were not found, and the wrong reads."""
    opened, faults = zarrckpt.open(subject.url, **subject.args), []
    for key, data in changes.items():
        subject.put(key, data)
    try:
        named = {damage.key for damage in opened.verify().damages}
        if named != set(changes):
            faults.append(f"verify names {named}")
        sizes = {key for key, data in changes.items() if data is None or len(data) != len(subject.objects[key])}
        fresh = zarrckpt.open(subject.url, **subject.args) if ROOT not in changes else opened
        quick = {damage.key for damage in fresh.verify(quick=True).damages}
        # The sizes of the root, the claim and the marker are stored nowhere else.
        unsized = {key for key in sizes if changes[key] is not None and key in _unsized(subject)}
        # For compressed arrays, the tables are read, and without them no chunk's size is known.
        tables = {key for key in changes if key.endswith(("/checksums/c.0", "/sizes/c.0"))}
        if tables and KINDS[subject.kind].options.compression:
            unsized = {key for key in sizes if changes[key] is not None}
        if not sizes - unsized <= quick or quick - sizes - tables:
            faults.append(f"verify(quick=True) names {quick}, of {sizes}")
        faults += reads(subject, state, changes)
    finally:
        for key in changes:
            subject.put(key, subject.objects[key])
    return faults


def _unsized(subject: Subject) -> set[str]:
    return {ROOT, CLAIM, *(key for key in subject.objects if key.startswith("@zarrckpt") and key.count("/") == 2)}


def reads(subject: Subject, state: dict[str, Any], changes: Changes) -> list[str]:
    """Check that each kind of read returns the saved state or raises an error that names the object. Return faults."""
    faults = []

    def attempt(what: str, read: Callable[[], dict[str, Any]]) -> None:
        try:
            found = read()
        except CheckpointError as err:
            gone = ROOT in changes and isinstance(err, CheckpointNotFoundError) and subject.store.url in str(err)
            if not gone and not any(key in str(err) for key in changes):
                faults.append(f"{what} raises without a name: {err}")
            return
        wrong = [fqn for fqn, value in found.items() if not same(value, subject.expected[fqn])]
        if wrong:
            faults.append(f"{what} gives wrong values of {wrong}")

    def load() -> dict[str, Any]:
        target = blank(state)
        zarrckpt.load(target, subject.url, **subject.args)
        return flat(target)

    attempt("load", load)
    attempt("read", lambda: tensors_of(zarrckpt.open(subject.url, **subject.args).read(), subject))
    ckpt: Any = None
    try:
        ckpt = zarrckpt.open(subject.url, **subject.args)
    except CheckpointError:
        return faults
    for fqn, value in subject.expected.items():
        if isinstance(value, torch.Tensor):
            attempt(f"ckpt[{fqn!r}][...]", lambda fqn=fqn: tensors_of({fqn: ckpt[fqn][...]}, subject))
        else:
            attempt(f"ckpt[{fqn!r}]", lambda fqn=fqn: {fqn: ckpt[fqn]})
    return faults


def tensors_of(arrays: dict[str, Any], subject: Subject) -> dict[str, torch.Tensor]:
    """Return arrays as tensors with the same bits. Portable ones are read as integers."""
    found = {}
    for fqn, array in arrays.items():
        dtype, data = subject.expected[fqn].dtype, bytearray(np.asarray(array).tobytes())
        flat = torch.frombuffer(data, dtype=dtype) if data else torch.zeros(0, dtype=dtype)
        found[fqn] = flat.reshape(np.shape(array))
    return found


def campaign(subjects: list[Subject], count: int, seed: int) -> list[str]:
    """Draw and check damages. Return the faults."""
    damager, found = Damager(seed), []
    for number in range(count):
        one = subjects[number % len(subjects)]
        what, changes = damager.draw(one)
        faults = check(one, KINDS[one.kind].state(2), changes)
        found += [f"{number} ({one.kind}) {what}: {fault}" for fault in faults]
    return found


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Subject]]:
    base = tmp_path_factory.mktemp("damage")
    yield lambda kind: subject(kind, str(base / kind))


@pytest.mark.parametrize("kind", KINDS)
def test_damage_of_local_files_is_found(kind: str, local: Callable[[str], Subject]) -> None:
    found = campaign([local(kind)], -(-DAMAGES * 9 // (10 * len(KINDS))), SEED)
    assert not found, "\n".join(found[:20])


def test_damage_on_s3_is_found() -> None:
    with served() as server:
        kinds = ("plain", "subchunks", "zstd", "tree")
        subjects = [subject(kind, f"s3://bucket/{kind}", server.storage_options) for kind in kinds]
        found = campaign(subjects, DAMAGES // 10, SEED)
    assert not found, "\n".join(found[:20])


def test_verify_finds_no_damage_in_an_intact_checkpoint(local: Callable[[str], Subject], tmp_path: Path) -> None:
    """The procedure itself finds no fault in a whole checkpoint."""
    for kind in KINDS:
        one = subject(kind, str(tmp_path / kind))
        assert not check(one, KINDS[kind].state(2), {})
        read = tensors_of(zarrckpt.open(one.url).read(), one)
        assert read and all(same(value, one.expected[fqn]) for fqn, value in read.items())
