"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from attn_core.errors import InvalidValue
from attn_schema import FinishReason, GenerateRequest, OutputDelta, Prompt, SamplingParams, Token, Usage
from attn_schema.methods import GENERATE

from attn_openai.caller import HttpCaller
from attn_openai.messages import conversation
from attn_openai.requests import ChatCompletionRequest, json_output
from attn_openai.tools import CallReader, Choice, ToolCall, Tools, new_call_id

FINISH_REASONS = {FinishReason.END_OF_SEQUENCE: "stop", FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}
BROKEN_CHARACTER = "\ufffd"


def usage_of(usage: Usage) -> dict[str, Any]:
    """Usage in OpenAI's format."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def text_bytes(text: str) -> list[int] | None:
    """The UTF-8 bytes of a token; None for part of a character, whose bytes are not known from its text."""
    return None if BROKEN_CHARACTER in text else list(text.encode())


def logprobs_of(tokens: Iterable[Token]) -> list[dict[str, Any]]:
    """Log probabilities of tokens in the format of chat completions and responses."""
    return [
        {
            "token": token.text,
            "logprob": token.logprob,
            "bytes": text_bytes(token.text),
            "top_logprobs": [
                {"token": top.text, "logprob": top.logprob, "bytes": text_bytes(top.text)} for top in token.top_logprobs
            ],
        }
        for token in tokens
    ]


@dataclass(frozen=True)
class ChatTask:
    """The generation task of a chat completion request."""

    model: str
    prompt: Prompt
    sampling: SamplingParams
    tools: Tools

    @classmethod
    async def of(cls, request: ChatCompletionRequest, caller: HttpCaller) -> ChatTask:
        """Create the task of a request; may call the model's tokenizer for a token limit. Raises `UserError`."""
        tools = Tools.read(request.tools, request.tool_choice, parallel=request.parallel_tool_calls)
        wanted = json_output(request.response_format)
        if wanted is not None and tools.choice is not Choice.NONE:
            raise InvalidValue.of("response_format", "given", 'left out with tools, unless tool_choice is "none"')
        wanted = tools.structured_output() or wanted
        top_logprobs = (request.top_logprobs or 0) if request.logprobs else None
        prompt, limit = conversation(request.messages, tools), request.token_limit
        # Everything else is validated before the model is called.
        sampling = request.sampling(limit, top_logprobs=top_logprobs, structured_output=wanted)
        if limit is None:
            prompt, limit = await caller.with_room(request.model, prompt)
            sampling = sampling.replace(max_new_tokens=limit)
        return cls(request.model, prompt, sampling, tools)

    def deltas(self, caller: HttpCaller) -> AsyncGenerator[OutputDelta, None]:
        """The deltas of the completions."""
        return caller.stream(GENERATE, GenerateRequest(model=self.model, prompt=self.prompt, sampling=self.sampling))


