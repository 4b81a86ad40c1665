"""Every use of a private attribute or module of torch, and why. Nothing is imported before it is used.

The names of torch's classes that pickles hold are in ``_format.values`` and ``_dcp.metadata_pickle``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any


def gloo_options(gloo: Any, device: Any, timeout: timedelta) -> Any:
    """Options of a gloo group: its device says which interface it uses, and whether it connects ranks on demand.

    The public constructor of ``ProcessGroupGloo`` takes no device, and connects every rank with every other.
    """
    options = gloo._Options()
    options._devices = [device]
    options._timeout = timeout
    return options


def sent_plans(save_planner: Any) -> dict[str, Any]:
    """DCP's cache of the plans that this rank sent last, by planner class. Empty, it has DCP send a plan whole.

    A planner with ``enable_plan_caching`` leaves out a plan that looks like the last one, and with it what a storage
    writer adds.
    """
    plans: dict[str, Any] = save_planner._cached_save_plan
    return plans


def merged_plans(save_planner: Any) -> dict[str, Any]:
    """DCP's cache of the merged plans of all ranks, by planner class.

    A planner with ``enable_plan_caching`` hands those that have not changed to nobody but this cache.
    """
    plans: dict[str, Any] = save_planner._cached_global_plan
    return plans


def is_over_tensor_parallelism(fsdp1: Any) -> bool:
    """Whether FSDP1 shards the shards of tensor parallelism: nothing public tells it from HSDP's two dimensions."""
    return getattr(fsdp1, "_fsdp_extension", None) is not None


def submodule(module: Any, name: str) -> Any:
    """What a module registered under a name; None for nothing.

    ``getattr`` would also find properties, and what wrappers look up in the module that they wrap.
    """
    return module._modules.get(name)


def checkpoint_offset(storage: Any) -> int:
    """Where the bytes of a storage that was loaded within :func:`without_data` lie in the file."""
    offset: int = storage._checkpoint_offset
    return offset


def without_data() -> AbstractContextManager[Any]:
    """``torch.load`` within it gives shapes, strides and places in the file, and reads no data.

    The meta device gives no places, and reads the data.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode()


INNER_TENSORS = {
    ("torch.distributed._functional_collectives", "AsyncCollectiveTensor"): "elem",
    ("torchao.float8.fsdp_utils", "WeightWithDynamicFloat8CastTensor"): "_tensor",
}
"""Module and name of wrappers whose elements are those of one inner tensor -> that tensor's attribute."""


def is_in_transform(tensor: Any) -> bool:
    """Whether a tensor stands for others inside ``torch.vmap`` or another transform of torch.func.

    Its class is torch.Tensor, and no public function distinguishes it.
    """
    import torch

    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def detached_without_subclass(tensor: Any) -> Any:
    """A tensor's own memory as a torch.Tensor, without a call of the ``__torch_function__`` of its class."""
    import torch

    with torch._C.DisableTorchFunctionSubclass():
        return tensor.detach()


def call_in_data_loader_workers(install: Callable[[], object]) -> None:
    """Call a function in this process after torch has set its C handlers of signals, if it is a DataLoader's worker.

    For a forked child, before it becomes a worker. A torch that has another function for that makes it do nothing.
    """
    module: Any = sys.modules.get("torch.utils.data._utils.signal_handling")
    set_handlers = getattr(module, "_set_worker_signal_handlers", None)
    if set_handlers is None:
        return

    def set_both() -> None:
        set_handlers()
        install()

    module._set_worker_signal_handlers = set_both
