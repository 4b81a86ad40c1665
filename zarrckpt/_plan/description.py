"""The description of a rank's state: names, shapes and the rank's boxes of global tensors, without contents.

A rank describes a sharded tensor by its mesh and placements. So all ranks of a mesh have the same description, and the
boxes of each rank follow from it. Ranks compare digests of descriptions and send each distinct description once.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

from zarrckpt._errors import CheckpointError
from zarrckpt._format.grid import Box, Ints
from zarrckpt._format.state_path import StatePath
from zarrckpt._format.wire import decode, encode, record
from zarrckpt._plan.shards import Sharding
from zarrckpt._version import __version__

EntryKind = Literal["tensor", "value", "opaque", "empty"]
"""``value``: ranks compare its contents. ``opaque``: its contents cannot be compared. ``empty``: an empty dict."""

_MAX_BYTES = 1 << 28
"""Maximum size of a description before compression."""

REPLICATED = -1
"""Stands for a sharding: every rank that describes the tensor holds the whole tensor."""


@record
class DescribedEntry(NamedTuple):
    """One entry of a rank's state."""

    path: StatePath
    """For an entry of one rank, RANKS stands for the number of the rank."""
    kind: EntryKind
    shape: Ints = ()
    """The shape of the global tensor."""
    dtype: str = ""
    """torch's name, for example ``torch.float32``."""
    sharding: int = REPLICATED
    """The number of the tensor's sharding in the description."""
    boxes: tuple[Box, ...] | None = None
    """This rank's boxes of the tensor, if no sharding describes them."""
    order: Ints = ()
    """The dimensions by descending stride of this rank's memory, or () for C order."""


@record
class ParameterGroup(NamedTuple):
    """One parameter group of an optimizer on one rank."""

    path: StatePath
    """The path of the entry ``params``."""
    members: bytes
    """A digest of the parameters' names or numbers; empty for a group without parameters."""
    class_name: str
    """The class of the Optimizer, or "" if the group is from a state dict that the user passed."""
    by_number: bool
    """Whether the parameters have numbers instead of names."""

    @property
    def optimizer(self) -> str:
        """The fqn of the optimizer's state; empty if it is the whole state."""
        return self.path.fqn.rpartition("param_groups.")[0].removesuffix(".")


@record
@dataclass(frozen=True, eq=False)
class Description:
    """All entries of a rank's state, in the order of the state."""

    entries: Sequence[DescribedEntry]
    shardings: Sequence[Sharding] = ()
    compared: bool = True
    """Whether ranks compare the contents of replicas. Otherwise one rank writes all of a replicated tensor."""
    lowest_rank_saves: bool = False
    """Whether the lowest rank that holds a replica writes it, instead of all holders in parts."""
    version: str = __version__
    groups: Sequence[ParameterGroup] = ()
    """The parameter groups of optimizers, in order."""
    versions: dict[str, dict[str, int]] = field(default_factory=dict)
    """The versions of modules by their path, by the fqn of the state dict (RANKS for the number of a rank)."""

    @cached_property
    def digest(self) -> bytes:
        """A digest of 16 bytes, the same in every process."""
        rows = [(entry.path.keys, entry.path.containers, entry.path.rank_at, *entry[1:]) for entry in self.entries]
        groups = [(group.path.keys, *group[1:]) for group in self.groups]
        fields = (rows, [*self.shardings], self.compared, self.lowest_rank_saves, self.version, groups, self.versions)
        return hashlib.blake2b(repr(fields).encode("utf-8", "surrogatepass"), digest_size=16).digest()

    @property
    def packed(self) -> bytes:
        """The compressed bytes that are sent to other ranks."""
        data = encode(self)
        if len(data) > _MAX_BYTES:
            raise CheckpointError(
                f"the description of the {len(self.entries)} entries of this rank's state has {len(data)} bytes, at "
                f"most {_MAX_BYTES} can be sent to other ranks: save the state in several checkpoints"
            )
        return zlib.compress(data, 1)

    @classmethod
    def unpacked(cls, data: bytes) -> Description:
        """Return the description from packed bytes. Raises CheckpointError if they cannot be decoded."""
        try:
            unzip = zlib.decompressobj()
            unpacked = unzip.decompress(data, _MAX_BYTES)
        except zlib.error as err:
            raise CheckpointError(f"the description of another rank's state cannot be decompressed: {err}") from None
        if not unzip.eof or unzip.unused_data:
            raise CheckpointError("the description of another rank's state is truncated or has additional bytes")
        found: Description = decode(unpacked, lambda value: type(value) is cls)
        return found
