"""POST /v1/responses: text and function calls in, thoughts, text and function calls out; conversations go on by id."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from contextlib import aclosing
from typing import Any

from attn_core.errors import InvalidValue
from attn_schema import Usage

from attn_openai.caller import HttpCaller
from attn_openai.chat import ChatAnswer, logprobs_of
from attn_openai.messages import require_known
from attn_openai.requests import SAME_NAMES, ResponseRequest
from attn_openai.streams import Events, NamedEvents
from attn_openai.translation import Translation

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


WORDS = {
    r"^(max_completion_tokens|max_tokens|max_new_tokens)$": "max_output_tokens",
    r"^response_format(\.json_schema)?": "text.format",
    r"^reasoning_effort$": "reasoning.effort",
    r"^(tools\[\d+\])\.function": r"\1",
    r"\.tool_call_id$": ".call_id",
    r"^(input\[\d+\])\.function\.": r"\1.",
}
"""Patterns of the fields of a chat completion, and their names here."""


def read_input(said: Translation, items: Any) -> None:
    """Add the messages of `input`; thoughts and calls that follow one another become one message.

    Raises `InvalidValue`.
    """
    if isinstance(items, str):
        said.say("input", "user", items)
        return
    if not isinstance(items, list) or not items:
        raise InvalidValue.of("input", items, "a text, or a list of items")
    for number, item in enumerate(items):
        kind, place = item.get("type", "message") if isinstance(item, dict) else None, f"input[{number}]"
        if not isinstance(kind, str) or kind not in ITEM_FIELDS:
            raise InvalidValue.of(f"{place}.type", kind, ", ".join(ITEM_FIELDS))
        require_known(item, place, ITEM_FIELDS[kind])
        if kind == "message":
            if item.get("role") == "assistant" and _only_thinks(said.messages):
                said.messages[-1]["content"] = item.get("content")
            else:
                said.say(place, item.get("role"), item.get("content"))
        elif kind == "function_call_output":
            output = item.get("output")
            text = output if isinstance(output, str | list) else json.dumps(output)
            said.say(place, "tool", text, tool_call_id=item.get("call_id"))
        else:
            _extend(said, item, place)


def _only_thinks(messages: list[Any]) -> bool:
    """Whether the last message has only a thought so far."""
    return bool(messages) and messages[-1].keys() == {"role", "content", "reasoning_content"}


def _extend(said: Translation, item: dict[str, Any], place: str) -> None:
    """Add a thought or a call to the last message, or to a new one."""
    thinks = item["type"] == "reasoning"
    said_by = said.messages[-1]["role"] if said.messages else None
    if said_by != "assistant" or (thinks and not _only_thinks(said.messages)):
        said.say(place, "assistant", None)
    if not thinks:
        said.call(place, item.get("call_id"), item.get("name"), item.get("arguments"))
        return
    parts = item.get("content") or item.get("summary") or []
    if not isinstance(parts, list) or not all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in parts):
        raise InvalidValue.of(f"{place}.content", parts, "a list of parts with a text")
    said.think("".join(part["text"] for part in parts))


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


class ResponseAnswer(ChatAnswer):
    """POST /v1/responses."""

    stream = NamedEvents
    words = WORDS

    def __init__(self, request: ResponseRequest, caller: HttpCaller) -> None:
        super().__init__(request, caller)
        self.id = f"resp_{caller.answer_id}"
        self.output: list[dict[str, Any]] = []
        self._events = 0
        self._ended: dict[str, Any] = {}

    def translated(self) -> dict[str, Any]:
        """See `ChatAnswer.translated`."""
        request, said = self.request, self.said
        text = request.text if request.text is not None else {}
        if not isinstance(text, dict) or text.keys() - {"format", "verbosity"}:
            raise InvalidValue.of("text", text, "an object with format")
        if text.get("verbosity") not in (None, "medium"):
            raise InvalidValue.of("text.verbosity", text["verbosity"], "medium")
        reasoning = request.reasoning if request.reasoning is not None else {}
        if not isinstance(reasoning, dict) or reasoning.keys() - {"effort", "summary", "generate_summary"}:
            allowed = "an object with effort; a summary is not made, but the whole text"
            raise InvalidValue.of("reasoning", reasoning, allowed)
        if request.instructions is not None:
            said.say("instructions", "system", request.instructions)
        if request.previous_response_id is not None:
            for message in self.recalled(request.previous_response_id)[1]:
                said.say("previous_response_id", **message)
        read_input(said, request.input)
        return dict(
            max_completion_tokens=request.max_output_tokens,
            response_format=text.get("format"),
            logprobs=request.wants_logprobs,
            top_logprobs=request.top_logprobs,
            reasoning_effort=reasoning.get("effort"),
            **{name: getattr(request, name) for name in COPIED},
        )

    def event(self, kind: str, **facts: Any) -> dict[str, Any]:
        """The next event of the stream."""
        self._events += 1
        return {"type": kind, "sequence_number": self._events - 1, **facts}

    def shown(self, status: str) -> dict[str, Any]:
        """The response as a JSON object."""
        request, incomplete = self.request, status == "incomplete"
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
            "temperature": self.task.sampling.temperature,
            "text": request.text or {"format": {"type": "text"}},
            "tool_choice": request.tool_choice or "auto",
            "tools": request.tools or [],
            "top_logprobs": request.top_logprobs or 0,
            "top_p": self.task.sampling.top_p,
            "truncation": "disabled",
            "usage": None if status == "in_progress" else _usage(self.usage, self.choice.thought_tokens),
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

    def _added(self, parts: list[Any], tokens: Any) -> Iterator[dict[str, Any]]:
        """Add deltas of a message; yields the events."""
        logprobs = logprobs_of(tokens) if self.request.wants_logprobs else []
        for part in parts:
            if "reasoning_content" in part:
                yield from self.thought_delta(part["reasoning_content"])
            if "content" in part:
                yield from self.message_delta(part["content"], logprobs)
                logprobs = []
            for call in part.get("tool_calls", ()):
                yield from self.call_delta(call)
        if not parts and logprobs and self.output and self.output[-1]["type"] == "message" and not self.choice.calls:
            yield from self.message_delta("", logprobs)

    async def events(self) -> Events:
        """Yield the events of a response."""
        await self.begin()
        async with aclosing(self.steps()) as steps:
            async for _, parts, delta in steps:
                if not self._events:
                    for kind in ("response.created", "response.in_progress"):
                        yield self.event(kind, response=self.shown("in_progress"))
                for event in self._added(parts, delta.tokens):
                    yield event
        if not self.output:
            for event in self.message_delta("", []):
                yield event
        status = "incomplete" if self.choice.finish_reason == "length" else "completed"
        for event in self.close(status):
            yield event
        if self.request.store is not False:
            self.keep(self.id, {})
        self._ended = self.shown(status)
        yield self.event(f"response.{status}", response=self._ended)

    def whole(self) -> dict[str, Any]:
        """The whole response."""
        return self._ended
