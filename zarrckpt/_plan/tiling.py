"""Check that the boxes of a tensor tile it: they do not overlap, and leave no gaps."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import numpy as np

from zarrckpt._errors import UnsupportedLayoutError
from zarrckpt._format.grid import Box, Ints


def check_tiling(fqn: str, shape: Ints, boxes: Sequence[Box], tiled: bool) -> None:
    """Check that the boxes tile the tensor, so that every element has one source.

    ``tiled``: the boxes come from one mesh, so they do not overlap.
    """
    for box in () if tiled else boxes:
        if any(o < 0 or o + n > s for o, n, s in zip(*box, shape, strict=True)):
            raise UnsupportedLayoutError(f"a shard of {fqn!r} is outside its shape {shape}: {format_boxes([box])}")
    pair = None if tiled or _side_by_side(shape, boxes) else find_overlap(boxes)
    if pair is not None:
        raise UnsupportedLayoutError(f"shards of {fqn!r} (shape {shape}) overlap: {format_boxes(pair)}")
    size, found = Box((0,) * len(shape), shape).size, sum(box.size for box in boxes)
    if size != found:
        raise UnsupportedLayoutError(
            f"the shards of {fqn!r} hold {found} of the {size} elements of shape {shape}: {format_boxes(boxes)}. Check "
            "that all ranks save, and that the state dict of each has this key"
        )


def _side_by_side(shape: Ints, boxes: Sequence[Box]) -> bool:
    """Whether boxes are cut along exactly one dimension and do not overlap. False if they are cut along several."""
    cut = [dim for dim, n in enumerate(shape) if any(box.shape[dim] != n for box in boxes)]
    if len(cut) != 1:
        return False
    spans = sorted((box.offset[cut[0]], box.offset[cut[0]] + box.shape[cut[0]]) for box in boxes)
    return all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))


def format_boxes(boxes: Iterable[Box]) -> str:
    """Format boxes for a message."""
    ordered = sorted(boxes)
    shown = [f"offset {box.offset} shape {box.shape}" for box in ordered[:6]]
    return "; ".join(shown) + ("; ..." if len(ordered) > 6 else "")


def find_overlap(boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    """Return two boxes that share elements, or None."""
    if len(boxes) < 2:
        return None
    begin = np.array([box.offset for box in boxes], np.int64).reshape(len(boxes), -1)
    end = begin + np.array([box.shape for box in boxes], np.int64).reshape(len(boxes), -1)
    for number in range(1, len(boxes)):
        shared = (begin[:number] < end[number]) & (begin[number] < end[:number])
        hits = np.flatnonzero(shared.all(axis=1))
        if len(hits):
            return boxes[int(hits[0])], boxes[number]
    return None
