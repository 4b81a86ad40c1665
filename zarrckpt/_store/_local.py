"""A folder on a local or shared filesystem, with plain system calls.

Objects are files. Files of an attempt that is not committed have no readers, so they are written under their final
names. Every other file is written under a helper name in its folder and then renamed, so that readers never see a part.
The helper name is a function of the final name. So the file that a crash leaves behind is removed when a later process
deletes the object's key.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from stat import S_ISDIR
from typing import Any, TypeVar

from zarrckpt._errors import CorruptCheckpointError, StorageError, one_line
from zarrckpt._forks import ForkSafeLock
from zarrckpt._jobs import thread_pool
from zarrckpt._store import _failures
from zarrckpt._store import _local_commit as files
from zarrckpt._store._base import (
    BESIDE_TRAINING,
    Buffer,
    Listing,
    ObjectInfo,
    Reader,
    Store,
    byte_views,
    check_key,
    is_system_file,
)
from zarrckpt._store._linkable import LinkableFile
from zarrckpt._store._local_folders import Folders, refuse_links
from zarrckpt._store._regular_files import MAX_WHOLE_BYTES, open_regular, read_regular

T = TypeVar("T")

Entries = list[tuple[str, bool, int]]
"""(name, whether it is a folder, size in bytes) of each entry of a folder."""

_DISK_THREADS = 16
_WRITE_TRIES = 20
_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG)
"""Error codes that mean that a file or folder is absent. No file can have a name that is too long."""
_STAYS = (*_ABSENT, errno.ENOTEMPTY, errno.EEXIST, errno.EBUSY)
"""Error codes that mean that a folder need not or must not be removed."""

_NO_INODES = (
    "The disk has no free inodes (df -i), so it can hold no further file, even with free space: remove files, save "
    "elsewhere, or save one file (a path that ends with .zarr.zip)"
)
_NEXT_STEP = {
    errno.ENOSPC: "The disk is full: free space, or save elsewhere",
    errno.EDQUOT: "The disk quota, of bytes or of files, is used up: free space, or save elsewhere",
    errno.EROFS: "The filesystem is read-only: save elsewhere",
    errno.EACCES: "Permission is denied: check the owner and the mode of the folder",
    errno.EPERM: "The operation is not permitted: check the owner, the mode and the mount of the folder",
    errno.ENAMETOOLONG: "The name is too long for this filesystem: use a shorter path",
    errno.ENOTDIR: "A file has the name of a folder that is needed: choose another path",
    errno.EEXIST: "A file has the name of a folder that is needed: choose another path",
    errno.EISDIR: "A folder has the name of a file that is needed: choose another path",
    errno.ESTALE: "The network filesystem lost the file: check the mount, and try again",
    errno.EFBIG: "The file is too large for this filesystem, or for the limit on files (ulimit -f)",
    errno.EMFILE: "Too many files are open: raise the limit (ulimit -n)",
}


def disk_threads() -> ThreadPoolExecutor:
    """Return this process's pool of threads that wait for disks."""
    return thread_pool("zarrckpt-sync", _DISK_THREADS)


