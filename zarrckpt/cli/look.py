"""The commands ``ls``, ``tree``, ``info`` and ``cat``."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from zarrckpt._errors import CheckpointNotFoundError, ForeignObjectsError, printable
from zarrckpt._reports import count_text, share_text, size_text, software_text, time_text, value_text
from zarrckpt.cli._common import (
    format_number,
    header_option,
    open_checkpoint,
    print_json,
    print_line,
    print_table,
    progress_bar,
    url_options,
)

if TYPE_CHECKING:
    from zarrckpt._checkpoint import Checkpoint
    from zarrckpt._format.root import ReusedChunks
    from zarrckpt._inspect.info import CheckpointInfo, DTypeInfo


@click.command("ls")
@click.argument("url")
@click.argument("patterns", nargs=-1, metavar="[PATTERN]...")
@click.option(
    "--all", "all_metadata", is_flag=True, help="For a folder: show all metadata, not only the rules' metric."
)
@header_option
@url_options
def ls_command(url: str, patterns: tuple[str, ...], all_metadata: bool, as_json: bool, storage_options: Any) -> None:
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
        ckpt = open_checkpoint(url, storage_options, patterns)
    except (CheckpointNotFoundError, ForeignObjectsError):
        if patterns:
            raise
        from zarrckpt.cli._folders import list_run, list_runs, print_listing

        listing = list_run(url, storage_options)
        if not listing.rows:
            listing = list_runs(url, storage_options)
        if not listing.rows:
            raise
        print_listing(listing, as_json, all_metadata)
        return
    if as_json:
        print_json([*_described(ckpt).values()])
    else:
        from zarrckpt._inspect.info import entry_texts

        columns = ("name", "dtype", "shape or value", "size")
        print_table(columns, (entry_texts(ckpt, fqn) for fqn in ckpt), right=["size"], cut="shape or value")


def _described(ckpt: Checkpoint) -> dict[str, dict[str, Any]]:
    tensors = {*ckpt.tensors}
    return {fqn: _tensor(ckpt, fqn) if fqn in tensors else _object(ckpt, fqn) for fqn in ckpt}


def _tensor(ckpt: Checkpoint, fqn: str) -> dict[str, Any]:
    entry = ckpt.entry(fqn)
    found = {"name": fqn, "dtype": entry.dtype, "shape": entry.shape, "chunks": ckpt[fqn].chunks}
    return {**found, "nbytes": entry.nbytes}


def _object(ckpt: Checkpoint, fqn: str) -> dict[str, Any]:
    from zarrckpt._inspect.info import entry_texts

    name, kind, text, _ = entry_texts(ckpt, fqn)
    return {"name": name, "value": ckpt[fqn]} if kind == "value" else {"name": name, "encoding": kind, "kind": text}


@click.command("tree")
@click.argument("url")
@click.argument("patterns", nargs=-1, metavar="[PATTERN]...")
@click.option("--depth", type=click.IntRange(1), help="Number of levels to show (default: all).")
@url_options
def tree_command(url: str, patterns: tuple[str, ...], depth: int | None, as_json: bool, storage_options: Any) -> None:
    """Show the names as a tree, with sizes. Levels are the parts between dots. --json nests like the state dict.

    \b
    Examples:
      zarrckpt tree run/step-100 --depth 2
      zarrckpt tree run/step-100 'optim.state'
    """
    from zarrckpt._inspect.info import entry_texts

    ckpt = open_checkpoint(url, storage_options, patterns)
    if as_json:
        print_json({"url": ckpt.url, "nbytes": ckpt.nbytes, "tree": _nested(ckpt, _described(ckpt))})
        return
    root = _Node()
    for fqn in ckpt:
        root.add(fqn.split("."), (" ".join(entry_texts(ckpt, fqn)[1:3]), ckpt.entry(fqn).nbytes))
    print_line(f"{ckpt.url}  {size_text(ckpt.nbytes)}")
    _print_tree(root, "", depth)


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


_Leaf = tuple[str, int]
"""The dtype and shape of an entry, or its kind and value, as a text, and its size in bytes."""


class _Node:
    """A level of the tree, with the next parts of names that have a common beginning."""

    def __init__(self) -> None:
        # Keys are (whether it is a leaf, name), because an entry and a group can have one name.
        self._children: dict[tuple[bool, str], _Node | _Leaf] = {}

    def add(self, names: Sequence[str], leaf: _Leaf) -> None:
        node = self
        *above, last = names
        for name in above:
            child = node._children.setdefault((False, name), _Node())
            assert isinstance(child, _Node)
            node = child
        node._children[True, last] = leaf

    def extent(self) -> tuple[int, int]:
        """Return the number of entries below, and their size in bytes."""
        parts = [child.extent() if isinstance(child, _Node) else (1, child[1]) for child in self._children.values()]
        return sum(entries for entries, _ in parts), sum(size for _, size in parts)

    def rows(self) -> Iterator[tuple[str, _Node | _Leaf]]:
        """Yield the children by name. A group with one child is joined with it: ``layers.0``, ``norm.weight``."""
        for (_, name), child in self._children.items():
            while isinstance(child, _Node) and len(child._children) == 1:
                (((_, more), child),) = child._children.items()
                name = f"{name}.{more}"
            yield name, child


def _print_tree(node: _Node, indent: str, depth: int | None) -> None:
    rows = [*node.rows()]
    for number, (name, child) in enumerate(rows, 1):
        last = number == len(rows)
        if isinstance(child, _Node):
            entries, size = child.extent()
            text = count_text(entries, "entry", "entries") if depth == 1 else ""
        else:
            text, size = child
        words = (name, text, size_text(size) if size else "")
        print_line(f"{indent}{'└── ' if last else '├── '}{'  '.join(filter(None, words))}")
        if isinstance(child, _Node) and depth != 1:
            _print_tree(child, indent + ("    " if last else "│   "), None if depth is None else depth - 1)


_LISTED = 12
"""Maximum number of groups that ``info`` shows, the largest ones."""


@click.command("info")
@click.argument("url")
@url_options
def info_command(url: str, as_json: bool, storage_options: Any) -> None:
    """Show the facts of a checkpoint: sizes, dtypes, step, software and ranks that saved it.

    One request, or three if tensors are compressed, for the stored sizes.

    \b
    Example:
      zarrckpt info s3://bucket/run/step-100 --json
    """
    found = open_checkpoint(url, storage_options).info
    if as_json:
        print_json(dataclasses.asdict(found))
        return
    rows = _info_rows(found)
    width = max(len(name) for name, _ in rows)
    for name, text in rows:
        print_line(f"{name:{width}}  {text}")


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


@click.command("cat", context_settings={"ignore_unknown_options": True})
@click.argument("url")
@click.argument("key")
@click.argument("slice_", metavar="[SLICE]", required=False)
@url_options
def cat_command(url: str, key: str, slice_: str | None, as_json: bool, storage_options: Any) -> None:
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
    ckpt = open_checkpoint(url, storage_options)
    if key in ckpt.tensors:
        _cat_tensor(ckpt, key, slice_, as_json)
        return
    found = ckpt[key]
    if slice_:
        raise click.BadParameter(f"{key!r} is a value and not a tensor: leave SLICE out", param_hint="SLICE")
    if as_json:
        print_json(found)
        return
    text = value_text(found)
    more = f"\n... {len(text) - _MAX_SHOWN:,} characters more, --json has all" if len(text) > _MAX_SHOWN else ""
    click.echo(printable(text[:_MAX_SHOWN]) + more)


_MAX_SHOWN = 4000
"""Maximum number of characters of a value that ``cat`` shows."""


def _cat_tensor(ckpt: Checkpoint, key: str, slice_: str | None, as_json: bool) -> None:
    import numpy as np

    from zarrckpt._inspect.info import entry_texts

    found = ckpt[key]
    index = _selection(slice_, found.shape) if slice_ else _corner(found.shape)
    part = np.asarray(found[index])
    if as_json:
        print_json({"name": key, "shape": found.shape, "dtype": ckpt.entry(key).dtype, "values": _numbers(part)})
        return
    print_line("  ".join(cell for cell in entry_texts(ckpt, key) if cell))
    if not slice_:
        with progress_bar("reading") as progress:
            stats = ckpt.stats(key, progress=progress)[key]
        words = ("min", "max", "mean", "std", "norm")
        click.echo("  ".join(f"{word} {format_number(getattr(stats, word))}" for word in words))
        click.echo(f"zeros {stats.zeros:,}  nan {stats.nan:,}  inf {stats.inf:,}  of {stats.count:,}")
        if part.shape != found.shape:
            click.echo(f"[{', '.join(f':{stop.stop}' for stop in index)}]")
    if not part.size and found.size:
        click.echo(f"no elements: this part has the shape {part.shape}")
        return
    with np.printoptions(threshold=4096, edgeitems=4, linewidth=120, precision=5):
        click.echo(str(part if part.dtype.kind in "biufc" else part.astype(np.float32)))


def _corner(shape: tuple[int, ...]) -> tuple[slice, ...]:
    """Return slices for at most 6 rows and columns, and for 2 indices of each dimension before the last two."""
    return tuple(slice(0, min(n, 6 if axis >= len(shape) - 2 else 2)) for axis, n in enumerate(shape))


def _numbers(part: Any) -> Any:
    if part.dtype.kind == "c":
        return part.astype(str).tolist()
    return (part if part.dtype.kind in "biuf" else part.astype("f4")).tolist()
