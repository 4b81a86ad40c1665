"""Print for people or as JSON, and show progress."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from zarrckpt._errors import CheckpointError, one_line
from zarrckpt.cli._streams import echo

if TYPE_CHECKING:
    from zarrckpt._jobs import Progress


def print_line(text: str, err: bool = False) -> None:
    """Print a line. Control characters are escaped, because texts can come from the checkpoint."""
    echo(one_line(text), err)


def print_json(value: Any) -> None:
    """Print strict JSON on one line, in ASCII. Numbers that JSON cannot represent become strings."""
    echo(json.dumps(_jsonable(value), allow_nan=False))


_MAX_BITS = 10_000
"""Integers with more bits are printed in hexadecimal. By default Python refuses to write more than 4,300 decimal
digits, about 14,000 bits."""


def _jsonable(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _jsonable(vars(value))
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, int) and value.bit_length() > _MAX_BITS:
        return hex(value)
    if isinstance(value, Mapping):
        return {str(key): _jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_jsonable(item) for item in value]
    return value if value is None or isinstance(value, bool | int | float | str) else repr(value)


def print_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    header: bool = False,
    right: Iterable[str] = (),
    cut: str | None = None,
) -> None:
    """Print a table. On a terminal it has aligned columns, and a header.

    In a pipe, columns are separated by tabs, and the header is printed only with ``header``. If the terminal is
    narrower than the table, the cells of the column ``cut`` are shortened.
    """
    listed = [list(map(one_line, row)) for row in rows]
    if not sys.stdout.isatty():
        for row in [columns, *listed] if header else listed:
            echo("\t".join(row))
        return
    if not listed:
        return
    from rich.cells import cell_len
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name in columns:
        table.add_column(name, justify="right" if name in right else "left", no_wrap=name != cut)
    for row in listed:
        table.add_row(*(Text(cell, no_wrap=True, overflow="ellipsis") for cell in row))
    # Only the column `cut` can become narrower. A wider table continues in the next line of the terminal.
    filled = zip(columns, *listed, strict=True)
    widths = [len(cells[0]) if cells[0] == cut else max(map(cell_len, cells)) for cells in filled]
    console = Console(color_system=None if os.environ.get("NO_COLOR") else "auto")
    console.width = max(console.width, sum(widths) + 2 * len(widths) - 2)
    console.print(table, crop=False)


def format_number(number: float) -> str:
    """Return a number for a table: integers in full, floats with five digits, "-" for NaN."""
    if isinstance(number, int):
        return str(number)
    return "-" if math.isnan(number) else f"{number:.5g}"


@contextmanager
def progress_bar(what: str) -> Iterator[Progress | None]:
    """Show a progress bar on the terminal. Yields None if standard error is not a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn(what), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)

        def move(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        yield move


@contextmanager
def warnings_as_lines() -> Iterator[list[warnings.WarningMessage]]:
    """Print warnings as lines, and raise ValueError for wrong options as an error of usage. Yields the warnings."""
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield caught
    except CheckpointError:
        raise
    except ValueError as err:
        raise click.UsageError(str(err)) from err
    for warning in caught:
        print_line(f"warning: {warning.message}", err=True)
