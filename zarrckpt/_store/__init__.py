"""Stores of objects: a local folder, an object store, an fsspec filesystem, or a Zarr store of the caller's.

``open_store(url)`` returns a :class:`Store`. A :class:`StoreSpec` is the picklable recipe for one. This package does
not depend on the format of checkpoints. Importing it imports neither zarr nor any client library.
"""

from __future__ import annotations

from zarrckpt._store._base import Buffer, ObjectInfo, Reader, Store, VersionedObject
from zarrckpt._store._spec import StoreSpec, Url, open_store
from zarrckpt._store._url import join_url

__all__ = ["Buffer", "ObjectInfo", "Reader", "Store", "StoreSpec", "Url", "VersionedObject", "join_url", "open_store"]
