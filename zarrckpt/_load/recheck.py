"""The check after a load. It flattens the state again, as a save does, and compares it with the entries read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from zarrckpt._errors import UnsupportedValueError
from zarrckpt._format import json_values
from zarrckpt._format.grid import Box, Ints
from zarrckpt._state.digests import content_digest, is_digested_whole, tensor_checksum
from zarrckpt._state.flatten import flatten, stems
from zarrckpt._state.local_boxes import LocalBoxes, global_shape, to_local_boxes
from zarrckpt._state.objects import PlainState
from zarrckpt._state.optimizers import OptimizerTarget
from zarrckpt._state.tensors import plain_tensor


class _ReadTensor(NamedTuple):
    """The shape and dtype of a target, and a checksum of each of its boxes, directly after the read."""

    shape: Ints
    dtype: torch.dtype
    checksums: Mapping[Box, int | None]
    number: complex | None
    """The value if the tensor has one element."""


class _ReadValue(NamedTuple):
    """A copy of a value that was read. load_state_dict may change the value itself."""

    form: object
    digest: bytes | None


class ReadEntries:
    """The entries of a load by flat name, as they were read.

    Args:
        full: compare all elements of tensors. Otherwise large tensors are compared by a sample.
        allow_cast: accept tensors that an object converted to another dtype.
    """

    def __init__(self, *, full: bool, allow_cast: bool) -> None:
        self._full = full
        self._allow_cast = allow_cast
        self._leaves: dict[str, LocalBoxes | torch.Tensor] = {}
        self._read: dict[str, _ReadTensor | _ReadValue] = {}

    def record(self, fqn: str, leaf: Any, stored: int | None = None) -> None:
        """Record an entry: a value, or a target after it was filled. Copies at most 64 KiB of a tensor.

        ``stored`` is the checksum of all elements of an unsharded tensor, if the checkpoint has it.
        """
        if not isinstance(leaf, LocalBoxes | torch.Tensor):
            self._read[fqn] = _ReadValue(json_values.encode_json(leaf), content_digest(fqn, leaf))
            return
        self._leaves[fqn] = leaf
        checksums: dict[Box, int | None]
        if isinstance(leaf, torch.Tensor) and stored is not None and (self._full or is_digested_whole(leaf)):
            checksums = {Box((0,) * leaf.ndim, tuple(leaf.shape)): stored}
        else:
            checksums = {box: self._checksum(fqn, tensor) for box, tensor in _boxes_of(leaf).items()}
        self._read[fqn] = _ReadTensor(global_shape(leaf), leaf.dtype, checksums, _one_element(leaf))

    def record_groups(self, optimizer: OptimizerTarget) -> None:
        """Record the parameter groups that an optimizer was given, and drop those of the checkpoint.

        The two differ if the checkpoint has the same parameters in groups of another order.
        """
        prefix = f"{optimizer.prefix}param_groups."
        for fqn in [fqn for fqn in self._read if fqn.startswith(prefix)]:
            del self._read[fqn]
        for fqn, leaf in flatten({"param_groups": optimizer.given_groups})[0].items():
            self.record(f"{optimizer.prefix}{fqn}", leaf)

    def differences(self, now: PlainState) -> tuple[dict[str, str], list[str]]:
        """Compare the recorded entries with the current state.

        Returns the names of changed entries with a description of the change, and the names of missing entries. Entries
        of objects whose state_dict was not called, or raised an error, are skipped.
        """
        changed: dict[str, str] = {}
        gone = []
        found = flatten(now.state)[0]
        skipped = (*now.unreadable, *now.unchecked)
        containers = {stem for fqn in found if "." in fqn for stem in stems(fqn.rpartition(".")[0])}
        for fqn, read in self._read.items():
            if f"{fqn}.".startswith(skipped):
                continue
            if fqn in found:
                difference = self._difference(fqn, read, found[fqn])
                if difference:
                    changed[fqn] = difference
            elif fqn in containers:
                changed[fqn] = "is now a container of other entries"
            else:
                gone.append(fqn)
        return changed, gone

    def _difference(self, fqn: str, read: _ReadTensor | _ReadValue, now: Any) -> str | None:
        if isinstance(read, _ReadValue):
            if _is_value(fqn, read, now):
                return None
            return f"was read as {_described_value(read.form)}, but is {_described_value(now)}"
        current = to_local_boxes(fqn, now)
        if not isinstance(current, LocalBoxes | torch.Tensor):
            is_number = read.number is not None and now == read.number
            return None if is_number else f"was read as a tensor, but is {_described_value(now)}"
        if global_shape(current) != read.shape:
            return f"was read with shape {read.shape}, but has shape {global_shape(current)}"
        if current.dtype != read.dtype and not self._allow_cast:
            return f"was read with dtype {read.dtype}, but has dtype {current.dtype}"
        tensors = _boxes_of(current)
        if tensors.keys() != read.checksums.keys():
            return None  # The sharding has changed, so this rank did not read the elements that it holds now.
        for box, tensor in tensors.items():
            expected = read.checksums[box]
            if current.dtype != read.dtype:
                expected = self._checksum(fqn, _boxes_of(self._leaves[fqn])[box].to(current.dtype))
            checksum = self._checksum(fqn, tensor)
            if None not in (expected, checksum) and checksum != expected:
                return "has other elements than were read"
        return None

    def _checksum(self, fqn: str, tensor: torch.Tensor) -> int | None:
        try:
            return tensor_checksum(fqn, tensor, full=self._full)
        except UnsupportedValueError:  # A wrapper around other tensors has no elements to compare.
            return None


def _boxes_of(leaf: LocalBoxes | torch.Tensor) -> dict[Box, torch.Tensor]:
    """Return the boxes of a tensor that this rank holds, with their memory."""
    if isinstance(leaf, LocalBoxes):
        return {box: leaf.tensor_at(box.offset) for box in leaf.boxes}
    return {Box((0,) * leaf.ndim, tuple(leaf.shape)): plain_tensor(leaf)}


def _one_element(leaf: Any) -> complex | None:
    """Return the value of a tensor of one element, and None for other tensors."""
    if isinstance(leaf, LocalBoxes) or leaf.numel() != 1 or leaf.is_meta:
        return None
    number: complex = leaf.detach().item()
    return number


def _is_value(fqn: str, read: _ReadValue, now: Any) -> bool:
    """Whether an object holds a value that was read. Containers of different types with equal items count as equal."""
    if isinstance(now, torch.Tensor) and now.numel() == 1 and isinstance(read.form, int | float):
        return bool(now.detach().item() == read.form)
    if read.form is json_values.NOT_JSON:
        return read.digest is None or content_digest(fqn, now) in (None, read.digest)
    form = json_values.encode_json(now)
    return form == read.form or _loosen(now) == _loosen(json_values.decode_json(read.form))


def _loosen(value: Any) -> Any:
    """Return a form of a value for comparison, which ignores the types of containers and numbers."""
    if isinstance(value, Mapping):
        return {key: _loosen(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_loosen(item) for item in value]
    if isinstance(value, float) and value != value:
        return "nan"
    return value


def _described_value(value: Any) -> str:
    text = repr(value) if isinstance(value, bool | int | float | str | list | dict | tuple | None) else ""
    return text if 0 < len(text) <= 80 else f"a {type(value).__name__}"
