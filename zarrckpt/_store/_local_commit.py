"""Writes on a filesystem: plain, create-only by a hard link, and compare-and-swap under a lock.

After the last two, the file's bytes are durable on return. The caller syncs the folders. Except in :func:`write_new`,
the final name always holds a whole file or none.
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

from zarrckpt._errors import CorruptCheckpointError, StorageError
from zarrckpt._forks import ForkSafeLock
from zarrckpt._store._base import version_of
from zarrckpt._store._failures import ABSENT
from zarrckpt._store._linkable import LinkableFile
from zarrckpt._store._regular_files import read_regular

_LOCK_SECONDS = 60.0
# One lock for the process: POSIX locks belong to processes and do not exclude threads.
_THREADS_LOCK = ForkSafeLock()

# Error codes of filesystems without hard links (exFAT, some FUSE and SMB mounts).
_NO_LINKS = (errno.EPERM, errno.EACCES, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EINVAL)
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL)

# Object stores mounted as folders. They rename by copying or cannot rename.
_BUCKET_MOUNTS = ("mountpoint-s3", "blobfuse", "blobfuse2", "goofys", "s3fs", "gcsfuse")

_OWN_NAME = re.compile(r"\.zarrckpt-[0-9a-f]{16}(-[0-9a-f]{32})?\.(part|lock)")
_SILLY_NAME = re.compile(r"\.(nfs|fuse_hidden)[0-9a-f]{8,}")
_COPY_BYTES = 1 << 30
"""Maximum number of bytes that one system call copies between files."""
_BLOCK_BYTES = 1 << 20
IOV_MAX = max(16, os.sysconf("SC_IOV_MAX"))


Views = Iterable[Sequence[memoryview]]
"""The content of a file: groups of buffers. Each group is written before the next one is made."""


def helper_name(path: str, suffix: str, *, unique: bool = False) -> str:
    """Return the name of a helper file ("part" or "lock") beside ``path``. It is never an object and never too long."""
    folder, name = os.path.split(path)
    digest = hashlib.sha256(os.fsencode(name)).hexdigest()[:16]
    return os.path.join(folder, f".zarrckpt-{digest}{'-' + uuid.uuid4().hex if unique else ''}.{suffix}")


def is_helper_name(name: str) -> bool:
    """Whether a file of this name is a helper file and not an object."""
    return _OWN_NAME.fullmatch(name) is not None


def is_silly_name(name: str) -> bool:
    """Whether NFS or FUSE keeps a deleted file under this name because a process has it open."""
    return _SILLY_NAME.fullmatch(name) is not None


def put_file(path: str, groups: Views, *, unique: bool = False, sync: bool = False) -> None:
    """Write a file under a helper name and rename it. Readers see the old file or the whole new one."""
    temp = write_temp(path, groups, unique=unique, sync=sync)
    try:
        os.replace(temp, path)
    except OSError:
        _unlink(temp)
        raise


def write_temp(path: str, groups: Views, *, unique: bool, sync: bool) -> str:
    """Write the helper file of ``path`` and return its name. It is removed if the write fails."""
    temp = helper_name(path, "part", unique=unique)
    try:
        file = open_new(temp)
    except FileExistsError:
        # A crash left it behind, or another thread writes the same key. Use a unique name.
        temp = helper_name(path, "part", unique=True)
        file = open_new(temp)
    _fill_new(file, temp, groups, sync)
    return temp


def write_new(path: str, groups: Views) -> None:
    """Write a file under its final name. Until this returns, readers may see a part of it.

    An existing file is from an earlier try. It is unlinked and never truncated, because a process may have it open. The
    new file is removed if the write fails.
    """
    try:
        file = open_new(path)
    except FileExistsError:
        os.unlink(path)
        file = open_new(path)
    _fill_new(file, path, groups, sync=False)


def link_new(file: LinkableFile, path: str) -> bool:
    """Make a file's second name, and give it the present time, so that a clean-up by age does not take it for old.

    Return False if the name leads to another file by now, or if the file system refuses links. An existing file is
    replaced as in :func:`write_new`.
    """
    _unlink(path)
    try:
        os.link(file.path, path, follow_symlinks=False)
    except OSError:
        if not os.path.isdir(os.path.dirname(path)):
            raise
        return False
    found = os.lstat(path)
    if not os.path.samestat(found, file.found) or found.st_size != file.size:
        _unlink(path)
        return False
    with contextlib.suppress(OSError):
        os.utime(path)
    return True


def stat_new(path: str) -> os.stat_result:
    """Return the owner, group, mode and device of a new file beside ``path``. The file is removed."""
    name = helper_name(path, "part", unique=True)
    with closed_after(open_new(name)) as file:
        try:
            return os.fstat(file)
        finally:
            _unlink(name)


def open_new(path: str) -> int:
    """Create a file for writing and return its descriptor. Raises FileExistsError."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)


def _fill_new(file: int, path: str, groups: Views, sync: bool) -> None:
    """Write and close a new file. It is removed if this fails."""
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
    """Make a file only if none exists. Return False if one exists."""
    temp = write_temp(path, [[memoryview(data)]], unique=True, sync=True)
    try:
        os.link(temp, path)
    except FileExistsError:
        # An NFS client repeats a call whose answer was lost. The repeat then finds the link that the call made.
        return os.stat(temp).st_nlink == 2
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        return _create_exclusively(path, data)
    finally:
        _unlink(temp)
    return True


