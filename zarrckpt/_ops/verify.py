"""Check every stored object of a checkpoint, by a listing or by reading all objects. No torch."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import numpy as np

from zarrckpt._commit.listings import refuse_false_listing
from zarrckpt._commit.marker import CLAIM_KEY, Claim, Marker, marker_key
from zarrckpt._commit.stored_documents import parse_root_document
from zarrckpt._errors import (
    CorruptCheckpointError,
    ForeignObjectsError,
    ObjectNotFoundError,
    UnsupportedFormatError,
)
from zarrckpt._format.chunk_layout import (
    CRC_BYTES,
    INDEX_BYTES,
    ChunkTable,
    RawArray,
    chunk_object_bytes,
    index_bytes,
    max_chunk_object_bytes,
    stored_crc,
    stored_size_is_right,
)
from zarrckpt._format.crc64 import crc64
from zarrckpt._format.documents import GROUP_DOCUMENT, NODE, ArrayNode, join
from zarrckpt._format.grid import Ints
from zarrckpt._format.root import CHECKSUMS, DIGESTS, SIZES, WRITERS, table_node
from zarrckpt._format.sealed import parse_sealed
from zarrckpt._jobs import ByteCounter, BytesBudget, Progress, run_jobs
from zarrckpt._read.catalog import UNCHECKED_SUBCHUNKS, Catalog
from zarrckpt._read.chunks import request_ranges

FaultText = str | None
"""A description of an object's damage, or None."""


@dataclass(frozen=True)
class Damage:
    """A damaged object: its key below the url, the entry that needs it ("" for none), and the reason."""

    key: str
    fqn: str
    reason: str


@dataclass(frozen=True)
class VerifyReport:
    """The result of :meth:`Checkpoint.verify`. True if there is no damage."""

    url: str
    save_id: str
    quick: bool
    objects: int
    """The number of objects that were checked."""
    nbytes: int
    """The size of these objects in the listing, or with ``quick=False`` the number of bytes read."""
    damages: tuple[Damage, ...]
    seconds: float

    def __bool__(self) -> bool:
        return not self.damages

    def raise_if_damaged(self) -> None:
        """Raise CorruptCheckpointError with the first ten damaged objects if there are any."""
        if not self.damages:
            return
        shown = "\n".join(f"  {damage.key!r} of {damage.fqn!r}: {damage.reason}" for damage in self.damages[:10])
        more = f"\n  and {len(self.damages) - 10} more" if len(self.damages) > 10 else ""
        raise CorruptCheckpointError(
            f"{len(self.damages)} of {self.objects} objects in {self.url} are damaged:\n{shown}{more}"
        )


@dataclass(frozen=True)
class _Expected:
    """An object to check: its size if known, and the function that reads and checks it."""

    key: str
    fqn: str
    size: int | None
    check: Callable[[], FaultText]
    optional: bool = False
    """Whether only writers need it, so that it may be missing."""


def verify(catalog: Catalog, *, quick: bool, max_inflight_bytes: int, progress: Progress | None) -> VerifyReport:
    """Check a checkpoint, see :meth:`Checkpoint.verify`."""
    began = time.monotonic()
    found = _Verification(catalog, max_inflight_bytes, progress)
    with catalog.explaining_damage():
        try:
            found.run(quick)
        except (CorruptCheckpointError, ObjectNotFoundError) as err:
            # No entry of the archive can be read.
            found.damages.append(Damage(catalog.store.url, "", str(err)))
            found.objects += 1
    if found.damages and (gone := catalog.replaced_or_removed()) is not None:
        raise gone
    url, save_id = catalog.store.url, catalog.root.save_id
    seconds = time.monotonic() - began
    return VerifyReport(url, save_id, quick, found.objects, found.nbytes, tuple(found.damages), seconds)


