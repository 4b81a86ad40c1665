"""A module's state dict under canonical names that do not depend on wrappers, and the names of parameters.

``torch.compile``, activation checkpointing and DistributedDataParallel add a segment to each name. Canonical names omit
it, so that a wrapped module can load the checkpoint of a plain one. Only FSDP1 needs torch's own functions for this.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from zarrckpt._errors import KeyMismatchError, UnsupportedLayoutError, UnsupportedValueError
from zarrckpt._format.module_versions import module_name, put_versions, versions_of
from zarrckpt._ranks.torch_private import non_persistent_buffers, submodule, was_written
from zarrckpt._state.flatten import new_dict
from zarrckpt._state.local_boxes import local_tensors
from zarrckpt._state.resizing import is_resizable, new_extra_state, taken_shapes, takes, takes_older
from zarrckpt._state.saved_entries import RequestedEntries
from zarrckpt._state.tensors import memory_fault, new_tensor
from zarrckpt._state.torch_kinds import (
    FSDP1_SEGMENT,
    WRAPPER_SEGMENTS,
    fsdp1_modules,
    is_dtensor,
    is_fsdp1,
    is_sharded_tensor,
)

_EXTRA_STATE = "_extra_state"
"""The last segment of the key of the value that a module's ``get_extra_state`` returns."""


def fsdp1_of(module: nn.Module) -> nn.Module | None:
    """Return the module to pass to torch's state dict functions if FSDP1 shards the module, otherwise None.

    The result is the module itself, or the FSDP1 module inside it if the module has a ``state_dict`` of its own.
    """
    if not fsdp1_modules(module):
        return None
    if is_fsdp1(module) or type(module).state_dict is nn.Module.state_dict:
        return module
    roots = fsdp1_modules(module, root_only=True)
    return roots[0] if len(roots) == 1 else module


def canonical_name(module: nn.Module, key: str) -> str:
    """Return a key of a module's state dict, or a path in the module, without the segments of wrappers."""
    segments = []
    at: nn.Module | None = module
    for segment in key.split("."):
        in_ddp = segment == "module" and isinstance(at, DistributedDataParallel)
        if not in_ddp and segment not in WRAPPER_SEGMENTS:
            segments.append(segment)
        # None if the keys of a state_dict() method are not paths in the module.
        at = submodule(at, segment) if at is not None else None
    return ".".join(segments)


