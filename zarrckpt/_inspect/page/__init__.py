"""Write one checkpoint, or two for comparison, as one HTML page without other files."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import os
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from zarrckpt._errors import StorageError
from zarrckpt._inspect.page.data import Side, numbers_of, page_data
from zarrckpt._jobs import Progress
from zarrckpt._store._whole_files import new_files
from zarrckpt._version import __version__

__all__ = ["PageReport", "Side", "check_target", "write_page"]

_STYLE_FILE = "page.css"
_SCRIPTS = ("base.js", "charts.js", "chunks.js", "treemap.js", "overview.js", "detail.js", "table.js", "page.js")
"""The scripts in the order of their dependencies."""


@dataclass(frozen=True)
class PageReport:
    """The result of ``Checkpoint.report``."""

    path: str
    nbytes: int
    """The size of the page."""
    tensors: int
    broken: tuple[str, ...]
    """The tensors with NaN or inf. Empty if the tensors were not read."""


def check_target(path: str, overwrite: bool) -> None:
    """Raise StorageError if the page could not be written to this path. Called before anything is read."""
    folder = os.path.dirname(path)
    if os.path.isdir(path):
        raise StorageError(f"{path} is a folder: pass a file in it, {os.path.join(path, 'report.html')}")
    if not os.path.isdir(folder):
        raise StorageError(f"{path} cannot be written, because there is no folder {folder}: create it first")
    if os.path.lexists(path) and not overwrite:
        raise StorageError(f"{path} exists already. Nothing was read: pass overwrite=True to replace it")
    if os.path.exists(path) and not os.path.isfile(path):
        raise StorageError(f"{path} is not a regular file: pass another path")
    if not os.access(folder, os.W_OK):
        raise StorageError(f"{path} cannot be written: {folder} is not writable for this user")


def write_page(
    path: str,
    sides: Sequence[Side],
    same: Sequence[str],
    changed: Mapping[str, tuple[str, str]],
    *,
    values: bool,
    overwrite: bool,
    progress: Progress | None,
) -> PageReport:
    """Write the page of one or two sides, see ``Checkpoint.report``. The file appears when it is complete."""
    found = numbers_of(sides, same, progress) if values else None
    data = page_data(sides, same, changed, found)
    page = rendered(data, " and ".join(side.catalog.store.url for side in sides)).encode("utf-8", "replace")
    folder, name = os.path.split(os.path.realpath(path))  # a link stays, and its target is replaced
    with new_files(folder, overwrite=overwrite) as part:
        Path(part, name).write_bytes(page)
    names = [tensor["name"] for tensor in data["tensors"]]
    return PageReport(path, len(page), len(names), tuple(filter(found.is_broken, names)) if found else ())


def rendered(data: Mapping[str, Any], urls: str) -> str:
    """Return the text of a page with its data, style and scripts inside."""
    style = _asset(_STYLE_FILE)
    script = "\n".join(["'use strict';", *map(_asset, _SCRIPTS)])
    return string.Template(_asset("page.html")).substitute(
        title=html.escape(f"zarrckpt report: {urls}"),
        version=__version__,
        style=style,
        style_hash=_hash(style),
        script=script,
        script_hash=_hash(script),
        data=embedded(data),
    )


def embedded(data: Mapping[str, Any]) -> str:
    """Return JSON in ASCII without markup characters, so that it cannot end its HTML element."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _hash(text: str) -> str:
    """Return the hash of a text for the page's security policy, which permits only texts with these hashes."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


@cache
def _asset(name: str) -> str:
    return resources.files(__name__).joinpath(name).read_text("utf-8").strip()
