"""The sizes of uploads in parts, and the number of their requests."""

from __future__ import annotations

SPLIT = 16 * 2**20
"""Size in bytes from which objects are uploaded to object stores in parts.

One connection is seldom as fast as the network, and only a few objects of this size fit in memory at a time.
"""

PART = 8 * 2**20
"""Size in bytes of the parts of an upload, except the last one."""


def put_requests(nbytes: int) -> int:
    """Return the number of requests that put an object of ``nbytes`` bytes to S3."""
    # An upload in parts also needs a request to begin and one to end.
    return 1 if nbytes < SPLIT else -(-nbytes // PART) + 2
