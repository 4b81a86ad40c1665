"""Options that choose which pieces are merged into chunks, so that tests with small states have all kinds of chunks."""

from __future__ import annotations

from dataclasses import dataclass

import zarrckpt
from zarrckpt._format.wire import record
from zarrckpt._plan.plan import PlanOptions


@record
@dataclass(frozen=True)
class MergingPlan(PlanOptions):
    """The options of a plan, with sizes in place of the chosen ones."""

    min_piece_bytes: int | None = None
    fill_bytes: int | None = None

    def merging(self, nbytes: int, ranks: int) -> dict[str, int]:
        sizes = {"min_piece_bytes": self.min_piece_bytes, "fill_bytes": self.fill_bytes}
        return super().merging(nbytes, ranks) | {name: size for name, size in sizes.items() if size is not None}


@dataclass(frozen=True, kw_only=True)
class MergingOptions(zarrckpt.SaveOptions):
    """SaveOptions with the mean size of pieces below which they are merged, and the size of merged chunks, in bytes.

    With ``min_piece_bytes=0``, pieces are merged only if they do not fit a regular grid.
    """

    min_piece_bytes: int | None = None
    fill_bytes: int | None = None

    @property
    def plan(self) -> PlanOptions:
        plan = super().plan
        sizes = (self.min_piece_bytes, self.fill_bytes)
        return MergingPlan(plan.compression, plan.max_chunk_bytes, plan.portable, plan.grids, *sizes)
