"""``stats`` and ``diff``: the numbers of tensors, and how those of two checkpoints differ."""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from zarrckpt.cli._common import (
    header_option,
    json_option,
    opened,
    opened_beside,
    print_json,
    print_table,
    progress_bar,
    say,
    shown,
    store_options,
    target_options,
)

if TYPE_CHECKING:
    from zarrckpt._inspect.stats import Difference, TensorDifference

_ORDERS = ("name", "nan", "inf", "min", "max", "mean", "std", "norm", "zeros")


@click.command("stats")
@click.argument("url")
@click.argument("patterns", nargs=-1, metavar="[PATTERN]...")
@click.option("--sort", type=click.Choice(_ORDERS), default="name", help="Greatest first, or as saved (name).")
@header_option
@json_option
@store_options
def stats_command(url: str, patterns: tuple[str, ...], sort: str, as_json: bool, storage_options: Any) -> None:
    """Min, max, mean, std, norm, share of zeros, NaN and inf of each tensor. Reads them all, in bounded memory.

    Exits with 1 where any tensor has NaN or inf.

    \b
    Examples:
      zarrckpt stats run/step-100 --sort nan
      zarrckpt stats run/step-100 'model.layers.*.weight' --json
    """
    ckpt = opened(url, storage_options, patterns)
    with progress_bar("reading") as progress:
        found = ckpt.stats(progress=progress)
    if sort != "name":
        found = dict(sorted(found.items(), key=lambda item: -_sortable(getattr(item[1], sort))))
    if as_json:
        print_json({fqn: dataclasses.asdict(item) for fqn, item in found.items()})
    else:
        columns = ("name", "min", "max", "mean", "std", "norm", "zeros", "nan", "inf")
        rows = []
        for fqn, item in found.items():
            numbers = [shown(getattr(item, name)) for name in columns[1:6]]
            rows.append([fqn, *numbers, _share(item.zeros, item.count), str(item.nan), str(item.inf)])
        print_table(columns, rows, right=columns[1:])
        if not rows:
            click.echo("no tensors among them", err=True)
    if any(item.nan or item.inf for item in found.values()):
        click.get_current_context().exit(1)


def _sortable(number: float) -> float:
    return -math.inf if math.isnan(number) else number


def _share(part: int, whole: int) -> str:
    return "-" if not whole else f"{100 * part / whole:.3g}%"


@click.command("diff")
@click.argument("one", metavar="A")
@click.argument("other", metavar="B")
@click.argument("patterns", nargs=-1, metavar="[PATTERN]...")
@click.option("--all", "everything", is_flag=True, help="List equal tensors, too.")
@partial(target_options, said="An option of B's store (default: A's, but for a local path); -o is A's.")
@header_option
@json_option
@store_options
def diff_command(
    one: str,
    other: str,
    patterns: tuple[str, ...],
    everything: bool,
    target_options: Any,
    as_json: bool,
    storage_options: Any,
) -> None:
    """Compare two checkpoints: keys, shapes, dtypes, values, and how far tensors are apart.

    Exits with 1 where they differ. Chunks may differ: numbers are compared. So may floating dtypes: then "beyond
    rounding" counts the elements that are more than rounded, and a difference in dtype alone counts as one. "nan or
    inf" counts the unequal elements that are so in A or B, which the differences beside it leave out.

    \b
    Examples:
      zarrckpt diff run/step-100 s3://bucket/run/step-100
      zarrckpt diff run/step-100 run/step-200 'model.*' --json
    """
    ckpts = opened(one, storage_options), opened_beside(other, target_options, storage_options)
    with progress_bar("comparing") as progress:
        found = ckpts[0].diff(ckpts[1], *patterns, progress=progress)
    if as_json:
        print_json(dataclasses.asdict(found))
    else:
        _print_difference(found, everything)
    click.get_current_context().exit(0 if found else 1)


def _print_difference(found: Difference, everything: bool) -> None:
    from zarrckpt._reports import count_text

    for mark, names in (("-", found.only_here), ("+", found.only_there)):
        for name in names:
            say(f"{mark} {name}")
    for name, (here, there) in found.changed.items():
        say(f"! {name}: {here} -> {there}")
    rows = [(name, *_cells(item)) for name, item in found.tensors.items() if everything or not item.equal]
    columns = ("name", "unequal", "nan or inf", "max abs", "max rel", "cosine", "dtype", "beyond rounding")
    print_table(columns, rows, right=[*columns[1:6], columns[7]])
    unequal = [item for item in found.tensors.values() if not item.equal]
    same = f"{count_text(len(found.tensors) - len(unequal), 'tensor')} equal, {len(unequal):,} not"
    rounded = sum(not item.beyond_rounding for item in unequal)
    if rounded:
        same += f" ({rounded:,} only rounded to another dtype)"
    others = f"{count_text(len(found.changed), 'other entry', 'other entries')} changed"
    click.echo(f"{same}; {others}; {len(found.only_here):,} only in A, {len(found.only_there):,} only in B", err=True)


def _cells(item: TensorDifference) -> tuple[str, ...]:
    cosine = "-" if math.isnan(item.cosine) else f"{item.cosine:.9f}"
    here, there = item.dtypes
    dtypes = (here, "-") if here == there else (f"{here} -> {there}", f"{item.beyond_rounding:,}")
    counts = _share(item.unequal, item.count), f"{item.not_finite:,}"
    return *counts, shown(item.max_abs), shown(item.max_rel), cosine, *dtypes
