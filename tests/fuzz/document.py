"""A GGUF file taken apart into values that a mutation can change, and put together again however wrong it is."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.runtime.gguf_file import ValueType, read_gguf

CODES = {
    ValueType.UINT8: "B", ValueType.INT8: "b", ValueType.UINT16: "H", ValueType.INT16: "h", ValueType.UINT32: "I",
    ValueType.INT32: "i", ValueType.FLOAT32: "f", ValueType.BOOL: "B", ValueType.UINT64: "Q", ValueType.INT64: "q",
    ValueType.FLOAT64: "d",
}  # fmt: skip


@dataclass
class Value:
    """A metadata value that may have become another type, or a number that its type cannot hold (stored cut off)."""

    key: bytes
    type: int
    value: Any
    item_type: int | None = None


@dataclass
class Tensor:
    """A tensor's entry; the place of its data is computed unless `offset` is set."""

    name: bytes
    shape: list[int]
    type: int
    data: bytes
    offset: int | None = None


@dataclass
class Document:
    """All of a file. The counts of the header are worked out unless they are set."""

    values: list[Value]
    tensors: list[Tensor]
    version: int = 3
    n_values: int | None = None
    n_tensors: int | None = None
    trailing: bytes = field(default=b"")

    @classmethod
    def read(cls, path: Path) -> Document:
        file = read_gguf(path)
        raw = path.read_bytes()
        start = _padded(file.header_bytes)
        ends = [tensor.offset for tensor in file.tensors[1:]] + [len(raw) - start]
        tensors = [
            Tensor(tensor.name, list(tensor.shape), tensor.type, raw[start + tensor.offset : start + end])
            for tensor, end in zip(file.tensors, ends, strict=True)
        ]
        values = [Value(key, value.type, value.value, value.item_type) for key, value in file.metadata.items()]
        return cls(values, tensors, file.version)

    def to_bytes(self) -> bytes:
        n_tensors = len(self.tensors) if self.n_tensors is None else self.n_tensors
        n_values = len(self.values) if self.n_values is None else self.n_values
        header = b"GGUF" + _pack("I", self.version) + _pack("Q", n_tensors) + _pack("Q", n_values)
        header += b"".join(_value(value) for value in self.values)
        offset = 0
        for tensor in self.tensors:
            header += (
                _string(tensor.name) + _pack("I", len(tensor.shape)) + b"".join(_pack("Q", n) for n in tensor.shape)
            )
            header += _pack("I", tensor.type) + _pack("Q", offset if tensor.offset is None else tensor.offset)
            offset = _padded(offset + len(tensor.data))
        header += bytes(_padded(len(header)) - len(header))
        return (
            header
            + b"".join(tensor.data.ljust(_padded(len(tensor.data)), b"\0") for tensor in self.tensors)
            + self.trailing
        )

    def find(self, key: bytes) -> Value | None:
        return next((value for value in self.values if value.key == key), None)


def _value(value: Value) -> bytes:
    body = _string(value.key) + _pack("I", value.type)
    if value.type == ValueType.ARRAY:
        items = b"".join(_item(value.item_type or 0, item) for item in value.value)
        return body + _pack("I", value.item_type or 0) + _pack("Q", len(value.value)) + items
    return body + _item(value.type, value.value)


def _item(kind: int, item: Any) -> bytes:
    if kind == ValueType.STRING:
        return _string(item if isinstance(item, bytes) else str(item).encode())
    code = CODES.get(ValueType(kind)) if kind in ValueType._value2member_map_ else None
    if code is None:
        return b""
    if isinstance(item, (bytes, str, list)):
        item = len(item)
    return struct.pack("<" + code, float(item)) if code in "fd" else _pack(code, item)


def _pack(code: str, number: float) -> bytes:
    """An integer as its low bytes, whatever its size."""
    size = struct.calcsize("<" + code)
    whole = int(number) if math.isfinite(number) else 0
    mask: int = (1 << 8 * size) - 1
    return (whole & mask).to_bytes(size, "little")


def _string(text: bytes) -> bytes:
    return _pack("Q", len(text)) + text


def _padded(size: int) -> int:
    return -(-size // 32) * 32
