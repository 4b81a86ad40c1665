"""Open the arrays of a checkpoint, or of a part of one, as a lazy ``xarray.DataTree``. No torch."""

from __future__ import annotations

from typing import Any

from zarrckpt._errors import KeyMismatchError
from zarrckpt._format.documents import join
from zarrckpt._format.root import Root, ValueEntry
from zarrckpt._inspect.info import info_of
from zarrckpt._read.selection import Selection, catalog_of


def open_tree(entries: Selection, group: str) -> Any:
    """Open a DataTree, see :meth:`Checkpoint.to_xarray`. No request: the consolidated metadata is in the root."""
    import xarray

    catalog = catalog_of(entries)
    url, root, names = entries.url, catalog.root, list(entries)
    path = _group_path(url, root, names, group)
    inside = f"{path}/" if path else ""
    selected = {node.path.removeprefix(inside) for node in root.arrays(names) if node.path.startswith(inside)}
    group_path = join(root.tree, path) or None
    tree: Any = xarray.open_datatree(catalog.zarr_store, engine="zarr", group=group_path, zarr_format=3)
    if len(names) < len(root.entries):
        tree = _select_variables(tree, selected)
    # These replace the root's own attributes, the table of all entries, which xarray would show with the tree.
    found = info_of(url, root, names)
    attributes = {"url": url, "save_id": found.save_id, "created": found.created, "step": found.step}
    tree.attrs = {name: value for name, value in attributes.items() if value is not None}
    return tree


def _group_path(url: str, root: Root, names: list[str], group: str) -> str:
    """Return the node path of a group from its name. Raises KeyMismatchError if no array is below it."""
    if not group:
        return ""
    for fqn in names:
        if fqn.startswith(f"{group}.") and not isinstance(root.entries[fqn], ValueEntry):
            keys = root.state_path(fqn).keys
            for depth in range(1, len(keys)):
                if ".".join(map(str, keys[:depth])) == group:
                    return "/".join(root.node_path(fqn).split("/")[:depth])
    groups = list(dict.fromkeys(fqn.partition(".")[0] for fqn in names if "." in fqn))
    raise KeyMismatchError(f"{url} has no group {group!r} with arrays below it. Its top groups are {groups[:10]}")


def _select_variables(tree: Any, paths: set[str]) -> Any:
    """Return a tree of the variables with these paths, and of their groups."""
    import xarray

    kept = {}
    for node in tree.subtree:
        found = node.to_dataset(inherit=False)
        below = node.path.strip("/")
        names = [name for name in found.data_vars if join(below, str(name)) in paths]
        if names:
            kept[node.path] = found[names]
    return xarray.DataTree.from_dict(kept)
