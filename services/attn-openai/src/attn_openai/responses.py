"""POST /v1/responses: text and function calls in, text and function calls out. Responses are not stored."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from attn_core.errors import InvalidValue
from attn_schema import FinishReason, Usage

from attn_openai.caller import HttpCaller
from attn_openai.chat import ChatTask, ChoiceState, choices_of, logprobs_of
from attn_openai.requests import SAME_NAMES, ChatCompletionRequest, ResponseRequest

COPIED = (
    *SAME_NAMES, "model", "temperature", "stop", "seed", "logit_bias", "user", "timeout", "min_tokens",
    "use_beam_search", "structured_outputs", "tools", "tool_choice", "parallel_tool_calls",
)  # fmt: skip
"""Fields that have the same meaning in a chat completion request."""
ITEM_TYPES = ("message", "function_call", "function_call_output")


def as_chat(request: ResponseRequest) -> ChatCompletionRequest:
    """Convert to the equivalent chat completion request; raises `InvalidValue`."""
    if request.max_tokens is not None:
        raise InvalidValue.of("max_tokens", request.max_tokens, "left out; use max_output_tokens instead")
    text = request.text if request.text is not None else {}
    if not isinstance(text, dict) or text.keys() - {"format"}:
        raise InvalidValue.of("text", text, "an object with format")
    wants_logprobs = bool(request.include) or request.top_logprobs is not None
    return ChatCompletionRequest(
        messages=_messages(request),
        max_completion_tokens=request.max_output_tokens,
        response_format=text.get("format"),
        logprobs=wants_logprobs,
        top_logprobs=request.top_logprobs,
        **{name: getattr(request, name) for name in COPIED},
    )


def _messages(request: ResponseRequest) -> list[Any]:
    messages: list[Any] = []
    if request.instructions is not None:
        messages.append({"role": "system", "content": request.instructions})
    if isinstance(request.input, str):
        return [*messages, {"role": "user", "content": request.input}]
    if not isinstance(request.input, list) or not request.input:
        raise InvalidValue.of("input", request.input, "a text, or a list of items")
    for place, item in enumerate(request.input):
        kind = item.get("type", "message") if isinstance(item, dict) else None
        match kind:
            case "message":
                messages.append({name: item[name] for name in ("role", "content") if name in item})
            case "function_call":
                function = {"name": item.get("name"), "arguments": item.get("arguments")}
                messages.append({"role": "assistant", "content": None, "tool_calls": [{"function": function}]})
            case "function_call_output":
                output = item.get("output")
                text = output if isinstance(output, str | list) else json.dumps(output)
                messages.append({"role": "tool", "content": text, "tool_call_id": item.get("call_id")})
            case _:
                raise InvalidValue.of(f"input[{place}].type", kind, ", ".join(ITEM_TYPES))
    return messages


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _new_id(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex}"


@dataclass
class ResponseState:
    """A response during generation, which produces the events of its stream."""

    request: ResponseRequest
    id: str
    sampling_temperature: float
    created: int = field(default_factory=lambda: int(time.time()))
    output: list[dict[str, Any]] = field(default_factory=list)
    _events: int = 0

    def event(self, kind: str, **facts: Any) -> dict[str, Any]:
        """The next event of the stream."""
        self._events += 1
        return {"type": kind, "sequence_number": self._events - 1, **facts}

    def shown(self, status: str, usage: Usage | None = None, *, incomplete: bool = False) -> dict[str, Any]:
        """The response as a JSON object."""
        request = self.request
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if incomplete else None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": {},
            "model": request.model,
            "output": self.output,
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": None,
            "store": False,
            "temperature": self.sampling_temperature,
            "text": request.text or {"format": {"type": "text"}},
            "tool_choice": request.tool_choice or "auto",
            "tools": request.tools or [],
            "top_logprobs": request.top_logprobs or 0,
            "top_p": 1.0 if request.top_p is None else request.top_p,
            "truncation": "disabled",
            "usage": None if usage is None else _usage(usage),
        }

    def message_delta(self, text: str, logprobs: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Add text to the open message, or to a new one; yields the events."""
        if not self.output or self.output[-1]["type"] != "message":
            item: dict[str, Any] = {"type": "message", "id": _new_id("msg"), "role": "assistant", "content": []}
            item["status"] = "in_progress"
            self.output.append(item)
            yield self.event("response.output_item.added", output_index=self._last, item=dict(item, content=[]))
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            item["content"].append(part)
            yield self.event("response.content_part.added", **self._place(), content_index=0, part=dict(part))
        part = self.output[-1]["content"][0]
        part["text"] += text
        part["logprobs"] = [*part["logprobs"], *logprobs]
        yield self.event("response.output_text.delta", **self._place(), content_index=0, delta=text, logprobs=logprobs)

    def call_delta(self, call: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Add a new function call, or arguments to the open one; yields the events."""
        function = call["function"]
        if "id" in call:
            yield from self.close("completed")
            item = {"type": "function_call", "id": _new_id("fc"), "call_id": call["id"], "name": function["name"]}
            item |= {"arguments": "", "status": "in_progress"}
            self.output.append(item)
            yield self.event("response.output_item.added", output_index=self._last, item=dict(item))
        self.output[-1]["arguments"] += function["arguments"]
        yield self.event("response.function_call_arguments.delta", **self._place(), delta=function["arguments"])

    def close(self, status: str) -> Iterator[dict[str, Any]]:
        """Close the last item if it is open; yields the events."""
        if not self.output or self.output[-1]["status"] != "in_progress":
            return
        item = self.output[-1]
        item["status"] = status
        if item["type"] == "message":
            part = item["content"][0]
            yield self.event(
                "response.output_text.done",
                **self._place(), content_index=0, text=part["text"], logprobs=part["logprobs"],
            )  # fmt: skip
            yield self.event("response.content_part.done", **self._place(), content_index=0, part=part)
        else:
            facts = {"arguments": item["arguments"], "name": item["name"]}
            yield self.event("response.function_call_arguments.done", **self._place(), **facts)
        yield self.event("response.output_item.done", output_index=self._last, item=item)

    @property
    def _last(self) -> int:
        return len(self.output) - 1

    def _place(self) -> dict[str, Any]:
        return {"item_id": self.output[-1]["id"], "output_index": self._last}


def _deltas(response: ResponseState, state: ChoiceState, parts: list[Any], tokens: Any) -> Iterator[dict[str, Any]]:
    logprobs = logprobs_of(tokens) if response.request.include or response.request.top_logprobs is not None else []
    for part in parts:
        if "content" in part:
            yield from response.message_delta(part["content"], logprobs)
            logprobs = []
        for call in part.get("tool_calls", ()):
            yield from response.call_delta(call)
    if not parts and logprobs and response.output and response.output[-1]["type"] == "message" and not state.calls:
        yield from response.message_delta("", logprobs)


async def stream_response(request: ResponseRequest, caller: HttpCaller) -> AsyncGenerator[dict[str, Any], None]:
    """Yield the events of a response."""
    task = await ChatTask.of(as_chat(request), caller)
    response = ResponseState(request, f"resp_{caller.request_id}", task.sampling.temperature)
    (state,), usage, reason = choices_of(task), Usage(), None
    async with aclosing(task.deltas(caller)) as deltas:
        started = False
        async for delta in deltas:
            if not started:
                started = True
                yield response.event("response.created", response=response.shown("in_progress"))
                yield response.event("response.in_progress", response=response.shown("in_progress"))
            usage, reason = delta.usage or usage, delta.finish_reason or reason
            for event in _deltas(response, state, state.take(delta), delta.tokens):
                yield event
    incomplete = reason is FinishReason.LENGTH
    if not response.output:
        for event in response.message_delta("", []):
            yield event
    status = "incomplete" if incomplete else "completed"
    for event in response.close(status):
        yield event
    whole = response.shown(status, usage, incomplete=incomplete)
    yield response.event(f"response.{status}", response=whole)


async def respond(request: ResponseRequest, caller: HttpCaller) -> dict[str, Any]:
    """Return the whole response."""
    last: dict[str, Any] = {}
    async with aclosing(stream_response(request, caller)) as events:
        async for event in events:
            last = event
    found: dict[str, Any] = last["response"]
    return found
