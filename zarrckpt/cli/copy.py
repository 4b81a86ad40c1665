"""The command ``cp``: copy a checkpoint, with other chunks, dtypes or compression if asked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any

import click

import zarrckpt
from zarrckpt._reports import count_text, size_text
from zarrckpt.cli import _output as out
from zarrckpt.cli import _params as params
from zarrckpt.cli._params import Declaration, argument, option, target_option

POSITIVE = click.FloatRange(0, min_open=True)

_CHUNKS = "New shape of chunks, for example 1024,-1 (-1: the whole dimension)."
_MAX_CHUNK = "New chunks of at most this size, as a save by one process chooses them."
_DTYPE = (
    "Cast floating tensors, for example 'model=bfloat16' (repeatable), or bfloat16 for all. Counters and single "
    "numbers such as Adam's step are not cast."
)
_COMPRESSION = "Compression of all tensors (default: unchanged)."
_COMPRESSIONS = {None: "keep", "none": None}
"""The arguments of ``zarrckpt.copy`` for words that are not names of codecs."""


def pattern_option(text: str, *names: str, parse: Callable[[str], Any], metavar: str) -> Declaration:
    """Return a repeatable option whose value is None, one parsed value, or a mapping pattern -> parsed value."""

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

    return option(text, *names, metavar=metavar, multiple=True, callback=parsed)


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


@params.command("cp")
def cp_command(
    source: Annotated[str, argument("A")],
    target: Annotated[str, argument("B")],
    include: params.Include,
    exclude: params.Exclude,
    chunks: Annotated[Any, pattern_option(_CHUNKS, parse=shape, metavar="[PATTERN=]SHAPE")],
    max_chunk_mb: Annotated[float | None, option(_MAX_CHUNK, metavar="MB", type=POSITIVE)],
    dtype: Annotated[Any, pattern_option(_DTYPE, parse=dtype, metavar="[PATTERN=]DTYPE")],
    compression: Annotated[str | None, option(_COMPRESSION, type=click.Choice(["zstd", "blosc", "none"]))],
    portable_dtypes: params.Portable,
    overwrite: params.Replace,
    target_options: Annotated[Any, target_option("An option of B's store (-o is for A's).")],
    storage_options: params.StorageOptions,
    as_json: params.AsJson,
    **in_run: params.InRun,
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
    options: dict[str, Any] = {"chunks": chunks, "dtype": dtype, "portable_dtypes": portable_dtypes}
    if max_chunk_mb is not None:
        options["max_chunk_bytes"] = max(1, int(max_chunk_mb * 1e6))
    options["compression"] = _COMPRESSIONS.get(compression, compression)
    ckpt = params.call_in_run(zarrckpt.open, source, storage_options, **in_run).select(*include, exclude=exclude)
    with out.warnings_as_lines(), out.progress_bar("copying") as bar:
        report = zarrckpt.copy(
            ckpt, target, overwrite=overwrite, storage_options=target_options, progress=bar, **options
        )
    if as_json:
        out.print_json(report)
        return
    out.print_line(f"{count_text(report.objects, 'chunk')}, {size_text(report.nbytes)}, copied to {report.url}")
    print_uncast(report.uncast)


def print_uncast(names: Sequence[str]) -> None:
    """Print the floating tensors that ``--dtype`` did not cast."""
    if names:
        some = ", ".join(names[:_UNCAST_NAMED]) + (", ..." if len(names) > _UNCAST_NAMED else "")
        out.print_line(
            f"not cast: {count_text(len(names), 'counter or single number', 'counters and single numbers')}: {some}"
        )


_UNCAST_NAMED = 3
"""Maximum number of names that are printed. ``--json`` prints all."""
