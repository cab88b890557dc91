"""Counts, times and logs every call, and measures the latencies and token counts of completions."""

from __future__ import annotations

import inspect
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
import structlog
from attn.v1 import inference_pb2
from attn_core.errors import Unauthenticated, UnknownName

from attn_gateway.call import Context, authorization_in, request_id_of
from attn_gateway.interceptors.handlers import Continuation, Handler, behaviour_of, is_own, rebuild
from attn_gateway.logs import report
from attn_gateway.metrics import INFERENCE, Metrics
from attn_gateway.status import code_of, public_error
from attn_gateway.tenants import Tenants
from attn_gateway.traces import TracedCall, Traces

log = structlog.get_logger()

GENERATE = f"{INFERENCE}/Generate"
FINISH_REASONS = {
    inference_pb2.FINISH_REASON_END_OF_SEQUENCE: "stop",
    inference_pb2.FINISH_REASON_STOP: "stop",
    inference_pb2.FINISH_REASON_LENGTH: "length",
}


@dataclass
class CallRecord:
    """The measurements of a running call. Times of tokens are in seconds since `start`.

    `newest_tokens` is the time of the latest tokens of each completion, by its index.
    """

    method: str
    model: str
    tenant: str
    start: float = field(default_factory=time.perf_counter)
    first_token: float | None = None
    newest_tokens: dict[int, float] = field(default_factory=dict)
    usage: Any = None

    @property
    def labels(self) -> tuple[str, str]:
        """The metric labels: model and tenant."""
        return self.model, self.tenant

    def traced(self, code: grpc.StatusCode, request_id: str) -> TracedCall:
        """The record for traces of a call that ends now."""
        return TracedCall(
            method=self.method,
            request_id=request_id,
            model=self.model,
            tenant=self.tenant,
            code=code.name,
            seconds=time.perf_counter() - self.start,
            first_token=self.first_token,
            last_token=max(self.newest_tokens.values(), default=None),
            usage=self.usage,
        )


class Measured(grpc.aio.ServerInterceptor):
    """Measures all calls except health and reflection, by the tenant of their token.

    If the server has no tokens, the tenant label is empty: callers could make up any number of tenants.
    """

    def __init__(self, metrics: Metrics, tenants: Tenants, traces: Traces | None = None) -> None:
        self._metrics = metrics
        self._tenants = tenants
        self._traces = traces

    async def intercept_service(self, continuation: Continuation, details: grpc.HandlerCallDetails) -> Handler | None:
        """Wrap the handler with the measurements."""
        handler = await continuation(details)
        if handler is None or is_own(details.method):
            return handler
        behaviour, method = behaviour_of(handler), details.method

        async def stream(request: Any, context: Context) -> AsyncIterator[Any]:
            with self._call(method, request, context) as record:
                async with aclosing(behaviour(request, context)) as responses:
                    async for response in responses:
                        if method == GENERATE:
                            self._measure(record, response)
                        yield response

        async def single(request: Any, context: Context) -> Any:
            with self._call(method, request, context):
                return await behaviour(request, context)

        return rebuild(handler, stream if inspect.isasyncgenfunction(behaviour) else single)

    @contextmanager
    def _call(self, method: str, request: Any, context: Context) -> Any:
        model = getattr(request, "model", "")
        known_tenant = self._tenants.of(authorization_in(context.invocation_metadata()))
        tenant = known_tenant.name if known_tenant else ""
        record = CallRecord(method, model if isinstance(model, str) else "", tenant)
        code = grpc.StatusCode.OK
        try:
            yield record
        except Exception as error:
            known = public_error(error, "")
            code = code_of(known)
            if isinstance(error, NotImplementedError):
                code = grpc.StatusCode.UNIMPLEMENTED
            if isinstance(known, UnknownName | Unauthenticated):
                record.model = record.tenant = ""  # names that callers make up must not become labels
            raise
        except BaseException:
            code = grpc.StatusCode.CANCELLED
            raise
        finally:
            self._ended(record, code)
            if self._traces is not None:
                self._traces.record(record.traced(code, request_id_of(context)), context.invocation_metadata() or ())

    def _ended(self, record: CallRecord, code: grpc.StatusCode) -> None:
        seconds = time.perf_counter() - record.start
        metrics, labels = self._metrics, record.labels
        metrics.count("attn_calls", (record.method, code.name))
        metrics.observe("attn_call_duration_seconds", (record.method,), seconds)
        facts: dict[str, Any] = {"model": record.model, "tenant": record.tenant}
        if record.usage is not None:
            usage = record.usage
            metrics.observe("attn_e2e_request_latency_seconds", labels, seconds)
            if usage.HasField("queue_time"):
                metrics.observe("attn_request_queue_time_seconds", labels, usage.queue_time)
            metrics.observe("attn_request_prompt_tokens", labels, usage.prompt_tokens)
            metrics.observe("attn_request_generation_tokens", labels, usage.completion_tokens)
            metrics.count("attn_prompt_tokens", labels, usage.prompt_tokens)
            metrics.count("attn_prefix_cache_queries", labels, usage.prompt_tokens)
            metrics.count("attn_prefix_cache_hits", labels, usage.cached_tokens)
            facts |= {"prompt_tokens": usage.prompt_tokens, "completion_tokens": usage.completion_tokens}
        if record.first_token is not None:
            facts["first_token_seconds"] = round(record.first_token, 6)
        facts = {name: value for name, value in facts.items() if value != ""}
        report(log, "call", method=record.method, code=code.name, seconds=round(seconds, 6), **facts)

    def _measure(self, record: CallRecord, response: Any) -> None:
        """Record the tokens of one message of a completion, labelled by the model version that computes it."""
        record.model = response.model or record.model
        metrics, labels = self._metrics, record.labels
        if response.tokens:
            now = time.perf_counter() - record.start
            if record.first_token is None:
                record.first_token = now
                metrics.observe("attn_time_to_first_token_seconds", labels, now)
            newest = record.newest_tokens.get(response.index)
            if newest is not None:
                metrics.observe("attn_inter_token_latency_seconds", labels, now - newest)
            record.newest_tokens[response.index] = now
            metrics.count("attn_generation_tokens", labels, len(response.tokens))
        if response.finish_reason:
            metrics.count("attn_request_success", (*labels, FINISH_REASONS[response.finish_reason]))
        if response.HasField("usage"):
            record.usage = response.usage
