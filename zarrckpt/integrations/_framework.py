"""Check that the framework of an integration is installed in a tested version."""

from __future__ import annotations

import os
from importlib import metadata

UNTESTED = "ZARRCKPT_UNTESTED_FRAMEWORKS"
"""Environment variable that allows untested versions if it is not empty."""


def require(distribution: str, first: str, before: str, extra: str) -> None:
    """Raise ImportError if a framework is not installed, or if its version is outside of the tested range.

    Args:
        distribution: the framework's name for pip.
        first, before: the first allowed version, and the first later one that is not: ``"2.6"``, ``"2.7"``.
        extra: the extra of zarrckpt that installs the framework. It is also the name of the integration's module.
    """
    try:
        found = metadata.version(distribution)
    except metadata.PackageNotFoundError as err:
        raise ModuleNotFoundError(
            f"zarrckpt.integrations.{extra} needs {distribution}: pip install 'zarrckpt[{extra}]'", name=distribution
        ) from err
    if not _release_of(first) <= _release_of(found) < _release_of(before) and not os.environ.get(UNTESTED):
        raise ImportError(
            f"zarrckpt.integrations.{extra} needs {distribution}>={first},<{before}, found {found}. Other versions "
            f"were not tested, and private functions of {distribution} that it uses may have changed. Run pip install "
            f"'zarrckpt[{extra}]' for a tested version, or set {UNTESTED}=1 to try this one"
        )


def _release_of(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: (2, 6, 6) for ``"2.6.6rc1"``."""
    parts = []
    for part in version.split("+")[0].split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        parts.append(int(digits))
    return tuple(parts)
