"""The command ``report``: one HTML page of a checkpoint, or of two for comparison."""

from __future__ import annotations

from typing import Annotated, Any

import zarrckpt
from zarrckpt._reports import count_text, size_text
from zarrckpt.cli import _output as out
from zarrckpt.cli import _params as params
from zarrckpt.cli._params import argument, flag, option, storage_option, target_option

_NAMED = 5
_FILE = "File of the page."
_TARGET = "An option of OTHER's store (default: URL's options, except for a local path)."


@params.command("report")
def report_command(
    url: params.Url,
    other: Annotated[str | None, argument("[OTHER]", required=False)],
    output: Annotated[str, option(_FILE, "--output", "-o", default="report.html", show_default=True, metavar="FILE")],
    include: params.Include,
    exclude: params.Exclude,
    no_values: Annotated[bool, flag("Show only the layout, and read no tensor.")],
    overwrite: Annotated[bool, flag("Replace an existing page.", "--overwrite", "--force", "-f")],
    target_options: Annotated[Any, target_option(_TARGET)],
    storage_options: Annotated[Any, storage_option("-O")],
    as_json: params.AsJson,
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
    ckpt = params.open_checkpoint(url, storage_options)
    another = None if other is None else params.open_second(other, target_options, storage_options)
    options: dict[str, Any] = {"include": include, "exclude": exclude, "values": not no_values, "overwrite": overwrite}
    with out.progress_bar("reading") as progress:
        found = zarrckpt.report(ckpt, output, another, **options, progress=progress)
    if as_json:
        out.print_json(found)
        return
    out.print_line(f"{found.path}: {count_text(found.tensors, 'tensor')}, {size_text(found.nbytes)}")
    if found.broken:
        more = f" and {len(found.broken) - _NAMED} more" if len(found.broken) > _NAMED else ""
        out.print_line(f"NaN or inf in {', '.join(found.broken[:_NAMED])}{more}")
