"""Put faults into the package, one by one, and check that the test suite finds each.

nice python -m tests.faults                        # all of them: about half an hour
python -m tests.faults --only _commit --jobs 2     # those whose file or description has this text
python -m tests.faults --clean                     # the same tests without a fault: all must pass

A fault is a small change that a hurried engineer might make: a condition that is dropped, a `<` for a `<=`, two steps
in the wrong order. Each names the tests that must fail with it, the fastest first. They run against a copy of the
repository in a temporary folder. A run of more than four minutes counts as a failure, too. The command prints a line
for each fault, and exits with 1 if any is not found.

``tests/test_layers.py`` checks that each text still occurs once in its file. If you change that text, change the fault
with it: the mistake matters, not the line.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
LONGEST_SECONDS = 240.0
_LEFT_OUT = shutil.ignore_patterns(".git", ".venv*", "build", ".hypothesis", ".mypy_cache", ".ruff_cache")
_FAILED = re.compile(r"^(?:FAILED|ERROR) (?:tests/)?(.+?)(?: - .*)?$", re.MULTILINE)


@dataclass(frozen=True)
class Fault:
    """One change of the package, and the tests that must fail with it."""

    file: str
    """Relative to ``zarrckpt/``."""
    what: str
    """The mistake, in a few words."""
    old: str
    """A text that occurs exactly once in the file."""
    new: str
    """The text that replaces it."""
    tests: tuple[str, ...]
    """Arguments of pytest, each for a separate run: a file of ``tests/``, and perhaps ``-k``. The fastest first."""

    @property
    def misfit(self) -> str:
        """Why the fault cannot be put in, "" if it can."""
        count = (REPOSITORY / "zarrckpt" / self.file).read_text().count(self.old)
        if count != 1:
            return f"{self.file}: the text of {self.what!r} occurs {count} times, expected once"
        return f"{self.file}: {self.what!r} changes nothing" if self.old == self.new else ""


COMMIT = [
    Fault(
        "_store/_regular_files.py",
        "a FIFO is opened as a file",
        " | os.O_NONBLOCK | os.O_NOCTTY",
        " | os.O_NOCTTY",
        ("test_hostile.py -k special_files",),
    ),
    Fault(
        "_format/json_values.py",
        "items of equal hashes are not counted",
        "    return any(map(operator.eq, hashes, hashes[MAX_EQUAL_HASHES:]))",
        "    return False",
        ("test_hostile.py -k one_hash",),
    ),
    Fault(
        "_format/root.py",
        "values in a root have any size",
        "isinstance(value, dict | list | str) and",
        "isinstance(value, dict) and",
        ("test_hostile.py -k opened",),
    ),
    Fault(
        "_commit/protocol.py",
        "a save over a checkpoint is not refused",
        "if root is not None and not overwrite:\n        raise _exists_error(store, root)\n    older",
        "older",
        ("test_guard.py -k 'second_save_is_refused or at_once_exactly_one'",),
    ),
    Fault(
        "_commit/protocol.py",
        "the first root is put without a condition",
        "            store.create(NODE, data)",
        "            store.put(NODE, [data])",
        ("test_interleavings.py -k over_nothing",),
    ),
    Fault(
        "_commit/protocol.py",
        "a root is replaced without a condition",
        "            store.replace(NODE, data, attempt.base.version)",
        "            store.put(NODE, [data])",
        ("test_interleavings.py -k over_a_committed_one",),
    ),
    Fault(
        "_commit/protocol.py",
        "a commit whose answer was lost is not synced",
        "            return store.sync([NODE])\n",
        "            return\n",
        ("test_failed_saves.py -k folder_was_not_synced",),
    ),
    Fault(
        "_commit/protocol.py",
        "the marker is not synced before the chunks",
        "        store.sync(keys)\n        if seen.base",
        "        if seen.base",
        ("test_crash_points.py -k synced_when",),
    ),
    Fault(
        "_commit/protocol.py",
        "a pinned checkpoint is replaced",
        "        if seen.base is not None:\n            # Checked",
        "        if seen.base is None:\n            # Checked",
        ("test_pins.py -k a_pinned_checkpoint_stays",),
    ),
    Fault(
        "_commit/protocol.py",
        "pins are looked for before the marker is put",
        "    try:\n        store.put(keys[0], [own.to_bytes()])\n",
        "    try:\n        if seen.base is not None:\n            refuse_pinned(store)\n"
        "            seen = dataclasses.replace(seen, base=None)\n        store.put(keys[0], [own.to_bytes()])\n",
        ("test_pins.py -k one_sees_the_other",),
    ),
    Fault(
        "_commit/protocol.py",
        "a commit whose answer was lost counts only while it is the newest",
        "attempt.save_id in (winner.save_id, *winner.history):\n            return store",
        "attempt.save_id == winner.save_id:\n            return store",
        ("test_interleavings.py -k get_lost",),
    ),
    Fault(
        "_commit/protocol.py",
        "any failure to replace a root counts as a race that was lost",
        "        if winner is not None and winner.save_id != attempt.base_id:\n            abandon",
        "        if winner is not None:\n            abandon",
        ("test_failed_saves.py -k arrives_later",),
    ),
    Fault(
        "_commit/protocol.py",
        "chunks are removed after any failed put of the root",
        "        if is_full(err):\n            abandon",
        "        if err:\n            abandon",
        ("test_failed_saves.py -k root_was_sent",),
    ),
    Fault(
        "_commit/protocol.py",
        "a clean-up deletes the marker before what it names",
        "        tops = marker.top_names()\n        deleted +=",
        "        tops = marker.top_names()\n        if marker.save_id in done:\n            store.delete([marker_key("
        "marker.save_id)])\n        deleted +=",
        ("test_crash_points.py -k in_memory",),
    ),
    Fault(
        "_commit/protocol.py",
        "a clean-up trusts a single listing",
        "            more = _delete_named(store, marker, tops, spared, removal)\n",
        "            more = 0\n",
        ("test_store_faults.py -k stale",),
    ),
    Fault(
        "_commit/protocol.py",
        "a clean-up also deletes objects that another marker names",
        "    return [key for key in keys if not any(other.names_key(key) for other in spared)]",
        "    return keys",
        ("test_hostile.py -k marker_does_not_lead", "test_removal.py"),
    ),
    Fault(
        "_commit/protocol.py",
        "an attempt that has failed may still commit",
        "        return not marker.failed and marker.base",
        "        return marker.base",
        ("test_failed_saves.py -k doctor_and_open",),
    ),
    Fault(
        "_commit/protocol.py",
        "a failed attempt does not record the failure",
        "dataclasses.replace(attempt.marker, failed=True)",
        "attempt.marker",
        ("test_failed_saves.py -k doctor_and_open",),
    ),
    Fault(
        "_commit/protocol.py",
        "a save forgets the saves before the last one",
        "(root.save_id, *root.history)[:HISTORY]",
        "(root.save_id,)",
        ("test_format.py -k overwritten", "test_interleavings.py -k three_saves"),
    ),
    Fault(
        "_commit/protocol.py",
        "a failed clean-up fails the save",
        "    except CheckpointError as err:\n        # The save has",
        "    except CheckpointNotFoundError as err:\n        # The save has",
        ("test_guard.py -k clean_up_that_fails",),
    ),
    Fault(
        "_commit/protocol.py",
        "a removal continues to delete after another one has finished it",
        "        check_removal(store, removal)\n        store.delete(keys",
        "        store.delete(keys",
        ("test_removal.py -k 'another_one_has_ended or interleaving'",),
    ),
    Fault(
        "_commit/protocol.py",
        "a removal deletes any root that it finds",
        "get_if_stored(store, NODE) == root_bytes:",
        "is_stored(store, NODE):",
        ("test_removal.py", "test_interleavings.py"),
    ),
    Fault(
        "_commit/protocol.py",
        "the claim is looked for before the record of a removal",
        "return REMOVED in _list_attempt_ids(store) or not is_stored(store, CLAIM_KEY)",
        "return not is_stored(store, CLAIM_KEY) or REMOVED in _list_attempt_ids(store)",
        ("test_removal.py -k interleaving",),
    ),
    Fault(
        "_commit/protocol.py",
        "the canonical tree is taken while another attempt has it",
        'tree = "" if first and all(earlier.tree for earlier in older) else',
        'tree = "" if first else',
        ("test_removal.py -k 'began_before_a_removal or after_a_removal'",),
    ),
    Fault(
        "_commit/marker.py",
        "a marker with a tree may name canonical keys",
        "if self.tree and relative == key:",
        "if self.tree and not relative:",
        ("test_guard.py -k overwriting", "test_removal.py"),
    ),
    Fault(
        "_commit/marker.py",
        "the paths of a marker are not checked",
        'check_paths(members.sequence("arrays"), where)',
        'tuple(members.sequence("arrays"))',
        ("test_hostile.py -k 'nothing_outside_is_deleted or marker_does_not_lead'",),
    ),
    Fault(
        "_commit/pins.py",
        "a pin is put after the look for removals",
        "        store.create(key, own.to_bytes())\n        store.sync([key])\n",
        "        _refuse_endangered(store, root)\n        store.create(key, own.to_bytes())\n"
        "        store.sync([key])\n        return own.pin_id\n",
        ("test_pins.py -k one_sees_the_other",),
    ),
    Fault(
        "_commit/pins.py",
        "a save that is to replace the checkpoint does not keep it from being pinned",
        "if found.may_commit(marker)]",
        "if marker.failed]",
        ("test_pins.py -k one_sees_the_other",),
    ),
    Fault(
        "_save/finish.py",
        "the tables are not synced before the root",
        "    store.sync(puts)\n",
        "",
        ("test_crash_points.py -k synced_when",),
    ),
    Fault(
        "_save/finish.py",
        "a chunk that two ranks have written is not noticed",
        "if (times != 1).any():",
        "if (times == 0).any():",
        ("test_failure_table.py -k two_ranks_write",),
    ),
    Fault(
        "_save/finish.py",
        "entries that no rank has written are not noticed",
        "    if missing or unknown:",
        "    if unknown:",
        ("test_failure_table.py -k no_rank_writes",),
    ),
    Fault(
        "_save/finish.py",
        "the tables are in the order of names, not of paths",
        "key=lambda item: item[1].path)",
        "key=lambda item: item[0])",
        ("test_format.py",),
    ),
    Fault(
        "_save/finish.py",
        "the keys of names that are escaped are not kept",
        "(type(key) is str and _names.escape(key) == key)",
        "type(key) is str",
        ("test_format.py -k names",),
    ),
    Fault(
        "_store/_local_commit.py",
        "a file is not synced before it gets its name",
        "            if sync:\n                os.fsync(file)\n",
        "",
        ("test_store_local.py -k 'durable or reaches_the_files'",),
    ),
    Fault(
        "_store/_local_commit.py",
        "a file is created over another one",
        "        os.link(temp, path)\n",
        "        os.replace(temp, path)\n",
        ("test_store_local.py -k 'one_winner'",),
    ),
    Fault(
        "_store/_local_commit.py",
        "a file is replaced without the lock",
        "    with locked(path):\n",
        "    with contextlib.nullcontext():\n",
        ("test_store_local.py -k 'one_winner'",),
    ),
    Fault(
        "_store/_local_commit.py",
        "a lock is taken through a link",
        " | os.O_NOFOLLOW, 0o666)",
        ", 0o666)",
        ("test_hostile.py -k 'lock_is_taken'",),
    ),
    Fault(
        "_store/_whole_files.py",
        "an export replaces what appears while it is written",
        "    if not overwrite:\n        refuse_existing(os.path.join(folder, name) for name in (*names, *replaced))\n",
        "    overwrite = True\n",
        ("test_convert.py -k 'one_wins'",),
    ),
    Fault(
        "_store/_whole_files.py",
        "files of two exports get their names at the same time",
        'with locked(os.path.join(folder, "export")) if replaces or len(names) > 1 else nullcontext():',
        "with nullcontext():",
        ("test_convert.py -k 'do_not_mix'",),
    ),
    Fault(
        "_format/torch_archives.py",
        "indices of sparse tensors are not checked",
        "    with _SWITCH, check_sparse_tensors():\n",
        "    with _SWITCH:\n",
        ("test_values.py -k 'must_fit'",),
    ),
    Fault(
        "_store/_local_commit.py",
        "a repeated replacement is a conflict with itself",
        "                return found == data\n",
        "                return False\n",
        ("test_store.py -k 'repeating_a_replace and local'",),
    ),
    Fault(
        "_store/_local_commit.py",
        "a short write is not continued",
        "    while views:\n        drop(views, os.writev",
        "    if views:\n        drop(views, os.writev",
        ("test_store_local.py -k short_writes",),
    ),
    Fault(
        "_store/_conditional_puts.py",
        "an object of another save counts as an own one",
        "        if found is not None and found.data != data:\n            raise",
        "        if found is not None and not found.data:\n            raise",
        ("test_store.py -k 'creates_once or thirty_creators'",),
    ),
    Fault(
        "_store/_conditional_puts.py",
        "a server that ignores If-None-Match is trusted",
        "self._honoured.creates = not self.put_if_absent(key, data)\n",
        "self._honoured.creates = True\n",
        ("test_races.py -k 'ignores_conditions'",),
    ),
    Fault(
        "_store/_conditional_puts.py",
        "a server that ignores If-Match is trusted",
        ' and not self.put_if_version(probe, b"3", first)',
        "",
        ("test_races.py -k 'ignores_conditions or check_then_put'",),
    ),
    Fault(
        "_store/_conditional_puts.py",
        "where conditions are ignored, the version is not compared",
        "            if found is not None and found.version == version:\n",
        "            if found is not None:\n",
        ("test_races.py -k check_then_put", "test_store.py -k replaces_the_version"),
    ),
]
"""Atomic commits."""

FORMAT = [
    Fault(
        "_format/chunk_codec.py",
        "elements beyond the array's end are not zeroed",
        "        if inside != box:\n            out[:] = 0",
        "        if inside is None:\n            out[:] = 0",
        ("test_codec.py -k padded",),
    ),
    Fault(
        "_format/chunk_codec.py",
        "copied subchunks share their scratch memory",
        "used += size if self._node.compression is None else 0",
        "used += 0",
        ("test_codec.py -k zarr_decodes",),
    ),
    Fault(
        "_format/chunk_codec.py",
        "a stored size lacks its checksum",
        "self.sizes.append(stored + CRC_BYTES)",
        "self.sizes.append(stored)",
        ("test_codec.py -k 'zarr_decodes or padded'",),
    ),
    Fault(
        "_format/chunk_codec.py",
        "a subchunk that begins before the box is read straight into it",
        "part.start < 0 or part.stop > n",
        "part.stop > n",
        ("test_codec.py -k reading_a_box",),
    ),
    Fault(
        "_format/chunk_layout.py",
        "the checksum behind a subchunk is not compared",
        "    return own if crc32c(data[:-CRC_BYTES]) == own else None",
        "    return own",
        ("test_codec.py -k flipped_bit",),
    ),
    Fault(
        "_format/chunk_layout.py",
        "any subchunk with a valid checksum is accepted",
        "return bool(stored_crc(stored) == self.checksums[number])",
        "return stored_crc(stored) is not None",
        ("test_codec.py -k in_the_place_of_another", "test_open.py -k swapped"),
    ),
    Fault(
        "_format/chunk_layout.py",
        "the last subchunk of a read is not checked",
        "bisect_right(begins, end) - 1):",
        "bisect_right(begins, end) - 2):",
        ("test_readers.py -k damaged_chunk",),
    ),
    Fault(
        "_format/chunk_layout.py",
        "the index of a chunk is not checked",
        "        return stored[begins[-1] - byte_offset :].tobytes() == chunk_index(self._node, begins)",
        "        return True",
        ("test_readers.py -k damaged", "test_damage.py"),
    ),
    Fault(
        "_format/chunk_layout.py",
        "the size in compressed data is not checked",
        "if not self.holds(number, part) or not stored_size_is_right(self._node, part):",
        "if not self.holds(number, part):",
        ("test_compression.py -k hostile_bytes",),
    ),
    Fault(
        "_format/grid.py",
        "the intersection of two boxes ends with the longer one",
        "hi = tuple(min(ao + an, bo + bn) for",
        "hi = tuple(max(ao + an, bo + bn) for",
        ("test_grid.py -k intersect",),
    ),
    Fault(
        "_format/grid.py",
        "a box that ends with a chunk overlaps the next one",
        "range(o // c, -(-(o + n) // c))",
        "range(o // c, (o + n) // c + 1)",
        ("test_grid.py -k of_a_box",),
    ),
    Fault(
        "_format/sealed.py",
        "the checksum of a document is not compared",
        "if sealed and _seal(data) != data:",
        "if sealed and len(_seal(data)) != len(data):",
        ("test_open.py -k flipped_byte",),
    ),
    Fault(
        "_format/sealed.py",
        "unknown features are ignored",
        'own["format"] != FORMAT or features != []:',
        'own["format"] != FORMAT:',
        ("test_open.py -k newer_format",),
    ),
    Fault(
        "_format/sealed.py",
        "true counts as the number 1",
        "if type(value) is not int or not minimum <= value < 2**63:",
        "if not isinstance(value, int) or not minimum <= value < 2**63:",
        ("test_open.py -k contradicts",),
    ),
    Fault(
        "_format/documents.py",
        "1, 1.0 and true are equal in a document",
        "    if type(one) is not type(other):\n        return False\n",
        "    if one != other:\n        return False\n",
        ("test_hostile.py -k refused_when_it_is_opened",),
    ),
    Fault(
        "_format/documents.py",
        "the dimensions of shape and chunks are not compared",
        "if len(chunk) != len(shape) or (sub",
        "if (sub",
        ("test_hostile.py -k refused_when_it_is_opened",),
    ),
    Fault(
        "_format/root.py",
        "a root may name another save's tree",
        'if tree and tree != f"@{save_id}":',
        'if tree and not tree.startswith("@"):',
        ("test_hostile.py -k refused_when_it_is_opened",),
    ),
    Fault(
        "_format/root.py",
        "the length of a table is not compared with its arrays",
        "        if tables[name].length != expected:\n",
        "        if tables[name].length < 0:\n",
        ("test_open.py -k contradicts", "test_hostile.py"),
    ),
    Fault(
        "_format/root.py",
        "the span of ranks includes its end",
        "            found.append([rank, rank + 1])",
        "            found.append([rank, rank])",
        ("test_per_rank.py -k one_form",),
    ),
    Fault(
        "_format/values.py",
        "a blob shares memory with its value",
        'return Blob("raw", bytes(value), "bytearray")',
        'return Blob("raw", memoryview(value), "bytearray")',
        ("test_values.py -k do_not_follow",),
    ),
    Fault(
        "_format/values.py",
        "a pickle is loaded without being asked for",
        "    if not allow_pickle:\n",
        "    if not allow_pickle and not kind:\n",
        ("test_values.py -k 'runs_code or pickle'",),
    ),
    Fault(
        "_format/values.py",
        "torch loads any content of a blob",
        "return load_torch(io.BytesIO(payload))",
        "return load_torch(io.BytesIO(payload), weights_only=False)",
        ("test_values.py -k 'runs_code or unsafe_loads'",),
    ),
    Fault(
        "_format/values.py",
        "the items of a tree may leave bytes between them",
        "        if start != end:\n",
        "        if start < end:\n",
        ("test_values.py -k damaged_trees",),
    ),
    Fault(
        "_format/names.py",
        "a long name is measured in characters",
        "    if len(encoded) <= MAX_COMPONENT_BYTES:",
        "    if len(escaped) <= MAX_COMPONENT_BYTES:",
        ("test_names.py -k escaped_names",),
    ),
    Fault(
        "_format/names.py",
        "an array may be the group of another one",
        "            if parent in owners:\n",
        "            if owners.get(parent) == components:\n",
        ("test_names.py -k clashes",),
    ),
    Fault(
        "_format/names.py",
        "a document may name the package's own groups",
        "[={_UNCHANGED}]+",
        "[@={_UNCHANGED}]+",
        ("test_names.py -k bad_paths",),
    ),
    Fault(
        "_format/json_values.py",
        "2**53 is written as a number",
        "_MAX_INT = 2**53 - 1",
        "_MAX_INT = 2**53",
        ("test_values.py -k json_forms",),
    ),
    Fault(
        "_format/json_values.py",
        "the bits of a NaN are lost",
        "math.isinf(value) or bits == _NAN else",
        "math.isinf(value) or bits[:2] == _NAN[:2] else",
        ("test_values.py -k 'json_forms or round_trip'",),
    ),
    Fault(
        "_format/json_values.py",
        "a set is in the order of its hashes",
        "            items.sort(key=dumps)  #",
        "            items.sort(key=lambda item: 0)  #",
        ("test_values.py -k 'json_forms or round_trip'",),
    ),
    Fault(
        "_format/dtypes.py",
        "the fill value of unsigned integers is that of signed ones",
        "                return (1 << (8 * self.itemsize)) - 1",
        "                return (1 << (8 * self.itemsize - 1)) - 1",
        ("test_format.py -k dtypes_that_zarr_can_name", "test_dtypes.py -k plain_zarr_reads"),
    ),
    Fault(
        "_read/casts.py",
        "float64 is rounded to float16 at once",
        "values.astype(np.float32) if new.itemsize < 4 else values",
        "values",
        ("test_copy_changes.py -k cast_as_torch",),
    ),
    Fault(
        "_read/casts.py",
        "values beyond the range of float8_e4m3fn become NaN",
        "if new.name == _SATURATING:",
        "if False:",
        ("test_copy_changes.py -k cast_as_torch",),
    ),
    Fault(
        "_save/plan_report.py",
        "the table of sizes is not counted",
        "    other += bool(compressed) + any(node.grid.num_chunks for node in compressed)\n",
        "",
        ("test_plan_report.py -k server_gets",),
    ),
    Fault(
        "_format/dtypes.py",
        "bits of other types are kept as signed integers",
        'DTYPES[f"uint{8 * self.itemsize}"]',
        'DTYPES[f"int{8 * self.itemsize}"]',
        ("test_dtypes.py -k portable_types", "test_format.py -k every_dtype"),
    ),
    Fault(
        "_format/compression.py",
        "zstd's content size of two bytes lacks its 256",
        "+ (256 if width == 2 else 0)",
        "+ 0",
        ("test_compression.py -k 'decode_what_is_encoded or reading_a_box or by_hand'",),
    ),
    Fault(
        "_format/compression.py",
        "the size in blosc data is trusted",
        "or whole != len(stored) or size != nbytes",
        "or size != nbytes",
        ("test_compression.py -k hostile_bytes",),
    ),
    Fault(
        "_format/compression.py",
        "incompressible data are assumed not to grow",
        "    return nbytes + nbytes // 256 + 64",
        "    return nbytes",
        ("test_compression.py -k noise",),
    ),
]
"""The stored bytes, and checks of stored bytes."""

PLAN = [
    Fault(
        "_plan/chunking.py",
        "the end of the array counts as a cut",
        "for c in (b.offset[dim], b.offset[dim] + b.shape[dim]) if 0 < c < n}",
        "for c in (b.offset[dim], b.offset[dim] + b.shape[dim]) if 0 < c <= n}",
        ("test_grid.py -k torch_s_shards",),
    ),
    Fault(
        "_plan/chunking.py",
        "a large chunk is divided along its last dimension first",
        "    for dim, extent in enumerate(chunk):\n        total",
        "    for dim, extent in reversed([*enumerate(chunk)]):\n        total",
        ("test_owners.py -k first_dimension",),
    ),
    Fault(
        "_plan/chunking.py",
        "merged chunks may be larger than max_chunk_bytes",
        "    limit = min(fill_bytes, max_chunk_bytes)\n",
        "    limit = fill_bytes\n",
        ("test_owners.py -k within_the_bounds",),
    ),
    Fault(
        "_plan/chunking.py",
        "chunks of any number of pieces are merged",
        "fitting = max(1, min(limit // (math.prod(chunk) * itemsize), most))",
        "fitting = max(1, limit // (math.prod(chunk) * itemsize))",
        ("test_owners.py -k so_many_pieces",),
    ),
    Fault(
        "_plan/chunking.py",
        "boxes that touch count as overlapping",
        "(begin[:number] < end[number]) & (begin[number] < end[:number])",
        "(begin[:number] <= end[number]) & (begin[number] <= end[:number])",
        ("test_owners.py -k overlapping",),
    ),
    Fault(
        "_plan/owners.py",
        "a piece reaches to the end of its chunk",
        "np.minimum((cells + 1) * step, end[held]) - self.offset",
        "(cells + 1) * step - self.offset",
        ("test_owners.py -k tile_every_chunk",),
    ),
    Fault(
        "_plan/owners.py",
        "any rank that holds a part of a chunk may own it",
        "much = 2 * sizes >= sizes.max()",
        "much = sizes > 0",
        ("test_owners.py -k holds_much",),
    ),
    Fault(
        "_plan/owners.py",
        "a piece comes from another rank than the owner that holds it",
        "len(ranks) == 1 or (ranks != owner).all():",
        "len(ranks) == 1 or (ranks != owner).any():",
        ("test_planning.py -k fits_together", "test_any_sharding.py"),
    ),
    Fault(
        "_plan/owners.py",
        "chunks are assigned in the order of the state, not the largest first",
        "    choices.sort(key=lambda choice: -choice[0])\n",
        "",
        ("test_owners.py -k 'largest_are_dealt or dealt_evenly'",),
    ),
    Fault(
        "_plan/owners.py",
        "the smallest chunks are assigned first",
        "choice: -choice[0])",
        "choice: choice[0])",
        ("test_owners.py -k 'largest_are_dealt or dealt_evenly'",),
    ),
    Fault(
        "_plan/owners.py",
        "replicas that may differ are written by several ranks",
        "if kind.whole and len(open_ones):",
        "if kind.whole and not len(open_ones):",
        ("test_planning.py -k not_compared",),
    ),
    Fault(
        "_plan/owners.py",
        "a round is full only when it is full for all its ranks",
        "if ((total > limit) & (taken > 0)).any():",
        "if ((total > limit) & (taken > 0)).all():",
        ("test_owners.py -k above_the_limit",),
    ),
    Fault(
        "_plan/shards.py",
        "an uneven dimension is cut into parts that are rounded down",
        "            step = -(-length // mesh[m])\n",
        "            step = max(length // mesh[m], 1)\n",
        ("test_shards.py",),
    ),
    Fault(
        "_plan/shards.py",
        "mesh dimensions are taken to cut in their own order",
        "for m in reversed(range(len(cuts))):",
        "for m in range(len(cuts)):",
        ("test_shards.py",),
    ),
    Fault(
        "_plan/holders.py",
        "elements that no rank holds are not noticed",
        "    if size != found:\n",
        "    if size < found:\n",
        ("test_save_load.py -k missing_shard", "test_any_sharding.py"),
    ),
    Fault(
        "_plan/holders.py",
        "shards that overlap are not noticed",
        "    if pair is not None:\n",
        "    if pair is not None and pair[0] == pair[1]:\n",
        ("test_checkpointable_tensors.py -k outside",),
    ),
    Fault(
        "_plan/holders.py",
        "tensors of two dtypes under one name are taken for one",
        "if claim.entry[1:4] != first[1:4]]",
        "if claim.entry[1:3] != first[1:3]]",
        ("test_save_load.py -k two_forms",),
    ),
    Fault(
        "_plan/holders.py",
        "if values differ, any rank's is saved",
        "        if (fqn, None) in self._only:\n",
        "        if (fqn, fqn) in self._only:\n",
        ("test_save_load.py -k do_not_agree",),
    ),
    Fault(
        "_plan/rank_plan.py",
        "a rank lacks the arrays of which it only receives pieces",
        "return dict.fromkeys([*(name for name, _ in self.items), *written])",
        "return dict.fromkeys(name for name, _ in self.items)",
        ("test_planning.py -k fits_together", "test_any_sharding.py"),
    ),
    Fault(
        "_plan/rank_plan.py",
        "pieces are sent in another order than they are received",
        "in sorted(self._sends):",
        "in sorted(self._sends, reverse=True):",
        ("test_planning.py -k fits_together", "test_any_sharding.py"),
    ),
    Fault(
        "_plan/rank_plan.py",
        "every holder of a piece sends it",
        "if kind.geometry.source(tensor, piece, owner) == self._rank:",
        "if owner != self._rank:",
        ("test_planning.py -k fits_together", "test_any_sharding.py"),
    ),
    Fault(
        "_plan/plan.py",
        "the writer of a value is chosen by a hash",
        "ranks[turn % len(ranks)])",
        "ranks[hash(fqn) % len(ranks)])",
        ("test_planning.py -k every_process", "test_save_load.py -k by_turns"),
    ),
    Fault(
        "_plan/plan.py",
        "the digest of a plan does not cover the owners",
        '        digest.update(self.dealt.owner.astype("<i8").tobytes())\n',
        "",
        ("test_planning.py -k another_rank_writes",),
    ),
    Fault(
        "_options.py",
        "chunks may be larger than the memory for them",
        "Sizes(min(self.max_chunk_bytes, fits), ",
        "Sizes(self.max_chunk_bytes, ",
        ("test_plan_report.py -k fit_into_the_memory",),
    ),
    Fault(
        "_save/agree.py",
        "a kept plan is used with other options",
        "last is not None and last.options == self._options and {",
        "last is not None and {",
        ("test_planning.py -k 'any_change or plan_once'", "test_exchange.py -k kept_plans"),
    ),
    Fault(
        "_save/agree.py",
        "with a kept plan, contents are not compared",
        "known and sum(hello.balance for hello in hellos) % _PRIME == 0:",
        "known:",
        ("test_planning.py -k any_change",),
    ),
    Fault(
        "_save/agree.py",
        "if parts differ, the highest rank's is saved",
        "            only[part] = min(digests)\n",
        "            only[part] = max(digests)\n",
        ("test_save_load.py -k do_not_agree",),
    ),
    Fault(
        "_save/agree.py",
        "ranks may compute different plans",
        "others = [rank for rank, checked in enumerate(found) if",
        "others = [rank for rank, checked in enumerate(found[:1]) if",
        ("test_failure_table.py -k other_plans",),
    ),
    Fault(
        "_save/exchange.py",
        "a piece that was altered in transit is saved",
        "        if not is_intact(message):\n",
        "        if not len(message):\n",
        ("test_exchange.py -k altered",),
    ),
    Fault(
        "_save/exchange.py",
        "bundles are under way without a bound of memory",
        "            while moving and self._used + nbytes > self._limit:\n                yield from self._ended("
        "moving.popleft())\n            self._wait_for_memory(nbytes)\n",
        "",
        ("test_exchange.py -k memory_bound",),
    ),
]
"""Owners of chunks, and pieces that move."""

STATE = [
    Fault(
        "_state/digests.py",
        "only the beginning of a large tensor is compared",
        "places = torch.linspace(0, tensor.numel() - 1, _SAMPLE, dtype=torch.float64, device=tensor.device).long()",
        "places = torch.arange(_SAMPLE, device=tensor.device)",
        ("test_save_load.py -k do_not_agree", "test_planning.py -k any_change"),
    ),
    Fault(
        "_state/flatten.py",
        "of two entries with one flat name, the first is lost",
        "        if fqn in leaves:\n",
        "        if fqn in leaves and leaves[fqn] is value:\n",
        ("test_save_load.py -k one_flat_name",),
    ),
    Fault(
        "_state/flatten.py",
        "tensors in lists of lists are values",
        "        or (isinstance(item, list) and entered(item))\n",
        "",
        ("test_format.py -k nested",),
    ),
    Fault(
        "_state/flatten.py",
        "a list is in the order of its names",
        "return [children[position] for position in sorted(children)]",
        "return [children[position] for position in sorted(children, key=str)]",
        ("test_save_load.py -k in_its_order",),
    ),
    Fault(
        "_state/local_boxes.py",
        "a box is taken from the begin of the local tensor",
        "self._local[held.box.slices(_minus(held.box.offset, held.local))]",
        "self._local[held.box.slices(held.box.offset)]",
        ("test_save_load.py -k interleaved", "test_checkpointable_tensors.py"),
    ),
    Fault(
        "_state/local_boxes.py",
        "boxes outside of the tensor are taken",
        "at < 0 or n < 0 or at + n > size for at",
        "at < 0 or n < 0 for at",
        ("test_checkpointable_tensors.py -k outside",),
    ),
    Fault(
        "_state/local_state.py",
        "partial sums are saved as values",
        "if is_dtensor(leaf) and any(",
        "if is_dtensor(leaf) and len(leaf.placements) > 1 and any(",
        ("test_save_load.py -k no_place", "test_dcp.py", "test_save_load.py -k sharded"),
    ),
    Fault(
        "_state/modules.py",
        "any submodule named module is left out of names",
        'in_ddp = segment == "module" and isinstance(at, DistributedDataParallel)',
        'in_ddp = segment == "module"',
        ("test_optimizers.py -k named_module",),
    ),
    Fault(
        "_state/modules.py",
        "entries that a module does not load are not noticed",
        "        if untaken:\n",
        "        if untaken and not self._keys:\n",
        ("test_optimizers.py -k does_not_take",),
    ),
    Fault(
        "_state/group_options.py",
        "groups of parameters are taken by position, not by names",
        'sources = [other for other in loaded.values() if not {*names}.isdisjoint(other.get("params", ()))]',
        "sources = [loaded[place]] if place in loaded else []",
        ("test_optimizers.py -k groups_find",),
    ),
    Fault(
        "_state/optimizers.py",
        "torch's casts of an optimizer's state stay",
        '            self._undo_casts((parameter, taken["state"].get(name, {})) for name, parameter in '
        "self._parameters)\n",
        "",
        ("test_optimizers.py -k any_form",),
    ),
    Fault(
        "_state/optimizers.py",
        "state that an optimizer does not keep is lost without an error",
        "        if lost:\n",
        "        if len(lost) < 0:\n",
        ("test_optimizers.py -k leaves_out",),
    ),
    Fault(
        "_state/optimizers.py",
        "a fresh optimizer's moments get the dtype of the parameter",
        "return make(parameter.detach(), dtype=entry.dtype)",
        "return make(parameter.detach())",
        ("test_optimizers.py -k 'any_form or goes_on'",),
    ),
    Fault(
        "_state/per_rank.py",
        "a new rank takes the last rank's state",
        "return saved[self._rank % len(saved)] if saved else None",
        "return saved[-1] if saved else None",
        ("test_per_rank.py -k each_rank_gets_its_own",),
    ),
    Fault(
        "_state/per_rank.py",
        "the index in a stack is the number of the rank",
        "OwnPart(fqn, path.ranks.index(source), own)",
        "OwnPart(fqn, min(source, len(path.ranks) - 1), own)",
        ("test_per_rank.py -k 'one_form or sub_group'",),
    ),
    Fault(
        "_state/per_rank.py",
        "a rank without saved state is passed over",
        '            elif entry.new_ranks == "wrap" and wrapped is not None:\n',
        "            elif wrapped is not None:\n",
        ("test_per_rank.py -k new_rank_is_an_error",),
    ),
    Fault(
        "_state/objects.py",
        "an optimizer gets names from any module that shares a parameter",
        "if wanted <= {id(p) for p in module.parameters()}:",
        "if wanted & {id(p) for p in module.parameters()}:",
        ("test_save_load.py -k optimizer_without_its_module",),
    ),
    Fault(
        "_state/tensors.py",
        "a conjugate view is saved as its base",
        "plain_tensor(tensor).resolve_conj().resolve_neg().cpu()",
        "plain_tensor(tensor).resolve_neg().cpu()",
        ("test_format.py -k views", "test_save_load.py -k views"),
    ),
    Fault(
        "_state/tensors.py",
        "bits of one dtype are put into a tensor of another",
        "        tensor.dtype == dtype\n        and tensor.device",
        "        tensor.dtype.itemsize == dtype.itemsize\n        and tensor.device",
        ("test_save_load.py -k 'dtypes_are_converted or casts'", "test_load_targets.py"),
    ),
    Fault(
        "_state/tensors.py",
        "a wrapper is filled through a temporary tensor",
        "    if is_wrapper(tensor):\n",
        "    if is_wrapper(tensor) and hasattr(tensor, '__tensor_flatten__'):\n",
        ("test_target_memory.py -k 'plain_memory'",),
    ),
    Fault(
        "_load/aliases.py",
        "targets in one memory are filled from different entries",
        "        if not np.array_equal(mine, theirs):\n",
        "        if len(mine) != len(theirs):\n",
        ("test_target_memory.py -k one_tensor",),
    ),
    Fault(
        "_load/aliases.py",
        "views that share memory are filled without a check of their contents",
        "all(np.array_equal(raw_view(a), raw_view(b)) for a, b in zip(shared, own, strict=True))",
        "True",
        ("test_target_memory.py -k one_buffer",),
    ),
    Fault(
        "_load/aliases.py",
        "strided views share memory if their addresses overlap",
        "        return np.shares_memory(_as_array(a), _as_array(b), max_work=_EXACT_STEPS)",
        "        return np.may_share_memory(_as_array(a), _as_array(b))",
        ("test_target_memory.py -k interleaved",),
    ),
    Fault(
        "_state/flatten.py",
        "an item that is set in a list is set in every place that holds the list",
        "            state[key] = copy.copy(state[key])\n",
        "            state[key] = state[key]\n",
        ("test_target_memory.py -k stateful",),
    ),
    Fault(
        "_load/match.py",
        "missing keys are forgotten",
        '            faults += [f"{fqn!r} is not in the checkpoint" for fqn in self.missing]\n',
        "",
        ("test_save_load.py -k more_or_less",),
    ),
    Fault(
        "_load/object_match.py",
        "a module's entries without a target are forgotten",
        "        left = unmatched & ~np.bitwise_or",
        "        left = unmatched & np.bitwise_or",
        ("test_load_targets.py -k no_rank_has",),
    ),
    Fault(
        "_load/match.py",
        "only the number of dimensions is compared",
        "        if shape != entry.shape:\n",
        "        if len(shape) != len(entry.shape):\n",
        ("test_wrong_use.py -k mismatch", "test_load_targets.py -k listed"),
    ),
    Fault(
        "_load/match.py",
        "dtypes are converted unasked",
        "leaf.dtype != entry.dtype and not self._allow_cast:",
        "leaf.dtype.itemsize < entry.dtype.itemsize and not self._allow_cast:",
        ("test_save_load.py -k dtypes_are_converted",),
    ),
    Fault(
        "_load/object_match.py",
        "a pattern must have a target on every rank",
        "if all(p in one.idle for one in found)]",
        "if any(p in one.idle for one in found)]",
        ("test_wrong_use.py -k without_a_target",),
    ),
    Fault(
        "_state/tensors.py",
        "a tensor that is expanded along some dimensions is filled",
        "            if stride <= reach:",
        "            if stride < reach:",
        ("test_wrong_use.py -k expanded",),
    ),
    Fault(
        "_load/fill.py",
        "a piece that a rank received altered is used",
        "        if not is_intact(data):\n",
        "        if not len(data):\n",
        ("test_exchange.py -k altered",),
    ),
    Fault(
        "_load/fill.py",
        "a piece that a rank received is read again",
        "            self._delivered.setdefault((run.fqn, run.chunk, box), set()).update(run.numbers)\n",
        "            self._delivered.setdefault((run.fqn, run.chunk, box), set())\n",
        ("test_shared_reads.py -k 'do_not_depend or each_byte_once'",),
    ),
    Fault(
        "_load/fill.py",
        "a rank reads on after another one has failed",
        "            if self._stopped:\n                raise StoppedByOthers\n            node",
        "            node",
        ("test_shared_reads.py -k in_vain",),
    ),
    Fault(
        "_load/shared_reads.py",
        "one rank fetches all that several need",
        "        loads[ranks[index]] += stored\n",
        "",
        ("test_owners.py -k all_ranks_alike",),
    ),
    Fault(
        "_load/shared_reads.py",
        "runs are as long as the limit, whatever the number of ranks",
        "longest = min(READ_BYTES, limit, max(_MIN_RUN_BYTES, limit // len(ranks)))",
        "longest = min(READ_BYTES, limit)",
        ("test_owners.py -k 'all_ranks_alike or handed_on'", "test_shared_reads.py -k memory_bound"),
    ),
    Fault(
        "_load/shared_reads.py",
        "the rank that fetches a range is sent it, too",
        "receivers = tuple(rank for rank in ranks if rank != reader)",
        "receivers = tuple(ranks)",
        ("test_owners.py -k 'handed_on or all_ranks_alike'",),
    ),
    Fault(
        "_ranks/rounds.py",
        "beats do not count against the timeout",
        "if now - max(self._since, self._seen.get(peer, 0.0)) > timeout]",
        "if now - self._since > timeout]",
        ("test_rounds.py -k work_that_goes_on",),
    ),
    Fault(
        "_ranks/rounds.py",
        "a rank beats while its work stands still",
        "        if not (self._progress or self._waiting):\n            return\n",
        "",
        ("test_rounds.py -k work_that_goes_on",),
    ),
    Fault(
        "_ranks/rounds.py",
        "ranks in different calls are not noticed",
        "if not failures and self._number == 1 and len(self._calls) > 1:",
        "if not failures and self._number > 1 and len(self._calls) > 1:",
        ("test_rounds.py -k different_calls",),
    ),
    Fault(
        "_ranks/rounds.py",
        "an error that all ranks have breaks their connections",
        "        if self._in_step and isinstance(error, Exception):\n            return\n",
        "",
        ("test_rounds.py -k error_of_ours",),
    ),
    Fault(
        "_ranks/rounds.py",
        "the others do not get the error of a failed rank",
        "        elif not self._stopping:\n            self._drain = time.monotonic() + DRAIN_SECONDS\n"
        "            self._stop_all(None)\n",
        "",
        ("test_rounds.py -k the_others_are_stopped",),
    ),
]
"""State of a rank, targets of a load, and messages between ranks."""

RUNS = [
    Fault(
        "_runs/steps.py",
        "the newest checkpoint is the one with the least step",
        "for _, name in sorted(numbered, reverse=True):",
        "for _, name in sorted(numbered):",
        ("test_save_load.py -k latest_has",),
    ),
    Fault(
        "_runs/keep.py",
        "a metric that is to be the greatest is kept where it is the least",
        'sign = -1 if self.mode == "max" else 1',
        "sign = 1",
        ("test_manager.py -k what_is_kept",),
    ),
    Fault(
        "_runs/keep.py",
        "NaN is the best metric",
        "return None if isinstance(value, float) and math.isnan(value) else value",
        "return value",
        ("test_manager.py -k what_is_kept",),
    ),
    Fault(
        "_runs/keep.py",
        "of equal metrics the earlier step is better",
        "enumerate(sorted(ranked)[: self.best], 1)",
        "enumerate(sorted(ranked, key=lambda pair: (pair[0], -pair[1]))[: self.best], 1)",
        ("test_manager.py -k what_is_kept",),
    ),
    Fault(
        "_save/run.py",
        "a job that lost its run commits all the same",
        "            self.request.run.check()\n",
        "            pass\n",
        ("test_manager.py -k taken_before_the_commit",),
    ),
    Fault(
        "_runs/retention.py",
        "a job that lost its run goes on deleting",
        "        self._ownership.check()\n        pinned, refused = False, False",
        "        pinned, refused = False, False",
        ("test_manager.py -k taken_before_a_deletion",),
    ),
    Fault(
        "_runs/retention.py",
        "the leftovers of any program's save are deleted",
        "found.removal or all(marker.run == run for marker in found.markers)",
        "True",
        ("test_manager.py -k others_stay",),
    ),
    Fault(
        "_runs/retention.py",
        "damaged checkpoints count as the newest",
        "for name, known in self._own.items() if name not in self._ignored}",
        "for name, known in self._own.items()}",
        ("test_manager.py -k never_deleted_for_a_damaged_one",),
    ),
    Fault(
        "_runs/retention.py",
        "a deletion that fails ends all deletions of the job",
        "            refused = True\n            if not self._ended:\n",
        "            refused = self._ended = True\n            if self._ended:\n",
        ("test_manager.py -k deletion_that_is_refused",),
    ),
    Fault(
        "_runs/coordinator.py",
        "a run whose checkpoints are all damaged begins anew",
        "        if chosen is None:\n            self._refuse_to_begin_anew(known, damaged)\n",
        "",
        ("test_manager.py -k begins_anew",),
    ),
    Fault(
        "_runs/retention.py",
        "checkpoints whose root was lost are deleted as unfinished saves",
        "elif below.root is None and below.damage is None:",
        "elif below.root is None:",
        ("test_manager.py -k begins_anew",),
    ),
    Fault(
        "_runs/steps.py",
        "copies in a run's folder count as checkpoints of the run",
        'return run_of(root.metadata) == run and is_name_of(name, root.metadata.get("step"))',
        "return run_of(root.metadata) == run",
        ("test_manager.py -k copies_in_the_folder",),
    ),
    Fault(
        "_runs/record.py",
        "a run does not record that a checkpoint was committed",
        "        if self.record.committed:\n",
        "        if True:\n",
        ("test_manager.py -k are_gone",),
    ),
    Fault(
        "_runs/coordinator.py",
        "a checkpoint of a newer format counts as damaged",
        "            if isinstance(below.damage, UnsupportedFormatError):\n                raise below.damage\n",
        "",
        ("test_manager.py -k newer_format",),
    ),
    Fault(
        "_runs/coordinator.py",
        "an earlier step is saved beside a later one",
        "        if step <= self._greatest:\n",
        "        if step == self._greatest:\n",
        ("test_manager.py -k step_of_its_own",),
    ),
    Fault(
        "_runs/coordinator.py",
        "a rewind removes the first of the later ones first",
        "for spec, left in reversed(found):",
        "for spec, left in found:",
        ("test_manager.py -k back_in_time",),
    ),
    Fault(
        "_runs/record.py",
        "a job makes a new run of a folder that has one",
        "run = known.run if known is not None else inherited or new_id()",
        "run = inherited or new_id()",
        ("test_manager.py -k fork",),
    ),
    Fault(
        "_runs/signals.py",
        "the signal that torchrun sends beside a scheduler's ends the process",
        "now - watch.first > SAME_SECONDS for",
        "True for",
        ("test_preemption.py -k second_signal",),
    ),
    Fault(
        "_runs/signals.py",
        "an earlier handler is not called",
        "            self.previous(number, frame)\n",
        "            pass\n",
        ("test_preemption.py -k handlers_come_back",),
    ),
    Fault(
        "_runs/signals.py",
        "a forked child reports its signals to the parent",
        "os.register_at_fork(after_in_child=_begin_child_signals)",
        "",
        ("test_preemption.py -k forked_child",),
    ),
    Fault(
        "_runs/wakeup.py",
        "an earlier wakeup descriptor gets no signals",
        "                if self._copy != -1:\n",
        "                if False:\n",
        ("test_preemption.py -k wakeup",),
    ),
    Fault(
        "_runs/preemption.py",
        "a rank that gets a signal does not notify the others",
        "                raise _Noticed(self._reason)\n",
        "                return\n",
        ("test_preemption.py -k different_steps",),
    ),
    Fault(
        "_runs/manager.py",
        "a save before pre-emption waits for a lost rank as long as any save",
        "            timeout = min(self._options.timeout, max(self._preemption.seconds_left(), MIN_TIMEOUT_SECONDS))\n",
        "            timeout = self._options.timeout\n",
        ("test_preemption.py -k lost_before",),
    ),
]

FAULTS = {"commit": COMMIT, "format": FORMAT, "plan": PLAN, "state": STATE, "runs": RUNS}


# -- the campaign


def prepared(folder: Path, fault: Fault | None) -> Path:
    """Return a copy of the repository, with a fault."""
    copy = folder / "repository"
    shutil.copytree(REPOSITORY, copy, ignore=_LEFT_OUT)
    if fault is not None:
        file = copy / "zarrckpt" / fault.file
        file.write_text(file.read_text().replace(fault.old, fault.new))
    return copy


def failed_test(copy: Path, tests: str) -> str:
    """Return the first test that fails in a copy of the repository, "" if all pass."""
    file, *options = shlex.split(tests)
    command = [sys.executable, "-m", "pytest", f"tests/{file}", *options, "-x", "-q", "-p", "no:cacheprovider"]
    environment = {**os.environ, "PYTHONPATH": str(copy), "TMPDIR": str(copy.parent)}
    process = subprocess.Popen(
        command, cwd=copy, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )
    try:
        output = process.communicate(timeout=LONGEST_SECONDS)[0].decode(errors="replace")
    except subprocess.TimeoutExpired:
        return f"{file} (no end within {LONGEST_SECONDS:.0f} s)"
    finally:
        # With the processes of ranks and servers that it has started.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    if process.returncode == 0:
        return ""
    if process.returncode != 1:
        raise RuntimeError(f"pytest {tests} ended with {process.returncode}:\n{output[-2000:]}")
    found = _FAILED.search(output)
    return found[1] if found else file


def find(fault: Fault | None, tests: Sequence[str]) -> tuple[str, float]:
    """Return the first of some tests that fails with a fault, "" for none, and the seconds that it took."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="zarrckpt-fault-", ignore_cleanup_errors=True) as folder:
        copy = prepared(Path(folder), fault)
        found = next(filter(None, (failed_test(copy, one) for one in tests)), "")
    return found, time.monotonic() - began


