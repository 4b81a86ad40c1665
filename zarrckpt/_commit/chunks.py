"""Chunks of an attempt: encoded and put, within a memory bound. No torch."""

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
    """Encode a chunk's elements and put it; what encoded it has its checksums and sizes.

    ``key`` returns the key. It is called once, when the key is needed, and may wait.
    """
    encoder: ChunkEncoder | None = None
    with ExitStack() as held:

        def groups() -> Iterable[Sequence[Buffer]]:
            # The store calls this once for each try.
            nonlocal encoder
            # Taken when the store asks for the bytes: by then it has freed the memory of the chunks before.
            held.close()
            encoder = ChunkEncoder(node, elements)
            scratch = held.enter_context(memory.take(*encoder.memory(in_parts=store.is_local)))
            return encoder.groups(scratch)

        store.put_parts(key, groups)
    assert encoder is not None
    return encoder
