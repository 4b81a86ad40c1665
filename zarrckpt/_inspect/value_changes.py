"""Find the first difference between two Python values, and describe it in texts for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MAX_SHOWN = 80
"""Maximum number of characters of a value in a list of entries."""


def shorten(text: str) -> str:
    """Return a text, or its beginning, in at most MAX_SHOWN characters."""
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 1]}…"


def describe_change(one: Any, other: Any) -> tuple[str, str] | None:
    """Return two values as texts, or None if they are equal. In the comparison 1 is not True, and NaN equals NaN.

    For long values, the texts show the first difference and its path.
    """
    path, texts = "", [_python_text(one), _python_text(other)]
    if texts[0] == texts[1]:
        return None
    if max(map(len, texts)) > MAX_SHOWN:
        path, *texts = _first_difference(one, other)
    begin = _common_length(*texts)
    if begin >= MAX_SHOWN - 1:
        texts = [f"…{text[begin:]}" for text in texts]
    return f"value{path} {shorten(texts[0])}", f"value{path} {shorten(texts[1])}"


def _python_text(value: Any) -> str:
    """Return a value as Python's text. Integers with more digits than Python converts to text are hexadecimal."""
    try:
        return repr(value)
    except ValueError:
        if isinstance(value, int):
            return hex(value)
        texts = map(_python_text, value.items() if isinstance(value, Mapping) else value)
        return f"{type(value).__name__}({', '.join(sorted(texts) if isinstance(value, set | frozenset) else texts)})"


def _first_difference(one: Any, other: Any, path: str = "") -> tuple[str, str, str]:
    """Return the path of the first difference inside two values, and the texts of the elements there.

    The path is in Python's syntax. The text of an element that one value lacks is "absent".
    """
    if type(one) is type(other) and isinstance(one, Mapping | list | tuple):
        sides = [value if isinstance(value, Mapping) else dict(enumerate(value)) for value in (one, other)]
        for key in {**sides[0], **sides[1]}:
            here, there = (_python_text(side[key]) if key in side else "absent" for side in sides)
            if here != there and all(key in side for side in sides):
                return _first_difference(sides[0][key], sides[1][key], f"{path}[{key!r}]")
            if here != there:
                return f"{path}[{key!r}]", here, there
        return f"{path}.keys()", _python_text([*one]), _python_text([*other])
    if type(one) is type(other) and isinstance(one, str | bytes) and max(len(one), len(other)) > MAX_SHOWN // 2:
        begin = _common_length(one, other)
        return f"{path}[{begin}:]", _python_text(one[begin:]), _python_text(other[begin:])
    return path, _python_text(one), _python_text(other)


def _common_length(one: str | bytes, other: str | bytes) -> int:
    """Return the length of the common prefix."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(one), len(other)))
