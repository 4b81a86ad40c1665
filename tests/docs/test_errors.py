"""The error tree: documented, picklable, and caught by the builtin errors that users expect."""

from __future__ import annotations

import copy
import pickle
import re
import traceback
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from harness import ROOT
from harness.s3_server import S3Server

import zarrckpt
from zarrckpt import _errors
from zarrckpt.cli import main

PAGE = ROOT / "docs" / "reference" / "errors.md"
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
def test_errors_pickle_and_name_their_subject(error: type[zarrckpt.CheckpointError]) -> None:
    """They are sent between ranks pickled. The text, including line breaks, must be unchanged."""
    raised = error("found a\nexpected b")
    for copied in (pickle.loads(pickle.dumps(raised)), copy.copy(raised)):
        assert type(copied) is error and str(copied) == "found a\nexpected b"
    assert issubclass(error, zarrckpt.CheckpointError) and (error.__doc__ or "").strip()


CONTROLS = "\x1b[2J\x07\x9b\u202e\u2066\u2028\x00"
"""Sequences that terminals obey: erase, ring, change the direction of text, break lines."""


@pytest.mark.parametrize(
    "number", [0xAD, 0x115F, 0x1160, 0x180E, 0x200B, 0x200D, 0x2060, 0x2800, 0x3164, 0xFE0F, 0xFFA0]
)
def test_invisible_characters_are_escaped(number: int, tmp_path: Path) -> None:
    name = f"model{chr(number)}"
    zarrckpt.save({name: torch.ones(1), "text": name}, tmp_path / name)
    shown = [CliRunner().invoke(main, [command, str(tmp_path / name)]).output for command in ("ls", "tree", "info")]
    shown.append(CliRunner().invoke(main, ["cat", str(tmp_path / name), "text"]).output)
    with pytest.raises(zarrckpt.CheckpointNotFoundError) as error:
        zarrckpt.open(tmp_path / name / "nothing")
    escaped = chr(number).encode("unicode_escape").decode()
    for text in (*shown, str(error.value)):
        assert f"model{escaped}" in text and chr(number) not in text


def test_no_message_commands_a_terminal(tmp_path: Path, s3_stub: S3Server, caplog: pytest.LogCaptureFixture) -> None:
    """No escape sequence in texts from servers and folders, nor in notes, causes, warnings, log lines and output."""
    shown, evil = [], CONTROLS[:-1]
    error = zarrckpt.StorageError(f"one\n{CONTROLS}")
    error.add_note(f"note {CONTROLS}")
    shown += [str(error), *error.__notes__]
    assert str(error).startswith("one\n\\x1b[2J\\x07\\x9b\\u202e")
    _errors.log.error("%s %d", CONTROLS, 7)
    assert caplog.text.rstrip().endswith("\\x00 7")
    shown.append(caplog.text)

    s3_stub.faults.refusal = f"<Error><Code>Denied{evil}\n</Code><Message>{evil}\n</Message></Error>"
    place = s3_stub.bucket()
    with pytest.raises(zarrckpt.StorageError) as refused:
        zarrckpt.open(place.url("x"), storage_options=place.storage_options)
    shown += traceback.format_exception(refused.value)

    run = tmp_path / f"run{evil}\n"
    zarrckpt.save({"w": torch.ones(1)}, run / "step-1")
    (run / f"{evil}\nx-9").mkdir()
    (run / f"{evil}\nx-9" / "zarr.json").write_bytes(b"{")
    with pytest.warns(UserWarning, match="was skipped") as warned:
        assert zarrckpt.latest(run) == str(run / "step-1")
    shown.append(str(warned[0].message))
    with pytest.raises(zarrckpt.CheckpointNotFoundError) as missing:
        zarrckpt.open(run)
    shown.append(str(missing.value))
    assert "\n" not in str(warned[0].message) + str(missing.value)
    for words in (["ls", run], ["ls", run, "--json"], ["info", run / "step-1", "--json"], ["verify", run], ["ls", "x"]):
        found = CliRunner().invoke(main, [*map(str, words), *(["-o", f"{evil}=1"] if words[-1] == "x" else [])])
        shown += [found.stdout, found.stderr]
    assert not {*"".join(shown)} & {*CONTROLS[:1], *CONTROLS[4:]}


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
