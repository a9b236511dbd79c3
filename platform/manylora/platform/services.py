"""What every route may use, made once at start and kept on `app.state.services`."""

from dataclasses import dataclass

from manylora.engine.client import EngineClient
from manylora.engine.text.processor import TextProcessor
from manylora.platform.db import Database
from manylora.platform.lives import Lives
from manylora.platform.metrics import ServerMetrics
from manylora.platform.models import BaseModel
from manylora.platform.registry import AdapterRegistry
from manylora.platform.settings import Settings


@dataclass(frozen=True, slots=True)
class Services:
    """The parts that serve. The caller that made them starts and closes them."""

    settings: Settings
    db: Database
    engine: EngineClient
    text: TextProcessor
    base_model: BaseModel  # the row of the one that the engine serves
    adapters: AdapterRegistry
    lives: Lives
    metrics: ServerMetrics
