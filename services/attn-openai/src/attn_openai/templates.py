"""What a model's chat template makes of tools, calls, results and thoughts, found by rendering a few conversations.

Templates differ in the forms that they take: arguments as an object or as text, empty contents as "" or null, ids of
any kind or of one, one call in a message or several. A form is right if what the template writes is read back as the
same calls.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from attn_core.errors import InvalidValue, UserError
from attn_schema import ChatMessage, Prompt, Tokenization
from attn_schema.chat_form import THOUGHT as THINKING
from attn_schema.chat_form import ChatForm

from attn_openai.call_formats import FORMATS, HERMES, MARK, THOUGHTS, CallFormat, ThoughtFormat
from attn_openai.notations import JSON
from attn_openai.output_reader import CallArguments, CallBegin, OutputReader

Render = Callable[[Prompt], Awaitable[Tokenization]]
DESCRIPTION = """Functions that can be called, as JSON schemas:
{tools}

A call is written as
{example}"""
"""What a model is told whose chat template says nothing of tools."""


@dataclass(frozen=True)
class Call:
    """A function call of an earlier message."""

    id: str
    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Turn:
    """A message of a conversation, with U+FFFC in its text for each image. `place` is where it was sent."""

    role: str
    text: str = ""
    images: tuple[bytes, ...] = ()
    calls: tuple[Call, ...] = ()
    call_id: str | None = None
    thought: str = ""
    extra: tuple[tuple[str, Any], ...] = ()
    place: str = ""


@dataclass(frozen=True)
class ChatTemplate:
    """The forms that a template takes. `calls` is how it writes calls, or how they are written here if it does not.

    `lists_tools` says whether it describes tools, `writes_calls` whether it writes the calls of earlier messages,
    `parallel` whether several of one message. `beside` says whether a message may have text and calls. `marks` are the
    token ids of the marks that are single tokens.
    """

    calls: CallFormat = HERMES
    thoughts: ThoughtFormat | None = None
    lists_tools: bool = False
    writes_calls: bool = False
    parallel: bool = True
    beside: bool = True
    form: ChatForm = field(default_factory=ChatForm)
    marks: tuple[tuple[str, int], ...] = ()
    unspelled: str = ""
    """Why nothing of this is known: what the vocabulary cannot spell of the conversations that were tried."""

    def messages(self, turns: Sequence[Turn], tools: Sequence[dict[str, Any]] = ()) -> tuple[ChatMessage, ...]:
        """The messages in the forms that the template takes; `tools` are described here if it does not."""
        if tools and not self.lists_tools:
            turns = _described(turns, tools, self.calls)
        if not self.writes_calls:
            return tuple(_spelled(turns, self.calls))
        return tuple(self._messages(turns))

    def _messages(self, turns: Sequence[Turn]) -> Iterator[ChatMessage]:
        parts: list[Turn] = []
        for turn in turns:
            if turn.calls and turn.text and not self.beside:
                parts.append(replace(turn, calls=()))
                turn = replace(turn, text="", thought="", extra=())  # noqa: PLW2901
            parts.append(turn)
        for turn, made in zip(parts, self.form.messages(map(_plain, parts)), strict=True):
            extra = {key: value for key, value in made.items() if key not in _plain(Turn(turn.role)) or value is None}
            yield ChatMessage(
                role=turn.role, content=turn.text, images=turn.images, extra=_json(extra) if extra else ""
            )

    def thinks(self, rendered: str) -> bool:
        """Whether a rendered prompt ends within a thought."""
        return self.thoughts is not None and rendered.rstrip().endswith(self.thoughts.opening.strip())


def _plain(turn: Turn) -> dict[str, Any]:
    """A turn as a message of OpenAI's format, with arguments as objects."""
    message: dict[str, Any] = {"role": turn.role, "content": turn.text, **dict(turn.extra)}
    if turn.thought:
        message[THINKING] = turn.thought
    if turn.calls:
        message["tool_calls"] = [
            {"id": call.id, "function": {"name": call.name, "arguments": call.arguments}} for call in turn.calls
        ]
    return message | ({} if turn.call_id is None else {"tool_call_id": turn.call_id})


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _described(turns: Sequence[Turn], tools: Sequence[dict[str, Any]], form: CallFormat) -> list[Turn]:
    example = _written(form, [("NAME", '{"ARGUMENT": VALUE}')])
    told = DESCRIPTION.format(tools="\n".join(map(_json, tools)), example=example)
    if turns[0].role == "system":
        return [replace(turns[0], text=f"{turns[0].text}\n\n{told}"), *turns[1:]]
    return [Turn("system", told), *turns]


