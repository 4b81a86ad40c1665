"""``ls``, ``tree``, ``info``, ``cat``."""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING, Any

import click

from zarrckpt.cli._common import json_option, opened, print_json, print_table, shown, store_options

if TYPE_CHECKING:
    from zarrckpt._checkpoint import Checkpoint


@click.command()
@click.argument("url")
@click.argument("patterns", nargs=-1, metavar="[PATTERN]...")
@json_option
@store_options
def ls(url: str, patterns: tuple[str, ...], as_json: bool, storage_options: Any) -> None:
    """List the entries: name, dtype, shape or value, size.

    PATTERN is a name, its beginning up to a dot, or a glob: 'model.layers.0', '*.bias'.

    \b
    Examples:
      zarrckpt ls run/step-100
      zarrckpt ls s3://bucket/run/step-100 'optim.*' --json
    """
    ckpt = opened(url, storage_options, patterns)
    if as_json:
        tensors = {*ckpt.tensors}
        print_json([_tensor(ckpt, fqn) if fqn in tensors else _object(ckpt, fqn) for fqn in ckpt])
    else:
        print_table(("name", "dtype", "shape or value", "size"), (ckpt.summary(fqn) for fqn in ckpt), right=["size"])


def _tensor(ckpt: Checkpoint, fqn: str) -> dict[str, Any]:
    array, dtype = ckpt[fqn], ckpt.summary(fqn)[1]
    found = {"name": fqn, "dtype": dtype, "shape": array.shape, "chunks": array.chunks}
    return {**found, "nbytes": ckpt.nbytes_of(fqn)}


def _object(ckpt: Checkpoint, fqn: str) -> dict[str, Any]:
    name, kind, text, _ = ckpt.summary(fqn)
    return {"name": name, "value": ckpt[fqn]} if kind == "value" else {"name": name, "encoding": kind, "kind": text}


@click.command()
@click.argument("url")
@click.option("--depth", type=click.IntRange(1), help="Levels to show (default: all).")
@store_options
def tree(url: str, depth: int | None, storage_options: Any) -> None:
    """Show the entries as the tree that was saved, with sizes.

    \b
    Example:
      zarrckpt tree run/step-100 --depth 2
    """
    from zarrckpt._info import size_text

    ckpt = opened(url, storage_options)
    root: dict[str, Any] = {}
    for fqn in ckpt:
        _, dtype, text, _ = ckpt.summary(fqn)
        node = root
        keys = list(map(str, ckpt.path(fqn)))
        for key in keys[:-1]:
            node = node.setdefault(key, {})
        node[keys[-1]] = (f"{dtype} {text}", ckpt.nbytes_of(fqn))
    click.echo(f"{ckpt.url}  {size_text(ckpt.nbytes)}")
    _print_tree(root, "", depth)


def _print_tree(node: dict[str, Any], indent: str, depth: int | None) -> None:
    from zarrckpt._info import size_text

    for place, (name, child) in enumerate(node.items()):
        last = place == len(node) - 1
        text = f"  {child[0]}" if isinstance(child, tuple) else ""
        size = _size(child)
        click.echo(f"{indent}{'└── ' if last else '├── '}{name}{text}" + (f"  {size_text(size)}" if size else ""))
        if isinstance(child, dict) and (depth is None or depth > 1):
            _print_tree(child, indent + ("    " if last else "│   "), None if depth is None else depth - 1)


def _size(child: Any) -> int:
    return int(child[1]) if isinstance(child, tuple) else sum(map(_size, child.values()))


@click.command()
@click.argument("url")
@json_option
@store_options
def info(url: str, as_json: bool, storage_options: Any) -> None:
    """Say what a checkpoint is: sizes, dtypes, step, who wrote it.

    \b
    Example:
      zarrckpt info s3://bucket/run/step-100 --json
    """
    from zarrckpt._info import size_text

    found = opened(url, storage_options).info
    if as_json:
        print_json(dataclasses.asdict(found))
        return
    software = ", ".join(f"{name} {version}" for name, version in found.software.items())
    rows = [
        ("url", found.url),
        ("saved", f"{found.created}, by {found.world_size} ranks ({software})"),
        ("save id", found.save_id + (f", replaced {len(found.replaced)} before" if found.replaced else "")),
        ("step", "-" if found.step is None else str(found.step)),
        ("tensors", f"{found.tensors:,} with {found.elements:,} elements, {size_text(found.nbytes)}"),
        ("values", f"{found.values:,}, and {found.blobs:,} kept as bytes"),
        ("chunks", f"{found.chunks:,} objects, {found.subchunks:,} subchunks; tree {found.tree or 'canonical'!r}"),
        ("compression", ", ".join(found.compression) or "none"),
        *(
            (f"  {name}", f"{part.tensors:,} tensors, {part.elements:,} elements, {size_text(part.nbytes)}")
            for name, part in found.dtypes.items()
        ),
        *((f"  {name}.*", size_text(size)) for name, size in found.groups.items()),
    ]
    width = max(len(name) for name, _ in rows)
    for name, text in rows:
        click.echo(f"{name:{width}}  {text}")


_SLICE = re.compile(r"\[?([-\d:,\s.]*)\]?")


def _selection(text: str) -> tuple[Any, ...]:
    """``0:4,:,3`` as numpy understands it."""
    match = _SLICE.fullmatch(text.strip())
    if match is None:
        raise click.BadParameter(f"{text!r} is no slice such as 0:4,:,3", param_hint="SLICE")
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
            raise click.BadParameter(f"{part!r} is no index and no slice", param_hint="SLICE") from err
    return tuple(parts)


@click.command()
@click.argument("url")
@click.argument("key")
@click.argument("slice_", metavar="[SLICE]", required=False)
@json_option
@store_options
def cat(url: str, key: str, slice_: str | None, as_json: bool, storage_options: Any) -> None:
    """Show one entry: a value, or a tensor's numbers and its corner, or the part that SLICE says.

    \b
    Examples:
      zarrckpt cat run/step-100 step
      zarrckpt cat run/step-100 model.embed.weight 0:4,:8
    """
    import numpy as np

    ckpt = opened(url, storage_options)
    found = ckpt[key]
    if key not in ckpt.tensors:
        print_json(found) if as_json else click.echo(repr(found))
        return
    try:
        part = np.asarray(found[_selection(slice_)] if slice_ else found[tuple(slice(0, 6) for _ in found.shape)])
    except IndexError as err:
        raise click.BadParameter(f"{slice_!r} does not fit the shape {found.shape}: {err}", param_hint="SLICE") from err
    if as_json:
        print_json({"name": key, "shape": found.shape, "dtype": str(found.dtype), "values": _numbers(part)})
        return
    click.echo("  ".join(cell for cell in ckpt.summary(key) if cell))
    if not slice_:
        stats = ckpt.stats(key)[key]
        words = ("min", "max", "mean", "std", "norm")
        click.echo("  ".join(f"{word} {shown(getattr(stats, word))}" for word in words))
        click.echo(f"zeros {stats.zeros:,}  nan {stats.nan:,}  inf {stats.inf:,}  of {stats.count:,}")
    with np.printoptions(threshold=4096, edgeitems=4, linewidth=120, precision=5):
        click.echo(str(part if part.dtype.kind in "biufc" else part.astype(np.float32)))


def _numbers(part: Any) -> Any:
    if part.dtype.kind == "c":
        return [str(item) for item in part.reshape(-1)]
    return (part if part.dtype.kind in "biuf" else part.astype("f4")).tolist()
