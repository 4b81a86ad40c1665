"""Results of the demonstration, for its last lines and for programs."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from launch import Event

# Rounding in another order changes a loss by 1e-7; a wrong batch, RNG or optimizer moment by more than 1e-3.
TOLERANCE = 1e-5


@dataclass
class Findings:
    """Losses by step of the three runs, the saves of the second, and the initial state of the third."""

    uninterrupted: dict[int, float] = field(default_factory=dict)
    killed: dict[int, float] = field(default_factory=dict)
    resumed: dict[int, float] = field(default_factory=dict)
    saves: list[Event] = field(default_factory=list)
    states: dict[int, str] = field(default_factory=dict)
    resumed_from: str = ""
    restored_exactly: bool = False
    inside: dict[str, Any] = field(default_factory=dict)

    def resume(self, url: str, state: str) -> None:
        """The third run began with this checkpoint; ``state`` is the hash of its state then."""
        self.resumed_from = url
        self.restored_exactly = state == self.states[self.resumed_step]

    @property
    def resumed_step(self) -> int:
        """The last step before the resumed run."""
        return int(self.resumed_from.rsplit("-", 1)[1])

    def difference(self, step: int) -> float:
        """Return the relative difference of the resumed and the uninterrupted loss."""
        return abs(self.resumed[step] - self.uninterrupted[step]) / self.uninterrupted[step]

    @property
    def largest_difference(self) -> float:
        """Return the greatest difference over all steps of the resumed run."""
        return max(map(self.difference, self.resumed))

    @property
    def repeatable(self) -> bool:
        """Whether the first two runs, on the same processes, had the same losses to the last bit."""
        return all(self.killed[step] == self.uninterrupted[step] for step in self.killed)

    @property
    def rank_bytes(self) -> list[int]:
        """Return the bytes that each rank wrote of the resumed checkpoint."""
        return next((save["rank_bytes"] for save in self.saves if save["url"] == self.resumed_from), [])

    @property
    def continues(self) -> bool:
        """Whether the state is exact, and the losses differ only by rounding."""
        return self.restored_exactly and self.largest_difference < TOLERANCE

    def as_json(self) -> dict[str, Any]:
        derived = ("resumed_step", "largest_difference", "repeatable", "rank_bytes", "continues")
        return asdict(self) | {name: getattr(self, name) for name in derived}
