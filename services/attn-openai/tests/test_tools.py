"""Calls in every format: what a grammar allows is read as calls of its schemas, however the text is cut; and what a
chat template takes is found by rendering it, so that nothing of a conversation is lost."""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest
import tokenizers
from attn_core.errors import InvalidValue, UserError
from attn_engine.structured_output import GrammarCompiler
from attn_models.tokenizers import Tokenizer
from attn_models.tokenizers.chat import render_template
from attn_models.tokenizers.learned import byte_pair_tokenizer
from attn_openai.call_formats import FORMATS, MARK, THOUGHTS, CallFormat
from attn_openai.messages import turns_of
from attn_openai.output_reader import CallArguments, CallBegin, OutputReader, Text, Thought
from attn_openai.templates import ChatTemplate, inspect, require_written
from attn_openai.tools import OutputGrammar, Tools
from attn_schema import Prompt, Token, Tokenization
from attn_schema.chat_form import ChatForm

BY_NAME = {form.name: form for form in FORMATS}
PARAMETERS = {
    "type": "object",
    "properties": {
        "a": {"type": "integer"},
        "b": {"type": "string"},
        "c": {"enum": ["x y", "z"]},
        "d": {"anyOf": [{"type": "number"}, {"type": "null"}]},
        "e": {"type": "array", "items": {"$ref": "#/$defs/Flag"}, "maxItems": 2},
        "f": {"type": "object", "properties": {"g": {"type": "integer"}}, "additionalProperties": False},
    },
    "required": ["a", "b"],
    "additionalProperties": False,
    "$defs": {"Flag": {"type": "boolean"}},
}
TOOLS = [
    {"type": "function", "function": {"name": "zeta", "parameters": PARAMETERS, "strict": True}},
    {"type": "function", "function": {"name": "no_args"}},
]
SCHEMAS = {"zeta": PARAMETERS, "no_args": {"type": "object", "maxProperties": 0}}
Read = tuple[str, str, list[tuple[str, str]], bool]


def read(reader: OutputReader, text: str, size: int, *, cut: bool = False) -> Read:
    """The text, the thoughts and the calls of an output that arrives in pieces of `size` characters."""
    found: dict[type, str] = {Text: "", Thought: ""}
    calls: list[list[str]] = []
    starts = range(0, max(len(text), 1), size)
    for start in starts:
        for part in reader.read(text[start : start + size], last=start == starts[-1], cut=cut):
            if isinstance(part, CallBegin):
                calls.append([part.name, ""])
            elif isinstance(part, CallArguments):
                calls[-1][1] += part.text
            else:
                found[type(part)] += part.text
    return found[Text], found[Thought], [(name, arguments) for name, arguments in calls], reader.cut


def both_ways(form: CallFormat | None, text: str, *, thinking: bool = False, cut: bool = False, **fields: Any) -> Read:
    """What is read of a text in one piece, which must be what is read of it in pieces of any size."""
    thoughts = fields.get("thoughts")
    made = [
        read(OutputReader(form, thoughts, SCHEMAS, thinking), text, size, cut=cut) for size in (len(text) or 1, 1, 2, 7)
    ]
    assert all(one == made[0] for one in made), made
    return made[0]


def vocabulary(form: CallFormat, *, special: bool) -> Tokenizer:
    """Bytes, and the marks of a format as special tokens or as none at all."""
    plain = byte_pair_tokenizer(["to be or not to be, that is the question"], 280)
    backend = tokenizers.Tokenizer.from_str(plain.backend.to_str())
    marks = sorted({mark for text in (*form.pieces(), "<think></think>") for mark in MARK.findall(text)})
    backend.add_special_tokens([tokenizers.AddedToken(mark, special=True) for mark in marks] if special else [])
    return Tokenizer(backend, plain.settings)


