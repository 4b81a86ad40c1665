"""The commands ``ls``, ``tree``, ``info`` and ``cat``."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import click

from zarrckpt._errors import CheckpointNotFoundError, ForeignObjectsError, printable
from zarrckpt._reports import count_text, share_text, size_text, software_text, time_text, value_text
from zarrckpt.cli import _output as out
from zarrckpt.cli import _params as params
from zarrckpt.cli._params import argument, flag, option
from zarrckpt.cli._streams import echo

if TYPE_CHECKING:
    from zarrckpt._checkpoint import Checkpoint
    from zarrckpt._format.root import ReusedChunks
    from zarrckpt._inspect.info import CheckpointInfo, DTypeInfo


_ALL = "For a folder: show all metadata, not only the rules' metric."


@params.command("ls")
def ls_command(
    url: params.Url,
    patterns: params.Patterns,
    all_metadata: Annotated[bool, flag(_ALL, "--all")],
    header: params.Header,
    storage_options: params.StorageOptions,
    as_json: params.AsJson,
) -> None:
    """List the entries: name, dtype, shape or value, size.

    For a folder of checkpoints, list the checkpoints by step: name, step, age, size, metadata. If a save has reused
    chunks of an earlier checkpoint, another column shows the bytes that each save sent. If a CheckpointManager
    manages them, show the metric of its rules, and the reasons why each checkpoint is kept. This takes one more
    request, and one more for each checkpoint. If a name has no step, the order is that of saving.

    For a folder of runs, list the runs by name, each with its newest checkpoint. This takes three requests per folder.

    PATTERN is a name, its beginning up to a dot, or a glob: 'model.layers.0', '*.bias'.

    \b
    Examples:
      zarrckpt ls run/step-100
      zarrckpt ls s3://bucket/run/step-100 'optim.*' --json
      zarrckpt ls run --all
      zarrckpt ls s3://bucket/runs
    """
    try:
        ckpt = params.open_checkpoint(url, storage_options, patterns)
    except (CheckpointNotFoundError, ForeignObjectsError):
        if patterns:
            raise
        from zarrckpt.cli._folders import list_run, list_runs, print_listing

        listing = list_run(url, storage_options)
        if not listing.rows and not (listing := list_runs(url, storage_options)).rows:
            raise
        print_listing(listing, as_json, all_metadata, header)
        return
    if as_json:
        out.print_json([*_described(ckpt).values()])
    else:
        from zarrckpt._inspect.info import entry_texts

        columns = ("name", "dtype", "shape or value", "size")
        out.print_table(columns, (entry_texts(ckpt, fqn) for fqn in ckpt), header, right=["size"], cut="shape or value")


def _described(ckpt: Checkpoint) -> dict[str, dict[str, Any]]:
    return {fqn: _entry_json(ckpt, fqn) for fqn in ckpt}


def _entry_json(ckpt: Checkpoint, fqn: str) -> dict[str, Any]:
    from zarrckpt._inspect.info import entry_texts

    entry = ckpt.entry(fqn)
    if entry.kind == "value":
        return {"name": fqn, "value": ckpt[fqn]}
    if entry.kind == "blob":
        _, encoding, kind, _ = entry_texts(ckpt, fqn)
        return {"name": fqn, "encoding": encoding, "kind": kind}
    found = {"name": fqn, "dtype": entry.dtype, "shape": entry.shape, "chunks": ckpt[fqn].chunks}
    return {**found, "nbytes": entry.nbytes}


@params.command("tree")
def tree_command(
    url: params.Url,
    patterns: params.Patterns,
    depth: Annotated[int | None, option("Number of levels to show (default: all).", type=click.IntRange(1))],
    storage_options: params.StorageOptions,
    as_json: params.AsJson,
) -> None:
    """Show the names as a tree, with sizes. Levels are the parts between dots. --json nests like the state dict.

    \b
    Examples:
      zarrckpt tree run/step-100 --depth 2
      zarrckpt tree run/step-100 'optim.state'
    """
    from zarrckpt._inspect.info import entry_texts

    ckpt = params.open_checkpoint(url, storage_options, patterns)
    if as_json:
        out.print_json({"url": ckpt.url, "nbytes": ckpt.nbytes, "tree": _nested(ckpt, _described(ckpt))})
        return
    root: _Node = {}
    for fqn in ckpt:
        node, (*above, last) = root, fqn.split(".")
        for name in above:
            child = node.setdefault((False, name), {})
            assert isinstance(child, dict)
            node = child
        node[True, last] = (" ".join(entry_texts(ckpt, fqn)[1:3]), 1, ckpt.entry(fqn).nbytes)
    out.print_line(f"{ckpt.url}  {size_text(ckpt.nbytes)}")
    utf = sys.stdout.encoding.lower().startswith("utf")
    for line in _tree_lines(root, "├└│─" if utf else "|`|-", depth or -1):
        out.print_line(line)


def _nested(ckpt: Checkpoint, leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Return the leaves nested like the state dict. Groups are ``{"entries": ...}``."""
    root: dict[str, Any] = {}
    for fqn, leaf in leaves.items():
        node = root
        *keys, last = map(str, ckpt.entry(fqn).keys)
        for key in keys:
            node = node.setdefault(key, {"entries": {}})["entries"]
        node[last] = leaf
    return root


