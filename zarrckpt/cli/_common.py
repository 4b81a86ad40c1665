"""Functions that the commands share: options of stores, output for people or as JSON, progress."""

from __future__ import annotations

import json
import math
import shutil
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import click

import zarrckpt
from zarrckpt._errors import CheckpointError, CheckpointNotFoundError, ForeignObjectsError, StorageError, one_line

if TYPE_CHECKING:
    from zarrckpt._checkpoint import Checkpoint
    from zarrckpt._jobs import Progress

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")


def parse_options(ctx: click.Context, param: click.Parameter, given: Sequence[str]) -> dict[str, Any] | None:
    """Parse ``NAME=VALUE`` words into a mapping. Values are JSON if they can be parsed, otherwise text."""
    found: dict[str, Any] = {}
    for item in given:
        name, equals, text = item.partition("=")
        if not equals or not name:
            raise click.BadParameter(f"expected NAME=VALUE, got {item!r}")
        try:
            found[name] = json.loads(text)
        except ValueError:
            found[name] = text
    return found or None


def _store_option(name: str, *letters: str, help_text: str) -> Callable[[F], F]:
    parameter = name.removeprefix("--").replace("-", "_") + "s"
    return click.option(
        name, *letters, parameter, metavar="NAME=VALUE", multiple=True, callback=parse_options, help=help_text
    )


def url_options(command: F, letters: Sequence[str] = ("-o", "-O")) -> F:
    """Add ``--json`` and ``--storage-option``, for commands that open a url."""
    json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON, for scripts.")
    text = f"An option of the store, as in storage_options= (repeatable), for example {letters[0]} "
    text += "endpoint_url=http://localhost:9000"
    return json_option(_store_option("--storage-option", *letters, help_text=text)(command))


def target_options(command: F, help_text: str = "An option of B's store (-o is for A's).") -> F:
    """Add ``--target-option``, for commands with a second url."""
    return _store_option("--target-option", "-t", help_text=help_text)(command)


portable_option = click.option(
    "--portable",
    "portable_dtypes",
    is_flag=True,
    help="Store bfloat16 and float8 as unsigned integers, for readers that know neither.",
)


def header_option(command: F) -> F:
    """Add ``--header``, for commands that print a table, see :func:`print_table`."""

    def note(ctx: click.Context, param: click.Parameter, given: bool) -> None:
        ctx.meta[_HEADER] = given

    text = "Print the names of the columns, also into a pipe."
    return click.option("--header", is_flag=True, expose_value=False, callback=note, help=text)(command)


_HEADER = "zarrckpt.header"


def run_options(command: F) -> F:
    """Add ``--step``, ``--best`` and ``--mode``, for commands that accept the url of a run, see :func:`call_in_run`."""

    def note(ctx: click.Context, param: click.Parameter, given: Any) -> None:
        ctx.meta[f"{_RUN}.{param.name}"] = given

    def option(name: str, **settings: Any) -> Callable[[F], F]:
        return click.option(name, expose_value=False, callback=note, **settings)

    mode_text = "Whether the smallest or the greatest metric is the best."
    mode = option("--mode", type=click.Choice(["min", "max"]), default="min", show_default=True, help=mode_text)
    best = option("--best", metavar="METRIC", help="For a run: the checkpoint with the best metric.")
    step = option(
        "--step", type=click.IntRange(0), help="For a run: the checkpoint of this step (default: the newest)."
    )
    return step(best(mode(command)))


_RUN = "zarrckpt.run"


def call_in_run(call: Callable[..., T], url: str, storage_options: Mapping[str, Any] | None, **more: Any) -> T:
    """Call a function with the url of a checkpoint, or of a checkpoint of the run at this url.

    This is the newest one, or the one that ``--step`` or ``--best`` selects. Its url is printed. If damaged ones were
    skipped, :func:`skipped_damage` returns True.
    """
    meta = click.get_current_context().meta
    step, metric, mode = (meta[f"{_RUN}.{name}"] for name in ("step", "best", "mode"))
    options: Any = {"storage_options": storage_options}
    if step is not None and metric is not None:
        raise click.UsageError("--step and --best select two checkpoints: pass one of them")
    if metric is not None:
        with warnings_as_lines():
            chosen = zarrckpt.best(url, metric, mode, **options)
    elif step is not None:
        chosen = _find_step(url, storage_options, step)
    else:
        try:
            return call(url, **options, **more)
        except (CheckpointNotFoundError, ForeignObjectsError):
            if (chosen := _find_newest(url, storage_options)) is None:
                raise
    if chosen is None:
        raise CheckpointNotFoundError(
            f"no checkpoint of the run {url} has {f'the step {step}' if metric is None else f'a finite {metric!r}'}. "
            f"List them: zarrckpt ls {url}"
        )
    print_line(f"the checkpoint {chosen} of the run:", err=True)
    return call(chosen, **options, **more)


def skipped_damage() -> bool:
    """Whether :func:`call_in_run` skipped damaged checkpoints that are newer than the one that it found."""
    return bool(click.get_current_context().meta.get(_RUN))