class ModuleState:
    """The state dict of one module, to save or to load. ``entries`` are by canonical name."""

    entries: dict[str, Any]

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._options = {"strict": False} if takes(module.load_state_dict, {}, strict=False) else {}
        self._keys: dict[str, str] = {}
        """The keys in the module's own state dict, by canonical name."""
        self._module_paths: dict[str, str] = {}
        """The paths of modules in that state dict's metadata, by canonical name."""
        self._is_unwritten = False
        """Whether nothing has written to the tensors before the load, as after ``to_empty``."""
        self._fsdp1 = fsdp1_of(module)
        if self._fsdp1 is not None:
            from torch.distributed.checkpoint.state_dict import get_model_state_dict

            self.entries = get_model_state_dict(self._fsdp1)
            self._put_versions(self._fsdp1, self.entries)
            return
        self._state_dict = module.state_dict()
        values = self._state_dict.values()
        tensors = [value for value in values if isinstance(value, torch.Tensor) and not is_lazy(value)]
        self._is_unwritten = bool(tensors) and not any(map(was_written, tensors))
        self.entries = OrderedDict() if type(self._state_dict) is OrderedDict else {}
        for key, value in self._state_dict.items():
            name = canonical_name(module, key)
            if name in self._keys:
                raise UnsupportedValueError(
                    f"a {type(module).__name__} has two entries with the name {name!r} without wrappers: "
                    f"{self._keys[name]!r} and {key!r}. Rename one, or save module.state_dict()"
                )
            self._keys[name] = key
            self.entries[name] = value
        self._put_versions(module, self._state_dict)

    def _put_versions(self, module: nn.Module, state_dict: Any) -> None:
        """Give the entries the versions of a state dict's modules. Those inside a wrapper count, not the wrapper's."""
        if (versions := versions_of(state_dict)) is not None:
            # In a state dict, a wrapper is before the module inside it.
            for path in versions:
                segments = canonical_name(module, path).split(".")
                self._module_paths[".".join(one for one in segments if one != FSDP1_SEGMENT)] = path
            put_versions(self.entries, {name: versions[path] for name, path in self._module_paths.items()})

    def resize(self, prefix: str, saved: RequestedEntries) -> None:
        """Replace entries by targets with the checkpoint's shape and dtype, if the module accepts them.

        It accepts extra state, and tensors that its own loading method resizes, as observers of quantization do.
        """
        self._take_older(prefix, saved)
        for name, value in self.entries.items():
            fqn = f"{prefix}{name}"
            if name.rpartition(".")[2] == _EXTRA_STATE and saved.holds(fqn):
                self.entries[name] = new_extra_state(fqn, value, saved)
        names = [name for name in self._keys if name in self.entries and saved.holds(f"{prefix}{name}")]
        forms = {name: saved.tensor(f"{prefix}{name}") for name in names}
        others = {
            self._keys[name]: new_tensor(form.shape, form.order, value.dtype, value.device)
            for name, form in forms.items()
            if form is not None and is_resizable(value := self.entries[name]) and value.shape != form.shape
        }
        taken = taken_shapes(self._module, others) if others else set()
        self.entries.update({name: others[key] for name, key in self._keys.items() if key in taken})

    def _take_older(self, prefix: str, saved: RequestedEntries) -> None:
        """Take the saved names and shapes for modules that convert them from another version.

        Raises UnsupportedLayoutError for such modules in FSDP1, which passes them its own flat parameters.
        """
        older: list[str] = []
        for path, version in (versions_of(self.entries) or {}).items():
            stored = saved.module_versions.get(module_name(prefix[:-1], path), version)
            start = f"{path}." if path else ""
            if stored == version or not saved.below(f"{prefix}{start}"):
                continue
            if self._fsdp1 is not None:
                raise UnsupportedLayoutError(
                    f"module {prefix}{path} was saved by version {stored}, but has version {version}, and FSDP1 cannot "
                    "convert its entries. Nothing was loaded. Load the checkpoint without FSDP1, and save it again"
                )
            if not start.startswith(tuple(older)):
                older.append(start)
                self._take_older_entries(path, start, prefix, saved)

    def _take_older_entries(self, path: str, start: str, prefix: str, saved: RequestedEntries) -> None:
        names = [name.removeprefix(prefix) for name in saved.below(f"{prefix}{start}")]
        forms = {name: form for name in names if (form := saved.tensor(f"{prefix}{name}")) and _EXTRA_STATE not in name}
        own = {
            name: value
            for name, value in self.entries.items()
            if name.startswith(start) and isinstance(value, torch.Tensor) and _EXTRA_STATE not in name
        }
        if all(name in own and own[name].shape == form.shape for name, form in forms.items()):
            return
        same = (own[name].dtype == form.dtype or saved.allow_cast for name, form in forms.items() if name in own)
        if not own or not all(map(is_resizable, own.values())) or not all(same):
            return
        first = next(iter(own))
        new = {name: new_tensor(form.shape, form.order, form.dtype, own[first].device) for name, form in forms.items()}
        versions = {
            module.removeprefix(start): saved.module_versions.get(module_name(prefix[:-1], module), version)
            for module, version in (versions_of(self.entries) or {}).items()
            if f"{module}.".startswith(start)
        }
        versions[""] = saved.module_versions[module_name(prefix[:-1], path)]
        relative = {name.removeprefix(start): tensor for name, tensor in new.items()}
        if takes_older(self._module.get_submodule(self._module_paths[path]), relative, versions):
            stem = self._keys[first].removesuffix(first.removeprefix(start))
            for name in own:
                del self.entries[name]
            self.entries.update(new)
            self._keys.update({name: f"{stem}{name.removeprefix(start)}" for name in new if name not in self._keys})

    def restore(self, loaded: Mapping[str, Any]) -> None:
        """Pass loaded entries to the module. Raises KeyMismatchError for entries that it does not accept."""
        given = versions_of(loaded)
        if given is not None:
            given = {self._module_paths.get(path, path): version for path, version in given.items()}
        # strict=False: missing and unexpected entries were reported before the load.
        if self._fsdp1 is not None:
            from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

            state_dict = new_dict(dict(loaded), False, given)
            result = set_model_state_dict(self._fsdp1, state_dict, options=StateDictOptions(strict=False))
        else:
            for name, key in self._keys.items():
                if name in loaded:
                    self._state_dict[key] = loaded[name]
                else:
                    self._state_dict.pop(key, None)
            if given is not None:
                put_versions(self._state_dict, {**(versions_of(self._state_dict) or {}), **given})
            result = self._module.load_state_dict(self._state_dict, **self._options)
        untaken = [key for key in getattr(result, "unexpected_keys", ()) if not self._is_in_place(key)]
        if untaken:
            raise KeyMismatchError(
                f"load_state_dict() of the {type(self._module).__name__} did not accept {len(untaken)} entries of its "
                f"own state_dict(), for example {untaken[:5]}: add a hook that accepts them"
            )

    def unset_buffers(self) -> list[str]:
        """Return the paths of non-persistent buffers on the meta device, or with NaN in a module made by to_empty."""
        return [
            path
            for path, buffer in non_persistent_buffers(self._module)
            if buffer.is_meta or (self._is_unwritten and any(map(_has_nan, local_tensors(buffer))))
        ]

    def _is_in_place(self, key: str) -> bool:
        """Whether an entry shares memory with the module's own tensors, so that it is loaded already."""
        value = self._state_dict.get(key) if self._fsdp1 is None else None
        if not isinstance(value, torch.Tensor):
            return False
        own = itertools.chain(self._module.parameters(), self._module.buffers())
        return _address(value) in {_address(tensor) for tensor in own}


