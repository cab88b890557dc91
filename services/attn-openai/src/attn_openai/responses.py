"""POST /v1/responses: text and function calls in, thoughts, text and function calls out; conversations go on by id."""

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
from attn_schema.sampling import ResolvedSamplingParams

from attn_openai.caller import HttpCaller
from attn_openai.chat import ChatTask, ChoiceState, choices_of, logprobs_of
from attn_openai.messages import require_known
from attn_openai.requests import SAME_NAMES, ChatCompletionRequest, ResponseRequest

COPIED = (
    *SAME_NAMES, "model", "stop", "seed", "logit_bias", "user", "timeout", "min_tokens",
    "use_beam_search", "structured_outputs", "tools", "tool_choice", "parallel_tool_calls", "chat_template_kwargs",
)  # fmt: skip
"""Fields that have the same meaning in a chat completion request."""
ITEM_FIELDS = {
    "message": frozenset({"type", "role", "content"}),
    "function_call": frozenset({"type", "call_id", "name", "arguments"}),
    "function_call_output": frozenset({"type", "call_id", "output"}),
    "reasoning": frozenset({"type", "summary", "content", "encrypted_content"}),
}
"""The fields of each type of input item; those of `IGNORED` may be there, too."""


def as_chat(request: ResponseRequest, messages: list[Any]) -> ChatCompletionRequest:
    """Convert to the chat completion request of these messages; raises `InvalidValue`."""
    if request.max_tokens is not None:
        raise InvalidValue.of("max_tokens", request.max_tokens, "left out; use max_output_tokens instead")
    text = request.text if request.text is not None else {}
    if not isinstance(text, dict) or text.keys() - {"format", "verbosity"}:
        raise InvalidValue.of("text", text, "an object with format")
    if text.get("verbosity") not in (None, "medium"):
        raise InvalidValue.of("text.verbosity", text["verbosity"], "medium")
    reasoning = request.reasoning if request.reasoning is not None else {}
    if not isinstance(reasoning, dict) or reasoning.keys() - {"effort", "summary", "generate_summary"}:
        raise InvalidValue.of(
            "reasoning", reasoning, "an object with effort; a summary is not made, but the whole text"
        )
    system = [{"role": "system", "content": request.instructions}] if request.instructions is not None else []
    return ChatCompletionRequest(
        messages=[*system, *messages],
        max_completion_tokens=request.max_output_tokens,
        response_format=text.get("format"),
        logprobs=request.wants_logprobs,
        top_logprobs=request.top_logprobs,
        reasoning_effort=reasoning.get("effort"),
        **{name: getattr(request, name) for name in COPIED},
    )


def messages_of(items: Any) -> list[Any]:
    """The messages of `input`; thoughts and calls that follow one another become one message. Raises `InvalidValue`."""
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    if not isinstance(items, list) or not items:
        raise InvalidValue.of("input", items, "a text, or a list of items")
    messages: list[Any] = []
    for place, item in enumerate(items):
        kind = item.get("type", "message") if isinstance(item, dict) else None
        if not isinstance(kind, str) or kind not in ITEM_FIELDS:
            raise InvalidValue.of(f"input[{place}].type", kind, ", ".join(ITEM_FIELDS))
        require_known(item, f"input[{place}]", ITEM_FIELDS[kind])
        if kind == "message":
            message = {name: item[name] for name in ("role", "content") if name in item}
            if message.get("role") == "assistant" and _open(messages):
                messages[-1] |= message
            else:
                messages.append(message)
        elif kind == "function_call_output":
            output = item.get("output")
            text = output if isinstance(output, str | list) else json.dumps(output)
            messages.append({"role": "tool", "content": text, "tool_call_id": item.get("call_id")})
        else:
            if not messages or messages[-1].get("role") != "assistant" or (kind == "reasoning" and not _open(messages)):
                messages.append({"role": "assistant", "content": None})
            _extend(messages[-1], item, f"input[{place}]")
    return messages


