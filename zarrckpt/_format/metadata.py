"""What a user keeps with a checkpoint: a JSON object, in the root document. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from zarrckpt._errors import CorruptCheckpointError
from zarrckpt._format import json_values
from zarrckpt._format.sealed import is_save_id
from zarrckpt._format.state_path import KEY_BITS

MAX_METADATA = 64 << 10
"""Bytes of JSON: every reader of the checkpoint fetches it."""

RESERVED = "zarrckpt."
"""How the names begin that this package gives a meaning."""

RUN_METADATA = f"{RESERVED}run"
"""The member that says which run a checkpoint belongs to."""

MAX_RUN_METADATA = MAX_METADATA - 128
"""What a user may give to a checkpoint of a run: that member takes up to 110 bytes."""


def checked_metadata(given: Mapping[str, Any] | None, most: int = MAX_METADATA) -> dict[str, Any]:
    """The ``metadata`` of a save as plain JSON types; tensors and numpy arrays of one element count as numbers.

    It may have ``most`` bytes as JSON. Raises TypeError and ValueError that name the member.
    """
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise TypeError(f"metadata must be a dict such as {{'step': 7}}, got a {type(given).__name__}")
    plain: dict[str, Any] = _plain(given, "metadata", 0, iter(range(MAX_METADATA)))
    for name in plain:
        check_name(name, "metadata")
    if (size := json_values.json_size(json_values.encode_json(plain))) > most:
        raise _too_large(f"{size:,} bytes", most)
    return plain


def check_name(name: str, where: str) -> None:
    """Raise ValueError for a name of the metadata that is reserved, TypeError for one that JSON cannot hold."""
    _check_run_key(name, where)
    if name.startswith(RESERVED):
        raise ValueError(f"{where}[{name!r}]: names that begin with {RESERVED!r} are reserved")


def check_int(value: int, where: str) -> None:
    """Raise ValueError for a number with more bits than the format has."""
    if value.bit_length() > KEY_BITS:
        raise ValueError(f"{where} is an int of {value.bit_length()} bits, more than {KEY_BITS}")


def _check_run_key(key: object, where: str) -> None:
    if not isinstance(key, str) or not json_values.is_plain_key(str(key)):
        raise TypeError(f"{where}: the key {key!r} must be a str of Unicode that does not begin with '$'")


def run_of(metadata: Mapping[str, Any]) -> str:
    """The id of the run that a checkpoint with this metadata belongs to, "" for none."""
    found = metadata.get(RUN_METADATA)
    run_id = found.get("id") if isinstance(found, Mapping) else None
    return run_id if isinstance(run_id, str) and is_save_id(run_id) else ""


def _plain(value: Any, where: str, depth: int, room: Iterator[int]) -> Any:
    """A value as plain JSON types; ``room`` has an element for each value that there may be."""
    if next(room, None) is None:
        raise _too_large(f"more than {MAX_METADATA:,} values")
    if isinstance(value, int):
        check_int(value, where)
    if value is None or type(value) in (bool, int, float, str):
        return value
    # Members of enumerations, NumPy's float64, and others that are numbers by their base class.
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, Mapping | list | tuple) and depth == json_values.MAX_DEPTH:
        raise ValueError(f"metadata nests deeper than {json_values.MAX_DEPTH} levels")
    if isinstance(value, Mapping):
        for key in value:
            _check_run_key(key, where)
        return {str(key): _plain(item, f"{where}[{key!r}]", depth + 1, room) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{where}[{place}]", depth + 1, room) for place, item in enumerate(value)]
    # Losses and other metrics are tensors and numpy numbers as often as floats.
    if callable(getattr(value, "item", None)) and getattr(value, "size", None) is not None:
        with suppress(RuntimeError, ValueError):  # more than one element
            item = value.item()
            if type(item) is not type(value):
                return _plain(item, where, depth, room)
            # NumPy's longdouble: Python has no such number.
            if getattr(getattr(item, "dtype", None), "kind", "") == "f":
                return float(item)
    raise TypeError(
        f"{where} is a {type(value).__name__}: metadata takes None, bools, numbers, strings, lists and dicts of them"
    )


def _too_large(found: str, most: int = MAX_METADATA) -> ValueError:
    return ValueError(f"metadata has {found}, and may take {most:,} bytes as JSON: put what is large into the state")


def parse_metadata(found: Any, where: str) -> dict[str, Any]:
    """The metadata of a stored root. Raises CorruptCheckpointError."""
    try:
        value = json_values.decode_json(found)
    except CorruptCheckpointError as err:
        raise CorruptCheckpointError(f"{where}: metadata: {err}") from err
    if type(value) is not dict or not _is_plain_value(value) or json_values.json_size(found) > MAX_METADATA:
        raise CorruptCheckpointError(
            f"{where}: metadata is {found!r:.80}, expected an object of values as JSON has them, of at most "
            f"{MAX_METADATA:,} bytes"
        )
    return value


def _is_plain_value(value: object) -> bool:
    if type(value) is dict:
        return all(map(json_values.is_plain_key, value)) and all(map(_is_plain_value, value.values()))
    if type(value) is list:
        return all(map(_is_plain_value, value))
    if type(value) is int:
        return value.bit_length() <= KEY_BITS
    return value is None or type(value) in (bool, float, str)
