"""The server's log, on stderr: human-readable on a terminal, JSON otherwise."""

from __future__ import annotations

import logging
import sys
from typing import Any

import structlog

OURS = "attn"
"""The prefix of the names of attn's own loggers; of other loggers only warnings and errors are shown."""


def configure_logs(level: str = "info") -> None:
    """Log this process to stderr with times, levels and request ids, from `level` ("debug", "info", ...) upwards."""
    terminal = sys.stderr.isatty()
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    rendered: list[structlog.typing.Processor]
    if terminal:
        # The default formatter would print local variables, and with them users' prompts.
        rendered = [structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)]
    else:
        rendered = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    number = logging.getLevelNamesMapping()[level.upper()]
    structlog.configure(
        processors=[*shared, *rendered],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(lambda record: record.levelno >= logging.WARNING or record.name.startswith(OURS))
    format_record = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=shared, processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *rendered]
    )
    handler.setFormatter(format_record)
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(number)


def report(log: Any, event: str, **facts: Any) -> None:
    """Log a line about a call; does nothing unless `configure_logs` was called, as in a notebook."""
    if structlog.is_configured():
        log.info(event, **facts)
