"""``report``: write one checkpoint, or two for comparison, as one HTML page without other files."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import os
import string
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zarrckpt._errors import StorageError
from zarrckpt._inspect.comparison import entry_changes, names_of_both
from zarrckpt._inspect.info import checkpoint_info
from zarrckpt._inspect.page.data import PageCheckpoint, page_data
from zarrckpt._inspect.page.values import PageStats, read_numbers
from zarrckpt._jobs import Progress
from zarrckpt._read.selection import catalog_of, open_selection, part_of
from zarrckpt._store import Url
from zarrckpt._store._whole_files import local_file, new_files
from zarrckpt._version import __version__

if TYPE_CHECKING:
    from zarrckpt._checkpoint import Checkpoint

_STYLE_FILE = "page.css"
_SCRIPTS = ("base.js", "charts.js", "chunks.js", "treemap.js", "overview.js", "detail.js", "table.js", "page.js")
"""The scripts in the order of their dependencies."""


@dataclass(frozen=True)
class PageReport:
    """The result of :func:`zarrckpt.report`."""

    path: str
    nbytes: int
    """The size of the page."""
    tensors: int
    broken: tuple[str, ...]
    """The tensors with NaN or inf. Empty if the tensors were not read."""


def _check_target(path: str, overwrite: bool) -> None:
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


def report(
    source: Checkpoint | Url,
    path: str | os.PathLike[str],
    other: Checkpoint | Url | None = None,
    *,
    include: Iterable[str] = (),
    exclude: Iterable[str] = (),
    values: bool = True,
    overwrite: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> PageReport:
    """Write an HTML page that shows a checkpoint, or compares it with another one.

    The page has a tree map of sizes, the numbers, histogram, outliers, NaN and inf of each tensor, the rank that wrote
    each chunk, and the values. It loads no other files and runs only its own code. All tensors are read once and
    checked, with memory limited as in :meth:`Checkpoint.stats`. Blobs are not read, and pickles are not loaded.

    Args:
        source: an open checkpoint, a part of one, or the url of a checkpoint.
        path: the file to write, in an existing folder. It appears when it is complete.
        other: a checkpoint to compare with, as ``source``. The entries that changed most are listed first.
        include: patterns as in :meth:`Checkpoint.select` (default: all). They match entries of either checkpoint.
        exclude: patterns of entries to leave out.
        values: False shows only the layout, and reads only the tables with a few requests.
        overwrite: replace an existing file.
        storage_options: options of the stores of ``source`` and ``other`` if they are urls.
        progress: as for :func:`save`.

    Raises the errors of :meth:`Checkpoint.read`, and StorageError if the file exists or cannot be written.
    """
    target = local_file(path)
    _check_target(target, overwrite)
    one = open_selection(source, storage_options)
    two = one if other is None else open_selection(other, storage_options)
    dropped = set(names_of_both(one, two, drop)) if (drop := [*exclude]) else set()
    wanted = [fqn for fqn in names_of_both(one, two, [*include]) if fqn not in dropped]
    ckpts = [one] if other is None else [one, two]
    parts = [part_of(ckpt, (fqn for fqn in wanted if fqn in ckpt)) for ckpt in ckpts]
    sides = [PageCheckpoint(catalog_of(part), tuple(part), checkpoint_info(part)) for part in parts]
    changed, same = ({}, []) if other is None else entry_changes(one, two, wanted)
    found: PageStats | None = None
    if values:
        catalogs, tensors = [side.catalog for side in sides], [side.tensors for side in sides]
        found = read_numbers(catalogs, tensors, dict.fromkeys(same), progress)
    data = page_data(sides, same, changed, found)
    page = rendered(data, " and ".join(part.url for part in parts)).encode("utf-8", "replace")
    folder, name = os.path.split(target)
    with new_files(folder, overwrite=overwrite) as new:
        Path(new, name).write_bytes(page)
    names = [tensor["name"] for tensor in data["tensors"]]
    return PageReport(target, len(page), len(names), tuple(filter(found.is_broken, names)) if found else ())


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