class LocalStore(Store):
    """Objects as files below the folder ``root`` (an absolute path, made by the first write).

    With ``durable=False`` there are no fsyncs in :meth:`sync`. Conditional puts are always durable. Most methods are
    those of :class:`Store`.
    """

    is_local = True
    client_errors = OSError
    max_concurrency = max(2, min(8, os.cpu_count() or 1))

    def __init__(self, root: str, durable: bool = True) -> None:
        self.url = one_line(root)
        self._root = root
        self.durable = durable
        self._folders = Folders(root)
        self._mount_is_known = False
        self._new_file: os.stat_result | None = None
        self._lock = ForkSafeLock()
        self._syncs: dict[str, Future[None]] = {}
        """The running sync of each key that was written and is not known to be durable yet."""

    def useful_concurrency(self) -> int:
        return min(self.max_concurrency, BESIDE_TRAINING) if self.beside_training else self.max_concurrency

    def get(self, key: str) -> bytes:
        return self._read(key, self.path_of(key))

    def get_bounded(self, key: str, max_bytes: int) -> bytes:
        return self._read(key, self.path_of(key), max_bytes)

    def size(self, key: str) -> int:
        def read_size() -> int:
            with files.closed_after(open_regular(path)) as file:
                return os.fstat(file).st_size

        path = self.path_of(key)
        return self.call(f"reading {path!r}", read_size, key)

    def get_above(self, levels: int, key: str) -> bytes:
        folder = self._root
        for _ in range(levels):
            if folder == os.path.dirname(folder):
                return super().get_above(levels, key)
            folder = os.path.dirname(folder)
        return self._read(f"{'../' * levels}{key}", os.path.join(folder, check_key(key)))

    def first_bytes(self, nbytes: int) -> bytes:
        with suppress(OSError, CorruptCheckpointError), files.closed_after(open_regular(self._root)) as file:
            return os.read(file, nbytes)
        return b""

    def read_into(self, key: str, byte_offset: int, buffer: memoryview) -> None:
        with self.reader(key) as read:
            read(byte_offset, [buffer])

    @contextmanager
    def reader(self, key: str) -> Iterator[Reader]:
        """Return a context manager for reads through one open file, several buffers per call (``preadv``)."""
        path = self.path_of(key)
        file = self.call(f"reading {path!r}", lambda: open_regular(path), key)

        def read(byte_offset: int, buffers: Sequence[memoryview]) -> None:
            # A load calls this thousands of times per gigabyte, so the usual case is one system call.
            needed = len(buffers[0]) if len(buffers) == 1 else sum(map(len, buffers))
            try:
                done = os.preadv(file, buffers, byte_offset) if len(buffers) <= files.IOV_MAX else 0
                if done < needed:
                    done = _fill(file, byte_offset, buffers)
            except OSError as error:
                raise self.failure(f"reading {path!r}", error) from error
            if done != needed:
                raise _failures.short_object(key, self.url, byte_offset + needed, byte_offset + done)

        with files.closed_after(file):
            yield read

    def put(self, key: str, buffers: Sequence[Buffer]) -> None:
        self._put(key, lambda path: files.put_file(path, [byte_views(buffers)]))

    def put_parts(self, key: str, groups: Callable[[], Iterable[Sequence[Buffer]]]) -> None:
        self._put(key, lambda path: files.write_new(path, map(byte_views, groups())))

    def open_linkable(self, source: Store, source_key: str, key: str) -> LinkableFile | str:
        if not isinstance(source, LocalStore):
            return "it is in another kind of store"
        try:
            file = LinkableFile(source.path_of(source_key))
        except OSError as error:
            return one_line(str(error))
        # Whoever may change a file of this checkpoint may change all of them.
        if source is not self and (fault := file.may_differ_from(self._stat_new(key))):
            with file:
                return fault
        return file

    def link(self, file: LinkableFile, key: str) -> bool:
        linked = False

        def work(path: str) -> None:
            nonlocal linked
            linked = files.link_new(file, path)

        self._write("linking", key, work)
        if linked:
            # The base may have been saved with durable=False.
            self._begin_sync(key)
        return linked

    def _stat_new(self, key: str) -> os.stat_result:
        """Return the owner, group, mode and device of new files, as a file beside the first key has them."""
        if self._new_file is None:

            def work(path: str) -> None:
                self._new_file = files.stat_new(path)

            self._write("writing", key, work)
        assert self._new_file is not None
        return self._new_file

    def _put(self, key: str, work: Callable[[str], None]) -> None:
        self._write("writing", key, work)
        self._begin_sync(key)

    def _begin_sync(self, key: str) -> None:
        """Begin to sync a new file while others are still being written, so that the disk works in the meantime."""
        if self.durable:
            with self._lock:
                self._syncs[key] = disk_threads().submit(self._call_on, "syncing", self.path_of(key), files.sync_path)

    def create(self, key: str, data: bytes) -> None:
        def work(path: str) -> None:
            if not files.create_file(path, data) and read_regular(path) != data:
                raise _failures.conflict(key, self.url, replacing=False)

        self.put_conditionally("creating", key, work)

    def replace(self, key: str, data: bytes, version: Any) -> None:
        def work(path: str) -> None:
            if not files.replace_file(path, data, version):
                raise _failures.conflict(key, self.url, replacing=True)

        self.put_conditionally("replacing", key, work)

    def put_conditionally(self, verb: str, key: str, work: Callable[[str], None], *, sync_folders: bool = True) -> None:
        """Make a file by a call with its path. The call is repeated if another process removes the folder."""
        if not self._mount_is_known:
            files.refuse_mount(self.path_of(key))
            self._mount_is_known = True
        self._write(verb, key, work)
        if sync_folders:
            self.sync_folders([key])

    def delete(self, keys: Iterable[str]) -> None:
        keys = [*keys]
        with self._lock:
            for key in keys:
                self._syncs.pop(key, None)
        paths = [self.path_of(key) for key in keys]
        folders = {folder for path in paths for folder in self._folders.above(path)} - {self._root}
        refuse_links("deleting", folders)
        self._call_on_each("deleting", paths, _remove)
        self._remove_folders(folders)

    def sweep(self, folders: Iterable[str]) -> None:
        paths = {self.path_of(folder) if folder else self._root for folder in folders}
        # The target of a link below the root does not belong to this store.
        paths = {
            path for path in paths if not any(map(os.path.islink, {path, *self._folders.above(path)} - {self._root}))
        }
        self._call_on_each("deleting", sorted(paths), _remove_files)
        self._remove_folders(paths.union(*map(self._folders.above, paths)) - {self._root})

    def remove_folder(self, folder: str = "") -> None:
        path = self.path_of(folder) if folder else self._root
        if os.path.islink(path) or os.path.ismount(path):
            return
        self._folders.forget()
        tree = [*os.walk(path, topdown=False)]
        if all(_is_no_object(name) for _, _, names in tree for name in names):
            for inner, _, _ in tree:
                # Another user may own it or its parent. An empty folder does no harm.
                with suppress(OSError):
                    _remove_files(inner, _is_no_object)
                    os.rmdir(inner)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        todo = [check_key(prefix) if prefix else ""]
        while todo:
            folder = todo.pop()
            for name, is_folder, size in self._scan(folder):
                key = f"{folder}/{name}" if folder else name
                if is_folder:
                    todo.append(key)
                else:
                    yield ObjectInfo(key, size)

    def list_dir(self, prefix: str = "") -> Listing:
        """Return the names directly below a folder, as for any store.

        A link to a folder counts as a folder, because a run's checkpoint may be on another disk. So does a link that
        cannot be followed, because that disk may be missing.
        """
        entries = self._scan(prefix)
        links = {name for name, is_folder, _ in entries if not is_folder and self._may_link_to_folder(prefix, name)}
        entries = [(name, is_folder or name in links, size) for name, is_folder, size in entries]
        objects = sorted(name for name, is_folder, _ in entries if not is_folder)
        return objects, sorted(name for name, is_folder, _ in entries if is_folder)

    def refresh(self, folder: str) -> None:
        path = self.path_of(folder)
        # An NFS client asks its server when a folder is opened. The outermost is first, since the root may be new too.
        for opened in (os.path.dirname(self._root), *reversed([*self._folders.above(path)]), path):
            with suppress(OSError), os.scandir(opened):
                pass

    def _may_link_to_folder(self, prefix: str, name: str) -> bool:
        path = os.path.join(self._root, prefix, name)
        try:
            return os.path.islink(path) and S_ISDIR(os.stat(path).st_mode)
        except OSError as error:
            return error.errno != errno.ELOOP  # a link to itself has no target

    def holds(self, folder: str) -> bool:
        try:
            return os.path.islink(self.path_of(folder)) or super().holds(folder)
        except StorageError:
            return True  # the folder exists but cannot be read

    def refuse_broken_link(self, folder: str) -> None:
        path = self.path_of(folder)
        if os.path.islink(path) and not os.path.exists(path):
            raise StorageError(
                f"reading {path!r} failed: it is a link whose target does not exist. Mount or restore the target, or "
                "delete the link"
            )

    def sync(self, keys: Iterable[str]) -> None:
        if not self.durable:
            return
        keys = [*keys]
        with self._lock:
            begun = {key: self._syncs.pop(key) for key in keys if key in self._syncs}
        self._call_on_each("syncing", [self.path_of(key) for key in keys if key not in begun], files.sync_path)
        for sync in begun.values():
            sync.result()
        self.sync_folders(keys)

    # -- paths and folders

    def path_of(self, key: str) -> str:
        return os.path.join(self._root, check_key(key))

    def _remove_folders(self, folders: Iterable[str]) -> None:
        """Remove the empty ones of these folders."""
        # Deepest first, so that outer folders are empty when they are tried.
        for folder in sorted(folders, key=lambda name: name.count("/"), reverse=True):
            self._folders.forget(folder)
            self._call_on("deleting", folder, _remove_folder)

    def sync_folders(self, keys: Iterable[str]) -> None:
        """Sync all changed folders of the keys, up to the root, and changed folders above the root."""
        changes = self._folders.unsynced(map(self.path_of, keys))
        self._call_on_each("syncing", [*changes], files.sync_path)
        self._folders.note_synced(changes)

    def _scan(self, prefix: str) -> Entries:
        return self._call_on("listing", self.path_of(prefix) if prefix else self._root, _entries)

    # -- operations with translated errors

    def hint(self, what: str, error: BaseException) -> str:
        number = getattr(error, "errno", None) or 0
        return _NO_INODES if number == errno.ENOSPC and self._lacks_inodes() else _NEXT_STEP.get(number, "")

    def _lacks_inodes(self) -> bool:
        """Whether the disk can hold no further file, although it may have free space."""
        folder = self._root
        while not os.path.exists(folder):
            folder = os.path.dirname(folder)
        with suppress(OSError):
            found = os.statvfs(folder)
            return found.f_files > 0 and found.f_favail == 0
        return False

    def _read(self, key: str, path: str, max_bytes: int = MAX_WHOLE_BYTES) -> bytes:
        return self.call(f"reading {path!r}", lambda: read_regular(path, max_bytes), key)

    def _write(self, verb: str, key: str, work: Callable[[str], None]) -> None:
        path = self.path_of(key)
        folder = os.path.dirname(path)

        def attempt(path: str) -> OSError | None:
            try:
                self._folders.make(folder)
                work(path)
                self._folders.note_changes([folder])
            except FileNotFoundError as error:
                # A clean-up removed the folder while it was empty, perhaps with others.
                self._folders.forget()
                return error
            return None

        for _ in range(_WRITE_TRIES):
            if (error := self._call_on(verb, path, attempt)) is None:
                return
        raise StorageError(
            f"{verb} {path!r} failed {_WRITE_TRIES} times: {error}. Either this is a file system without new files, as "
            "/proc is, or another process removes the folder: choose another path, or stop the clean-up that runs there"
        )

    def _call_on(self, verb: str, path: str, work: Callable[[str], T]) -> T:
        return self.call(f"{verb} {path!r}", lambda: work(path))

    def _call_on_each(self, verb: str, paths: Sequence[str], work: Callable[[str], None]) -> None:
        """Make the same call on many paths, several at a time. Consecutive fsyncs are many times slower."""
        if not paths:
            return
        begun = [disk_threads().submit(self._call_on, verb, path, work) for path in paths[1:]]
        try:
            self._call_on(verb, paths[0], work)
        finally:
            wait(begun)
        for one in begun:
            one.result()


