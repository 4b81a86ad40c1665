"""The planners of ``zarrckpt.save`` and ``load``: they take modules, optimizers and other Stateful objects.

The objects are taken apart inside DCP's first step and not before it: an error there, on one rank only, reaches all
of them instead of leaving the others in a collective that this rank never joins.
"""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan

from zarrckpt import _state
from zarrckpt._errors import KeyMismatchError
from zarrckpt._flatten import flatten
from zarrckpt._planner import ZarrLoadPlanner, ZarrSavePlanner


class ObjectSavePlanner(ZarrSavePlanner):
    """Saves objects through their state dicts."""

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        super().set_up_planner(_state.for_save(state_dict).state, storage_meta, is_coordinator)


class ObjectLoadPlanner(ZarrLoadPlanner):
    """Loads into the state dicts of objects; ``plain`` then says how they take these back.

    Args:
        keys: as for :func:`zarrckpt.load`. strict, allow_cast: as for :class:`ZarrLoadPlanner`.
    """

    def __init__(self, keys: str | Iterable[str] | None, *, strict: bool, allow_cast: bool) -> None:
        super().__init__(strict=strict, allow_cast=allow_cast, select=self._is_asked_for, required=self._is_required)
        self.plain = _state.PlainState({})
        self._patterns = [keys] if isinstance(keys, str) else None if keys is None else list(keys)

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        assert metadata is not None
        names = set(metadata.state_dict_metadata)
        self._refuse_idle_patterns(names)
        asked_for = {name for name in names if self._is_asked_for(name)}

        def wanted(prefix: str) -> bool:
            return self._patterns is None or any(name.startswith(prefix) for name in asked_for)

        self.plain = _state.for_load(state_dict, wanted, self.plain)
        _state.drop_unsaved(self.plain, asked_for, self._is_asked_for)
        super().set_up_planner(self.plain.state, metadata, is_coordinator)

    def create_local_plan(self) -> LoadPlan:
        """This rank's plan, with the patterns that match none of its targets."""
        names = [*self.loaded, *self.missing]
        idle = [p for p in self._patterns or () if not any(_matches(name, p) for name in names)]
        return dataclasses.replace(super().create_local_plan(), planner_data=idle)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Raises KeyMismatchError where a pattern matches no target on any rank, unless not strict."""
        idle = [p for p in self._patterns or () if all(p in plan.planner_data for plan in global_plan)]
        if idle and not self.allow_partial_load:
            raise KeyMismatchError(
                f"keys={idle} match no target in the state, so nothing would be loaded for them; it has, for example, "
                f"{sorted(flatten(self.plain.state)[0])[:5]}"
            )
        return super().create_global_plan(global_plan)

    @contextmanager
    def fresh_on_error(self) -> Iterator[None]:
        """Optimizers that had made no step yet have made none after a load that failed either."""
        try:
            yield
        except BaseException:
            for entry in self.plain.optimizers:
                if entry.fresh:
                    entry.optimizer.state.clear()
            raise

    def _is_asked_for(self, fqn: str) -> bool:
        return self._patterns is None or any(_matches(fqn, pattern) for pattern in self._patterns)

    def _is_required(self, fqn: str) -> bool:
        return any(fqn.startswith(prefix) for prefix in self.plain.exact)

    def _refuse_idle_patterns(self, names: set[str]) -> None:
        idle = [p for p in self._patterns or () if not any(_matches(name, p) for name in names)]
        if idle:
            raise KeyMismatchError(
                f"keys={idle} match nothing in the checkpoint; it has, for example, {sorted(names)[:5]}"
            )


def _matches(fqn: str, pattern: str) -> bool:
    return fqn == pattern or fqn.startswith(f"{pattern}.") or fnmatch.fnmatchcase(fqn, pattern)
