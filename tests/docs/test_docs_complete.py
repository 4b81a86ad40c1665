"""The reference names everything that is public. Docstrings and drawings agree with the code."""

from __future__ import annotations

import ast
import builtins
import inspect
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import click
import pytest
from harness import ROOT

import zarrckpt
from zarrckpt.cli import main

DOCS = ROOT / "docs"
REFERENCE = DOCS / "reference"
ERRORS = [name for name in zarrckpt.__all__ if name.endswith("Error")]
COMMANDS = main.list_commands(click.Context(main))


def text(page: str) -> str:
    return (REFERENCE / page).read_text()


def documented(module: str) -> set[str]:
    """Return the names of a module that the generated pages show."""
    found = set()
    for page in (REFERENCE / "python").glob("*.rst"):
        rst = page.read_text()
        if f":: {module}\n" in rst:
            found |= set(re.findall(r"^\.\. auto(?:function|class|exception|data):: (\w+)(?:\(\))?$", rst, re.M))
    return found


def test_every_public_name_is_in_the_generated_pages() -> None:
    assert documented("zarrckpt") >= {*zarrckpt.__all__} - {"__version__"}


def test_every_public_name_is_in_the_overview() -> None:
    page = text("api.md")
    missing = [name for name in zarrckpt.__all__ if f"`{name}" not in page and name not in ERRORS]
    assert [name for name in missing if name != "__version__"] == []


@pytest.mark.parametrize(
    "call", [zarrckpt.save, zarrckpt.async_save, zarrckpt.load, zarrckpt.ZarrStorageWriter, zarrckpt.ZarrStorageReader]
)
def test_docstrings_explain_every_argument(call: Any) -> None:
    assert {*arguments(inspect.getdoc(call) or "")} == {*inspect.signature(call).parameters}


def test_every_member_of_a_checkpoint_is_in_the_overview() -> None:
    section = text("api.md").partition("## Checkpoint\n")[2].partition("\n## ")[0]
    members = [name for name in dir(zarrckpt.Checkpoint) if not name.startswith("_") and not hasattr(Mapping, name)]
    assert len(members) <= 25
    assert [name for name in members if not re.search(rf"`{name}[`(]", section)] == []


def test_every_error_is_explained() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", text("errors.md"), re.MULTILINE)
    assert sorted(rows) == sorted(ERRORS)


@pytest.mark.parametrize("name", ERRORS)
def test_the_page_of_errors_names_the_builtin_bases(name: str) -> None:
    row = next(line for line in text("errors.md").splitlines() if line.startswith(f"| `{name}` |"))
    bases = {base.__name__ for base in getattr(zarrckpt, name).__bases__} - {"CheckpointError", "Exception"}
    assert set(re.findall(r"`(\w+)`", row.split("|")[2])) == bases


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_and_option_is_in_the_page_of_commands(name: str) -> None:
    """In the command's own row, or in the part about all commands."""
    page = text("cli.md")
    assert f"`{name} " in page
    about_one = [line for line in page.splitlines() if re.match(r"\| `\w+ ", line)]
    own = "\n".join(line for line in about_one if f"`{name} " in line)
    shared = "\n".join(line for line in page.splitlines() if line not in about_one)
    command = main.get_command(click.Context(main), name)
    assert command is not None
    for option in command.params:
        if isinstance(option, click.Option):
            known = [word for word in option.opts if re.search(rf"(?<![\w-]){word}(?![\w-])", own + shared)]
            assert known, f"{name} {'/'.join(option.opts)} is not in docs/reference/cli.md"


def public_callables() -> Iterator[tuple[str, Any]]:
    for name in zarrckpt.__all__:
        found = getattr(zarrckpt, name)
        if inspect.isfunction(found) or inspect.isclass(found):
            yield name, found
        if inspect.isclass(found):
            for method, function in inspect.getmembers(found, inspect.isfunction):
                if not method.startswith("_"):
                    yield f"{name}.{method}", function


