"""Writes on a filesystem: plain, create-only by a hard link, compare-and-swap under a lock.

The last two are durable on return (the file's bytes; the caller syncs the folders). At every instant the final name
holds a whole file or none, but for :func:`write_new`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import time
import uuid
import warnings
from collections.abc import Iterable, Iterator, Sequence

from zarrckpt._errors import StorageError
from zarrckpt._forks import ForkSafeLock
from zarrckpt._store._base import version_of
from zarrckpt._store._failures import ABSENT
from zarrckpt._store._regular_files import read_regular

_LOCK_SECONDS = 60.0
# One lock for the process: POSIX locks belong to processes and do not keep threads apart.
_THREADS_LOCK = ForkSafeLock()

# Filesystems without hard links (exFAT, some FUSE and SMB mounts) refuse one in these ways.
_NO_LINKS = (errno.EPERM, errno.EACCES, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EINVAL)
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL)

# Object stores mounted as folders: they rename by copying, or not at all.
_BUCKET_MOUNTS = ("mountpoint-s3", "blobfuse", "blobfuse2", "goofys", "s3fs", "gcsfuse")

_OWN_NAME = re.compile(r"\.zarrckpt-[0-9a-f]{16}(-[0-9a-f]{32})?\.(part|lock)")
_SILLY_NAME = re.compile(r"\.(nfs|fuse_hidden)[0-9a-f]{8,}")
IOV_MAX = max(16, os.sysconf("SC_IOV_MAX"))


Views = Iterable[Sequence[memoryview]]
"""What is written to a file: groups of buffers, each written before the next one is made."""


def own_name(path: str, suffix: str, unique: bool = False) -> str:
    """The name of a helper file ("part" or "lock") beside ``path``: never an object, never too long."""
    folder, name = os.path.split(path)
    digest = hashlib.sha256(os.fsencode(name)).hexdigest()[:16]
    return os.path.join(folder, f".zarrckpt-{digest}{'-' + uuid.uuid4().hex if unique else ''}.{suffix}")


def is_own_name(name: str) -> bool:
    """Whether a file of this name is a helper file, and no object."""
    return _OWN_NAME.fullmatch(name) is not None


def is_silly_name(name: str) -> bool:
    """Whether a file of this name is what NFS or FUSE keeps of one that was removed while somebody had it open."""
    return _SILLY_NAME.fullmatch(name) is not None


def put_file(path: str, groups: Views, *, unique: bool = False, sync: bool = False) -> None:
    """Write a file under a helper name and rename it: readers see the old one or the whole new one."""
    temp = write_temp(path, groups, unique=unique, sync=sync)
    try:
        os.replace(temp, path)
    except OSError:
        _unlink(temp)
        raise


def write_temp(path: str, groups: Views, *, unique: bool, sync: bool) -> str:
    """Write the helper file of ``path`` and return its name. It is removed again where that fails."""
    temp = own_name(path, "part", unique)
    try:
        file = _open_new(temp)
    except FileExistsError:
        # A crash left it behind, or another thread writes the same key: a name of our own then.
        temp = own_name(path, "part", unique=True)
        file = _open_new(temp)
    _fill_new(file, temp, groups, sync)
    return temp


def write_new(path: str, groups: Views) -> None:
    """Write a file under its own name: until this returns, a reader may see a part of it.

    What is there already is of an earlier try: it is unlinked, never truncated, since somebody may have it open. The
    file is removed again where that fails.
    """
    try:
        file = _open_new(path)
    except FileExistsError:
        os.unlink(path)
        file = _open_new(path)
    _fill_new(file, path, groups, sync=False)


def _open_new(path: str) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)


def _fill_new(file: int, path: str, groups: Views, sync: bool) -> None:
    """Write and close a file that was made just now. It is removed where that fails."""
    try:
        with closed_after(file):
            for views in groups:
                _write_all(file, list(views))
            if sync:
                os.fsync(file)
    except BaseException:
        _unlink(path)
        raise


def create_file(path: str, data: bytes) -> bool:
    """Make a file only where none is. False: there is one already."""
    temp = write_temp(path, [[memoryview(data)]], unique=True, sync=True)
    try:
        os.link(temp, path)
    except FileExistsError:
        # An NFS client repeats a call whose answer was lost, and then meets its own link.
        return os.stat(temp).st_nlink == 2
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        return _create_exclusively(path, data)
    finally:
        _unlink(temp)
    return True


def move_new(source: str, path: str) -> None:
    """Give a file its final name only if none is there. Raises FileExistsError."""
    try:
        os.link(source, path)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        # There is no better call that filesystems without hard links offer.
        if os.path.lexists(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path) from error
        os.rename(source, path)


def replace_file(path: str, data: bytes, version: str) -> bool:
    """Replace a file only where its content has the ``version``. False: it has not, or there is none."""
    with locked(path):
        try:
            found = read_regular(path)
            if version_of(found) != version:
                # A repeated call meets its own content.
                return found == data
        except ABSENT:
            return False
        put_file(path, [[memoryview(data)]], unique=True, sync=True)
    return True


def sync_path(path: str) -> None:
    """fsync a file or a folder."""
    with closed_after(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)) as file:
        try:
            os.fsync(file)
        except OSError as error:
            # Some filesystems cannot sync a folder, and then keep its names without.
            if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF) or not os.path.isdir(path):
                raise


@contextlib.contextmanager
def closed_after(file: int) -> Iterator[int]:
    """Close a file after the block. Network filesystems report a full disk then; an error of the block counts more."""
    try:
        yield file
    except BaseException:
        with contextlib.suppress(OSError):
            os.close(file)
        raise
    os.close(file)


def refuse_mount(path: str) -> None:
    """Raise StorageError where ``path`` lies on an object store mounted as a folder."""
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
            kind = bucket_mount(path, file.read())
    except OSError:
        return
    if kind:
        raise StorageError(
            f"{path!r} lies on {kind}, an object store mounted as a folder: it cannot rename a file atomically, so no "
            "save there could be safe. Save to the bucket's own url instead (s3://, gs://, az://)"
        )


def bucket_mount(path: str, mountinfo: str) -> str:
    """The kind of bucket mount that ``path`` lies on, by the text of ``/proc/self/mountinfo``; "" for none."""
    longest, kind = -1, ""
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        fields, described = left.split(), right.split()
        if len(fields) < 5 or len(described) < 2:
            continue
        point = re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), fields[4])
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= longest:
            names = {described[0].removeprefix("fuse."), described[1]} if described[0].startswith("fuse") else set()
            longest, kind = len(point), next((name for name in _BUCKET_MOUNTS if name in names), "")
    return kind


def _create_exclusively(path: str, data: bytes) -> bool:
    # Without hard links a crash in the middle can leave a part under the final name; readers then report
    # a damaged document. There is no better call that such filesystems offer.
    try:
        file = _open_new(path)
    except FileExistsError:
        return False
    _fill_new(file, path, [[memoryview(data)]], sync=True)
    return True


@contextlib.contextmanager
def locked(path: str) -> Iterator[None]:
    """Hold the lock of ``path`` against threads and processes (of other machines too, where the mount does that)."""
    name = own_name(path, "lock")
    with _THREADS_LOCK, closed_after(_open_locked(name)):
        try:
            yield
        finally:
            # Removed while it is held: whoever waits on this file sees that it is gone, and opens a new one.
            _unlink(name)


def _open_locked(name: str) -> int:
    deadline = time.monotonic() + _LOCK_SECONDS
    while True:
        # A link of this name, which anybody who may write to the folder can plant, is an error.
        file = os.open(name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        try:
            if _locks_file(file, name) and _same_file(file, name):
                return file
        except BaseException:
            os.close(file)
            raise
        os.close(file)
        if time.monotonic() > deadline:
            raise StorageError(
                f"the lock {name!r} was held by another process for {_LOCK_SECONDS:.0f} s: wait for the other save "
                "to end, or end it"
            )
        time.sleep(0.01)


def _locks_file(file: int, name: str) -> bool:
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        warnings.warn(
            f"{name!r}: this filesystem has no file locks, so the guard between processes that replace one checkpoint "
            "at the same moment is best effort. Make sure that only one save writes to a path at a time.",
            UserWarning,
            stacklevel=2,
        )
    return True


def _same_file(file: int, name: str) -> bool:
    """Whether the open file still is the one of this name (its last holder removes it)."""
    try:
        return os.path.samestat(os.fstat(file), os.lstat(name))
    except FileNotFoundError:
        return False


def _write_all(file: int, views: list[memoryview]) -> None:
    """Write all the views; a call takes at most IOV_MAX of them and may write less than it was given."""
    views.reverse()
    while views:
        drop(views, os.writev(file, views[: -IOV_MAX - 1 : -1]))


def drop(views: list[memoryview], done: int) -> None:
    """Take what a call has written or filled off the end of the views, which are in reverse order."""
    while views and done >= len(views[-1]):
        done -= len(views.pop())
    if done:
        views[-1] = views[-1][done:]


def _unlink(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)
