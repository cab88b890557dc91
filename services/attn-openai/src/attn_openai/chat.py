"""POST /v1/chat/completions."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from attn_core.errors import InvalidValue, UserError
from attn_schema import FinishReason, GenerateRequest, OutputDelta, Prompt, Token, Tokenization, Usage
from attn_schema.methods import GENERATE
from attn_schema.sampling import ResolvedSamplingParams

from attn_openai.caller import HttpCaller
from attn_openai.messages import turns_of
from attn_openai.output_reader import CallArguments, CallBegin, OutputReader, Part, Text, Thought
from attn_openai.requests import ChatCompletionRequest, answer_schema
from attn_openai.streams import Chunks, Events, JsonLines
from attn_openai.templates import ChatTemplate, Turn, require_written
from attn_openai.tools import Choice, OutputGrammar, Tools
from attn_openai.translation import Translation

FINISH_REASONS = {FinishReason.END_OF_SEQUENCE: "stop", FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}


def usage_of(usage: Usage, thought_tokens: int | None = None) -> dict[str, Any]:
    """Usage in OpenAI's format, with the number of tokens of thoughts if it is given."""
    found: dict[str, Any] = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
    if thought_tokens is not None:
        found["completion_tokens_details"] = {"reasoning_tokens": thought_tokens}
    return found


def logprobs_of(tokens: Iterable[Token]) -> list[dict[str, Any]]:
    """Log probabilities of tokens in the format of chat completions and responses."""
    return [
        {
            "token": token.text,
            "logprob": token.logprob,
            "bytes": list(token.raw or token.text.encode()),
            "top_logprobs": [
                {"token": top.text, "logprob": top.logprob, "bytes": list(top.raw or top.text.encode())}
                for top in token.top_logprobs
            ],
        }
        for token in tokens
    ]


@dataclass(frozen=True)
class Conversation:
    """The messages and functions of a request, and what its chat template is given besides."""

    turns: list[Turn]
    tools: Tools
    values: dict[str, Any]

    def prompt(self, template: ChatTemplate, *, extra: bool = True, describe: bool = False) -> Prompt:
        """The prompt in the forms that the template takes.

        Without `extra`, keys of messages that only a template may know are left out; with `describe`, functions without
        a description get an empty one, which some templates need.
        """
        turns = self.turns if extra else [replace(turn, extra=()) for turn in self.turns]
        tools = self.tools.described
        if describe:
            tools = [{**tool, "function": {"description": "", **tool["function"]}} for tool in tools]
        values = dict(self.values)
        if tools and template.lists_tools:
            values["tools"] = tools
        kwargs = json.dumps(values, ensure_ascii=False) if values else ""
        return Prompt(chat=template.messages(turns, tools), chat_template_kwargs=kwargs)

    async def read(self, model: str, template: ChatTemplate, caller: HttpCaller) -> tuple[Prompt, Tokenization]:
        """The prompt and its tokens; raises `InvalidValue` for what the template leaves out."""
        if template.unspelled and (self.tools.functions or any(turn.calls for turn in self.turns)):
            field = "tools" if self.tools.functions else "messages"
            raise InvalidValue(f"{field}: the vocabulary is too small for calls: {template.unspelled}", field=field)
        prompt = self.prompt(template)
        try:
            found = await caller.tokenize(model, prompt)
        except UserError:
            if all(function.description is not None for function in self.tools.functions):
                raise
            prompt = self.prompt(template, describe=True)
            found = await caller.tokenize(model, prompt)
        require_written(template, self.turns, self.values, found.text)
        names = {name: turn.place for turn in self.turns for name, _ in turn.extra if name != "name"}
        if names and (await caller.tokenize(model, self.prompt(template, extra=False))).text == found.text:
            name, place = next(iter(names.items()))
            raise InvalidValue.of(f"{place}.{name}", "a value", "left out, as nothing here reads it")
        if any(turn.images for turn in self.turns):
            return prompt, found
        return Prompt(token_ids=tuple(token.id for token in found.tokens)), found

    @property
    def is_plain(self) -> bool:
        """Whether it has only messages of text and images, as every chat template takes them."""
        plain = all(turn.role != "tool" and not (turn.calls or turn.extra) for turn in self.turns)
        return plain and self.tools.choice is Choice.NONE and not self.values


