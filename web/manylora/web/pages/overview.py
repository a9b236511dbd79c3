"""`/admin`: how the engine is, what it serves, what to do next."""

from collections.abc import Mapping
from dataclasses import dataclass

from fastapi import APIRouter, Request
from fastapi.responses import RedirectResponse, Response
from starlette.concurrency import run_in_threadpool

from manylora.platform.api.auth import services_of
from manylora.platform.db import Database
from manylora.platform.usage import UsageLine, recent
from manylora.web.engine_view import EngineView, look_at
from manylora.web.figures import Counts, Hour, Totals, counts, names_of, tokens_by_hour, totals
from manylora.web.page_route import PageRoute
from manylora.web.templating import is_fragment, render

router = APIRouter(route_class=PageRoute)

RECENT_REQUESTS = 10


@dataclass(frozen=True, slots=True)
class Figures:
    """What the database adds to the page."""

    counts: Counts
    totals: Totals
    hours: list[Hour]
    recent: list[UsageLine]
    names: Mapping[str, list[str]]


@router.get("/")
def front_door() -> RedirectResponse:
    """Who opens the bare address in a browser wants the pages; it says nothing about anybody."""
    return RedirectResponse("/admin", status_code=303)


@router.get("/admin")
async def overview(request: Request) -> Response:
    """The page, or its live part when it refreshes itself; `?live=off` stops that."""
    services = services_of(request)
    engine = await look_at(services.engine)
    figures = await run_in_threadpool(_figures, services.db, engine)
    values = {
        "engine": engine,
        "figures": figures,
        "base_model": services.base_model.name,
        "url": f"{request.url.scheme}://{request.url.netloc}",
        "live": request.query_params.get("live") != "off",
    }
    template = "_live.html" if is_fragment(request) else "overview.html"
    return render(request, template, values)


def _figures(database: Database, engine: EngineView) -> Figures:
    with database.read() as session:
        return Figures(
            counts(session),
            totals(session),
            tokens_by_hour(session),
            recent(session, limit=RECENT_REQUESTS),
            names_of(session, engine.slots),
        )
