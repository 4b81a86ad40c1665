"""Rules that import-linter's contracts in ``pyproject.toml`` do not cover: imports and names."""

from __future__ import annotations

import ast
import re
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import zarrckpt

PACKAGE = Path(zarrckpt.__file__).parent
PAGE = PACKAGE.parent / "docs" / "explanation" / "architecture.md"
FOLDER_ROW = re.compile(r"^\| (\d+) \| `(\w+)/` \| (torch)? ?\|", re.MULTILINE)
MODULE = re.compile(r"`(\w+)` \(layer (\d+)(?:, (torch))?\): ")

CLIENTS = {
    "zarr": {"_read.zarr_view", "_read.zarr_dtypes", "_store._zarr"},
    "obstore": {"_store._obstore", "_store._obstore_client"},
    "fsspec": {"_store._fsspec"},
}
"""Modules that import these libraries at import time. Others cost nothing if they are not used."""


@dataclass(frozen=True)
class Import:
    """One imported module: its name, and whether importing this file imports it."""

    name: str
    eager: bool
    typing: bool


def contracts() -> list[dict[str, list[str]]]:
    return tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]  # type: ignore[no-any-return]


def modules() -> dict[str, Path]:
    """Return dotted name below the package -> file. A package has its own name."""
    found = {}
    for file in PACKAGE.rglob("*.py"):
        parts = file.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts if parts == ("__init__",) or parts[-1] != "__init__" else parts[:-1])] = file
    return found


@cache
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


def test_the_architecture_page_lists_the_layers_of_the_contracts() -> None:
    layers, without_torch = contracts()[0]["layers"], contracts()[1]["source_modules"]
    packages = {package: layer for layer, row in enumerate(reversed(layers)) for package in row.split(" | ")}
    page = PAGE.read_text()
    folders = FOLDER_ROW.findall(page)
    listed = [*folders, *((layer, module, torch) for module, layer, torch in MODULE.findall(page))]
    assert len(listed) == len(packages) and {package: int(layer) for layer, package, _ in listed} == packages
    assert {package for _, package, _ in folders} == {package for package in packages if (PACKAGE / package).is_dir()}
    assert {name.partition(".")[0] for name in modules()} == {*packages, "__init__"}
    # A package that needs torch may have modules that do not.
    whole = {name for name in without_torch if name.count(".") == 1}
    assert {f"zarrckpt.{package}" for _, package, torch in listed if not torch} == whole
    of_packages = {name.split(".")[1] for name in without_torch if name not in whole}
    assert of_packages <= {package for _, package, torch in listed if torch}


def test_clients_are_imported_only_by_their_own_modules() -> None:
    for client, allowed in CLIENTS.items():
        eager = {
            name
            for name, file in modules().items()
            for item in imports(file)
            if item.eager and item.name.split(".")[0] == client
        }
        assert eager <= allowed, (client, eager - allowed)


def test_only_the_dcp_package_imports_dcp() -> None:
    for name, file in modules().items():
        for item in imports(file):
            if item.name.startswith("torch.distributed.checkpoint"):
                helpers = item.name.startswith("torch.distributed.checkpoint.state_dict") and not item.eager
                assert name.startswith("_dcp.") or helpers, (name, item.name)


def test_private_names_of_torch_are_in_one_module() -> None:
    """Attributes and modules of torch whose names begin with an underscore."""
    owners = r"(?:torch|dist|gloo|options|storage|module|at|[sS]ave_?[pP]lanner|fsdp1?)"
    private = re.compile(rf"{owners}(?:\.\w+)*?\.(_[a-zA-Z]\w*)|from torch\S* import (_\w+)")
    for name, file in modules().items():
        found = [match[0] for match in private.finditer(file.read_text())]
        # The second one uses torch's reader of archives. The last two name modules of torch whose classes pickles hold,
        # and import none of them.
        allowed = ("_ranks.torch_private", "_format.torch_archives", "_format.values", "_dcp.metadata_pickle")
        assert not found or name in allowed, (name, found)


def test_a_name_without_underscore_is_defined_in_one_module() -> None:
    defined: dict[str, list[str]] = {}
    for name, file in modules().items():
        for node in ast.parse(file.read_text()).body:
            targets: list[ast.expr] = []
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                defined.setdefault(node.name, []).append(name)
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                if isinstance(target, ast.Name):
                    defined.setdefault(target.id, []).append(name)
    # Type variables have one letter.
    twice = {
        name: places
        for name, places in defined.items()
        if len(places) > 1 and len(name) > 1 and not name.startswith("_")
    }
    assert not twice


def test_names_of_classes_end_with_a_term_of_the_glossary() -> None:
    """Public classes, and classes that another module imports. See the page's section on names of classes."""
    page = (PACKAGE.parent / "docs" / "reference" / "glossary.md").read_text()
    terms = {term.split()[-1].lower() for row in re.findall(r"^\| ([^|]+) \|", page, re.M) for term in row.split(", ")}
    terms |= {*re.findall(r"\w+", page.partition("plain word: ")[2].partition(".")[0].lower())}
    trees = [ast.parse(file.read_text()) for file in modules().values()]
    defined = {node.name for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)}
    shared = {*zarrckpt.__all__}
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("zarrckpt"):
            shared |= {alias.name for alias in node.names}
    unknown = []
    for name in sorted(defined & shared):
        word = re.findall(r"[A-Z]+(?![a-z])|[A-Z][a-z0-9]+", name)[-1].lower()
        forms = {word, word.removesuffix("s"), word.removesuffix("es"), re.sub("ies$", "y", word)}
        if f"`{name}`" not in page and not terms & forms:
            unknown.append(name)
    assert not unknown