@dataclass(frozen=True)
class ChatTask:
    """The generation task of a chat completion request; `thinking` says whether its prompt ends within a thought."""

    model: str
    prompt: Prompt
    sampling: ResolvedSamplingParams
    tools: Tools
    template: ChatTemplate
    grammar: OutputGrammar
    thinking: bool = False
    prompt_tokens: int = 0
    """The length of the prompt, if it was needed before."""

    @classmethod
    async def of(cls, request: ChatCompletionRequest, caller: HttpCaller) -> ChatTask:
        """Create the task of a request; calls the model's tokenizer where it has to. Raises `UserError`."""
        tools = Tools.read(request.tools, request.tool_choice, parallel=request.parallel_tool_calls)
        answer = answer_schema(request.response_format)
        said = Conversation(turns_of(request.messages), tools, request.template_values)
        top_logprobs = (request.top_logprobs or 0) if request.logprobs else None
        limit, constrained = request.token_limit, answer is not None or tools.choice is not Choice.NONE
        # Everything else is validated before the model is called.
        sampling = request.sampling(limit, top_logprobs=top_logprobs, constrained=constrained)
        template = await caller.template(request.model)
        thinking, length = False, 0
        if said.is_plain and template.thoughts is None and limit is not None and not request.continuous_usage:
            prompt = said.prompt(template)
        else:
            prompt, read = await said.read(request.model, template, caller)
            thinking, length = template.thinks(read.text), len(read.tokens)
            limit = await caller.room(request.model, read) if limit is None else limit
        grammar = OutputGrammar(tools, template, answer, thinking=thinking)
        changes: dict[str, Any] = {"max_new_tokens": limit}
        if (wanted := grammar.structured_output()) is not None:
            changes["structured_output"] = wanted
        if template.thoughts is not None or tools.choice is not Choice.NONE:
            changes["skip_special_tokens"] = False  # marks may be special tokens
        sampling = await caller.resolved(request.model, sampling.replace(**changes))
        return cls(request.model, prompt, sampling, tools, template, grammar, thinking, length)

    async def deltas(self, caller: HttpCaller) -> AsyncGenerator[OutputDelta, None]:
        """The deltas of the completions; raises `InvalidValue` for a schema that cannot be followed."""
        request = GenerateRequest(model=self.model, prompt=self.prompt, sampling=self.sampling)
        try:
            async with aclosing(caller.stream(GENERATE, request)) as deltas:
                async for delta in deltas:
                    yield delta
        except UserError as error:
            raise self.grammar.explained(error) from error


@dataclass
class ChoiceState:
    """One completion during generation: it produces the message deltas of a stream, and at the end the message."""

    index: int
    reader: OutputReader
    text: str = ""
    thought: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    tokens: list[Token] = field(default_factory=list)
    thought_tokens: int = 0
    started: bool = False
    finish_reason: str | None = None
    stop_reason: str | None = None

    def take(self, delta: OutputDelta) -> list[dict[str, Any]]:
        """Add a delta of the completion; returns the resulting deltas of the message."""
        self.tokens += delta.tokens
        self.thought_tokens += len(delta.tokens) if self.reader.in_thought else 0
        reason = delta.finish_reason
        cut = reason is FinishReason.LENGTH
        found = [self._add(part) for part in self.reader.read(delta.text, last=reason is not None, cut=cut)]
        if reason is not None:
            self.finish_reason, self.stop_reason = FINISH_REASONS[reason], delta.stop_reason
            if self.reader.cut:
                self.finish_reason = "length"
            elif self.calls and not cut:
                self.finish_reason = "tool_calls"
        return found

    def message(self) -> dict[str, Any]:
        """The whole message."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text if self.text or not self.calls else None}
        message["refusal"] = None
        if self.thought:
            message["reasoning_content"] = self.thought
        if self.calls:
            message["tool_calls"] = self.calls
        return message

    def _add(self, part: Part) -> dict[str, Any]:
        """Add a part of the message; returns its delta."""
        match part:
            case Text(text):
                self.text += text
                return {"content": text}
            case Thought(text):
                self.thought += text
                return {"reasoning_content": text}
            case CallBegin(id_, name):
                function = {"name": name, "arguments": ""}
                call = {"id": id_, "type": "function"}
                self.calls.append({**call, "function": dict(function)})
                return {"tool_calls": [{"index": len(self.calls) - 1, **call, "function": function}]}
            case CallArguments(text):
                self.calls[-1]["function"]["arguments"] += text
                return {"tool_calls": [{"index": len(self.calls) - 1, "function": {"arguments": text}}]}


class ChatAnswer:
    """A request for the next message of a conversation, and its answer while it is generated.

    This is the shape of all formats: a class derived from it has the `translated` fields of a request, the `events` of
    a stream, and what the `whole` answer is after the last event.
    """

    stream: ClassVar[type[JsonLines]] = Chunks
    words: ClassVar[Mapping[str, str]] = {}
    """The names of fields that are others in a chat completion; see `Translation`."""

    def __init__(self, request: Any, caller: HttpCaller) -> None:
        self.request, self.caller = request, caller
        self.said = Translation(self.words)
        self.usage = Usage()
        self.created = int(time.time())
        self.task: ChatTask
        self.choices: list[ChoiceState]

    def translated(self) -> dict[str, Any]:
        """The fields of the request as those of a chat completion, for other formats; raises `UserError`."""
        raise NotImplementedError

    def asked(self) -> ChatCompletionRequest:
        """The request as one for a chat completion; raises `UserError`."""
        fields = self.translated()
        with self.said.sent_names():
            return ChatCompletionRequest(messages=self.said.messages, **fields)

    def recalled(self, name: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """The fields and messages that were kept of an earlier answer to this caller; raises `UnknownName`."""
        fields, *messages = self.caller.answers.get(self.caller.owner, str(name))
        return fields, messages

    def keep(self, name: str, fields: dict[str, Any]) -> None:
        """Keep the conversation for later requests, without the system message of this one, and with some fields."""
        own = self.said.places["messages[0]"] in ("instructions", "system")
        self.caller.answers.put(self.caller.owner, name, [fields, *self.said.messages[own:], self.choice.message()])

    @property
    def choice(self) -> ChoiceState:
        """The only completion of formats that have one."""
        return self.choices[0]

    async def begin(self) -> None:
        """Read the request; calls the model's tokenizer where it has to. Raises `UserError`."""
        asked = self.asked()
        with self.said.sent_names():
            self.task = await ChatTask.of(asked, self.caller)
        self.usage = Usage(prompt_tokens=self.task.prompt_tokens)
        readers = [self.task.tools.reader(self.task.template, thinking=self.task.thinking)] * self.task.sampling.n
        self.choices = [ChoiceState(index, replace(reader)) for index, reader in enumerate(readers)]

    async def steps(self) -> AsyncGenerator[tuple[ChoiceState, list[dict[str, Any]], OutputDelta], None]:
        """Yield each output of the engine, with the deltas of the message that it makes and the state of its choice."""
        with self.said.sent_names():
            async with aclosing(self.task.deltas(self.caller)) as deltas:
                async for delta in deltas:
                    self.usage = delta.usage or self.usage
                    choice = self.choices[delta.index]
                    yield choice, choice.take(delta), delta

    def events(self) -> Events:
        """Yield the events of a stream."""
        raise NotImplementedError

    def whole(self) -> dict[str, Any]:
        """The whole answer, once everything is generated."""
        raise NotImplementedError

    async def complete(self) -> dict[str, Any]:
        """Return the whole answer."""
        async with aclosing(self.events()) as events:
            async for _ in events:
                pass
        return self.whole()


