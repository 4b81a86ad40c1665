"""Sharded PyTorch checkpoints as Zarr, directly in object stores or on disk.

``save``, ``load`` and ``async_save`` need torch; ``open``, ``latest`` and ``best`` do not. ``__init__.pyi`` lists the
public names. Each is imported at its first use.
"""

from __future__ import annotations

import importlib

_STUB = __spec__.loader.get_data(f"{__path__[0]}/__init__.pyi").decode()
_MODULES = {words[3]: words[1] for words in map(str.split, _STUB.splitlines()) if words[:1] == ["from"]}
"""Public name -> module, from the lines ``from module import name as name`` of the stub."""

__all__ = sorted(_MODULES)


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module 'zarrckpt' has no attribute {name!r}")
    try:
        value = getattr(importlib.import_module(_MODULES[name]), name)
    except ModuleNotFoundError as err:
        if (err.name or "").partition(".")[0] != "torch":
            raise
        raise ModuleNotFoundError(
            f"zarrckpt.{name} needs PyTorch: pip install 'zarrckpt[torch]'", name="torch"
        ) from err
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