def _open(messages: list[Any]) -> bool:
    """Whether the last message has only a thought so far."""
    return bool(messages) and messages[-1].keys() == {"role", "content", "reasoning_content"}


def _extend(message: dict[str, Any], item: dict[str, Any], place: str) -> None:
    """Add a thought or a call to a message."""
    if item["type"] == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        message.setdefault("tool_calls", []).append({"id": item.get("call_id"), "function": function})
        return
    parts = item.get("content") or item.get("summary") or []
    if not isinstance(parts, list) or not all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in parts):
        raise InvalidValue.of(f"{place}.content", parts, "a list of parts with a text")
    message["reasoning_content"] = "".join(part["text"] for part in parts)


def _usage(usage: Usage, thought_tokens: int) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": thought_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _new_id(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex}"


@dataclass
class ResponseState:
    """A response during generation, which produces the events of its stream."""

    request: ResponseRequest
    id: str
    sampling: ResolvedSamplingParams
    thought_tokens: int = 0
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
            "metadata": request.metadata or {},
            "model": request.model,
            "output": self.output,
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": request.previous_response_id,
            "reasoning": {"effort": None, "summary": None} | (request.reasoning or {}),
            "store": request.store is not False,
            "temperature": self.sampling.temperature,
            "text": request.text or {"format": {"type": "text"}},
            "tool_choice": request.tool_choice or "auto",
            "tools": request.tools or [],
            "top_logprobs": request.top_logprobs or 0,
            "top_p": self.sampling.top_p,
            "truncation": "disabled",
            "usage": None if usage is None else _usage(usage, self.thought_tokens),
        }

    def message_delta(self, text: str, logprobs: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Add text to the open message, or to a new one; yields the events."""
        if not self.output or self.output[-1]["type"] != "message":
            yield from self.close("completed")
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

    def thought_delta(self, text: str) -> Iterator[dict[str, Any]]:
        """Add text to the open thought, or to a new one; yields the events."""
        if not self.output or self.output[-1]["type"] != "reasoning":
            item: dict[str, Any] = {"type": "reasoning", "id": _new_id("rs"), "summary": [], "status": "in_progress"}
            self.output.append(item)
            yield self.event("response.output_item.added", output_index=self._last, item=dict(item))
            item["content"] = [{"type": "reasoning_text", "text": ""}]
        self.output[-1]["content"][0]["text"] += text
        yield self.event("response.reasoning_text.delta", **self._place(), content_index=0, delta=text)

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
        elif item["type"] == "reasoning":
            text = item["content"][0]["text"]
            yield self.event("response.reasoning_text.done", **self._place(), content_index=0, text=text)
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
    logprobs = logprobs_of(tokens) if response.request.wants_logprobs else []
    for part in parts:
        if "reasoning_content" in part:
            yield from response.thought_delta(part["reasoning_content"])
        if "content" in part:
            yield from response.message_delta(part["content"], logprobs)
            logprobs = []
        for call in part.get("tool_calls", ()):
            yield from response.call_delta(call)
    if not parts and logprobs and response.output and response.output[-1]["type"] == "message" and not state.calls:
        yield from response.message_delta("", logprobs)


async def stream_response(request: ResponseRequest, caller: HttpCaller) -> AsyncGenerator[dict[str, Any], None]:
    """Yield the events of a response."""
    messages = messages_of(request.input)
    if request.previous_response_id is not None:
        messages = [*caller.answers.get(caller.owner, request.previous_response_id), *messages]
    task = await ChatTask.of(as_chat(request, messages), caller)
    response = ResponseState(request, f"resp_{caller.answer_id}", task.sampling)
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
    incomplete = reason is FinishReason.LENGTH or state.finish_reason == "length"
    response.thought_tokens = state.thought_tokens
    if not response.output:
        for event in response.message_delta("", []):
            yield event
    status = "incomplete" if incomplete else "completed"
    for event in response.close(status):
        yield event
    if request.store is not False:
        caller.answers.put(caller.owner, response.id, [*messages, state.message()])
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
