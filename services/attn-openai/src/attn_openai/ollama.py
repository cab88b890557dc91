"""Ollama's API in front of chat completions: /api/chat, /api/generate, /api/embed, /api/tags, /api/ps, /api/show."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from contextlib import aclosing
from datetime import UTC, datetime
from typing import Annotated, Any, Self

from attn_core.errors import AttnError, InvalidValue
from attn_schema import ModelInfo
from attn_schema.schema import Checked

from attn_openai.caller import HttpCaller
from attn_openai.chat import ChatAnswer, logprobs_of
from attn_openai.completions import embed, loaded_models
from attn_openai.errors import message_of
from attn_openai.messages import require_known
from attn_openai.requests import EmbeddingsRequest, ModelFields, StreamOptions, says
from attn_openai.streams import Events, JsonLines
from attn_openai.translation import Translation

OPTIONS = {
    "num_predict": "max_completion_tokens", "repeat_penalty": "repetition_penalty",
    **{name: name for name in (
        "temperature", "top_k", "top_p", "min_p", "typical_p", "seed", "stop", "presence_penalty", "frequency_penalty",
    )},
}  # fmt: skip
"""The options that are fields of a chat completion, with their names there."""
IGNORED_OPTIONS = frozenset(
    ["embedding_only", "f16_kv", "logits_all", "low_vram", "main_gpu", "num_batch", "num_ctx", "num_gpu", "num_keep",
     "num_thread", "numa", "use_mlock", "use_mmap", "vocab_only"]
)  # fmt: skip
"""How a model is loaded and how much context it has is said when it is loaded."""
NEUTRAL_OPTIONS = {"mirostat": (0,), "tfs_z": (1, 1.0), "repeat_last_n": (-1,), "penalize_newline": (True,)}
"""Options that are not implemented, with the values that ask for what is done anyway; the others of Mirostat follow."""
MESSAGE_FIELDS = frozenset({"role", "content", "thinking", "images", "tool_calls", "tool_name", "tool_call_id"})
WORDS = {rf"^{ours}$": f"options.{theirs}" for theirs, ours in OPTIONS.items()} | {
    r"^(max_tokens|max_new_tokens)$": "options.num_predict",
    r"^response_format(\.json_schema(\.schema)?)?": "format",
    r"^(enable_thinking|reasoning_effort)$": "think",
    r"\.reasoning_content$": ".thinking",
    r"\.tool_call_id$": ".tool_name",
}
"""Patterns of the fields of a chat completion, and their names here."""


class OllamaFields(Checked, frozen=True, kw_only=True):
    """The common fields of /api/chat and /api/generate."""

    model: Annotated[str, says("Name of a loaded model; GET /api/tags lists them.")]
    stream: Annotated[bool, says("Answers with lines of JSON.")] = True
    format: Annotated[Any, says("The text json, or a JSON schema.")] = None
    options: Annotated[dict[str, Any], says("Options of sampling.")] = {}  # noqa: RUF012 - msgspec copies it
    think: Annotated[bool | str, says("Thoughts before the answer, or their effort.")] | None = None
    logprobs: Annotated[bool, says("Returns the log probability of each token.")] | None = None
    top_logprobs: Annotated[int, says("Number of most likely tokens at each position.")] | None = None

    user = None
    timeout = None

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Self:
        """Parse a decoded body, without `keep_alive`: models stay. Raises `InvalidValue` or `UnknownName`."""
        known = {name: value for name, value in values.items() if value not in (None, "") and name != "keep_alive"}
        known = {name: value for name, value in known.items() if value != [] or name in cls.__struct_fields__}
        return cls.from_mapping(known)

    def fields(self) -> dict[str, Any]:
        """The fields of the chat completion, but for its messages; raises `InvalidValue`."""
        options = {name: value for name, value in self.options.items() if value is not None}
        fields: dict[str, Any] = {}
        for name, value in options.items():
            if name in OPTIONS:
                fields[OPTIONS[name]] = value
            elif name in NEUTRAL_OPTIONS and value not in NEUTRAL_OPTIONS[name]:
                allowed = " or ".join(map(json.dumps, NEUTRAL_OPTIONS[name]))
                raise InvalidValue.of(f"options.{name}", value, allowed)
            elif name not in IGNORED_OPTIONS | NEUTRAL_OPTIONS.keys() and not name.startswith("mirostat_"):
                raise InvalidValue.of(f"options.{name}", value, f"one of {', '.join(sorted(OPTIONS))}")
        if fields.get("max_completion_tokens", 0) in (-1, -2):  # until the end, or as many as the context holds
            del fields["max_completion_tokens"]
        if isinstance(self.think, str):
            fields |= {"reasoning_effort": self.think}
        elif self.think is not None:
            fields |= {"enable_thinking": self.think}
        if self.format is not None:
            schema = {"type": "json_schema", "json_schema": {"name": "format", "schema": self.format}}
            fields |= {"response_format": {"type": "json_object"} if self.format == "json" else schema}
        usage = StreamOptions(include_usage=True, continuous_usage_stats=True)
        return fields | {
            "model": self.model, "logprobs": self.logprobs, "top_logprobs": self.top_logprobs,
            "stream": True, "stream_options": usage,
        }  # fmt: skip


class ChatRequest(OllamaFields, frozen=True, kw_only=True):
    """POST /api/chat."""

    messages: Annotated[Any, says("The conversation, oldest message first.")] = ()
    tools: Annotated[Any, says("Functions that the model may call.")] = None


class GenerateRequest(OllamaFields, frozen=True, kw_only=True):
    """POST /api/generate: the answer to one message."""

    prompt: Annotated[str, says("The message.")] = ""
    system: Annotated[str, says("The system message.")] | None = None
    images: Annotated[tuple[str, ...], says("Images, in base64.")] = ()


def read_messages(said: Translation, messages: Any) -> None:
    """Add the messages of /api/chat, whose calls and results have no ids; raises `InvalidValue`."""
    if not isinstance(messages, list | tuple):
        raise InvalidValue.of("messages", messages, "a list of messages")
    waiting: list[tuple[Any, Any]] = []
    for number, message in enumerate(messages):
        place = f"messages[{number}]"
        if not isinstance(message, dict):
            raise InvalidValue.of(place, message, "an object with role and content")
        require_known(message, place, MESSAGE_FIELDS)
        role, calls = message.get("role"), message.get("tool_calls") or []
        if role == "tool":
            name, call_id = message.get("tool_name"), message.get("tool_call_id")
            found = next((one for one in waiting if call_id == one[1] or name in (None, one[0])), None)
            waiting.remove(found) if found else None
            said.say(place, role, message.get("content"), tool_call_id=found[1] if found else call_id or str(name))
            continue
        said.say(place, role, message.get("content"), reasoning_content=message.get("thinking"))
        add_images(said, f"{place}.", message.get("images"))
        for index, call in enumerate(calls if isinstance(calls, list) else [calls]):
            function = call.get("function") if isinstance(call, dict) else None
            function = function if isinstance(function, dict) else {}
            call_id = (call.get("id") if isinstance(call, dict) else None) or f"call_{number}_{index}"
            waiting.append((function.get("name"), call_id))
            said.call(f"{place}.tool_calls[{index}]", call_id, function.get("name"), function.get("arguments"))


def add_images(said: Translation, place: str, images: Any) -> None:
    """Add images to the last message, before its text as Ollama does; raises `InvalidValue`."""
    if not images:
        return
    if not isinstance(images, list | tuple):
        raise InvalidValue.of(f"{place}images", images, "a list of images in base64")
    text, said.messages[-1]["content"] = said.messages[-1]["content"], []
    for number, image in enumerate(images):
        url = f"data:image/any;base64,{image}"
        said.part(f"{place}images[{number}]", {"type": "image_url", "image_url": {"url": url}})
    said.part(f"{place}content", {"type": "text", "text": text or ""})


def error_body(error: AttnError) -> dict[str, Any]:
    """The body of an error response in Ollama's format."""
    return {"error": message_of(error)}


