"""Choose the floating tensors that an option casts, and cast their elements. No torch."""

from __future__ import annotations

import math
import threading
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from zarrckpt._errors import warn
from zarrckpt._format.chunk_codec import BoxTarget
from zarrckpt._format.chunk_layout import RawArray, raw_dtype
from zarrckpt._format.dtypes import MAX_E4M3FN, DType, by_torch_name
from zarrckpt._format.matching import matches, select
from zarrckpt._format.root import Root

DTypeOption = str | Mapping[str, str] | None
"""The option ``dtype=``: one dtype for all floating tensors, or pattern -> dtype."""

SCALES = "float8_e8m0fnu"
"""A type of powers of two that scale other tensors, without zero and sign. No tensor is cast to it or from it."""

_SATURATING = "float8_e4m3fn"
"""A type without infinity. As in torch, values beyond its range and infinities become its largest number."""


_COUNTERS = ("step", "global_step", "iteration")
"""The last parts of the names of counters. In bfloat16 a counter stops at 256."""

_WEIGHTS = {"weight", "bias"}
"""Parts of the names of parameters. A parameter with one element is not a counter."""


@dataclass(frozen=True)
class Casts:
    """The tensors that are cast, with their new dtypes, and floating tensors that match and keep their dtype."""

    dtypes: Mapping[str, DType] = field(default_factory=dict)
    uncast: tuple[str, ...] = ()


def parse_dtype(name: object) -> DType:
    """Return a dtype that floating tensors can be cast to. Raises ValueError and UnsupportedValueError."""
    dtype = by_torch_name(str(name))
    if dtype.kind != "float" or dtype.name == SCALES:
        raise ValueError(f"dtype must be a floating dtype such as 'bfloat16', got {dtype.name!r}")
    return dtype


def plan_casts(root: Root, names: Iterable[str], where: str, option: DTypeOption) -> Casts:
    """Choose the new dtypes of some entries. ``where`` describes them in errors.

    Counters and single numbers keep their dtype unless the option has their full name. Raises ValueError for a wrong
    dtype and for a pattern that casts no tensor, KeyMismatchError for a pattern that matches no tensor.
    """
    if option is None:
        return Casts()
    tensors = {fqn: root.tensors[fqn] for fqn in names if fqn in root.tensors}
    floats = {fqn: node for fqn, node in tensors.items() if node.dtype.kind == "float"}
    kept = {fqn for fqn, node in floats.items() if node.dtype.name == SCALES} | _single_numbers(root, floats)
    if not isinstance(option, Mapping):
        dtype = parse_dtype(option)
        return Casts({fqn: dtype for fqn in floats if fqn not in kept}, tuple(fqn for fqn in floats if fqn in kept))
    dtypes = {pattern: parse_dtype(name) for pattern, name in option.items()}
    meant = first_patterns(tensors, where, dtypes)
    named = {fqn: fqn for fqn in floats if fqn in dtypes and floats[fqn].dtype.name != SCALES}
    cast = {fqn: pattern for fqn, pattern in meant.items() if fqn in floats and fqn not in kept} | named
    for pattern in dtypes:
        if not any(matches(fqn, pattern) for fqn in cast):
            some = [fqn for fqn in floats if matches(fqn, pattern)]
            found = f"{some[0]!r}, a counter or single number: use its full name to cast it" if some else "none"
            raise ValueError(f"dtype for {pattern!r} in {where}: expected floating tensors, found {found}")
    return Casts(
        {fqn: dtypes[cast[fqn]] for fqn in floats if fqn in cast},
        tuple(fqn for fqn in floats if fqn in meant and fqn not in cast),
    )


def first_patterns(tensors: Collection[str], where: str, patterns: Iterable[str]) -> dict[str, str]:
    """Return the first pattern that matches each tensor. Raises KeyMismatchError for a pattern without tensors."""
    found: dict[str, str] = {}
    for pattern in patterns:
        for fqn in select(tensors, [pattern], f"the tensors of {where}"):
            found.setdefault(fqn, pattern)
    return found


def _single_numbers(root: Root, tensors: Iterable[str]) -> set[str]:
    """Return the tensors that are counters or single numbers: ``step``, 0-d tensors, and state of one element."""
    shapes = {fqn: node.grid.shape[1 if fqn in root.stacks else 0 :] for fqn, node in root.tensors.items()}
    largest: dict[str, int] = {}
    for fqn, shape in shapes.items():
        parent = fqn.rpartition(".")[0]
        largest[parent] = max(math.prod(shape), largest.get(parent, 0))
    found = set()
    for fqn in tensors:
        parent, _, name = fqn.rpartition(".")
        shape = shapes[fqn]
        # The momentum of a parameter of one element has one element too. Next to larger tensors it is a single number.
        weight = name in _WEIGHTS or (largest[parent] == 1 and not _WEIGHTS.isdisjoint(parent.split(".")))
        if name in _COUNTERS or not shape or (math.prod(shape) == 1 and not weight):
            found.add(fqn)
    return found


class CastTarget:
    """A target for the elements of a box, which casts them to another floating type."""

    def __init__(self, old: DType, new: DType, out: BoxTarget) -> None:
        self.dtype = raw_dtype(old.itemsize)
        self.overflowed = 0
        """The number of finite values that a cast lost, see :func:`cast_elements`."""
        self._old, self._new, self._out = old, new, out
        self._lock = threading.Lock()

    def __setitem__(self, index: tuple[slice, ...], elements: RawArray) -> None:
        self._out[index], lost = cast_elements(elements, self._old, self._new)
        if lost:
            with self._lock:
                self.overflowed += lost


def cast_elements(elements: RawArray, old: DType, new: DType) -> tuple[RawArray, int]:
    """Cast raw elements to another floating type as torch 2.13 does, see ``docs/reference/casts.md``.

    Returns them, and the number of finite values beyond the range of the new type.
    """
    values = np.asarray(elements).view(old.numpy)
    with np.errstate(over="ignore", invalid="ignore"):
        # torch and ml_dtypes cast float64 to narrower types through float32. numpy does not for float16.
        narrow = values.astype(np.float32, copy=False) if new.itemsize < 4 else values
        cast = np.asarray(narrow.astype(new.numpy))
    finite = np.isfinite(cast)
    lost = 0 if finite.all() else int(np.count_nonzero(np.isfinite(values))) - int(np.count_nonzero(finite))
    if new.name == _SATURATING:
        beyond = np.isnan(cast) & ~np.isnan(values)
        np.copyto(cast, np.copysign(np.float32(MAX_E4M3FN), narrow).astype(new.numpy), where=beyond)
    return cast.view(raw_dtype(new.itemsize)), lost


def warn_of_overflow(overflowed: Mapping[str, int]) -> None:
    """Issue a UserWarning for each tensor with values that a cast lost. ``overflowed`` is fqn -> number of values."""
    for fqn, count in overflowed.items():
        warn(f"{fqn!r}: {count:,} finite values are beyond the range of the new dtype")
