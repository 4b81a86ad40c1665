"""``to_dcp``: write a checkpoint as a folder of ``torch.distributed.checkpoint`` (DCP) with DCP's own writer."""

from __future__ import annotations

import dataclasses
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, StorageMeta, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from zarrckpt._dcp.folder import METADATA
from zarrckpt._errors import StorageError
from zarrckpt._format.grid import Box
from zarrckpt._format.state_path import StatePath
from zarrckpt._jobs import ByteCounter, Progress
from zarrckpt._ranks.errors import wrap_foreign_errors
from zarrckpt._read.arrays import StoredBox, batches, read_boxes, stored_boxes
from zarrckpt._read.catalog import Catalog
from zarrckpt._read.export_paths import MAX_EXPORT_BYTES, export_paths
from zarrckpt._read.selection import catalog_of, open_selection
from zarrckpt._reports import ExportReport
from zarrckpt._state.tensors import torch_dtype
from zarrckpt._store import Url
from zarrckpt._store._local import LocalStore
from zarrckpt._store._local_commit import locked
from zarrckpt._store._whole_files import local_path, private_folder, refuse_existing

if TYPE_CHECKING:
    from zarrckpt._checkpoint import Checkpoint

DISTCP_SUFFIX = ".distcp"


def to_dcp(
    source: Checkpoint | Url,
    folder: str | os.PathLike[str],
    *patterns: str,
    strip: str = "",
    overwrite: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    max_inflight_bytes: int = MAX_EXPORT_BYTES,
    progress: Progress | None = None,
) -> ExportReport:
    """Write the state, or the part that matches the patterns, as a folder of ``torch.distributed.checkpoint``.

    DCP's own ``FileSystemWriter`` writes it, and ``dcp.load`` reads it into any sharding. Each chunk becomes one piece.
    The folder gets its name when it is complete. Needs torch. Runs in one process.

    Args:
        folder: a local folder, absent or empty.
        overwrite: replace a folder that has only files of DCP.

    The other arguments are those of :func:`to_torch_save`.

    Raises the errors of :func:`to_torch_save`.
    """
    part = open_selection(source, storage_options).select(*patterns)
    catalog, tensors, values = catalog_of(part), part.tensors, dict(part.non_tensors)
    paths, target = export_paths(part, strip), local_path(folder)
    target = target.rstrip("/") or target
    nodes = [catalog.root.tensors[fqn] for fqn in tensors]
    catalog.refuse_too_many_chunks(*nodes)
    for node in nodes:
        catalog.refuse_implausible_size(node)
    _refuse_foreign(target, overwrite)
    # One third each for data that is read, for data in transfer, and for DCP's copies.
    planner = _Planner(catalog, paths, values, max(1, max_inflight_bytes // 3), ByteCounter(tensors.nbytes, progress))
    with _new_folder(target, overwrite) as new, wrap_foreign_errors():
        _save(planner, _Writer(new, target))
    files = tuple(sorted(os.listdir(target)))
    return ExportReport(target, files, len(tensors), len(values), tensors.nbytes)


def _save(planner: DefaultSavePlanner, writer: FileSystemWriter) -> None:
    """Do the steps of ``dcp.save`` in a single process, without its warning about a missing process group."""
    writer.reset()
    planner.set_up_planner({}, writer.storage_meta(), is_coordinator=True)
    writer.set_up_storage_writer(True)
    plans, metadata = planner.create_global_plan([writer.prepare_local_plan(planner.create_local_plan())])
    plan = planner.finish_plan(writer.prepare_global_plan(plans)[0])
    writer.finish(metadata, [writer.write_data(plan, planner).wait()])


class _Planner(DefaultSavePlanner):
    """Plans the chunks of stored tensors as DCP's items. Each chunk is read shortly before it is written."""

    def __init__(
        self,
        catalog: Catalog,
        paths: Mapping[str, StatePath],
        values: Mapping[str, object],
        max_bytes: int,
        tally: ByteCounter,
    ) -> None:
        super().__init__()
        self._catalog = catalog
        self._paths = {path.fqn: path for path in paths.values()}
        self._fqns = {path.fqn: fqn for fqn, path in paths.items()}
        self._values = values
        self._max_bytes = max_bytes
        self._tally = tally
        self._read: dict[MetadataIndex, torch.Tensor] = {}

    def create_local_plan(self) -> SavePlan:
        """Return the plan with an item per chunk and per value, and the state paths for DCP's loaders."""
        items = [item for name, fqn in self._fqns.items() for item in self._items(name, fqn)]
        # Plain tuples, so that unpickling does not need this package.
        self.plan = SavePlan(items, planner_data={name: (*path,) for name, path in self._paths.items()})
        return self.plan

    def _items(self, name: str, fqn: str) -> Iterator[WriteItem]:
        if fqn in self._values:
            yield WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO)
            return
        node = self._catalog.root.tensors[fqn]
        properties = TensorProperties(dtype=torch_dtype(node))
        size = torch.Size(node.grid.shape)
        for box in stored_boxes(node, self._max_bytes):
            kind = WriteItemType.TENSOR if box.shape == node.grid.shape else WriteItemType.SHARD
            chunk = ChunkStorageMetadata(torch.Size(box.offset), torch.Size(box.shape))
            yield WriteItem(MetadataIndex(name, box.offset), kind, tensor_data=TensorWriteData(chunk, properties, size))

    def files(self, items: Sequence[WriteItem]) -> Iterator[list[WriteItem]]:
        """Yield the items of each file after their data were read."""
        values = [item for item in items if item.type == WriteItemType.BYTE_IO]
        if values:
            yield values
        boxes = {self._box(item): item for item in items if item.type != WriteItemType.BYTE_IO}
        for batch in batches(boxes, lambda box: box.nbytes, self._max_bytes):
            arrays = read_boxes(self._catalog, batch, self._max_bytes)
            for box in batch:
                array = arrays.pop(0)
                raw = torch.from_numpy(array.reshape(-1).view(np.uint8))
                self._read[boxes[box].index] = raw.view(torch_dtype(box.node)).reshape(array.shape)
            yield [boxes[box] for box in batch]
            self._tally.add(sum(box.nbytes for box in batch))

    def _box(self, item: WriteItem) -> StoredBox:
        assert item.tensor_data is not None
        chunk = item.tensor_data.chunk
        node = self._catalog.root.tensors[self._fqns[item.index.fqn]]
        return StoredBox(node, Box(tuple(chunk.offsets), tuple(chunk.sizes)))

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Return the value or the tensor of an item. A tensor is returned once and then dropped."""
        return self._read.pop(index) if index in self._read else self._values[self._fqns[index.fqn]]


class _Writer(FileSystemWriter):
    """DCP's writer with files of bounded size, because it holds all tensors of a file in memory."""

    def __init__(self, path: str, target: str) -> None:
        super().__init__(path, thread_count=1, per_thread_copy_ahead=0)
        self._target = target

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        assert isinstance(planner, _Planner)
        results: list[WriteResult] = []
        for number, items in enumerate(planner.files(plan.items)):
            prefix = dataclasses.replace(plan.storage_data, prefix=f"{plan.storage_data.prefix}{number}_")
            file = dataclasses.replace(plan, items=items, storage_data=prefix)
            results += super().write_data(file, planner).wait()
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def storage_meta(self) -> StorageMeta | None:
        """Return metadata with the final name of the folder, not with the temporary one."""
        return StorageMeta(checkpoint_id=self._target, save_id=self.save_id)


def _refuse_foreign(target: str, overwrite: bool) -> None:
    """Raise StorageError if the target exists and must not be replaced."""
    store = LocalStore(os.path.abspath(target))
    objects, folders = store.list_dir()
    names = [*objects, *filter(store.holds, folders)]
    if not os.path.lexists(target) or (os.path.isdir(target) and not names):
        return
    if not overwrite:
        refuse_existing([target])
    if not os.path.isdir(target):
        raise StorageError(f"{target} is not a folder, so nothing was written")
    foreign = [name for name in names if name != METADATA and not name.endswith(DISTCP_SUFFIX)]
    if foreign:
        raise StorageError(f"{target} has {foreign[0]!r}, which is not a file of DCP, so nothing was written")


@contextmanager
def _new_folder(target: str, overwrite: bool) -> Iterator[str]:
    """Yield a temporary folder that replaces the target when the block ends without an error.

    Of several exports to one target at the same time, one wins as a whole.
    """
    folder, name = os.path.split(target)
    replaced = f"{target}.{uuid.uuid4().hex[:8]}.replaced"
    with private_folder(folder or ".") as above:
        part = os.path.join(above, name)
        os.mkdir(part)
        yield part
        with locked(target):
            _refuse_foreign(target, overwrite)
            try:
                if os.path.lexists(target) and (overwrite or not os.path.islink(target)):
                    os.rename(target, replaced)
                os.rename(part, target)
            except BaseException as err:
                if os.path.lexists(replaced) and not os.path.lexists(target):
                    try:
                        os.rename(replaced, target)
                    except OSError:
                        err.add_note(f"The export that was there could not be moved back: it is now {replaced}")
                raise
        if os.path.islink(replaced):
            os.unlink(replaced)
        shutil.rmtree(replaced, ignore_errors=True)