class OllamaChat(ChatAnswer):
    """POST /api/chat."""

    stream = JsonLines
    words = WORDS

    def __init__(self, request: OllamaFields, caller: HttpCaller) -> None:
        super().__init__(request, caller)
        self._start = time.perf_counter_ns()
        self._first = 0
        self._end: dict[str, Any] = {}

    def translated(self) -> dict[str, Any]:
        """See `ChatAnswer.translated`."""
        read_messages(self.said, self.request.messages)
        return {"tools": self.request.tools, **self.request.fields()}

    @property
    def _only_loads(self) -> bool:
        return not self.request.messages

    def _shown(self, message: dict[str, Any], **facts: Any) -> dict[str, Any]:
        created = datetime.now(UTC).isoformat().replace("+00:00", "Z")
        said = {"role": "assistant", "content": "", **message}
        return {"model": self.request.model, "created_at": created, "message": said, "done": False, **facts}

    async def events(self) -> Events:
        """Yield the parts of the message; a call is one part, with all of its arguments."""
        if self._only_loads:
            await self.caller.model(self.request.model)
            self._end = {"done": True, "done_reason": "load"}
            yield self._shown({}, **self._end)
            return
        await self.begin()
        async with aclosing(self.steps()) as steps:
            async for choice, parts, delta in steps:
                self._first = self._first or time.perf_counter_ns()
                logprobs = {"logprobs": logprobs_of(delta.tokens)} if self.request.logprobs and delta.tokens else {}
                for part in parts:
                    message = {{"reasoning_content": "thinking"}.get(key, key): text for key, text in part.items()}
                    if "tool_calls" not in part:
                        yield self._shown(message, **logprobs)
                        logprobs = {}
                if logprobs:
                    yield self._shown({}, **logprobs)
                if delta.finish_reason is not None and choice.calls:
                    yield self._shown({"tool_calls": self._calls()})
        self._end = {"done": True, **self._counts()}
        yield self._shown({}, **self._end)

    def _calls(self) -> list[dict[str, Any]]:
        """The calls that are whole; arguments that were cut off are no object."""
        functions = [call["function"] for call in self.choice.calls]
        functions = functions[:-1] if self.choice.reader.cut else functions
        return [{"function": {"name": f["name"], "arguments": json.loads(f["arguments"] or "{}")}} for f in functions]

    def _counts(self) -> dict[str, Any]:
        now, usage = time.perf_counter_ns(), self.usage
        return {
            "done_reason": "length" if self.choice.finish_reason == "length" else "stop",
            "total_duration": now - self._start,
            "load_duration": 0,
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": self._first - self._start,
            "eval_count": usage.completion_tokens,
            "eval_duration": now - self._first,
        }

    def whole(self) -> dict[str, Any]:
        """The whole message."""
        if self._only_loads:
            return self._shown({}, **self._end)
        choice, calls = self.choice, self._calls()
        message: dict[str, Any] = {"content": choice.text}
        message |= {"thinking": choice.thought} if choice.thought else {}
        message |= {"tool_calls": calls} if calls else {}
        logprobs = {"logprobs": logprobs_of(choice.tokens)} if self.request.logprobs else {}
        return self._shown(message, **self._end, **logprobs)