def _find_newest(run: str, storage_options: Mapping[str, Any] | None) -> str | None:
    """Return the url of the newest checkpoint of a run as ``zarrckpt.latest``, or None at the url of a checkpoint."""
    from zarrckpt._commit.listings import list_below
    from zarrckpt._runs.folders import newest_below, skip_warning
    from zarrckpt._store import StoreSpec, join_url

    store = StoreSpec(run, storage_options).open()
    listed = list_below(store)
    name, damaged = (None, []) if listed.has_save else newest_below(store, listed.folders)
    for below in damaged:
        print_line(f"warning: {skip_warning(store, below)}", err=True)
    click.get_current_context().meta[_RUN] = any(not below.unreadable for below in damaged)
    return None if name is None else join_url(run, name)


def _find_step(run: str, storage_options: Mapping[str, Any] | None, step: Any) -> str | None:
    """Return the url of a step's folder in a run, or None. One listing."""
    from zarrckpt._commit.discovery import number_in
    from zarrckpt._commit.listings import list_below
    from zarrckpt._store import StoreSpec, join_url

    folders = list_below(StoreSpec(run, storage_options).open()).folders
    names = [name for name in folders if number_in(name) == step]
    if len(names) > 1:
        raise click.UsageError(f"--step {step} matches {', '.join(names)} in {run}: pass the url of one of them")
    return join_url(run, names[0]) if names else None


def open_checkpoint(url: str, storage_options: Mapping[str, Any] | None, patterns: Iterable[str] = ()) -> Checkpoint:
    """Open the checkpoint at a url, or its entries that match the patterns."""
    ckpt = zarrckpt.open(url, storage_options=storage_options)
    selected = tuple(patterns)
    return ckpt.select(*selected) if selected else ckpt


def open_second(url: str, target_options: Mapping[str, Any] | None, first: Mapping[str, Any] | None) -> Checkpoint:
    """Open the checkpoint at a second url, by default with the first url's options unless it is a local path."""
    from zarrckpt._store._url import parse

    if target_options is None and parse(url).kind != "local":
        return open_checkpoint(url, first)
    with name_target_option():
        return open_checkpoint(url, target_options)


@contextmanager
def name_target_option() -> Iterator[None]:
    """Replace ``storage_options`` by ``--target-option`` in messages of errors."""
    try:
        yield
    except StorageError as err:
        if "storage_options" not in str(err):
            raise
        raise type(err)(str(err).replace("storage_options", "--target-option")) from err


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


def print_line(text: str, **more: Any) -> None:
    """Print a line. Control characters are escaped, because texts can come from the checkpoint."""
    click.echo(one_line(text), **more)


def print_json(value: Any) -> None:
    """Print strict JSON on one line, in ASCII. Numbers that JSON cannot represent become strings."""
    click.echo(json.dumps(_jsonable(value), allow_nan=False))


_MAX_BITS = 10_000
"""Integers with more bits are printed in hexadecimal. By default Python refuses to write more than 4,300 decimal
digits, about 14,000 bits."""


def _jsonable(value: Any) -> Any:
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
    columns: Sequence[str], rows: Iterable[Sequence[str]], right: Iterable[str] = (), cut: str | None = None
) -> None:
    """Print a table. On a terminal it has aligned columns, and a header.

    In a pipe, columns are separated by tabs, and the header is printed only with ``--header``. If the terminal is
    narrower than the table, the cells of the column ``cut`` are shortened.
    """
    listed = [list(map(one_line, row)) for row in rows]
    if not sys.stdout.isatty():
        headed = click.get_current_context().meta.get(_HEADER)
        for row in [columns, *listed] if headed else listed:
            click.echo("\t".join(row))
        return
    if not listed:
        return
    widths = [max(map(_width, column)) for column in zip(columns, *listed, strict=True)]
    if cut is not None:
        index = columns.index(cut)
        space = shutil.get_terminal_size().columns - (sum(widths) - widths[index] + 2 * len(widths) - 2)
        widths[index] = max(min(widths[index], space), len(cut))
        for row in listed:
            row[index] = _shorten_cell(row[index], widths[index])
    numbers = {*right}
    click.secho(_aligned_cells(columns, columns, widths, numbers), dim=True)
    for row in listed:
        click.echo(_aligned_cells(columns, row, widths, numbers))


def _aligned_cells(columns: Sequence[str], cells: Sequence[str], widths: Sequence[int], right: set[str]) -> str:
    parts = []
    for name, cell, width in zip(columns, cells, widths, strict=True):
        space = " " * (width - _width(cell))
        parts.append(space + cell if name in right else cell + space)
    return "  ".join(parts).rstrip()


def _width(text: str) -> int:
    """Return the number of terminal columns of a text."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def _shorten_cell(text: str, width: int) -> str:
    if _width(text) <= width:
        return text
    while text and _width(text) >= width:
        text = text[:-1]
    return f"{text}…"


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