def walk(tokenizer: Tokenizer, matcher: Any, rng: random.Random, steps: int = 160) -> tuple[str, bool]:
    """A text that a grammar allows, and whether it was cut off; tokens that end something are preferred."""
    (end,) = tokenizer.end_ids
    ids: list[int] = []
    for _ in range(steps):
        allowed = np.flatnonzero(matcher.allowed_bytes(tokenizer.vocab_size)).tolist()
        assert allowed, tokenizer.decode(ids, skip_special=False)
        if matcher.complete or allowed == [end] or (end in allowed and rng.random() < 0.3):
            return tokenizer.decode(ids, skip_special=False), False
        printed = [
            i
            for i in allowed
            if i != end and (i >= 280 or tokenizer.token_bytes(i).decode("ascii", "replace").isprintable())
        ]
        ends = [i for i in printed if i >= 280 or tokenizer.token_bytes(i)[:1] in b"\"'<}])"]
        ids.append(rng.choice(ends if ends and rng.random() < 0.3 else printed or [i for i in allowed if i != end]))
        matcher.accept(ids[-1])
        assert not matcher.error
    return tokenizer.decode(ids, skip_special=False), True


ONE_OF_EACH_NOTATION = ("hermes", "mistral_list", "kimi", "qwen_coder", "glm", "deepseek_tool_calls", "gemma", "lfm2")


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("name", ONE_OF_EACH_NOTATION)
def test_what_a_grammar_allows_is_read_as_calls_of_its_schemas(name: str, special: bool) -> None:
    form, rng = BY_NAME[name], random.Random(name)
    tokenizer = vocabulary(form, special=special)
    marks = {tokenizer.token(i): i for i in tokenizer.special_ids if i >= 280}
    template = ChatTemplate(form, THOUGHTS[0], marks=tuple(marks.items()))
    compiler, whole = GrammarCompiler(tokenizer), 0
    for choice, thinking in itertools.product(("required", "auto"), (True, False)):
        tools = Tools.read(TOOLS, choice)
        grammar = OutputGrammar(tools, template, None, thinking=thinking).structured_output()
        assert grammar is not None
        for _ in range(3):
            text, cut = walk(tokenizer, compiler.matcher(grammar), rng)
            _, _, calls, unfinished = both_ways(form, text, thinking=thinking, cut=cut, thoughts=THOUGHTS[0])
            for called, arguments in calls[:-1] if unfinished or cut else calls:
                jsonschema.validate(json.loads(arguments), SCHEMAS[called])
                whole += 1
            assert calls or cut or choice == "auto"
    assert whole or not special  # marks that are no tokens are rarely spelled by chance


A = '{"a": 12345678901234567890, "b": "\\"q\\"\\n}{ \\u00e9</tool_call"}'
WRITTEN = {
    "hermes": '<tool_call>\n{"name": "zeta", "arguments": %s}\n</tool_call>',
    "mistral": "[TOOL_CALLS]zeta[CALL_ID]abcdefghi[ARGS]%s",
    "mistral_args": "[TOOL_CALLS]zeta[ARGS]%s",
    "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>zeta<｜tool▁sep｜>%s<｜tool▁call▁end｜>"
    "<｜tool▁calls▁end｜>",
    "kimi": "<|tool_calls_section_begin|><|tool_call_begin|>functions.zeta:0<|tool_call_argument_begin|>%s"
    "<|tool_call_end|><|tool_calls_section_end|>",
    "command": '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "zeta", "parameters": %s}\n]<|END_ACTION|>',
    "llama_json": '{"name": "zeta", "parameters": %s}',
}


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize("between", ["", "\n", "\n\n", " then "])
def test_several_calls_and_the_words_around_them_are_all_kept(name: str, between: str) -> None:
    call = WRITTEN[name] % A
    text, _, calls, cut = both_ways(BY_NAME[name], f"Let me see.\n{call}{between}{call}")
    assert text == "Let me see." + between.strip() * bool(between.strip())
    assert calls == [("zeta", A)] * 2
    assert not cut


@pytest.mark.parametrize("name", WRITTEN)
def test_arguments_are_shown_at_most_two_tokens_after_they_are_written(name: str) -> None:
    reader, shown = OutputReader(BY_NAME[name], None, {"zeta": {}}), ""
    whole = WRITTEN[name] % A
    for end in range(1, whole.index(A) + len(A) + 1):  # a token of one character is the hardest
        shown += "".join(part.text for part in reader.read(whole[end - 1]) if isinstance(part, CallArguments))
        assert len(shown) >= end - whole.index(A) - 2, whole[:end]


@pytest.mark.parametrize("name", WRITTEN)
def test_a_call_that_is_cut_off_is_never_text(name: str) -> None:
    whole = WRITTEN[name] % A
    head = whole.index(A)
    for end in range(head - 2, head + len(A)):
        text, _, calls, cut = both_ways(BY_NAME[name], whole[:end], cut=True)
        assert (text, cut) == ("", True)
        assert A.startswith("".join(arguments for _, arguments in calls))


