"""What the pages show of the engine, whether it answers or not."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

from manylora.engine.api import EngineInfo, EngineStats
from manylora.engine.client import EngineClient
from manylora.engine.errors import EngineUnavailableError
from manylora.platform.api.adapters import residency

PATIENCE_SECONDS = 2.0  # a page must come even when the engine hangs


@dataclass(frozen=True, slots=True)
class EngineView:
    """A look at the engine; both are None when it did not answer."""

    info: EngineInfo | None = None
    stats: EngineStats | None = None

    @property
    def slots(self) -> Mapping[str, int]:
        """The slot of each adapter digest that is in one."""
        slots = self.stats.slots if self.stats else ()
        return {slot.digest: slot.slot for slot in slots if slot.digest is not None}

    def residency(self, digest: str) -> str:
        """Where a version is held, in the API's words."""
        return residency(digest, self.stats)


async def look_at(engine: EngineClient) -> EngineView:
    """Ask the engine what it is and does."""
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            return EngineView(await engine.info(), await engine.stats())
    except (EngineUnavailableError, TimeoutError):
        return EngineView()
