"""The command ``cp``: copy a checkpoint, with other chunks, dtypes or compression if asked."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import click

import zarrckpt
from zarrckpt._reports import count_text, size_text
from zarrckpt.cli._common import (
    call_in_run,
    name_target_option,
    portable_option,
    print_json,
    print_line,
    progress_bar,
    run_options,
    target_options,
    url_options,
    warnings_as_lines,
)

_COMPRESSIONS = {None: "keep", "none": None}
"""The arguments of ``zarrckpt.copy`` for words that are not names of codecs."""


def by_pattern(parse: Callable[[str], Any]) -> Callable[[click.Context, click.Parameter, Sequence[str]], Any]:
    """Return a callback that parses a repeatable option into None, one value, or a mapping pattern -> value."""

    def parsed(ctx: click.Context, param: click.Parameter, given: Sequence[str]) -> Any:
        plain = [text for text in given if "=" not in text]
        if plain and len(given) > 1:
            raise click.BadParameter(f"{plain[0]!r} applies to all tensors: pass it alone, or as PATTERN={plain[0]}")
        try:
            if plain:
                return parse(plain[0])
            pairs = [text.rpartition("=") for text in given]
            return {pattern: parse(value) for pattern, _, value in pairs} or None
        except (TypeError, ValueError) as err:
            raise click.BadParameter(str(err)) from err

    return parsed


def shape(text: str) -> tuple[int, ...]:
    """Parse a shape such as ``1024,-1``. Raises ValueError."""
    from zarrckpt._ops.copy_plan import parse_shape

    try:
        extents = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"expected a shape such as 1024,-1, got {text!r}") from None
    return parse_shape(extents)


def dtype(text: str) -> str:
    """Return the name of a dtype, checked. Raises ValueError and TypeError."""
    from zarrckpt._read.casts import parse_dtype

    return parse_dtype(text).name


@click.command("cp")
@click.argument("source", metavar="A")
@click.argument("target", metavar="B")
@click.option("--include", multiple=True, metavar="PATTERN", help="Only these entries (repeatable).")
@click.option("--exclude", multiple=True, metavar="PATTERN", help="All except these (repeatable).")
@click.option(
    "--chunks",
    metavar="[PATTERN=]SHAPE",
    multiple=True,
    callback=by_pattern(shape),
    help="New shape of chunks, for example 1024,-1 (-1: the whole dimension).",
)
@click.option(
    "--max-chunk-mb",
    metavar="MB",
    type=click.FloatRange(0, min_open=True),
    help="New chunks of at most this size, as a save by one process chooses them.",
)
@click.option(
    "--dtype",
    metavar="[PATTERN=]DTYPE",
    multiple=True,
    callback=by_pattern(dtype),
    help="Cast floating tensors, for example 'model=bfloat16' (repeatable), or bfloat16 for all. Counters and single "
    "numbers such as Adam's step are not cast.",
)
@click.option(
    "--compression",
    type=click.Choice(["zstd", "blosc", "none"]),
    help="Compression of all tensors (default: unchanged).",
)
@portable_option
@click.option("--overwrite", is_flag=True, help="Replace an existing checkpoint.")
@run_options
@target_options
@url_options
def cp_command(
    source: str,
    target: str,
    include: tuple[str, ...],
    exclude: tuple[str, ...],
    max_chunk_mb: float | None,
    compression: str | None,
    target_options: Any,
    as_json: bool,
    storage_options: Any,
    **options: Any,
) -> None:
    """Copy a checkpoint, or some of its entries, between any stores. All data is checked.

    Without the options for chunks, dtypes and compression, chunks are copied unchanged. If A is a run, copy its newest
    checkpoint, or the one of --step or --best.

    \b
    Examples:
      zarrckpt cp s3://bucket/run/step-100 /data/step-100
      zarrckpt cp run best --best accuracy --mode max
      zarrckpt cp run/step-100 gs://bucket/weights --include model --exclude '*.bias'
      zarrckpt cp run/step-100 weights --include model --dtype bfloat16 --max-chunk-mb 64
      zarrckpt cp run/step-100 smaller --dtype model=bfloat16
      zarrckpt cp run/step-100 small --compression blosc
    """
    from zarrckpt._store import StoreSpec

    options |= {"storage_options": target_options, "compression": _COMPRESSIONS.get(compression, compression)}
    if max_chunk_mb is not None:
        options["max_chunk_bytes"] = max(1, int(max_chunk_mb * 1e6))
    ckpt = call_in_run(zarrckpt.open, source, storage_options).select(*include, exclude=exclude)
    with name_target_option():
        StoreSpec(target, target_options).open()  # checks the options
    with warnings_as_lines(), progress_bar("copying") as bar:
        report = zarrckpt.copy(ckpt, target, progress=bar, **options)
    if as_json:
        print_json(dataclasses.asdict(report))
        return
    print_line(f"{count_text(report.objects, 'chunk')}, {size_text(report.nbytes)}, copied to {report.url}")
    print_uncast(report.uncast)


def print_uncast(names: Sequence[str]) -> None:
    """Print the floating tensors that ``--dtype`` did not cast."""
    if names:
        some = ", ".join(names[:_UNCAST_NAMED]) + (", ..." if len(names) > _UNCAST_NAMED else "")
        print_line(
            f"not cast: {count_text(len(names), 'counter or single number', 'counters and single numbers')}: {some}"
        )


_UNCAST_NAMED = 3
"""Maximum number of names that are printed. ``--json`` prints all."""
