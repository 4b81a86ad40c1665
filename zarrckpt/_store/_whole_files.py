"""Local files of other formats, which are visible only when they are complete."""

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
    """Return the absolute path of a user's local file or folder: a path, also with ``~``, or a ``file://`` url.

    Raises StorageError for any other url, and for text that looks like a mistyped one. Exports, reports and imported
    files must be on local disks.
    """
    parsed = parse(target)
    if parsed.kind != "local":
        raise StorageError(
            f"{redact_url(parsed.address)} is a url, but exports, reports and imported files must be local. Copy them "
            "from there or to there, or use zarrckpt.copy"
        )
    return parsed.path


def local_file(target: str | os.PathLike[str]) -> str:
    """Return :func:`local_path` of a file to write. Raises StorageError also for text that ends in "/"."""
    path = local_path(target)
    if os.fspath(target).endswith("/"):
        raise StorageError(f"{redact_url(os.fspath(target))} names a folder, expected the name of a file")
    return path


def refuse_existing(names: Iterable[str]) -> None:
    """Raise StorageError if any of these files or folders exists."""
    found = [name for name in names if os.path.lexists(name)]
    if found:
        raise StorageError(
            f"{found[0]} exists already, so no file was written. Export to another path, or pass overwrite=True"
        )


@contextmanager
def private_folder(above: str) -> Iterator[str]:
    """Make a folder with a random name in ``above`` that no other user can enter. Remove it when the block ends.

    So no other user can make a link under the name of a file that is written there. Raises StorageError for an OSError.
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
    """Yield an empty folder. If the block ends without an error, move the files in it to ``folder``.

    Before that, and if the block raises an error, ``folder`` contains none of the files. Each file is synced to disk
    and then renamed atomically. If there are several files, or files that they replace, they move under a lock, so that
    one of several concurrent exports wins as a whole. A link under a final name is replaced, not followed.

    Args:
        folder: the target. It is made if it is absent.
        overwrite: whether to replace files of the same names. If False, an existing one raises StorageError and no file
            changes.
        replaces: returns whether a file of this name in ``folder`` is removed because the new ones replace it.

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
    """Return the paths of all files below a folder, relative to it."""
    return [os.path.relpath(os.path.join(above, name), folder) for above, _, names in os.walk(folder) for name in names]


def _move_files(part: str, folder: str, names: Sequence[str], replaced: Sequence[str], overwrite: bool) -> None:
    for name in names:
        _make_folders(folder, os.path.dirname(name))
        if os.path.isdir(target := os.path.join(folder, name)) and not os.path.islink(target):
            raise StorageError(f"writing {target} failed: it is a folder, expected a file or no entry. Remove it")
    if not overwrite:
        refuse_existing(os.path.join(folder, name) for name in (*names, *replaced))
    # The index first, because it must not refer to files of another export.
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
            raise StorageError(f"writing in {folder} is refused: it is a link, which may lead elsewhere. Remove it")
        os.makedirs(folder, exist_ok=True)


def upload_files(folder: str, store: Store) -> list[str]:
    """Put the files of a local folder to a store, each with one put. Return their keys in the order of the puts.

    Larger files are put first. Small files, such as an index, make the folder readable for other libraries.
    """
    paths = [os.path.join(folder, name) for name in relative_files(folder)]
    keys = []
    for path in sorted(paths, key=os.path.getsize, reverse=True):
        keys.append(os.path.relpath(path, folder).replace(os.sep, "/"))
        with open(path, "rb") as file:
            # Not closed here, because a client may still refer to it.
            whole = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if os.path.getsize(path) else b""
        store.put(keys[-1], [memoryview(whole)])
    return keys
