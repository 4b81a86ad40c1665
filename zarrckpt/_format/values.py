"""Non-tensor entries: values <-> JSON (see :mod:`zarrckpt._format.json_values`), or <-> the bytes of a blob.

What has no JSON form, or one of more than :data:`MAX_JSON_VALUE` bytes, is kept as bytes in the first of
these encodings that takes it:

``raw``
    The bytes themselves. ``kind`` is ``bytes``, ``bytearray`` or ``BytesIO`` (all of its buffer; it comes
    back with its position at 0).
``npy``
    A NumPy array, or a scalar as an array without dimensions, as NPY 1.0, NumPy's own file format. ``kind``
    is ``ndarray`` or ``scalar``. NPY knows no bfloat16 and no float8: they are kept as unsigned integers of the
    same bits, and the kind names the type (``ndarray:bfloat16``).
``tree``
    A value that has a JSON form, but for ``raw`` and ``npy`` items that may be inside (a NumPy RNG state): 8 bytes,
    the length n of the JSON as an unsigned little-endian integer; n bytes, the JSON as UTF-8 text; then the
    bytes of the items, one after the other. In the JSON each item is ``{"$blob": {"encoding": ..., "kind":
    ..., "byte_offset": ..., "byte_size": ...}}``, with byte_offset counted from the end of the JSON. Items
    share no bytes and leave none over.
``torch``
    What ``torch.save`` writes, where ``torch.load(weights_only=True)`` reads it. ``kind`` is the type's name.
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
from zarrckpt._format.torch_archives import ARCHIVE, load_torch

BytesLike = bytes | bytearray | memoryview


@dataclass(frozen=True)
class Blob:
    """A value as bytes: how they are to be understood (this module's page says), and the bytes themselves."""

    encoding: str
    payload: bytes
    kind: str | None = None


@dataclass(frozen=True)
class EncodedValue:
    """A value in the form in which it is saved, taken at one moment: the value may change afterwards.

    It stands in a copied state for a value. A value that cannot be saved keeps its error until it is to be written, on
    the rank that writes it.
    """

    json: object = NOT_JSON
    blob: Blob | None = None
    """None for a value that has a JSON form, and for one that cannot be saved."""
    failure: Exception | None = None
    is_empty: bool = False
    """Whether the value is an empty mapping."""

    @classmethod
    def of(cls, fqn: str, value: object) -> EncodedValue:
        """Encode a value. Raises nothing: :meth:`stored` does."""
        is_empty = isinstance(value, Mapping) and not value
        if is_empty and type(value) is not OrderedDict:
            value = {}  # of whatever type: with entries it is a dict, too
        encoded = encode_json(value)
        if encoded is not NOT_JSON:
            return cls(json=encoded, is_empty=is_empty)
        try:
            return cls(blob=_encoded_blob(fqn, value), is_empty=is_empty)
        except Exception as err:
            return cls(failure=err, is_empty=is_empty)

    def stored(self, fqn: str) -> Blob | None:
        """Return the blob to store; None for a value whose JSON lives in the root document.

        Warns of a pickle. Raises what :func:`encode_blob` raises.
        """
        if self.failure is not None:
            raise self.failure
        if self.blob is None:
            return None if json_size(self.json) <= MAX_JSON_VALUE else _tree_blob(self.json, [])
        if self.blob.encoding == "pickle":
            _warn_of_pickle(fqn, self.blob)
        return self.blob


def encode_blob(fqn: str, value: object) -> Blob:
    """Encode any value as bytes, in the first of the encodings above that takes it.

    ``torch`` is tried only where torch has been imported, and is loaded once to see that it loads safely.
    Tensors inside a value take their whole storage with them, as in ``torch.save``: clone a small view of a
    big tensor. What only pickle takes is encoded with a warning that names the key and the type. Raises
    UnsupportedValueError for what pickle refuses too, for sharded tensors inside a value, and for NumPy's strings
    that end in nulls. The payload shares no memory with a value that can change.
    """
    blob = _encoded_blob(fqn, value)
    if blob.encoding == "pickle":
        _warn_of_pickle(fqn, blob)
    return blob


def _encoded_blob(fqn: str, value: object) -> Blob:
    try:
        blob = _encode_item(value) or _encode_tree(value)
    except _EndsInNulls as err:
        raise UnsupportedValueError(
            f"{fqn!r}: the numpy string {err} ends in nulls, which numpy leaves out when it copies or pickles one: "
            "save it as str or bytes"
        ) from None
    if blob is None:
        _refuse_sharded(fqn, value)
        blob = _encode_torch(value)
    if blob is None:
        blob = _encode_pickle(fqn, value)
    return blob


def decode_blob(fqn: str, encoding: str, kind: str | None, payload: BytesLike, *, allow_pickle: bool = False) -> Any:
    """Restore a value from a blob. Nothing shares memory with ``payload`` afterwards.

    Raises UnsafeValueError for a pickle without ``allow_pickle``, CorruptCheckpointError for damage,
    UnsupportedFormatError for an unknown encoding, CheckpointError where torch or a pickled class is
    missing. All of them name ``fqn``. Only ``pickle``, with ``allow_pickle=True``, runs code from the
    checkpoint. Tensors inside come back on the CPU.
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
        f"the value {fqn!r} has the unknown encoding {encoding!r:.40}; upgrade zarrckpt, or leave the key out"
    )


def find_tensors(value: object) -> list[Any]:
    """The torch tensors of any kind that pickling a value would reach, itself included; one may come twice.

    Costs about a pickle of the value without its tensors and arrays. Where the value can't be pickled, the
    tensors that were reached before that was seen.
    """
    torch: Any = sys.modules.get("torch")
    if torch is None:  # then no tensor exists either
        return []
    found: list[Any] = []

    class Finder(pickle.Pickler):
        def persistent_id(self, obj: Any) -> int | None:
            if not isinstance(obj, torch.Tensor):
                return None
            found.append(obj)
            return len(found)

    with contextlib.suppress(Exception):  # encoding the value reports the failure, with its cause
        Finder(_Sink(), protocol=5, buffer_callback=lambda buffer: None).dump(value)
    return found


class _Sink:
    def write(self, data: object) -> int:
        return 0


def _type_name(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


class _EndsInNulls(Exception):
    """A numpy string that no encoding keeps: even pickle gives another one back, and says nothing."""


# raw and npy ------------------------------------------------------------------------------------------------


def _encode_item(value: object) -> Blob | None:
    if type(value) is bytes:
        return Blob("raw", value, "bytes")
    if type(value) is bytearray:
        return Blob("raw", bytes(value), "bytearray")
    if type(value) is io.BytesIO and not value.closed:
        return Blob("raw", value.getvalue(), "BytesIO")
    np = sys.modules.get("numpy")
    if np is None:
        return None
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
    payload = _npy(np, array)
    return None if payload is None else Blob("npy", payload, kind)


def _npy(np: Any, array: Any) -> bytes | None:
    """NPY 1.0 bytes, or None for types that its header can't tell: objects, ml_dtypes, overlapping fields."""
    if array.dtype.hasobject:
        return None
    stream = io.BytesIO()
    try:
        np.lib.format.write_array_header_1_0(stream, np.lib.format.header_data_from_array_1_0(array))
        dtype = _read_npy_header(np, memoryview(stream.getvalue()))[2]
    except (ValueError, CorruptCheckpointError):
        return None
    if dtype != array.dtype or (dtype.kind == "V" and dtype.type is not array.dtype.type):
        return None
    stream = io.BytesIO()
    np.lib.format.write_array(stream, array, version=(1, 0), allow_pickle=False)
    return stream.getvalue()


def _read_npy_header(np: Any, payload: memoryview) -> tuple[tuple[int, ...], bool, Any, int]:
    stream = io.BytesIO(payload[:0x10010])  # NPY 1.0 keeps the header's length in 16 bits
    try:
        version = np.lib.format.read_magic(stream)
        shape, fortran, dtype = np.lib.format.read_array_header_1_0(stream)
    except Exception as err:  # a parser on any input
        raise CorruptCheckpointError(f"not an NPY header: {type(err).__name__}: {err}") from err
    # Of some types numpy makes others: with a dimension more, or with a size.
    plain = not dtype.hasobject and np.empty(0, dtype).dtype == dtype
    if version != (1, 0) or not plain or not all(type(n) is int and n >= 0 for n in shape):
        raise CorruptCheckpointError(f"an NPY {version} array of {dtype} with the shape {shape}")
    return shape, fortran, dtype, stream.tell()


def _read_npy(payload: memoryview) -> Any:
    import numpy as np

    shape, fortran, dtype, start = _read_npy_header(np, payload)
    count = math.prod(shape)
    if count * dtype.itemsize != len(payload) - start or count > sys.maxsize:
        raise CorruptCheckpointError(f"an array of {dtype} with the shape {shape} in {len(payload) - start} bytes")
    order: Any = "F" if fortran else "C"
    try:
        array = np.empty(shape, dtype, order=order)
        if len(payload) > start:  # as bytes, since a copy of records would leave out what is between fields
            array.reshape(-1, order=order).view(np.uint8)[:] = np.frombuffer(payload, np.uint8, offset=start)
        return array
    except (ValueError, TypeError, OverflowError) as err:
        raise CorruptCheckpointError(f"an array of {dtype} with the shape {shape}: {err}") from err


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
        raise CorruptCheckpointError(f"the unknown kind {kind!r:.40} of the encoding {encoding!r:.40}")
    array = _read_npy(payload)
    if known is not None:
        if array.dtype != known.portable.numpy:
            raise CorruptCheckpointError(f"an array of {array.dtype} for the bits of {name}")
        array = array.view(known.numpy)
    if form == "ndarray":
        return array
    if array.shape != ():
        raise CorruptCheckpointError(f"an array with the shape {array.shape} for a scalar")
    return _scalar(array)


def _scalar(array: Any) -> Any:
    try:
        return array[()]
    except (ValueError, TypeError, OverflowError, SystemError) as err:  # code points that don't exist
        raise CorruptCheckpointError(f"a scalar of {array.dtype}: {err}") from err


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
        raise CorruptCheckpointError(f"{len(payload)} bytes, expected 8 and JSON of {length}")
    items = payload[8 + length :]
    taken: list[tuple[int, int]] = []
    left = len(items)

    def blob(content: object) -> Any:
        nonlocal left
        if not isinstance(content, dict) or set(content) != {"encoding", "kind", "byte_offset", "byte_size"}:
            raise malformed("encoding, kind, byte_offset and byte_size for $blob", content)
        offset, size = content["byte_offset"], content["byte_size"]
        if type(offset) is not int or type(size) is not int or not 0 <= offset <= offset + size <= len(items):
            raise malformed(f"$blob to lie within {len(items)} bytes", content)
        taken.append((offset, offset + size))
        # Before one more is decoded: a small blob cannot ask for much memory.
        if (left := left - size) < 0:
            raise malformed("$blob items that do not overlap", content)
        return _decode_item(content["encoding"], content["kind"], items[offset : offset + size])

    value = Decoder(blob).decode(loads(payload[8 : 8 + length]), 0)
    # Exact cover: no byte is read twice, and none is unexplained.
    end = 0
    for start, stop in sorted(taken):
        if start != end:
            raise CorruptCheckpointError(f"items overlap or leave a gap at byte {end}")
        end = stop
    if end != len(items):
        raise CorruptCheckpointError(f"{len(items) - end} bytes after the last item")
    return value


# torch and pickle -------------------------------------------------------------------------------------------


_SHARDED = (
    ("torch.distributed.tensor", "DTensor"),
    ("torch.distributed._shard.sharded_tensor", "ShardedTensor"),
)


def _refuse_sharded(fqn: str, value: object) -> None:
    loaded = [getattr(sys.modules.get(module), name, None) for module, name in _SHARDED]
    sharded = tuple(kind for kind in loaded if isinstance(kind, type))  # of others no instance exists
    for tensor in find_tensors(value) if sharded else ():
        if isinstance(tensor, sharded):
            raise UnsupportedValueError(
                f"{fqn!r} is a {_type_name(value)} with a {type(tensor).__name__} inside, of which this rank "
                "holds only a part; keep sharded tensors in a dict or a list"
            )


def _encode_torch(value: object) -> Blob | None:
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return None
    stream = io.BytesIO()
    try:
        torch.save(value, stream)
        stream.seek(0)
        # Loading it is the only way to know: what weights_only takes depends on versions and registrations.
        loaded = load_torch(stream)
    except Exception:  # whatever it was, pickle is next, and reports its own failure
        return None
    return Blob("torch", stream.getvalue(), _type_name(value)) if type(loaded) is type(value) else None


def _decode_torch(fqn: str, payload: memoryview) -> Any:
    try:
        import torch
    except ImportError as err:
        raise CheckpointError(
            f"the value {fqn!r} was saved by torch, which is not installed: pip install 'zarrckpt[torch]', "
            "or leave the key out"
        ) from err
    if bytes(payload[: len(ARCHIVE)]) != ARCHIVE:  # torch.load would try its older formats
        raise CorruptCheckpointError(f"the value {fqn!r} is damaged: not what torch.save writes")
    try:
        return load_torch(io.BytesIO(payload))
    except Exception as err:  # a parser on any input
        refused = _refused_globals(torch, payload)
        if refused:
            raise UnsafeValueError(
                f"the value {fqn!r} needs {', '.join(refused):.400}, which torch does not load by default; "
                "if you know them to be safe, allow them with torch.serialization.add_safe_globals; "
                "or leave the key out"
            ) from err
        raise CorruptCheckpointError(
            f"the value {fqn!r} is damaged: torch.load failed: {type(err).__name__}: {err!s:.200}"
        ) from err


def _refused_globals(torch: Any, payload: memoryview) -> list[str]:
    try:
        return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(payload)))
    except Exception:  # a parser on any input
        return []


