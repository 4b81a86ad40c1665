"""Encode non-tensor entries as JSON (see :mod:`zarrckpt._format.json_values`) or as the bytes of a blob.

A value without a JSON form, or with one of more than :data:`MAX_JSON_VALUE` bytes, is stored as bytes. The first of
these encodings that supports the value is used:

``raw``
    The bytes of the value. ``kind`` is ``bytes``, ``bytearray`` or ``BytesIO``. The whole buffer of a BytesIO is
    stored, and it is restored with its position at 0.
``npy``
    A NumPy array, or a scalar as an array without dimensions, in NPY 1.0, NumPy's own file format. ``kind`` is
    ``ndarray`` or ``scalar``. NPY does not support bfloat16 and float8. They are stored as unsigned integers with the
    same bits, and the kind names the type (``ndarray:bfloat16``).
``tree``
    A value with a JSON form, which may contain ``raw`` and ``npy`` items, such as a NumPy RNG state. It begins with 8
    bytes: the length n of the JSON as an unsigned little-endian integer. Then come n bytes of JSON as UTF-8 text, and
    the bytes of the items, one after the other. In the JSON, each item is ``{"$blob": {"encoding": ..., "kind": ...,
    "byte_offset": ..., "byte_size": ...}}``. ``byte_offset`` is relative to the end of the JSON. The items do not
    overlap, and no bytes are between or after them.
``torch``
    The bytes of ``torch.save``, if ``torch.load(weights_only=True)`` can read them. ``kind`` is the type's name.
``pickle``
    Python's pickle, protocol 5. ``kind`` is the type's name.
"""

from __future__ import annotations

import contextlib
import io
import math
import pickle
import sys
import warnings
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from zarrckpt._errors import (
    CheckpointError,
    CorruptCheckpointError,
    UnsafeValueError,
    UnsupportedFormatError,
    UnsupportedValueError,
)
from zarrckpt._format.dtypes import DTYPES
from zarrckpt._format.json_values import (
    MAX_JSON_VALUE,
    NOT_JSON,
    Decoder,
    Encoder,
    NotJson,
    dumps,
    encode_json,
    json_size,
    loads,
    malformed,
)
from zarrckpt._format.torch_archives import ARCHIVE, load_torch, refused_types

BytesLike = bytes | bytearray | memoryview


@dataclass(frozen=True)
class Blob:
    """A value as bytes, and their encoding and kind (see the module's docstring)."""

    encoding: str
    payload: bytes
    kind: str | None = None


@dataclass(frozen=True)
class EncodedValue:
    """The saved form of a value. Later changes of the value do not affect it.

    It replaces the value in a copied state. For a value that cannot be saved, the error is kept. Only the rank that
    writes the value raises it.
    """

    json: object = NOT_JSON
    blob: Blob | None = None
    """None for a value with a JSON form, and for a value that cannot be saved."""
    failure: Exception | None = None
    is_empty: bool = False
    """Whether the value is an empty mapping."""

    @classmethod
    def of(cls, fqn: str, value: object) -> EncodedValue:
        """Return the encoded value. Never raises an error. :meth:`blob_to_store` raises it."""
        is_empty = isinstance(value, Mapping) and not value
        if is_empty and type(value) is not OrderedDict:
            value = {}  # for all types of mappings, because they are restored as dicts if they have entries
        encoded = encode_json(value)
        if encoded is not NOT_JSON:
            return cls(json=encoded, is_empty=is_empty)
        try:
            return cls(blob=encode_blob(fqn, value), is_empty=is_empty)
        except Exception as err:
            return cls(failure=err, is_empty=is_empty)

    def blob_to_store(self, fqn: str) -> Blob | None:
        """Return the blob to store, or None for a value whose JSON is in the root document.

        Warns if the blob is a pickle. Raises the errors of :func:`encode_blob`.
        """
        if self.failure is not None:
            raise self.failure
        if self.blob is None:
            return None if json_size(self.json) <= MAX_JSON_VALUE else _tree_blob(self.json, [])
        if self.blob.encoding == "pickle":
            warnings.warn(
                f"{fqn!r} of type {self.blob.kind} is saved as a pickle, which loads only with allow_pickle=True. "
                "Numbers, strings, bytes, arrays, and lists, tuples, sets and dicts of them always load",
                UserWarning,
                stacklevel=2,
            )
        return self.blob


