"""Results as tables and as a plot, put between two marker lines of a page."""

from __future__ import annotations

import importlib.util
import os
import platform
from dataclasses import replace
from itertools import groupby
from pathlib import Path

from benchmarks.results import Figure, Results, Speed

BEGIN = "<!-- benchmarks: begin -->"
END = "<!-- benchmarks: end -->"
PAGE = "# Speed\n\n"
"""The beginning of a new page."""

COLORS = {"ours": "#2f6f9f", "peer": "#b9c4cc", "limit": "#e3e6e8"}


def _number(value: float | None, unit: str = "") -> str:
    if value is None:
        return "-"
    digits = 0 if abs(value) >= 100 else 2 if abs(value) >= 1 else 3
    return f"{value:,.{digits}f}{f' {unit}' if unit else ''}"


def speed_table(speeds: list[Speed]) -> list[str]:
    """Return the rows of one group's contenders, for a save and a load: GB/s, the rate relative to the first contender
    (zarrckpt), requests, and the client's processor time per GB."""
    head = ["", "save GB/s", "relative", "load GB/s", "relative", "requests", "processor s/GB"]
    lines = [_row(head), _row(["---"] * len(head))]
    first = speeds[0]
    for speed in speeds:
        name = f"**{speed.name}**" if speed.kind == "ours" else speed.name
        if speed.save_rate is None:
            lines.append(_row([name, "not installed", *[""] * (len(head) - 2)]))
            continue
        shares = [f"{rate / own:.2f}x" for rate, own in _pairs(speed, first)]
        asked = [sum(stats.get("requests", {}).values()) for stats in (speed.saved, speed.loaded)]
        counts = f"{asked[0]}, {asked[1]}" if any(asked) else ""
        spent = [speed.processor_a_gigabyte(which) for which in ("save", "load")]
        processor = ", ".join(f"{seconds:.2f}" for seconds in spent if seconds is not None)
        loads = ["-", ""] if speed.load_rate is None else [f"{speed.load_rate:.2f}", shares[1]]
        rates = [f"{speed.save_rate:.2f}", shares[0], *loads]
        lines.append(_row([name, *rates, counts, processor]))
    return [*lines, ""]


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _pairs(speed: Speed, first: Speed) -> list[tuple[float, float]]:
    rates = ((speed.save_rate, first.save_rate), (speed.load_rate, first.load_rate))
    return [(rate or 0.0, own or float("inf")) for rate, own in rates]


def figure_table(figures: list[Figure]) -> list[str]:
    """Return rows of figures, their goals, and whether they are met."""
    lines = ["| | measured | goal | met | |", "|---|---|---|---|---|"]
    for figure in figures:
        sign = "at most" if figure.most else "at least"
        goal = "" if figure.goal is None else f"{sign} {_number(figure.goal, figure.unit)}"
        met = {True: "yes", False: "**no**", None: ""}[figure.met]
        lines.append(f"| {figure.what} | {_number(figure.value, figure.unit)} | {goal} | {met} | {figure.note} |")
    return [*lines, ""]


def machine() -> str:
    """Return the machine and the versions of the packages, as text."""
    packages = ("torch", "zarr", "tensorstore", "safetensors", "s3torchconnector", "s3fs")
    versions = [f"{name} {_version(name)}" for name in packages if _version(name)]
    return f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}, {', '.join(versions)}"


def _version(name: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def markdown(results: Results, heading: str) -> str:
    """Return all tables, with a heading for each group. One table has the goals of all groups of speeds."""
    goals = [figure for figure in results.figures if figure.goal is not None]
    lines = [heading, ""]
    if goals:
        lines += [f"Goals met: {sum(figure.met is True for figure in goals)} of {len(goals)}.", ""]
    speeds = {group: list(found) for group, found in groupby(results.speeds, key=lambda speed: speed.group)}
    for group, found in speeds.items():
        lines += [*_heading(group), *speed_table(found)]
    compared = [replace(one, what=f"{one.group}: {one.what}") for one in results.figures if one.group in speeds]
    if compared:
        lines += [*_heading("goals of these speeds"), *figure_table(compared)]
    for group in dict.fromkeys(figure.group for figure in results.figures if figure.group not in speeds):
        lines += [*_heading(group), *figure_table([figure for figure in results.figures if figure.group == group])]
    return "\n".join(lines)


def _heading(group: str) -> list[str]:
    return [f"### {group[0].upper()}{group[1:]}", ""]


def write_page(results: Results, heading: str, page: Path) -> None:
    """Replace the tables and the plot between the marker lines of the page."""
    text = page.read_text() if page.exists() else f"{PAGE}{BEGIN}\n{END}\n"
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    drawn = plot(results, page.with_suffix(".svg"))
    picture = f"![GB/s of every contender]({page.with_suffix('.svg').name})\n\n" if drawn else ""
    page.write_text(f"{before}{BEGIN}\n\n{picture}{markdown(results, heading)}{END}{after}")


def plot(results: Results, path: Path) -> bool:
    """Draw bars of every group's saves and loads. Return False if there are none, or without matplotlib."""
    groups = [list(speeds) for _, speeds in groupby(results.speeds, key=lambda speed: speed.group)]
    if not groups or importlib.util.find_spec("matplotlib") is None:
        return False
    import matplotlib

    matplotlib.use("Agg")
    # Reproducible ids, and text that is not drawn as outlines.
    matplotlib.rcParams.update({"svg.hashsalt": "zarrckpt", "svg.fonttype": "none"})
    from matplotlib import pyplot

    rows = [len(group) for group in groups]
    figure, axes = pyplot.subplots(
        len(groups), 2, figsize=(10, 0.32 * sum(rows) + 0.9 * len(groups)), height_ratios=rows, squeeze=False
    )
    for line, speeds in zip(axes, groups, strict=True):
        for axis, which in zip(line, ("save", "load"), strict=True):
            rates = [(speed.save_rate if which == "save" else speed.load_rate) or 0 for speed in speeds]
            bars = axis.barh([s.name for s in speeds], rates, color=[COLORS[s.kind] for s in speeds])
            axis.bar_label(bars, fmt="%.2f", padding=3, fontsize=8)
            axis.invert_yaxis()
            axis.set_title(f"{speeds[0].group}: {which}, GB/s", fontsize=9, loc="left")
            axis.tick_params(labelsize=8)
            axis.spines[["top", "right"]].set_visible(False)
            axis.margins(x=0.12)
        line[1].set_yticklabels([])
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
    return True
