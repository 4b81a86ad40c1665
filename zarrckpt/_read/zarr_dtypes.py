"""The types bfloat16 and float8 for zarr-python, as data types over ml_dtypes.

zarr finds this module by two entry points of the installed package. So arrays of these types open in a process that
never imported zarrckpt. zarr >= 3.4.1 loads the entry points of the group ``zarr.data_type`` when it needs a type.
Older versions only collect them. For these, a second entry point in ``zarr.buffer`` imports this module at the first
read of a group, and the import registers the types.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Self, SupportsFloat, cast, overload

import numpy as np
from zarr.buffer.cpu import Buffer
from zarr.core.dtype.common import HasEndianness, HasItemSize
from zarr.dtype import ZDType, data_type_registry

from zarrckpt._format.dtypes import by_name

try:
    from zarr.errors import DataTypeValidationError  # type: ignore[attr-defined,unused-ignore]
except ImportError:  # zarr < 3.3
    from zarr.dtype import DataTypeValidationError

if TYPE_CHECKING:
    from zarr.core.common import JSON, ZarrFormat

__all__ = [
    "Buffer",
    "bfloat16",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
]

_SPECIAL = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


@dataclass(frozen=True, kw_only=True)
class _MlFloat(ZDType[np.dtype[np.generic], np.generic], HasItemSize):
    """A floating point type of ml_dtypes, with its Zarr name.

    Only for Zarr format 3. Format 2 uses numpy's names, and numpy writes these types as plain ``V1`` or ``V2``.
    """

    @classmethod
    def _ml_dtype(cls) -> np.dtype[Any]:
        return by_name(cls._zarr_v3_name).numpy

    @property
    def item_size(self) -> int:
        """The size of an element in bytes."""
        return self._ml_dtype().itemsize

    @classmethod
    def from_native_dtype(cls, dtype: np.dtype[Any]) -> Self:
        """Wrap a numpy dtype. Raises ``DataTypeValidationError`` for a different type."""
        if not cls._check_native_dtype(dtype):
            raise DataTypeValidationError(f"Invalid data type: {dtype}. Expected {cls._zarr_v3_name}.")
        return cls()

    def to_native_dtype(self) -> np.dtype[Any]:
        """Return the numpy dtype of arrays in memory."""
        return self._ml_dtype()

    @classmethod
    def _from_json_v2(cls, data: object) -> Self:
        raise DataTypeValidationError(f"{cls._zarr_v3_name} exists in Zarr format 3 only, not as {data!r}.")

    @classmethod
    def _from_json_v3(cls, data: object) -> Self:
        if data != cls._zarr_v3_name:
            raise DataTypeValidationError(f"Invalid data type: {data!r}. Expected {cls._zarr_v3_name!r}.")
        return cls()

    @overload
    def to_json(self, zarr_format: Literal[2]) -> NoReturn: ...
    @overload
    def to_json(self, zarr_format: Literal[3]) -> str: ...
    def to_json(self, zarr_format: ZarrFormat) -> str:
        """Return the type's name. Raises ``ValueError`` for Zarr format 2, which has no name for it."""
        if zarr_format != 3:
            raise ValueError(f"{self._zarr_v3_name} has no name in Zarr format 2: use zarr_format=3.")
        return self._zarr_v3_name

    def _check_scalar(self, data: object) -> bool:
        try:
            self.cast_scalar(data)
        except TypeError:
            return False
        return True

    def cast_scalar(self, data: object) -> np.generic:
        """Round a number, or a string with a number, to this type. Raises ``TypeError`` for anything else."""
        scalar_type = self._ml_dtype().type
        if isinstance(data, scalar_type):
            return cast("np.generic", data)  # not rounded again, so a NaN keeps its bits
        try:
            # By float(), because scalars of ml_dtypes 0.6.0 crash the process for a string that is not a number.
            value = float(cast("SupportsFloat", data))
        except (TypeError, ValueError, OverflowError) as error:
            raise TypeError(f"Expected a {self._zarr_v3_name} value, found {data!r}.") from error
        return cast("np.generic", scalar_type(value))

    def default_scalar(self) -> np.generic:
        """Return zero, or NaN for float8_e8m0fnu, which has no zero."""
        return self.cast_scalar(0.0)

    def from_json_scalar(self, data: JSON, *, zarr_format: ZarrFormat) -> np.generic:
        """Read a fill value: a number, "NaN", "Infinity", "-Infinity", or the bits as "0x...".

        Raises ``TypeError`` for any other value, ``ValueError`` for bits that do not fit the type.
        """
        if isinstance(data, str):
            if data.startswith("0x"):
                return self._from_bits(data)
            data = _SPECIAL.get(data, data)
        if not isinstance(data, int | float):
            raise TypeError(f"Invalid {self._zarr_v3_name} value {data!r}: expected a number.")
        return self.cast_scalar(data)

    def _from_bits(self, data: str) -> np.generic:
        bits = int(data, 16)
        if bits >= 1 << (8 * self.item_size):
            raise ValueError(f"Invalid {self._zarr_v3_name} value {data!r}: longer than the type.")
        raw = bits.to_bytes(self.item_size, sys.byteorder)
        return cast("np.generic", np.frombuffer(raw, self._ml_dtype())[0])

    def to_json_scalar(self, data: object, *, zarr_format: ZarrFormat) -> float | str:
        """Return a fill value as :meth:`from_json_scalar` reads it: "0x..." for a NaN with unusual bits."""
        scalar = self.cast_scalar(data)
        value = float(scalar)
        if math.isfinite(value):
            return value
        for spelling, special in _SPECIAL.items():
            if self.cast_scalar(special).tobytes() == scalar.tobytes():
                return spelling
        return f"0x{int.from_bytes(scalar.tobytes(), sys.byteorder):0{2 * self.item_size}x}"