_Leaf = tuple[str, int, int]
"""An entry's text, 1, and its size in bytes."""
_Node = dict[tuple[bool, str], "_Leaf | _Node"]
"""A level of the tree: (whether it is an entry, name) -> an entry, or the level below."""


def _tree_lines(node: _Node, drawn: str, depth: int) -> Iterator[str]:
    """Yield the lines of a tree. A group with one child is joined with it: ``layers.0``, ``norm.weight``."""
    for number, ((_, name), child) in enumerate(node.items(), 1):
        while isinstance(child, dict) and len(child) == 1:
            (((_, more), child),) = child.items()
            name = f"{name}.{more}"
        text, count, size = _extent(child)
        words = (
            name,
            text if text or depth != 1 else count_text(count, "entry", "entries"),
            size_text(size) if size else "",
        )
        last = number == len(node)
        yield f"{drawn[last]}{drawn[3] * 2} {'  '.join(filter(None, words))}"
        if isinstance(child, dict) and depth != 1:
            for line in _tree_lines(child, drawn, depth - 1):
                yield f"{'    ' if last else f'{drawn[2]}   '}{line}"


def _extent(child: _Leaf | _Node) -> _Leaf:
    """Return the text of an entry, or "" for a group, the number of entries, and their size in bytes."""
    if isinstance(child, tuple):
        return child
    parts = [_extent(part) for part in child.values()]
    return "", sum(count for _, count, _ in parts), sum(size for _, _, size in parts)


_LISTED = 12
"""Maximum number of groups that ``info`` shows, the largest ones."""


@params.command("info")
def info_command(url: params.Url, storage_options: params.StorageOptions, as_json: params.AsJson) -> None:
    """Show the facts of a checkpoint: sizes, dtypes, step, software and ranks that saved it.

    One request, or three if tensors are compressed, for the stored sizes.

    \b
    Example:
      zarrckpt info s3://bucket/run/step-100 --json
    """
    found = params.open_checkpoint(url, storage_options).info
    if as_json:
        out.print_json(found)
        return
    rows = _info_rows(found)
    width = max(len(name) for name, _ in rows)
    for name, text in rows:
        out.print_line(f"{name:{width}}  {text}")


