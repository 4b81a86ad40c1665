"""A checkpoint, or two beside each other, as one HTML page that needs nothing else."""

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
"""In the order in which they need each other."""


@dataclass(frozen=True)
class PageReport:
    """What ``Checkpoint.report`` wrote."""

    path: str
    nbytes: int
    """Of the page."""
    tensors: int
    broken: tuple[str, ...]
    """The tensors with NaN or inf; none where they were not read."""


def check_target(path: str, overwrite: bool) -> None:
    """Refuse a file that could not be written, before anything is read. Raises StorageError."""
    folder = os.path.dirname(path)
    if os.path.isdir(path):
        raise StorageError(f"{path} is a folder: name a file in it, {os.path.join(path, 'report.html')}")
    if not os.path.isdir(folder):
        raise StorageError(f"{path} cannot be written: there is no folder {folder}; make it first")
    if os.path.lexists(path) and not overwrite:
        raise StorageError(f"{path} exists already; nothing was read: pass overwrite=True to replace it")
    if os.path.exists(path) and not os.path.isfile(path):
        raise StorageError(f"{path} is no file that a page could replace: name another one")
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
    """Write the page of one or two sides; see ``Checkpoint.report``. It appears under its name when it is whole."""
    found = numbers_of(sides, same, progress) if values else None
    data = page_data(sides, same, changed, found)
    page = rendered(data, " and ".join(side.catalog.store.url for side in sides)).encode("utf-8", "replace")
    folder, name = os.path.split(os.path.realpath(path))  # a link stays one
    with new_files(folder, overwrite=overwrite) as part:
        Path(part, name).write_bytes(page)
    names = [tensor["name"] for tensor in data["tensors"]]
    return PageReport(path, len(page), len(names), tuple(filter(found.is_broken, names)) if found else ())


def rendered(data: Mapping[str, Any], urls: str) -> str:
    """A page with its data, its style and its scripts inside."""
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
    """JSON that cannot end the element that it stands in: no markup, only ASCII."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _hash(text: str) -> str:
    """What the page's own security policy lets run: this text and no other."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


@cache
def _asset(name: str) -> str:
    return resources.files(__name__).joinpath(name).read_text("utf-8").strip()
