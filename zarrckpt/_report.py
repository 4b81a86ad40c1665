"""What a save or a load did, for the caller to look at."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SaveReport:
    """One committed save, the same on every rank.

    ``nbytes`` counts the bytes of all chunk objects, ``objects`` these objects; ``rank_bytes`` holds the part that
    each rank wrote, by its rank in the process group; ``seconds`` is the coordinator's time from plan to clean-up.
    """

    url: str
    save_id: str
    nbytes: int
    objects: int
    rank_bytes: tuple[int, ...]
    seconds: float = 0.0


@dataclass(frozen=True)
class LoadReport:
    """One finished load, on this rank.

    ``loaded``, ``missing`` (in the target only) and ``unexpected`` (in the checkpoint only) are sorted fqns;
    ``nbytes`` is what this rank fetched for its tensors.
    """

    url: str
    save_id: str
    loaded: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    nbytes: int = 0
    seconds: float = 0.0
