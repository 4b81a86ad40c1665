"""The framework that a module of this room plugs into: there, and of a version that was tested."""

from __future__ import annotations

import os
from importlib import metadata

UNTESTED = "ZARRCKPT_UNTESTED_FRAMEWORKS"
"""The environment variable that lets versions pass which were not tested: any text but an empty one."""


def require(distribution: str, first: str, before: str, extra: str) -> None:
    """Raise ImportError where a framework is not installed, or where its version is none that was tested.

    Args:
        distribution: its name for pip.
        first, before: the first version that is taken, and the first one after it that is not: ``"2.6"``, ``"2.7"``.
        extra: of zarrckpt, that brings it.
    """
    try:
        found = metadata.version(distribution)
    except metadata.PackageNotFoundError as err:
        raise ModuleNotFoundError(
            f"zarrckpt.integrations.{extra} needs {distribution}: pip install 'zarrckpt[{extra}]'", name=distribution
        ) from err
    if not _release_of(first) <= _release_of(found) < _release_of(before) and not os.environ.get(UNTESTED):
        raise ImportError(
            f"zarrckpt.integrations.{extra} was tested with {distribution} from {first} on, before {before}; here is "
            f"{found}. It uses what is not promised to stay: pip install 'zarrckpt[{extra}]' brings a version that "
            f"was tested, and {UNTESTED}=1 in the environment lets this one pass"
        )


def _release_of(version: str) -> tuple[int, ...]:
    """The numbers with which a version begins: ``"2.6.6rc1"`` is (2, 6, 6)."""
    parts = []
    for part in version.split("+")[0].split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        parts.append(int(digits))
    return tuple(parts)