def move_new(source: str, path: str, lock: str = "") -> None:
    """Rename a file to its final name. Raises FileExistsError if a file of this name exists.

    Filesystems without hard links have no atomic call for this, so there the lock of the path ``lock`` is held.
    """
    try:
        os.link(source, path)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        with locked(lock) if lock else contextlib.nullcontext():
            if os.path.lexists(path):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path) from error
            os.rename(source, path)


def replace_file(path: str, data: bytes, version: str) -> bool:
    """Replace a file only if its content has the ``version``. Return False if it has another one or is absent."""
    with locked(path):
        try:
            found = read_regular(path)
            if version_of(found) != version:
                # Equal content means that an earlier try of this call succeeded.
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
            # Some filesystems cannot sync a folder, and its entries are durable without it.
            if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF) or not os.path.isdir(path):
                raise


@contextlib.contextmanager
def closed_after(file: int) -> Iterator[int]:
    """Close a file after the block.

    Network filesystems may report a full disk only on close. If the block raises an error, one of the close is dropped.
    """
    try:
        yield file
    except BaseException:
        with contextlib.suppress(OSError):
            os.close(file)
        raise
    os.close(file)


def refuse_mount(path: str) -> None:
    """Raise StorageError if ``path`` is on an object store that is mounted as a folder."""
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
            kind = bucket_mount(path, file.read())
    except OSError:
        return
    if kind:
        raise StorageError(
            f"{path!r} is on {kind}, an object store mounted as a folder. It cannot rename a file atomically, so no "
            "save there is safe. Save to the bucket's url instead (s3://, gs://, az://)"
        )


def bucket_mount(path: str, mountinfo: str) -> str:
    """Return the kind of bucket mount that ``path`` is on, or "". ``mountinfo`` is the text of /proc/self/mountinfo."""
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
    # Without hard links, a crash during the write can leave a part under the final name. Readers then report a damaged
    # document. Such filesystems have no atomic call for this.
    try:
        file = open_new(path)
    except FileExistsError:
        return False
    _fill_new(file, path, [[memoryview(data)]], sync=True)
    return True


@contextlib.contextmanager
def locked(path: str) -> Iterator[None]:
    """Hold the lock of ``path`` against threads and processes, also of other machines if the mount supports that."""
    name = helper_name(path, "lock")
    with _THREADS_LOCK, closed_after(_open_locked(name)):
        try:
            yield
        finally:
            # Remove the file while it is locked. A process that waits for it notices this and opens a new one.
            _unlink(name)


def _open_locked(name: str) -> int:
    deadline = time.monotonic() + _LOCK_SECONDS
    while True:
        # A link of this name is an error: any user who may write to the folder could have made it.
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
                f"locking {name!r} failed: another process held the lock for {_LOCK_SECONDS:.0f} s. Wait for the other "
                "save to end, or end it"
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
            f"{name!r}: this filesystem has no file locks, so the guard against processes that replace one checkpoint "
            "at the same moment is best effort. Make sure that only one save writes to a path at a time.",
            UserWarning,
            stacklevel=2,
        )
    return True


def _same_file(file: int, name: str) -> bool:
    """Whether the open file still has this name. The process that held the lock removes the file."""
    try:
        return os.path.samestat(os.fstat(file), os.lstat(name))
    except FileNotFoundError:
        return False


def _write_all(file: int, views: list[memoryview]) -> None:
    """Write all views. A system call takes at most IOV_MAX of them and may write only a part."""
    views.reverse()
    while views:
        drop(views, os.writev(file, views[: -IOV_MAX - 1 : -1]))


def pwrite_all(file: int, views: Sequence[memoryview], byte_offset: int) -> None:
    """Write all views at an offset of an open file."""
    left = [*reversed(views)]
    while left:
        done = os.pwritev(file, left[: -IOV_MAX - 1 : -1], byte_offset)
        byte_offset += done
        drop(left, done)


def copy_range(source: int, target: int, nbytes: int, source_offset: int, target_offset: int) -> None:
    """Copy bytes between open files, within the kernel if the filesystem can.

    Raises CorruptCheckpointError if the source has fewer.
    """
    while nbytes:
        try:
            done = os.copy_file_range(source, target, min(nbytes, _COPY_BYTES), source_offset, target_offset)
        except (AttributeError, OSError):
            done = 0
        if not done:
            # Only Linux has the call, and network file systems fail in many ways or copy nothing.
            data = os.pread(source, min(nbytes, _BLOCK_BYTES), source_offset)
            pwrite_all(target, [memoryview(data)], target_offset)
            done = len(data)
        if not done:
            raise CorruptCheckpointError("a file that is being copied was cut")
        nbytes, source_offset, target_offset = nbytes - done, source_offset + done, target_offset + done


def drop(views: list[memoryview], done: int) -> None:
    """Remove the first ``done`` bytes from the views, which are in reverse order."""
    while views and done >= len(views[-1]):
        done -= len(views.pop())
    if done:
        views[-1] = views[-1][done:]


def _unlink(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)
