"""Imports point down only, by the table of modules in the documentation, which names every module."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from pathlib import Path

import zarrckpt

PACKAGE = Path(zarrckpt.__file__).parent
PAGE = PACKAGE.parent / "docs" / "explanation" / "architecture.md"
ROW = re.compile(r"\| (\d+) \| `(\w+)` \| (torch)? ?\| .+ \|")

PACKAGES = {"_dcp", "_load", "_page", "_plan", "_ranks", "_save", "_store", "cli"}
"""Their modules import each other."""

TORCH_ON_REQUEST = {"_checkpoint": {"_dcp", "_loading", "_torch_file"}}
"""What a module that runs without torch imports within a function that says that it needs it."""

LAZY_TORCH = {"_torch_private", "_values"}
"""Modules that use torch where it has been imported already, from inside functions."""

CLIENTS = {
    "zarr": {"_strict_store", "_zarr_dtypes", "_store._zarr", "_store._zarr_readers"},
    "obstore": {"_store._obstore", "_store._obstore_client"},
    "fsspec": {"_store._fsspec_filesystem"},
}
"""Which modules import what at import time: the others then cost nothing where they are not used."""


@dataclass(frozen=True)
class Import:
    """One imported module: its name, and whether importing this file imports it."""

    name: str
    eager: bool
    typing: bool


def layers() -> dict[str, int]:
    return {name: int(layer) for layer, name, _ in ROW.findall(PAGE.read_text())}


def torch_modules() -> set[str]:
    return {name for _, name, torch in ROW.findall(PAGE.read_text()) if torch}


def modules() -> dict[str, Path]:
    """Dotted name below the package -> file; a package is its own name."""
    found = {}
    for file in PACKAGE.rglob("*.py"):
        parts = file.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts if parts == ("__init__",) or parts[-1] != "__init__" else parts[:-1])] = file
    return found


def imports(file: Path) -> list[Import]:
    tree = ast.parse(file.read_text())
    typing = _inside(tree, lambda node: isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))
    lazy = _inside(tree, lambda node: isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    found = []
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"relative import in {file}"
            package = node.module.startswith("zarrckpt") and (PACKAGE.parent / node.module.replace(".", "/")).is_dir()
            names = [f"{node.module}.{alias.name}" for alias in node.names] if package else [node.module]
        is_typing = id(node) in typing
        found += [Import(name, not is_typing and id(node) not in lazy, is_typing) for name in names]
    return found


def _inside(tree: ast.AST, is_outer: object) -> set[int]:
    outer = [node for node in ast.walk(tree) if is_outer(node)]  # type: ignore[operator]
    return {id(inner) for node in outer for inner in ast.walk(node)}


def own(name: str) -> str:
    """The module of the table that an import of this package names."""
    return name.split(".")[1] if "." in name else "__init__"


def test_the_table_names_every_module() -> None:
    assert {name.partition(".")[0] for name in modules()} == set(layers())


def test_imports_point_down() -> None:
    table, wrong = layers(), []
    for name, file in modules().items():
        here = name.partition(".")[0]
        for item in imports(file):
            if not item.name.startswith("zarrckpt"):
                continue
            target = own(item.name)
            if target == here and target in PACKAGES:
                continue
            if table[target] >= table[here]:
                wrong.append(f"{name} (layer {table[here]}) imports {target} (layer {table[target]})")
    assert not wrong, wrong


def test_stores_know_nothing_but_errors() -> None:
    for name, file in modules().items():
        if name.startswith("_store"):
            used = {own(item.name) for item in imports(file) if item.name.startswith("zarrckpt")}
            assert used <= {"_errors", "_store"}, (name, used)


def test_torch_is_imported_where_the_table_says() -> None:
    eager, lazy = set(), set()
    for name, file in modules().items():
        for item in imports(file):
            if item.name.split(".")[0] == "torch" and not item.typing:
                (eager if item.eager else lazy).add(name.partition(".")[0])
    assert eager == torch_modules()
    assert lazy <= LAZY_TORCH | torch_modules()


def test_clients_are_imported_by_the_modules_that_are_about_them() -> None:
    for client, allowed in CLIENTS.items():
        eager = {
            name
            for name, file in modules().items()
            for item in imports(file)
            if item.eager and item.name.split(".")[0] == client
        }
        assert eager <= allowed, (client, eager - allowed)


def test_nothing_without_torch_imports_what_needs_it() -> None:
    needs = torch_modules()
    for name, file in modules().items():
        if name.partition(".")[0] not in {*needs, "_per_rank", "__init__"}:
            own_imports = [item for item in imports(file) if item.name.startswith("zarrckpt") and not item.typing]
            used = {own(item.name) for item in own_imports if item.eager}
            lazy = {own(item.name) for item in own_imports if not item.eager}
            assert not used & needs, (name, used & needs)
            assert lazy & needs <= TORCH_ON_REQUEST.get(name, set()), (name, lazy & needs)


def test_only_the_side_door_knows_dcp() -> None:
    for name, file in modules().items():
        for item in imports(file):
            if item.name.startswith("torch.distributed.checkpoint"):
                helpers = item.name.startswith("torch.distributed.checkpoint.state_dict") and not item.eager
                assert name.startswith("_dcp.") or helpers, (name, item.name)


def test_private_names_of_torch_are_in_one_module() -> None:
    """Attributes and modules of torch whose names begin with an underscore."""
    owners = r"(?:torch|dist|gloo|options|[sS]ave_?[pP]lanner|fsdp1?)"
    private = re.compile(rf"{owners}(?:\.\w+)*?\.(_[a-zA-Z]\w*)|from torch\S* import (_\w+)")
    for name, file in modules().items():
        found = [match[0] for match in private.finditer(file.read_text())]
        # The last two name modules of torch whose classes pickles hold, and import none of them.
        assert not found or name in ("_torch_private", "_values", "_dcp.folder"), (name, found)
