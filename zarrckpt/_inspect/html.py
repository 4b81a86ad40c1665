"""Show a checkpoint in notebooks as HTML that follows the notebook's theme. No torch."""

from __future__ import annotations

import html
from collections.abc import Iterable
from itertools import islice

from zarrckpt._inspect.info import CheckpointInfo, checkpoint_info, entry_texts
from zarrckpt._read.selection import Selection, part_of
from zarrckpt._reports import count_text, size_text, software_text, time_text

_MAX_ROWS = 200
"""Maximum number of entries that are shown of each group, because notebooks save their outputs."""


# Colours are mixed from the notebook's own, so that they fit light and dark themes.
_STYLE = """
.zarrckpt-repr {
  --line: color-mix(in srgb, currentColor 18%, transparent); --bar: color-mix(in srgb, #3b82f6 60%, transparent);
  font-size: 13px; line-height: 1.5; max-width: 900px; color: inherit;
  header { border-bottom: 1px solid var(--line); padding-bottom: 4px; margin-bottom: 6px }
  code, td.name { font-family: var(--jp-code-font-family, monospace); font-size: 12px }
  code { background: none; color: inherit; padding: 0 }
  .faint { opacity: 0.65 }
  summary { cursor: pointer; padding: 1px 0 }
  summary b { display: inline-block; min-width: 9em }
  summary .size { display: inline-block; min-width: 5em; margin-right: 1em }
  .bar { display: inline-block; width: 120px; height: 7px; margin-right: 1em; background: var(--line) }
  .bar i { display: block; height: 100%; background: var(--bar) }
  .rows { overflow-x: auto; margin: 2px 0 8px 1.1em }
  table { border-collapse: collapse; font-size: 12px; margin: 0; border: 0 }
  tr, tr:nth-child(odd), tr:nth-child(even) { background: none }
  td { border: 0; border-bottom: 1px solid var(--line); padding: 1px 1.2em 1px 0; white-space: pre }
  td { text-align: left; max-width: 30em; overflow: hidden; text-overflow: ellipsis; color: inherit }
  td.size, .size { text-align: right; font-variant-numeric: tabular-nums }
}
"""


def as_html(entries: Selection) -> str:
    """Return HTML with the facts of a checkpoint, and a collapsed table of the entries of each group.

    Every text is escaped. The HTML loads no files and runs no script.
    """
    groups = entries.groups
    in_groups = {fqn for part in groups.values() for fqn in part}
    rest = part_of(entries, (fqn for fqn in entries if fqn not in in_groups))
    shown = [*groups.items(), *([("(no group)", rest)] if rest else [])]
    largest = max((part.nbytes for _, part in shown), default=0)
    parts = "".join(_group(name, part, largest) for name, part in shown)
    return f'<style>{_STYLE}</style><div class="zarrckpt-repr">{_head(checkpoint_info(entries))}{parts}</div>'


def _head(found: CheckpointInfo) -> str:
    step = "" if found.step is None else f" &nbsp;step <b>{found.step:,}</b>"
    values = count_text(found.values + found.blobs, "value")
    saved = f"saved {time_text(found.created)} by {count_text(found.world_size, 'rank')}"
    size = size_text(found.nbytes)
    return (
        f"<header><b>zarrckpt.Checkpoint</b> &nbsp;<code>{html.escape(found.url)}</code>{step}<br>"
        f"{count_text(found.tensors, 'tensor')}, {values}, {size}{_stored_size(found)} "
        f'<span class="faint">&nbsp;{html.escape(saved)}, {html.escape(software_text(found.software))}</span></header>'
    )


def _stored_size(found: CheckpointInfo) -> str:
    if not found.compression or not found.nbytes_stored:
        return ""
    return f", stored in {size_text(found.nbytes_stored)} ({html.escape(', '.join(found.compression))})"


def _group(name: str, part: Selection, largest: int) -> str:
    width = round(100 * part.nbytes / largest) if largest else 0
    size = f'<span class="size">{size_text(part.nbytes)}</span><span class="bar"><i style="width:{width}%"></i></span>'
    entries = f'<span class="faint">{count_text(len(part), "entry", "entries")}</span>'
    rows = "".join(_row(entry_texts(part, fqn)) for fqn in islice(part, _MAX_ROWS))
    if len(part) > _MAX_ROWS:
        rows += f'<tr><td class="faint">and {len(part) - _MAX_ROWS:,} more</td></tr>'
    table = f'<div class="rows"><table><tbody>{rows}</tbody></table></div>'
    return f"<details><summary><b>{html.escape(name)}</b>{size}{entries}</summary>{table}</details>"


def _row(cells: Iterable[str]) -> str:
    kinds = ("name", "faint", "", "size faint")
    parts = (f'<td class="{kind}">{html.escape(cell)}</td>' for kind, cell in zip(kinds, cells, strict=True))
    return f"<tr>{''.join(parts)}</tr>"
