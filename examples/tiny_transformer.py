"""A byte-level transformer small enough for two CPU cores, and the text that it learns: Python's own source."""

from __future__ import annotations

import random
import sysconfig
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BYTES = 256


class Attention(nn.Module):
    """Causal self-attention. The projections' sizes define the number of heads, so TP may split them."""

    def __init__(self, width: int, head_width: int = 32) -> None:
        super().__init__()
        self.head_width = head_width
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        def heads(projected: Tensor) -> Tensor:
            return projected.view(*projected.shape[:2], -1, self.head_width).transpose(1, 2)

        mixed = F.scaled_dot_product_attention(
            heads(self.query(x)), heads(self.key(x)), heads(self.value(x)), is_causal=True
        )
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


class Block(nn.Module):
    """Attention, then a feed-forward layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        x = x + self.down(F.gelu(self.up(self.norm2(x))))
        return x


class TinyTransformer(nn.Module):
    """Model that maps bytes to the mean loss of predicting each next byte."""

    def __init__(self, width: int, layers: int, length: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(BYTES, width)
        self.position = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, BYTES)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(inputs) + self.position(torch.arange(inputs.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def python_source(limit: int = 4_000_000) -> Tensor:
    """Return the text of the standard library's top-level modules: uint8, at most ``limit`` bytes."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += path.read_bytes()
    return torch.frombuffer(text[:limit], dtype=torch.uint8)


class Batches:
    """The training data, one global batch after the other, with a position that is saved and restored.

    Every rank draws the same global batch from the same random numbers and keeps its slice, so the data does not depend
    on the number of ranks. Python's RNG shifts the windows, torch's replaces some input bytes by noise: after a resume,
    the batches are right only if the position and both RNGs are.
    """

    def __init__(self, text: Tensor, batch: int, length: int, part: int, parts: int) -> None:
        if batch % parts:
            raise ValueError(f"the batch of {batch} can't be divided evenly over {parts} data-parallel ranks")
        self.text, self.batch, self.length = text, batch, length
        self.mine = slice(part * batch // parts, (part + 1) * batch // parts)
        self.position = 0

    def next(self) -> tuple[Tensor, Tensor]:
        """Return this rank's inputs and targets: int64, (batch / parts, length)."""
        windows = (len(self.text) - 1) // self.length - 1
        # 7919 is a prime, so adjacent rows of a batch come from different files.
        order = [(self.position + i) * 7919 % windows for i in range(self.batch)]
        starts = [window * self.length + random.randrange(self.length) for window in order]
        rows = torch.stack([self.text[start : start + self.length + 1] for start in starts]).long()
        inputs, targets = rows[:, :-1], rows[:, 1:]
        noise = torch.randint(BYTES, inputs.shape)
        inputs = torch.where(torch.rand(inputs.shape) < 0.02, noise, inputs)
        self.position += self.batch
        return inputs[self.mine], targets[self.mine]

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]
