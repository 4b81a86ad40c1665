"""The nested state that the entries of a root document form."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from zarrckpt._errors import CorruptCheckpointError
from zarrckpt._format.hashes import MAX_EQUAL_HASHES
from zarrckpt._format.state_path import StatePath


class Levels:
    """The containers above the entries of a root.

    Entries with the same keys up to a level must have the same path and the same container there, and vice versa.
    """

    def __init__(self, where: str) -> None:
        self._where = where
        self._found: dict[tuple[object, ...], tuple[tuple[str, ...], str]] = {}
        """By keys: the components of the path, and the container there, or "" for an entry."""
        self._keys: dict[tuple[str, ...], tuple[object, ...]] = {}
        """Keys by the components of the path."""
        self._hashes: Counter[int] = Counter()

    @property
    def containers(self) -> set[str]:
        """The paths of all containers below the state itself."""
        return {"/".join(names) for names, container in self._found.values() if container and names}

    def add(self, fqn: str, path: StatePath, names: Sequence[str]) -> None:
        """Add an entry. Raises CorruptCheckpointError if it contradicts the entries before it."""
        if path.fqn != fqn:
            raise self._fail(fqn, f"has the keys of another name, {path.fqn!r:.200}")
        if path.keys in self._found:
            raise self._fail(fqn, "has the keys of another entry, or of a container with entries")
        for depth, container in enumerate((*path.containers, "")):
            keys, level = path.keys[:depth], tuple(names[:depth])
            # Checked before the dict is used, because lookups of keys with equal hashes take linear time.
            if depth and not self._count_hash(keys, level):
                raise self._fail(fqn, f"has one of more than {MAX_EQUAL_HASHES} keys with the same hash")
            known = self._found.setdefault(keys, (level, container))
            if known != (level, container) or self._keys.setdefault(level, keys) != keys:
                raise self._fail(
                    fqn, f"contradicts another entry at level {depth}: in the path, the kind of container, or the keys"
                )

    def _count_hash(self, keys: tuple[object, ...], level: tuple[str, ...]) -> bool:
        """Count the hash of new keys. Return whether at most MAX_EQUAL_HASHES keys have it.

        Paths need no count, because the hashes of strings are random.
        """
        if level in self._keys:
            return True
        number = hash(keys)
        self._hashes[number] += 1
        return self._hashes[number] <= MAX_EQUAL_HASHES

    def _fail(self, fqn: str, fault: str) -> CorruptCheckpointError:
        return CorruptCheckpointError(f"{self._where}: entry {fqn!r:.200} {fault}")
