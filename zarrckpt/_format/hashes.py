"""A bound for keys that were chosen to have equal hashes."""

from __future__ import annotations

import operator
from collections.abc import Collection

MAX_EQUAL_HASHES = 256
"""Maximum number of items of a set, or keys of a dict, with the same hash. A lookup may compare all of them."""


def hashes_collide(items: Collection[object]) -> bool:
    """Whether more than :data:`MAX_EQUAL_HASHES` items have the same hash.

    A set or dict of n such items takes n * n comparisons. Integers, tuples and complex numbers can be chosen to have
    the same hash.
    """
    if len(items) <= MAX_EQUAL_HASHES:
        return False
    hashes = sorted(map(hash, items))
    return any(map(operator.eq, hashes, hashes[MAX_EQUAL_HASHES:]))
