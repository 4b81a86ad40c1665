"""Find the first difference between two Python values, and describe it in texts for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zarrckpt._reports import value_text

MAX_SHOWN = 80
"""Maximum number of characters of a value in a list of entries."""

_NOT_THERE = object()


def shorten(text: str) -> str:
    """Return a text, or its beginning, in at most MAX_SHOWN characters."""
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 1]}…"


def describe_change(one: Any, other: Any) -> tuple[str, str]:
    """Return two values as texts. For long values, the path of the first difference and the elements there."""
    texts = _python_text(one), _python_text(other)
    if max(map(len, texts)) <= MAX_SHOWN and texts[0] != texts[1]:
        return f"value {texts[0]}", f"value {texts[1]}"
    path, one, other = _first_difference(one, other)
    shown = _differing_texts(one, other)
    return f"value{path} {shown[0]}", f"value{path} {shown[1]}"


def comparison_key(value: Any) -> object:
    """Return a comparison key: Python's text, in which 1 and True differ, and NaN equals NaN."""
    try:
        return repr(value)
    except ValueError:  # an integer with more digits than Python converts to text
        if isinstance(value, Mapping):
            return [(repr(key), comparison_key(item)) for key, item in value.items()]
        return [*map(comparison_key, value)] if isinstance(value, list | tuple) else hex(value)


def _python_text(value: Any) -> str:
    """Return a value as Python's text, or an integer with too many digits in hexadecimal."""
    try:
        return repr(value)
    except ValueError:
        return hex(value) if isinstance(value, int) else value_text(value)


def _first_difference(one: Any, other: Any) -> tuple[str, Any, Any]:
    """Return the path of the first difference inside two values, and the elements there.

    The path is in Python's syntax. An element that one value lacks is _NOT_THERE.
    """
    if type(one) is not type(other):
        return "", one, other
    if isinstance(one, Mapping):
        for key in {**one, **other}:
            a, b = one.get(key, _NOT_THERE), other.get(key, _NOT_THERE)
            if _values_differ(a, b):
                return _within_step(f"[{key!r}]", a, b)
        return ".keys()", list(one), list(other)
    if isinstance(one, list | tuple):
        for index in range(max(len(one), len(other))):
            a, b = (value[index] if index < len(value) else _NOT_THERE for value in (one, other))
            if _values_differ(a, b):
                return _within_step(f"[{index}]", a, b)
    if isinstance(one, str | bytes) and max(len(one), len(other)) > MAX_SHOWN // 2:
        begin = _common_length(one, other)
        return f"[{begin}:]", one[begin:], other[begin:]
    return "", one, other


def _within_step(step: str, one: Any, other: Any) -> tuple[str, Any, Any]:
    path, a, b = _first_difference(one, other)
    return f"{step}{path}", a, b


def _values_differ(one: Any, other: Any) -> bool:
    if one is _NOT_THERE or other is _NOT_THERE:
        return one is not other
    return comparison_key(one) != comparison_key(other)


def _differing_texts(one: Any, other: Any) -> tuple[str, str]:
    """Return two elements as texts that differ within MAX_SHOWN characters."""
    texts = ["absent" if value is _NOT_THERE else _python_text(value) for value in (one, other)]
    begin = _common_length(*texts)
    if begin >= MAX_SHOWN - 1:
        texts = [f"…{text[begin:]}" for text in texts]
    return shorten(texts[0]), shorten(texts[1])


def _common_length(one: str | bytes, other: str | bytes) -> int:
    """Return the length of the common prefix."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(one), len(other)))
