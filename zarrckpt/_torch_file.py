"""Entries of a checkpoint as a file that ``torch.load`` reads, in bounded memory.

``torch.save`` itself writes everything but the bytes of tensors, which are holes in the file then
(``torch.serialization.skip_data``). They are filled one after the other, and the zip archive gets the checksums of what
they are filled with.
"""

from __future__ import annotations

import os
import struct
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from zarrckpt._catalog import Catalog
from zarrckpt._errors import CheckpointError, StorageError
from zarrckpt._export import ExportReport, flush, new_files, refuse_existing
from zarrckpt._flatten import build
from zarrckpt._parts import in_order
from zarrckpt._state_path import StatePath
from zarrckpt._tensors import torch_dtype
from zarrckpt._transfer import Progress, Tally
from zarrckpt._values import find_tensors

Bytes = memoryview

_LOCAL_HEADER = struct.Struct("<26xHH")
"""Of a zip record: what counts is the length of its name and of its extra field."""
_CENTRAL_HEADER = struct.Struct("<4s24xHHH12x")
"""Of an entry in the archive's directory: its signature, the lengths of name, extra field and comment."""
_CENTRAL_SIGNATURE, _AFTER_SIGNATURE = b"PK\x01\x02", b"PK\x07\x08"
_CRC_IN_LOCAL, _CRC_IN_CENTRAL, _CRC_AFTER = 14, 16, 4
_HAS_CRC_AFTER = 1 << 3


def export(
    catalog: Catalog,
    paths: Mapping[str, StatePath],
    values: Mapping[str, object],
    target: str,
    *,
    overwrite: bool,
    max_inflight_bytes: int,
    progress: Progress | None,
) -> ExportReport:
    """Write entries, fqn -> where they go, see ``Checkpoint.to_torch_save``. ``values`` are the non-tensors."""
    if not overwrite:
        refuse_existing([target])
    nodes = {fqn: catalog.root.tensors[fqn] for fqn in paths if fqn not in values}
    for node in nodes.values():
        catalog.refuse_unstored(node)
    with FakeTensorMode():
        # Without memory of their own.
        fakes = {
            fqn: torch.empty(node.grid.shape, dtype=torch_dtype(node), device="cpu") for fqn, node in nodes.items()
        }
    state = build((path, fakes[fqn] if fqn in fakes else values[fqn]) for fqn, path in paths.items()) if paths else {}
    total = sum(node.nbytes for node in nodes.values())
    with new_files([target]) as (part,):
        _save_without_data(state, part)
        with open(part, "r+b") as file:
            _fill(file, catalog, _storages(state), fakes, max_inflight_bytes, Tally(total, progress))
            flush(file)
    return ExportReport(os.path.dirname(target) or ".", (os.path.basename(target),), len(nodes), len(values), total)


def _save_without_data(state: object, path: str) -> None:
    open(path, "wb").close()  # for an error that says why it cannot be
    try:
        with torch.serialization.skip_data(materialize_fake_tensors=True):
            torch.save(state, path)
    except RuntimeError as err:
        raise StorageError(f"writing {path} failed: {err}") from err


def _storages(state: object) -> list[torch.Tensor]:
    """A tensor for each storage of a file of ``torch.save``, in the order of their numbers: as they are pickled."""
    found: dict[int, torch.Tensor] = {}
    for tensor in find_tensors(state):
        found.setdefault(tensor.untyped_storage()._cdata, tensor)
    return list(found.values())


def _fill(
    file: BinaryIO,
    catalog: Catalog,
    storages: list[torch.Tensor],
    fakes: Mapping[str, torch.Tensor],
    max_inflight_bytes: int,
    tally: Tally,
) -> None:
    """Write the bytes of all storages into the holes of an archive, and their checksums."""
    records = _Records(file)
    records.check([tensor.untyped_storage().nbytes() for tensor in storages])
    places = {id(tensor): place for place, tensor in enumerate(storages)}
    for place, tensor in enumerate(storages):
        if not isinstance(tensor, FakeTensor):  # in a value
            raw = torch.empty(0, dtype=torch.uint8, device="cpu").set_(tensor.cpu().untyped_storage())
            records.write(place, raw.numpy().data)
    where = {fqn: places[id(fake)] for fqn, fake in fakes.items()}
    for part, array in in_order(catalog, sorted(where, key=lambda fqn: where[fqn]), max_inflight_bytes):
        records.write(where[part.fqn], array.reshape(-1).view(np.uint8).data)
        tally.add(array.nbytes)
    records.finish()


class _Records:
    """The records of an archive that hold storages, by their number. Each is written from its begin to its end."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        with zipfile.ZipFile(file) as archive:
            entries = {info.filename.partition("/")[2]: info for info in archive.infolist()}
            self._directory: int = archive.start_dir
        self._infos: list[zipfile.ZipInfo] = []
        while info := entries.get(f"data/{len(self._infos)}"):
            self._infos.append(info)
        self._begins = [self._begin(info) for info in self._infos]
        self._written = [0] * len(self._infos)
        self._crcs = [0] * len(self._infos)

    def _begin(self, info: zipfile.ZipInfo) -> int:
        self._file.seek(info.header_offset)
        name, extra = _LOCAL_HEADER.unpack(self._file.read(_LOCAL_HEADER.size))
        return info.header_offset + _LOCAL_HEADER.size + int(name) + int(extra)

    def check(self, sizes: list[int]) -> None:
        """Refuse an archive whose records are not of these sizes. Raises CheckpointError."""
        found = [info.file_size for info in self._infos]
        if found != sizes:
            raise CheckpointError(
                f"torch {torch.__version__} saves tensors otherwise than expected: export them to DCP"
            )

    def write(self, place: int, data: Bytes) -> None:
        """The next bytes of a record."""
        self._file.seek(self._begins[place] + self._written[place])
        self._file.write(data)
        self._written[place] += data.nbytes
        self._crcs[place] = zlib.crc32(data, self._crcs[place])

    def finish(self) -> None:
        """Put the checksums where an archive has them: with each record, and in the directory."""
        crcs = {}
        for info, begin, crc in zip(self._infos, self._begins, self._crcs, strict=True):
            crcs[info.filename] = crc
            after = begin + info.file_size
            if not info.flag_bits & _HAS_CRC_AFTER:
                self._put(info.header_offset + _CRC_IN_LOCAL, crc)
            elif self._read(after, len(_AFTER_SIGNATURE)) == _AFTER_SIGNATURE:
                self._put(after + _CRC_AFTER, crc)
        for begin, name in self._entries():
            if name in crcs:
                self._put(begin + _CRC_IN_CENTRAL, crcs[name])

    def _entries(self) -> Iterator[tuple[int, str]]:
        """Where the entries of the directory are, and their names."""
        at = self._directory
        while (header := self._read(at, _CENTRAL_HEADER.size))[:4] == _CENTRAL_SIGNATURE:
            _, name, extra, comment = _CENTRAL_HEADER.unpack(header)
            yield at, self._read(at + _CENTRAL_HEADER.size, name).decode()
            at += _CENTRAL_HEADER.size + name + extra + comment

    def _read(self, at: int, nbytes: int) -> Any:
        self._file.seek(at)
        return self._file.read(nbytes)

    def _put(self, at: int, crc: int) -> None:
        self._file.seek(at)
        self._file.write(crc.to_bytes(4, "little"))
