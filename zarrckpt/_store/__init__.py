"""What holds the bytes: a local folder, an object store, an fsspec filesystem, or a ready Zarr store.

``open_store(url)`` gives a :class:`Store`; a :class:`StoreSpec` is the picklable recipe for one. Nothing
here knows what a checkpoint is, and importing this package imports neither zarr nor any client library.
"""

from __future__ import annotations

from zarrckpt._store._base import Buffer, ObjectInfo, Reader, Store, Versioned
from zarrckpt._store._spec import StoreSpec, Url, open_store
from zarrckpt._store._url import join_url

__all__ = ["Buffer", "ObjectInfo", "Reader", "Store", "StoreSpec", "Url", "Versioned", "join_url", "open_store"]