@dataclass
class ChoiceState:
    """One completion during generation: it produces the message deltas of a stream, and at the end the message."""

    index: int
    tools: Tools
    reader: CallReader
    text: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    tokens: list[Token] = field(default_factory=list)
    started: bool = False
    finish_reason: str | None = None
    stop_reason: str | None = None

    def take(self, delta: OutputDelta) -> list[dict[str, Any]]:
        """Add a delta of the completion; returns the resulting deltas of the message."""
        self.tokens += delta.tokens
        found = self._named(delta) if self.tools.choice is Choice.NAMED else self._read(delta)
        if delta.finish_reason is not None:
            self.finish_reason = "tool_calls" if self.calls else FINISH_REASONS[delta.finish_reason]
            if self.calls and delta.finish_reason is FinishReason.LENGTH:
                self.finish_reason = "length"
            self.stop_reason = delta.stop_reason
        return found

    def message(self) -> dict[str, Any]:
        """The whole message."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text if self.text or not self.calls else None}
        message["refusal"] = None
        if self.calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.calls
            ]
        return message

    def _read(self, delta: OutputDelta) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for part in self.reader.read(delta.text, last=delta.finish_reason is not None):
            if isinstance(part, str):
                self.text += part
                found.append({"content": part})
            else:
                self.calls.append(part)
                found.append({"tool_calls": [self._call_delta(part, len(self.calls) - 1)]})
        return found

    def _named(self, delta: OutputDelta) -> list[dict[str, Any]]:
        """Add a delta for a named function: the whole text is the arguments of the call."""
        named = self.tools.named
        if named is None:
            return []
        if not self.calls:
            self.calls.append(ToolCall(new_call_id(), named.name, delta.text))
            first: dict[str, Any] = {"tool_calls": [self._call_delta(self.calls[0], 0)]}
            return [first]
        self.calls[0] = self.calls[0]._replace(arguments=self.calls[0].arguments + delta.text)
        return [{"tool_calls": [{"index": 0, "function": {"arguments": delta.text}}]}] if delta.text else []

    @staticmethod
    def _call_delta(call: ToolCall, place: int) -> dict[str, Any]:
        function = {"name": call.name, "arguments": call.arguments}
        return {"index": place, "id": call.id, "type": "function", "function": function}


def choices_of(task: ChatTask) -> list[ChoiceState]:
    """The initial states of a task's completions."""
    return [ChoiceState(index, task.tools, task.tools.reader()) for index in range(task.sampling.n)]


async def complete_chat(request: ChatCompletionRequest, caller: HttpCaller) -> dict[str, Any]:
    """Return the whole chat completion."""
    task = await ChatTask.of(request, caller)
    choices, usage = choices_of(task), Usage()
    async with aclosing(task.deltas(caller)) as deltas:
        async for delta in deltas:
            choices[delta.index].take(delta)
            usage = delta.usage or usage
    found = [
        {
            "index": choice.index,
            "message": choice.message(),
            "logprobs": {"content": logprobs_of(choice.tokens), "refusal": None} if request.logprobs else None,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        for choice in choices
    ]
    return {**_head(request, caller, "chat.completion"), "choices": found, "usage": usage_of(usage)}


async def stream_chat(request: ChatCompletionRequest, caller: HttpCaller) -> AsyncGenerator[dict[str, Any], None]:
    """Yield the chat completion in chunks; the first chunk of each choice contains the role."""
    task = await ChatTask.of(request, caller)
    head = _head(request, caller, "chat.completion.chunk")
    if request.include_usage:
        head["usage"] = None
    choices, usage = choices_of(task), Usage()
    async with aclosing(task.deltas(caller)) as deltas:
        async for delta in deltas:
            usage = delta.usage or usage
            for choice in _chunks(choices[delta.index], delta, logprobs=bool(request.logprobs)):
                yield {**head, "choices": [choice]}
    if request.include_usage:
        yield {**head, "choices": [], "usage": usage_of(usage)}


def _chunks(state: ChoiceState, delta: OutputDelta, *, logprobs: bool) -> list[dict[str, Any]]:
    """The entries for `choices` of the next chunks, one per chunk."""
    parts = state.take(delta)
    if not state.started:
        state.started = True
        parts = [{"role": "assistant", "content": ""}, *parts]
    if not parts and (delta.finish_reason is not None or (logprobs and delta.tokens)):
        parts = [{}]
    found: list[dict[str, Any]] = [
        {"index": state.index, "delta": part, "logprobs": None, "finish_reason": None} for part in parts
    ]
    if logprobs and delta.tokens:
        found[-1]["logprobs"] = {"content": logprobs_of(delta.tokens), "refusal": None}
    if delta.finish_reason is not None:
        if found[-1]["delta"]:
            found.append({"index": state.index, "delta": {}, "logprobs": None, "finish_reason": None})
        found[-1] |= {"finish_reason": state.finish_reason, "stop_reason": state.stop_reason}
    return found


def _head(request: ChatCompletionRequest, caller: HttpCaller, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{caller.request_id}", "object": kind, "created": int(time.time()), "model": request.model}
