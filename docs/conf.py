"""The documentation as a site: ``make docs``.

The Markdown files are also read without a site, for example on GitHub. So the parts that only a site needs are here:
the navigation, the API from the docstrings, the help of the commands.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import click
from pygments.lexers.shell import BashLexer
from sphinx.application import Sphinx
from sphinx.ext.napoleon import Config, GoogleDocstring

from zarrckpt import __all__, __version__
from zarrckpt.cli import main

ROOT = Path(__file__).parent.parent

project = "zarrckpt"
author = "The zarrckpt authors"
copyright = f"{author}. Apache License 2.0"
release = version = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc"]
exclude_patterns = ["_*"]

# Anchors of headings are GitHub's. Every link must have a target (warnings are errors).
myst_heading_anchors = 4
nitpicky = True
OTHERS = "collections|concurrent|dist|numpy|np|os|threading|torch|xarray|zarr"
nitpick_ignore_regex = [("py:.*", rf"({OTHERS})\..+|Mode|Progress|Url|\w+Option|.+\.ReusedChunks")]

add_module_names = False
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 88
python_use_unqualified_type_names = True
toc_object_entries_show_parents = "hide"

html_theme = "furo"
html_title = f"zarrckpt {version}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = html_show_sourcelink = html_show_sphinx = False
pygments_style, pygments_dark_style = "friendly", "github-dark"

# Caption -> pages in their order, with a short title. Other pages of the folder follow, by name.
NAVIGATION = {
    "Start": ["Tutorial <tutorial>"],
    "How to": [
        "Keep a run <how-to/runs>",
        "Training loops <how-to/training-loops>",
        "Kubernetes <how-to/kubernetes>",
        "Slurm <how-to/slurm>",
        "Ray Train <how-to/ray>",
        "S3 and other stores <how-to/stores>",
        "S3 Express, Rapid <how-to/fast-buckets>",
        "Resume <how-to/resume>",
        "Per-rank state <how-to/per-rank-state>",
        "DCP's own calls <how-to/dcp>",
        "Read without training <how-to/read>",
        "Serve from a checkpoint <how-to/serve>",
        "See it on one page <how-to/report>",
        "Analyse with xarray <how-to/analyse>",
        "Copy <how-to/copy>",
        "Convert <how-to/convert>",
        "Monitor <how-to/monitor>",
        "Failed saves, damage <how-to/unfinished-saves>",
        "How often to save <how-to/how-often>",
        "Cost <how-to/cost>",
        "Speed and memory <how-to/speed>",
        "Save less <how-to/reuse>",
        "Compression <how-to/compression>",
    ],
    "Look up": [
        "API <reference/api>",
        "API, all docstrings <reference/python/index>",
        "Command line <reference/cli>",
        "Command line, all options <reference/commands>",
        "Errors <reference/errors>",
        "Glossary <reference/glossary>",
        "Casts <reference/casts>",
        "Format <reference/format>",
        "Other readers <reference/readers>",
        "Object stores <reference/stores>",
        "Versions <reference/versions>",
        "Changelog <reference/changelog>",
    ],
    "Understand": [
        "Architecture <explanation/architecture>",
        "Chunks <explanation/chunks>",
        "Ranks together <explanation/ranks>",
        "Scale <explanation/scale>",
        "Commit <explanation/commit>",
        "Crashes <explanation/crashes>",
        "Security <explanation/security>",
        "Comparison <explanation/comparison>",
        "Speed <explanation/speed>",
    ],
}


def navigation(found: set[str]) -> str:
    """Return the tables of contents of all pages."""
    tables = ""
    for caption, entries in NAVIGATION.items():
        named = [entry.partition("<")[2].removesuffix(">") for entry in entries]
        folder = named[-1].rpartition("/")[0]
        others = {page for page in found if folder and page.rpartition("/")[0] == folder}
        listed = "\n".join([*entries, *sorted(others.difference(named))])
        tables += f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{listed}\n```\n"
    return tables


def help_of_commands() -> str:
    """Return each command's help, as a terminal shows it."""
    context = click.Context(main, info_name="zarrckpt", terminal_width=90, **main.context_settings)
    sections = ""
    for name in main.list_commands(context):
        command = main.get_command(context, name)
        assert command is not None
        with click.Context(command, parent=context, info_name=name) as inner:
            sections += f"\n## zarrckpt {name}\n\n```text\n{command.get_help(inner)}\n```\n"
    return sections


def complete_page(app: Sphinx, docname: str, source: list[str]) -> None:
    """Add the parts of a page that only the site has."""
    if docname == "index":
        source[0] += navigation(app.env.found_docs)
    elif docname == "reference/commands":
        source[0] += help_of_commands()
    elif docname == "reference/changelog":
        source[0] = (ROOT / "CHANGELOG.md").read_text().replace("](docs/", "](../")


ERROR = re.compile(rf"(?<![\w`.~])({'|'.join(name for name in __all__ if name.endswith('Error'))})\b")


class Docstring(GoogleDocstring):
    """A docstring whose ``Args:`` become a table."""

    def _parse_parameters_section(self, section: str) -> list[str]:
        lines = [".. list-table::", "   :class: arguments", "   :header-rows: 1", ""]
        for name, _, text in [("Argument", "", ["Meaning"]), *self._consume_fields()]:
            cell = name if name == "Argument" else f"``{name}``"
            lines += [f"   * - {cell}", *self._format_block("     - ", text)]
        return [*lines, ""]


def format_docstring(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """``Args:`` as a table, and links to errors.

    Not for attributes: the napoleon extension takes the text before a colon for a type.
    """
    if what in ("class", "function", "method"):
        lines[:] = Docstring("\n".join(lines), Config(), app, what, name, obj, options).lines()
    lines[:] = [ERROR.sub(r":class:`~zarrckpt.\1`", line) for line in lines]


def setup(app: Sphinx) -> dict[str, bool]:
    """Sphinx calls this."""
    app.add_lexer("console", BashLexer)  # the pages' commands stand without a prompt, to be copied
    app.connect("source-read", complete_page)
    app.connect("autodoc-process-docstring", format_docstring)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
