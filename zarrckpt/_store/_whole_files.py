"""Local files of other formats, which appear when they are whole."""

from __future__ import annotations

import mmap
import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress

from zarrckpt._errors import StorageError
from zarrckpt._store._base import Store
from zarrckpt._store._local_commit import locked, move_new, sync_path
from zarrckpt._store._secrets import redact_url
from zarrckpt._store._url import parse

_PRIVATE_NAME = ".zarrckpt-export-"


def local_path(target: str | os.PathLike[str]) -> str:
    """Return the absolute path of a local file or folder that a user names: a path, also with ``~``, or ``file://``.

    Raises StorageError for any other url, and for text that looks like a mistyped one: exports, reports and what is
    imported are on local disks alone.
    """
    place = parse(target)
    if place.kind != "local":
        raise StorageError(
            f"{redact_url(place.address)} is a url; exports, reports and imported files are local: copy them from "
            "there or to there, or use copy_to"
        )
    return place.path


def local_file(target: str | os.PathLike[str]) -> str:
    """Return :func:`local_path` of a file to write. Raises StorageError also for text that ends in "/"."""
    path = local_path(target)
    if os.fspath(target).endswith("/"):
        raise StorageError(f"{redact_url(os.fspath(target))} names a folder; expected the name of a file")
    return path


def refuse_existing(names: Iterable[str]) -> None:
    """Raise StorageError if one of some files or folders exists."""
    found = [name for name in names if os.path.lexists(name)]
    if found:
        raise StorageError(
            f"{found[0]} exists already; nothing was written: export to another place, or pass overwrite=True"
        )


@contextmanager
def private_folder(above: str) -> Iterator[str]:
    """Make a folder with a random name in ``above`` that no other user can enter; remove it when the block ends.

    Nobody can plant a link under a name that is about to be written there. Raises StorageError for an OSError.
    """
    folder = os.path.join(above, f"{_PRIVATE_NAME}{uuid.uuid4().hex}")
    try:
        os.makedirs(above, exist_ok=True)
        os.mkdir(folder, 0o700)
        yield folder
    except OSError as err:
        name = str(err.filename2 or err.filename or above).replace(folder, above)
        raise StorageError(f"writing {name} failed: {err.strerror or err}") from err
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def new_files(folder: str, *, overwrite: bool, replaces: Callable[[str], bool] | None = None) -> Iterator[str]:
    """Yield an empty folder; what is written to it moves to ``folder`` when the block ends without an error.

    Until then ``folder`` has none of the files, and after an error of the block none of them. Each file is on the disk
    before it moves, and moves at once. If there are several files, or files that they replace, they move under a lock:
    of several exports at the same time, one wins as a whole. A link under a final name is replaced, not followed.

    Args:
        folder: made if it is absent.
        overwrite: replace files of the same names. Without, one that exists is a StorageError and all files stay.
        replaces: chooses the names of files in ``folder`` that are removed because the new ones replace them.

    Raises StorageError, also for an OSError.
    """
    folder = folder or "."
    with private_folder(folder) as part:
        yield part
        # Loaders begin with an index or a configuration, so these move last.
        names = sorted(relative_files(part), key=lambda name: (name.endswith(".json"), name))
        for name in names:
            sync_path(os.path.join(part, name))
        with locked(os.path.join(folder, "export")) if replaces or len(names) > 1 else nullcontext():
            _move_files(part, folder, names, [*filter(replaces, os.listdir(folder))] if replaces else [], overwrite)
        sync_path(folder)


def relative_files(folder: str) -> list[str]:
    """The paths of all files below a folder, relative to it."""
    return [os.path.relpath(os.path.join(above, name), folder) for above, _, names in os.walk(folder) for name in names]


def _move_files(part: str, folder: str, names: Sequence[str], replaced: Sequence[str], overwrite: bool) -> None:
    for name in names:
        _make_folders(folder, os.path.dirname(name))
        if os.path.isdir(target := os.path.join(folder, name)) and not os.path.islink(target):
            raise StorageError(f"{target} is a folder, and a file of this name is to be written: remove it")
    if not overwrite:
        refuse_existing(os.path.join(folder, name) for name in (*names, *replaced))
    # The index first: it must not name files of another export.
    for name in sorted(replaced, key=lambda name: not name.endswith(".json")):
        os.unlink(os.path.join(folder, name))
    moved: list[str] = []
    try:
        for name in names:
            source, target = os.path.join(part, name), os.path.join(folder, name)
            if overwrite:
                os.replace(source, target)
            else:
                move_new(source, target)
            moved.append(target)
    except BaseException:
        for target in [] if overwrite else moved:
            with suppress(OSError):
                os.unlink(target)
        raise


def _make_folders(folder: str, below: str) -> None:
    """Make a folder below another one. Raises StorageError if a link is on the way."""
    for name in below.split(os.sep) if below else ():
        folder = os.path.join(folder, name)
        if os.path.islink(folder):
            raise StorageError(f"writing in {folder} is refused: it is a link, which may lead elsewhere; remove it")
        os.makedirs(folder, exist_ok=True)


def upload_files(folder: str, store: Store) -> list[str]:
    """Put the files of a local folder to a store, each with one put; return their keys, in the order of the puts.

    A folder's small files come last: they make it one that others open.
    """
    paths = [os.path.join(folder, name) for name in relative_files(folder)]
    keys = []
    for path in sorted(paths, key=os.path.getsize, reverse=True):
        keys.append(os.path.relpath(path, folder).replace(os.sep, "/"))
        with open(path, "rb") as file:
            # Not closed here: a client may still refer to it.
            whole = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if os.path.getsize(path) else b""
        store.put(keys[-1], [memoryview(whole)])
    return keys
