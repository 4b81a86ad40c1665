"""What a rank says of its state: names, shapes, and where in the global tensors its parts lie; no contents.

A rank describes a sharded tensor by its mesh and placements, so all ranks of a mesh give one and the same description,
from which anybody knows what each of them holds. Descriptions are compared by their digests, and each is sent once.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from zarrckpt._errors import CheckpointError
from zarrckpt._format.grid import Box, Ints
from zarrckpt._format.state_path import StatePath
from zarrckpt._format.wire import decode, encode, record
from zarrckpt._plan.shards import Sharding
from zarrckpt._version import __version__

EntryKind = Literal["tensor", "value", "opaque", "empty"]
"""``value``: compared between ranks by its contents. ``opaque``: cannot be. ``empty``: a dict without entries."""

_MAX_BYTES = 1 << 28
"""The longest description, before it is compressed."""

REPLICATED = -1
"""In the place of a sharding: every rank that describes the tensor holds all of it."""


@record
class DescribedEntry(NamedTuple):
    """One entry of a rank's state."""

    path: StatePath
    """For what a rank keeps for itself, with RANKS in the place of its number."""
    kind: EntryKind
    shape: Ints = ()
    """The shape of the global tensor."""
    dtype: str = ""
    """Torch's name, as in ``torch.float32``."""
    sharding: int = REPLICATED
    """The number of the tensor's sharding in the description."""
    boxes: tuple[Box, ...] | None = None
    """This rank's parts of the tensor, where no sharding tells them."""


@record
class ParameterGroup(NamedTuple):
    """The parameters of one group of an optimizer, as one rank has it."""

    path: StatePath
    """That of the entry ``params``."""
    members: bytes
    """A digest of the parameters' names or numbers; empty if the group has none."""
    of_object: bool
    """Whether it is a group of an Optimizer, and not of a state dict that the user made."""
    by_number: bool
    """Whether the parameters have only numbers."""

    @property
    def optimizer(self) -> str:
        """The flat name of the optimizer's state; empty if it is the whole state."""
        return self.path.fqn.rpartition("param_groups.")[0].removesuffix(".")


@dataclass(frozen=True, eq=False)
class Description:
    """All entries of a rank's state, in its order."""

    entries: Sequence[DescribedEntry]
    shardings: Sequence[Sharding] = ()
    compared: bool = True
    """Whether contents are compared with other ranks'; otherwise replicas are written by one rank, as it has them."""
    lowest_rank_saves: bool = False
    """Whether replicas are all saved by the lowest rank that holds them, instead of being dealt."""
    version: str = __version__
    groups: Sequence[ParameterGroup] = ()
    """The parameter groups of optimizers, in order."""

    @cached_property
    def digest(self) -> bytes:
        """16 bytes: the same for the same description, in every process."""
        rows = [
            (path.keys, path.containers, path.rank_at, kind, shape, dtype, sharding, boxes)
            for path, kind, shape, dtype, sharding, boxes in self.entries
        ]
        groups = [(group.path.keys, *group[1:]) for group in self.groups]
        told = (rows, [*self.shardings], self.compared, self.lowest_rank_saves, self.version, groups)
        return hashlib.blake2b(repr(told).encode("utf-8", "surrogatepass"), digest_size=16).digest()

    @property
    def packed(self) -> bytes:
        """As it is sent."""
        flags = (self.compared, self.lowest_rank_saves, self.version)
        fields = (tuple(self.entries), tuple(self.shardings), *flags, tuple(self.groups))
        data = encode(fields)
        if len(data) > _MAX_BYTES:
            raise CheckpointError(
                f"the description of the {len(self.entries)} entries of this rank's state has {len(data)} bytes, at "
                f"most {_MAX_BYTES} can be sent to other ranks: save the state in several checkpoints"
            )
        return zlib.compress(data, 1)

    @classmethod
    def unpacked(cls, data: bytes) -> Description:
        """Return the description that packed bytes stand for. Raises CheckpointError."""
        try:
            unzip = zlib.decompressobj()
            unpacked = unzip.decompress(data, _MAX_BYTES)
        except zlib.error as err:
            raise CheckpointError(f"the description of a rank's state cannot be read: {err}") from None
        if not unzip.eof or unzip.unused_data:
            raise CheckpointError("the description of a rank's state is cut short, or has other bytes after it")
        return cls(*decode(unpacked, _PACKED))


_PACKED = tuple[tuple[DescribedEntry, ...], tuple[Sharding, ...], bool, bool, str, tuple[ParameterGroup, ...]]
"""The fields of a description as they are sent."""
