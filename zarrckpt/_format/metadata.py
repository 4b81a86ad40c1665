"""The user's metadata of a checkpoint: a JSON object in the root document. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from zarrckpt._errors import CorruptCheckpointError
from zarrckpt._format import json_values
from zarrckpt._format.sealed import is_save_id
from zarrckpt._format.state_path import KEY_BITS

MAX_METADATA = 64 << 10
"""Maximum bytes of the metadata as JSON. It is small because every reader of the checkpoint reads it."""

RESERVED = "zarrckpt."
"""The prefix of the names that are reserved for this package."""

RUN_METADATA = f"{RESERVED}run"
"""The member with the id of the run that a checkpoint belongs to."""

MAX_RUN_METADATA = MAX_METADATA - 128
"""Maximum bytes of the user's metadata in a checkpoint of a run. The member of the run takes up to 110 bytes."""


def checked_metadata(given: Mapping[str, Any] | None, max_bytes: int = MAX_METADATA) -> dict[str, Any]:
    """Return the ``metadata`` of a save as plain JSON types. Tensors and numpy arrays of one element become numbers.

    It may have at most ``max_bytes`` bytes as JSON. Raises TypeError and ValueError that name the member.
    """
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise TypeError(f"metadata must be a dict such as {{'step': 7}}, got a {type(given).__name__}")
    plain: dict[str, Any] = _plain(given, "metadata", 0, iter(range(MAX_METADATA)))
    for name in plain:
        check_name(name, "metadata")
    if (size := json_values.json_size(json_values.encode_json(plain))) > max_bytes:
        raise _too_large(f"{size:,} bytes", max_bytes)
    return plain


def check_name(name: str, where: str) -> None:
    """Raise ValueError for a reserved name in the metadata, or TypeError for a name that is not possible in JSON."""
    _check_run_key(name, where)
    if name.startswith(RESERVED):
        raise ValueError(f"{where}[{name!r}] is reserved, as all names that begin with {RESERVED!r}")


def check_int(value: int, where: str) -> None:
    """Raise ValueError for a number with more bits than the format allows."""
    if value.bit_length() > KEY_BITS:
        raise ValueError(f"{where} is an int of {value.bit_length()} bits, expected at most {KEY_BITS}")


def _check_run_key(key: object, where: str) -> None:
    if not isinstance(key, str) or not json_values.is_plain_key(str(key)):
        raise TypeError(f"{where}: the key {key!r} must be a str of Unicode characters that does not begin with '$'")


def run_of(metadata: Mapping[str, Any]) -> str:
    """Return the id of the run that a checkpoint with this metadata belongs to, or "" if it belongs to none."""
    found = metadata.get(RUN_METADATA)
    run_id = found.get("id") if isinstance(found, Mapping) else None
    return run_id if isinstance(run_id, str) and is_save_id(run_id) else ""


def _plain(value: Any, where: str, depth: int, budget: Iterator[int]) -> Any:
    """Return a value as plain JSON types. ``budget`` has one element for each further value that is allowed."""
    if next(budget, None) is None:
        raise _too_large(f"more than {MAX_METADATA:,} values")
    if isinstance(value, int):
        check_int(value, where)
    if value is None or type(value) in (bool, int, float, str):
        return value
    # Members of enumerations, NumPy's float64, and other subclasses of numbers.
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, Mapping | list | tuple) and depth == json_values.MAX_DEPTH:
        raise ValueError(f"metadata nests deeper than {json_values.MAX_DEPTH} levels")
    if isinstance(value, Mapping):
        for key in value:
            _check_run_key(key, where)
        return {str(key): _plain(item, f"{where}[{key!r}]", depth + 1, budget) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{where}[{index}]", depth + 1, budget) for index, item in enumerate(value)]
    # Losses and other metrics are often tensors or numpy numbers.
    if callable(getattr(value, "item", None)) and getattr(value, "size", None) is not None:
        with suppress(RuntimeError, ValueError):  # more than one element
            item = value.item()
            if type(item) is not type(value):
                return _plain(item, where, depth, budget)
            # NumPy's longdouble, whose item() is no Python number.
            if getattr(getattr(item, "dtype", None), "kind", "") == "f":
                return float(item)
    raise TypeError(
        f"{where} is a {type(value).__name__}, expected None, a bool, a number, a string, or a list or dict of them"
    )


def _too_large(found: str, max_bytes: int = MAX_METADATA) -> ValueError:
    return ValueError(
        f"metadata has {found}, expected at most {max_bytes:,} bytes of JSON. Put large data into the state"
    )


def parse_metadata(found: Any) -> dict[str, Any]:
    """Return the metadata of a stored root document. Raises CorruptCheckpointError."""
    value = json_values.decode_json(found)
    if type(value) is not dict or not _is_plain_value(value) or json_values.json_size(found) > MAX_METADATA:
        raise CorruptCheckpointError(
            f"metadata is not an object of plain JSON values of at most {MAX_METADATA:,} bytes"
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
