"""The table of the data types that a checkpoint can contain.

A type has the same name everywhere: in torch (after ``torch.``), as ``data_type`` in ``zarr.json``, and in numpy or
ml_dtypes. Importing this module imports none of these packages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from zarrckpt._errors import UnsupportedValueError
from zarrckpt._format.wire import record

if TYPE_CHECKING:
    import numpy as np

Kind = Literal["bool", "int", "uint", "float", "complex"]

FillValue = bool | int | str | list[str]
"""A fill value as in ``zarr.json``."""

MAX_E4M3FN = 448.0
"""The largest number of float8_e4m3fn, to which casts saturate."""


@dataclass(frozen=True)
class DType:
    """One data type: its name, its kind and the size of an element in bytes.

    ``core`` is true for the types of Zarr's core specification. The others need ml_dtypes and, in zarr-python, the
    data-type plugin of this package.
    """

    name: str
    kind: Kind
    itemsize: int
    core: bool = True

    @property
    def numpy(self) -> np.dtype[Any]:
        """The numpy dtype, in this machine's byte order. Imports numpy, and ml_dtypes for a non-core type."""
        import numpy as np

        if self.core:
            return np.dtype(self.name)
        import ml_dtypes

        dtype: np.dtype[Any] = np.dtype(getattr(ml_dtypes, self.name))
        return dtype

    @property
    def fill_value(self) -> FillValue:
        """The elements that readers without this package return for a missing chunk.

        A missing chunk is damage, so this is the value that is least likely to look like data: NaN, the smallest signed
        integer, the largest unsigned integer, or True (most flags and masks are initially False).
        """
        match self.kind:
            case "bool":
                return True
            case "int":
                return -(1 << (8 * self.itemsize - 1))
            case "uint":
                return (1 << (8 * self.itemsize)) - 1
            case "float":
                return "NaN"
            case "complex":
                return ["NaN", "NaN"]

    @property
    def bytes_codec(self) -> dict[str, Any]:
        """The ``bytes`` codec as in ``zarr.json``: little-endian, or without byte order for elements of one byte.

        All tested readers ignore a byte order for elements of one byte. Some require it for larger elements.
        """
        if self.itemsize == 1:
            return {"name": "bytes"}
        return {"name": "bytes", "configuration": {"endian": "little"}}

    @property
    def portable(self) -> DType:
        """The core type that can hold the same bits: this one, or an unsigned integer."""
        return self if self.core else DTYPES[f"uint{8 * self.itemsize}"]


DTYPES: dict[str, DType] = {
    dtype.name: dtype
    for dtype in (
        DType("bool", "bool", 1),
        DType("int8", "int", 1),
        DType("int16", "int", 2),
        DType("int32", "int", 4),
        DType("int64", "int", 8),
        DType("uint8", "uint", 1),
        DType("uint16", "uint", 2),
        DType("uint32", "uint", 4),
        DType("uint64", "uint", 8),
        DType("float16", "float", 2),
        DType("float32", "float", 4),
        DType("float64", "float", 8),
        DType("complex64", "complex", 8),
        DType("complex128", "complex", 16),
        DType("bfloat16", "float", 2, core=False),
        DType("float8_e4m3fn", "float", 1, core=False),
        DType("float8_e5m2", "float", 1, core=False),
        DType("float8_e4m3fnuz", "float", 1, core=False),
        DType("float8_e5m2fnuz", "float", 1, core=False),
        DType("float8_e8m0fnu", "float", 1, core=False),
    )
}
"""Every data type, by name."""

_NEXT_STEPS = (
    (("qint", "quint"), "Save tensor.int_repr() with its scale and zero point, or tensor.dequantize()."),
    (("complex32",), "Save torch.view_as_real(tensor), a float16 tensor, or tensor.to(torch.complex64)."),
    (("bits", "float4", "int", "uint"), "Save tensor.view(torch.uint8) and view it back after loading."),
)
"""The next step for torch dtypes that are not in the table, by the beginnings of their names."""


def by_name(name: str) -> DType:
    """Return the data type with this name. Raises UnsupportedValueError if there is none."""
    try:
        return DTYPES[name]
    except KeyError:
        raise UnsupportedValueError(
            f"No data type {name!r} can be stored in a checkpoint, only: {', '.join(DTYPES)}."
        ) from None


def by_torch_name(name: str) -> DType:
    """Return the data type of a tensor from ``str(tensor.dtype)``, with or without ``torch.``.

    Raises UnsupportedValueError for dtypes without a name in Zarr: quantized types, complex32, float4, bits, and
    integers of less than a byte. The message names the next step.
    """
    bare = name.removeprefix("torch.")
    if bare in DTYPES:
        return DTYPES[bare]
    next_step = next(
        (text for beginnings, text in _NEXT_STEPS if bare.startswith(beginnings)),
        f"Convert the tensor to one of: {', '.join(DTYPES)}.",
    )
    raise UnsupportedValueError(f"No Zarr data type can hold a tensor of dtype torch.{bare}. {next_step}")


record(DType, lambda dtype: (dtype.name,), by_name)