@pytest.mark.parametrize(
    ("raw", "value"),
    [
        ("1", "1"),
        ("null", "null"),
        (" x\n", " x\n"),
        ("", ""),
        ('{"a": 1}', '{"a": 1}'),
        ("</parameter> and", "</parameter> and"),
    ],
)
def test_a_raw_text_stays_a_text_whatever_it_looks_like(raw: str, value: str) -> None:
    text = f"<tool_call>\n<function=zeta>\n<parameter=b>\n{raw}\n</parameter>\n</function>\n</tool_call>"
    ((_, arguments),) = both_ways(BY_NAME["qwen_coder"], text)[2]
    assert json.loads(arguments) == {"b": value}


@pytest.mark.parametrize(
    ("raw", "value"), [("None", None), ("null", None), ("1.10", 1.1), ("12345678901234567890", 12345678901234567890)]
)
def test_a_raw_value_of_other_types_is_that_value(raw: str, value: Any) -> None:
    text = f"<tool_call>zeta<arg_key>d</arg_key><arg_value>{raw}</arg_value></tool_call>"
    ((_, arguments),) = both_ways(BY_NAME["glm"], text)[2]
    assert json.loads(arguments) == {"d": value}


# Made templates, each with a peculiarity of some family. `calls` is written where {calls} stands.
TURNS = "{%% for m in messages %%}<|%%s|>".replace("%%s", "{{ m.role }}").replace("%%", "%")
LISTED = "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}" + TURNS
ENDS = "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
HERMES_CALLS = (
    "{{ m.content }}{% for c in m.tool_calls or [] %}\n<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
)
TEMPLATES = {
    "hermes": LISTED + HERMES_CALLS + ENDS,
    "text arguments, null content": LISTED + "{% if m.tool_calls and m.content is none %}<｜tool▁calls▁begin｜>"
    "{% for c in m.tool_calls %}<｜tool▁call▁begin｜>{{ c.function.name }}"
    "<｜tool▁sep｜>{{ c.function.arguments + '' }}<｜tool▁call▁end｜>{% endfor %}"
    "<｜tool▁calls▁end｜>{% else %}{{ m.content }}{% endif %}" + ENDS,
    "ids of nine letters": LISTED
    + "{% for c in m.tool_calls or [] %}{% if c.id | length != 9 %}{{ raise_exception('id') }}{% endif %}[TOOL_CALLS]"
    "{{ c.function.name }}[CALL_ID]{{ c.id }}[ARGS]{{ c.function.arguments | tojson }}{% endfor %}"
    "{{ m.tool_call_id }}{{ m.content }}" + ENDS,
    "the id is the only name": LISTED
    + "{{ m.content }}{% if m.tool_calls %}<|tool_calls_section_begin|>{% for c in m.tool_calls %}<|tool_call_begin|>"
    "{{ c.id }}<|tool_call_argument_begin|>{{ c.function.arguments | tojson }}<|tool_call_end|>{% endfor %}"
    "<|tool_calls_section_end|>{% endif %}{{ m.tool_call_id }}" + ENDS,
    "one call, words lost": LISTED
    + "{% if m.tool_calls %}{% if m.tool_calls | length != 1 %}{{ raise_exception('one') }}{% endif %}"
    '{"name": "{{ m.tool_calls[0].function.name }}", "parameters": {{ m.tool_calls[0].function.arguments | tojson }}}'
    "{% else %}{{ m.content }}{% endif %}" + ENDS,
    "elements and thoughts": LISTED
    + "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}{% for k, v in c.function.arguments.items() %}"
    "<arg_key>{{ k }}</arg_key><arg_value>{{ v if v is string else v | tojson }}</arg_value>{% endfor %}</tool_call>"
    "{% endfor %}" + ENDS,
    "no tools": TURNS + "{{ m.content }}" + ENDS,
    "fails on tools": "{% if tools %}{{ raise_exception('none') }}{% endif %}" + TURNS + "{{ m.content }}" + ENDS,
}
FOUND = {
    "hermes": ("hermes", {}),
    "text arguments, null content": (
        "deepseek_v31",
        {"form": ChatForm(text_arguments=True, null_content=True), "beside": False},
    ),
    "ids of nine letters": ("mistral", {"form": ChatForm("nine")}),
    "the id is the only name": ("kimi", {"form": ChatForm("kimi")}),
    "one call, words lost": ("llama_json", {"parallel": False, "beside": False}),
    "elements and thoughts": ("glm", {"thoughts": THOUGHTS[0]}),
    "no tools": ("hermes", {"lists_tools": False, "writes_calls": False}),
    "fails on tools": ("hermes", {"lists_tools": False, "writes_calls": False}),
}


