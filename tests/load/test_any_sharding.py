"""Any sharding loads into any other, bit for bit: random tensors, meshes, placements and chunk sizes.

Most cases run on simulated ranks (``simulated.py``), a few on real processes. The expected parts of each rank do not
come from this package: torch's ``Shard`` and ``_StridedShard`` cut the full tensor, mesh dimension by mesh dimension.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import random
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, TypeVar
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
import zarr
from harness.internals import DTYPES
from harness.merging import MergingOptions
from harness.random_tensors import random_tensor
from harness.ranks import run_ranks
from harness.simulated import MemoryStore, Traffic, current_rank, kept, memory_store, simulate
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.distributed.checkpoint.state_dict_saver import _save_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import Placement, _StridedShard

import zarrckpt
from zarrckpt._load import shared_reads as _sharing
from zarrckpt._plan import chunking, owners
from zarrckpt._read import chunks as _transfer

T = TypeVar("T")
P = TypeVar("P")

Ints = tuple[int, ...]


def bits(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1)
    raw: torch.Tensor = (torch.view_as_real(flat) if flat.is_complex() else flat).view(torch.uint8)
    return raw.numpy().tobytes()


# -- layouts: each rank's parts of a full tensor


@dataclass(frozen=True)
class Plain:
    """The whole tensor, as a plain one, on some of the ranks."""

    ranks: Ints

    def pieces(self, full: torch.Tensor, rank: int) -> list[torch.Tensor] | None:
        """Return a rank's pieces as views of the full tensor, or None if its state lacks the key."""
        return [full] if rank in self.ranks else None

    def leaf(self, full: torch.Tensor, held: list[torch.Tensor], rank: int) -> Any:
        """Return the entry of a rank's state, over the memory of its pieces."""
        return held[0]


@dataclass(frozen=True)
class OnMesh:
    """A DTensor on a mesh of some of the ranks."""

    ranks: Ints
    sizes: Ints
    placements: tuple[Placement, ...]
    order: Ints
    """The mesh dimensions that shard, in the order in which they cut."""
    interleaved: bool
    """Whether strides interleave. If not, they only give the order."""
    absent: Ints
    """Ranks outside of the mesh whose state lacks the key. The others have a DTensor without elements."""

    @property
    def strided(self) -> bool:
        return any(isinstance(placement, _StridedShard) for placement in self.placements)

    def pieces(self, full: torch.Tensor, rank: int) -> list[torch.Tensor] | None:
        if rank not in self.ranks:
            return None if rank in self.absent else [full.new_empty(0)]
        coordinate = np.unravel_index(self.ranks.index(rank), self.sizes)
        for m in self.order:
            placement = self.placements[m]
            assert isinstance(placement, Shard | _StridedShard)
            cut = placement if self.interleaved else Shard(placement.dim)
            shards, _ = cut._split_tensor(full, self.sizes[m], with_padding=False, contiguous=False)
            full = shards[int(coordinate[m])]
        return [full]

    def leaf(self, full: torch.Tensor, held: list[torch.Tensor], rank: int) -> Any:
        mesh = DeviceMesh("cpu", torch.tensor(self.ranks).reshape(self.sizes), _init_backend=False, _rank=rank)
        # from_local() takes the shape () for a missing one.
        meta = TensorMeta(full.shape, full.stride(), full.dtype)
        return DTensor(held[0], DTensorSpec(mesh, self.placements, meta), requires_grad=False)


@dataclass(frozen=True)
class InBoxes:
    """Boxes in no order, each on some of the ranks, in an object that implements DCP's protocol."""

    boxes: tuple[tuple[Ints, Ints], ...]
    """(offset, shape) of each."""
    ranks: tuple[Ints, ...]

    def _mine(self, rank: int) -> list[tuple[Ints, Ints]]:
        return [box for box, ranks in zip(self.boxes, self.ranks, strict=True) if rank in ranks]

    def pieces(self, full: torch.Tensor, rank: int) -> list[torch.Tensor] | None:
        return [
            full[tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))]
            for offset, shape in self._mine(rank)
        ]

    def leaf(self, full: torch.Tensor, held: list[torch.Tensor], rank: int) -> Any:
        offsets = [offset for offset, _ in self._mine(rank)]
        return Boxes(full.shape, full.dtype, dict(zip(offsets, held, strict=True)))


