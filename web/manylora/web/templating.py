"""From a template and its values to a page. Everything is escaped."""

import hashlib
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

from fastapi import Request
from fastapi.responses import HTMLResponse
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from manylora.platform.ids import now_us
from manylora.platform.models import Tenant
from manylora.web.charts import bar, bars
from manylora.web.notices import notice_of

HERE = Path(__file__).parent
STATIC = HERE / "static"
STATIC_PATH = "/admin/static"

_STEPS = ((86_400, "d"), (3_600, "h"), (60, "min"), (1, "s"))


def render(
    request: Request,
    template: str,
    values: Mapping[str, object] | None = None,
    *,
    status: int = 200,
    headers: Mapping[str, str] | None = None,
) -> HTMLResponse:
    """One page, or one fragment of a page where the template is one."""
    user = getattr(request.state, "operator", None)
    context = {
        "operator": user,
        "path": request.url.path,
        "notice": notice_of(request),
        **(values or {}),
    }
    body = _environment().get_template(template).render(context)
    return HTMLResponse(body, status_code=status, headers=dict(headers or {}))


def is_fragment(request: Request) -> bool:
    """Whether htmx asks, and so wants the part that changes and not the page around it."""
    return request.headers.get("hx-request") == "true"


@cache
def static_url(name: str) -> str | None:
    """The URL of a file of ours with its content's hash in it; None when the file is absent."""
    path = STATIC / name
    if not path.is_file():
        return None
    return f"{STATIC_PATH}/{name}?v={hashlib.sha256(path.read_bytes()).hexdigest()[:12]}"


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(HERE / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        ago=_ago,
        size=_size,
        number=_number,
        duration=_duration,
        latency=_latency,
        interval=_interval,
        sentence=_sentence,
        options=_options,
    )
    environment.tests.update(past=_is_past)
    environment.globals.update(static_url=static_url, bars=bars, bar=bar)
    return environment


def _ago(time_us: int | None) -> Markup:
    """A time as people say it, with the exact one in the title."""
    if time_us is None:
        return Markup('<span class="quiet">never</span>')
    exact = datetime.fromtimestamp(time_us / 1e6, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    seconds = (now_us() - time_us) // 1_000_000
    said = f"in {_duration(-seconds)}" if seconds < 0 else f"{_duration(seconds)} ago"
    return Markup('<time class="nowrap" datetime="{0}" title="{0}">{1}</time>').format(exact, said)


def _duration(seconds: float) -> str:
    for length, unit in _STEPS:
        if seconds >= length:
            return f"{int(seconds // length)} {unit}"
    return "0 s"


def _size(num_bytes: int) -> str:
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{round(value, 1):g} {unit}"
        value /= 1024
    return f"{round(value, 1):g} TiB"


def _number(value: int) -> str:
    return f"{value:,}"


def _latency(microseconds: int) -> str:
    if microseconds < 1_000_000:
        return f"{microseconds / 1000:.0f} ms"
    return f"{microseconds / 1e6:,.1f} s"


def _interval(microseconds: int) -> str:
    """A time of which small parts matter, too."""
    if microseconds < 1000:
        return f"{microseconds} µs"
    if microseconds < 1_000_000:
        return f"{microseconds / 1000:.1f} ms"
    return f"{microseconds / 1e6:,.2f} s"


def _sentence(message: str) -> str:
    """An error's message as people write: a stop last, and a capital first unless it is a name."""
    message = message.strip()
    first, space, rest = message.partition(" ")
    if first.isalpha():
        message = first[:1].upper() + first[1:] + space + rest
    return message if message.endswith((".", "!", "?")) else message + "."


def _options(tenants: Iterable[Tenant]) -> list[tuple[str, str]]:
    """Tenants as choices of a select: what is sent, and what is shown."""
    return [
        (
            tenant.slug,
            tenant.slug if tenant.name == tenant.slug else f"{tenant.slug} ({tenant.name})",
        )
        for tenant in tenants
    ]


def _is_past(time_us: int | None) -> bool:
    return time_us is not None and time_us <= now_us()