def _written(form: CallFormat, calls: Sequence[tuple[str, str]]) -> str:
    """Calls as they are written in a format, from their names and their arguments in JSON."""
    if form.notation is not JSON:
        form = HERMES
    each = [f"{form.before_name}{name}{form.after_name}{arguments}{form.after}" for name, arguments in calls]
    return f"{form.opening}{form.between.join(each)}{form.closing}" if each else ""


def _spelled(turns: Sequence[Turn], form: CallFormat) -> Iterator[ChatMessage]:
    """Messages with calls spelled in the contents, and their results as messages of the user."""
    results: list[str] = []
    for turn in (*turns, None):
        if turn is not None and turn.role == "tool":
            results.append(f"<tool_response>\n{turn.text}\n</tool_response>")
            continue
        if results:
            yield ChatMessage(role="user", content="\n".join(results))
            results = []
        if turn is not None:
            spelled = _written(form, [(call.name, _json(call.arguments)) for call in turn.calls])
            text = "\n".join(filter(None, (turn.text, spelled)))
            extra = dict(turn.extra)
            yield ChatMessage(role=turn.role, content=text, images=turn.images, extra=_json(extra) if extra else "")


def require_written(template: ChatTemplate, turns: Sequence[Turn], values: Mapping[str, Any], rendered: str) -> None:
    """Raise `InvalidValue`, naming it, for a call, a result, a text beside a call or a document that the rendered
    prompt does not have."""
    marks = (
        (template.calls.after.strip(), *template.calls.notation.marks) if template.calls.notation is not JSON else ()
    )
    for turn in turns:
        if len(turn.calls) > 1 and template.writes_calls and not template.parallel:
            allowed = "one call, as the model's chat template writes only one of a message"
            raise InvalidValue.of(f"{turn.place}.tool_calls", f"{len(turn.calls)} calls", allowed)
        for number, call in enumerate(turn.calls):
            field = f"{turn.place}.tool_calls[{number}].function"
            texts = list(_leaves(call.arguments))
            if any(mark.strip() in text for mark in marks if mark.strip() for text in texts):
                raise InvalidValue.of(
                    f"{field}.arguments", "a mark of calls", "texts without the marks of the template"
                )
            _require(rendered, [call.name], f"{field}.name")
            _require(rendered, texts, f"{field}.arguments")
        if turn.calls or turn.role == "tool":
            _require(rendered, [turn.text], f"{turn.place}.content")
    for document in values.get("documents", []):
        said = list(document.values()) if isinstance(document, dict) else document
        _require(rendered, list(_leaves(said)), "documents")


def _leaves(value: Any) -> Iterator[str]:
    """All texts and numbers within a JSON value, as text."""
    if isinstance(value, dict):
        for key, each in value.items():
            yield key
            yield from _leaves(each)
    elif isinstance(value, list):
        for each in value:
            yield from _leaves(each)
    elif isinstance(value, str):
        yield value
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield _json(value)


def _require(rendered: str, texts: Sequence[str], field: str) -> None:
    for text in texts:
        plain = text.strip()
        spellings = (plain, _json(plain)[1:-1], json.dumps(plain)[1:-1], repr(plain)[1:-1])
        if not any(spelling in rendered for spelling in spellings):
            raise InvalidValue.of(field, text[:60], "what the model's chat template writes; it leaves this out")


# What the conversations that are tried say; nothing of it occurs in a template.
QUERY, RESULTS, WORDS, THOUGHT, ANSWER = "zqquery", ("zqresulta", "zqresultb"), "zqwords", "zqthought", "zqanswer"
CALLS = (Call("call_zq1", "zqfirst", {"zqa": 1, "zqb": "zqtext"}), Call("call_zq2", "zqother", {"zqb": "zqmore"}))
PARAMETERS = {"type": "object", "properties": {"zqa": {"type": "integer"}, "zqb": {"type": "string"}}}
TRIED_TOOLS = [
    {"type": "function", "function": {"name": call.name, "description": "zqtells", "parameters": PARAMETERS}}
    for call in CALLS
]


async def inspect(render: Render) -> ChatTemplate:
    """Find the forms of the template by which `render` renders; a form that it refuses is not one of them."""
    try:
        found, thoughts = await _calls(render), await _thoughts(render)
    except InvalidValue as error:
        return ChatTemplate(unspelled=error.message)
    found = replace(found, thoughts=thoughts)
    texts = [*found.calls.pieces(), *_pieces(thoughts)]
    marks = sorted({mark for text in texts for mark in MARK.findall(text)})
    ids = {mark: await _token(render, mark) for mark in marks}
    return replace(found, marks=tuple((mark, token_id) for mark, token_id in ids.items() if token_id is not None))


