"""Names: the results of escape must survive every store, and differ for different keys."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from enum import IntEnum, StrEnum
from pathlib import Path
from urllib.parse import quote, unquote_plus, urljoin, urlsplit

import numpy as np
import obstore
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

from zarrckpt import CorruptCheckpointError, UnsupportedValueError
from zarrckpt._format.names import check_paths, escape, node_path, unique_paths

LONG = "encoder.layers.0." * 40
NASTY = [
    *("", ".", "..", "...", "/", "\\", "a/b", "a\\b", "/abs", "a/../b"),
    *("c:", "C:\\x", "a::b", "s3://bucket/key"),
    *("zarr.json", ".zarray", ".zgroup", ".zattrs", ".zmetadata", "zarr.json.bak", ".hidden"),
    *("c", "c.0", "c.0.1", "c/0", "0.0", "layers.0.weight"),
    *("_", "__", "___", "_a", "__a", "a__", "@", "@zarrckpt", "a@b", "@" + "0" * 32),
    *("#", "#1", "a#1", "a#1#2", "a#1b", "a#\u0661", "a##7", "a#%"),
    *("%", "%%", "%41", "%2F", "%7E", "%252F", "~", "~root", "a%7E" + "f" * 32),
    *("=", "==", "===", "=41", "=2F", "=3D", "=2f", "==" + "0" * 32, "a==" + "f" * 32, "a=b", "a=", "k=v/w"),
    *(" ", "a ", " a", "\u00a0a", "a\u3000", "a\u3000b", "a.", "a. .", "\t", "a b", ".nfs0", ".zarrckpt-a.part"),
    *('"', "'", "<a>", "a|b", "a*", "a?", "[a]", "{a}", "a^b", "a`b"),
    *("$HOME", "a;b", "a&b=c", "a+b", "a,b", "!"),
    *("\0", "a\nb", "a\rb", "\x7f", "\x85", "\u2028", "\ufeff", "\ufffd", "\ufffe", "\uffff", "\U0001ffff"),
    *("é", "e\u0301", "权重", "😀", "ß"),
    *("x" * 255, "x" * 256, "é" * 127, "é" * 128, "%" * 85, "%" * 86, LONG, LONG + "weight", LONG + "bias"),
    *("/" * 300, "é" * 300, "y" * 218 + "/" * 30, "z" * 219 + "é" * 50),
]
ANY_TEXT = st.one_of(
    st.text(),
    st.text(alphabet="._#@%=/\\ 127DEeZarjson:c", max_size=12),
    st.text(alphabet="=25", max_size=8),
    st.sampled_from(NASTY),
)


def test_usual_names_stay_readable() -> None:
    for name in ("layers.0.weight", "_orig_mod", "c.0.1", "权重", "é", "😀", "A-b", "x" * 255):
        assert escape(name) == name
    assert escape("a/b") == "a=2Fb"
    assert escape("a=b") == "a=3Db"
    assert escape("50%") == "50=25"
    assert escape("(a b)") == "=28a=20b=29"
    assert escape("__init__") == "=5F_init__"
    assert escape("") == "=="
    assert escape("zarr.json") == "zarr=2Ejson"
    assert escape("..") == "=2E=2E"
    assert escape(".zarray") == "=2Ezarray"
    assert escape("a\u3000") == "a=E3=80=80"


def test_safe_characters_are_kept() -> None:
    for char in map(chr, [*range(0xD800), *range(0xE000, 0x10100)]):
        plain = char.isalnum() or char in "._-" if char.isascii() else char not in "\ufeff\ufffe\uffff"
        stays = plain and not char.isspace() and not "\x80" <= char <= "\x9f"
        assert (escape(f"a{char}a") == f"a{char}a") == stays, char


@given(ANY_TEXT)
@settings(max_examples=200)
def test_escaped_names_are_safe_and_can_be_decoded(name: str) -> None:
    """Urls do not change them: they stay the same if decoded any number of times, and all of them is in the path."""
    escaped = escape(name)
    assert len(escaped.encode()) <= 255
    plain = r"[A-Za-z0-9._-]|[^\x00-\xa0\ud800-\udfff]"
    assert re.fullmatch(rf"==|({plain}|=[0-9A-F]{{2}})+(==[0-9a-f]{{32}})?", escaped)
    assert escaped != "zarr.json"
    assert not escaped.startswith(("__", ".")) and not escaped.endswith(".")
    assert escaped == "".join(escaped.split())
    check_paths([escaped], "root")
    assert unquote_plus(escaped) == escaped == unquote_plus(quote(escaped))
    url = urlsplit(f"http://host/{escaped}/c.0")
    assert (url.path, url.query, url.fragment) == (f"/{escaped}/c.0", "", "")
    assert urljoin("http://host/ck/zarr.json", f"{escaped}/c.0") == f"http://host/ck/{escaped}/c.0"
    if name and "==" not in escaped:  # not shortened
        decoded = re.sub(rb"=([0-9A-F]{2})", lambda code: bytes.fromhex(code[1].decode()), escaped.encode())
        assert decoded.decode() == name


@given(st.lists(ANY_TEXT, unique=True, min_size=2, max_size=20))
def test_different_names_stay_different(names: list[str]) -> None:
    assert len({escape(name) for name in names}) == len(names)


def test_all_nasty_names_stay_different() -> None:
    assert len(NASTY) == len(set(NASTY))
    assert len({escape(name) for name in NASTY}) == len(NASTY)


def test_shortened_names() -> None:
    shortened = escape(LONG + "weight")
    assert len(shortened) == 255 and re.fullmatch(r"encoder\.layers\.0\..*==[0-9a-f]{32}", shortened)
    assert escape(LONG + "weight") != escape(LONG + "bias")
    # A key that equals a shortened name does not collide with it.
    assert escape(shortened) != shortened
    # Neither half a character nor half a code precedes the mark.
    for filler in range(210, 225):
        for tail in ("/" * 60, "é" * 60, "😀" * 60):
            head = escape("x" * filler + tail).rpartition("==")[0]
            assert re.fullmatch(r"x+(=2F|é|😀)*", head)


class Color(StrEnum):
    RED = "red"


class Level(IntEnum):
    LOW = 1


def test_node_path() -> None:
    assert node_path(["model", "layers.0.weight"]) == "model/layers.0.weight"
    assert node_path(("optim", "param_groups", 0, "a/b")) == "optim/param_groups/0/a=2Fb"
    assert node_path(["", ".."]) == "==/=2E=2E"
    assert node_path([]) == ""
    assert node_path([-3, 2**64]) == "-3/18446744073709551616"
    assert node_path([Color.RED, Level.LOW, True]) == "red/1/1"


def test_node_path_refuses_other_keys() -> None:
    for key in (1.5, None, (1, 2), b"x", 10**6000, -(10**6000), "a\ud800", "\ud83d\ude00"):
        with pytest.raises(UnsupportedValueError, match=type(key).__name__):
            node_path(["model", key])  # type: ignore[list-item]


def test_unique_paths() -> None:
    entries: list[Sequence[str | int]] = [("a", "x/y"), ("a", "x", "y"), ["b", 0], ("a", "x/y"), ("", "")]
    assert unique_paths(entries) == {
        ("a", "x/y"): "a/x=2Fy",
        ("a", "x", "y"): "a/x/y",
        ("b", 0): "b/0",
        ("", ""): "==/==",
    }
    assert unique_paths([]) == {}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("optim", 1), ("optim", "1")),
        (("optim", 1), ("optim", "1", "exp_avg")),
        (("optim", "1", "exp_avg", "deep"), ("optim", 1)),
    ],
)
def test_clashing_names_are_both_named(one: tuple[str | int, ...], other: tuple[str | int, ...]) -> None:
    with pytest.raises(UnsupportedValueError) as caught:
        unique_paths([("optim", "2"), one, ("model",), other])
    assert repr(list(one)) in str(caught.value)
    assert repr(list(other)) in str(caught.value)


def test_valid_paths_are_accepted() -> None:
    for path in (
        "a",
        "model/layers.0.weight",
        "a=400123/a",
        "c.0/_x",
        "=2E/é😀",
        "==/a==" + "0" * 32,
        "x" * 255 + "/y",
    ):
        check_paths([path], "root")


BAD_PATHS = [
    *("", "/", "/etc/passwd", "a/", "a//b", ".", "..", "../x", "a/../b", "a/./b"),
    *("zarr.json", "a/zarr.json", "@0123/a", "a/@b", "@", "a@b", "a/__x", ".nfs1", "a."),
    *("a\\..\\b", "\\\\host\\x", "C:/x", "c:x", "file://x", "a*", "a?b", "a#b", "%2E%2E/x", "a%b", "~", "a b", "{a}"),
    *("a\0b", "a\nb", "a/\x7f", "\x85", "\ud800", "a\u2028b", "\ufeffa", "x" * 256, "é" * 128),
]


@pytest.mark.parametrize("path", BAD_PATHS)
def test_invalid_paths_are_refused(path: str) -> None:
    with pytest.raises(CorruptCheckpointError):
        check_paths(["a", path], "root")


ESCAPED = [escape(name) for name in NASTY]


def test_escaped_names_are_files_and_folders_of_obstore(tmp_path: Path) -> None:
    store = obstore.store.LocalStore(tmp_path)
    leaves = [name for name in ESCAPED if len(name.encode()) < 250]  # leaves bytes for an unfinished upload's suffix
    keys = [f"model/{name}/{leaf}" for name in ESCAPED for leaf in ("zarr.json", "c.0")]
    keys += [f"flat/{name}" for name in leaves]
    for key in keys:
        obstore.put(store, key, key.encode())
    assert all(bytes(obstore.get(store, key).bytes()) == key.encode() for key in keys)
    assert {meta["path"] for batch in obstore.list(store) for meta in batch} == set(keys)
    assert {entry.name for entry in (tmp_path / "model").iterdir()} == set(ESCAPED)


def test_escaped_names_are_groups_and_arrays_of_zarr(tmp_path: Path) -> None:
    root = zarr.create_group(tmp_path, zarr_format=3)
    for number, name in enumerate(ESCAPED):
        root.create_group(name).create_array("w", data=np.full(2, number), chunks=(2,))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opened = zarr.open_group(tmp_path, mode="r", zarr_format=3)
        assert set(opened.group_keys()) == set(ESCAPED)
        for number, name in enumerate(ESCAPED):
            assert np.asarray(opened[f"{name}/w"][:]).tolist() == [number, number]
