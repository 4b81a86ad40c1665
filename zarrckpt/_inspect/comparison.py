"""``diff``: compare two checkpoints: keys, shapes, dtypes, values and the numbers of tensors. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from zarrckpt._format.matching import select
from zarrckpt._format.root import BlobEntry, ValueEntry
from zarrckpt._inspect.differences import Difference, comparable, tensor_differences
from zarrckpt._inspect.info import entry_texts
from zarrckpt._inspect.value_changes import describe_change
from zarrckpt._jobs import Progress
from zarrckpt._read.selection import Selection, catalog_of, open_selection
from zarrckpt._store import Url

if TYPE_CHECKING:
    from zarrckpt._checkpoint import Checkpoint


def diff(
    one: Checkpoint | Url,
    other: Checkpoint | Url,
    *patterns: str,
    storage_options: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> Difference:
    """Compare two checkpoints: keys, shapes, dtypes, values, and the distance of tensors.

    Chunks and stores can differ. Floating dtypes can differ too: for a bfloat16 copy of float32 weights, the result
    counts the elements that differ by more than rounding. Integers are compared exactly. The result has totals for each
    group, the first part of the names. Memory is limited as in :meth:`Checkpoint.stats`.

    Args:
        one, other: open checkpoints, parts of them, or the urls of checkpoints.
        patterns: as in :meth:`Checkpoint.select` (default: all entries). Each must match an entry of one of the two.
        storage_options: options of the stores of those that are urls.
        progress: as for :func:`save`.

    Raises KeyMismatchError for a pattern without a match, and the errors of :meth:`Checkpoint.read`.
    """
    a, b = open_selection(one, storage_options), open_selection(other, storage_options)
    names = names_of_both(a, b, patterns)
    changed, same = entry_changes(a, b, names)
    here, there = [fqn for fqn in names if fqn not in b], [fqn for fqn in names if fqn not in a]
    tensors, groups = tensor_differences(catalog_of(a), catalog_of(b), same, progress)
    return Difference(tuple(here), tuple(there), changed, tensors, groups)


def names_of_both(one: Selection, other: Selection, patterns: Sequence[str]) -> list[str]:
    """Return the names of entries of either checkpoint that match the patterns, or all names without patterns."""
    names = list(dict.fromkeys((*one, *other)))
    where = one.url if other is one else f"{one.url} and {other.url}"
    return select(names, patterns, where) if patterns else names


def entry_changes(
    one: Selection, other: Selection, names: Iterable[str]
) -> tuple[dict[str, tuple[str, str]], list[str]]:
    """Return texts of differences other than in numbers, and the names of tensors with comparable numbers."""
    arrays, others = catalog_of(one).root.tensors, catalog_of(other).root.tensors
    changed, same = {}, []
    for fqn in (name for name in names if name in one and name in other):
        if fqn in arrays and fqn in others and comparable(arrays[fqn], others[fqn]):
            same.append(fqn)
        elif (texts := _describe_entries(one, other, fqn)) is not None:
            changed[fqn] = texts
    return changed, same


def _describe_entries(one: Selection, other: Selection, fqn: str) -> tuple[str, str] | None:
    """Describe the difference of an entry other than two comparable tensors, or return None."""
    a, b = catalog_of(one).root.entries[fqn], catalog_of(other).root.entries[fqn]
    if isinstance(a, ValueEntry) and isinstance(b, ValueEntry):
        return describe_change(one[fqn], other[fqn])
    texts = _describe_entry(one, fqn), _describe_entry(other, fqn)
    if not (isinstance(a, BlobEntry) and isinstance(b, BlobEntry)):
        return texts
    sums = catalog_of(one).checksums(a.array).tolist(), catalog_of(other).checksums(b.array).tolist()
    if texts[0] == texts[1]:  # Blobs are compared by checksum and never decoded.
        if sums[0] == sums[1]:
            return None
        first = next((pair for pair in zip(*sums, strict=False) if pair[0] != pair[1]), (0, 0))
        return f"{texts[0]}, checksum {first[0]:08x}", f"{texts[1]}, checksum {first[1]:08x}"
    return texts


def _describe_entry(entries: Selection, fqn: str) -> str:
    """Describe an entry: dtype and shape, the value, or encoding, kind and size of a blob."""
    entry = catalog_of(entries).root.entries[fqn]
    text = " ".join(entry_texts(entries, fqn)[1:3])
    return f"{text}, {entry.array.nbytes:,} bytes" if isinstance(entry, BlobEntry) else text
