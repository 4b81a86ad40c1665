"""Check that the framework of an integration is installed in a tested version."""

from __future__ import annotations

import os
from importlib import metadata

VERSIONS = {
    "accelerate": ("1.14", "2"),
    "lightning": ("2.6.6", "2.7"),
    "torchtitan": ("0.3", "0.4"),
    "transformers": ("5.20", "6"),
}
"""The first allowed version and the first later one that is refused, by the framework's name for pip.

The same ranges are in ``pyproject.toml`` and ``docs/reference/api.md``.
"""

UNTESTED = "ZARRCKPT_UNTESTED_FRAMEWORKS"
"""Environment variable that allows untested versions if it is not empty."""


def require(framework: str) -> None:
    """Raise ImportError if a framework is not installed, or if its version is outside of the tested range.

    Its name is a key of :data:`VERSIONS`, the name of the integration's module, and that of zarrckpt's extra.
    """
    first, before = VERSIONS[framework]
    try:
        found = metadata.version(framework)
    except metadata.PackageNotFoundError as err:
        raise ModuleNotFoundError(
            f"zarrckpt.integrations.{framework} needs {framework}: pip install 'zarrckpt[{framework}]'", name=framework
        ) from err
    if not _release_of(first) <= _release_of(found) < _release_of(before) and not os.environ.get(UNTESTED):
        raise ImportError(
            f"zarrckpt.integrations.{framework} needs {framework}>={first},<{before}, found {found}. Other versions "
            f"were not tested, and private functions of {framework} that it uses may have changed. Run pip install "
            f"'zarrckpt[{framework}]' for a tested version, or set {UNTESTED}=1 to try this one"
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