class ChatCompletion(ChatAnswer):
    """POST /v1/chat/completions."""

    def asked(self) -> ChatCompletionRequest:
        """See `ChatAnswer.asked`."""
        found: ChatCompletionRequest = self.request
        return found

    async def complete(self) -> dict[str, Any]:
        """Return the whole chat completion."""
        await self.begin()
        async with aclosing(self.steps()) as steps:
            async for _ in steps:
                pass
        return self.whole()

    def whole(self) -> dict[str, Any]:
        """The whole chat completion."""
        logprobs = bool(self.request.logprobs)
        found = [
            {
                "index": choice.index,
                "message": choice.message(),
                "logprobs": {"content": logprobs_of(choice.tokens), "refusal": None} if logprobs else None,
                "finish_reason": choice.finish_reason,
                "stop_reason": choice.stop_reason,
            }
            for choice in self.choices
        ]
        return {**self._head("chat.completion"), "choices": found, "usage": self._usage()}

    async def events(self) -> Events:
        """Yield the chat completion in chunks; the first chunk of each choice contains the role."""
        await self.begin()
        request, made = self.request, 0
        head = self._head("chat.completion.chunk")
        if request.include_usage:
            head["usage"] = None
        async with aclosing(self.steps()) as steps:
            async for choice, parts, delta in steps:
                made += len(delta.tokens)
                if request.continuous_usage:
                    head["usage"] = usage_of(Usage(prompt_tokens=self.task.prompt_tokens, completion_tokens=made))
                for chunk in _chunks(choice, parts, delta, logprobs=bool(request.logprobs)):
                    yield {**head, "choices": [chunk]}
        if request.include_usage:
            yield {**head, "choices": [], "usage": self._usage()}

    def _usage(self) -> dict[str, Any]:
        thoughts = None
        if self.task.template.thoughts is not None:
            thoughts = sum(choice.thought_tokens for choice in self.choices)
        return usage_of(self.usage, thoughts)

    def _head(self, kind: str) -> dict[str, Any]:
        name = f"chatcmpl-{self.caller.answer_id}"
        return {"id": name, "object": kind, "created": self.created, "model": self.request.model}


def _chunks(
    state: ChoiceState, parts: list[dict[str, Any]], delta: OutputDelta, *, logprobs: bool
) -> Iterator[dict[str, Any]]:
    """The entries for `choices` of the next chunks, one per chunk."""
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
    yield from found