@dataclass(frozen=True, kw_only=True)
class _BFloat16(_MlFloat, HasEndianness):
    """The type bfloat16. Unlike the types of one byte, it has a byte order, which the ``bytes`` codec names."""

    @classmethod
    def from_native_dtype(cls, dtype: np.dtype[Any]) -> Self:
        """Wrap a numpy dtype with its byte order. Raises ``DataTypeValidationError`` for a different type."""
        super().from_native_dtype(dtype)
        return cls(endianness="little" if dtype.isnative == (sys.byteorder == "little") else "big")

    def to_native_dtype(self) -> np.dtype[Any]:
        """Return the numpy dtype of arrays in memory, in the byte order of this instance."""
        dtype = self._ml_dtype()
        return dtype if self.endianness == sys.byteorder else dtype.newbyteorder(self.endianness)


def _register(name: str, base: type[_MlFloat] = _MlFloat) -> type[ZDType[Any, Any]]:
    """Register a class for a type unless zarr has one. Returns the registered class."""
    # Not ``data_type_registry.get``: in zarr >= 3.4.1 it loads the entry points, and so imports this module.
    if name not in data_type_registry.contents:
        members = {"__module__": __name__, "dtype_cls": type(by_name(name).numpy), "_zarr_v3_name": name}
        data_type_registry.register(name, type(name, (base,), members))
    return data_type_registry.contents[name]


# The objects of the entry points. zarr >= 3.4.1 registers them without a check, so they must be the registered classes.
# They have the names of these variables, so that they can be pickled.
bfloat16 = _register("bfloat16", _BFloat16)
float8_e4m3fn = _register("float8_e4m3fn")
float8_e5m2 = _register("float8_e5m2")
float8_e4m3fnuz = _register("float8_e4m3fnuz")
float8_e5m2fnuz = _register("float8_e5m2fnuz")
float8_e8m0fnu = _register("float8_e8m0fnu")
