"""Declare commands, the options that they share, and the checkpoints that these select."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import click

import zarrckpt
from zarrckpt._errors import CheckpointNotFoundError, ForeignObjectsError
from zarrckpt.cli import _output as out

if TYPE_CHECKING:
    from zarrckpt._checkpoint import Checkpoint

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")


def command(name: str, **settings: Any) -> Callable[[Callable[..., None]], click.Command]:
    """Make a function a command. The annotation of each parameter has its option: ``Annotated[bool, flag(...)]``."""

    def decorate(function: Callable[..., None]) -> click.Command:
        # Not typing.get_type_hints, which takes three times as long, and --help reads all commands.
        for parameter, hint in reversed(inspect.get_annotations(function, eval_str=True).items()):
            if parameter != "return":
                hint.__metadata__[0](parameter)(function)  # adds the option to the function
        return click.command(name, cls=click.Command, **settings)(function)

    return decorate


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


Declaration = Callable[[str], Callable[[Any], Any]]
"""Returns a decorator of click for the name of a parameter."""


def argument(metavar: str | None = None, **settings: Any) -> Declaration:
    return lambda name: click.argument(name, metavar=metavar, **settings)


def option(text: str, *names: str, **settings: Any) -> Declaration:
    """Return an option with a help text. Without names, it has the name of the parameter."""
    return lambda name: click.option(*names or [f"--{name.replace('_', '-')}"], name, help=text, **settings)


def flag(text: str, *names: str) -> Declaration:
    return option(text, *names, is_flag=True)


def store_option(text: str, *names: str) -> Declaration:
    return option(text, *names, metavar="NAME=VALUE", multiple=True, callback=parse_options)


def storage_option(*letters: str) -> Declaration:
    """Return ``--storage-option``, the options of the store of a command's first url."""
    text = f"An option of the store, as in storage_options= (repeatable), for example {letters[0]} "
    return store_option(f"{text}endpoint_url=http://localhost:9000", "--storage-option", *letters)


def target_option(text: str) -> Declaration:
    """Return ``--target-option``, for commands with a second url."""
    return store_option(text, "--target-option", "-t")


def run_options(_: str) -> Callable[[F], F]:
    """Return ``--step``, ``--best`` and ``--mode``, for commands that accept the url of a run: :func:`call_in_run`."""
    text = "For a run: the checkpoint of this step (default: the newest)."
    step = click.option("--step", type=click.IntRange(0), help=text)
    best = click.option("--best", metavar="METRIC", help="For a run: the checkpoint with the best metric.")
    text = "Whether the smallest or the greatest metric is the best."
    mode = click.option("--mode", type=click.Choice(["min", "max"]), default="min", show_default=True, help=text)
    return lambda function: step(best(mode(function)))


_PORTABLE = "Store bfloat16 and float8 as unsigned integers, for readers that know neither."

Url = Annotated[str, argument()]
Patterns = Annotated[tuple[str, ...], argument("[PATTERN]...", nargs=-1)]
Include = Annotated[tuple[str, ...], option("Only these entries (repeatable).", multiple=True, metavar="PATTERN")]
Exclude = Annotated[tuple[str, ...], option("All except these (repeatable).", multiple=True, metavar="PATTERN")]
Portable = Annotated[bool, flag(_PORTABLE, "--portable")]
Replace = Annotated[bool, flag("Replace an existing checkpoint.")]
Header = Annotated[bool, flag("Print the names of the columns, also into a pipe.")]
StorageOptions = Annotated[Any, storage_option("-o", "-O")]
AsJson = Annotated[bool, flag("Print JSON, for scripts.", "--json")]
InRun = Annotated[Any, run_options]

_SKIPPED = "zarrckpt.skipped"


def call_in_run(
    call: Callable[..., T],
    url: str,
    storage_options: Mapping[str, Any] | None,
    *,
    step: int | None,
    best: str | None,
    mode: Any,
    **more: Any,
) -> T:
    """Call a function with the url of a checkpoint, or of a checkpoint of the run at this url.

    This is the newest one, or the one that ``--step`` or ``--best`` selects. Its url is printed. If damaged ones were
    skipped, :func:`skipped_damage` returns True.
    """
    options: Any = {"storage_options": storage_options}
    if step is not None and best is not None:
        raise click.UsageError("--step and --best select two checkpoints: pass one of them")
    if best is not None:
        with out.warnings_as_lines():
            chosen = zarrckpt.best(url, best, mode, **options)
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
            f"no checkpoint of the run {url} has {f'the step {step}' if best is None else f'a finite {best!r}'}. "
            f"List them: zarrckpt ls {url}"
        )
    out.print_line(f"the checkpoint {chosen} of the run:", err=True)
    return call(chosen, **options, **more)


def skipped_damage() -> bool:
    """Whether :func:`call_in_run` skipped damaged checkpoints that are newer than the one that it found."""
    return bool(click.get_current_context().meta.get(_SKIPPED))


def _find_newest(run: str, storage_options: Mapping[str, Any] | None) -> str | None:
    """Return the url of the newest checkpoint of a run as ``zarrckpt.latest``, or None at the url of a checkpoint."""
    from zarrckpt._commit.listings import list_below
    from zarrckpt._runs.folders import newest_below, skip_warning
    from zarrckpt._store import StoreSpec, join_url

    store = StoreSpec(run, storage_options).open()
    listed = list_below(store)
    name, damaged = (None, []) if listed.has_save else newest_below(store, listed.folders)
    for below in damaged:
        out.print_line(f"warning: {skip_warning(store, below)}", err=True)
    click.get_current_context().meta[_SKIPPED] = any(not below.unreadable for below in damaged)
    return None if name is None else join_url(run, name)


def _find_step(run: str, storage_options: Mapping[str, Any] | None, step: int) -> str | None:
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
    return ckpt.select(*patterns) if patterns else ckpt


def open_second(url: str, target_options: Mapping[str, Any] | None, first: Mapping[str, Any] | None) -> Checkpoint:
    """Open the checkpoint at a second url, by default with the first url's options unless it is a local path."""
    from zarrckpt._store._url import parse

    options = first if target_options is None and parse(url).kind != "local" else target_options
    return open_checkpoint(url, options)