async def _token(render: Render, mark: str) -> int | None:
    """The id of the token that is the mark; None if there is none, as in a vocabulary that cannot spell the mark."""
    try:
        tokens = (await render(Prompt(text=mark))).tokens
    except UserError:
        return None
    return next((token.id for token in tokens if token.text.strip() == mark), None)


def _pieces(thoughts: ThoughtFormat | None) -> tuple[str, ...]:
    return (thoughts.opening, thoughts.closing, thoughts.answer, thoughts.after) if thoughts else ()


async def _rendered(render: Render, messages: Sequence[ChatMessage], *, tools: bool) -> str:
    kwargs = _json({"tools": TRIED_TOOLS}) if tools else ""
    try:
        return (await render(Prompt(chat=tuple(messages), chat_template_kwargs=kwargs))).text
    except UserError as error:
        if str(error.metadata.get("field")).startswith("text"):  # which the vocabulary cannot spell
            raise
        return ""


async def _calls(render: Render) -> ChatTemplate:
    """How the template writes calls, and the forms that it takes."""
    asked = Turn("user", QUERY)
    listed = await _rendered(render, ChatTemplate(writes_calls=True).messages([asked]), tools=True)
    lists_tools = all(call.name in listed for call in CALLS)
    for count in (2, 1):
        turns = [asked, Turn("assistant", calls=CALLS[:count])]
        turns += [Turn("tool", text, call_id=call.id) for text, call in zip(RESULTS, CALLS[:count], strict=False)]
        for taken in ChatForm.every():
            form = ChatTemplate(lists_tools=lists_tools, writes_calls=True, parallel=count > 1, form=taken)
            said = await _rendered(render, form.messages(turns), tools=True)
            calls = _format_of(said, CALLS[:count])
            if calls is not None and all(
                said.count(taken.id_of(call.id, call.name, n)) != 1 for n, call in enumerate(CALLS[:count])
            ):
                return replace(form, calls=calls, beside=await _keeps_words(render, form, turns, calls))
    taught = (one for one in FORMATS if one.trigger in listed and one.notation is JSON and MARK.match(one.trigger))
    known = next(taught, None)
    # If the template tells the model to write calls in a way that is not known here, it is told another way instead.
    return ChatTemplate(calls=known or HERMES, lists_tools=lists_tools and known is not None)


async def _keeps_words(render: Render, form: ChatTemplate, turns: list[Turn], calls: CallFormat) -> bool:
    """Whether the template writes the words beside calls, and the calls with them."""
    said = await _rendered(render, form.messages([turns[0], replace(turns[1], text=WORDS), *turns[2:]]), tools=True)
    return WORDS in said and _reads(calls, said, turns[1].calls)


def _format_of(said: str, calls: Sequence[Call]) -> CallFormat | None:
    """The first format in which these calls are read from a rendered conversation."""
    if not all(result in said for result in RESULTS[: len(calls)]):
        return None
    return next((one for one in FORMATS if _reads(one, said, calls)), None)


def _reads(form: CallFormat, said: str, calls: Sequence[Call]) -> bool:
    start = said.rfind(QUERY) + len(QUERY)
    written = said[start : said.find(RESULTS[0], start)]
    return calls_in(form, written, {call.name: PARAMETERS for call in calls}) == [
        (call.name, call.arguments) for call in calls
    ]


def calls_in(form: CallFormat, text: str, functions: dict[str, Any]) -> list[tuple[str, Any]]:
    """The names and arguments of all calls in a text."""
    found: list[list[str]] = []
    for part in OutputReader(form, None, functions).read(text, last=True):
        if isinstance(part, CallBegin):
            found.append([part.name, ""])
        elif isinstance(part, CallArguments):
            found[-1][1] += part.text
    try:
        return [(name, json.loads(arguments)) for name, arguments in found]
    except ValueError:
        return []


async def _thoughts(render: Render) -> ThoughtFormat | None:
    """The marks of thoughts that the template writes, or with which its prompts end."""
    form = ChatTemplate(writes_calls=True)
    turns = [Turn("user", QUERY), Turn("assistant", ANSWER, thought=THOUGHT)]
    said = await _rendered(render, form.messages(turns), tools=False)
    said += await _rendered(render, form.messages(turns[:1]), tools=False)
    return next(
        (one for one in THOUGHTS if one.opening.strip() in said or (one.answer or one.closing).strip() in said), None
    )