class Boxes(torch.Tensor):
    """Several boxes of one tensor on one rank, by DCP's protocol for such tensors."""

    _held: Mapping[Ints, torch.Tensor]

    @staticmethod
    def __new__(cls, shape: torch.Size, dtype: torch.dtype, held: Mapping[Ints, torch.Tensor]) -> Boxes:
        self: Boxes = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype)
        self._held = held
        return self

    @classmethod
    def __torch_dispatch__(cls, function: object, *_: object) -> NoReturn:
        raise NotImplementedError(f"{function} has no meaning for several boxes")

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                MetadataIndex(fqn, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, self.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(offset), piece.shape) for offset, piece in self._held.items()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        assert index.offset is not None
        return self._held[tuple(index.offset)]


Layout = Plain | OnMesh | InBoxes

MESHES = [(1,), (2, 1), (1, 3), (2, 1, 2), (1, 4, 1, 1)] + [
    sizes
    for dims in range(1, 5)
    for sizes in itertools.product(range(2, 17), repeat=dims)
    if math.prod(sizes) in (2, 3, 4, 5, 6, 8, 12, 16)
]
MESHES.sort(key=lambda sizes: (math.prod(sizes), sizes))


@st.composite
def on_mesh(draw: st.DrawFn, world: int, shape: Ints) -> OnMesh:
    """Return any of the ways in which torch can shard a tensor over a mesh.

    Either each tensor dimension is cut by its mesh dimensions in some order. Plain Shards cut in the order of the mesh,
    FSDP2 over tensor parallelism in the opposite one. Or one stride interleaves, as in views of sharded tensors.
    """
    largest = [sizes for sizes in MESHES if world // 2 < math.prod(sizes) <= world]
    sizes = draw(st.sampled_from([sizes for sizes in MESHES if math.prod(sizes) < world] + 2 * largest))
    dims = [draw(st.sampled_from([None, *range(len(shape))])) for _ in sizes]
    kind = draw(st.sampled_from(["mesh", "nested", "interleaved"]))
    # The choice of ranks does not change how a failure looks, so it need not shrink.
    chance = random.Random(draw(st.integers(0, 999)))
    placements: list[Placement] = [Replicate() if d is None else Shard(d) for d in dims]
    order = [m for m, d in enumerate(dims) if d is not None]
    if kind == "nested":
        chance.shuffle(order)
        for m in order:
            before = [k for k in order[: order.index(m)] if dims[k] == dims[m] and k > m]
            factor = math.prod(sizes[k] for k in before)
            if factor > 1:
                placements[m] = _StridedShard(dims[m], split_factor=factor)
    elif kind == "interleaved" and order:
        # No dimension after the last one explains its factor.
        last = order[-1]
        placements[last] = _StridedShard(dims[last], split_factor=chance.randint(2, 4))
    members = math.prod(sizes)
    ranks = chance.sample(range(world), members) if chance.random() < 0.5 else list(range(members))
    absent = [rank for rank in range(world) if rank not in ranks and chance.random() < 0.5]
    return OnMesh(tuple(ranks), sizes, tuple(placements), tuple(order), kind == "interleaved", tuple(absent))


@st.composite
def in_boxes(draw: st.DrawFn, world: int, shape: Ints) -> InBoxes:
    """Return boxes cut at random, box after box."""
    boxes = [((0,) * len(shape), shape)]
    chance = random.Random(draw(st.integers(0, 999)))
    for _ in range(draw(st.integers(0, 8)) if math.prod(shape) else 0):
        offset, extents = boxes.pop(chance.randrange(len(boxes)))
        divisible = [d for d, n in enumerate(extents) if n > 1]
        if not divisible:
            boxes.append((offset, extents))
            continue
        d = chance.choice(divisible)
        at = chance.randrange(1, extents[d])
        boxes.append((offset, (*extents[:d], at, *extents[d + 1 :])))
        boxes.append(
            ((*offset[:d], offset[d] + at, *offset[d + 1 :]), (*extents[:d], extents[d] - at, *extents[d + 1 :]))
        )
    ranks = [tuple(chance.sample(range(world), chance.choice([1, 1, 1, chance.randint(1, world)]))) for _ in boxes]
    return InBoxes(tuple(boxes), tuple(ranks))


def plain(world: int, shape: Ints) -> st.SearchStrategy[Plain]:
    return st.sampled_from([tuple(range(world)), (world - 1,), tuple(range(0, world, 2))]).map(Plain)


# -- cases: some tensors, with the options of their saves and loads


@dataclass(frozen=True)
class Entry:
    dtype: str
    shape: Ints
    saved: Layout
    loaded: Layout
    strided_memory: bool
    """Pieces and targets are strided views into larger memory."""


@dataclass(frozen=True)
class Case:
    save_world: int
    load_world: int
    entries: dict[str, Entry]
    save_options: zarrckpt.SaveOptions
    load_options: zarrckpt.LoadOptions
    small: bool
    """Whether the sizes that decide about subchunks are scaled to these small tensors."""
    inline: bool
    """Whether transfers run without threads."""
    seed: int
    portable: bool = False
    """Whether a portable copy of the checkpoint is loaded."""

    def full(self) -> dict[str, torch.Tensor]:
        torch.manual_seed(self.seed)
        return {name: random_tensor(entry.dtype, entry.shape) for name, entry in self.entries.items()}


EXTENTS = {
    0: (1,),
    1: (1, 2, 3, 5, 8, 10, 17, 24, 25, 60, 97),
    2: (1, 2, 3, 5, 7, 8, 10, 13, 16),
    3: (1, 2, 3, 4, 5, 8),
    4: (1, 2, 3, 4, 5),
}
"""The sizes from which a tensor's shape is drawn, by its number of dimensions."""


@st.composite
def entries(draw: st.DrawFn, save_world: int, load_world: int) -> Entry:
    ndim = draw(st.sampled_from([2, 1, 3, 4, 2, 3, 1, 0]))
    shape = tuple(draw(st.sampled_from(EXTENTS[ndim])) for _ in range(ndim))
    if ndim and draw(st.integers(0, 15)) == 15:
        shape = (*shape[:-1], 0)
    saved: Layout = draw(draw(st.sampled_from([*[on_mesh] * 4, in_boxes, plain]))(save_world, shape))
    loaded: Layout = draw(draw(st.sampled_from([on_mesh, on_mesh, in_boxes, plain]))(load_world, shape))
    return Entry(draw(st.sampled_from(list(DTYPES))), shape, saved, loaded, draw(st.booleans()))


WORLDS = st.sampled_from([4, 2, 3, 6, 8, 12, 16, 1])


@st.composite
def cases(draw: st.DrawFn, save_world: int | None = None) -> Case:
    save_world, load_world = save_world or draw(WORLDS), draw(WORLDS)
    drawn = [draw(entries(save_world, load_world)) for _ in range(draw(st.integers(1, 6)))]
    save_options = MergingOptions(
        max_chunk_bytes=draw(st.sampled_from([2**27, 16, 100, 1000])),
        min_piece_bytes=draw(st.sampled_from([0, None, 40, None])),
        fill_bytes=draw(st.sampled_from([2**25, 300, 50])),
        max_inflight_bytes=draw(st.sampled_from([2**29, 1, 100, 1000])),
    )
    load_options = zarrckpt.LoadOptions(
        share_reads=draw(st.booleans()), max_inflight_bytes=draw(st.sampled_from([2**29, 1, 100, 1000]))
    )
    return Case(
        save_world,
        load_world,
        {f"t{number}": entry for number, entry in enumerate(drawn)},
        save_options,
        load_options,
        small=draw(st.booleans()),
        inline=draw(st.integers(0, 15)) < 15,
        seed=draw(st.integers(0, 999)),
        portable=draw(st.booleans()),
    )


class Memory:
    """A rank's tensors, and noise around and between them that must stay unchanged."""

    def __init__(self, entry: Entry, like: torch.Tensor, content: torch.Tensor | None) -> None:
        # Twice the elements, with reversed dimensions: a piece is every second element.
        shape = (*reversed(like.shape), 2) if entry.strided_memory else tuple(like.shape)
        self._whole = random_tensor(entry.dtype, shape)
        backwards = tuple(reversed(range(like.dim())))
        self.piece = self._whole[..., 0].permute(backwards) if entry.strided_memory else self._whole
        if content is not None:
            self.piece.copy_(content)
        self._noise = bits(self._whole[..., 1]) if entry.strided_memory else b""
        self._strided = entry.strided_memory

    def untouched(self) -> bool:
        return not self._strided or bits(self._whole[..., 1]) == self._noise


@contextlib.contextmanager
def small_sizes(small: bool) -> Iterator[None]:
    """Patch the sizes: subchunks in chunks above 60 bytes, and requests of a few subchunks."""
    sizes = {
        chunking: {"SUBCHUNK_ABOVE": 60, "SUBCHUNK_BYTES": 30, "USUAL_SUBCHUNK": (20, 80), "ANY_SUBCHUNK": (4, 160)},
        _transfer: {"READ_BYTES": 100},
        _sharing: {"READ_BYTES": 60, "_MIN_RANGE_BYTES": 20},
        owners: {"BUNDLE_BYTES": 50},
    }
    sizes[chunking] |= {"_ODD_GRID_MIN_CHUNK": 20, "_PADDING": 4}
    with contextlib.ExitStack() as stack:
        for module, values in sizes.items():
            for name, value in values.items():
                stack.enter_context(patch.object(module, name, value if small else getattr(module, name)))
        # It was filled under other sizes.
        chunking._subchunks.cache_clear()
        yield
    chunking._subchunks.cache_clear()


def saved_state(case: Case, full: Mapping[str, torch.Tensor], rank: int) -> dict[str, Any]:
    """Return a rank's part of the state, with its keys in random order."""
    state: dict[str, Any] = {"step": case.seed}
    for name, entry in case.entries.items():
        pieces = entry.saved.pieces(full[name], rank)
        if pieces is not None:
            held = [Memory(entry, piece, piece).piece for piece in pieces]
            state[name] = entry.saved.leaf(full[name], held, rank)
    names = list(state)
    random.Random(case.seed + rank).shuffle(names)
    return {"model": {name: state[name] for name in names}}


class Targets:
    """A rank's targets, and their expected elements after the load."""

    def __init__(self, case: Case, full: Mapping[str, torch.Tensor], rank: int) -> None:
        self._rank = rank
        self._step = case.seed
        self._expected: dict[str, list[torch.Tensor]] = {}
        self._memory: dict[str, list[Memory]] = {}
        self._targets: dict[str, Any] = {}
        for name, entry in case.entries.items():
            pieces = entry.loaded.pieces(full[name], rank)
            if pieces is not None:
                self._expected[name], self._memory[name] = pieces, [Memory(entry, piece, None) for piece in pieces]
                self._targets[name] = entry.loaded.leaf(full[name], [m.piece for m in self._memory[name]], rank)
        names = list(self._targets)
        random.Random(case.seed - rank).shuffle(names)
        self.state = {"model": {"step": None, **{name: self._targets[name] for name in names}}}

    def check(self) -> None:
        assert self.state["model"]["step"] == self._step
        for name, target in self._targets.items():
            assert self.state["model"][name] is target
            for piece, found in zip(self._expected[name], self._memory[name], strict=True):
                assert bits(found.piece) == bits(piece), f"{name} on rank {self._rank}"
                assert found.untouched(), f"memory beside {name} on rank {self._rank}"


def save(case: Case, full: Mapping[str, torch.Tensor], traffic: Traffic | None = None) -> zarrckpt.SaveReport:
    def on_rank(rank: int) -> zarrckpt.SaveReport:
        return zarrckpt.save(saved_state(case, full, rank), "/checkpoint", options=case.save_options)

    return simulate(on_rank, case.save_world, seed=case.seed, inline=case.inline, traffic=traffic)[0]


def load(case: Case, full: Mapping[str, torch.Tensor]) -> None:
    def on_rank(rank: int) -> None:
        targets = Targets(case, full, rank)
        zarrckpt.load(targets.state, "/checkpoint", options=case.load_options)
        targets.check()

    simulate(on_rank, case.load_world, seed=case.seed, inline=case.inline)


def check_store(case: Case, full: Mapping[str, torch.Tensor], store: MemoryStore) -> None:
    """Check that every object has one writer, and that plain zarr-python reads the saved numbers."""
    checkpoint = zarrckpt.open("/checkpoint")
    # A failed save puts its marker again, to record the failure.
    twice = {key for key, times in store.writes.items() if times > 1}
    twice = {key for key in twice if not re.fullmatch(r"@zarrckpt/\w+/zarr\.json", key) or checkpoint.save_id in key}
    assert not twice, f"written more than once: {twice}"
    group = zarr.open_group(store.zarr_store(), mode="r")
    for name, tensor in full.items():
        path = checkpoint.entry(f"model.{name}").node_path
        array: Any = group[path]
        assert array.shape == tuple(tensor.shape)
        assert np.ascontiguousarray(array[...]).tobytes() == bits(tensor), name
        counts = [-(-n // c) for n, c in zip(array.shape, array.shards or array.chunks, strict=True)]
        keys = {".".join(["c", *map(str, index)]) for index in itertools.product(*map(range, counts))}
        assert {key.rpartition("/")[2] for key in store.objects if key.startswith(f"{path}/c")} == keys
        writers = checkpoint.writers(f"model.{name}")
        assert writers.size == len(keys) and (writers < case.save_world).all()


def chunk_sizes(store: MemoryStore) -> list[int]:
    return [len(data) for key, data in store.objects.items() if key.startswith("model/t") and "/c" in key]


def read_by_two_ranks(store: MemoryStore) -> list[str]:
    """Return the objects of which two ranks have read the same bytes."""
    by_key: dict[str, list[tuple[int, int, int]]] = {}
    for key, *read in store.reads:
        by_key.setdefault(key, []).append((read[0], read[1], read[2]))
    return [
        key
        for key, reads in by_key.items()
        if any(a[2] != b[2] and a[0] < b[1] and b[0] < a[1] for a, b in itertools.combinations(reads, 2))
    ]


def exhaustive(max_examples: int) -> Callable[[T], T]:
    """Return the settings that all properties here share."""
    return settings(derandomize=True, max_examples=max_examples, suppress_health_check=list(HealthCheck))


@exhaustive(60)
@given(cases())
def test_every_sharding_loads_into_every_other(case: Case) -> None:
    full, traffic = case.full(), Traffic()
    with memory_store() as store, small_sizes(case.small), warnings.catch_warnings():
        warnings.simplefilter("error")
        save(case, full, traffic)
        largest = max(chunk_sizes(store), default=0)
        assert traffic.most <= max(case.save_options.max_inflight_bytes, largest, owners.BUNDLE_BYTES)
        check_store(case, full, store)
        if case.portable:
            zarrckpt.copy("/checkpoint", "/checkpoint", overwrite=True, portable_dtypes=True)
        store.reads.clear()
        load(case, full)
        if case.load_options.share_reads and case.inline:
            assert not read_by_two_ranks(store)


@st.composite
def aligned_cases(draw: st.DrawFn) -> Case:
    """Return a case in which at most one mesh dimension cuts each tensor dimension, so every grid is regular."""
    world = draw(WORLDS)
    entries = {}
    for number in range(draw(st.integers(1, 5))):
        ndim = draw(st.sampled_from([2, 1, 3, 0]))
        shape = tuple(draw(st.sampled_from(EXTENTS[ndim])) for _ in range(ndim))
        sizes = draw(st.sampled_from([sizes for sizes in MESHES if math.prod(sizes) <= world]))
        dims = draw(st.permutations([*range(ndim), *[None] * len(sizes)]))[: len(sizes)]
        placements = tuple(Replicate() if d is None else Shard(d) for d in dims)
        order = tuple(m for m, d in enumerate(dims) if d is not None)
        saved = OnMesh(tuple(range(math.prod(sizes))), sizes, placements, order, False, ())
        entries[f"t{number}"] = Entry(draw(st.sampled_from(list(DTYPES))), shape, saved, Plain((0,)), False)
    return Case(
        world,
        1,
        entries,
        MergingOptions(min_piece_bytes=0),
        zarrckpt.LoadOptions(),
        False,
        True,
        draw(st.integers(0, 999)),
    )


@exhaustive(15)
@given(aligned_cases())
def test_pieces_that_fit_a_grid_stay_where_they_are(case: Case) -> None:
    """One object per piece, and no byte between ranks."""
    full, traffic = case.full(), Traffic()
    with memory_store() as store:
        save(case, full, traffic)
        assert traffic.moved == 0
        for name, entry in case.entries.items():
            pieces = [entry.saved.pieces(full[name], rank) for rank in range(case.save_world)]
            starts = {piece[0].storage_offset() for piece in pieces if piece is not None and piece[0].numel()}
            assert sum(key.startswith(f"model/{name}/c") for key in store.objects) == len(starts)


@exhaustive(15)
@given(cases())
def test_every_sharding_loads_with_dcps_planners(case: Case) -> None:
    """DCP's own planners do not handle strides, and pass no notes to the writer."""
    known = {
        name: entry
        for name, entry in case.entries.items()
        if not any(isinstance(layout, OnMesh) and layout.strided for layout in (entry.saved, entry.loaded))
    }
    case = dataclasses.replace(case, entries=known)
    full = case.full()

    def saving(rank: int) -> None:
        writer = zarrckpt.ZarrStorageWriter("/checkpoint", options=case.save_options)
        _save_state_dict(saved_state(case, full, rank), writer, planner=DefaultSavePlanner())

    def loading(rank: int) -> None:
        targets = Targets(case, full, rank)
        reader = zarrckpt.ZarrStorageReader("/checkpoint", options=case.load_options)
        _load_state_dict(targets.state, reader, planner=DefaultLoadPlanner())
        targets.check()

    with memory_store() as store, small_sizes(case.small):
        simulate(saving, case.save_world, seed=case.seed)
        check_store(case, full, store)
        simulate(loading, case.load_world, seed=case.seed)


# -- bytes that each rank writes


@st.composite
def replicated_cases(draw: st.DrawFn) -> Case:
    """Return a case of HSDP or DDP: groups of ranks that hold the same."""
    replicas, shards = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    world = replicas * shards
    entries = {}
    for number in range(draw(st.integers(1, 8))):
        shape = (draw(st.integers(1, 40)) * shards, draw(st.integers(1, 5)))
        on_all: Layout = OnMesh(tuple(range(world)), (replicas, shards), (Replicate(), Shard(0)), (1,), False, ())
        saved = draw(st.sampled_from([on_all, Plain(tuple(range(world)))]))
        entries[f"t{number}"] = Entry("float32", shape, saved, Plain((0,)), False)
    options = MergingOptions(max_chunk_bytes=draw(st.sampled_from([2**27, 64])), min_piece_bytes=0)
    return Case(world, 1, entries, options, zarrckpt.LoadOptions(), False, True, draw(st.integers(0, 999)))


@exhaustive(15)
@given(replicated_cases())
def test_replicas_are_divided_among_their_ranks(case: Case) -> None:
    """No rank writes more than its fair share and one chunk."""
    full = case.full()
    with memory_store() as store:
        report = save(case, full)
        chunks = chunk_sizes(store)
    assert sum(report.rank_bytes) == sum(chunks)
    assert max(report.rank_bytes) <= sum(chunks) / case.save_world + max(chunks)


# -- a rank fails


@dataclass
class Fault:
    """The n-th write or read of the store fails, or every call of one method of one rank's planner."""

    place: int | str | None = None
    rank: int = 0
    failed: set[int] = field(default_factory=set)
    """The ranks on which it has happened."""

    def planner(self, kind: type[P], rank: int, **options: Any) -> P:
        """Return a rank's planner, which fails if the fault is on this rank."""

        def fail(*_: object, storage_meta: object = None, **__: object) -> NoReturn:
            self.happens(rank)

        faulty = type(kind.__name__, (kind,), {self.place: fail} if isinstance(self.place, str) else {})
        return (faulty if rank == self.rank else kind)(**options)

    def happens(self, rank: int) -> NoReturn:
        self.failed.add(rank)
        raise zarrckpt.StorageError(f"the test wants {self.place} to fail on rank {rank}")


class FailingStore(MemoryStore):
    """A store with a fault."""

    def __init__(self) -> None:
        super().__init__()
        self.fault = Fault()
        self._calls = 0

    def fail(self, fault: Fault) -> None:
        self.fault, self._calls = fault, 0

    def put(self, key: str, buffers: Sequence[bytes | bytearray | memoryview]) -> None:
        self._count()
        super().put(key, buffers)

    def read_into(self, key: str, byte_offset: int, buffer: memoryview) -> None:
        self._count()
        super().read_into(key, byte_offset, buffer)

    def _count(self) -> None:
        self._calls += 1
        if self._calls == self.fault.place:
            # A single process begins its save in another thread, which has no rank.
            self.fault.happens(max(current_rank(), 0))


def failures(function: Callable[[], object]) -> set[int]:
    """Return the ranks that DCP names as failed after a call on every rank, none if it succeeds."""
    try:
        function()
    except CheckpointException as err:
        assert all(isinstance(error, zarrckpt.StorageError) for error, _ in err.failures.values()), err.failures
        return set(err.failures)
    return set()


def save_by_dcp(case: Case, coordinator: int = 0, fault: Fault | None = None, **options: Any) -> set[int]:
    """Save on every rank. Return the ranks named as failed, which are the same on all ranks."""
    full, caching = case.full(), options.pop("caching", False)

    def on_rank(rank: int) -> set[int]:
        writer = zarrckpt.ZarrStorageWriter("/checkpoint", options=case.save_options)
        planner = (fault or Fault()).planner(zarrckpt.ZarrSavePlanner, rank, enable_plan_caching=caching)
        state = saved_state(case, full, rank)
        return failures(lambda: _save_state_dict(state, writer, None, coordinator, planner=planner))

    (named,) = {frozenset(named) for named in simulate(on_rank, case.save_world, seed=case.seed, **options)}
    return set(named)


def load_by_dcp(case: Case, coordinator: int = 0, fault: Fault | None = None, **options: Any) -> set[int]:
    full = case.full()

    def on_rank(rank: int) -> set[int]:
        reader = zarrckpt.ZarrStorageReader("/checkpoint", options=case.load_options)
        planner = (fault or Fault()).planner(zarrckpt.ZarrLoadPlanner, rank)
        targets = Targets(case, full, rank)
        named = failures(lambda: _load_state_dict(targets.state, reader, None, coordinator, planner=planner))
        if not named:
            targets.check()
        return named

    (named,) = {frozenset(named) for named in simulate(on_rank, case.load_world, seed=case.seed, **options)}
    return set(named)


METHODS = ["set_up_planner", "create_local_plan", "create_global_plan", "finish_plan"]


@st.composite
def faults(draw: st.DrawFn, world: int, most_calls: int, *methods: str) -> tuple[Fault, int]:
    """Return a fault, and the rank of a coordinator."""
    place = draw(st.one_of(st.integers(1, most_calls), st.sampled_from([*METHODS, *methods])))
    return Fault(place, draw(st.integers(0, world - 1))), draw(st.integers(0, world - 1))


@exhaustive(20)
@given(cases(), st.data())
def test_only_the_failing_rank_is_named(case: Case, data: st.DataObject) -> None:
    """For any step and any coordinator: no save is committed, and the next save and load work."""
    numbers = random.Random(case.seed).sample(range(100), 16)
    with memory_store(FailingStore()) as store, small_sizes(case.small):
        assert isinstance(store, FailingStore)
        world = case.save_world
        fault, coordinator = data.draw(faults(world, 30, "resolve_data"))
        store.fail(fault)
        assert save_by_dcp(case, coordinator, fault, numbers=numbers[:world]) == fault.failed
        if fault.failed:
            assert "zarr.json" not in store.objects
            assert not save_by_dcp(case, coordinator, numbers=numbers[:world])
        world = case.load_world
        fault, coordinator = data.draw(faults(world, 10, "resolve_tensor", "commit_tensor"))
        store.fail(fault)
        assert load_by_dcp(case, coordinator, fault, numbers=numbers[:world]) == fault.failed
        store.fail(Fault())
        assert not load_by_dcp(case, coordinator, numbers=numbers[:world])
        check_store(case, case.full(), store)


def with_settled_dtypes(case: Case) -> Case:
    """Return the case with one dtype per name. DCP ignores dtypes when it compares a plan with the kept one."""
    chance = random.Random(0)
    settled = {f"t{number}": chance.choice(list(DTYPES)) for number in range(6)}
    entries = {name: dataclasses.replace(entry, dtype=settled[name]) for name, entry in case.entries.items()}
    return dataclasses.replace(case, entries=entries)


@exhaustive(15)
@given(st.data())
def test_cached_plans_save_every_sharding(data: st.DataObject) -> None:
    """Saves of two states in turn, some of which fail, while every rank caches its plans."""
    world = data.draw(WORLDS)
    states = st.sampled_from([with_settled_dtypes(data.draw(cases(world))) for _ in range(2)])
    steps = data.draw(st.lists(st.tuples(states, st.sampled_from([None, None, 3, 8, 20])), min_size=2, max_size=5))
    with kept():
        for number, (state, place) in enumerate(steps):
            case = dataclasses.replace(state, seed=state.seed + 1000 * number)
            with memory_store(FailingStore()) as store, small_sizes(case.small):
                assert isinstance(store, FailingStore)
                store.fail(Fault(place))
                assert save_by_dcp(case, caching=True) == store.fault.failed
                if not store.fault.failed:
                    store.fail(Fault())
                    check_store(case, case.full(), store)
                    assert not load_by_dcp(case)


# -- real processes


@dataclass(frozen=True)
class Pair:
    """A tensor and two ways to shard it over real ranks."""

    dtype: str
    shape: Ints
    meshes: tuple[Ints, Ints]
    placements: tuple[tuple[Placement, ...], tuple[Placement, ...]]
    seed: int

    def full(self) -> torch.Tensor:
        torch.manual_seed(self.seed)
        return random_tensor(self.dtype, self.shape)

    def sharded(self, which: int, meshes: Mapping[Ints, DeviceMesh]) -> DTensor:
        # No source rank: every rank cuts its part of the same full tensor itself.
        mesh, placements = meshes[self.meshes[which]], self.placements[which]
        return distribute_tensor(self.full(), mesh, placements, src_data_rank=None)


def random_pairs(seed: int, worlds: tuple[int, int], count: int) -> list[Pair]:
    chance = random.Random(seed)

    def layout(world: int, ndim: int) -> tuple[Ints, tuple[Placement, ...]]:
        shapes = [
            m for m in itertools.product(range(1, world + 1), repeat=chance.randint(1, 4)) if math.prod(m) == world
        ]
        mesh = chance.choice(shapes)
        return mesh, tuple(Replicate() if d < 0 else Shard(d) for d in (chance.randrange(-1, ndim) for _ in mesh))

    pairs = []
    for number in range(count):
        ndim = chance.choice([0, 1, 2, 2, 3, 4])
        shape = tuple(chance.choice((0, *EXTENTS[ndim], *EXTENTS[ndim])) for _ in range(ndim))
        (mesh, placements), (other, others) = (layout(world, ndim) for world in worlds)
        pairs.append(Pair(chance.choice(list(DTYPES)), shape, (mesh, other), (placements, others), seed + number))
    return pairs


def device_meshes(pairs: Sequence[Pair], which: int) -> dict[Ints, DeviceMesh]:
    return {sizes: init_device_mesh("cpu", sizes) for sizes in sorted({pair.meshes[which] for pair in pairs})}


def save_pairs(pairs: Sequence[Pair], urls: Mapping[str, zarrckpt.SaveOptions]) -> None:
    meshes = device_meshes(pairs, 0)
    state = {str(number): pair.sharded(0, meshes) for number, pair in enumerate(pairs)}
    for url, options in urls.items():
        zarrckpt.save(state, url, options=options)


def load_pairs(pairs: Sequence[Pair], urls: Mapping[str, zarrckpt.SaveOptions]) -> list[Pair]:
    """Return the pairs that were loaded with wrong bits."""
    meshes = device_meshes(pairs, 1)
    expected = [pair.sharded(1, meshes).to_local() for pair in pairs]
    wrong = []
    for url in urls:
        state: dict[str, Any] = {}
        for number, pair in enumerate(pairs):
            target = pair.sharded(1, meshes)
            local = target.to_local()
            local.copy_(random_tensor(pair.dtype, tuple(local.shape)))
            state[str(number)] = target
        zarrckpt.load(state, url)
        found = [state[str(number)].to_local() for number in range(len(pairs))]
        wrong += [p for p, a, b in zip(pairs, found, expected, strict=True) if bits(a) != bits(b)]
    return wrong


@pytest.mark.parametrize("worlds", [(4, 3), (3, 4)])
def test_real_meshes_load_into_each_other(tmp_path: Path, worlds: tuple[int, int]) -> None:
    """With merged chunks, whose pieces move over a real mesh, and with one chunk per piece."""
    pairs = random_pairs(1000 * worlds[0] + worlds[1], worlds, 12)
    urls = {
        str(tmp_path / "merged"): MergingOptions(fill_bytes=500),
        str(tmp_path / "apart"): MergingOptions(min_piece_bytes=0),
    }
    run_ranks(save_pairs, pairs, urls, world_size=worlds[0])
    assert run_ranks(load_pairs, pairs, urls, world_size=worlds[1]) == [[]] * worlds[1]
    for url in urls:
        checkpoint = zarrckpt.open(url)
        for number, pair in enumerate(pairs):
            stored = np.ascontiguousarray(checkpoint[str(number)][...]).tobytes()
            assert stored == bits(pair.full()), (url, pair)


def parts_of_real_modules(sizes: Ints, url: str) -> list[str]:
    """Return the parameters whose part under FSDP2 over TP differs from this module's oracle."""
    torch.manual_seed(0)
    layers = [(rows, columns) for rows in (5, 9, 10, 25) for columns in (3, 8)]
    model = torch.nn.Sequential(*[torch.nn.Linear(columns, rows) for rows, columns in layers])
    full = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    names = ("replicate", "shard", "tp") if len(sizes) == 3 else ("shard", "tp")
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    styles = itertools.cycle([ColwiseParallel(), RowwiseParallel()])
    parallelize_module(model, mesh["tp"], {str(n): style for n, style in zip(range(len(layers)), styles, strict=False)})
    fully_shard(model, mesh=mesh[names[:-1]])
    wrong = []
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        cutting = [m for m, placement in enumerate(parameter.placements) if not placement.is_replicate()]
        # Tensor parallelism cut first, then the data-parallel mesh.
        layout = OnMesh((0, 1, 2, 3), sizes, parameter.placements, tuple(reversed(cutting)), False, ())
        (piece,) = layout.pieces(full[name], dist.get_rank()) or [torch.empty(0)]
        if bits(piece) != bits(parameter.to_local()):
            wrong.append(f"{name} {tuple(parameter.shape)} {parameter.placements}")
    zarrckpt.save({"model": model}, url)
    return wrong


@pytest.mark.parametrize("sizes", [(2, 2), (1, 4), (2, 1, 2)])
def test_real_fsdp2_over_tp_is_saved_right(tmp_path: Path, sizes: Ints) -> None:
    """Real modules hold the same parts as simulated ranks. The saved tensors equal the uncut ones."""
    url = str(tmp_path / "checkpoint")
    assert run_ranks(parts_of_real_modules, sizes, url) == [[]] * 4
    torch.manual_seed(0)
    checkpoint = zarrckpt.open(url)
    for number, (rows, columns) in enumerate((rows, columns) for rows in (5, 9, 10, 25) for columns in (3, 8)):
        layer = torch.nn.Linear(columns, rows)
        for name, parameter in layer.named_parameters():
            assert checkpoint[f"model.{number}.{name}"][...].tobytes() == bits(parameter), (number, name)