def renderer(template: str) -> Any:
    """Renders prompts by a template, as an engine does."""

    async def render(prompt: Prompt) -> Tokenization:
        if prompt.chat is None:
            words = (prompt.text or "").split()
            return Tokenization(tokens=tuple(Token(id=n, text=word) for n, word in enumerate(words)), text="")
        messages = [{"role": m.role, "content": m.content} | json.loads(m.extra or "{}") for m in prompt.chat]
        values = json.loads(prompt.chat_template_kwargs or "{}")
        return Tokenization(
            tokens=(), text=render_template(template, {"messages": messages, "add_generation_prompt": True} | values)
        )

    return render


@pytest.mark.parametrize("kind", TEMPLATES)
async def test_the_forms_of_a_template_are_found_and_a_conversation_is_whole_in_it(kind: str) -> None:
    render = renderer(TEMPLATES[kind])
    template = await inspect(render)
    name, forms = FOUND[kind]
    assert template.calls.name == name
    assert {key: getattr(template, key) for key in forms} == forms
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "zeta", "arguments": '{"a": 1, "b": "x \\"y\\" é"}'},
    }
    turns = turns_of(
        [
            {"role": "user", "content": "question"},
            {"role": "assistant", "content": "words beside", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": "1.10"},
        ]
    )
    values = {"tools": Tools.read(TOOLS, None).described} if template.lists_tools else {}
    prompt = Prompt(chat=template.messages(turns, TOOLS), chat_template_kwargs=json.dumps(values) if values else "")
    text = (await render(prompt)).text
    require_written(template, turns, {}, text)
    assert "no_args" in text
    _, _, calls, _ = both_ways(template.calls, text[text.rindex("question") :])
    assert [(name, json.loads(arguments)) for name, arguments in calls] == [("zeta", {"a": 1, "b": 'x "y" é'})]


async def test_a_mark_that_the_vocabulary_cannot_spell_is_no_token_and_others_still_are() -> None:
    render = renderer(TEMPLATES["elements and thoughts"])

    async def small(prompt: Prompt) -> Tokenization:
        if prompt.chat is None and "tool_call" in (prompt.text or ""):
            raise InvalidValue.of("text[0]", "<", "characters of the vocabulary")
        return await render(prompt)

    known, few = dict((await inspect(render)).marks), dict((await inspect(small)).marks)
    assert {"<tool_call>", "<think>"} <= known.keys()
    assert few.keys() == {mark for mark in known if "tool_call" not in mark}


async def test_what_a_template_leaves_out_is_refused_by_field() -> None:
    template = await inspect(renderer(TEMPLATES["one call, words lost"]))
    calls = [{"id": i, "function": {"name": "zeta", "arguments": {"b": "text"}}} for i in "xy"]
    turns = turns_of([{"role": "user", "content": "q"}, {"role": "assistant", "tool_calls": calls}])
    with pytest.raises(InvalidValue) as two:
        require_written(template, turns, {}, "zeta text")
    assert two.value.metadata["field"] == "messages[1].tool_calls"
    turns = turns_of([{"role": "user", "content": "q"}, {"role": "assistant", "tool_calls": calls[:1]}])
    with pytest.raises(InvalidValue) as lost:
        require_written(template, turns, {}, "zeta")
    assert lost.value.metadata["field"] == "messages[1].tool_calls[0].function.arguments"
    with pytest.raises(InvalidValue) as documents:
        require_written(template, turns, {"documents": [{"text": "never shown"}]}, "zeta text b")
    assert documents.value.metadata["field"] == "documents"


async def test_a_template_that_raises_is_an_error_of_the_request() -> None:
    with pytest.raises(UserError):
        await renderer(TEMPLATES["fails on tools"])(
            Prompt(
                chat=ChatTemplate().messages(turns_of([{"role": "user", "content": "q"}])),
                chat_template_kwargs='{"tools": [1]}',
            )
        )
