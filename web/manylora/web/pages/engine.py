"""`/admin/engine`: what it serves and does, why requests wait, what would spare preemptions."""

from collections.abc import Iterator
from dataclasses import dataclass

from fastapi import APIRouter, Request
from fastapi.responses import Response
from starlette.concurrency import run_in_threadpool

from manylora.engine.api import EngineInfo, EngineStats, Remedies
from manylora.engine.lifecycle import WaitCause
from manylora.engine.remedies import as_options
from manylora.platform.api.auth import services_of
from manylora.platform.db import Database
from manylora.web.engine_view import look_at
from manylora.web.figures import names_of
from manylora.web.page_route import PageRoute
from manylora.web.templating import is_fragment, render
from manylora.web.waterfall import CAUSES

router = APIRouter(route_class=PageRoute)

SHOWN_IN_HOST_MEMORY = 100
_PRICES = {
    "--num-kv-blocks": "memory",
    "--max-num-seqs": "a longer queue, and fewer tokens a second",
    "--max-num-batched-tokens": "a longer time to the first token",
    "--dtype": "precision, of the weights too",
    "--max-model-len": "longer answers are cut off, longer prompts refused",
}


@dataclass(frozen=True, slots=True)
class Wait:
    """One cause of waiting: how many requests wait for it now, and how long all have."""

    cause: WaitCause
    meaning: str
    waiting: int
    total_us: int


@dataclass(frozen=True, slots=True)
class Remedy:
    """One way to spare preemptions; `value` is None where nothing helps that way."""

    words: str
    option: str | None
    now: str | int | None
    value: str | int | None
    price: str


@router.get("/admin/engine")
async def engine(request: Request) -> Response:
    """The page, or its live part when it refreshes itself; `?live=off` stops that."""
    services = services_of(request)
    view = await look_at(services.engine)
    values = {
        "engine": view,
        "base_model": services.base_model.name,
        "live": request.query_params.get("live") != "off",
    }
    if view.info is not None and view.stats is not None:
        values |= await run_in_threadpool(_figures, services.db, view.info, view.stats)
    return render(request, "_engine.html" if is_fragment(request) else "engine.html", values)


def _figures(database: Database, info: EngineInfo, stats: EngineStats) -> dict[str, object]:
    in_slots = [slot.digest for slot in stats.slots if slot.digest is not None]
    in_host_memory = stats.host_digests[:SHOWN_IN_HOST_MEMORY]
    with database.read() as session:
        names = names_of(session, [*in_slots, *in_host_memory])
    waits = [_wait(cause, stats) for cause in WaitCause]
    return {
        "names": names,
        "in_host_memory": in_host_memory,
        "waits": waits,
        "waited_us": sum(wait.total_us for wait in waits),
        "advice": list(_remedies(stats.remedies, info)) if stats.remedies else [],
        "longest_at_once": info.num_kv_blocks // -(-info.max_model_len // info.block_size),
    }


def _wait(cause: WaitCause, stats: EngineStats) -> Wait:
    seconds = stats.queued_seconds_by_cause.get(cause, 0.0)
    return Wait(cause, CAUSES[cause], stats.waiting_by_cause.get(cause, 0), round(seconds * 1e6))


def _remedies(found: Remedies, info: EngineInfo) -> Iterator[Remedy]:
    """What the log line says: of the two ways to less KV, those alone that reach it."""
    *alone, dtype, length = as_options(found, info)
    for way in alone:
        yield Remedy(way.remedy, way.option, way.now, way.value, _PRICES[way.option])
    if dtype.value is not None:
        yield Remedy(dtype.remedy, dtype.option, dtype.now, dtype.value, _PRICES[dtype.option])
    if length.value is not None:
        price = _PRICES[length.option]
        yield Remedy("shorter sequences", length.option, length.now, length.value, price)
    if dtype.value is None and length.value is None:
        yield Remedy(dtype.remedy, None, None, None, "")
