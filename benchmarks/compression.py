"""Gain and cost of compression for tensors like those of a training run, on one core.

Run as ``python -m benchmarks.compression``; prints a Markdown table. Speeds use the thread's own processor time, so
that other programs on the machine change them little.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from zarrckpt._format.compression import Compression, CompressionOption, parse_option

NBYTES = 4 << 20
OPTIONS: list[CompressionOption] = [
    "zstd",
    {"name": "zstd", "level": 3},
    {"name": "zstd", "level": 9},
    "blosc",
    {"name": "blosc", "shuffle": "shuffle"},
    {"name": "blosc", "cname": "zstd", "clevel": 5},
    {"name": "blosc", "cname": "zstd", "clevel": 5, "shuffle": "shuffle"},
]


def weights(count: int) -> np.ndarray:
    """Return normal weights with a standard deviation of 0.02, like those at the start and later in a training."""
    return (np.random.default_rng(0).standard_normal(count) * 0.02).astype(np.float32)


def bfloat16(values: np.ndarray) -> np.ndarray:
    """Return the bits of float32 values rounded to bfloat16."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def adam_moments(count: int, steps: int = 200) -> tuple[np.ndarray, np.ndarray]:
    """Return Adam's moments after some steps of normal gradients whose scale differs between elements."""
    rng = np.random.default_rng(1)
    scale = np.exp(rng.standard_normal(count).astype(np.float32)) * np.float32(1e-4)
    first, second = np.zeros(count, np.float32), np.zeros(count, np.float32)
    for _ in range(steps):
        gradient = rng.standard_normal(count).astype(np.float32) * scale
        first = np.float32(0.9) * first + np.float32(0.1) * gradient
        second = np.float32(0.999) * second + np.float32(0.001) * gradient * gradient
    return first, second


def tensors() -> dict[str, np.ndarray]:
    """Return name -> elements of one subchunk."""
    first, second = adam_moments(NBYTES // 4)
    rounded = bfloat16(weights(NBYTES // 2))
    return {
        "weights, float32": weights(NBYTES // 4),
        "weights, bfloat16": rounded,
        "Adam's first moment, float32": first,
        "Adam's second moment, float32": second,
        "float32 that was bfloat16": rounded[: NBYTES // 4].astype(np.uint32) << 16,
    }


def gigabytes_a_second(work: Callable[[], object], repeats: int = 5) -> float:
    """Return the best of some repeats, in GB of elements per second of processor time."""
    times = []
    for _ in range(repeats):
        began = time.thread_time()
        work()
        times.append(time.thread_time() - began)
    return NBYTES / min(times) / 1e9


def measured(compression: Compression, elements: np.ndarray) -> tuple[float, float, float]:
    """Return bytes over stored bytes, and the speeds of compressing and decompressing."""
    data, itemsize = elements.view(np.uint8), elements.dtype.itemsize
    stored = np.frombuffer(compression.encode(data, itemsize), np.uint8)
    out = np.empty_like(data)
    compression.decode(stored, out)
    assert (out == data).all()
    encode = gigabytes_a_second(lambda: compression.encode(data, itemsize))
    return len(data) / len(stored), encode, gigabytes_a_second(lambda: compression.decode(stored, out))


def main() -> None:
    """Print the table: saved share, and GB/s of compressing and decompressing, per core."""
    samples = tensors()
    print(f"| compression | {' | '.join(samples)} |\n{'|---' * (len(samples) + 1)}|")
    for option in OPTIONS:
        compression = parse_option(option)
        assert compression is not None
        cells = (measured(compression, elements) for elements in samples.values())
        row = " | ".join(f"{100 - 100 / ratio:.0f} %, {put:.1f} / {get:.1f}" for ratio, put, get in cells)
        print(f"| `{option!r}` | {row} |", flush=True)


if __name__ == "__main__":
    main()
