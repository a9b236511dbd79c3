"""A safetensors file, checked by hand and mapped into memory. Loads no torch.

Format: 8 bytes little-endian length, a JSON header from tensor name to dtype, shape and offsets,
then the tensors without holes (huggingface/safetensors, README "Format").
"""

import json
import math
import mmap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from manylora.engine.errors import AdapterError

MAX_HEADER_BYTES = 1 << 20
MAX_TENSORS = 4096
_ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
# An IEEE number is NaN or infinite exactly when all bits of its exponent are set.
_EXPONENT = {"F32": 0x7F800000, "F16": 0x7C00, "BF16": 0x7F80}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of the header; `start` and `stop` are byte offsets into the data part."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def num_bytes(self) -> int:
        return self.stop - self.start


class SafetensorsFile:
    """The entries of a well-formed file, by name, and their bytes."""

    def __init__(self, entries: tuple[TensorEntry, ...], data: memoryview) -> None:
        self.entries = entries
        self._data = data

    @classmethod
    def read(cls, path: Path) -> "SafetensorsFile":
        """Map a file and check its header.

        Raises:
            AdapterError: it is missing or not well-formed.
        """
        try:
            with path.open("rb") as file:
                content = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        except (OSError, ValueError) as error:  # ValueError: an empty file
            raise AdapterError([f"{path.name} is missing or empty"]) from error
        entries, data_start = _read_header(content, path.name)
        return cls(entries, content[data_start:])

    def data(self, entry: TensorEntry) -> memoryview:
        """The tensor's bytes, row-major little-endian, where they lie in the file."""
        return self._data[entry.start : entry.stop]

    def is_finite(self, entry: TensorEntry) -> bool:
        """Whether no value is NaN or infinite."""
        item = np.dtype(f"<u{_ITEM_BYTES[entry.dtype]}")
        bits = np.frombuffer(self.data(entry), dtype=item)
        exponent = item.type(_EXPONENT[entry.dtype])
        return not bool(np.any((bits & exponent) == exponent))


def _read_header(content: memoryview, name: str) -> tuple[tuple[TensorEntry, ...], int]:
    length = int.from_bytes(content[:8], "little")
    if len(content) < 8 or length > min(MAX_HEADER_BYTES, len(content) - 8):
        raise AdapterError([f"{name}: the header's length {length} is beyond the file or 1 MiB"])
    try:
        header = json.loads(
            bytes(content[8 : 8 + length]).decode(), object_pairs_hook=_no_duplicates
        )
        json.dumps(header, ensure_ascii=False).encode()  # half a surrogate pair cannot be shown
    except (ValueError, RecursionError) as error:
        raise AdapterError([f"{name}: the header is not JSON without duplicate keys"]) from error
    if not isinstance(header, dict):
        raise AdapterError([f"{name}: the header is not a JSON object"])
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise AdapterError([f"{name}: __metadata__ is not an object of strings"])
    if len(header) > MAX_TENSORS:
        raise AdapterError([f"{name}: {len(header)} tensors, more than {MAX_TENSORS}"])
    entries = tuple(_read_entry(key, value) for key, value in header.items())
    _check_tiling(entries, len(content) - 8 - length, name)
    return entries, 8 + length


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("duplicate key")
    return result


def _read_entry(name: str, value: Any) -> TensorEntry:
    try:
        dtype, shape, (start, stop) = value["dtype"], tuple(value["shape"]), value["data_offsets"]
    except (KeyError, TypeError, ValueError) as error:
        raise AdapterError([f"{name!r}: dtype, shape or data_offsets is missing"]) from error
    numbers = (*shape, start, stop)
    if not isinstance(dtype, str) or dtype not in _ITEM_BYTES:
        raise AdapterError([f"{name!r}: dtype {dtype!r} is not one of F32, F16, BF16"])
    if not all(type(n) is int and n >= 0 for n in numbers):
        raise AdapterError([f"{name!r}: shape and data_offsets must be whole numbers"])
    if len(shape) != 2 or 0 in shape:
        raise AdapterError([f"{name!r}: shape {list(shape)} is not that of a matrix"])
    if stop - start != math.prod(shape) * _ITEM_BYTES[dtype]:
        raise AdapterError([f"{name!r}: data_offsets do not fit its shape and dtype"])
    return TensorEntry(name, dtype, shape, start, stop)


def _check_tiling(entries: tuple[TensorEntry, ...], num_bytes: int, name: str) -> None:
    position = 0
    for entry in sorted(entries, key=lambda e: e.start):
        if entry.start != position:
            raise AdapterError([f"{name}: there is a hole or an overlap before {entry.name!r}"])
        position = entry.stop
    if position != num_bytes:
        raise AdapterError([f"{name}: the tensors end at byte {position} of {num_bytes}"])