def _info_rows(found: CheckpointInfo) -> list[tuple[str, str]]:
    blobs = f", and {found.blobs:,} kept as bytes, {size_text(found.blob_nbytes)}" if found.blobs else ""
    chunks = f"{count_text(found.chunks, 'chunk')}, {count_text(found.subchunks, 'subchunk')}"
    tensors = found.nbytes - found.blob_nbytes
    tree = f"; arrays are below {found.tree}" if found.tree else ""
    before = f"; replaced {count_text(len(found.replaced), 'earlier save')}" if found.replaced else ""
    rows = [
        ("url", found.url),
        ("saved", f"{time_text(found.created)} by {count_text(found.world_size, 'rank')}"),
        ("with", software_text(found.software)),
        ("save id", found.save_id + before),
        *([("run", found.run)] if found.run else []),
        ("step", "-" if found.step is None else f"{found.step:,}"),
        *_headed("metadata", [(name, value_text(value)) for name, value in found.metadata.items()]),
        ("size", size_text(found.nbytes)),
        ("tensors", f"{found.tensors:,} with {count_text(found.elements, 'element')}, {size_text(tensors)}"),
        ("stored", _stored(found)),
        *([("reused", _reused(found, found.reused))] if found.reused is not None else []),
        ("layout", chunks + tree),
        ("values", f"{found.values:,}{blobs}"),
        *_headed("dtypes", [(name, _shown_numbers(part)) for name, part in found.dtypes.items()]),
    ]
    listed = sorted(found.groups, key=lambda name: -found.groups[name])[:_LISTED]
    sizes = [(name, size_text(size)) for name, size in found.groups.items() if name in listed]
    if len(found.groups) > _LISTED:
        sizes.append(("...", f"and {len(found.groups) - _LISTED:,} smaller ones"))
    return rows + _headed("groups", sizes)


