"""Reads a `config.json` value by value; what is missing or malformed is named. Loads no torch."""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeVar

from manylora.engine.errors import ModelError

T = TypeVar("T")


class Fields:
    """The values of a JSON object, over the defaults that transformers gives to absent ones."""

    def __init__(
        self, values: Mapping[str, Any], defaults: Mapping[str, Any] | None = None
    ) -> None:
        self.values = {**(defaults or {}), **values}

    def __contains__(self, name: str) -> bool:
        return name in self.values

    def has(self, name: str) -> bool:
        """Whether the field is there and not null."""
        return self.values.get(name) is not None

    def value(self, name: str) -> Any:
        """Any value, unchecked.

        Raises:
            ModelError: the field is missing; so for each method here.
        """
        if name not in self.values:
            raise ModelError(f"config.json lacks {name!r}")
        return self.values[name]

    def size(self, name: str) -> int:
        """A positive whole number."""
        value = self.value(name)
        if type(value) is not int or value < 1:
            raise ModelError(f"config.json: {name} {value!r} is not a positive whole number")
        return value

    def count(self, name: str) -> int:
        """A whole number, perhaps zero."""
        value = self.value(name)
        if type(value) is not int or value < 0:
            raise ModelError(f"config.json: {name} {value!r} is not a whole number")
        return value

    def optional_size(self, name: str) -> int | None:
        """A positive whole number, or None where the field is null or absent."""
        return self.size(name) if self.has(name) else None

    def number(self, name: str) -> float:
        """A positive finite number."""
        value = self.value(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ModelError(f"config.json: {name} {value!r} is not a positive number")
        if not 0 < value < math.inf:
            raise ModelError(f"config.json: {name} {value!r} is not a positive number")
        return float(value)

    def optional_number(self, name: str) -> float | None:
        """A positive finite number, or None where the field is null or absent."""
        return self.number(name) if self.has(name) else None

    def flag(self, name: str) -> bool:
        """True or false; absent or null is false."""
        value = self.values.get(name)
        if not isinstance(value, bool | None):
            raise ModelError(f"config.json: {name} {value!r} is neither true nor false")
        return bool(value)

    def choice(self, name: str, meanings: Mapping[str, T]) -> T:
        """One of some words, as what it means.

        Raises:
            ModelError: it is another.
        """
        value = self.value(name)
        if not isinstance(value, str) or value not in meanings:
            raise ModelError(
                f"config.json: {name} {value!r} is not supported; supported: {', '.join(meanings)}"
            )
        return meanings[value]

    def items(self, name: str, length: int) -> Sequence[Any]:
        """A list of that length, its items unchecked."""
        value = self.value(name)
        if not isinstance(value, list) or len(value) != length:
            raise ModelError(f"config.json: {name} is not a list of {length} values")
        return value

    def indices(self, name: str) -> set[int]:
        """A list of whole numbers, perhaps null."""
        items = self.value(name) or []
        if not isinstance(items, list) or not all(type(item) is int for item in items):
            raise self.error(name, "is not a list of whole numbers")
        return set(items)

    def numbers(self, name: str, length: int) -> tuple[float, ...]:
        """A list of that many positive finite numbers."""
        items = self.items(name, length)
        return tuple(
            Fields({f"{name}[{i}]": x}).number(f"{name}[{i}]") for i, x in enumerate(items)
        )

    def section(self, name: str) -> "Fields":
        """A nested object; absent, null and empty are the same."""
        value = self.values.get(name) or {}
        if not isinstance(value, dict):
            raise ModelError(f"config.json: {name} is not an object")
        return Fields(value)

    def error(self, name: str, reason: str) -> ModelError:
        """What to raise for a field whose value is well formed but not supported."""
        return ModelError(f"config.json: {name} {self.values.get(name)!r} {reason}")

    def refuse_if_set(self, name: str) -> None:
        """
        Raises:
            ModelError: the field is there and neither null nor false nor zero.
        """
        if self.values.get(name):
            raise self.error(name, "is not supported")

    def refuse_others(self, names: Collection[str]) -> None:
        """
        Raises:
            ModelError: there is a field of another name.
        """
        for name in self.values:
            if name not in names:
                raise self.error(name, f"stands where only {' and '.join(names)} may")
