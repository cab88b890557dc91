"""Spans of calls arrive at a real OTLP collector, below the caller's own span."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio
import opentelemetry.semconv._incubating.attributes as conventions
import pytest
from attn.v1 import common_pb2
from attn.v1 import inference_pb2 as pb
from attn_core.errors import WrongState
from attn_gateway import Call, GatewaySettings, handlers_of, serving
from attn_schema import FinishReason, OutputDelta, Prompt, ScoreRequest, Token, Usage
from attn_schema.methods import GENERATE, INFERENCE, SCORE
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
METADATA = (("traceparent", f"00-{TRACE}-{PARENT}-01"), ("x-request-id", "mine"))


class Collector(TraceServiceServicer):
    """Keeps the spans that it is sent."""

    def __init__(self) -> None:
        self.spans: list[Any] = []

    async def Export(self, request: Any, context: Any) -> Any:  # noqa: N802 - the name of the call
        for resource in request.resource_spans:
            for scope in resource.scope_spans:
                self.spans += scope.spans
        return trace_service_pb2.ExportTraceServiceResponse()


class Waiting:
    """Says two tokens 20 ms apart, and that it waited 5 ms for the first."""

    names = (INFERENCE,)

    def handlers(self) -> Any:
        return handlers_of(INFERENCE, self)

    async def start(self) -> None: ...

    async def stop(self, shutdown_timeout: float) -> None: ...

    async def generate(self, *_: Any) -> AsyncIterator[OutputDelta]:
        for _ in range(2):
            await asyncio.sleep(0.02)
            yield OutputDelta(tokens=(Token(id=1),))
        usage = Usage(prompt_tokens=3, completion_tokens=2, queue_time=0.005)
        yield OutputDelta(finish_reason=FinishReason.LENGTH, usage=usage)

    async def score(self, *_: Any) -> None:
        raise WrongState("no model is loaded")


@pytest.fixture
async def collector() -> AsyncIterator[tuple[Collector, str]]:
    server, kept = grpc.aio.server(), Collector()
    add_TraceServiceServicer_to_server(kept, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield kept, f"http://127.0.0.1:{port}"
    await server.stop(grace=0)


def attributes(span: Any) -> dict[str, Any]:
    return {item.key: getattr(item.value, item.value.WhichOneof("value")) for item in span.attributes}


DECLARED = re.compile(r'^[A-Z_]+: Final = "([a-z_.]+)"\n"""\n(.*)', re.MULTILINE)


def assert_conventional(told: dict[str, Any]) -> None:
    """Every attribute is of the installed conventions and has no successor, or is our own."""
    folder = Path(next(iter(conventions.__path__)))
    declared = dict(found for file in folder.glob("*.py") for found in DECLARED.findall(file.read_text()))
    assert not [name for name in told if name not in declared and not name.startswith("attn.")]
    # Those of generative models moved to a package of their own, under the same names.
    replaced = [name for name in told if re.match("Deprecated: (?!Moved)", declared.get(name, ""))]
    assert not replaced
    assert {"rpc.system", "rpc.service"} <= {name for name, text in declared.items() if "Deprecated" in text}


@pytest.mark.parametrize("local", [True, False])
async def test_spans_of_a_completion_are_below_the_callers_and_follow_one_another(
    collector: tuple[Collector, str], local: bool
) -> None:
    kept, endpoint = collector
    request = pb.GenerateRequest(model="m", prompt=common_pb2.Prompt(text="a secret"))
    async with serving([Waiting()], GatewaySettings(port=0, otlp_traces_endpoint=endpoint)) as gateway:
        if local:
            call = Call(request_id="mine", metadata=METADATA)
            assert [answer async for answer in gateway.calls.stream(GENERATE, request, call)]
        else:
            async with grpc.aio.insecure_channel(gateway.address) as channel:
                call = channel.unary_stream(
                    GENERATE.path, pb.GenerateRequest.SerializeToString, pb.GenerateResponse.FromString
                )
                assert [answer async for answer in call(request, metadata=METADATA)]
    spans = {span.name: span for span in kept.spans}
    root = spans["attn.v1.InferenceService/Generate"]
    assert (root.trace_id.hex(), root.parent_span_id.hex()) == (TRACE, PARENT)
    told = attributes(root)
    assert told["attn.request.id"] == "mine"
    assert (told["gen_ai.usage.input_tokens"], told["gen_ai.usage.output_tokens"]) == (3, 2)
    assert told["attn.queue_time"] == 0.005
    assert_conventional(told)
    assert "a secret" not in str(kept.spans)
    phases = [spans[f"engine.{name}"] for name in ("queue", "prefill", "decode")]
    assert {(span.trace_id, span.parent_span_id) for span in phases} == {(root.trace_id, root.span_id)}
    times = [time for span in phases for time in (span.start_time_unix_nano, span.end_time_unix_nano)]
    assert times == sorted(times)
    assert root.start_time_unix_nano <= times[0] < times[-1] <= root.end_time_unix_nano
    assert phases[2].end_time_unix_nano - phases[2].start_time_unix_nano > 15e6


async def test_a_call_that_fails_is_a_span_with_its_code(collector: tuple[Collector, str]) -> None:
    kept, endpoint = collector
    async with serving([Waiting()], GatewaySettings(port=0, otlp_traces_endpoint=endpoint)) as gateway:
        with pytest.raises(WrongState):
            await gateway.calls.unary(
                SCORE, ScoreRequest(model="m", prompts=(Prompt(text="a"),)), Call(request_id="mine")
            )
    (span,) = kept.spans
    assert attributes(span)["rpc.response.status_code"] == "FAILED_PRECONDITION"
    assert_conventional(attributes(span))
    assert span.status.code == span.status.STATUS_CODE_ERROR
