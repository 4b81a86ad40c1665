"""Read a folder of ``torch.distributed.checkpoint`` (DCP) as its FileSystemWriter writes it.

``.metadata`` is a pickle. It is decoded without pickle (:mod:`zarrckpt._dcp.metadata_pickle`) unless the caller trusts
the folder. Each piece of a tensor is a small ``torch.save`` archive within a file. Its bytes are used without a copy.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from zarrckpt._dcp.metadata_pickle import check_metadata, decode_metadata, read_paths
from zarrckpt._errors import (
    CheckpointError,
    CorruptCheckpointError,
    UnsafeValueError,
    UnsupportedFormatError,
)
from zarrckpt._format.grid import Box
from zarrckpt._format.state_path import StatePath
from zarrckpt._format.torch_archives import ALLOW, ARCHIVE, load_torch, refuse_expanded, refused_types
from zarrckpt._ranks.torch_private import checkpoint_offset, without_data
from zarrckpt._state.local_boxes import SeparateBoxes
from zarrckpt._store._regular_files import read_regular

METADATA = ".metadata"


class _FilePart(io.RawIOBase):
    """A part of a file as a file."""

    def __init__(self, file: io.FileIO, begin: int, length: int) -> None:
        self._file, self._begin, self._length, self._at = file, begin, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + (0, self._at, self._length)[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        self._file.seek(self._begin + self._at)
        count = self._file.readinto(memoryview(buffer)[: max(0, self._length - self._at)])
        self._at += count
        return count


class DcpFolder:
    """The entries of a folder. Tensors are views of its files."""

    def __init__(self, path: Path, *, allow_pickle: bool) -> None:
        self._path = path
        self._allow_pickle = allow_pickle
        self._metadata, self.paths = _read_metadata(path, allow_pickle)
        """``paths`` are the paths in the saved state dict, by fqn."""
        self._files: dict[str, torch.UntypedStorage] = {}
        self._without_data = without_data()

    def leaf(self, fqn: str) -> Any:
        """Return an entry: a tensor, its pieces, or a value.

        Raises UnsafeValueError for a value that ``weights_only=True`` refuses, and CorruptCheckpointError.
        """
        entry = self._metadata.state_dict_metadata[fqn]
        if isinstance(entry, BytesStorageMetadata):
            return self._value(fqn)
        if not entry.chunks:
            raise CorruptCheckpointError(f"{self._path / METADATA} has no location of {fqn!r}")
        whole = [box for box in entry.chunks if box.sizes == entry.size]
        if whole:
            return self._piece(fqn, whole[0], entry)
        pieces = [
            (Box(tuple(box.offsets), tuple(box.sizes)), self._piece(fqn, box, entry))
            for box in entry.chunks
            if 0 not in box.sizes
        ]
        return SeparateBoxes(tuple(entry.size), entry.properties.dtype, pieces)

    def _value(self, fqn: str) -> Any:
        with self._reading(fqn, MetadataIndex(fqn)) as (file, info):
            try:
                value = load_torch(file, weights_only=not self._allow_pickle)
                refuse_expanded(value, info.length)
                return value
            except pickle.UnpicklingError as err:
                file.seek(0)
                types = ", ".join(refused_types(file)) or "more than tensors and plain values"
                raise UnsafeValueError(
                    f"the value {fqn!r} in {self._path} needs {types:.400}, which torch does not load by default: "
                    f"leave it out with keys=, or {ALLOW}"
                ) from err

    def _piece(self, fqn: str, box: ChunkStorageMetadata, entry: TensorStorageMetadata) -> torch.Tensor:
        """Return a saved piece as a view of its file."""
        with self._reading(fqn, MetadataIndex(fqn, box.offsets)) as (file, info):
            with self._without_data:
                fake = load_torch(file)
            refuse_expanded(fake, info.length)
            if (fake.shape, fake.dtype) != (box.sizes, entry.properties.dtype):
                raise ValueError(
                    f"{fake.dtype} of {tuple(fake.shape)}, expected {entry.properties.dtype} of {tuple(box.sizes)}"
                )
            begin = info.offset + checkpoint_offset(fake.untyped_storage())
            # Computed from the extent of the view, because torch 2.10 reports too large storages.
            steps = zip(fake.shape, fake.stride(), strict=True)
            last = fake.storage_offset() + sum((size - 1) * stride for size, stride in steps)
            nbytes = (last + 1) * fake.itemsize if fake.numel() else 0
            if begin + nbytes > info.offset + info.length:
                raise ValueError(
                    f"{nbytes} bytes from {begin} on, expected at most {info.offset + info.length - begin}"
                )
            # The bytes can be unaligned, which torch supports.
            memory = self._file(info.relative_path)[begin : begin + nbytes]
            empty = torch.empty(0, dtype=fake.dtype, device="cpu")
            return empty.set_(memory, fake.storage_offset(), fake.shape, fake.stride())

    @contextmanager
    def _reading(self, fqn: str, index: MetadataIndex) -> Iterator[tuple[Any, Any]]:
        """Yield the saved bytes of an entry as a file, and their location. Raises CorruptCheckpointError for damage."""
        where = f"{fqn!r}" if index.offset is None else f"the piece of {fqn!r} at {tuple(index.offset)}"
        info: Any = (self._metadata.storage_data or {}).get(index)
        if info is None:
            raise CorruptCheckpointError(f"{self._path / METADATA} has no location of {where}")
        if info.transform_descriptors:
            raise UnsupportedFormatError(
                f"{where} in {self._path} was transformed ({', '.join(info.transform_descriptors)}): load it with "
                "torch.distributed.checkpoint and save that"
            )
        try:
            if info.offset + info.length > self._file(info.relative_path).nbytes():
                raise ValueError(f"the file ends before byte {info.offset + info.length}")
            with io.FileIO(self._path / info.relative_path) as file:
                view = io.BufferedReader(_FilePart(file, info.offset, info.length))
                if view.read(len(ARCHIVE)) != ARCHIVE:
                    raise ValueError("expected an archive of torch.save")
                view.seek(0)
                yield view, info
        except CheckpointError:
            raise
        except Exception as err:  # Parsers raise any error for damaged input.
            raise CorruptCheckpointError(
                f"{where} in {self._path / info.relative_path} is damaged: {type(err).__name__}: {err}"
            ) from err

    def _file(self, name: str) -> torch.UntypedStorage:
        """Map one of the folder's files into memory."""
        if name not in self._files:
            path = self._path / name
            if "\0" in name or Path(name).is_absolute() or ".." in Path(name).parts or not path.is_file():
                raise CorruptCheckpointError(
                    f"{self._path / METADATA} lists {name!r}, which is not a file in the folder"
                )
            storage: Any = torch.UntypedStorage.from_file(str(path), False, path.stat().st_size)
            self._files[name] = storage
        return self._files[name]


def _read_metadata(path: Path, allow_pickle: bool) -> tuple[Metadata, dict[str, StatePath]]:
    try:
        if allow_pickle:
            found: object = FileSystemReader(path).read_metadata()
        else:
            found = decode_metadata(read_regular(str(path / METADATA)))
        metadata = check_metadata(found)
        return metadata, read_paths(metadata)
    except (UnsafeValueError, OSError):
        raise
    except Exception as err:  # Parsers raise any error for damaged input.
        raise CorruptCheckpointError(
            f"{path / METADATA} is not metadata of torch.distributed.checkpoint: {type(err).__name__}: {err!s:.200}"
        ) from err