def put_in(faults: Sequence[Fault], jobs: int) -> int:
    """Put faults in, one by one. Return how many were not found."""
    missed = 0
    with ThreadPoolExecutor(jobs) as pool:
        results = pool.map(lambda fault: find(fault, fault.tests), faults)
        for number, (fault, (found, seconds)) in enumerate(zip(faults, results, strict=True), 1):
            missed += not found
            how = f"found by {found}" if found else "NOT FOUND"
            print(f"{number:3} {fault.file}: {fault.what}: {how}, {seconds:.0f} s", flush=True)
    print(f"{len(faults) - missed} of {len(faults)} faults found")
    return missed


def run_clean(faults: Sequence[Fault], jobs: int) -> int:
    """Run the tests of faults without any. Return how many runs failed."""
    runs = sorted({tests for fault in faults for tests in fault.tests})
    failed = 0
    with ThreadPoolExecutor(jobs) as pool:
        for tests, (found, seconds) in zip(runs, pool.map(lambda one: find(None, [one]), runs), strict=True):
            failed += bool(found)
            print(f"{tests}: {f'FAILED: {found}' if found else 'passed'}, {seconds:.0f} s", flush=True)
    return failed


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description="Put faults into the package.")
    parser.add_argument("--jobs", type=int, default=2, help="so many at a time (default: %(default)s)")
    parser.add_argument("--only", default="", metavar="TEXT", help="faults with this text in their file or description")
    parser.add_argument("--clean", action="store_true", help="run the tests without a fault: all must pass")
    options = parser.parse_args(arguments)
    every = [fault for faults in FAULTS.values() for fault in faults]
    if misfits := [fault.misfit for fault in every if fault.misfit]:
        print("\n".join(misfits), file=sys.stderr)
        return 1
    faults = [fault for fault in every if options.only in f"{fault.file} {fault.what}"]
    return int(bool((run_clean if options.clean else put_in)(faults, options.jobs)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
