"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's format in front of chat completions."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing
from typing import Annotated, Any, Self

from attn_core.errors import InvalidValue
from attn_schema import Usage
from attn_schema.schema import Checked
from msgspec import Meta

from attn_openai.caller import HttpCaller
from attn_openai.chat import ChatTask, ChoiceState, choices_of
from attn_openai.messages import require_known
from attn_openai.requests import IGNORED, ChatCompletionRequest, StreamOptions

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
BLOCK_FIELDS = {
    "text": frozenset({"type", "text", "citations"}),
    "image": frozenset({"type", "source"}),
    "tool_use": frozenset({"type", "id", "name", "input", "caller"}),
    "tool_result": frozenset({"type", "tool_use_id", "content", "is_error"}),
    "thinking": frozenset({"type", "thinking", "signature"}),
}
"""The fields of each type of content block; those of `messages.IGNORED` may be there, too."""


class MessagesRequest(Checked, frozen=True, kw_only=True):
    """POST /v1/messages."""

    model: Annotated[str, Meta(description="Name of a loaded model.")]
    messages: Annotated[Any, Meta(description="The conversation: texts, images, calls, results and thoughts.")]
    max_tokens: Annotated[int, Meta(description="Maximum number of tokens to generate.")] | None = None
    system: Annotated[Any, Meta(description="The system message, a text or blocks of text.")] = None
    temperature: (
        Annotated[float, Meta(description="Divides the logits; the model's recommendation if not given, else 1.")]
        | None
    ) = None
    top_p: Annotated[float, Meta(description="Nucleus sampling.")] | None = None
    top_k: Annotated[int, Meta(description="Samples from the k most likely tokens.")] | None = None
    stop_sequences: Annotated[Any, Meta(description="Texts before which the completion ends.")] = None
    stream: Annotated[bool, Meta(description="Answers with server-sent events.")] | None = None
    tools: Annotated[Any, Meta(description="Functions that the model may call.")] = None
    tool_choice: Annotated[Any, Meta(description="The type auto, any, none, or tool with its name.")] = None
    thinking: Annotated[Any, Meta(description="The type enabled, adaptive or disabled.")] = None
    timeout: Annotated[float, Meta(gt=0, description="Seconds after which the request ends with 504.")] | None = None

    user = None

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Self:
        """Parse a decoded body; raises as `SamplingFields.read`."""
        known = {name: value for name, value in values.items() if value is not None and name not in IGNORED}
        if known.pop("service_tier", "auto") not in ("auto", "standard_only"):
            raise InvalidValue.of("service_tier", values["service_tier"], "auto or standard_only")
        return cls.from_mapping(known)

    def as_chat(self) -> ChatCompletionRequest:
        """Convert to the equivalent chat completion request; raises `InvalidValue`."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        choice, parallel = _choice(self.tool_choice)
        return ChatCompletionRequest(
            model=self.model,
            messages=[*system, *_messages(self.messages)],
            max_completion_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            stop=self.stop_sequences,
            tools=None if self.tools is None else _tools(self.tools),
            tool_choice=choice,
            parallel_tool_calls=parallel,
            enable_thinking=_thinking(self.thinking),
            stream=True,
            stream_options=StreamOptions(include_usage=True, continuous_usage_stats=True),
        )


def _thinking(given: Any) -> bool | None:
    """Whether thoughts are asked for, None if it is not said; they cannot be limited apart from the answer."""
    if given is None:
        return None
    kind = given.get("type") if isinstance(given, dict) else None
    if kind not in ("enabled", "adaptive", "disabled"):
        raise InvalidValue.of("thinking.type", kind, "enabled, adaptive or disabled")
    return bool(kind != "disabled")


def _choice(given: Any) -> tuple[Any, bool | None]:
    if given is None:
        return None, None
    kind = given.get("type") if isinstance(given, dict) else None
    words = {"auto": "auto", "any": "required", "none": "none"}
    parallel = False if isinstance(given, dict) and given.get("disable_parallel_tool_use") else None
    if kind == "tool":
        return {"type": "function", "function": {"name": given.get("name")}}, parallel
    if not isinstance(kind, str) or kind not in words:
        raise InvalidValue.of("tool_choice.type", kind, "auto, any, none or tool")
    return words[kind], parallel


def _tools(tools: Any) -> list[Any]:
    if not isinstance(tools, list):
        raise InvalidValue.of("tools", tools, "a list of functions")
    found = []
    for place, tool in enumerate(tools):
        kind = tool.get("type", "custom") if isinstance(tool, dict) else None
        if kind != "custom":
            raise InvalidValue.of(f"tools[{place}].type", kind, "custom, a function of the client")
        require_known(tool, f"tools[{place}]", {"type", "name", "description", "input_schema", "strict"})
        function = {key: tool[key] for key in ("name", "description", "strict") if tool.get(key) is not None}
        found.append({"type": "function", "function": function | {"parameters": tool.get("input_schema")}})
    return found


def _messages(messages: Any) -> Iterator[dict[str, Any]]:
    if not isinstance(messages, list) or not messages:
        raise InvalidValue.of("messages", messages, "a list of at least one message")
    for place, message in enumerate(messages):
        role = message.get("role") if isinstance(message, dict) else None
        if role not in ("user", "assistant", "system"):
            raise InvalidValue.of(f"messages[{place}].role", role, "user or assistant")
        require_known(message, f"messages[{place}]", {"role", "content"})
        content = message.get("content")
        if not isinstance(content, list):
            yield {"role": role, "content": content}
            continue
        parts, calls, thoughts = list[Any](), list[Any](), list[str]()
        for number, block in enumerate(content):
            yield from _block(block, f"messages[{place}].content[{number}]", (parts, calls, thoughts))
        said: dict[str, Any] = {"role": role, "content": parts or None}
        said |= {"tool_calls": calls} if calls else {}
        said |= {"reasoning_content": "".join(thoughts)} if thoughts else {}
        if parts or calls or thoughts:
            yield said


def _block(block: Any, field: str, into: tuple[list[Any], list[Any], list[str]]) -> Iterator[dict[str, Any]]:
    """Add a block to the parts, calls or thoughts of its message; a result is a message of its own."""
    parts, calls, thoughts = into
    kind = block.get("type") if isinstance(block, dict) else None
    if not isinstance(kind, str) or kind not in BLOCK_FIELDS:
        raise InvalidValue.of(f"{field}.type", kind, ", ".join(BLOCK_FIELDS))
    require_known(block, field, BLOCK_FIELDS[kind])
    match kind:
        case "text":
            parts.append({"type": "text", "text": block.get("text")})
        case "image":
            source = block.get("source")
            if not isinstance(source, dict) or source.get("type") != "base64":
                raise InvalidValue.of(f"{field}.source", source, "of the type base64; images at URLs are not fetched")
            url = f"data:{source.get('media_type')};base64,{source.get('data')}"
            parts.append({"type": "image_url", "image_url": {"url": url}})
        case "tool_use":
            function = {"name": block.get("name"), "arguments": block.get("input")}
            calls.append({"id": block.get("id"), "function": function})
        case "tool_result":
            content = block.get("content")
            yield {
                "role": "tool",
                "tool_call_id": block.get("tool_use_id"),
                "content": "" if content is None else content,
            }
        case _:
            thoughts.append(str(block.get("thinking")))


def _usage(usage: Usage) -> dict[str, int]:
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_read_input_tokens": usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage.completion_tokens,
    }


class MessageBlocks:
    """The content blocks of a message during generation, and the events of its stream."""

    def __init__(self) -> None:
        self.content: list[dict[str, Any]] = []
        self._arguments = ""

    def take(self, deltas: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Add deltas of a chat completion; yields the events."""
        for delta in deltas:
            if "reasoning_content" in delta:
                yield from self._add("thinking", "thinking", delta["reasoning_content"])
            elif "content" in delta:
                yield from self._add("text", "text", delta["content"])
            for call in delta.get("tool_calls", ()):
                function = call["function"]
                if "id" in call:
                    yield from self._open({"type": "tool_use", "id": call["id"], "name": function["name"], "input": {}})
                if function["arguments"]:
                    self._arguments += function["arguments"]
                    yield self._delta({"type": "input_json_delta", "partial_json": function["arguments"]})

    def close(self) -> Iterator[dict[str, Any]]:
        """Close the open block; yields its event. Arguments that were cut off are left out, as they are no object."""
        if not self.content:
            return
        if self.content[-1]["type"] == "tool_use":
            with contextlib.suppress(ValueError):
                self.content[-1]["input"] = json.loads(self._arguments or "{}")
        self._arguments = ""
        yield {"type": "content_block_stop", "index": len(self.content) - 1}

    def _open(self, block: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield from self.close()
        self.content.append(block)
        yield {"type": "content_block_start", "index": len(self.content) - 1, "content_block": dict(block)}

    def _add(self, kind: str, key: str, text: str) -> Iterator[dict[str, Any]]:
        if not self.content or self.content[-1]["type"] != kind:
            signature = {"signature": ""} if kind == "thinking" else {}
            yield from self._open({"type": kind, key: "", **signature})
        self.content[-1][key] += text
        yield self._delta({"type": f"{kind}_delta", key: text})

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": len(self.content) - 1, "delta": delta}


async def stream_message(request: MessagesRequest, caller: HttpCaller) -> AsyncGenerator[dict[str, Any], None]:
    """Yield the events of a message; the last but one has the reason of its end and the usage."""
    task = await ChatTask.of(request.as_chat(), caller)
    (state,), usage, blocks = choices_of(task), Usage(prompt_tokens=task.prompt_tokens), MessageBlocks()
    yield {"type": "message_start", "message": _message(request, caller, [], None, usage)}
    async with aclosing(task.deltas(caller)) as deltas:
        async for delta in deltas:
            usage = delta.usage or usage
            for event in blocks.take(state.take(delta)):
                yield event
    for event in blocks.close():
        yield event
    ended = {"stop_reason": _stop_reason(state), "stop_sequence": state.stop_reason}
    whole = _message(request, caller, blocks.content, state, usage)
    yield {"type": "message_delta", "delta": ended, "usage": whole["usage"]}
    yield {"type": "message_stop"}


def _stop_reason(state: ChoiceState) -> str:
    return "stop_sequence" if state.stop_reason else STOP_REASONS[state.finish_reason or "stop"]


def _message(
    request: MessagesRequest, caller: HttpCaller, content: list[Any], state: ChoiceState | None, usage: Usage
) -> dict[str, Any]:
    return {
        "id": f"msg_{caller.answer_id}",
        "type": "message",
        "role": "assistant",
        "model": request.model,
        "content": content,
        "stop_reason": None if state is None else _stop_reason(state),
        "stop_sequence": None if state is None else state.stop_reason,
        "usage": _usage(usage),
    }


async def make_message(request: MessagesRequest, caller: HttpCaller) -> dict[str, Any]:
    """Return the whole message."""
    task = await ChatTask.of(request.as_chat(), caller)
    (state,), usage, blocks = choices_of(task), Usage(), MessageBlocks()
    async with aclosing(task.deltas(caller)) as deltas:
        async for delta in deltas:
            usage = delta.usage or usage
            list(blocks.take(state.take(delta)))
    list(blocks.close())
    return _message(request, caller, blocks.content, state, usage)


async def count_tokens(request: MessagesRequest, caller: HttpCaller) -> dict[str, Any]:
    """Return the length of the prompt."""
    return {"input_tokens": (await ChatTask.of(request.as_chat(), caller)).prompt_tokens}