def _has_nan(tensor: torch.Tensor) -> bool:
    if memory_fault(tensor) is not None or not tensor.numel():
        return False
    real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    # amin() propagates NaN and needs no memory. It does not support float8.
    return real.is_floating_point() and real.element_size() > 1 and bool(real.amin().isnan())


def _address(tensor: torch.Tensor) -> int:
    local: torch.Tensor = tensor.to_local() if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]
    return local.untyped_storage().data_ptr()


def parameter_names(module: nn.Module, parameters: Iterable[torch.Tensor]) -> dict[int, list[str]]:
    """Return the names of parameters in a module's state dict, by ``id``. Tied parameters have several names.

    A parameter has the names under which the module's state dict has the same tensor. So the names do not depend on
    wrappers. If the state dict has the parameter in another form (a fused parameter that a hook splits), its names are
    its paths in the module. Raises UnsupportedValueError if such a path is the name of another parameter.
    """
    names: dict[int, list[str]] = {id(parameter): [] for parameter in parameters}
    # A state_dict() method of a subclass can have no arguments.
    variables = module.state_dict(keep_vars=True) if takes(module.state_dict, keep_vars=True) else {}
    for key, value in variables.items():
        if id(value) in names:
            names[id(value)].append(canonical_name(module, key))
    owners = {name: number for number, own in names.items() for name in own}
    split = {number for number, own in names.items() if not own}
    for path, parameter in module.named_parameters(remove_duplicate=False) if split else ():
        if id(parameter) in split:
            name = canonical_name(module, path)
            if owners.setdefault(name, id(parameter)) != id(parameter):
                raise UnsupportedValueError(
                    f"two parameters of the {type(module).__name__} that an optimizer trains have the name {name!r}: "
                    f"one in its state dict, and one at {path!r}, which the state dict has in another form. Pass "
                    "optimizer.state_dict() instead of the optimizer"
                )
            if name not in names[id(parameter)]:
                names[id(parameter)].append(name)
    return names


class DictMatch(NamedTuple):
    """A dict of the state that has all parameters of an optimizer."""

    keys: tuple[str, ...]
    """The keys that lead to the dict."""
    names: dict[int, list[str]]
    """The names of each parameter relative to the dict, by ``id``. Tied parameters have several."""


def match_state_dict(state: Mapping[Any, Any], parameters: Iterable[torch.Tensor]) -> DictMatch | None:
    """Return the innermost dict of a state that has all parameters, for example a module's ``state_dict()``, or None.

    It has detached tensors, so tensors are compared by memory. If more dicts have all parameters, their names follow.
    """
    ids: dict[object, list[int]] = {}
    for parameter in parameters:
        ids.setdefault(_memory(parameter), []).append(id(parameter))
    if not ids or None in ids:
        return None
    found: list[DictMatch] = []

    def walk(value: Mapping[Any, Any] | list[Any], keys: tuple[str, ...]) -> dict[object, list[str]]:
        names: dict[object, list[str]] = {}
        for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
            if isinstance(item, torch.Tensor):
                if (memory := _memory(item)) in ids:
                    names.setdefault(memory, []).append(str(key))
            elif isinstance(item, Mapping | list) and not hasattr(item, "load_state_dict"):
                for address, inner in walk(item, (*keys, str(key))).items():
                    names.setdefault(address, []).extend(f"{key}.{name}" for name in inner)
        own: dict[int, list[str]] = {}
        for address, same in names.items():
            numbers = ids[address]
            if _is_empty(address) and len(numbers) == len(same):
                own.update(zip(numbers, ([name] for name in same), strict=True))
            elif len(numbers) == 1 and not _is_empty(address):
                own[numbers[0]] = same
        if isinstance(value, Mapping) and len(own) == sum(map(len, ids.values())):
            found.append(DictMatch(keys, own))
        return names

    walk(state, ())
    if not found:
        return None
    names = {number: [name for one in found for name in one.names[number]] for number in found[0].names}
    return DictMatch(found[0].keys, names)


def _is_empty(memory: Any) -> bool:
    return isinstance(memory, tuple) and memory[0] == 0


def _memory(tensor: torch.Tensor) -> tuple[object, ...] | None:
    """Return a key for the memory of a tensor, equal for the tensor and its detached copies, or None.

    Meta tensors and tensors without elements have none. If only this rank's part of a DTensor has no elements, the key
    has the form of the whole tensor: parameters with this form are matched in order.
    """
    if is_sharded_tensor(tensor) or tensor.is_meta or not tensor.numel():
        return None
    form = (tuple(tensor.shape), tensor.dtype)
    with torch.no_grad():
        local: torch.Tensor = tensor.to_local() if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]
    if not local.numel():
        return 0, *form
    try:
        address = local.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # A wrapper around other tensors has no memory.
        return None
    return (address, local.device, local.storage_offset(), local.shape, local.stride(), *form) if address else None
