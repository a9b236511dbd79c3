"""Logs: one structured line an event, on standard error. Never prompts, answers or secrets."""

import logging
import sys
from typing import Any

import structlog


def configure_logs(level: str) -> None:
    """Coloured lines for people at a terminal, JSON lines for everybody else.

    Args:
        level: debug, info, warning or error.
    """
    threshold = logging.getLevelNamesMapping()[level.upper()]
    for_people = sys.stderr.isatty()
    renderer: Any = (
        structlog.dev.ConsoleRenderer() if for_people else structlog.processors.JSONRenderer()
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(threshold),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    logging.basicConfig(level=max(threshold, logging.WARNING), stream=sys.stderr)
