"""All uses of private attributes and modules of torch, with reasons. Each module is imported at its first use.

The names of torch's classes in pickles are in ``_format.values`` and ``_dcp.metadata_pickle``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any


def gloo_options(gloo: Any, device: Any, timeout: timedelta) -> Any:
    """Return options of a gloo group. Its device has the network interface and the choice to connect on demand.

    The public constructor of ``ProcessGroupGloo`` accepts no device and connects all pairs of ranks.
    """
    options = gloo._Options()
    options._devices = [device]
    options._timeout = timeout
    return options


def sent_plans(save_planner: Any) -> dict[str, Any]:
    """Return DCP's cache of the plans that this rank sent, by planner class. If it is empty, DCP sends whole plans.

    A planner with ``enable_plan_caching`` omits a plan that equals the last one, including data of the storage writer.
    """
    plans: dict[str, Any] = save_planner._cached_save_plan
    return plans


def merged_plans(save_planner: Any) -> dict[str, Any]:
    """Return DCP's cache of the merged plans of all ranks, by planner class.

    A planner with ``enable_plan_caching`` stores unchanged plans only in this cache.
    """
    plans: dict[str, Any] = save_planner._cached_global_plan
    return plans


def is_over_tensor_parallelism(fsdp1: Any) -> bool:
    """Whether FSDP1 shards the shards of tensor parallelism. No public attribute distinguishes this from HSDP."""
    return getattr(fsdp1, "_fsdp_extension", None) is not None


def submodule(module: Any, name: str) -> Any:
    """Return the submodule that is registered under a name, or None.

    ``getattr`` would also return properties, and attributes of a wrapped module.
    """
    children = module._modules  # a ScriptModule's has no get()
    return children[name] if name in children else None  # noqa: SIM401


def non_persistent_buffers(module: Any) -> list[tuple[str, Any]]:
    """Return the buffers of a module, by path, that were registered with ``persistent=False``.

    Hooks can rename entries of a state dict, so its keys do not identify the other buffers.
    """
    return [
        (f"{path}.{name}" if path else name, inner._buffers[name])
        for path, inner in module.named_modules()
        for name in sorted(inner._non_persistent_buffers_set)
        if inner._buffers.get(name) is not None
    ]


def was_written(tensor: Any) -> bool:
    """Whether a tensor was changed in place since it was made, as parameters are by their initialization.

    ``to_empty`` makes new tensors. No public attribute distinguishes these.
    """
    return bool(tensor.is_inference() or tensor._version)


def checkpoint_offset(storage: Any) -> int:
    """Return the byte offset in the file of a storage that was loaded within :func:`without_data`."""
    offset: int = storage._checkpoint_offset
    return offset


def without_data() -> AbstractContextManager[Any]:
    """Return a context in which ``torch.load`` returns shapes, strides and offsets in the file, and reads no data.

    With the meta device, ``torch.load`` returns no offsets and reads the data.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode()


INNER_TENSORS = {
    ("torch.distributed._functional_collectives", "AsyncCollectiveTensor"): "elem",
    ("torchao.float8.fsdp_utils", "WeightWithDynamicFloat8CastTensor"): "_tensor",
}
"""The attribute of the inner tensor, by module and name of wrapper classes with the elements of one inner tensor."""


def is_in_transform(tensor: Any) -> bool:
    """Whether a tensor represents others inside ``torch.vmap`` or another transform of torch.func.

    Its class is torch.Tensor, and no public function distinguishes it.
    """
    import torch

    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def detached_without_subclass(tensor: Any) -> Any:
    """Return a tensor's memory as a torch.Tensor, without a call of its class's ``__torch_function__``."""
    import torch

    with torch._C.DisableTorchFunctionSubclass():
        return tensor.detach()


def call_in_data_loader_workers(install: Callable[[], object]) -> None:
    """Call a function after torch has set its C signal handlers, if this process becomes a worker of a DataLoader.

    A forked child calls this before it becomes a worker. It has no effect if torch has no such function.
    """
    module: Any = sys.modules.get("torch.utils.data._utils.signal_handling")
    set_handlers = getattr(module, "_set_worker_signal_handlers", None)
    if set_handlers is None:
        return

    def set_both() -> None:
        set_handlers()
        install()

    module._set_worker_signal_handlers = set_both