def _fill(file: int, byte_offset: int, buffers: Sequence[memoryview]) -> int:
    """Read into the buffers until they are full or the file ends. Return the number of bytes read."""
    left = [buffer for buffer in reversed(buffers) if len(buffer)]
    done = 0
    while left:
        count = os.preadv(file, left[: -files.IOV_MAX - 1 : -1], byte_offset + done)
        if not count:
            break
        done += count
        files.drop(left, count)
    return done


def _entries(folder: str) -> Entries:
    """Return the entries of a folder, or [] if it is absent. Links to folders are not followed."""
    with _unless_absent(), os.scandir(folder) as entries:
        return [entry for item in entries if (entry := _entry(item)) is not None]
    return []


def _entry(item: os.DirEntry[str]) -> tuple[str, bool, int] | None:
    if files.is_helper_name(item.name):
        return None
    try:
        if item.is_dir(follow_symlinks=False):
            return item.name, True, 0
        if files.is_silly_name(item.name):
            return None
        return item.name, False, item.stat().st_size
    except OSError as error:
        # A link without a target or to itself, or a file that was deleted since the folder was read.
        if not item.is_symlink() and not isinstance(error, FileNotFoundError):
            raise
        return (item.name, False, 0) if item.is_symlink() else None


@contextmanager
def _unless_absent() -> Iterator[None]:
    """Suppress errors that mean that a file or folder is absent."""
    try:
        yield
    except OSError as error:
        if error.errno not in _ABSENT:
            raise


def _remove(path: str) -> None:
    for name in (path, files.helper_name(path, "part")):
        with _unless_absent():
            os.unlink(name)


def _is_no_object(name: str) -> bool:
    return files.is_helper_name(name) or is_system_file(name)


def _remove_files(folder: str, is_removed: Callable[[str], bool] = files.is_helper_name) -> None:
    """Remove files from a folder by their names. Default: the helper files that dead processes left."""
    with _unless_absent(), os.scandir(folder) as entries:
        for path in [item.path for item in entries if is_removed(item.name)]:
            # If its writer is alive, it notices that the file is missing and writes it again.
            with _unless_absent():
                os.unlink(path)


def _remove_folder(folder: str) -> None:
    try:
        os.rmdir(folder)
    except OSError as error:
        if error.errno not in _STAYS:
            raise
