"""``Keep``: rules that choose the checkpoints of a run to keep, and the metrics that they use. No I/O, no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from zarrckpt._format.metadata import check_int, check_name
from zarrckpt._jobs import check_limits

Mode = Literal["min", "max"]


@dataclass(frozen=True, kw_only=True)
class Keep:
    """Rules that choose the checkpoints of a run to keep. A checkpoint is deleted if no rule keeps it.

    Args:
        newest: the number of newest checkpoints to keep, by step (default 1).
        best: the number of checkpoints with the best ``metric`` to keep (default 0). Only finite numbers count, as in
            :func:`best`: not None, NaN or infinities. If two are equal, the later one is better.
        metric: the name of a metric that is passed to :meth:`CheckpointManager.step`.
        mode: ``"min"`` if the smallest metric is the best, as for a loss (default), or ``"max"`` if the greatest is, as
            for an accuracy.
        every_steps: keep every checkpoint whose step is a multiple of this number (default: none).

    A pinned checkpoint is always kept. Raises TypeError and ValueError that name the invalid argument.
    """

    newest: int = 1
    best: int = 0
    metric: str | None = None
    mode: Mode = "min"
    every_steps: int | None = None

    def __post_init__(self) -> None:
        check_limits(newest=self.newest)
        check_limits(0, best=self.best)
        if self.every_steps is not None:
            check_limits(every_steps=self.every_steps)
        if self.mode not in get_args(Mode):
            raise ValueError(f"mode must be one of {', '.join(get_args(Mode))}, got {self.mode!r}")
        if self.metric is not None and not isinstance(self.metric, str):
            raise TypeError(f"metric must be the name of a metric, got a {type(self.metric).__name__}")
        if self.best and self.metric is None:
            raise ValueError(f"best={self.best} needs a metric: metric='val_loss'")

    def reasons(self, metadata_of: Mapping[int, Mapping[str, Any]]) -> dict[int, list[str]]:
        """Return the reasons to keep each kept checkpoint, by step.

        ``metadata_of`` has the metadata of each checkpoint by step, which contain its metrics.
        """
        steps = sorted(metadata_of, reverse=True)
        reasons: dict[int, list[str]] = {step: ["newest"] for step in steps[: self.newest]}
        orders = [(metric_order(metadata_of[step], self.metric, self.mode), -step) for step in steps]
        ranked = sorted((order, negative) for order, negative in orders if order is not None)
        for number, (_, negative) in enumerate(ranked[: self.best], 1):
            reasons.setdefault(-negative, []).append("best" if self.best == 1 else f"best {number}")
        if self.every_steps is not None:
            for step in steps:
                if step % self.every_steps == 0:
                    reasons.setdefault(step, []).append(f"every {self.every_steps}")
        return reasons


def finite_metric(value: object) -> int | float | None:
    """Return a metric if it is a finite number, otherwise None. No other value is better or worse than another one."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    # Not math.isfinite, which raises an error for an int that is too large for a float.
    return value if abs(value) < math.inf else None


def metric_order(metadata: Mapping[str, Any], metric: str | None, mode: Mode) -> int | float | None:
    """Return a number that is least for the best metric, or None if a checkpoint's metric is not a finite number."""
    value = finite_metric(metadata.get(metric or ""))
    return -value if value is not None and mode == "max" else value


def checked_metrics(metrics: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Check the metrics of a step, and return them unchanged.

    Numbers, None, and tensors and NumPy values of one element are allowed. Only the types of tensors are checked,
    because reading a value would wait for its device. Raises TypeError and ValueError that name the metric.
    """
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping):
        raise TypeError(f"metrics must be a dict such as {{'val_loss': 2.1}}, got a {type(metrics).__name__}")
    for name, value in metrics.items():
        if not isinstance(name, str):
            raise TypeError(f"metrics: the name {name!r} must be a str")
        check_name(name, "metrics")
        if name == "step":
            raise ValueError("'step' was passed twice: as the step and as a metric")
        if not (value is None or type(value) in (float, int) or _is_one_number(value)):
            raise TypeError(
                f"metrics[{name!r}] is a {type(value).__name__}, expected a number, a tensor or NumPy value of one "
                "element, or None. Pass other descriptions of a checkpoint as metadata"
            )
        if isinstance(value, int):
            check_int(value, f"metrics[{name!r}]")
    return metrics


def _is_one_number(value: object) -> bool:
    if isinstance(value, bool | str | bytes) or getattr(value, "is_meta", False):
        return False
    if isinstance(value, int | float):
        return True
    counted = getattr(value, "numel", None)
    size = counted() if callable(counted) else getattr(value, "size", None)
    kind = str(getattr(value, "dtype", ""))
    return size == 1 and callable(getattr(value, "item", None)) and not any(word in kind for word in _NO_NUMBERS)


_NO_NUMBERS = ("bool", "complex", "str", "<U", "|S", "object", "datetime", "timedelta")
"""Substrings of the names of dtypes whose values are not valid metrics."""
