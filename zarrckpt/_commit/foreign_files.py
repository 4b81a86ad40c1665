"""Recognise other libraries' files and renamed archives at a url without a checkpoint, for messages."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from zarrckpt._commit.listings import FolderContents
from zarrckpt._errors import one_line
from zarrckpt._format.documents import join
from zarrckpt._store._archive import SUFFIX, is_archive_name
from zarrckpt._store._base import is_system_file

if TYPE_CHECKING:
    from zarrckpt._store import Store

_HEAD_BYTES = 512
"""Number of bytes that are read of a file. The smallest files of torch.save have more."""

_ZIP = b"PK\x03\x04"
_PICKLE = b"\x80"
_SAFETENSORS = ".safetensors"
_TORCH_SUFFIXES = (".pt", ".pth", ".ckpt", ".bin")


def describe_files(store: Store, listed: FolderContents) -> str:
    """Return the kind of other libraries' files at a url, and the next step. "" if none are recognised.

    One request, for the first bytes of an object that has the url as its name, if the listing is empty.
    """
    if store.is_archive and store.is_local and os.path.isdir(store.url):
        return f"It is a folder. If it is a checkpoint, rename it: the name of a folder must not end with {SUFFIX}"
    if listed.objects:
        return _describe_names(store, [name for name in listed.objects if not is_system_file(name)])
    return "" if listed.folders else _describe_head(store, store.first_bytes(_HEAD_BYTES))


def _describe_head(store: Store, head: bytes) -> str:
    """Describe a file by its first bytes."""
    if head.startswith(_ZIP):
        # The name of the first entry. torch.save writes <name>/data.pkl first.
        name = head[30 : 30 + int.from_bytes(head[26:28], "little")]
        if name.endswith(b"/data.pkl"):
            return _import_text(store, "a file of torch.save")
        return f"It is a ZIP archive. If it is a checkpoint, rename it: the name must end with {SUFFIX}"
    if head.startswith(_PICKLE):
        return _import_text(store, "a pickle, as torch.save wrote before PyTorch 1.6")
    if head[6:9] == b"\0\0{":  # after the length of the JSON header
        return _import_text(store, "a safetensors file")
    # Web servers answer the url of a folder with a page.
    is_page = head.lstrip().startswith(b"<")
    return "" if is_page or not head else f"It is a file. A checkpoint is a folder, or a ZIP archive *{SUFFIX}"


def _describe_names(store: Store, names: Sequence[str]) -> str:
    """Describe a folder by the names of its files."""
    if ".metadata" in names:
        return _import_text(store, "a folder of torch.distributed.checkpoint")
    if any(name.endswith(".distcp") for name in names):
        return "It has files of torch.distributed.checkpoint, but not their .metadata: the save was not finished"
    if any(name.endswith(_SAFETENSORS) for name in names):
        return _import_text(store, "a folder of safetensors files")
    if found := [name for name in names if name.endswith(_TORCH_SUFFIXES)]:
        return _import_text(store, f"a folder with files named as those of torch.save ({names_text(found)})", found[0])
    if renamed := [name for name in names if name.endswith(".zip") and not is_archive_name(name)]:
        return f"It has the ZIP archive {renamed[0]!r}. If it is a checkpoint, its name must end with {SUFFIX}"
    return ""


def _import_text(store: Store, kind: str, name: str = "") -> str:
    url = one_line(join(store.url, name) if name else store.url)
    path, download = (url, "") if store.is_local else ("FILE", f"Download {url}. Then ")
    return f"It is {kind}. {download}`zarrckpt import {path} NEW_URL` makes a checkpoint"


def names_text(names: Sequence[str]) -> str:
    """Return the first names of a folder's contents as a text."""
    return ", ".join(map(repr, names[:5])) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
