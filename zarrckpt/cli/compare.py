"""The commands ``stats`` and ``diff``: statistics of tensors, and differences between two checkpoints."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import click

import zarrckpt
from zarrckpt._reports import count_text, share_text
from zarrckpt.cli import _output as out
from zarrckpt.cli import _params as params
from zarrckpt.cli._params import argument, flag, option, target_option

if TYPE_CHECKING:
    from zarrckpt._inspect.differences import Difference, Measures, TensorDifference
    from zarrckpt._inspect.stats import TensorStats

M = TypeVar("M", bound="Measures")

_CHANGES = ("name", "unequal", "not_finite", "new_nan", "max_abs", "max_rel", "rel_norm", "cosine")
_SORT = "Order by this column, largest first; name: as saved."
_TARGET = "An option of B's store (default: A's options, except for a local path; -o is for A's)."
_ORDERS = ("name", "nan", "inf", "min", "max", "mean", "std", "norm", "zeros")


@params.command("stats")
def stats_command(
    url: params.Url,
    patterns: params.Patterns,
    sort: Annotated[str, option(_SORT, type=click.Choice(_ORDERS), default="name")],
    header: params.Header,
    storage_options: params.StorageOptions,
    as_json: params.AsJson,
) -> None:
    """Show min, max, mean, std, norm, the share of zeros, and counts of NaN and inf of each tensor.

    Reads all these tensors, in bounded memory. Exits with 1 if any tensor has NaN or inf.

    \b
    Examples:
      zarrckpt stats run/step-100 --sort nan
      zarrckpt stats run/step-100 'model.layers.*.weight' --json
    """
    ckpt = params.open_checkpoint(url, storage_options, patterns)
    with out.progress_bar("reading") as progress:
        found = ckpt.stats(progress=progress)
    if sort != "name":
        found = dict(sorted(found.items(), key=lambda item: -_sortable(item[1], sort)))
    if as_json:
        out.print_json(found)
    else:
        columns = ("name", "min", "max", "mean", "std", "norm", "zeros", "nan", "inf")
        rows = []
        for fqn, item in found.items():
            numbers = [out.format_number(getattr(item, name)) for name in columns[1:6]]
            rows.append([fqn, *numbers, share_text(item.zeros, item.count), str(item.nan), str(item.inf)])
        out.print_table(columns, rows, header, right=columns[1:])
        if not rows:
            out.print_line("there are no tensors among these entries", err=True)
    if any(item.nan or item.inf for item in found.values()):
        click.get_current_context().exit(1)


def _sortable(item: TensorStats, column: str) -> float:
    number: float = getattr(item, column)
    if column == "zeros":  # shown as a share
        return number / item.count if item.count else -math.inf
    return -math.inf if math.isnan(number) else number


@params.command("diff")
def diff_command(
    one: Annotated[str, argument("A")],
    other: Annotated[str, argument("B")],
    patterns: params.Patterns,
    everything: Annotated[bool, flag("List equal tensors too.", "--all")],
    sort: Annotated[str, option("Most changed first; name: as saved.", type=click.Choice(_CHANGES), default="name")],
    groups: Annotated[bool, flag("Show totals by the first part of the names instead of the tensors.")],
    target_options: Annotated[Any, target_option(_TARGET)],
    header: params.Header,
    storage_options: params.StorageOptions,
    as_json: params.AsJson,
) -> None:
    """Compare the keys, shapes, dtypes, values and tensors of two checkpoints. Exits with 1 if they differ.

    Numbers are compared, integers exactly, so chunks can differ. If floating dtypes differ, "beyond rounding" counts
    the elements that a cast does not explain. A tensor with another dtype counts as different.

    "nan or inf" counts the unequal elements that are NaN or infinite in A or B. "nan" counts the elements that are NaN
    only in B (new), only in A (gone) and in both (common). The largest differences leave all of them out. "rel norm" is
    the norm of the difference over the norm of A. "rel norm" and "cosine" are "-" if any element became or ceased to be
    NaN or infinite. "at" is the position of the largest absolute difference.

    \b
    Examples:
      zarrckpt diff run/step-100 s3://bucket/run/step-100
      zarrckpt diff run/step-100 run/step-200 'model.*' --json
      zarrckpt diff run/step-100 run/step-200 --sort rel_norm
      zarrckpt diff run/step-100 run/step-200 --groups
    """
    ckpts = params.open_checkpoint(one, storage_options), params.open_second(other, target_options, storage_options)
    with out.progress_bar("comparing") as progress:
        found = zarrckpt.diff(*ckpts, *patterns, progress=progress)
    if sort != "name":
        found = dataclasses.replace(
            found, tensors=_by_change(found.tensors, sort), groups=_by_change(found.groups, sort)
        )
    if as_json:
        out.print_json(found)
    else:
        _print_difference(found, everything, groups, header)
    click.get_current_context().exit(0 if found else 1)


def _by_change(found: Mapping[str, M], sort: str) -> dict[str, M]:
    """Sort by a measure, most changed first. Elements that became or ceased to be NaN or inf count as infinite."""

    def change(item: Measures) -> float:
        number: float = getattr(item, sort)
        if sort == "unequal":  # shown as a share
            return number / item.count if item.count else -math.inf
        if math.isnan(number):
            return math.inf if item.not_finite else -math.inf
        return -number if sort == "cosine" else number

    return dict(sorted(found.items(), key=lambda pair: -change(pair[1])))


_MEASURES = ("unequal", "nan or inf", "nan", "max abs", "max rel", "rel norm", "cosine")


def _print_difference(found: Difference, everything: bool, groups: bool, header: bool) -> None:
    for mark, names in (("-", found.only_here), ("+", found.only_there)):
        for name in names:
            out.print_line(f"{mark} {name}")
    for name, (here, there) in found.changed.items():
        out.print_line(f"! {name}: {here} -> {there}")
    columns: tuple[str, ...] = ("group", *_MEASURES, "changed", "tensors")
    if groups:
        parts = ((name, item) for name, item in found.groups.items() if everything or item.changed)
        rows = [(name, *_cells(item), f"{item.changed:,}", f"{item.tensors:,}") for name, item in parts]
    else:
        columns = ("name", *_MEASURES, "at", "dtype", "beyond rounding")
        tensors = ((name, item) for name, item in found.tensors.items() if everything or not item.equal)
        rows = [(name, *_cells(item), *_tensor_cells(item)) for name, item in tensors]
    out.print_table(columns, rows, header, right=[name for name in columns[1:] if name not in ("at", "dtype")])
    unequal = [item for item in found.tensors.values() if not item.equal]
    same = f"{count_text(len(found.tensors) - len(unequal), 'tensor')} equal, {len(unequal):,} not"
    rounded = sum(not item.beyond_rounding for item in unequal)
    if rounded:
        same += f" ({rounded:,} only rounded to another dtype)"
    others = f"{count_text(len(found.changed), 'other entry', 'other entries')} changed"
    out.print_line(
        f"{same}; {others}; {len(found.only_here):,} only in A, {len(found.only_there):,} only in B", err=True
    )


def _cells(item: Measures) -> tuple[str, ...]:
    """Return the cells of the columns _MEASURES."""
    cosine = "-" if math.isnan(item.cosine) else f"{item.cosine:.9f}"
    nans = ((item.new_nan, "new"), (item.gone_nan, "gone"), (item.common_nan, "common"))
    nan = ", ".join(f"{count:,} {word}" for count, word in nans if count) or "-"
    counts = share_text(item.unequal, item.count), f"{item.not_finite:,}", nan
    return (
        *counts,
        out.format_number(item.max_abs),
        out.format_number(item.max_rel),
        out.format_number(item.rel_norm),
        cosine,
    )


def _tensor_cells(item: TensorDifference) -> tuple[str, ...]:
    here, there = item.dtypes
    at = "-" if item.max_abs_at is None else f"[{', '.join(map(str, item.max_abs_at))}]"
    return (at, *((here, "-") if here == there else (f"{here} -> {there}", f"{item.beyond_rounding:,}")))
