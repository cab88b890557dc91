"""The server's log: lines for people on a terminal, JSON otherwise, always on stderr."""

from __future__ import annotations

import sys

import structlog


def configure_logs() -> None:
    """Send this process's log to stderr with times, levels and request ids."""
    people = sys.stderr.isatty()
    processors: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    if people:
        # The default would print local variables, and with them what people asked a model.
        processors.append(structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback))
    else:
        processors += [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    structlog.configure(processors=processors, logger_factory=structlog.PrintLoggerFactory(sys.stderr))
