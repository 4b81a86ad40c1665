"""Encode the chunks of an attempt within a memory limit, and its tables. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack

from zarrckpt._format.chunk_codec import ChunkEncoder, Elements, encode_chunk
from zarrckpt._format.chunk_layout import RawArray
from zarrckpt._format.crc32c import crc32c
from zarrckpt._format.documents import NODE, ArrayNode, join
from zarrckpt._format.root import Table, table_node
from zarrckpt._jobs import BytesBudget
from zarrckpt._store import Buffer, Store


def put_chunk(
    store: Store, key: str, node: ArrayNode, elements: Elements, budget: BytesBudget, *, digested: bool = False
) -> ChunkEncoder:
    """Encode and put a chunk. Return the encoder, which has the chunk's checksums and sizes.

    With ``digested``, it also has the digest of the object.
    """
    encoder: ChunkEncoder | None = None
    with ExitStack() as held:

        def groups() -> Iterable[Sequence[Buffer]]:
            # The store calls this once for each try, after it has freed the memory of earlier chunks.
            nonlocal encoder
            held.close()
            encoder = ChunkEncoder(node, elements, digested=digested)
            scratch = held.enter_context(budget.take(*encoder.memory(in_parts=store.is_local)))
            return encoder.groups(scratch)

        store.put_parts(key, groups)
    assert encoder is not None
    return encoder


def encode_tables(
    save_id: str, numbers: Mapping[str, RawArray]
) -> tuple[dict[str, Table], dict[str, Sequence[Buffer]]]:
    """Return a save's tables for its root, and the objects to put for them, by key."""
    tables: dict[str, Table] = {}
    puts: dict[str, Sequence[Buffer]] = {}
    for name, table in numbers.items():
        tables[name] = Table(len(table), crc32c(table))
        node = table_node(save_id, name, len(table))
        puts[join(node.path, NODE)] = [node.document_bytes()]
        if len(table):
            puts[node.chunk_key((0,))] = encode_chunk(node, table)[0]
    return tables, puts
