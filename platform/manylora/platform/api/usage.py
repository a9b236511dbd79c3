"""`…/usage/records`: one row for each answered request, as JSON lines or CSV."""

import csv
import io
import re
from collections.abc import Callable, Sequence
from typing import Any

import orjson
from fastapi import APIRouter, Request, Response

from manylora.platform import usage
from manylora.platform.api.auth import UsageScope, services_of
from manylora.platform.api.query import read_limit, read_query
from manylora.platform.api.times import parse_time, to_iso
from manylora.platform.errors import InvalidInputError
from manylora.platform.usage import UsageLine

router = APIRouter(prefix="/usage")

MAX_LIMIT = 10_000
_DEFAULT_LIMIT = 1000
_PARAMETERS = ("format", "start_time", "end_time", "limit", "page")
_PAGE = re.compile(r"\d{1,18}-use_[0-9a-f]{32}")
_FIELDS = (
    "id",
    "request_id",
    "key_id",
    "adapter",
    "adapter_version",
    "adapter_digest",
    "base_model",
    "route",
    "status",
    "finish_reason",
    "prompt_tokens",
    "cached_tokens",
    "completion_tokens",
    "delivered_tokens",
    "queued_us",
    "ttft_us",
    "total_us",
)


@router.get("/records")
def usage_records(request: Request, tenant: UsageScope) -> Response:
    """A page of rows, oldest first; `x-next-page`, if there, is the `page` of the next one."""
    query = read_query(request, _PARAMETERS)
    write, media_type = _format(query.get("format", "jsonl"))
    start, end = _range(query)
    with services_of(request).db.read() as session:
        found = usage.page(
            session,
            tenant_id=tenant.id if tenant else None,
            start_us=start,
            end_us=end,
            limit=read_limit(query.get("limit"), default=_DEFAULT_LIMIT, most=MAX_LIMIT),
            after=_page(query.get("page")),
        )
    headers = {"x-next-page": found.next_page} if found.next_page else {}
    return Response(write(found.lines), media_type=media_type, headers=headers)


def record_json(line: UsageLine) -> dict[str, Any]:
    """A row as the API shows it."""
    row = {field: getattr(line.record, field) for field in _FIELDS}
    return row | {"tenant": line.tenant, "occurred_at": to_iso(line.record.occurred_at)}


def _format(name: str) -> tuple[Callable[[Sequence[UsageLine]], bytes], str]:
    if name == "jsonl":
        return _as_jsonl, "application/jsonl"
    if name == "csv":
        return _as_csv, "text/csv"
    raise InvalidInputError("format must be jsonl or csv", param="format")


def _range(query: dict[str, str]) -> tuple[int | None, int | None]:
    start, end = (
        parse_time(query[name], param=name) if name in query else None
        for name in ("start_time", "end_time")
    )
    if start is not None and end is not None and end <= start:
        raise InvalidInputError("end_time must be after start_time", param="end_time")
    return start, end


def _page(text: str | None) -> str | None:
    if text is not None and not _PAGE.fullmatch(text):
        raise InvalidInputError("page must be the x-next-page of another answer", param="page")
    return text


def _as_jsonl(lines: Sequence[UsageLine]) -> bytes:
    return b"".join(orjson.dumps(record_json(line)) + b"\n" for line in lines)


def _as_csv(lines: Sequence[UsageLine]) -> bytes:
    out = io.StringIO()
    writer = csv.DictWriter(out, (*_FIELDS, "tenant", "occurred_at"), lineterminator="\n")
    writer.writeheader()
    writer.writerows(record_json(line) for line in lines)
    return out.getvalue().encode()
