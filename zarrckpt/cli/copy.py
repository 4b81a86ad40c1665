"""``cp``: to other places, rearranged if need be."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import click

from zarrckpt._errors import CheckpointError
from zarrckpt.cli._common import (
    json_option,
    of_target_options,
    opened,
    portable_option,
    print_json,
    progress_bar,
    say,
    store_options,
    target_options,
)

_COMPRESSIONS = {None: "keep", "none": None}
"""What ``copy_to`` takes for words that are no codec's name."""


def by_pattern(parse: Callable[[str], Any]) -> Callable[[click.Context, click.Parameter, Sequence[str]], Any]:
    """A callback for a repeatable option: None, one value for all, or a mapping pattern -> value."""

    def parsed(ctx: click.Context, param: click.Parameter, given: Sequence[str]) -> Any:
        plain = [text for text in given if "=" not in text]
        if plain and len(given) > 1:
            raise click.BadParameter(
                f"{plain[0]!r} holds for all tensors: give it alone, or each as PATTERN={plain[0]}"
            )
        try:
            if plain:
                return parse(plain[0])
            pairs = [text.rpartition("=") for text in given]
            return {pattern: parse(value) for pattern, _, value in pairs} or None
        except (TypeError, ValueError) as err:
            raise click.BadParameter(str(err)) from err

    return parsed


def shape(text: str) -> tuple[int, ...]:
    """``1024,-1`` as a shape. Raises ValueError."""
    from zarrckpt._ops.copy_plan import parse_shape

    try:
        extents = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"{text!r} is no shape such as 1024,-1") from None
    return parse_shape(extents)


def dtype(text: str) -> str:
    """A dtype's name. Raises ValueError and TypeError."""
    from zarrckpt._read.casts import parse_dtype

    return parse_dtype(text).name


@click.command("cp")
@click.argument("source", metavar="A")
@click.argument("target", metavar="B")
@click.option("--include", multiple=True, metavar="PATTERN", help="Only these entries (repeatable).")
@click.option("--exclude", multiple=True, metavar="PATTERN", help="All but these (repeatable).")
@click.option(
    "--chunks",
    metavar="[PATTERN=]SHAPE",
    multiple=True,
    callback=by_pattern(shape),
    help="Other chunks, e.g. 1024,-1 (-1: whole dimension).",
)
@click.option(
    "--max-chunk-mb",
    metavar="MB",
    type=click.FloatRange(0, min_open=True),
    help="Other chunks: those of a save by one process, at most so large.",
)
@click.option(
    "--dtype",
    metavar="[PATTERN=]DTYPE",
    multiple=True,
    callback=by_pattern(dtype),
    help="Cast floating tensors, e.g. 'model=bfloat16' (repeatable), or bfloat16 for all; not counters and single "
    "numbers such as Adam's step.",
)
@click.option("--compression", type=click.Choice(["zstd", "blosc", "none"]), help="Of all tensors; default: as it is.")
@portable_option
@click.option("--overwrite", is_flag=True, help="Replace a checkpoint that is there.")
@target_options
@json_option
@store_options
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
    """Copy a checkpoint between any stores, or some of its entries. All that is read is checked.

    Chunks stay as they are, unless an option says otherwise.

    \b
    Examples:
      zarrckpt cp s3://bucket/run/step-100 /data/step-100
      zarrckpt cp run/step-100 gs://bucket/weights --include model --exclude '*.bias'
      zarrckpt cp run/step-100 weights --include model --dtype bfloat16 --max-chunk-mb 64
      zarrckpt cp run/step-100 smaller --dtype model=bfloat16
      zarrckpt cp run/step-100 small --compression blosc
    """
    from zarrckpt._reports import count_text, size_text

    options |= {"storage_options": target_options, "compression": _COMPRESSIONS.get(compression, compression)}
    if max_chunk_mb is not None:
        options["max_chunk_bytes"] = max(1, int(max_chunk_mb * 1e6))
    ckpt = opened(source, storage_options).select(*include, exclude=exclude)
    with warnings_as_lines(), progress_bar("copying") as bar, of_target_options():
        report = ckpt.copy_to(target, progress=bar, **options)
    if as_json:
        print_json(dataclasses.asdict(report))
        return
    say(f"{count_text(report.objects, 'chunk')}, {size_text(report.nbytes)}, copied to {report.url}")
    say_uncast(report.uncast)


def say_uncast(names: Sequence[str]) -> None:
    """Print which floating tensors ``--dtype`` left as they are."""
    from zarrckpt._reports import count_text

    if names:
        some = ", ".join(names[:_UNCAST_NAMED]) + (", ..." if len(names) > _UNCAST_NAMED else "")
        say(f"not cast: {count_text(len(names), 'counter or single number', 'counters and single numbers')}: {some}")


_UNCAST_NAMED = 3
"""Names of tensors that are printed; --json has all."""


@contextmanager
def warnings_as_lines() -> Iterator[None]:
    """Print warnings as lines; raise wrong options as errors of usage."""
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield
    except CheckpointError:
        raise
    except ValueError as err:
        raise click.UsageError(str(err)) from err
    for warning in caught:
        say(f"warning: {warning.message}", err=True)
