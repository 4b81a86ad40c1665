"""Descriptions of the states of large models on many ranks. No rank is started, and no tensor is allocated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from harness.internals import AllDescriptions, Ints
from zarrckpt._format.state_path import RANKS, StatePath
from zarrckpt._plan.description import REPLICATED, DescribedEntry, Description
from zarrckpt._plan.shards import Cut, Sharding, mesh_boxes

MODELS = {
    "1B": (2048, 16, 512, 8192),
    "8B": (4096, 32, 1024, 14336),
    "2214": (4096, 61, 1024, 14336),
    "70B": (8192, 80, 1024, 28672),
    "405B": (16384, 126, 1024, 53248),
}
"""Width, layers, width of keys and values, and width of the feed-forward part, as in Llama 3. "2214" is 8B with more
layers, so that it has 2,214 entries.
"""

VOCABULARY, TENSOR_PARALLEL, STAGES, REPLICAS, HOST = 128256, 8, 8, 10, 8
LAYOUTS = ("fsdp", "fsdp-tp", "hsdp-tp", "pipeline", "per-rank", "irregular")
"""FSDP over all ranks; with tensor parallelism over each 8 ranks; that with replicas; that in 8 pipeline stages; that
with a PerRank of each rank's own tensors and a value; FSDP as ShardedTensors, with one description per rank.
"""

VALUES = ("epoch", "step", "lr", "betas", "eps", "weight_decay")
"""Values on every rank, beside the tensors."""


class Weight(NamedTuple):
    """A weight: its name, its shape, and the dimension that tensor parallelism cuts, None if it cuts none."""

    name: str
    shape: Ints
    cut: int | None


def weights(model: str, stage: int = 0, stages: int = 1) -> list[Weight]:
    """Return the weights of a pipeline stage, cut as torchtitan's plan of tensor parallelism for Llama cuts them."""
    width, layers, keys, ffn = MODELS[model]
    parts: list[tuple[str, Ints, int | None]]
    found = [Weight("embed", (VOCABULARY, width), 0)] if stage == 0 else []
    for layer in range(layers * stage // stages, layers * (stage + 1) // stages):
        parts = [("q", (width, width), 0), ("k", (keys, width), 0), ("v", (keys, width), 0), ("o", (width, width), 1)]
        parts += [("gate", (ffn, width), 0), ("up", (ffn, width), 0), ("down", (width, ffn), 1)]
        parts += [("attention_norm", (width,), None), ("ffn_norm", (width,), None)]
        found += [Weight(f"layers.{layer}.{name}", shape, cut) for name, shape, cut in parts]
    if stage == stages - 1:
        found.append(Weight("norm", (width,), None))
        if model != "1B":  # there the embedding is the output's weight, too
            found.append(Weight("output", (VOCABULARY, width), 0))
    return found


@dataclass(frozen=True)
class Case:
    """A model on many ranks."""

    model: str
    layout: str
    ranks: int

    @property
    def stages(self) -> int:
        """Number of pipeline stages, each on equally many consecutive ranks."""
        return min(STAGES, self.ranks // 8) if self.layout == "pipeline" else 1

    @property
    def mesh(self) -> Ints:
        """The mesh of one stage: replicas, shards, tensor parallelism."""
        ranks = self.ranks // self.stages
        parallel = TENSOR_PARALLEL if ranks >= 64 and self.layout not in ("fsdp", "irregular") else 1
        replicas = min(REPLICAS, ranks // parallel // 2) if self.layout == "hsdp-tp" else 1
        while ranks % (parallel * replicas):
            replicas -= 1
        return replicas, ranks // parallel // replicas, parallel

    def descriptions(self) -> AllDescriptions:
        """Return the descriptions of all ranks."""
        given = np.repeat(np.arange(self.stages), self.ranks // self.stages)
        found = [self._description(stage) for stage in range(self.stages)]
        if self.layout == "irregular":
            given, found = np.arange(self.ranks), _one_for_each_rank(found[0])
        return AllDescriptions(found, given, range(self.ranks))

    def _description(self, stage: int) -> Description:
        """Describe weights and moments in float32, which FSDP2 cuts within tensor parallelism, and plain steps."""
        replicas, shards, parallel = self.mesh
        kinds = ("model", "optim.exp_avg", "optim.exp_avg_sq")
        sharded = [Weight(f"{kind}.{name}", shape, cut) for kind in kinds for name, shape, cut in self._own(stage)]
        shardings: dict[tuple[Cut | None, ...], int] = {}
        entries = []
        for name, shape, cut in sharded:
            # As FSDP2 over tensor parallelism does it: rows that are cut already are cut again within each part.
            inner = None if cut is None else Cut(cut)
            cuts = (None, Cut(0, parallel if cut == 0 else 1), inner)
            number = shardings.setdefault(cuts, len(shardings))
            entries.append(DescribedEntry(_path(name), "tensor", shape, "torch.float32", number))
        entries += [
            DescribedEntry(_path(f"optim.step.{w.name}"), "tensor", (), "torch.float32") for w in self._own(stage)
        ]
        entries += [DescribedEntry(_path(name), "value") for name in VALUES]
        if self.layout == "per-rank":
            entries += _OF_EACH_RANK
        size = self.ranks // self.stages
        members = tuple(range(stage * size, (stage + 1) * size))
        found = [Sharding(members, (replicas, shards, parallel), cuts) for cuts in shardings]
        return Description(tuple(entries), tuple(found))

    def _own(self, stage: int) -> list[Weight]:
        return weights(self.model, stage, self.stages)


def _path(name: str) -> StatePath:
    return StatePath.of(name.split("."))


def _own_path(name: str) -> StatePath:
    return StatePath(("loader", RANKS, name), ("dict",) * 3, (), 1)


_OF_EACH_RANK = [
    DescribedEntry(_own_path("generator"), "tensor", (5056,), "torch.uint8"),
    DescribedEntry(_own_path("cuda_generator"), "tensor", (16,), "torch.uint8"),
    DescribedEntry(_own_path("order"), "tensor", (1000,), "torch.int64"),
    DescribedEntry(_own_path("position"), "opaque"),
]


def _one_for_each_rank(gathered: Description) -> list[Description]:
    """Return the same for ranks without a mesh: each describes its own boxes."""
    boxes = {
        (entry.shape, entry.sharding): mesh_boxes(entry.shape, *gathered.shardings[entry.sharding][1:])
        for entry in gathered.entries
        if entry.sharding != REPLICATED
    }
    found = []
    for rank in range(len(gathered.shardings[0].ranks)):
        own = {key: of_all[rank] for key, of_all in boxes.items()}
        rows = (
            entry
            if entry.sharding == REPLICATED
            else entry._replace(sharding=REPLICATED, boxes=own[entry.shape, entry.sharding])
            for entry in gathered.entries
        )
        found.append(Description(tuple(rows)))
    return found