class OllamaGenerate(OllamaChat):
    """POST /api/generate."""

    def translated(self) -> dict[str, Any]:
        """See `ChatAnswer.translated`."""
        request = self.request
        if request.system is not None:
            self.said.say("system", "system", request.system)
        self.said.say("prompt", "user", request.prompt)
        add_images(self.said, "", request.images)
        fields: dict[str, Any] = request.fields()
        return fields

    @property
    def _only_loads(self) -> bool:
        return not self.request.prompt

    def _shown(self, message: dict[str, Any], **facts: Any) -> dict[str, Any]:
        shown = super()._shown(message, **facts)
        said = shown.pop("message")
        return shown | {"response": said["content"]} | ({"thinking": said["thinking"]} if "thinking" in said else {})


class EmbedRequest(ModelFields, frozen=True, kw_only=True):
    """POST /api/embed."""

    input: Annotated[Any, says("A text or a list of texts.")]
    truncate: Annotated[bool, says("Cuts texts to the model's context; true if not given.")] = True
    dimensions: Annotated[int, says("Keeps only this many first components.", ge=1)] | None = None

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Self:
        """Parse a decoded body; how a model is loaded was said at its loading."""
        return super().read({name: value for name, value in values.items() if name not in ("keep_alive", "options")})


async def embed_texts(request: EmbedRequest, caller: HttpCaller) -> dict[str, Any]:
    """Return the embeddings of texts."""
    cut, start = -1 if request.truncate else None, time.perf_counter_ns()
    asked = EmbeddingsRequest(
        model=request.model, input=request.input, truncate_prompt_tokens=cut, dimensions=request.dimensions
    )
    found = await embed(asked, caller)
    return {
        "model": found["model"],
        "embeddings": [each["embedding"] for each in found["data"]],
        "total_duration": time.perf_counter_ns() - start,
        "load_duration": 0,
        "prompt_eval_count": found["usage"]["prompt_tokens"],
    }


