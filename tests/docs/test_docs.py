"""The code in README.md and docs/ runs, and the targets of their links exist.

A page's ```python blocks are one program: they run in order, in one process, in an empty folder. A block that is marked
```python no-run is left out. Code that a page needs but does not show is in a comment: <!-- test-setup: ... -->
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
CODE = re.compile(r"^```python\n(.*?)^```$|^<!-- test-setup:(.*?)-->", re.DOTALL | re.MULTILINE)
FENCE = re.compile(r"^( *)```(.*)$", re.MULTILINE)
LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)")


def program(page: str) -> str:
    """Return the code of a page, each piece on its lines of the page, so that tracebacks point into the page."""
    lines = 0
    code = ""
    for match in CODE.finditer(page):
        group = 1 if match[1] is not None else 2
        gap = page.count("\n", 0, match.start(group)) - lines
        code += "\n" * gap + match[group].rstrip(" ")
        code += "" if code.endswith("\n") else "\n"
        lines = code.count("\n")
    return code


RUNNABLE = [page for page in PAGES if program(page.read_text()).strip()]


RUNNER = """
import atexit, gc, os, runpy, signal, sys, threading, traceback
import dask.array, torch._dynamo, torch.distributed.fsdp, torch.distributed.checkpoint, xarray, zarr, zarrckpt

for name in zarrckpt.__all__:
    getattr(zarrckpt, name)
gc.freeze()
for line in sys.stdin:
    script, work, output = line.split("\\t")
    child = os.fork()
    if child == 0:
        out = os.open(output.rstrip("\\n"), os.O_WRONLY | os.O_CREAT)
        os.dup2(out, 1), os.dup2(out, 2), os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.chdir(work), signal.alarm(120)
        sys.argv[:] = [script]
        status = 1
        try:
            runpy.run_path(script, run_name="__main__")
            status = 0
        except BaseException:
            traceback.print_exc()
        threading._shutdown(), atexit._run_exitfuncs(), sys.stdout.flush(), sys.stderr.flush()
        os._exit(status)  # to free all objects would take longer than most pages
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.fixture(scope="module")
def runner() -> Iterator[subprocess.Popen[str]]:
    """Run each script in a separate process, forked from one that has made the slow imports."""
    command = [sys.executable, "-c", RUNNER]
    with subprocess.Popen(command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


@pytest.mark.parametrize("page", RUNNABLE, ids=lambda page: str(page.relative_to(ROOT)))
def test_code_runs(page: Path, tmp_path: Path, runner: subprocess.Popen[str]) -> None:
    assert runner.stdin is not None and runner.stdout is not None
    script, work, output = tmp_path / "page.py", tmp_path / "work", tmp_path / "output"
    script.write_text(program(page.read_text()))
    work.mkdir()
    print(script, work, output, sep="\t", file=runner.stdin, flush=True)
    status = runner.stdout.readline().strip()
    assert status == "0", f"{page.name}, exit status {status}, lines as in the page:\n{output.read_text()}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_code_blocks_name_their_language(page: Path) -> None:
    """A block with another spelling of its language would never run, without any error."""
    marks = [match for match in FENCE.finditer(page.read_text())]
    for opening in marks[::2]:
        assert not opening[1] or "py" not in opening[2], f"{page.name}: indented {opening[2]!r} block"
        assert "py" not in opening[2] or opening[2] in ("python", "python no-run"), f"{page.name}: {opening[2]!r}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_targets_of_links_exist(page: Path) -> None:
    targets = [target for target in LINK.findall(page.read_text()) if "://" not in target]
    assert [target for target in targets if not (page.parent / target).exists()] == []


def test_the_readme_and_the_tutorial_have_code() -> None:
    assert {page.name for page in RUNNABLE} >= {"README.md", "tutorial.md"}


def test_the_page_of_monitoring_shows_the_example() -> None:
    def without_indents(text: str) -> str:
        return "\n".join(line.strip() for line in text.splitlines())

    page = (ROOT / "docs" / "how-to" / "monitor.md").read_text()
    example = without_indents((ROOT / "examples" / "monitoring.py").read_text())
    blocks = re.findall(r"^```python no-run\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    assert len(blocks) == 7 and [block for block in blocks if without_indents(block) not in example] == []
