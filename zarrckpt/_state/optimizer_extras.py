"""State of an optimizer that belongs to no parameter: other keys of its ``state``, and entries beside it.

A fresh optimizer has no such state, so a load makes the targets, if the class of the optimizer takes them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from zarrckpt._errors import KeyMismatchError
from zarrckpt._format.state_path import LIST, StatePath
from zarrckpt._state.flatten import build, flatten, stems
from zarrckpt._state.group_options import Name
from zarrckpt._state.optimizer_forms import saved_groups
from zarrckpt._state.saved_entries import RequestedEntries, SavedTensor
from zarrckpt._state.tensors import new_tensor

_MAX_BYTES = 16 << 20
"""Maximum bytes of the tensors of such state that a load makes."""


class ExtraState:
    """The saved state that belongs to no parameter and does not fit the optimizer's own.

    Args:
        keys: the keys of the optimizer in the state.
        state_dict: the targets of the optimizer.
        names: the names of its parameters, in order.
    """

    def __init__(
        self, keys: tuple[Any, ...], state_dict: Mapping[str, Any], names: Sequence[Name], saved: RequestedEntries
    ) -> None:
        self._prefix, self._depth = "".join(f"{key}." for key in keys), len(keys)
        self._saved = saved
        own = {str(name) for name in names}
        beside = {key: value for key, value in state_dict.items() if key not in ("state", "param_groups")}
        others = {key: value for key, value in state_dict["state"].items() if str(key) not in own}
        self._own = flatten({**beside, "state": others} if others else beside)[0]
        self._rows: dict[tuple[Any, ...], list[tuple[StatePath, str]]] = {}
        """The path and the name of each entry, by the keys of the part of the state dict that is replaced."""
        found: dict[tuple[Any, ...], list[tuple[StatePath, str]]] = {}
        for fqn in saved.below(self._prefix):
            path = saved.path(fqn)
            part = self._part_of(path)
            if part and not self._is_of(own, fqn):
                found.setdefault(part, []).append((path, fqn))
        order: list[str] = []
        if any(part[0] == "state" or self._is_numbered(rows, len(names)) for part, rows in found.items()):
            order = [str(name) for group in saved_groups(self._prefix, saved) for name in group]
        for part, rows in found.items():
            # Without a list of parameters, each key can be one.
            is_parameter = part[0] == "state" and (not order or self._is_of({*order}, rows[0][1]))
            if not is_parameter and self._is_numbered(rows, len(names)) and order != [*map(str, names)]:
                raise KeyMismatchError(
                    f"{rows[0][1]!r} has a number that can be that of a parameter, but the checkpoint has the order "
                    f"{order[:5]} of parameters, and the optimizer {[*map(str, names[:5])]}. Nothing was loaded. Pass "
                    "the parameters in the order in which they were saved, or leave these entries out (keys=)"
                )
            if not (is_parameter or all(self._has_target(fqn) for _, fqn in rows)):
                self._rows[part] = rows
        forms = [saved.tensor(fqn) for rows in self._rows.values() for _, fqn in rows]
        sizes = (math.prod(form.shape) * form.dtype.itemsize for form in forms if form is not None)
        if sum(sizes) > _MAX_BYTES or saved.left_out(self._prefix):
            self._rows = {}

    def __bool__(self) -> bool:
        return bool(self._rows)

    def _part_of(self, path: StatePath) -> tuple[Any, ...]:
        """Return the keys of the part of the state dict that an entry is in, or () for groups."""
        keys = path.keys[self._depth :]
        # A state that was flattened before the save has one key for a whole name.
        if (
            not keys
            or path.stem(self._depth) != self._prefix[:-1]
            or str(keys[0]).startswith(("state.", "param_groups"))
        ):
            return ()
        return keys[:1] if keys[0] != "state" else keys[:2] if len(keys) > 1 else ()

    def _is_of(self, names: Collection[str], fqn: str) -> bool:
        """Whether an entry is state of a parameter with one of these names."""
        stem = f"{self._prefix}state."
        # The path of a renamed entry can have several keys for a name.
        return fqn.startswith(stem) and any(name in names for name in stems(fqn.removeprefix(stem)))

    def _is_numbered(self, rows: Sequence[tuple[StatePath, str]], n: int) -> bool:
        """Whether a part has a dict with numbers as keys, or a list with an item for each of n parameters."""
        lists: dict[str, set[Any]] = {}
        for path, _ in rows:
            for depth in range(self._depth, len(path)):
                if path.containers[depth] == LIST:
                    lists.setdefault(path.stem(depth), set()).add(path.keys[depth])
                elif type(path.keys[depth]) is int:
                    return True
        return any(len(positions) == n > 1 for positions in lists.values())

    def _has_target(self, fqn: str) -> bool:
        name, entry = fqn.removeprefix(self._prefix), self._saved.tensor(fqn)
        if name in self._own:
            leaf = self._own[name]
            return not isinstance(leaf, torch.Tensor) or (entry is not None and entry.shape == tuple(leaf.shape))
        # A value can be replaced by a container.
        return any(stem in self._own and not isinstance(self._own[stem], torch.Tensor) for stem in stems(name))

    def is_in(self, state_dict: Mapping[str, Any]) -> bool:
        """Whether a state dict has all entries of this state, with their shapes."""
        flat = flatten({key: value for key, value in state_dict.items() if key != "param_groups"})[0]
        for rows in self._rows.values():
            for _, fqn in rows:
                name, entry = fqn.removeprefix(self._prefix), self._saved.tensor(fqn)
                shape = getattr(flat.get(name), "shape", None)
                if name not in flat or (entry is not None and (shape is None or tuple(shape) != entry.shape)):
                    return False
        return True

    def add_targets(self, state_dict: dict[str, Any], device: torch.device) -> None:
        """Replace the parts of a state dict that lack entries by new targets."""
        for part, rows in self._rows.items():
            outer = state_dict if len(part) == 1 else state_dict[part[0]]
            targets = [(path, self._target(fqn, device)) for path, fqn in rows]
            outer[part[-1]] = build(targets, {}, self._depth + len(part))

    def _target(self, fqn: str, device: torch.device) -> torch.Tensor | None:
        entry: SavedTensor | None = self._saved.tensor(fqn)
        own = self._own.get(fqn.removeprefix(self._prefix))
        if isinstance(own, torch.Tensor):
            if self._has_target(fqn):
                return own
            device = own.device
        elif entry is not None and not entry.shape:
            device = torch.device("cpu")  # Optimizers keep counters there.
        return None if entry is None else new_tensor(entry.shape, entry.order, entry.dtype, device)