def arguments(docstring: str) -> list[str]:
    """Return the names in a docstring's ``Args:`` block, as the page generator reads them: before a line's colon."""
    block = re.search(r"^Args:\n((?:    .*\n?|\n)*)", docstring, re.MULTILINE)
    lines = block[1].splitlines() if block else []
    named = [line.strip().partition(":")[0] for line in lines if re.match(r"    \S", line)]
    return [name.lstrip("*") for names in named for name in names.split(", ")]


@pytest.mark.parametrize(
    ("name", "found"), [*public_callables()], ids=lambda value: value if type(value) is str else ""
)
def test_documented_arguments_exist(name: str, found: Any) -> None:
    named = arguments(inspect.getdoc(found) or "")
    if named:
        assert set(named) <= set(inspect.signature(found).parameters), f"{name}: {named}"


def test_arguments_are_found() -> None:
    assert {"url", "options", "progress"} <= set(arguments(inspect.getdoc(zarrckpt.ZarrStorageWriter) or ""))


def test_errors_named_in_docstrings_exist() -> None:
    known, named = {*dir(builtins)}, set()
    for path in (ROOT / "zarrckpt").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                known.add(node.name)
            elif isinstance(node, ast.ImportFrom):
                known |= {alias.asname or alias.name for alias in node.names}
            elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and type(node.value.value) is str:
                docstring = " ".join(node.value.value.split())
                for listed in re.findall(r"\bRaises ((?:(?:,? and |,? or |, )?[A-Z]\w+)+)", docstring):
                    named |= {(name, path.name) for name in re.findall(r"[A-Z]\w+", listed)}
                named |= {(name, path.name) for name in re.findall(r"\b[A-Z]\w+Error\b", docstring)}
    assert len(named) > 200
    assert sorted((name, module) for name, module in named if name not in known) == []


def test_the_drawings_are_up_to_date() -> None:
    drawings = runpy.run_path(str(DOCS / "diagrams.py"))["DRAWINGS"]
    for name, draw in drawings.items():
        assert (DOCS / "explanation" / name).read_text() == draw(), f"{name}: python docs/diagrams.py"


def test_the_first_page_links_to_every_page() -> None:
    index = (DOCS / "index.md").read_text()
    pages = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")} - {"index.md", "reference/changelog.md"}
    assert [page for page in sorted(pages) if f"({page})" not in index] == []


def test_the_site_names_pages_that_exist() -> None:
    """Reads ``NAVIGATION`` of conf.py without importing it: Sphinx may not be installed."""
    for statement in ast.parse((DOCS / "conf.py").read_text()).body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "NAVIGATION":
            entries = [entry for group in ast.literal_eval(statement.value).values() for entry in group]
    pages = [entry.partition("<")[2].removesuffix(">") for entry in entries]
    assert [page for page in pages if not any((DOCS / f"{page}{end}").exists() for end in (".md", ".rst"))] == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts_are_printed(shell: str) -> None:
    environment = {**os.environ, "_ZARRCKPT_COMPLETE": f"{shell}_source"}
    command = [sys.executable, "-c", "from zarrckpt.cli import main; main(prog_name='zarrckpt')"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and f"_ZARRCKPT_COMPLETE={shell}_complete" in done.stdout, done.stderr
    assert f"_ZARRCKPT_COMPLETE={shell}_source" in text("cli.md") or f"`{shell}_source`" in text("cli.md")


def test_completion_offers_commands_and_options() -> None:
    command = [sys.executable, "-c", "from zarrckpt.cli import main; main(prog_name='zarrckpt')"]

    def completed(*words: str) -> set[str]:
        asked = {"COMP_WORDS": " ".join(words), "COMP_CWORD": str(len(words) - 1)}
        environment = {**os.environ, "_ZARRCKPT_COMPLETE": "bash_complete", **asked}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        return {line.partition(",")[2] for line in done.stdout.splitlines()}

    assert completed("zarrckpt", "st") == {"stats"}
    assert "--sort" in completed("zarrckpt", "stats", "--s")
