"""Private names of the package that many tests use, so that each is imported in one place. Torch is not needed."""

# ruff: noqa: F401

from __future__ import annotations

from zarrckpt._format.chunk_layout import max_stored_subchunk_bytes
from zarrckpt._format.documents import ArrayNode, parse_node
from zarrckpt._format.dtypes import DTYPES, DType, by_name, by_torch_name
from zarrckpt._format.grid import Box, Grid, Ints, intersect, is_consecutive, ravel, unravel
from zarrckpt._format.json_values import dumps
from zarrckpt._jobs import BytesBudget, in_thread, run_jobs
from zarrckpt._ops.recover import examine
from zarrckpt._plan import owners
from zarrckpt._plan.all_descriptions import AllDescriptions
from zarrckpt._read.catalog import Catalog
from zarrckpt._read.chunks import StoredArray
from zarrckpt._store import Buffer, ObjectInfo, Store, StoreSpec, VersionedObject, join_url, open_store
from zarrckpt._store import _zip_format as zip_format
from zarrckpt._store._base import Listing
from zarrckpt._store._local import LocalStore
from zarrckpt._store._obstore import ObstoreStore