class _Verification:
    """A running verification."""

    def __init__(self, catalog: Catalog, max_inflight_bytes: int, progress: Progress | None) -> None:
        self._catalog = catalog
        self._store = catalog.store
        self._budget = BytesBudget(max_inflight_bytes)
        self._progress = progress
        self._lock = threading.Lock()
        self._unreadable: str | None = None
        self._digests: dict[str, RawArray] = {}
        """The digests of the chunks of each array, by path, if the save stored digests."""
        self._listed: dict[str, int] = {}
        """Key -> size of every stored object."""
        self.damages: list[Damage] = []
        self.objects = self.nbytes = 0

    def run(self, quick: bool) -> None:
        listed = self._listed
        if not quick:
            self._store.begin_record_checks()
        if self._store.lists_all:
            listed |= {info.key: info.size for info in self._store.list()}
            if NODE not in listed:
                refuse_false_listing(self._store, NODE)
        expected = [*self._documents(), *self._tables()]
        self._ask_sizes(expected)
        # Damaged tables are found by their own checks. Chunks are then checked by the checksums in their objects.
        tables = (quick and self._catalog.root.sizes is None) or self._can_read_tables()
        if root_digests := self._catalog.root.digests:
            with suppress(CorruptCheckpointError):
                digests, first = self._catalog.read_table(DIGESTS, root_digests), 0
                for node in self._catalog.root.arrays():
                    self._digests[node.path] = digests[first : first + node.grid.num_chunks]
                    first += node.grid.num_chunks
        if self._can_be_as_many(listed):
            chunks = [*self._chunks(tables)]
            self._ask_sizes(chunks)
            expected += chunks
        self.objects = len(expected)
        total = sum(listed.get(item.key, 0) for item in expected)
        self._tally = ByteCounter(total, self._progress)
        whole = [item for item in expected if self._is_there(item, listed)]
        if quick:
            self.nbytes = total
        else:
            run_jobs((partial(self._read, item, listed[item.key]) for item in whole), self._store.max_concurrency)
            self.nbytes = self._tally.done
            faults = self._store.record_faults({item.key for item in expected})
            noted = {damage.key for damage in self.damages}
            self.damages += [Damage(key or self._store.url, "", fault) for key, fault in faults if key not in noted]
        self._note_tables()
        self.damages.sort(key=lambda damage: damage.key)

    def _ask_sizes(self, expected: Sequence[_Expected]) -> None:
        """Request the size of each object if the store cannot list them."""

        def request_size(key: str) -> None:
            with suppress(ObjectNotFoundError):
                self._listed[key] = self._store.size(key)

        if not self._store.lists_all:
            run_jobs((partial(request_size, item.key) for item in expected), self._store.max_concurrency)

    def _can_read_tables(self) -> bool:
        try:
            for _, node in self._arrays():
                self._catalog.checksums(node)
                break
        except CorruptCheckpointError as err:
            self._unreadable = str(err)
            return False
        return True

    def _note_tables(self) -> None:
        """Add a damage for each table that cannot be read, unless one is noted for it.

        If each table alone can be read, the last one, the table of sizes, has impossible values.
        """
        if self._unreadable is None:
            return
        root, keys = self._catalog.root, {}
        for name, table in ((CHECKSUMS, root.checksums), (SIZES, root.sizes)):
            if table is not None:
                key = table_node(root.save_id, name, table.length).chunk_key((0,))
                keys[key] = self._fault(partial(self._fault_of, partial(self._catalog.read_table, name, table)))
        if not any(keys.values()):
            keys[key] = self._unreadable
        noted = {damage.key for damage in self.damages}
        self.damages += [Damage(key, "", fault) for key, fault in keys.items() if fault and key not in noted]

    def _can_be_as_many(self, listed: dict[str, int]) -> bool:
        """Whether to check the chunks in the root. If not, the table of checksums is damaged, and this is noted."""
        root = self._catalog.root
        length = root.checksums.length
        stored = listed.get(table_node(root.save_id, CHECKSUMS, length).chunk_key((0,)), 0)
        return stored >= 4 * length or length <= len(listed) + UNCHECKED_SUBCHUNKS

    def _is_there(self, item: _Expected, listed: dict[str, int]) -> bool:
        """Whether an object is listed with the expected size. Adds a damage if not."""
        size = listed.get(item.key)
        if size is not None and item.size in (None, size):
            return True
        if size is None and item.optional:
            return False
        reason = "it is missing" if size is None else f"it has {size} bytes, expected {item.size}"
        self.damages.append(Damage(item.key, item.fqn, reason))
        return False

    def _read(self, item: _Expected, size: int) -> None:
        fault = self._fault(item.check)
        if fault is not None:
            with self._lock:
                self.damages.append(Damage(item.key, item.fqn, fault))
        self._tally.add(size)

    @staticmethod
    def _fault(check: Callable[[], FaultText]) -> FaultText:
        try:
            return check()
        except ObjectNotFoundError:
            return "it is missing"
        except (CorruptCheckpointError, ForeignObjectsError, UnsupportedFormatError) as err:
            return str(err)

    # -- the objects of a checkpoint

    def _documents(self) -> Iterator[_Expected]:
        root = self._catalog.root
        yield _Expected(NODE, "", None, self._check_root)
        if not self._store.is_archive:
            # An archive that was unpacked has neither.
            yield _Expected(CLAIM_KEY, "", None, self._check_claim, optional=True)
            yield _Expected(marker_key(root.save_id), "", None, self._check_marker, optional=True)
        for path in root.groups():
            yield self._exactly(join(path, NODE), "", GROUP_DOCUMENT)
        for fqn, node in self._arrays():
            yield self._exactly(join(root.tree, node.path, NODE), fqn, node.document_bytes())

    def _arrays(self) -> Iterator[tuple[str, ArrayNode]]:
        for fqn in self._catalog.root.entries:
            node = self._catalog.root.array(fqn)
            if node is not None:
                yield fqn, node

    def _tables(self) -> Iterator[_Expected]:
        root, read = self._catalog.root, self._catalog.read_table
        chunks = sum(node.grid.num_chunks for node in root.arrays())
        tables: list[tuple[str, int, Callable[[], object]]] = [
            (CHECKSUMS, root.checksums.length, partial(read, CHECKSUMS, root.checksums)),
            (WRITERS, chunks, self._catalog.read_writers_table),
        ]
        for name, table in ((SIZES, root.sizes), (DIGESTS, root.digests)):
            if table is not None:
                tables.append((name, table.length, partial(read, name, table)))
        for name, length, check in tables:
            node = table_node(root.save_id, name, length)
            yield self._exactly(join(node.path, NODE), "", node.document_bytes())
            if length:
                yield _Expected(node.chunk_key((0,)), "", chunk_object_bytes(node), partial(self._fault_of, check))

    def _chunks(self, tables: bool) -> Iterator[_Expected]:
        tree = self._catalog.root.tree
        for fqn, node in self._arrays():
            stored = node.under(tree)
            for chunk in node.grid.chunks_of(node.grid.whole):
                check = partial(self._check_chunk if tables else self._check_alone, node, chunk)
                yield _Expected(stored.chunk_key(chunk), fqn, self._size(node, chunk, tables), check)

    def _size(self, node: ArrayNode, chunk: Ints, tables: bool) -> int | None:
        if node.compression is None:
            return chunk_object_bytes(node)
        return self._catalog.chunk_table(node, chunk).object_size if tables else None

    # -- checks of one object

    def _exactly(self, key: str, fqn: str, data: bytes) -> _Expected:
        def check() -> FaultText:
            return None if self._store.get(key) == data else "its bytes differ from the save"

        return _Expected(key, fqn, len(data), check)

    @staticmethod
    def _fault_of(read: Callable[[], object]) -> FaultText:
        read()
        return None

    def _check_root(self) -> FaultText:
        root = parse_root_document(self._store.get(NODE), self._store.url)
        return None if root.save_id == self._catalog.root.save_id else "it belongs to another save"

    def _check_claim(self) -> FaultText:
        own = self._catalog.root
        claimed = parse_sealed(Claim, self._store.get(CLAIM_KEY), "the claim").save_id
        return "it belongs to another save" if not own.tree and claimed != own.save_id else None

    def _check_marker(self) -> FaultText:
        own, key = self._catalog.root, marker_key(self._catalog.root.save_id)
        marker = parse_sealed(Marker, self._store.get(key), "the marker")
        if (marker.save_id, marker.tree) != (own.save_id, own.tree):
            return "it belongs to another save"
        unlisted = {node.path for node in own.arrays()} - {*marker.arrays}
        return f"it does not list {sorted(unlisted)[:3]}" if unlisted else None

    def _check_chunk(self, node: ArrayNode, chunk: Ints) -> FaultText:
        """Read a chunk's subchunks and index in parts of a few MiB, and check them against the table."""
        key, table = node.under(self._catalog.root.tree).chunk_key(chunk), self._catalog.chunk_table(node, chunk)
        digests, digest = self._digests.get(node.path), 0
        for begin, end in _read_parts(node, table, self._budget):
            with self._budget.hold(end - begin):
                stored = np.frombuffer(self._store.read(key, begin, end - begin), np.uint8)
                if not table.check(begin, stored):
                    return f"bytes {begin}-{end} differ from the save"
                digest = digest if digests is None else crc64(stored, digest)
        if digests is not None and digest != digests[node.grid.chunk_number(chunk)]:
            return "its digest differs from the save"
        return None

    def _check_alone(self, node: ArrayNode, chunk: Ints) -> FaultText:
        """Check a chunk without tables: the parts must have the checksums that are stored behind them."""
        key = node.under(self._catalog.root.tree).chunk_key(chunk)
        size, largest = self._listed[key], max_chunk_object_bytes(node)
        if size > largest:
            return f"it has {size} bytes, expected at most {largest}"
        with self._budget.hold(size):
            stored = np.frombuffer(self._store.read(key, 0, size), np.uint8)
            for begin, nbytes in _stored_spans(node, stored) or [(0, 0)]:
                part = stored[begin : begin + nbytes]
                if not CRC_BYTES < nbytes == len(part) or stored_crc(part) is None:
                    return f"bytes {begin}-{begin + nbytes} do not match the checksum that is stored behind them"
                if not stored_size_is_right(node, part):
                    return f"bytes {begin}-{begin + nbytes} are not the compressed elements of a subchunk"
        return None


def _stored_spans(node: ArrayNode, stored: RawArray) -> list[tuple[int, int]] | None:
    """Return (begin, bytes) of a chunk's subchunks from its index, or None if the index is altered."""
    if node.grid.subchunk_shape is None:
        return [(0, len(stored))]
    index = stored[-index_bytes(node) :]
    if len(index) % INDEX_BYTES != CRC_BYTES or stored_crc(index) is None:
        return None
    numbers: list[int] = index[:-CRC_BYTES].view("<u8").tolist()
    return list(zip(numbers[::2], numbers[1::2], strict=True))


def _read_parts(node: ArrayNode, table: ChunkTable, budget: BytesBudget) -> Iterator[tuple[int, int]]:
    """Yield ranges of bytes, as (begin, end), that together are a chunk's object.

    They begin and end at bounds of subchunks. The last one is the index.
    """
    count = len(table.checksums)
    for numbers in request_ranges(node, range(count), budget):
        yield table.begin(numbers.start), table.begin(numbers.stop)
    if table.object_size > table.begin(count):
        yield table.begin(count), table.object_size
