"""Counts, times and logs every call, measures the latencies and tokens of completions, and shows errors safely."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import grpc
import structlog
from attn_core.errors import AttnError, Unauthenticated, UnknownName
from attn_schema import FinishReason, OutputDelta, Usage
from attn_schema.methods import GENERATE, Row

from attn_gateway.call import Call
from attn_gateway.logs import report
from attn_gateway.metrics import Metrics
from attn_gateway.status import code_of, public_error
from attn_gateway.traces import TracedCall, Traces

log = structlog.get_logger()

FINISH_REASONS = {
    FinishReason.END_OF_SEQUENCE: "stop",
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
}


def shown_error(error: Exception, request_id: str) -> AttnError:
    """The error that a client may see; one that is a fault of the server is logged, and only its request id shown."""
    shown = public_error(error, request_id)
    if code_of(shown) is grpc.StatusCode.INTERNAL:
        log.error("call failed", exc_info=error)
    return shown


@asynccontextmanager
async def errors_shown(row: Row, call: Call) -> AsyncIterator[None]:
    """Log with the call's request id, and raise only what a client may see."""
    # Every call has its own task, so this is not reset: a stream can be closed in another task.
    structlog.contextvars.bind_contextvars(request_id=call.request_id, method=row.path)
    try:
        yield
    except Exception as error:
        shown = shown_error(error, call.request_id)
        if shown is error:
            raise
        raise shown from error


@dataclass
class CallRecord:
    """The measurements of a running call. Times of tokens are in seconds since `start`.

    `newest_tokens` is the time of the latest tokens of each completion, by its index.
    """

    call: Call
    method: str
    model: str = ""
    tenant: str = ""
    start: float = field(default_factory=time.perf_counter)
    first_token: float | None = None
    newest_tokens: dict[int, float] = field(default_factory=dict)
    usage: Usage | None = None

    @property
    def labels(self) -> tuple[str, str]:
        """The metric labels: model and tenant."""
        return self.model, self.tenant

    def traced(self, code: grpc.StatusCode) -> TracedCall:
        """The record for traces of a call that ends now."""
        return TracedCall(
            method=self.method,
            request_id=self.call.request_id,
            model=self.model,
            tenant=self.tenant,
            code=code.name,
            seconds=time.perf_counter() - self.start,
            first_token=self.first_token,
            last_token=max(self.newest_tokens.values(), default=None),
            usage=self.usage,
        )


class Measured:
    """Measures all calls, by the tenant of their token.

    If the server has no tokens, the tenant label is empty: callers could make up any number of tenants.
    """

    def __init__(self, metrics: Metrics, traces: Traces | None = None, *, by_tenant: bool) -> None:
        self._metrics = metrics
        self._traces = traces
        self._by_tenant = by_tenant

    @asynccontextmanager
    async def __call__(self, row: Row, call: Call) -> AsyncIterator[None]:
        """Measure a call."""
        record = CallRecord(call, row.path)
        if row is GENERATE:
            call.observe = partial(self._measure, record)
        code, known = grpc.StatusCode.OK, True
        try:
            yield
        except Exception as error:
            shown = public_error(error, "")
            code = code_of(shown)
            known = not isinstance(shown, UnknownName | Unauthenticated)
            raise
        except BaseException:
            code = grpc.StatusCode.CANCELLED
            raise
        finally:
            self._name(record)
            if not known:
                record.model = record.tenant = ""  # names that callers make up must not become labels
            self._ended(record, code)
            if self._traces is not None:
                self._traces.record(record.traced(code), call.metadata)

    def _name(self, record: CallRecord) -> None:
        """Label a record by the model of the request, unless it has that of a response, and by the caller's tenant."""
        model = getattr(record.call.request, "model", "")
        record.model = record.model or (model if isinstance(model, str) else "")
        record.tenant = record.call.tenant if self._by_tenant else ""

    def _ended(self, record: CallRecord, code: grpc.StatusCode) -> None:
        seconds = time.perf_counter() - record.start
        metrics, labels = self._metrics, record.labels
        metrics.count("attn_calls", (record.method, code.name))
        metrics.observe("attn_call_duration_seconds", (record.method,), seconds)
        facts: dict[str, Any] = {"model": record.model, "tenant": record.tenant}
        usage = record.usage
        if usage is not None:
            metrics.observe("attn_e2e_request_latency_seconds", labels, seconds)
            if usage.queue_time is not None:
                metrics.observe("attn_request_queue_time_seconds", labels, usage.queue_time)
            metrics.observe("attn_request_prompt_tokens", labels, usage.prompt_tokens)
            metrics.observe("attn_request_generation_tokens", labels, usage.completion_tokens)
            metrics.count("attn_prompt_tokens", labels, usage.prompt_tokens)
            metrics.count("attn_prefix_cache_queries", labels, usage.prompt_tokens)
            metrics.count("attn_prefix_cache_hits", labels, usage.cached_tokens)
            facts |= {"prompt_tokens": usage.prompt_tokens, "completion_tokens": usage.completion_tokens}
        elif record.call.observe is not None:  # it failed or was cancelled, after its prompt was read
            metrics.count("attn_prompt_tokens", labels, record.call.charge.prompt_tokens)
        if record.first_token is not None:
            facts["first_token_seconds"] = round(record.first_token, 6)
        facts = {name: value for name, value in facts.items() if value != ""}
        report(log, "call", method=record.method, code=code.name, seconds=round(seconds, 6), **facts)

    def _measure(self, record: CallRecord, delta: OutputDelta) -> None:
        """Record the tokens of one delta of a completion, labelled by its model."""
        if record.first_token is None:
            self._name(record)
        metrics, labels = self._metrics, record.labels
        if delta.tokens:
            now = time.perf_counter() - record.start
            if record.first_token is None:
                record.first_token = now
                metrics.observe("attn_time_to_first_token_seconds", labels, now)
            newest = record.newest_tokens.get(delta.index)
            if newest is not None:
                metrics.observe("attn_inter_token_latency_seconds", labels, now - newest)
            record.newest_tokens[delta.index] = now
            metrics.count("attn_generation_tokens", labels, len(delta.tokens))
        if delta.finish_reason:
            metrics.count("attn_request_success", (*labels, FINISH_REASONS[delta.finish_reason]))
        record.usage = delta.usage or record.usage
