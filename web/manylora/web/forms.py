"""Reading posted forms strictly, and giving them back with what is wrong beside each field."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated
from urllib.parse import parse_qsl

from fastapi import Depends, Request

from manylora.platform.errors import (
    InvalidInputError,
    PlatformError,
    TooLargeError,
    UnsupportedMediaTypeError,
)

MAX_FORM_BYTES = 64 * 1024
MAX_FIELDS = 100
CONTENT_TYPE = "application/x-www-form-urlencoded"


@dataclass(slots=True)
class Form:
    """The values of a form by field, and the errors found so far by field."""

    values: Mapping[str, Sequence[str]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)

    def text(self, name: str) -> str:
        """The value of a field that comes once; empty when it did not come."""
        values = self.values.get(name, ())
        return values[0] if values else ""

    def chosen(self, name: str) -> list[str]:
        """The values of a field that may come several times."""
        return list(self.values.get(name, ()))

    def refused(self, error: PlatformError) -> "Form":
        """Put an error beside the field that it names."""
        self.errors[error.param or ""] = error.message
        return self


async def read_form(request: Request) -> Form:
    """The posted form.

    Raises:
        UnsupportedMediaTypeError: it is no form, so no page of ours sent it.
        TooLargeError: it is longer than any form of ours.
        InvalidInputError: it is not UTF-8, or has too many fields.
    """
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != CONTENT_TYPE:
        raise UnsupportedMediaTypeError(f"A form must be sent as {CONTENT_TYPE}.")
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_FORM_BYTES:
            raise TooLargeError(f"A form may have at most {MAX_FORM_BYTES // 1024} KiB.")
    values: dict[str, list[str]] = {}
    try:
        pairs = parse_qsl(
            body.decode("ascii"), keep_blank_values=True, errors="strict", max_num_fields=MAX_FIELDS
        )
    except ValueError as error:
        raise InvalidInputError(
            "The form could not be read: it must be URL-encoded UTF-8."
        ) from error
    for name, value in pairs:
        values.setdefault(name, []).append(value)
    return Form(values)


Posted = Annotated[Form, Depends(read_form)]
