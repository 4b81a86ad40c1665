"""Recognise torch's sharded tensors and wrappers without importing their modules, which takes a second.

If such a module is not imported yet, no value of its classes can exist.
"""

from __future__ import annotations

import sys
from typing import Any

WRAPPER_SEGMENTS = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})
"""The attributes in which torch.compile and activation checkpointing store the wrapped module."""

FSDP1_SEGMENT = "_fsdp_wrapped_module"
"""The attribute in which FSDP1 stores the wrapped module. Torch's functions remove it from keys, not from metadata."""


def is_dtensor(value: object) -> bool:
    """Whether a value is a DTensor."""
    return _is(value, "torch.distributed.tensor", "DTensor")


def is_sharded_tensor(value: object) -> bool:
    """Whether a value is a ShardedTensor, as FSDP1 creates them."""
    # By its attributes, because no public module of torch has its class.
    return hasattr(value, "local_shards") and hasattr(value, "sharding_spec")


def is_sharded(value: object) -> bool:
    """Whether a value is a DTensor or a ShardedTensor."""
    return is_dtensor(value) or is_sharded_tensor(value)


def fsdp1_modules(module: object, *, root_only: bool = False) -> list[Any]:
    """Return the FSDP1 modules inside a module, including the module itself."""
    found: Any = sys.modules.get("torch.distributed.fsdp.fully_sharded_data_parallel")
    kind = getattr(found, "FullyShardedDataParallel", None)
    return [] if kind is None else kind.fsdp_modules(module, root_only=root_only)


def is_fsdp1(module: object) -> bool:
    """Whether a module is an FSDP1 wrapper."""
    return _is(module, "torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel")


def is_zero_optimizer(value: object) -> bool:
    """Whether a value is a ZeroRedundancyOptimizer, whose state is partitioned over ranks."""
    return _is(value, "torch.distributed.optim.zero_redundancy_optimizer", "ZeroRedundancyOptimizer")


def _is(value: object, module: str, name: str) -> bool:
    kind = getattr(sys.modules.get(module), name, None)
    return kind is not None and isinstance(value, kind)
