"""The command ``report``: one HTML page of a checkpoint, or of two for comparison."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import click

import zarrckpt
from zarrckpt._reports import count_text, size_text
from zarrckpt.cli._common import (
    open_checkpoint,
    open_second,
    print_json,
    print_line,
    progress_bar,
    target_options,
    url_options,
)

_NAMED = 5


@click.command("report")
@click.argument("url")
@click.argument("other", required=False, metavar="[OTHER]")
@click.option("--output", "-o", default="report.html", show_default=True, metavar="FILE", help="File of the page.")
@click.option("--include", multiple=True, metavar="PATTERN", help="Only these entries (repeatable).")
@click.option("--exclude", multiple=True, metavar="PATTERN", help="All except these (repeatable).")
@click.option("--no-values", is_flag=True, help="Show only the layout, and read no tensor.")
@click.option("--overwrite", "--force", "-f", is_flag=True, help="Replace an existing page.")
@partial(target_options, help_text="An option of OTHER's store (default: URL's options, except for a local path).")
@partial(url_options, letters=["-O"])
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
    """Write an HTML page of a checkpoint, or of its comparison with OTHER. The page needs no network.

    The page shows a tree map of sizes, and all values. For each tensor it shows statistics, a histogram, outliers, NaN
    and inf, and the rank that wrote each chunk. All data is read once, in bounded memory. With --no-values no tensor is
    read.

    \b
    Examples:
      zarrckpt report run/step-100
      zarrckpt report run/step-100 run/step-200 -o changes.html
      zarrckpt report s3://bucket/run/step-100 --no-values -O region=eu-west-1
    """
    ckpt = open_checkpoint(url, storage_options)
    another = None if other is None else open_second(other, target_options, storage_options)
    options: dict[str, Any] = {"include": include, "exclude": exclude, "values": not no_values, "overwrite": overwrite}
    with progress_bar("reading") as progress:
        found = zarrckpt.report(ckpt, output, another, **options, progress=progress)
    if as_json:
        print_json(dataclasses.asdict(found))
        return
    print_line(f"{found.path}: {count_text(found.tensors, 'tensor')}, {size_text(found.nbytes)}")
    if found.broken:
        more = f" and {len(found.broken) - _NAMED} more" if len(found.broken) > _NAMED else ""
        print_line(f"NaN or inf in {', '.join(found.broken[:_NAMED])}{more}")
