"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's format in front of chat completions."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from contextlib import aclosing
from typing import Annotated, Any, Self

from attn_core.errors import AttnError, InvalidValue
from attn_schema import Usage
from attn_schema.schema import Checked

from attn_openai.caller import HttpCaller
from attn_openai.chat import ChatAnswer
from attn_openai.errors import body_of, message_of, status_of
from attn_openai.messages import require_known
from attn_openai.requests import IGNORED, StreamOptions, says
from attn_openai.streams import Events, NamedEvents
from attn_openai.translation import Translation

STOP_REASONS = {None: None, "stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
BLOCK_FIELDS = {
    "text": frozenset({"type", "text", "citations"}),
    "image": frozenset({"type", "source"}),
    "tool_use": frozenset({"type", "id", "name", "input", "caller"}),
    "tool_result": frozenset({"type", "tool_use_id", "content", "is_error"}),
    "thinking": frozenset({"type", "thinking", "signature"}),
}
"""The fields of each type of content block; those of `messages.IGNORED` may be there, too."""


HELD = ("system", "tools")
"""The fields that are kept with a thread."""
WORDS = {
    r"^(max_completion_tokens|max_new_tokens)$": "max_tokens",
    r"^stop$": "stop_sequences",
    r"^(tools\[\d+\])\.function\.parameters": r"\1.input_schema",
    r"^(tools\[\d+\])\.function": r"\1",
    r"\.function\.arguments": ".input",
    r"\.function\.": ".",
    r"\.tool_call_id$": ".tool_use_id",
    r"\.image_url": ".source",
}
"""Patterns of the fields of a chat completion, and their names here."""


class MessagesRequest(Checked, frozen=True, kw_only=True):
    """POST /v1/messages."""

    model: Annotated[str, says("Name of a loaded model.")]
    messages: Annotated[Any, says("The conversation: texts, images, calls, results and thoughts.")]
    max_tokens: Annotated[int, says("Maximum number of tokens to generate.")] | None = None
    system: Annotated[Any, says("The system message, a text or blocks of text.")] = None
    temperature: Annotated[float, says("If not given as the model recommends, else 1.")] | None = None
    top_p: Annotated[float, says("Nucleus sampling.")] | None = None
    top_k: Annotated[int, says("Samples from the k most likely tokens.")] | None = None
    stop_sequences: Annotated[Any, says("Texts before which the completion ends.")] = None
    stream: Annotated[bool, says("Answers with server-sent events.")] | None = None
    tools: Annotated[Any, says("Functions that the model may call.")] = None
    tool_choice: Annotated[Any, says("The type auto, any, none, or tool with its name.")] = None
    thinking: Annotated[Any, says("The type enabled, adaptive or disabled.")] = None
    thread: Annotated[Any, says("The type create, or continue with previous_message_id.")] = None
    timeout: Annotated[float, says("Seconds after which the request ends with 504.", gt=0)] | None = None

    user = None

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Self:
        """Parse a decoded body; raises as `SamplingFields.read`."""
        known = {name: value for name, value in values.items() if value is not None and name not in IGNORED}
        if known.pop("service_tier", "auto") not in ("auto", "standard_only"):
            raise InvalidValue.of("service_tier", values["service_tier"], "auto or standard_only")
        return cls.from_mapping(known)


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


def read_messages(said: Translation, messages: Any) -> None:
    """Add the messages; raises `InvalidValue`."""
    if not isinstance(messages, list) or not messages:
        raise InvalidValue.of("messages", messages, "a list of at least one message")
    for number, message in enumerate(messages):
        place, role = f"messages[{number}]", message.get("role") if isinstance(message, dict) else None
        if role not in ("user", "assistant", "system"):
            raise InvalidValue.of(f"{place}.role", role, "user or assistant")
        require_known(message, place, {"role", "content"})
        content = message.get("content")
        if not isinstance(content, list):
            said.say(place, role, content)
            continue
        results = [isinstance(block, dict) and block.get("type") == "tool_result" for block in content]
        for kind in (True, False):  # a result is a message of its own, before what is said beside it
            if not kind and not all(results):
                said.say(place, role, None)
            for here, block in enumerate(content):
                if results[here] is kind:
                    _add_block(said, block, f"{place}.content[{here}]")


def _add_block(said: Translation, block: Any, field: str) -> None:
    """Add a block to the last message, or as a message of its own."""
    kind = block.get("type") if isinstance(block, dict) else None
    if not isinstance(kind, str) or kind not in BLOCK_FIELDS:
        raise InvalidValue.of(f"{field}.type", kind, ", ".join(BLOCK_FIELDS))
    require_known(block, field, BLOCK_FIELDS[kind])
    match kind:
        case "text":
            said.part(field, {"type": "text", "text": block.get("text")})
        case "image":
            source = block.get("source")
            if not isinstance(source, dict) or source.get("type") != "base64":
                raise InvalidValue.of(f"{field}.source", source, "of the type base64; images at URLs are not fetched")
            url = f"data:{source.get('media_type')};base64,{source.get('data')}"
            said.part(field, {"type": "image_url", "image_url": {"url": url}})
        case "tool_use":
            said.call(field, block.get("id"), block.get("name"), block.get("input"))
        case "tool_result":
            content = block.get("content")
            said.say(field, "tool", "" if content is None else content, tool_call_id=block.get("tool_use_id"))
        case _:
            said.think(str(block.get("thinking")))


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


def error_body(error: AttnError) -> dict[str, Any]:
    """The body of an error response in Anthropic's format."""
    status = status_of(error)
    kind = "overloaded_error" if status == 503 else body_of(error)["error"]["type"]
    kind = "api_error" if kind == "server_error" else kind
    return {"type": "error", "error": {"type": kind, "message": message_of(error)}}


class Message(ChatAnswer):
    """POST /v1/messages."""

    stream = NamedEvents
    words = WORDS

    def __init__(self, request: MessagesRequest, caller: HttpCaller) -> None:
        super().__init__(request, caller)
        self._blocks = MessageBlocks()

    def translated(self) -> dict[str, Any]:
        """See `ChatAnswer.translated`."""
        request = self.request
        thread = request.thread if isinstance(request.thread, dict) else {"type": request.thread}
        if thread.get("type") not in (None, "create", "continue"):
            raise InvalidValue.of("thread.type", thread["type"], "create or continue")
        continues = thread.get("type") == "continue"
        held, messages = self.recalled(thread.get("previous_message_id")) if continues else ({}, [])
        self._held = {name: given for name in HELD if (given := getattr(request, name) or held.get(name)) is not None}
        if "system" in self._held:
            self.said.say("system", "system", self._held["system"])
        for message in messages:
            self.said.say("thread", **message)
        read_messages(self.said, request.messages)
        choice, parallel = _choice(request.tool_choice)
        return {
            "model": request.model,
            "max_completion_tokens": request.max_tokens,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "top_k": request.top_k,
            "stop": request.stop_sequences,
            "tools": _tools(self._held["tools"]) if "tools" in self._held else None,
            "tool_choice": choice,
            "parallel_tool_calls": parallel,
            "enable_thinking": _thinking(request.thinking),
            "stream": True,
            "stream_options": StreamOptions(include_usage=True, continuous_usage_stats=True),
        }

    async def events(self) -> Events:
        """Yield the events of a message; the last but one has the reason of its end and the usage."""
        await self.begin()
        yield {"type": "message_start", "message": self.whole() | {"content": []}}
        async with aclosing(self.steps()) as steps:
            async for _, parts, _ in steps:
                for event in self._blocks.take(parts):
                    yield event
        for event in self._blocks.close():
            yield event
        whole = self.whole()
        if self.request.thread is not None:
            self.keep(whole["id"], self._held)
        ended = {name: whole[name] for name in ("stop_reason", "stop_sequence")}
        yield {"type": "message_delta", "delta": ended, "usage": whole["usage"]}
        yield {"type": "message_stop"}

    def whole(self) -> dict[str, Any]:
        """The whole message."""
        choice = self.choice
        reason = "stop_sequence" if choice.stop_reason else STOP_REASONS.get(choice.finish_reason)
        return {
            "id": f"msg_{self.caller.answer_id}",
            "type": "message",
            "role": "assistant",
            "model": self.request.model,
            "content": self._blocks.content,
            "stop_reason": reason,
            "stop_sequence": choice.stop_reason,
            "usage": _usage(self.usage),
        }


async def count_tokens(request: MessagesRequest, caller: HttpCaller) -> dict[str, Any]:
    """Return the length of the prompt."""
    message = Message(request, caller)
    await message.begin()
    return {"input_tokens": message.task.prompt_tokens}
