"""List folders of checkpoints and folders of runs, for ``ls``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from zarrckpt._commit.discovery import find_checkpoints, number_in
from zarrckpt._commit.listings import list_below
from zarrckpt._commit.pins import list_pins
from zarrckpt._errors import CheckpointError, StorageError, UnsupportedFormatError
from zarrckpt._format.chunk_layout import chunk_object_bytes
from zarrckpt._format.root import Root
from zarrckpt._inspect.info import STEPS, info_of
from zarrckpt._jobs import run_jobs
from zarrckpt._reports import age_text, size_text
from zarrckpt._runs.folders import is_name_of, newest_below, step_of
from zarrckpt._runs.record import read_record
from zarrckpt._store import StoreSpec
from zarrckpt.cli._common import print_json, print_line, print_table


@dataclass
class CheckpointTable:
    """The checkpoints or the runs directly below a url."""

    kind: str
    """The name of the first column: "checkpoint" or "run"."""
    rows: list[dict[str, Any]]
    metric: str | None = None
    """The metric of the run's rules for keeping checkpoints."""


def list_checkpoints(url: str, storage_options: Any) -> CheckpointTable:
    """List the checkpoints directly below a url by step, or by the time of the commit if a name has no step."""
    spec, listing = StoreSpec(url, storage_options), CheckpointTable("checkpoint", [])
    try:
        below = find_checkpoints(spec.open(), unfinished=True)
    except StorageError:
        return listing  # the caller raises the error of opening the url, which has more details
    if all(item.unreadable for item in below):
        return listing
    for item in below:
        state = "unfinished" if item.root is None else "committed"
        if item.unreadable:
            state = "not readable"
            print_line(str(item.damage), err=True)
        elif item.damage is not None:
            state = "newer format" if isinstance(item.damage, UnsupportedFormatError) else "damaged"
        row: dict[str, Any] = {"name": item.name, "url": spec.child(item.name).url, "state": state}
        if item.root is not None:
            row |= {**_described_root(row["url"], item.root), "kept": None}
        listing.rows.append(row)
    _add_reasons(spec, listing)
    unread = [row for row in listing.rows if row["state"] == "not readable"]
    rows = [row for row in listing.rows if row["state"] != "not readable"]
    numbers = {row["name"]: number_in(row["name"]) for row in rows}
    if None not in numbers.values():
        rows.sort(key=lambda row: (numbers[row["name"]], row["name"]))
    else:
        rows.sort(key=lambda row: ("created" not in row, row.get("created", "")))
    listing.rows = [*rows, *unread]
    return listing


def list_runs(url: str, storage_options: Any) -> CheckpointTable:
    """List the folders of checkpoints directly below a url by name, each with its newest checkpoint."""
    spec = StoreSpec(url, storage_options)
    try:
        store = spec.open()
        names = list_below(store).folders
    except StorageError:
        return CheckpointTable("run", [])
    looks = (partial(_run_below, spec.child(name), name) for name in names)
    return CheckpointTable("run", [row for row in run_jobs(looks, store.max_concurrency) if row is not None])


def _run_below(spec: StoreSpec, name: str) -> dict[str, Any] | None:
    """Describe the newest checkpoint of a folder, or return None if the folder is not a run."""
    row: dict[str, Any] = {"name": name, "url": spec.url, "state": "no checkpoint", "newest": None}
    store = spec.open()
    try:
        listed = list_below(store)
        newest, damaged = newest_below(store, listed.folders)
        root = None if newest is None else find_checkpoints(store, [newest])[0].root
    except StorageError as err:
        print_line(str(err), err=True)
        return row | {"state": "not readable"}
    if newest is not None and root is not None:
        return row | {"state": "committed", "newest": newest, **_described_root(spec.child(newest).url, root)}
    if damaged:
        return row | {"state": "not readable" if all(below.unreadable for below in damaged) else "damaged"}
    return row if listed.is_run else None


def _described_root(url: str, root: Root) -> dict[str, Any]:
    found = info_of(url, root, root.entries, None)
    described = {name: getattr(found, name) for name in ("created", "step", "nbytes", "metadata")}
    reused = 0 if found.reused is None else found.reused.nbytes
    return described | {"run": found.run or None, "reused_nbytes": reused, "sent_nbytes": _sent_nbytes(root, reused)}


