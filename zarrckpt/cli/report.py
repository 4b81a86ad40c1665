"""``report``: a checkpoint, or two beside each other, as one HTML page."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import click

from zarrckpt.cli._common import (
    json_option,
    opened,
    opened_beside,
    print_json,
    progress_bar,
    say,
    store_options,
    target_options,
)

_NAMED = 5


@click.command("report")
@click.argument("url")
@click.argument("other", required=False, metavar="[OTHER]")
@click.option("--output", "-o", default="report.html", show_default=True, metavar="FILE", help="The page.")
@click.option("--include", multiple=True, metavar="PATTERN", help="Only these entries (repeatable).")
@click.option("--exclude", multiple=True, metavar="PATTERN", help="All but these (repeatable).")
@click.option("--no-values", is_flag=True, help="Show the layout alone; read no tensor.")
@click.option("--overwrite", "--force", "-f", is_flag=True, help="Replace a page that is there.")
@partial(target_options, said="An option of OTHER's store (default: URL's, but for a local path).")
@json_option
@partial(store_options, letters=["-O"])
def report_command(
    url: str,
    other: str | None,
    output: str,
    include: tuple[str, ...],
    exclude: tuple[str, ...],
    no_values: bool,
    overwrite: bool,
    target_options: Any,
    as_json: bool,
    storage_options: Any,
) -> None:
    """Draw a checkpoint as one HTML page, or compare it with OTHER on one. The page needs no network.

    Sizes as a tree map; of each tensor its numbers, a histogram, outliers, NaN and inf, and which rank wrote which of
    its chunks; values. Reads everything once, in bounded memory; with --no-values only what the tensors are.

    \b
    Examples:
      zarrckpt report run/step-100
      zarrckpt report run/step-100 run/step-200 -o changes.html
      zarrckpt report s3://bucket/run/step-100 --no-values -O region=eu-west-1
    """
    from zarrckpt._reports import count_text, size_text

    ckpt = opened(url, storage_options)
    another = None if other is None else opened_beside(other, target_options, storage_options)
    options: dict[str, Any] = {"include": include, "exclude": exclude, "values": not no_values, "overwrite": overwrite}
    with progress_bar("reading") as progress:
        found = ckpt.report(output, another, **options, progress=progress)
    if as_json:
        print_json(dataclasses.asdict(found))
        return
    say(f"{found.path}: {count_text(found.tensors, 'tensor')}, {size_text(found.nbytes)}")
    if found.broken:
        more = f" and {len(found.broken) - _NAMED} more" if len(found.broken) > _NAMED else ""
        say(f"NaN or inf in {', '.join(found.broken[:_NAMED])}{more}")
