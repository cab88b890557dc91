"""What is learned of a conversation as its chat template renders it, with the spans of answers checked by tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import Any

from attn_core.errors import InvalidValue, UserError
from attn_models.evaluation import IGNORED
from attn_models.tokenizers import Tokenizer
from attn_models.tokenizers.chat import content_parts, unused_characters
from attn_models.vision_language.prompts import TileTexts
from attn_schema import IMAGE_PLACE
from attn_schema.chat_form import THOUGHT, ChatForm

from attn_train.data.messages import ASSISTANT, TOOL, USER, json_in
from attn_train.data.pictures import ALONE, SeenImages
from attn_train.data.shapes import Chat

FIELD = "config.data.dataset"
WEIGHT = "weight"
"""The key of an answer that is 0 if the answer is not learned, as in OpenAI's format for fine-tuning; 1 by default."""
GENERATION = re.compile(r"\{%[-+]?\s*generation\b")
"""The block of a template that marks what the assistant says, for training."""
NO_VALUES: Mapping[str, Any] = {}
NO_THOUGHTS: Mapping[str, Any] = {"enable_thinking": False, "thinking": False}
"""Values by which templates ask for an answer without thoughts."""
Span = tuple[int, int]


@dataclass(frozen=True, eq=False)
class TokenizedChat:
    """A conversation as input ids and target ids, one ahead, and its images; targets outside of the assistant's answers
    are IGNORED."""

    inputs: tuple[int, ...]
    targets: tuple[int, ...]
    images: SeenImages | None = None

    @property
    def answered(self) -> int:
        """The number of target tokens in answers."""
        return sum(target != IGNORED for target in self.targets)


def tokenized_chats(
    tokenizer: Tokenizer, chat: Chat, place: str, tiles: TileTexts | str = ALONE
) -> list[TokenizedChat]:
    """Tokenize a conversation with the chat template; targets are the assistant's messages and their end tokens, except
    those of weight 0, or what the template marks as such by `{% generation %}`. `tiles` is what encodes images.

    If the template writes earlier messages differently once more follow, as those do that leave out the thoughts of
    earlier answers, each answer becomes a conversation of its own that ends with it. Raises `InvalidValue` for an
    answer that does not begin as its prompt ends, for what the template leaves out, and as `SeenImages.of` does.
    """
    images = SeenImages.of(chat, tiles, place)
    weights = [message.get(WEIGHT, 1) for message in chat.messages]
    learned = [n for n, message in enumerate(chat.messages) if message["role"] == ASSISTANT and weights[n]]
    problems: list[UserError] = []
    for form, parts in _forms(chat):
        try:
            return _tokenized(_Renderer(tokenizer, form, parts=parts, images=images), learned, place)
        except UserError as error:
            problems.append(error)
    # What a template leaves out says more than that it fails in another form.
    problem = next((one for one in reversed(problems) if isinstance(one, InvalidValue)), problems[0])
    raise problem if isinstance(problem, InvalidValue) else InvalidValue.of(FIELD, place, problem.message)


def _forms(chat: Chat) -> Iterator[tuple[Chat, bool]]:
    """Yield a conversation in the forms that templates take, and whether its contents are rendered as lists of parts,
    as those of models of images do."""
    plain = [_without_weight(message) for message in chat.messages]
    calls = any("tool_calls" in message or message["role"] == TOOL for message in plain)
    for parts, form in product((True,) if chat.images else (False, True), ChatForm.every() if calls else [ChatForm()]):
        yield replace(chat, messages=list(form.messages(plain))), parts


