"""Logs: one structured line an event, on standard error. Never prompts, answers or secrets."""

import logging
import sys

import structlog
from structlog.typing import Processor


def configure_logs(level: str) -> None:
    """Coloured lines for people at a terminal, JSON lines for everybody else.

    Args:
        level: debug, info, warning or error.
    """
    threshold = logging.getLevelNamesMapping()[level.upper()]
    for_people: list[Processor] = [
        # structlog's default shows local variables, and so prompts and keys.
        structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
    ]
    for_programs: list[Processor] = [
        structlog.processors.format_exc_info,
        structlog.processors.JSONRenderer(),
    ]
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *(for_people if sys.stderr.isatty() else for_programs),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(threshold),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    logging.basicConfig(level=max(threshold, logging.WARNING), stream=sys.stderr)
