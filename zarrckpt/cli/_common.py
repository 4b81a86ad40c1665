"""What the commands share: options of stores, output for people or as JSON, progress."""

from __future__ import annotations

import json
import math
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from zarrckpt._errors import one_line

if TYPE_CHECKING:
    from zarrckpt._checkpoint import Checkpoint
    from zarrckpt._jobs import Progress

F = TypeVar("F", bound=Callable[..., Any])


def parsed_options(ctx: click.Context, param: click.Parameter, given: Sequence[str]) -> dict[str, Any] | None:
    """``NAME=VALUE`` words as a mapping; values are JSON where they can be, else text."""
    found: dict[str, Any] = {}
    for item in given:
        name, equals, text = item.partition("=")
        if not equals or not name:
            raise click.BadParameter(f"{item!r} is not NAME=VALUE")
        try:
            found[name] = json.loads(text)
        except ValueError:
            found[name] = text
    return found or None


def store_options(command: F, letters: Sequence[str] = ("-o", "-O")) -> F:
    """``--storage-option``, which every command has that opens a url."""
    option = click.option(
        "--storage-option",
        *letters,
        "storage_options",
        metavar="NAME=VALUE",
        multiple=True,
        callback=parsed_options,
        help="An option of the store, as in storage_options= (repeatable), e.g. "
        f"{letters[0]} endpoint_url=http://localhost:9000",
    )
    return option(command)


def target_options(command: F, said: str = "An option of B's store; -o is A's.") -> F:
    """``--target-option``, for commands with a second url."""
    option = click.option(
        "--target-option",
        "-t",
        "target_options",
        metavar="NAME=VALUE",
        multiple=True,
        callback=parsed_options,
        help=said,
    )
    return option(command)


def portable_option(command: F) -> F:
    option = click.option(
        "--portable",
        "portable_dtypes",
        is_flag=True,
        help="Store bfloat16 and float8 as unsigned integers, for readers that know neither.",
    )
    return option(command)


def json_option(command: F) -> F:
    """``--json``."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON, for scripts.")(command)


def header_option(command: F) -> F:
    """``--header``, for commands that print a table: see :func:`print_table`."""

    def note(ctx: click.Context, param: click.Parameter, given: bool) -> None:
        ctx.meta[_HEADER] = given

    said = "Into a pipe, too: begin with the names of the columns."
    return click.option("--header", is_flag=True, expose_value=False, callback=note, help=said)(command)


_HEADER = "zarrckpt.header"


def opened(url: str, storage_options: Mapping[str, Any] | None, patterns: Iterable[str] = ()) -> Checkpoint:
    """The checkpoint at a url, or the part of it that patterns mean."""
    import zarrckpt

    with hints(url):
        ckpt = zarrckpt.open(url, storage_options=storage_options)
    wanted = tuple(patterns)
    return ckpt.select(*wanted) if wanted else ckpt


def opened_beside(url: str, target_options: Mapping[str, Any] | None, first: Mapping[str, Any] | None) -> Checkpoint:
    """The checkpoint at a second url; without options of its own, and no local path, with those of the first."""
    from zarrckpt._store._url import parse

    if target_options is None and parse(url).kind != "local":
        return opened(url, first)
    with of_target_options():
        return opened(url, target_options)


@contextmanager
def of_target_options() -> Iterator[None]:
    """An error about an option says that it was ``--target-option``."""
    from zarrckpt._errors import StorageError

    try:
        yield
    except StorageError as err:
        if "storage_options" not in str(err):
            raise
        raise type(err)(str(err).replace("storage_options", "--target-option")) from err


@contextmanager
def hints(url: str) -> Iterator[None]:
    """Where there are other libraries' files at the url, and no checkpoint, its error says so."""
    from zarrckpt._errors import CheckpointNotFoundError, ForeignObjectsError

    try:
        yield
    except (CheckpointNotFoundError, ForeignObjectsError) as err:
        if said := _files_of_others(url):
            raise type(err)(f"{err}. {said}: `zarrckpt import {url} URL` saves it as a checkpoint") from err
        raise


def _files_of_others(url: str) -> str:
    """Name the files of other libraries at a local path, for people; "" for none, and for a url."""
    from zarrckpt._store._url import parse

    if (found := parse(url)).kind != "local":
        return ""
    place = Path(found.path)
    if place.is_file():
        kinds = {".safetensors": "safetensors", **dict.fromkeys((".pt", ".pth", ".bin"), "PyTorch")}
        return f"It is a {kinds[place.suffix]} file" if place.suffix in kinds else ""
    if (place / ".metadata").is_file():
        return "It is a folder of torch.distributed.checkpoint"
    return "It is a folder of safetensors files" if any(place.glob("*.safetensors")) else ""


def say(text: str, **more: Any) -> None:
    """Print a line; what is in it may come from the checkpoint."""
    click.echo(one_line(text), **more)


def print_json(value: Any) -> None:
    """Strict JSON on one line, in ASCII; numbers that JSON lacks as strings."""
    click.echo(json.dumps(_jsonable(value), allow_nan=False))


_MOST_BITS = 10_000
"""Python writes integers of 4,300 decimal digits at most, about 14,000 bits, unless told otherwise."""


def _jsonable(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, int) and value.bit_length() > _MOST_BITS:
        return hex(value)
    if isinstance(value, Mapping):
        return {str(key): _jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_jsonable(item) for item in value]
    return value if value is None or isinstance(value, bool | int | float | str) else repr(value)


def print_table(
    columns: Sequence[str], rows: Iterable[Sequence[str]], right: Iterable[str] = (), cut: str | None = None
) -> None:
    """Aligned columns; into a pipe, tabs between them, and a header with ``--header`` alone.

    Where the terminal is narrower than the table, the cells of the column ``cut`` are shortened.
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
        place = columns.index(cut)
        room = shutil.get_terminal_size().columns - (sum(widths) - widths[place] + 2 * len(widths) - 2)
        widths[place] = max(min(widths[place], room), len(cut))
        for row in listed:
            row[place] = _shortened(row[place], widths[place])
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
    """How many columns of a terminal a text takes."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def _shortened(text: str, width: int) -> str:
    if _width(text) <= width:
        return text
    while text and _width(text) >= width:
        text = text[:-1]
    return f"{text}…"


def shown(number: float) -> str:
    """A number for a table: integers in full, others with five digits, "-" for NaN."""
    if isinstance(number, int):
        return str(number)
    return "-" if math.isnan(number) else f"{number:.5g}"


@contextmanager
def progress_bar(what: str) -> Iterator[Progress | None]:
    """A bar on the terminal while something long runs; None where nobody looks."""
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
