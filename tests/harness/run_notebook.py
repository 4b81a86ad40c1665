"""Run a notebook's cells one after the other in this process, and show the last expression of each, as Jupyter does.

Call ``python run_notebook.py NOTEBOOK`` in the notebook's folder. Jupyter itself would need 25 packages for one test.
Jupyter has magics, but the notebook uses none. Pictures are drawn here, too, but not shown.
"""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path
from typing import Any


def code_cells(path: Path) -> list[dict[str, Any]]:
    """Return the code cells of a notebook."""
    return [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]


def run(source: str, where: str, names: dict[str, Any]) -> Any:
    """Run a cell. Return the value of its last line, None if that is no expression or ends with a semicolon."""
    tree = ast.parse(source, where)
    last = tree.body[-1] if tree.body else None
    shown = isinstance(last, ast.Expr) and not source.rstrip().endswith(";")
    before = ast.Module(tree.body[:-1] if shown else tree.body, [])
    exec(compile(before, where, "exec"), names)
    return eval(compile(ast.Expression(last.value), where, "eval"), names) if shown else None  # type: ignore[union-attr]


def main(path: Path) -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    for number, cell in enumerate(code_cells(path), 1):
        value = run("".join(cell["source"]), f"{path.name}, cell {number}", names)
        if value is not None:
            html = value._repr_html_() if hasattr(value, "_repr_html_") else None
            print(repr(value), f"[{len(html)} characters of HTML]" if html else "")


if __name__ == "__main__":
    sys.path[0] = ""  # as in Jupyter: modules beside the notebook
    main(Path(sys.argv[1]))
