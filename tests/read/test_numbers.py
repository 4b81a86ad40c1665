"""Statistics and differences of tensors of every dtype, compared with decimal arithmetic of 60 digits."""

from __future__ import annotations

import decimal
import math
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness.internals import DTYPES
from harness.random_tensors import random_tensor

import zarrckpt
from zarrckpt._inspect.differences import TensorDifference
from zarrckpt._inspect.stats import TensorStats

Parts = tuple[Decimal, Decimal]
Pair = tuple[torch.Tensor, torch.Tensor]


@pytest.fixture(autouse=True)
def sixty_digits() -> Any:
    with decimal.localcontext(prec=60, Emax=decimal.MAX_EMAX, Emin=decimal.MIN_EMIN) as context:
        yield context


def changed(tensor: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return every third element of another tensor, and the rest of the first."""
    mask = torch.arange(tensor.numel()).reshape(tensor.shape) % 3 == 1
    raw = [part.contiguous().view(torch.uint8).reshape(*tensor.shape, -1) for part in (tensor, other)]
    return torch.where(mask[..., None], raw[1], raw[0]).reshape(-1).view(tensor.dtype).reshape(tensor.shape)


def pairs_of(name: str) -> dict[str, Pair]:
    dtype = getattr(torch, name)
    bits = random_tensor(name, (24, 17))
    if DTYPES[name].kind == "bool":
        return {"bits": (bits, changed(bits, ~bits)), "constant": (torch.ones(7, dtype=dtype),) * 2}
    if DTYPES[name].kind in ("int", "uint"):
        info = torch.iinfo(dtype)
        # 9,000 elements are more than one block. Beyond 2 ** 53, neighbours are one number in float64.
        near = np.random.default_rng(1).integers(info.max - 50, info.max, (2, 90, 100), bits.numpy().dtype)
        one, other = map(torch.from_numpy, near)
        ends = [info.min, info.max, 0, 1, info.max]
        pairs = {
            "near": (one, changed(one, other)),
            "ends": (torch.tensor(ends, dtype=dtype), torch.tensor(ends[::-1], dtype=dtype)),
        }
        constant = torch.full((5,), info.max, dtype=dtype)
    else:
        line = 1 + torch.randn(90, 100, dtype=torch.float64) * 2.0**-10
        near = line.to(dtype)
        pairs = {"near": (near, changed(near, line.flip(0).to(dtype)))}
        constant = torch.full((9000,), 0.3).to(dtype)
    return {"bits": (bits, changed(bits, random_tensor(name, (24, 17)))), "constant": (constant,) * 2, **pairs}


def wide_pairs(name: str) -> dict[str, Pair]:
    """Return values whose squares and differences exceed the range of float64."""
    dtype = getattr(torch, name)
    line = torch.randn(3000, dtype=dtype)
    top = torch.full((4,), 1.7e308, dtype=dtype)
    mixed = torch.tensor([1.0, 1e-200, 3e-320, 0.0], dtype=dtype)
    return {
        "large": (line * 1e160, line * 1.01e160),
        "small": (line * 1e-170, torch.zeros_like(line)),
        "far": (line * 1e-170, line * 1e170),
        "opposite": (torch.cat([top, mixed]), torch.cat([-top, mixed / 2])),
        "mixed": (mixed, torch.tensor([1.0, 0, 0, 0], dtype=dtype)),
    }


def parts_of(tensor: torch.Tensor) -> list[tuple[Any, Any]]:
    """Return real and imaginary parts of the elements: floats or integers."""
    if tensor.is_complex():
        return [(z.real, z.imag) for z in tensor.to(torch.complex128).reshape(-1).tolist()]
    values = tensor.to(torch.float64) if tensor.is_floating_point() else tensor
    return [(x, 0) for x in values.reshape(-1).tolist()]


def is_finite(parts: tuple[Any, Any]) -> bool:
    return all(map(math.isfinite, parts))


def is_nan(parts: tuple[Any, Any]) -> bool:
    return any(map(math.isnan, parts))


def size_of(re: Any, im: Any) -> Decimal:
    return abs(Decimal(re)) if not im else (Decimal(re) ** 2 + Decimal(im) ** 2).sqrt()


def expected_stats(tensor: torch.Tensor) -> TensorStats:
    parts = parts_of(tensor)
    finite = [+size_of(*p) if tensor.is_complex() else Decimal(p[0]) for p in parts if is_finite(p)]
    nan = sum(map(is_nan, parts)) if not tensor.is_complex() else int(tensor.abs().isnan().sum())
    counts = len(parts), nan, len(parts) - nan - len(finite), sum(not any(p) for p in parts)
    if not finite:
        return TensorStats(*counts)
    mean = sum(finite) / len(finite)
    std = (sum((x - mean) ** 2 for x in finite) / len(finite)).sqrt() if min(finite) < max(finite) else Decimal(0)
    measures = min(finite), max(finite), mean, std, sum(x * x for x in finite).sqrt()  # type: ignore[union-attr]
    return TensorStats(*counts, *map(float, measures))


def expected_difference(one: torch.Tensor, other: torch.Tensor) -> TensorDifference:
    a, b = parts_of(one), parts_of(other)
    raw = [part.contiguous().reshape(-1).view(torch.uint8).reshape(part.numel(), -1) for part in (one, other)]
    unequal = (raw[0] != raw[1]).any(dim=1).tolist()
    nans = [(is_nan(x), is_nan(y)) for x, y in zip(a, b, strict=True)]
    both = [is_finite(x) and is_finite(y) for x, y in zip(a, b, strict=True)]
    broken = any(u and not f and nan != (True, True) for u, f, nan in zip(unequal, both, nans, strict=True))
    apart = {
        i: size_of(Decimal(x[0]) - Decimal(y[0]), Decimal(x[1]) - Decimal(y[1]))
        for i, (x, y, f) in enumerate(zip(a, b, both, strict=True))
        if f
    }
    sizes = {i: max(size_of(*a[i]), size_of(*b[i])) for i in apart}
    ones, others = (sum(size_of(*p[i]) ** 2 for i in apart) for p in (a, b))
    products = sum((Decimal(p) * Decimal(q) for i in apart for p, q in zip(a[i], b[i], strict=True)), Decimal(0))
    norm = sum(x * x for x in apart.values())
    greatest = max(apart.values(), default=Decimal("nan"))
    at = next((i for i, x in apart.items() if x == greatest and x), None)
    rel_norm = math.nan if broken or not apart else float((norm / ones).sqrt()) if ones else math.inf if norm else 0.0
    return TensorDifference(
        len(a),
        sum(unequal),
        sum(u and not f for u, f in zip(unequal, both, strict=True)),
        *(nans.count(kind) for kind in ((False, True), (True, False), (True, True))),
        float(greatest),
        float(max((x / sizes[i] if x else x for i, x in apart.items()), default=math.nan)),
        float(products / (ones * others).sqrt()) if ones and others and not broken else math.nan,
        rel_norm,
        None if at is None else tuple(map(int, np.unravel_index(at, one.shape))),
        sum(unequal),
        (str(one.dtype).removeprefix("torch."),) * 2,
    )


@pytest.mark.parametrize("name", DTYPES)
def test_numbers_equal_decimal_arithmetic(name: str, tmp_path: Path) -> None:
    torch.manual_seed(len(name))
    pairs = pairs_of(name) | (wide_pairs(name) if name in ("float64", "complex128") else {})
    for side, folder in enumerate(("a", "b")):
        state = {label: pair[side] for label, pair in pairs.items()}
        zarrckpt.save(state, tmp_path / folder, options=zarrckpt.SaveOptions(max_chunk_bytes=3000 * (1 + 9 * side)))
    a, b = zarrckpt.open(tmp_path / "a"), zarrckpt.open(tmp_path / "b")
    stats, found = a.stats(), zarrckpt.diff(a, b).tensors
    whole = DTYPES[name].kind in ("bool", "int", "uint")
    for label, (one, other) in pairs.items():
        expected = expected_stats(one)
        assert vars(stats[label]) == pytest.approx(vars(expected), rel=1e-9, abs=0, nan_ok=True), label
        assert label != "constant" or stats[label].std == 0
        measures = dict(vars(expected_difference(one, other)))
        numbers = dict(vars(found[label]))
        for exact in ("max_abs_at", "dtypes"):
            assert numbers.pop(exact) == measures.pop(exact), (label, exact)
        assert numbers.pop("cosine") == pytest.approx(measures.pop("cosine"), rel=1e-9, abs=1e-12, nan_ok=True), label
        assert numbers == pytest.approx(measures, rel=1e-9, abs=0, nan_ok=True), label
        if whole:
            values, others = one.reshape(-1).tolist(), other.reshape(-1).tolist()
            assert (stats[label].min, stats[label].max) == (min(values), max(values))
            assert found[label].max_abs == max(abs(x - y) for x, y in zip(values, others, strict=True))
