"""Metadata values of a GGUF file: plain Python values with an obvious type, and `Typed` for the other types."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gguf import GGUFValueType, GGUFWriter


@dataclass(frozen=True, slots=True)
class Typed:
    """A value with its GGUF type by name (`"INT64"`, `"FLOAT64"`, `"ARRAY"`); `of` is the type of an array's items."""

    value: Any
    type: str
    of: str | None = None


Value = (
    bool
    | int
    | float
    | str
    | Sequence[bool]
    | Sequence[int]
    | Sequence[float]
    | Sequence[str]
    | Sequence[bytes]
    | Typed
)
Metadata = Mapping[str, Value]
"""Plain values become BOOL, UINT32, FLOAT32, STRING, and arrays of BOOL, INT32, FLOAT32, STRING."""


def add_metadata(writer: GGUFWriter, metadata: Mapping[str, Value | None]) -> None:
    """Add every value to the writer; None stands for a key that is left out."""
    for key, value in metadata.items():
        if value is not None:
            typed = value if isinstance(value, Typed) else _typed(value)
            writer.add_key_value(key, typed.value, *_types(typed))


def every_value_type() -> dict[str, Value]:
    """One key for every type of value that GGUF knows, named `test.<type>`: extremes, Unicode, an empty string."""
    scalars = {
        "UINT8": 255, "INT8": -128, "UINT16": 65535, "INT16": -32768, "UINT32": 4294967295, "INT32": -2147483648,
        "UINT64": 18446744073709551615, "INT64": -9223372036854775808, "FLOAT32": 0.5, "FLOAT64": 1e-300, "BOOL": True,
        "STRING": "naïve ☃ 🎈",
    }  # fmt: skip
    values: dict[str, Value] = {f"test.{name.lower()}": Typed(value, name) for name, value in scalars.items()}
    values["test.empty_string"] = Typed("", "STRING")
    values["test.array_string"] = Typed(["a", "", "ü"], "ARRAY", "STRING")
    values["test.array_int32"] = Typed([1, -2, 3], "ARRAY", "INT32")
    values["test.array_float32"] = Typed([0.5, 1.5], "ARRAY", "FLOAT32")
    values["test.array_bool"] = Typed([True, False], "ARRAY", "BOOL")
    return values


def _typed(value: Any) -> Typed:
    match value:
        case bool():
            return Typed(value, "BOOL")
        case int():
            return Typed(value, "UINT32")
        case float():
            return Typed(value, "FLOAT32")
        case str():
            return Typed(value, "STRING")
    return Typed(value, "ARRAY", _item_type(value[0]))


def _item_type(item: Any) -> str:
    match item:
        case bool():
            return "BOOL"
        case int():
            return "INT32"
        case float():
            return "FLOAT32"
    return "STRING"


def _types(typed: Typed) -> tuple[GGUFValueType, GGUFValueType | None]:
    from gguf import GGUFValueType

    return GGUFValueType[typed.type], GGUFValueType[typed.of] if typed.of else None