def encode_blob(fqn: str, value: object) -> Blob:
    """Return any value as bytes, in the first of the module's encodings that supports it.

    ``torch`` is used only if torch has been imported. The result is loaded once to check that it loads safely. A tensor
    inside a value is stored with its whole storage, as in ``torch.save``, so clone small views of large tensors.

    Raises UnsupportedValueError for values that pickle refuses too, for sharded tensors inside a value, and for NumPy
    strings that end in nulls. The payload shares no memory with a mutable value.
    """
    try:
        blob = _encode_item(value) or _encode_tree(value)
    except _EndsInNulls as err:
        raise UnsupportedValueError(
            f"{fqn!r} cannot be saved: the numpy string {err} ends in nulls, and numpy drops them when it copies or "
            "pickles the string. Save it as str or bytes"
        ) from None
    if blob is None:
        _refuse_sharded(fqn, value)
        blob = _encode_torch(value)
    if blob is None:
        blob = _encode_pickle(fqn, value)
    return blob


def decode_blob(fqn: str, encoding: str, kind: str | None, payload: BytesLike, *, allow_pickle: bool = False) -> Any:
    """Return the value of a blob. It does not share memory with ``payload``. Tensors inside are on the CPU.

    Only ``pickle`` with ``allow_pickle=True`` runs code from the checkpoint.

    Raises UnsafeValueError for a pickle without ``allow_pickle``, CorruptCheckpointError for damage,
    UnsupportedFormatError for an unknown encoding, and CheckpointError if torch or a pickled class is missing. All
    messages name ``fqn``.
    """
    view = memoryview(payload).cast("B")
    try:
        if encoding in ("raw", "npy"):
            return _decode_item(encoding, kind, view)
        if encoding == "tree":
            return _decode_tree(view)
    except CorruptCheckpointError as err:
        raise CorruptCheckpointError(f"the value {fqn!r} is damaged ({encoding}): {err}") from err
    if encoding == "torch":
        return _decode_torch(fqn, view)
    if encoding == "pickle":
        return _decode_pickle(fqn, kind, view, allow_pickle)
    raise UnsupportedFormatError(
        f"the value {fqn!r} has the unknown encoding {encoding!r:.40}. Upgrade zarrckpt, or leave the key out"
    )


def find_tensors(value: object) -> list[Any]:
    """Return all torch tensors that pickle would reach in a value, including the value. May contain duplicates.

    Costs about as much as pickling the value without its tensors and arrays. If the value cannot be pickled, returns
    the tensors that pickle reached before its error.
    """
    torch: Any = sys.modules.get("torch")
    return [] if torch is None else find_instances(value, torch.Tensor)  # without torch no tensor can exist


def find_instances(value: object, kind: Any) -> list[Any]:
    """Return all instances of a type, or of several, that pickle would reach in a value, as :func:`find_tensors`."""
    found: list[Any] = []

    class Finder(pickle.Pickler):
        def persistent_id(self, obj: Any) -> int | None:
            if not isinstance(obj, kind):
                return None
            found.append(obj)
            return len(found)

    with contextlib.suppress(Exception):  # encoding the value raises the same error
        Finder(_Sink(), protocol=5, buffer_callback=lambda buffer: None).dump(value)
    return found


class _Sink:
    def write(self, data: object) -> int:
        return 0


