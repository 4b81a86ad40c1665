"""Who writes what and who fetches what, in integers only: merged grids, owners, rounds, shared reads.

What the package computes from boxes is compared with arrays in which every element is painted.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

import numpy as np
import plan_oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_oracle import Owned, Spread

from zarrckpt import _codec, _owners
from zarrckpt._chunking import (
    FILL_BYTES,
    MAX_CHUNK_BYTES,
    MAX_SUBCHUNK_BYTES,
    MIN_SUBCHUNK_BYTES,
    SUBCHUNKS,
    Subchunks,
    choose_grid,
    default_min_piece_bytes,
    fit_grid,
    overlapping,
)
from zarrckpt._documents import ArrayNode
from zarrckpt._dtypes import by_name
from zarrckpt._grid import Box, Grid, Ints
from zarrckpt._owners import Dealt, Held, Holders, Pieces
from zarrckpt._sharing import Run, Shares, plan_shares, wanted_boxes

KIB, MIB = 1 << 10, 1 << 20
ALWAYS = 1 << 62
"""A ``min_piece_bytes`` that merges everything."""


# -- tensors cut into boxes


def cut(shape: Ints, parts: Sequence[int]) -> list[Box]:
    """What ``torch.chunk`` makes of each dimension: steps of ceil(n / parts), perhaps fewer of them."""
    spans = [
        [(begin, min(step, n - begin)) for begin in range(0, n, step)]
        for n, step in ((n, -(-n // w) or 1) for n, w in zip(shape, parts, strict=True))
    ]
    return [Box(*map(tuple, zip(*dims, strict=True))) for dims in itertools.product(*spans)] if shape else [Box((), ())]


@st.composite
def anyhow(draw: st.DrawFn, box: Box, depth: int = 4) -> list[Box]:
    """A box cut in two at any place, and its parts again."""
    dims = [dim for dim, n in enumerate(box.shape) if n > 1]
    if not depth or not dims or not draw(st.integers(0, 4)):
        return [box]
    dim = draw(st.sampled_from(dims))
    low = draw(st.integers(1, box.shape[dim] - 1))

    def part(begin: int, n: int) -> Box:
        offset, shape = list(box.offset), list(box.shape)
        offset[dim], shape[dim] = offset[dim] + begin, n
        return Box(tuple(offset), tuple(shape))

    rest = box.shape[dim] - low
    return draw(anyhow(part(0, low), depth - 1)) + draw(anyhow(part(low, rest), depth - 1))


def shapes(longest: int, dims: int = 3, least: int = 0) -> st.SearchStrategy[Ints]:
    return st.lists(st.integers(1, longest), min_size=least, max_size=dims).map(tuple)


@st.composite
def tiled(draw: st.DrawFn, longest: int, dims: int = 3) -> tuple[Ints, list[Box]]:
    """A shape, and boxes that tile it: cut evenly, or anyhow."""
    shape = draw(shapes(longest, dims))
    if draw(st.booleans()):
        boxes = cut(shape, [draw(st.integers(1, 5)) for _ in shape])
    else:
        boxes = draw(anyhow(Box((0,) * len(shape), shape)))
    return shape, draw(st.permutations(boxes))


sizes = st.sampled_from([1, 2, 4, 8])


def check_divided(grid: Grid) -> None:
    assert len(grid.shape) == len(grid.chunk_shape) and all(c >= 1 for c in grid.chunk_shape)
    if grid.subchunk_shape is not None:
        assert grid.subchunk_shape != grid.chunk_shape
        assert all(c % s == 0 for c, s in zip(grid.chunk_shape, grid.subchunk_shape, strict=True))


# -- grids


@settings(deadline=None)
@given(tiled(40), sizes, st.integers(1, 3000), st.integers(1, 3000), st.sampled_from([0, 30, 500, ALWAYS]))
def test_pieces_are_whole_chunks_or_merged_within_the_bounds(
    case: tuple[Ints, list[Box]], itemsize: int, fill: int, largest: int, least: int
) -> None:
    shape, boxes = case
    grid = choose_grid(shape, boxes, itemsize, max_chunk_bytes=largest, min_piece_bytes=least, fill_bytes=fill)
    check_divided(grid)
    aligned = fit_grid(shape, boxes, itemsize, largest)
    total = math.prod(shape) * itemsize
    if aligned is not None and (len(boxes) == 1 or total >= least * len(boxes)):
        assert grid == aligned
        assert all(len(pieces) == 1 for pieces in pieces_of(grid, boxes).values())
        return
    limit = min(fill, largest)
    nbytes = math.prod(grid.chunk_shape) * itemsize
    assert nbytes <= max(limit, itemsize)
    # Of four times as many objects as would do, most pay for nothing.
    assert grid.num_chunks == 1 or nbytes * 4 >= limit


@settings(max_examples=300, deadline=None)
@given(tiled(6000, dims=2), sizes, st.integers(20, 25), st.sampled_from(SUBCHUNKS))
def test_subchunks_of_merged_chunks_divide_them_and_are_neither_large_nor_many(
    case: tuple[Ints, list[Box]], itemsize: int, fill_bits: int, subchunks: Subchunks
) -> None:
    shape, boxes = case
    fill = 1 << fill_bits
    grid = choose_grid(shape, boxes, itemsize, min_piece_bytes=ALWAYS, fill_bytes=fill, subchunks=subchunks)
    check_divided(grid)
    if len(boxes) == 1:
        return
    nbytes = math.prod(grid.chunk_shape) * itemsize
    assert nbytes <= 1 << fill_bits
    # Padding is a choice of the grid alone: never much.
    padded = math.prod(max(c, n) for c, n in zip(grid.chunk_shape, shape, strict=True))
    assert padded <= math.prod(shape) * (17 / 16) ** len(shape)
    if grid.subchunk_shape is None:
        return
    sub = math.prod(grid.subchunk_shape) * itemsize
    assert nbytes > MIB
    # A subchunk takes 24 bytes more than its elements, and a step of Python: no more than pieces need, or few.
    assert sub >= 16 * KIB or math.prod(grid.sub_counts) <= 128 * len(boxes)
    assert sub <= MAX_SUBCHUNK_BYTES or not any(_divisible(n) for n in grid.subchunk_shape)


def _divisible(n: int) -> bool:
    """Whether a number has divisors of all sizes, if not close ones."""
    return all(any(n % d == 0 for d in range(-(-wanted // 8), wanted + 1)) for wanted in range(1, n))


def amplification(grid: Grid, itemsize: int, boxes: Sequence[Box]) -> tuple[float, float]:
    """Bytes of the subchunks that a box touches, over the bytes of the box: the greatest, and that of all together."""
    touched = [sum(len(list(_places(grid, chunk, box))) for chunk in grid.chunks_of(box)) for box in boxes]
    cell = math.prod(grid.subchunk_shape or grid.chunk_shape) * itemsize
    ratios = [count * cell / (box.size * itemsize) for count, box in zip(touched, boxes, strict=True)]
    return max(ratios), sum(touched) * cell / sum(box.size * itemsize for box in boxes)


def _places(grid: Grid, chunk: Ints, box: Box) -> Iterator[int]:
    """Where the subchunks of a chunk lie that share elements with a box: counted with the first dimension fastest."""
    sub = grid.subchunk_shape or grid.chunk_shape
    counts = [c // s for c, s in zip(grid.chunk_shape, sub, strict=True)]
    ranges = []
    for index, extent, cell, count, offset, n in zip(chunk, grid.chunk_shape, sub, counts, *box, strict=True):
        begins = [index * extent + place * cell for place in range(count)]
        ranges.append([p for p, begin in enumerate(begins) if begin < offset + n and offset < begin + cell])
    for cell_index in itertools.product(*ranges):
        yield sum(i * math.prod(counts[:dim]) for dim, i in enumerate(cell_index))


@pytest.mark.parametrize("rows", [4096, 14336, 1024, 128256])
@pytest.mark.parametrize("parts", [(64, 1), (512, 1), (1, 64), (8, 8), (64, 8)], ids=str)
def test_who_held_a_piece_reads_little_more_than_it_again(rows: int, parts: tuple[int, int]) -> None:
    """Weights of 4096 columns in float32; below 256 KiB a piece shares its subchunk with others."""
    shape, ranks = (rows, 4096), math.prod(parts)
    boxes = cut(shape, parts)
    grid = choose_grid(shape, boxes, 4, min_piece_bytes=default_min_piece_bytes(ranks))
    assert grid.num_chunks <= max(len(boxes), math.prod(shape) * 4 / FILL_BYTES) and len(boxes) >= ranks - 1
    assert math.prod(grid.chunk_shape) * 4 <= MAX_CHUNK_BYTES
    greatest, mean = amplification(grid, 4, boxes)
    piece = boxes[0].size * 4
    assert mean <= max(1.01, 256 * KIB / piece)
    assert greatest <= max(1.03, 256 * KIB / piece)
    # Nor are there more requests than pays: smaller subchunks are for smaller chunks only.
    assert grid.subchunk_shape is None or math.prod(grid.subchunk_shape) * 4 >= MIN_SUBCHUNK_BYTES


@settings(max_examples=300, deadline=None)
@given(shapes(5000, dims=2, least=1), st.data(), sizes)
def test_even_pieces_are_read_with_little_more(shape: Ints, data: st.DataObject, itemsize: int) -> None:
    boxes = cut(shape, [data.draw(st.sampled_from([1, 2, 7, 8, 64])) for _ in shape])
    grid = choose_grid(shape, boxes, itemsize, min_piece_bytes=ALWAYS)
    if len(boxes) == 1 or math.prod(grid.chunk_shape) * itemsize <= MIB:
        return
    for box in boxes[:4]:
        touched = amplification(grid, itemsize, [box])[0] * box.size * itemsize
        assert touched <= 20 * max(boxes[0].size * itemsize, 256 * KIB)


@pytest.mark.parametrize(
    ("shape", "parts"),
    [
        # A prime number of rows: its only divisor is itself.
        ((1021, 4096), (64, 1)),
        ((100003, 8), (8, 1)),
        ((4099, 1024), (1, 1)),
    ],
)
def test_prime_extents_are_padded_a_little_for_subchunks(shape: Ints, parts: Ints) -> None:
    boxes = cut(shape, parts)
    if len(boxes) == 1:  # cut at odd places
        cuts = [0, 500, 1001, 1500, 2003, 2500, 3001, 3500, shape[0]]
        boxes = [Box((a, 0), (b - a, shape[1])) for a, b in itertools.pairwise(cuts)]
    grid = choose_grid(shape, boxes, 4, min_piece_bytes=ALWAYS)
    assert grid.num_chunks == 1 and shape[0] < grid.chunk_shape[0] <= shape[0] * 17 / 16
    assert grid.subchunk_shape is not None and math.prod(grid.subchunk_shape) * 4 >= MIN_SUBCHUNK_BYTES
    assert amplification(grid, 4, boxes)[1] <= 1.5


@settings(deadline=None)
@given(st.integers(1, 3), st.data())
def test_overlapping_finds_a_pair_if_there_is_one(dims: int, data: st.DataObject) -> None:
    ints = st.lists(st.integers(0, 4), min_size=dims, max_size=dims).map(tuple)
    lengths = st.lists(st.integers(1, 3), min_size=dims, max_size=dims).map(tuple)
    boxes = data.draw(st.lists(st.builds(Box, ints, lengths), max_size=6))
    held: list[set[Ints]] = [
        set(itertools.product(*(range(o, o + n) for o, n in zip(*box, strict=True)))) for box in boxes
    ]
    found = overlapping(boxes)
    if found is None:
        assert len(set().union(*held)) == sum(map(len, held))
    else:
        places = [boxes.index(found[0]), len(boxes) - 1 - boxes[::-1].index(found[1])]
        assert places[0] != places[1] and held[places[0]] & held[places[1]]


# -- owners


def pieces_of(grid: Grid, boxes: Sequence[Box]) -> dict[Ints, list[tuple[int, Box]]]:
    """For each chunk its pieces: the number of a box, and what it has of the chunk."""
    found: dict[Ints, list[tuple[int, Box]]] = {}
    pieces = Pieces(grid, boxes)
    places = list(itertools.product(*map(range, grid.counts)))
    columns = (pieces.chunk, pieces.held, pieces.offset, pieces.shape)
    for chunk, number, offset, shape in zip(*(column.tolist() for column in columns), strict=True):
        cell = places[pieces.number[chunk]]
        found.setdefault(cell, []).append((number, Box(tuple(offset), tuple(shape))))
    return found


def deal(spreads: Sequence[Spread], world_size: int, limit: int | None = None) -> list[Owned]:
    """What the package plans, as objects."""
    holders: dict[int, Holders] = {}
    columns = [
        # Tensors that are held alike share what is known of them.
        _owners.Spread(s.name, s.grid, s.itemsize, holders.setdefault(hash(tuple(s.held)), Holders(s.held)), s.whole)
        for s in spreads
    ]
    dealt = _owners.deal(columns, world_size)
    if limit is not None:
        _owners.schedule_chunks(dealt, limit)
    return [chunk for number, spread in enumerate(spreads) for chunk in _owned(dealt, number, spread)]


def _owned(dealt: Dealt, number: int, spread: Spread) -> Iterator[Owned]:
    chunks = dealt.chunks_of(number)
    bounds = dealt.geometries[number].pieces.first.tolist()
    rows = (dealt.nbytes, dealt.owner, dealt.round)
    pieces = pieces_of(spread.grid, [held.box for held in spread.held])
    numbers = zip(*(row[chunks].tolist() for row in rows), itertools.pairwise(bounds), pieces.items(), strict=True)
    for nbytes, owner, when, span, (cell, parts) in numbers:
        yield Owned(spread, cell, parts, nbytes, owner, dealt.sources[number][slice(*span)].tolist(), when)


@settings(deadline=None)
@given(tiled(12), sizes, st.integers(1, 400))
def test_pieces_tile_every_chunk(case: tuple[Ints, list[Box]], itemsize: int, fill: int) -> None:
    shape, boxes = case
    grid = choose_grid(shape, boxes, itemsize, min_piece_bytes=ALWAYS, fill_bytes=fill)
    painted = np.full(shape, -1)
    for number, box in enumerate(boxes):
        painted[box.slices()] = number
    seen = np.zeros(shape, int)
    pieces = pieces_of(grid, boxes)
    assert len(pieces) == grid.num_chunks
    for index, parts in pieces.items():
        chunk = grid.chunk_box(index)
        assert sum(box.size for _, box in parts) == chunk.size
        for number, box in parts:
            seen[box.slices()] += 1
            assert (painted[box.slices()] == number).all()
            assert all(o >= c and o + n <= c + m for o, n, c, m in zip(*box, *chunk, strict=True))
    assert (seen == 1).all()


@st.composite
def spread_out(draw: st.DrawFn) -> tuple[list[Spread], int]:
    """Some tensors, each box on some of the ranks; some of them on every rank, to be written by one."""
    world_size = draw(st.integers(1, 6))
    some = st.sets(st.integers(0, world_size - 1), min_size=1).map(lambda ranks: tuple(sorted(ranks)))
    spreads = []
    for number in range(draw(st.integers(0, 6))):
        itemsize = draw(sizes)
        whole = draw(st.booleans())
        shape, boxes = draw(tiled(12))
        boxes = [Box((0,) * len(shape), shape)] if whole else boxes
        limit = draw(st.integers(1, 600))
        grid = choose_grid(
            shape,
            boxes,
            itemsize,
            min_piece_bytes=draw(st.sampled_from([0, ALWAYS])),
            fill_bytes=limit,
            max_chunk_bytes=limit,
        )
        spreads.append(Spread(f"t{number}", grid, itemsize, [Held(box, draw(some)) for box in boxes], whole))
    return spreads, world_size


def check_owned(chunk: Owned) -> None:
    held = chunk.spread.held
    bytes_of: Counter[int] = Counter()
    for number, box in chunk.pieces:
        for rank in held[number].ranks:
            bytes_of[rank] += box.size
    assert 2 * bytes_of[chunk.owner] >= max(bytes_of.values())
    assert len(chunk.sources) == len(chunk.pieces)
    for source, (number, _) in zip(chunk.sources, chunk.pieces, strict=True):
        assert source in held[number].ranks
        assert source == chunk.owner or chunk.owner not in held[number].ranks


@settings(deadline=None)
@given(spread_out())
def test_every_chunk_has_one_owner_that_holds_much_of_it(case: tuple[list[Spread], int]) -> None:
    spreads, world_size = case
    owned = deal(spreads, world_size)
    expected = [(s.name, index) for s in spreads for index in itertools.product(*map(range, s.grid.counts))]
    assert sorted((chunk.spread.name, chunk.index) for chunk in owned) == sorted(expected)
    for chunk in owned:
        check_owned(chunk)
    for spread in spreads:
        owners = {chunk.owner for chunk in owned if chunk.spread is spread}
        assert len(owners) == 1 or not spread.whole


@settings(deadline=None)
@given(st.integers(1, 8), st.lists(st.tuples(st.integers(1, 300), st.integers(1, 300)), max_size=30), st.data())
def test_what_all_ranks_hold_is_dealt_evenly(world: int, tensors: list[tuple[int, int]], data: st.DataObject) -> None:
    everyone = tuple(range(world))
    spreads = [
        Spread(str(number), Grid((n,), (min(n, chunk),)), 4, [Held(Box((0,), (n,)), everyone)])
        for number, (n, chunk) in enumerate(tensors)
    ]
    # And what only one rank has.
    alone = data.draw(st.lists(st.integers(0, 2000), min_size=world, max_size=world))
    spreads += [
        Spread(f"own{r}", Grid((n,), (max(n, 1),)), 4, [Held(Box((0,), (n,)), (r,))]) for r, n in enumerate(alone)
    ]
    owned = deal(spreads, world)
    loads = Counter({rank: 0 for rank in everyone})
    for chunk in owned:
        loads[chunk.owner] += chunk.nbytes
    total, fixed = sum(loads.values()), 4 * max(alone)
    shared = [chunk.nbytes for chunk in owned if not chunk.spread.name.startswith("own")]
    # The largest first, each to who has least: never more than the mean and one more chunk.
    assert max(loads.values()) <= max(fixed, total / world + max(shared, default=0))


def test_the_largest_are_dealt_first() -> None:
    sizes = [1, 1, 1, 1, 1, 1, 6, 2, 2, 2, 6]
    spreads = [Spread(str(k), Grid((n,), (n,)), 4, [Held(Box((0,), (n,)), (0, 1, 2, 3))]) for k, n in enumerate(sizes)]
    loads = Counter[int]()
    for chunk in deal(spreads, 4):
        loads[chunk.owner] += chunk.nbytes
    assert sorted(loads.values()) == [24, 24, 24, 24]


@settings(max_examples=300, deadline=None)
@given(spread_out(), st.integers(1, 1500), st.integers(1, 4))
def test_columns_hold_what_one_chunk_after_the_other_gives(
    case: tuple[list[Spread], int], limit: int, layers: int
) -> None:
    """Owners, sources and rounds are those of the rules as ``plan_oracle`` has them, for many layers alike, too."""
    spreads, world_size = case
    spreads = [dataclasses.replace(s, name=f"{s.name}.{layer}") for layer in range(layers) for s in spreads]
    expected = plan_oracle.deal(spreads, world_size)
    plan_oracle.schedule_chunks(expected, world_size, limit)
    assert deal(spreads, world_size, limit) == expected


# -- rounds


@settings(deadline=None)
@given(
    st.integers(1, 5).flatmap(
        lambda world: st.tuples(
            st.just(world),
            st.lists(st.dictionaries(st.integers(0, world - 1), st.integers(1, 90), max_size=world), max_size=40),
        )
    ),
    st.integers(1, 200),
)
def test_no_rank_is_above_the_limit_but_for_a_single_transfer(
    case: tuple[int, list[dict[int, int]]], limit: int
) -> None:
    world, needs = case
    columns = [(np.array([*need], np.int64), np.array([*need.values()], np.int64)) for need in needs]
    numbers = _owners.schedule(columns, world, limit)
    assert len(numbers) == len(needs)
    in_round: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    last = dict.fromkeys(range(world), 0)
    for number, need in zip(numbers, needs, strict=True):
        for rank, nbytes in need.items():
            in_round[rank, number].append(nbytes)
            # Each rank's own transfers are in order, so that neither side waits for a round that the other is past.
            assert number >= last[rank]
            last[rank] = number
    assert all(sum(sizes) <= limit or len(sizes) == 1 for sizes in in_round.values())
    # Without need there is no further round.
    if all(sum(need.get(rank, 0) for need in needs) <= limit for rank in range(world)):
        assert set(numbers) <= {0}


@settings(deadline=None)
@given(spread_out(), st.integers(1, 1500))
def test_pieces_move_in_rounds_within_the_limit(case: tuple[list[Spread], int], limit: int) -> None:
    spreads, world_size = case
    owned = deal(spreads, world_size, limit)
    memory: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    for chunk in owned:
        foreign = list(chunk.foreign)
        assert (chunk.round >= 0) == bool(foreign)
        if foreign:
            whole = math.prod(chunk.spread.grid.chunk_shape) * chunk.spread.itemsize
            need = Counter({chunk.owner: whole})
            for source, box in foreign:
                assert source != chunk.owner
                need[source] += box.size * chunk.spread.itemsize
                need[chunk.owner] += box.size * chunk.spread.itemsize
            for rank, nbytes in need.items():
                memory[rank, chunk.round].append(nbytes)
    assert all(sum(sizes) <= limit or len(sizes) == 1 for sizes in memory.values())
    rounds = {number for _, number in memory}
    assert rounds == set(range(len(rounds)))


# -- shared reads


@st.composite
def targets(draw: st.DrawFn) -> tuple[dict[str, ArrayNode], list[list[tuple[str, Box]]]]:
    """Stored arrays, with subchunks and without, and the boxes of them that each rank is to fill."""
    nodes: dict[str, ArrayNode] = {}
    for number in range(draw(st.integers(1, 3))):
        shape = draw(shapes(12))
        sub = tuple(draw(st.integers(1, 4)) for _ in shape)
        chunk = tuple(n * draw(st.integers(1, 3)) for n in sub)
        grid = Grid(shape, chunk, sub if draw(st.booleans()) and chunk != sub else None)
        nodes[f"t{number}"] = ArrayNode(f"t{number}", grid, by_name("float32"))
    world_size = draw(st.integers(1, 5))
    wanted: list[list[tuple[str, Box]]] = [[] for _ in range(world_size)]
    for fqn, node in nodes.items():
        for own in wanted:
            for _ in range(draw(st.integers(0, 2))):
                offset = tuple(draw(st.integers(0, n)) for n in node.grid.shape)
                shape = tuple(draw(st.integers(0, n - o)) for o, n in zip(offset, node.grid.shape, strict=True))
                own.append((fqn, Box(offset, shape)))
            if draw(st.booleans()):
                own.append((fqn, Box((0,) * len(node.grid.shape), node.grid.shape)))
    return nodes, wanted


Place = tuple[str, Ints, int]


def needed(nodes: dict[str, ArrayNode], own: list[tuple[str, Box]]) -> set[Place]:
    """The stored subchunks that hold any element of some boxes."""
    return {
        (fqn, chunk, place)
        for fqn, box in own
        if box.size
        for chunk in itertools.product(*map(range, nodes[fqn].grid.counts))
        for place in _places(nodes[fqn].grid, chunk, box)
    }


def places(run: Run) -> list[Place]:
    return [(run.fqn, run.chunk, run.first + place) for place in range(run.cells)]


def run_bytes(nodes: dict[str, ArrayNode], run: Run) -> int:
    node = nodes[run.fqn]
    return run.cells * _codec.subchunk_bytes(node.grid, node.dtype.itemsize)


def check_both_sides(shares: list[Shares]) -> None:
    """What one rank sends another in a round is what that one expects from it, in the same order."""
    for number in {number for own in shares for number in own}:
        for sender, receiver in itertools.permutations(range(len(shares)), 2):
            sends, receives = shares[sender].get(number), shares[receiver].get(number)
            sent = [run for run, others in sends.reads if receiver in others] if sends else []
            assert sent == ([run for run, source in receives.receives if source == sender] if receives else [])


@settings(deadline=None)
@given(targets(), st.integers(1, 800))
def test_what_several_ranks_need_is_fetched_by_one_of_them(
    case: tuple[dict[str, ArrayNode], list[list[tuple[str, Box]]]], limit: int
) -> None:
    nodes, wanted = case
    shares = plan_shares(nodes, wanted_boxes(wanted), len(wanted), limit)
    assert len(shares) == len(wanted)
    needs = [needed(nodes, own) for own in wanted]
    holders: defaultdict[Place, set[int]] = defaultdict(set)
    for rank, own in enumerate(needs):
        for place in own:
            holders[place].add(rank)
    fetched: Counter[Place] = Counter()
    received: Counter[tuple[Place, int]] = Counter()
    for rank, own in enumerate(shares):
        assert list(own) == sorted(own)
        for step in own.values():
            for run, others in step.reads:
                for place in places(run):
                    fetched[place] += 1
                    assert holders[place] == {rank, *others} and rank not in others
            for run, _ in step.receives:
                received.update((place, rank) for place in places(run))
            sizes = [run_bytes(nodes, run) for run, _ in [*step.reads, *step.receives]]
            assert sum(sizes) <= limit or len(sizes) == 1
            assert all(
                n <= limit or run.cells == 1 for n, (run, _) in zip(sizes, [*step.reads, *step.receives], strict=True)
            )
    shared = {place for place, ranks in holders.items() if len(ranks) > 1}
    assert fetched == Counter(shared)
    assert set(received.values()) <= {1}
    assert len(received) == sum(len(holders[place]) - 1 for place in shared)
    check_both_sides(shares)


@pytest.mark.parametrize("world", [4, 64])
def test_replicas_are_fetched_by_all_ranks_alike(world: int) -> None:
    """Plain weights on every rank: the loads are even, and in each full round every rank has something to fetch."""
    shape, limit = (4096, 4096), 128 * MIB
    grid = fit_grid(shape, [Box((0, 0), shape)], 4)
    assert grid is not None and grid.subchunk_shape is not None
    # Subchunks of 1 MiB, as smaller weights have them.
    nodes = {f"w{n}": ArrayNode(f"w{n}", Grid(shape, (2048, 4096), (512, 512)), by_name("float32")) for n in range(16)}
    boxes = [[(fqn, Box((0, 0), shape)) for fqn in nodes] for _ in range(world)]
    shares = plan_shares(nodes, wanted_boxes(boxes), world, limit)
    check_both_sides(shares)
    loads = [sum(run_bytes(nodes, run) for step in own.values() for run, _ in step.reads) for own in shares]
    longest = max(run_bytes(nodes, run) for own in shares for step in own.values() for run, _ in step.reads)
    assert sum(loads) == 16 * 64 * (MIB + 4)
    assert max(loads) - min(loads) <= longest
    rounds = max(number for own in shares for number in own) + 1
    # Each rank takes all that a round holds.
    assert rounds <= 16 * 64 * (MIB + 4) / (limit - longest) + 1
    assert sum(bool(step.reads) for own in shares for step in own.values()) >= world * (rounds - 1)


def test_pieces_that_nobody_shares_are_left_alone() -> None:
    node = ArrayNode("w", Grid((8, 8), (2, 8)), by_name("float32"))
    boxes = [[("w", Box((2 * rank, 0), (2, 8)))] for rank in range(4)]
    assert plan_shares({"w": node}, wanted_boxes(boxes), 4, 100) == [{}, {}, {}, {}]