def _details(info: ModelInfo) -> dict[str, Any]:
    size = f"{info.num_parameters / 1e9:.1f}B" if info.num_parameters >= 10**9 else f"{info.num_parameters / 1e6:.0f}M"
    return {
        "parent_model": info.base_model, "format": "safetensors", "family": info.architecture,
        "families": [info.architecture], "parameter_size": size, "quantization_level": info.quantization or info.dtype,
    }  # fmt: skip


def _listed(info: ModelInfo) -> dict[str, Any]:
    loaded = (info.load_time or datetime.fromtimestamp(0, UTC)).isoformat()
    return {
        "name": info.name, "model": info.name, "modified_at": loaded, "size": 0, "digest": "",
        "details": _details(info),
    }  # fmt: skip


async def tags(caller: HttpCaller) -> dict[str, Any]:
    """GET /api/tags: the loaded models."""
    return {"models": [_listed(info) for info in await loaded_models(caller)]}


async def running(caller: HttpCaller) -> dict[str, Any]:
    """GET /api/ps: the same; they stay until they are unloaded."""
    more = {"expires_at": datetime.max.replace(tzinfo=UTC).isoformat(), "size_vram": 0}
    models = await loaded_models(caller)
    return {"models": [{**_listed(info), **more, "context_length": info.max_seq_len} for info in models]}


class ShowRequest(ModelFields, frozen=True, kw_only=True):
    """POST /api/show."""

    verbose: Annotated[bool, says("Changes nothing.")] = False


async def show(request: ShowRequest, caller: HttpCaller) -> dict[str, Any]:
    """POST /api/show: what is known of a model, and what it can do."""
    info = await caller.model(request.model)
    template = await caller.template(request.model)
    can = {
        "completion": info.architecture != "encoder", "embedding": info.architecture == "encoder",
        "tools": info.chat, "thinking": template.thoughts is not None,
    }  # fmt: skip
    known = {
        "general.architecture": info.architecture, "general.parameter_count": info.num_parameters,
        f"{info.architecture}.context_length": info.max_seq_len, f"{info.architecture}.block_count": info.num_layers,
        f"{info.architecture}.attention.head_count": info.num_heads,
    }  # fmt: skip
    return {
        "details": _details(info), "model_info": known, "capabilities": [name for name, able in can.items() if able],
        "modified_at": _listed(info)["modified_at"], "parameters": "", "template": "", "modelfile": "", "license": "",
    }  # fmt: skip