def _type_name(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


class _EndsInNulls(Exception):
    """Raised for a numpy string that no encoding preserves. Even pickle silently restores a different string."""


# raw and npy ------------------------------------------------------------------------------------------------


def _encode_item(value: object) -> Blob | None:
    if type(value) is bytes:
        return Blob("raw", value, "bytes")
    if type(value) is bytearray:
        return Blob("raw", bytes(value), "bytearray")
    if type(value) is io.BytesIO and not value.closed:
        return Blob("raw", value.getvalue(), "BytesIO")
    if type(value) is np.ndarray:
        array: Any = value
        kind = "ndarray"
    elif isinstance(value, np.generic) and type(value) is value.dtype.type:
        array, kind = np.array(value), "scalar"
        if array.dtype.kind in "SU" and array[()] != value:
            raise _EndsInNulls(bytes.__repr__(value) if isinstance(value, bytes) else str.__repr__(value))
    else:
        return None
    known = DTYPES.get(array.dtype.name)
    if known is not None and not known.core and array.dtype == known.numpy:
        array, kind = array.view(known.portable.numpy), f"{kind}:{known.name}"
    payload = _npy(array)
    return None if payload is None else Blob("npy", payload, kind)


def _npy(array: Any) -> bytes | None:
    """Return NPY 1.0 bytes, or None for types without an NPY header: objects, ml_dtypes, overlapping fields."""
    if array.dtype.hasobject:
        return None
    stream = io.BytesIO()
    try:
        np.lib.format.write_array_header_1_0(stream, np.lib.format.header_data_from_array_1_0(array))
        dtype = _read_npy_header(memoryview(stream.getvalue()))[2]
    except (ValueError, CorruptCheckpointError):
        return None
    if dtype != array.dtype or (dtype.kind == "V" and dtype.type is not array.dtype.type):
        return None
    stream = io.BytesIO()
    np.lib.format.write_array(stream, array, version=(1, 0), allow_pickle=False)
    return stream.getvalue()


def _read_npy_header(payload: memoryview) -> tuple[tuple[int, ...], bool, Any, int]:
    stream = io.BytesIO(payload[:0x10010])  # NPY 1.0 keeps the header's length in 16 bits
    try:
        version = np.lib.format.read_magic(stream)
        shape, fortran, dtype = np.lib.format.read_array_header_1_0(stream)
    except Exception as err:  # a parser on any input
        raise CorruptCheckpointError(f"not an NPY header: {type(err).__name__}: {err}") from err
    # numpy changes some types when it creates an array: subarray types add a dimension, and sizes of 0 are replaced.
    plain = not dtype.hasobject and np.empty(0, dtype).dtype == dtype
    if version != (1, 0) or not plain or not all(type(n) is int and n >= 0 for n in shape):
        raise CorruptCheckpointError(f"found an NPY {version} array of {dtype} with shape {shape}, expected NPY 1.0")
    return shape, fortran, dtype, stream.tell()


def _read_npy(payload: memoryview) -> Any:
    shape, fortran, dtype, start = _read_npy_header(payload)
    count = math.prod(shape)
    if count * dtype.itemsize != len(payload) - start or count > sys.maxsize:
        raise CorruptCheckpointError(f"found an array of {dtype} with shape {shape} in {len(payload) - start} bytes")
    order: Any = "F" if fortran else "C"
    try:
        array = np.empty(shape, dtype, order=order)
        if len(payload) > start:  # as bytes, because a copy of records would drop the padding between fields
            array.reshape(-1, order=order).view(np.uint8)[:] = np.frombuffer(payload, np.uint8, offset=start)
        return array
    except (ValueError, TypeError, OverflowError) as err:
        raise CorruptCheckpointError(f"found an array of {dtype} with shape {shape}: {err}") from err


def _decode_item(encoding: object, kind: object, payload: memoryview) -> Any:
    if encoding == "raw" and kind == "bytes":
        return bytes(payload)
    if encoding == "raw" and kind == "bytearray":
        return bytearray(payload)
    if encoding == "raw" and kind == "BytesIO":
        return io.BytesIO(payload)
    form, colon, name = str(kind).partition(":")
    known = DTYPES.get(name)
    if encoding != "npy" or form not in ("ndarray", "scalar") or (colon and (known is None or known.core)):
        raise CorruptCheckpointError(f"found the unknown kind {kind!r:.40} of the encoding {encoding!r:.40}")
    array = _read_npy(payload)
    if known is not None:
        if array.dtype != known.portable.numpy:
            raise CorruptCheckpointError(f"found an array of {array.dtype}, expected {known.portable.name} for {name}")
        array = array.view(known.numpy)
    if form == "ndarray":
        return array
    if array.shape != ():
        raise CorruptCheckpointError(f"found an array with shape {array.shape}, expected () for a scalar")
    try:
        return array[()]
    except (ValueError, TypeError, OverflowError, SystemError) as err:  # for example, invalid code points
        raise CorruptCheckpointError(f"found a scalar of {array.dtype}: {err}") from err


# tree ----------------------------------------------------------------------------------------------------


def _encode_tree(value: object) -> Blob | None:
    payloads: list[bytes] = []
    size = 0

    def attach(item: object) -> object:
        nonlocal size
        blob = _encode_item(item)
        if blob is None:
            raise NotJson
        payloads.append(blob.payload)
        where = {"byte_offset": size, "byte_size": len(blob.payload)}
        size += len(blob.payload)
        return {"$blob": {"encoding": blob.encoding, "kind": blob.kind, **where}}

    try:
        return _tree_blob(Encoder(attach).encode(value, 0), payloads)
    except NotJson:
        return None


def _tree_blob(encoded: object, payloads: Sequence[bytes]) -> Blob:
    skeleton = dumps(encoded)
    return Blob("tree", b"".join([len(skeleton).to_bytes(8, "little"), skeleton, *payloads]))


def _decode_tree(payload: memoryview) -> Any:
    length = int.from_bytes(payload[:8], "little")
    if len(payload) < 8 or length > len(payload) - 8:
        raise CorruptCheckpointError(f"found {len(payload)} bytes, expected at least 8 and {length} of JSON")
    items = payload[8 + length :]
    taken: list[tuple[int, int]] = []
    left = len(items)

    def blob(content: object) -> Any:
        nonlocal left
        if not isinstance(content, dict) or set(content) != {"encoding", "kind", "byte_offset", "byte_size"}:
            raise malformed("encoding, kind, byte_offset and byte_size in $blob", content)
        offset, size = content["byte_offset"], content["byte_size"]
        if type(offset) is not int or type(size) is not int or not 0 <= offset <= offset + size <= len(items):
            raise malformed(f"a $blob within {len(items)} bytes", content)
        taken.append((offset, offset + size))
        # Checked before the item is decoded, so that a small blob with overlapping items cannot need much memory.
        if (left := left - size) < 0:
            raise malformed("$blob items that do not overlap", content)
        return _decode_item(content["encoding"], content["kind"], items[offset : offset + size])

    value = Decoder(blob).decode(loads(payload[8 : 8 + length]), 0)
    # The items must cover the bytes exactly.
    end = 0
    for start, stop in sorted(taken):
        if start != end:
            raise CorruptCheckpointError(f"found items that overlap or leave a gap at byte {end}")
        end = stop
    if end != len(items):
        raise CorruptCheckpointError(f"found {len(items) - end} bytes after the last item")
    return value


# torch and pickle -------------------------------------------------------------------------------------------


_SHARDED = (
    ("torch.distributed.tensor", "DTensor"),
    ("torch.distributed._shard.sharded_tensor", "ShardedTensor"),
)


def _refuse_sharded(fqn: str, value: object) -> None:
    loaded = [getattr(sys.modules.get(module), name, None) for module, name in _SHARDED]
    sharded = tuple(kind for kind in loaded if isinstance(kind, type))  # without the module there is no instance
    for tensor in find_tensors(value) if sharded else ():
        if isinstance(tensor, sharded):
            raise UnsupportedValueError(
                f"{fqn!r} cannot be saved: the {_type_name(value)} contains a {type(tensor).__name__}, and this rank "
                "has only a part of its elements. Put sharded tensors into a dict or a list"
            )


def _encode_torch(value: object) -> Blob | None:
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return None
    stream = io.BytesIO()
    try:
        torch.save(value, stream)
        stream.seek(0)
        # Only a load shows whether weights_only accepts it. This depends on versions and registrations.
        loaded = load_torch(stream)
    except Exception:  # pickle is next, and raises its own error
        return None
    return Blob("torch", stream.getvalue(), _type_name(value)) if type(loaded) is type(value) else None


def _decode_torch(fqn: str, payload: memoryview) -> Any:
    try:
        import torch  # noqa: F401
    except ImportError as err:
        raise CheckpointError(
            f"the value {fqn!r} was saved by torch, which is not installed. Run pip install 'zarrckpt[torch]', or "
            "leave the key out"
        ) from err
    if bytes(payload[: len(ARCHIVE)]) != ARCHIVE:  # torch.load would try its older formats
        raise CorruptCheckpointError(f"the value {fqn!r} is damaged: not a file of torch.save")
    try:
        return load_torch(io.BytesIO(payload))
    except Exception as err:  # a parser on any input
        if refused := refused_types(io.BytesIO(payload)):
            raise UnsafeValueError(
                f"the value {fqn!r} needs {', '.join(refused):.400}, which torch does not load by default. If they are "
                "safe, allow them with torch.serialization.add_safe_globals. Otherwise leave the key out"
            ) from err
        raise CorruptCheckpointError(
            f"the value {fqn!r} is damaged: torch.load failed: {type(err).__name__}: {err!s:.200}"
        ) from err


def _encode_pickle(fqn: str, value: object) -> Blob:
    try:
        payload = pickle.dumps(value, protocol=5)
    except Exception as err:  # objects may raise anything from their own code
        raise UnsupportedValueError(
            f"{fqn!r} of type {_type_name(value)} cannot be saved: {type(err).__name__}: {err}. Save the needed data "
            "as plain values"
        ) from err
    return Blob("pickle", payload, _type_name(value))


def _decode_pickle(fqn: str, kind: str | None, payload: memoryview, allow_pickle: bool) -> Any:
    if not allow_pickle:
        raise UnsafeValueError(
            f"the value {fqn!r} is a pickle of type {kind!r:.200}. Loading it may run any code. If you trust the "
            "checkpoint, pass allow_pickle=True. Otherwise leave the key out"
        )
    try:
        return pickle.loads(payload)
    except (ImportError, AttributeError) as err:
        raise CheckpointError(
            f"the value {fqn!r} is a pickle of a class or function that does not exist in this program: {err}"
        ) from err
    except Exception as err:  # a parser on any input, and the code of any class
        raise CorruptCheckpointError(f"the value {fqn!r} could not be unpickled: {type(err).__name__}: {err}") from err
