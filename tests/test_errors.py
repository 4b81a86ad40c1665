"""The error tree: documented, picklable, and caught by what users know."""

from __future__ import annotations

import copy
import pickle
import re
from pathlib import Path

import pytest

import zarrckpt
from zarrckpt import _errors

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "errors.md"
ROW = re.compile(r"^\| `(\w+)` \|(.*?)\|.+\|.*\|$", re.MULTILINE)

EXPORTED = [
    value
    for name in zarrckpt.__all__
    if isinstance(value := getattr(zarrckpt, name), type) and issubclass(value, Exception)
]


def test_every_error_is_exported_and_on_the_page() -> None:
    defined = [value for value in vars(_errors).values() if isinstance(value, type) and issubclass(value, Exception)]
    assert {*EXPORTED} == {*defined}
    rows = {name: also for name, also in ROW.findall(PAGE.read_text())}
    assert {error.__name__ for error in EXPORTED} == set(rows)
    for error in EXPORTED:
        bases = {base.__name__ for base in error.__bases__} - {"CheckpointError", "Exception"}
        assert set(re.findall(r"`(\w+)`", rows[error.__name__])) == bases, error


@pytest.mark.parametrize("error", EXPORTED)
def test_errors_travel_and_make_sense_alone(error: type[zarrckpt.CheckpointError]) -> None:
    """They cross ranks pickled; the text, line breaks included, must be what was written."""
    raised = error("found a\nexpected b")
    for copied in (pickle.loads(pickle.dumps(raised)), copy.copy(raised)):
        assert type(copied) is error and str(copied) == "found a\nexpected b"
    assert issubclass(error, zarrckpt.CheckpointError) and (error.__doc__ or "").strip()


def test_a_notebook_shows_the_message_and_the_callers_frames(tmp_path: Path) -> None:
    def look() -> None:
        zarrckpt.open(tmp_path / "nothing")

    with pytest.raises(zarrckpt.CheckpointNotFoundError) as raised:
        look()
    raised.value.add_note("seen on rank 3")
    shown = raised.value._render_traceback_()  # IPython calls it
    assert shown[:2] == [f"CheckpointNotFoundError: {raised.value}", "seen on rank 3"]
    frames = [line for line in shown if line.startswith("  File")]
    assert len(frames) == 2 and all(__file__ in line for line in frames) and "in look" in frames[1]
    assert len("\n".join(shown).splitlines()) < 12 and zarrckpt.StorageError("no frames")._render_traceback_()