def _without_weight(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message with the arguments of its calls as objects, without what only training reads."""
    made = {key: value for key, value in message.items() if key != WEIGHT}
    if calls := made.get("tool_calls"):
        functions = [call["function"] for call in calls]
        told = [json_in(function.get("arguments") or {}, "arguments") for function in functions]
        made["tool_calls"] = [
            call | {"function": {"name": function["name"], "arguments": arguments}}
            for call, function, arguments in zip(calls, functions, told, strict=True)
        ]
    return made


class _Renderer:
    """Renders the first messages of a conversation, and finds what the template marks by `{% generation %}`."""

    def __init__(
        self, tokenizer: Tokenizer, chat: Chat, *, parts: bool = False, images: SeenImages | None = None
    ) -> None:
        self.tokenizer, self.parts, self.images = tokenizer, parts, images
        self.said = tokenizer.with_placeholders(chat.messages, chat.values)
        self.marks = bool(GENERATION.search(tokenizer.settings.chat_template or ""))
        self._begin, self._end = unused_characters([json.dumps(self.said.values, ensure_ascii=False)], 2)

    def text(self, count: int, *, asked: bool = False, extra: Mapping[str, Any] = NO_VALUES) -> tuple[str, list[Span]]:
        """Return the text of the first `count` messages, and the marked spans of its characters."""
        messages, values = self.said.values
        values = values | extra
        if self.marks:
            values = values | {"generation_begins": self._begin, "generation_ends": self._end}
        said = messages[:count]
        written = self.tokenizer.render_chat(said, values, add_generation_prompt=asked, images=self.parts)
        parts = [part for message in said for part in content_parts(message["content"] or "")] if self.parts else []
        if any(form(part) in written for part in parts for form in (str, json.dumps)):
            raise UserError("the chat template writes parts of a content as objects: it takes texts alone")
        pieces = re.split(f"([{self._begin}{self._end}])", written)
        text, bounds = "", list[int]()
        for piece in pieces:
            if piece in (self._begin, self._end):
                bounds.append(len(text))
            else:
                text += piece
        return text, list(zip(bounds[::2], bounds[1::2], strict=True))


def _tokenized(renderer: _Renderer, learned: Sequence[int], place: str) -> list[TokenizedChat]:
    spans: list[list[Span]] = []
    texts, packed = list[str](), ""
    for number in learned:
        text, marked = renderer.text(number + 1)
        if renderer.marks:
            earlier = len(renderer.text(number)[1]) if number else 0
            spans.append(marked[earlier:])
        else:
            spans.append([(_beginning(renderer, number, text, place), len(text))])
        answer, packed = renderer.said.values[0][number], _packed(text)
        calls = [call["function"] for call in answer.get("tool_calls", [])]
        _require_written([answer.get("content"), answer.get(THOUGHT), calls], packed, f"{place}: messages[{number}]")
        texts.append(text)
    for number, message in enumerate(renderer.said.values[0][: learned[-1]]):
        if message["role"] != ASSISTANT:
            _require_written(message.get("content"), packed, f"{place}: messages[{number}]")
    for tool in renderer.said.values[1].get("tools", []):
        _require_written(tool.get("function", tool).get("name"), packed, f"{place}: tools")
    length = len(renderer.said.values[0])
    whole, _ = renderer.text(length)
    if all(whole.startswith(text) for text in texts):
        return [_marked(renderer, whole, [span for own in spans for span in own], length)]
    parts = zip(texts, spans, learned, strict=True)
    return [_marked(renderer, text, own, number + 1) for text, own, number in parts]


def _beginning(renderer: _Renderer, number: int, text: str, place: str) -> int:
    """Return where the answer `number` begins in the text that ends with it: where its generation prompt ends, which is
    that of an answer without thoughts if it has none."""
    for extra in (NO_VALUES, NO_THOUGHTS):
        if number:
            before = renderer.text(number, asked=True, extra=extra)[0]
        else:
            before = _before_first_answer(renderer.tokenizer, place)
        if text.startswith(before):
            return len(before)
    raise InvalidValue.of(FIELD, place, "a chat template that begins each answer with its generation prompt")


def _packed(text: str) -> str:
    return "".join(text.split())


def _require_written(value: Any, text: str, place: str) -> None:
    """Raise `InvalidValue` for a text or number in a value that a rendered text, `_packed`, does not have."""
    if isinstance(value, Mapping):
        for key, inside in value.items():
            _require_written(inside, text, f"{place}.{key}")
    elif isinstance(value, list):
        for inside in value:
            _require_written(inside, text, place)
    elif isinstance(value, str) or (isinstance(value, int | float) and not isinstance(value, bool)):
        plain = value if isinstance(value, str) else json.dumps(value)
        if IMAGE_PLACE in plain:
            _require_written(plain.split(IMAGE_PLACE), text, place)
            return
        spellings = (plain, json.dumps(plain, ensure_ascii=False)[1:-1], json.dumps(plain)[1:-1], repr(plain)[1:-1])
        if not any(_packed(spelling) in text for spelling in spellings):
            allowed = "what the chat template writes; it leaves this out"
            raise InvalidValue.of(FIELD, f"{place}: {plain[:60]!r}", allowed)


def _marked(renderer: _Renderer, text: str, spans: Sequence[Span], count: int) -> TokenizedChat:
    """Tokenize the text of the first `count` messages; targets are the tokens in `spans` of characters, up to the first
    that ends an answer unless the template marks them.

    A token never reaches over the beginning of an answer, as none does when a model writes it.
    """
    tokenizer, said = renderer.tokenizer, renderer.said
    ids: list[int] = []
    start, rest = 0, tokenizer.encode_rendered(said, text)
    learned: list[int] = []
    for span in spans:
        bounds = []
        for cut in span:
            piece = tokenizer.encode_rendered(said, text[start:cut], within=bool(start))
            if rest[: len(piece)] == piece:
                bounds.append(len(ids) + len(piece))
                continue
            ids, start = ids + piece, cut
            rest = tokenizer.encode_rendered(said, text[start:], within=True)
            bounds.append(len(ids))
        answer = (ids + rest)[bounds[0] : bounds[1]]
        ends = () if renderer.marks else (n for n, token in enumerate(answer, start=1) if token in tokenizer.end_ids)
        learned += range(bounds[0], bounds[0] + next(iter(ends), len(answer)))
    ids += rest
    flags = [False] * len(ids)
    for place in learned:
        flags[place] = True
    images = renderer.images
    if images is not None:
        images = images.first(sum(str(one["content"]).count(IMAGE_PLACE) for one in said.values[0][:count]))
        ids, flags = images.expanded(ids, flags)
    targets = [token if flag else IGNORED for token, flag in zip(ids, flags, strict=True)]
    return TokenizedChat(tuple(ids[:-1]), tuple(targets[1:]), images)


MARKS = "\U000f8000", "\U000f8001", "\U000f8002"
"""Characters of a private plane, by which messages are found again in what a template renders."""


def _before_first_answer(tokenizer: Tokenizer, place: str) -> str:
    """Return the text that the template writes before an answer that no message precedes.

    It ends with what it writes before any answer (the generation prompt), and may begin with a default system message,
    which is no part of the answer. Raises `InvalidValue` if the template does not write that prompt there.
    """
    answer = [{"role": ASSISTANT, "content": MARKS[0]}]
    asked = [{"role": USER, "content": MARKS[1]}]
    before = tokenizer.render_chat(answer, add_generation_prompt=False).partition(MARKS[0])[0]
    question = tokenizer.render_chat(asked, add_generation_prompt=False)
    prompt = tokenizer.render_chat(asked, add_generation_prompt=True).removeprefix(question)
    found = before.rfind(prompt)
    if not prompt or found < 0:
        allowed = "a user's message before the first answer, as this chat template writes none without"
        raise InvalidValue.of(FIELD, f"{place}, which begins with the role {ASSISTANT}", allowed)
    return before[: found + len(prompt)]


@lru_cache(maxsize=4)
def require_template(tokenizer: Tokenizer) -> None:
    """Raise `UserError` for a tokenizer without a chat template, or whose template ends no answer with a token that
    ends a generation: a model that learns from it would never stop."""
    if tokenizer.settings.chat_template is None:
        raise UserError(
            "the tokenizer has no chat template, which conversations need: set chat_template in its "
            "tokenizer_config.json, or name as tokenizer a model that has one and the same vocabulary"
        )
    turns = Chat([{"role": role, "content": mark} for role, mark in zip((USER, ASSISTANT), MARKS, strict=False)])
    for parts in (False, True):
        with suppress(UserError):  # it accepts other conversations
            text, marked = _Renderer(tokenizer, turns, parts=parts).text(2)
            if MARKS[1] in text:
                break
    else:
        return
    text = "".join(text[start:stop] for start, stop in marked) or text
    text = text.partition(MARKS[1])[2]
    if not tokenizer.end_ids.intersection(tokenizer.encode(text, add_special=False)):
        known = ", ".join(repr(tokenizer.token(end)) for end in sorted(tokenizer.end_ids)) or "none"
        raise UserError(
            f"the chat template ends an answer with {text!r}, in which no token ends a generation (those that do: "
            f"{known}), so the model would never stop: set eos_token in tokenizer_config.json or eos_token_id in "
            "generation_config.json to the token that the template writes there, or let it write one that does"
        )
