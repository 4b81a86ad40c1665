"""List folders of checkpoints and folders of runs, for ``ls``."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from zarrckpt._commit.discovery import find_checkpoints
from zarrckpt._commit.listings import list_below
from zarrckpt._errors import StorageError
from zarrckpt._inspect.info import STEPS
from zarrckpt._jobs import run_jobs
from zarrckpt._reports import age_text, size_text
from zarrckpt._runs.checkpoints import COUNTERS, describe_checkpoint, list_checkpoints
from zarrckpt._runs.folders import newest_below
from zarrckpt._store import StoreSpec
from zarrckpt.cli import _output as out


@dataclass
class CheckpointTable:
    """The checkpoints or the runs directly below a url."""

    kind: str
    """The name of the first column: "checkpoint" or "run"."""
    rows: list[dict[str, Any]]
    metric: str | None = None
    """The metric of the run's rules for keeping checkpoints, if it is a user's."""


def list_run(url: str, storage_options: Any) -> CheckpointTable:
    """List the checkpoints directly below a url. Without any that can be read, the list is empty."""
    listing = CheckpointTable("checkpoint", [])
    try:
        with out.warnings_as_lines():
            found, record = list_checkpoints(StoreSpec(url, storage_options))
    except StorageError:
        return listing  # the caller raises the error of opening the url, which has more details
    if all(one.state == "not readable" for one in found):
        return listing
    for one in found:
        if one.state == "not readable":
            out.print_line(one.error, err=True)
    listing.rows = [dataclasses.asdict(one) for one in found]
    if record is not None and record.keep is not None and record.keep.metric not in COUNTERS:
        listing.metric = record.keep.metric
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
        out.print_line(str(err), err=True)
        return row | {"state": "not readable"}
    if newest is not None and root is not None:
        return dataclasses.asdict(describe_checkpoint(name, spec.url, root)) | {"newest": newest}
    if damaged:
        return row | {"state": "not readable" if all(below.unreadable for below in damaged) else "damaged"}
    return row if listed.is_run else None


def print_listing(listing: CheckpointTable, as_json: bool, all_metadata: bool, header: bool) -> None:
    """Print a listing.

    Metadata columns are the rules' metric, or the most frequent names, or all names with ``all_metadata``.
    """
    if as_json:
        out.print_json(listing.rows)
        return
    names = _metadata_columns(listing, all_metadata)
    runs, reasons = listing.kind == "run", any(row.get("kept") is not None for row in listing.rows)
    sent = any(row.get("reused_nbytes") for row in listing.rows)
    columns = [listing.kind, *(["newest"] if runs else []), "step", "age", "size", *(["sent"] if sent else []), *names]
    rows = [_row_cells(row, names, runs, sent, reasons) for row in listing.rows]
    out.print_table([*columns, "kept because"] if reasons else columns, rows, header, right=columns[2 if runs else 1 :])


def _metadata_columns(listing: CheckpointTable, all_metadata: bool) -> list[str]:
    # Only values that fit into a cell. The step has its own column.
    counts = Counter(
        name
        for row in listing.rows
        for name, value in row.get("metadata", {}).items()
        if name not in STEPS and not isinstance(value, dict | list)
    )
    if listing.metric is not None and not all_metadata:
        return [listing.metric]
    # The user's metrics are before the numbers that integrations add.
    names = sorted(counts, key=lambda name: (name in COUNTERS or name.endswith(_SPEEDS), -counts[name]))
    return names if all_metadata else names[:_COLUMNS]


_SPEEDS = ("_runtime", "_per_second")
"""Ends of the names of numbers that transformers adds to the metrics of an evaluation."""


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
