"""OpenTelemetry traces of calls: a span for each call, with child spans for the phases of a completion.

The caller's span is the parent, from the W3C's `traceparent` in the metadata or the HTTP header. Attributes follow the
conventions for RPC and for generative models; what these have no name for begins with attn. They never contain prompts
or completions.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from attn_core.errors import MissingPackage
from attn_schema import Usage

TRACE_KEYS = ("traceparent", "tracestate")
"""Metadata keys of the W3C's trace context."""
SERVICE = "attn"
NANOSECONDS = 1e9


@dataclass(frozen=True, kw_only=True)
class TracedCall:
    """A call that has ended. Times are in seconds since its start; `usage` is None unless it is a completion."""

    method: str
    request_id: str
    model: str
    tenant: str
    code: str
    seconds: float
    first_token: float | None
    last_token: float | None
    usage: Usage | None


class Traces:
    """Sends spans to a collector over OTLP; raises `MissingPackage` if OpenTelemetry is not installed."""

    def __init__(self, endpoint: str) -> None:
        try:
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            raise MissingPackage.of("attn-gateway[otel]", "sending traces") from error
        exporter = OTLPSpanExporter(endpoint=endpoint, insecure=not endpoint.startswith("https://"))
        self._provider = TracerProvider(resource=Resource.create({"service.name": SERVICE}))
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("attn_gateway")
        self._propagator = TraceContextTextMapPropagator()

    def record(self, call: TracedCall, metadata: Iterable[tuple[str, Any]]) -> None:
        """Send the spans of a call that has just ended."""
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        carrier = {key: str(value) for key, value in metadata if key in TRACE_KEYS}
        start = time.time() - call.seconds
        attributes: dict[str, Any] = {
            "rpc.system.name": "grpc",
            "rpc.method": call.method[1:],
            "rpc.response.status_code": call.code,
            "error.type": "" if call.code == "OK" else call.code,
            "attn.request.id": call.request_id,
            "gen_ai.request.model": call.model,
            "attn.tenant": call.tenant,
        } | _measured(call)
        span = self._tracer.start_span(
            call.method[1:],
            self._propagator.extract(carrier),
            SpanKind.SERVER,
            {name: value for name, value in attributes.items() if value not in (None, "")},
            start_time=_at(start),
        )
        if call.code != "OK":
            span.set_status(Status(StatusCode.ERROR, call.code))
        below = set_span_in_context(span)
        for name, begin, end in _phases(call):
            self._tracer.start_span(name, below, start_time=_at(start + begin)).end(_at(start + end))
        span.end(_at(start + call.seconds))

    def stop(self) -> None:
        """Send the remaining spans; waits for the collector."""
        self._provider.shutdown()


def _measured(call: TracedCall) -> dict[str, Any]:
    """The attributes of a completion; empty for other calls."""
    if call.usage is None:
        return {}
    return {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": SERVICE,
        "gen_ai.usage.input_tokens": call.usage.prompt_tokens,
        "gen_ai.usage.output_tokens": call.usage.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": call.usage.cached_tokens,
        "gen_ai.response.time_to_first_chunk": call.first_token,
        "attn.queue_time": call.usage.queue_time,
    }


def _phases(call: TracedCall) -> list[tuple[str, float, float]]:
    """The engine's phases of a completion as (name, begin, end): queue, prefill, and decode after the first token."""
    if call.usage is None or call.first_token is None or call.last_token is None:
        return []
    queued = min(call.usage.queue_time or 0.0, call.first_token)
    return [
        ("engine.queue", 0.0, queued),
        ("engine.prefill", queued, call.first_token),
        ("engine.decode", call.first_token, call.last_token),
    ]


def _at(seconds: float) -> int:
    return int(seconds * NANOSECONDS)
