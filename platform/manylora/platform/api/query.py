"""Reading query strings strictly: what is not understood is refused by name."""

from collections.abc import Sequence

from fastapi import Request

from manylora.platform.errors import InvalidInputError


def read_query(request: Request, names: Sequence[str]) -> dict[str, str]:
    """The query's parameters.

    Raises:
        InvalidInputError: there is another one, or one with a NUL, which no database keeps.
    """
    for name, value in request.query_params.items():
        if name not in names:
            raise InvalidInputError(
                f"unknown query parameter; these are read: {', '.join(names)}", param=name[:64]
            )
        if "\0" in value:
            raise InvalidInputError(f"{name} has a NUL character", param=name)
    return dict(request.query_params)


def read_limit(text: str | None, *, default: int, most: int) -> int:
    """How many things to answer with.

    Raises:
        InvalidInputError: it is not a whole number from 1 to `most`.
    """
    if text is None:
        return default
    if not text.isdecimal() or len(text) > 9 or not 1 <= int(text) <= most:
        raise InvalidInputError(f"limit must be 1 to {most}", param="limit")
    return int(text)