def _headed(title: str, pairs: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return rows for names and their texts, with a title in the first row."""
    width = max((len(name) for name, _ in pairs), default=0)
    return [(title if index == 0 else "", f"{name:{width}}  {text}") for index, (name, text) in enumerate(pairs)]


def _shown_numbers(part: DTypeInfo) -> str:
    return f"{count_text(part.tensors, 'tensor')}, {count_text(part.elements, 'element')}, {size_text(part.nbytes)}"


def _stored(found: CheckpointInfo) -> str:
    """Return the stored size as a text, with the codec and the compressed share."""
    if found.nbytes_stored is None:
        return f"unknown, because a table cannot be read: run zarrckpt verify {found.url}"
    if not found.compression:
        return f"{size_text(found.nbytes_stored)}, not compressed"
    share = f" ({share_text(found.nbytes_stored, found.nbytes)})" if found.nbytes else ""
    return f"{size_text(found.nbytes_stored)}{share}, compressed by {', '.join(found.compression)}"


def _reused(found: CheckpointInfo, reused: ReusedChunks) -> str:
    whole = "" if found.nbytes_stored is None else f" of {size_text(found.nbytes_stored)}"
    return f"{size_text(reused.nbytes)}{whole}, {count_text(reused.objects, 'chunk')}, from save {reused.save_id}"


_SLICE = re.compile(r"\[?([-\d:,\s.]*)\]?")


def _selection(text: str, shape: tuple[int, ...]) -> tuple[Any, ...]:
    """Parse a slice such as ``0:4,:,3`` into an index of numpy, and check it against a shape."""
    import numpy as np

    match = _SLICE.fullmatch(text.strip())
    if match is None:
        raise click.BadParameter(f"expected a slice such as 0:4,:,3, got {text!r}", param_hint="SLICE")
    parts: list[Any] = []
    for part in match.group(1).split(","):
        part = part.strip()
        try:
            if part == "...":
                parts.append(...)
            elif ":" in part:
                parts.append(slice(*(int(n) if n.strip() else None for n in part.split(":"))))
            else:
                parts.append(int(part))
        except (ValueError, TypeError) as err:
            raise click.BadParameter(f"{part!r} is neither an index nor a slice", param_hint="SLICE") from err
    if any(isinstance(part, slice) and (part.step or 1) < 0 for part in parts):
        raise click.BadParameter(f"{text!r} has a negative step, expected 1 or more", param_hint="SLICE")
    try:
        # Check with an array that takes no memory, before anything is read.
        np.broadcast_to(np.zeros((), np.uint8), shape)[tuple(parts)]
    except (IndexError, ValueError) as err:
        raise click.BadParameter(f"{text!r} does not fit the shape {shape}: {err}", param_hint="SLICE") from err
    return tuple(parts)


@params.command("cat", context_settings={"ignore_unknown_options": True})
def cat_command(
    url: params.Url,
    key: Annotated[str, argument()],
    slice_: Annotated[str | None, argument("[SLICE]", required=False)],
    storage_options: params.StorageOptions,
    as_json: params.AsJson,
) -> None:
    """Show one entry: a value, a tensor's statistics and first elements, or the elements of SLICE.

    \b
    Examples:
      zarrckpt cat run/step-100 step
      zarrckpt cat run/step-100 model.embed.weight 0:4,:8
      zarrckpt cat run/step-100 model.embed.weight -1,:
    """
    # Unknown options are ignored, because "-2:" is a slice and not an option. Any other unknown option is an error.
    for word in (url, key, slice_ or ""):
        if re.match(r"-+[^-\d:,.\s]", word):
            raise click.NoSuchOption(word)
    ckpt = params.open_checkpoint(url, storage_options)
    if key in ckpt.tensors:
        _cat_tensor(ckpt, key, slice_, as_json)
        return
    found = ckpt[key]
    if slice_:
        raise click.BadParameter(f"{key!r} is a value and not a tensor: leave SLICE out", param_hint="SLICE")
    if as_json:
        out.print_json(found)
        return
    text = value_text(found)
    more = f"\n... {len(text) - _MAX_SHOWN:,} characters more, --json has all" if len(text) > _MAX_SHOWN else ""
    echo(printable(text[:_MAX_SHOWN]) + more)


_MAX_SHOWN = 4000
"""Maximum number of characters of a value that ``cat`` shows."""


def _cat_tensor(ckpt: Checkpoint, key: str, slice_: str | None, as_json: bool) -> None:
    import numpy as np

    from zarrckpt._inspect.info import entry_texts

    found = ckpt[key]
    index = _selection(slice_, found.shape) if slice_ else _corner(found.shape)
    part = np.asarray(found[index])
    if as_json:
        out.print_json({"name": key, "shape": found.shape, "dtype": ckpt.entry(key).dtype, "values": _numbers(part)})
        return
    out.print_line("  ".join(cell for cell in entry_texts(ckpt, key) if cell))
    if not slice_:
        with out.progress_bar("reading") as progress:
            stats = ckpt.stats(key, progress=progress)[key]
        words = ("min", "max", "mean", "std", "norm")
        echo("  ".join(f"{word} {out.format_number(getattr(stats, word))}" for word in words))
        echo(f"zeros {stats.zeros:,}  nan {stats.nan:,}  inf {stats.inf:,}  of {stats.count:,}")
        if part.shape != found.shape:
            echo(f"[{', '.join(f':{stop.stop}' for stop in index)}]")
    if not part.size and found.size:
        echo(f"no elements: this part has the shape {part.shape}")
        return
    with np.printoptions(threshold=4096, edgeitems=4, linewidth=120, precision=5):
        echo(str(part if part.dtype.kind in "biufc" else part.astype(np.float32)))


def _corner(shape: tuple[int, ...]) -> tuple[slice, ...]:
    """Return slices for at most 6 rows and columns, and for 2 indices of each dimension before the last two."""
    return tuple(slice(0, min(n, 6 if axis >= len(shape) - 2 else 2)) for axis, n in enumerate(shape))


def _numbers(part: Any) -> Any:
    if part.dtype.kind == "c":
        return part.astype(str).tolist()
    return (part if part.dtype.kind in "biuf" else part.astype("f4")).tolist()
