"""`GET /metrics`: everything that is measured, in Prometheus' text format."""

import asyncio
from collections.abc import Iterator

from fastapi import APIRouter, Depends, Request, Response
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import Collector

from manylora.engine.errors import EngineUnavailableError
from manylora.platform.api.auth import operator, services_of
from manylora.platform.engine_metrics import engine_metrics
from manylora.platform.generation import digests_without_output
from manylora.platform.metrics import ENGINE, LABELS
from manylora.platform.services import Services

PATIENCE_SECONDS = 3.0  # with the engine, which answers between two steps; a scrape has 10

router = APIRouter()


@router.get("/metrics", dependencies=[Depends(operator)])
async def metrics(request: Request) -> Response:
    """All metrics of this server. An engine that is away is one of them, not an error.

    Never OpenMetrics, which Prometheus would rather have: there the library writes `vllm_` for
    `vllm:` (seen in 0.26).
    """
    services = services_of(request)
    families = [*services.metrics.registry.collect(), *await _of_engine(services)]
    text = generate_latest(_Scrape(families))
    return Response(text, headers={"content-type": CONTENT_TYPE_PLAIN_0_0_4})


class _Scrape(Collector):
    """Metrics that have been read already."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        return iter(self._families)


async def _of_engine(services: Services) -> list[Metric]:
    families: list[Metric] = []
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            info, stats = await services.engine.info(), await services.engine.stats()
    except (EngineUnavailableError, TimeoutError):
        pass
    else:
        families += engine_metrics(
            services.metrics.model,
            info,
            stats,
            prefix_caching=services.settings.engine_config().enable_prefix_caching,
            waiting_digests=digests_without_output(),
        )
    return [*_supervision(services, is_up=bool(families)), *families]


def _supervision(services: Services, *, is_up: bool) -> Iterator[Metric]:
    labels = (services.metrics.model, ENGINE)
    up = GaugeMetricFamily("manylora_engine_up", "1: the engine answers.", labels=LABELS)
    up.add_metric(labels, is_up)
    yield up
    restarts = CounterMetricFamily(
        "manylora_engine_restarts", "Times that the engine process was started anew.", labels=LABELS
    )
    restarts.add_metric(labels, services.metrics.engine_restarts())
    yield restarts
