"""What the pages show of the engine, whether it answers or not."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

from manylora.engine.api import EngineInfo, EngineStats
from manylora.engine.client import EngineClient
from manylora.engine.errors import EngineUnavailableError

PATIENCE_SECONDS = 2.0  # a page must come even when the engine hangs


@dataclass(frozen=True, slots=True)
class EngineView:
    """A look at the engine; both are None when it did not answer."""

    info: EngineInfo | None = None
    stats: EngineStats | None = None

    @property
    def residency(self) -> Mapping[str, str]:
        """Where each adapter digest lies now; digests that are nowhere are absent."""
        if self.stats is None:
            return {}
        where = dict.fromkeys(self.stats.host_digests, "host memory")
        for slot in self.stats.slots:
            if slot.digest is not None:
                where[slot.digest] = f"slot {slot.slot}"
        return where


async def look_at(engine: EngineClient) -> EngineView:
    """Ask the engine what it is and does."""
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            return EngineView(await engine.info(), await engine.stats())
    except (EngineUnavailableError, TimeoutError):
        return EngineView()