def _sent_nbytes(root: Root, reused: int) -> int | None:
    """Return the bytes of chunks that a save sent, or None if arrays are compressed, because the root lacks sizes."""
    arrays = root.arrays()
    if any(node.compression is not None for node in arrays):
        return None
    stored = sum(node.grid.num_chunks * chunk_object_bytes(node) for node in arrays)
    return max(0, stored - reused)


def _add_reasons(spec: StoreSpec, listing: CheckpointTable) -> None:
    """Add the reasons why a CheckpointManager keeps each committed checkpoint of a run, and the rules' metric."""
    store = spec.open()
    try:
        record = read_record(store)
    except CheckpointError as err:
        print_line(f"the reasons why checkpoints are kept cannot be read: {err}", err=True)
        return
    if record is None:
        return
    listing.metric = None if record.keep is None else record.keep.metric
    committed = [row for row in listing.rows if row["state"] == "committed"]
    own = {
        row["metadata"]["step"]: row["metadata"]
        for row in committed
        if row["run"] == record.run_id and is_name_of(row["name"], row["metadata"].get("step"))
    }
    reasons = {} if record.keep is None else record.keep.reasons(own)
    looks = (partial(list_pins, spec.child(row["name"]).open()) for row in committed)
    for row, pinned in zip(committed, run_jobs(looks, store.max_concurrency), strict=True):
        if row["run"] != record.run_id:
            kept = ["not of this run"]
        elif step_of(row["name"]) is None:
            kept = ["not named by step"]
        elif not is_name_of(row["name"], row["metadata"].get("step")):
            kept = ["a copy"]
        else:
            kept = ["no rules"] if record.keep is None else reasons.get(row["metadata"]["step"], [])
        row["kept"] = [*kept, *(["pinned"] if pinned else [])]


def print_listing(listing: CheckpointTable, as_json: bool, all_metadata: bool) -> None:
    """Print a listing.

    Metadata columns are the rules' metric, or the most frequent names, or all names with ``all_metadata``.
    """
    if as_json:
        print_json(listing.rows)
        return
    names = _metadata_columns(listing, all_metadata)
    runs, reasons = listing.kind == "run", any(row.get("kept") is not None for row in listing.rows)
    sent = any(row.get("reused_nbytes") for row in listing.rows)
    columns = [listing.kind, *(["newest"] if runs else []), "step", "age", "size", *(["sent"] if sent else []), *names]
    rows = [_row_cells(row, names, runs, sent, reasons) for row in listing.rows]
    print_table([*columns, "kept because"] if reasons else columns, rows, right=columns[2 if runs else 1 :])


def _metadata_columns(listing: CheckpointTable, all_metadata: bool) -> list[str]:
    # Only values that fit into a cell. The step has its own column.
    counts = Counter(
        name
        for row in listing.rows
        for name, value in row.get("metadata", {}).items()
        if name not in STEPS and not isinstance(value, dict | list)
    )
    if all_metadata:
        return [name for name, _ in counts.most_common()]
    if listing.metric is not None:
        return [listing.metric]
    return [name for name, _ in counts.most_common(_COLUMNS)]


def _row_cells(row: Mapping[str, Any], names: Sequence[str], runs: bool, sent: bool, reasons: bool) -> list[str]:
    cells = [row["name"], *([row["newest"] or ""] if runs else [])]
    if row["state"] == "committed":
        step = "" if row["step"] is None else str(row["step"])
        cells += [step, age_text(row["created"]), size_text(row["nbytes"])]
        if sent:
            cells.append("-" if row["sent_nbytes"] is None else size_text(row["sent_nbytes"]))
        cells += [_cell(row["metadata"].get(name)) for name in names]
    else:
        cells += ["", "", row["state"], *[""] * (sent + len(names))]
    kept = row.get("kept")
    return [*cells, "" if kept is None else ", ".join(kept) or "to be deleted"] if reasons else cells


_COLUMNS = 4
"""Maximum number of metadata columns without ``--all``."""


def _cell(value: object) -> str:
    """Return a value of the metadata as a cell."""
    if value is None or isinstance(value, dict | list):
        return ""
    return _number_text(value) if isinstance(value, float) else str(value)[:40]


def _number_text(value: float) -> str:
    """Return a number with 6 digits, or with more if it would change or would look like a whole number."""
    texts = (f"{value:.{digits}g}" for digits in range(6, 18))
    whole = value.is_integer()
    return next(
        (text for text in texts if (float(text) == value if whole else not float(text).is_integer())), repr(value)
    )