def _encode_pickle(fqn: str, value: object) -> Blob:
    try:
        payload = pickle.dumps(value, protocol=5)
    except Exception as err:  # objects may raise anything from their own code
        raise UnsupportedValueError(
            f"{fqn!r} of type {_type_name(value)} can't be saved: {type(err).__name__}: {err}; "
            "keep what is needed of it in plain values"
        ) from err
    return Blob("pickle", payload, _type_name(value))


def _warn_of_pickle(fqn: str, blob: Blob) -> None:
    warnings.warn(
        f"{fqn!r} of type {blob.kind} is saved as a pickle, which loads only with allow_pickle=True; "
        "numbers, strings, bytes, arrays, and lists, tuples, sets and dicts of them always load",
        UserWarning,
        stacklevel=3,
    )


def _decode_pickle(fqn: str, kind: str | None, payload: memoryview, allow_pickle: bool) -> Any:
    if not allow_pickle:
        raise UnsafeValueError(
            f"the value {fqn!r} is a pickle of type {kind!r:.200}; loading it may run any code, so it needs "
            "allow_pickle=True, for checkpoints from a trusted source only; or leave the key out"
        )
    try:
        return pickle.loads(payload)
    except (ImportError, AttributeError) as err:
        raise CheckpointError(
            f"the value {fqn!r} is a pickle of something that does not exist in this program: {err}"
        ) from err
    except Exception as err:  # a parser on any input, and the code of any class
        raise CorruptCheckpointError(f"the value {fqn!r} could not be unpickled: {type(err).__name__}: {err}") from err
