"""Encode and put the chunks of an attempt within a memory limit. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack

from zarrckpt._format.chunk_codec import ChunkEncoder, Elements
from zarrckpt._format.documents import ArrayNode
from zarrckpt._jobs import BytesBudget
from zarrckpt._store import Buffer, Store


def put_chunk(
    store: Store, key: Callable[[], str], node: ArrayNode, elements: Elements, memory: BytesBudget
) -> ChunkEncoder:
    """Encode and put a chunk. Return the encoder, which has the chunk's checksums and sizes.

    ``key`` returns the key. It is called once, when the key is needed, and may block.
    """
    encoder: ChunkEncoder | None = None
    with ExitStack() as held:

        def groups() -> Iterable[Sequence[Buffer]]:
            # The store calls this once for each try, after it has freed the memory of earlier chunks.
            nonlocal encoder
            held.close()
            encoder = ChunkEncoder(node, elements)
            scratch = held.enter_context(memory.take(*encoder.memory(in_parts=store.is_local)))
            return encoder.groups(scratch)

        store.put_parts(key, groups)
    assert encoder is not None
    return encoder
