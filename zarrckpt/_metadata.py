"""What a user keeps with a checkpoint: a JSON object, in the root document. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zarrckpt import _values
from zarrckpt._errors import CorruptCheckpointError

MAX_METADATA = 64 << 10
"""Bytes of JSON: every reader of the checkpoint fetches it."""

RESERVED = "zarrckpt."
"""How the names begin that this package gives a meaning."""


def checked_metadata(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """The ``metadata`` of a save as plain JSON types; tensors and numpy arrays of one element count as numbers.

    Raises TypeError and ValueError that name the member.
    """
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise TypeError(f"metadata must be a dict such as {{'step': 7}}, got a {type(given).__name__}")
    plain: dict[str, Any] = _plain(given, "metadata")
    reserved = [name for name in plain if name.startswith(RESERVED)]
    if reserved:
        raise ValueError(f"metadata[{reserved[0]!r}]: names that begin with {RESERVED!r} are reserved")
    encoded = _values.encode_json(plain)
    if encoded is _values.NOT_JSON:
        raise ValueError(f"metadata nests deeper than {_values.MAX_DEPTH} levels")
    if (size := _values.json_size(encoded)) > MAX_METADATA:
        raise ValueError(
            f"metadata takes {size:,} bytes as JSON, more than {MAX_METADATA:,}: put what is large into the state"
        )
    return plain


def _plain(value: Any, where: str) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str) or key.startswith("$"):
                raise TypeError(f"{where}: the key {key!r} must be a str that does not begin with '$'")
        return {str(key): _plain(item, f"{where}[{key!r}]") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{where}[{place}]") for place, item in enumerate(value)]
    # Losses and other metrics are tensors and numpy numbers as often as floats.
    if callable(getattr(value, "item", None)) and getattr(value, "size", None) is not None:
        try:
            return _plain(value.item(), where)
        except (RuntimeError, ValueError):
            pass  # more than one element
    raise TypeError(
        f"{where} is a {type(value).__name__}: metadata takes None, bools, numbers, strings, lists and dicts of them"
    )


def parse_metadata(found: Any, where: str) -> dict[str, Any]:
    """The metadata of a stored root. Raises CorruptCheckpointError."""
    value = _values.decode_json(found) if isinstance(found, dict) else None
    if type(value) is not dict or not all(type(name) is str for name in value):
        raise CorruptCheckpointError(f"{where}: metadata is {found!r:.80}, expected an object")
    return value
