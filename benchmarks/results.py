"""Results of a set of measurements: speeds of contenders, and figures with their goals."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Speed:
    """One contender's times: seconds of every save and load of ``nbytes``, empty if it is not installed.

    ``saved`` and ``loaded`` are the server's counts of a save and a load, if it counts. ``save_processor`` and
    ``load_processor`` are the seconds of this process's processors.
    """

    group: str
    name: str
    kind: str
    nbytes: int
    save: list[float] = field(default_factory=list)
    load: list[float] = field(default_factory=list)
    saved: dict[str, Any] = field(default_factory=dict)
    loaded: dict[str, Any] = field(default_factory=dict)
    save_processor: list[float] = field(default_factory=list)
    load_processor: list[float] = field(default_factory=list)

    @property
    def save_rate(self) -> float | None:
        """GB/s, the median."""
        return self.nbytes / statistics.median(self.save) / 1e9 if self.save else None

    @property
    def load_rate(self) -> float | None:
        """GB/s, the median."""
        return self.nbytes / statistics.median(self.load) / 1e9 if self.load else None

    def processor_a_gigabyte(self, which: str) -> float | None:
        """Return the median processor seconds of the client per GB, for "save" or "load"."""
        times = self.save_processor if which == "save" else self.load_processor
        return statistics.median(times) / self.nbytes * 1e9 if times else None


@dataclass(frozen=True)
class Figure:
    """One measured value. ``goal`` is its lower bound, or its upper bound if ``most`` is set."""

    group: str
    what: str
    value: float | None
    unit: str = ""
    goal: float | None = None
    most: bool = False
    note: str = ""

    @property
    def met(self) -> bool | None:
        """Whether the goal is met. None if there is no goal or no value."""
        if self.goal is None or self.value is None:
            return None
        return self.value <= self.goal if self.most else self.value >= self.goal


@dataclass
class Results:
    """All speeds and figures."""

    speeds: list[Speed] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)

    def add(self, other: Results) -> None:
        self.speeds += other.speeds
        self.figures += other.figures

    def as_json(self) -> dict[str, Any]:
        speeds = [asdict(s) | {"save_rate": s.save_rate, "load_rate": s.load_rate} for s in self.speeds]
        return {"speeds": speeds, "figures": [asdict(figure) | {"met": figure.met} for figure in self.figures]}


def faster(speeds: list[Speed], ours: str, theirs: str, which: str, goal: float) -> Figure:
    """Return the rate of ``ours`` over that of ``theirs``."""
    by_name = {speed.name: speed for speed in speeds}
    rates = [by_name[name].save_rate if which == "save" else by_name[name].load_rate for name in (ours, theirs)]
    value = rates[0] / rates[1] if rates[0] and rates[1] else None
    note = "" if value else "not installed"
    return Figure(speeds[0].group, f"{which}, {ours} against {theirs}", value, "x", goal, note=note)
