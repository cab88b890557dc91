"""Conversations and preferences as they are published: which rows are taken, as what, and what is left aside."""

from __future__ import annotations

import csv
import gzip
import json

import pytest
from attn_core.errors import InvalidValue, UserError
from attn_models.evaluation import IGNORED
from attn_models.tokenizers import Tokenizer, character_tokenizer
from attn_models.tokenizers.settings import TokenizerSettings
from attn_schema.prepared import ShowConfig
from attn_schema.training import DataConfig
from attn_train.data.conversations import checked_chats, checked_preferences, read_chats, read_splits, rows_in
from attn_train.data.preview import preview, shown
from attn_train.data.reading import Reading
from attn_train.data.token_shards.inputs import input_files
from published_rows import CHATS, HI, NO, PREFERENCES, SYSTEM, ULTRA, YES
from small_tasks import chats

TOKENIZER = character_tokenizer("abcdefghi")


@pytest.mark.parametrize("shape", CHATS)
def test_conversations_of_every_published_shape_are_the_same(tmp_path, shape):
    (tmp_path / "a.jsonl").write_text(json.dumps(CHATS[shape]) + "\n")
    reading = Reading()
    ((_, chat),) = checked_chats(rows_in(input_files([str(tmp_path)]), reading), reading)
    assert (chat.messages, chat.values) == ([HI, YES], {})
    aside = {"messages.header", "messages.language", "messages.toxic"} if shape == "WildChat" else set()
    assert reading.aside == aside | ({"id", "text"} & set(CHATS[shape]) - reading.used)


def test_a_history_and_a_system_message_come_before_what_is_asked(tmp_path):
    llama = "<s>[INST] <<SYS>>\nbe\n<</SYS>>\n\na [/INST] b </s><s>[INST] hi [/INST] yes </s>"
    for row in (
        {"instruction": "hi", "output": "yes", "system": "be", "history": [["a", "b"]]},
        {"query": "hi", "response": "yes", "system_message": "be", "history": [["a", "b"]]},
        {"conversation": [{"system": "be", "input": "a", "output": "b"}, {"input": "hi", "output": "yes"}]},
        {"text": llama},
    ):
        ((_, chat),) = checked_chats(rows(tmp_path / "a.jsonl", row), Reading())
        before = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        assert chat.messages == [SYSTEM, *before, HI, YES]


def test_the_input_of_an_instruction_follows_it_and_a_system_message_comes_first(tmp_path):
    row = {"instruction": "add", "input": "1 2", "output": "3", "system": "be"}
    (tmp_path / "a.json").write_text(json.dumps([row]))
    ((_, chat),) = checked_chats(rows_in(input_files([str(tmp_path / "a.json")]), Reading()), Reading())
    assert chat.messages == [SYSTEM, {"role": "user", "content": "add\n\n1 2"}, {"role": "assistant", "content": "3"}]


@pytest.mark.parametrize("shape", PREFERENCES)
def test_preferences_of_every_published_shape_are_the_same(tmp_path, shape):
    (tmp_path / "a.jsonl").write_text(json.dumps(PREFERENCES[shape]) + "\n")
    reading = Reading()
    ((_, both),) = checked_preferences(rows_in(input_files([str(tmp_path)]), reading), reading)
    assert [chat.messages for chat in both] == [[HI, YES], [HI, NO]]
    within = {"UltraFeedback": set(ULTRA) - {"prompt", "chosen", "rejected", "messages"}}
    assert reading.aside == within.get(shape, {"prompt", "question"} if shape.startswith("both columns") else set())


def test_summaries_are_of_a_post_in_the_form_of_their_paper(tmp_path):
    info = {"id": "t3", "post": "It rained.", "title": "Rain", "subreddit": "weather", "site": None, "article": None}
    row = {"info": info, "summaries": [{"text": "no"}, {"text": "yes"}], "choice": 1, "worker": "w"}
    ((_, both),) = checked_preferences(rows(tmp_path / "a.jsonl", row), Reading())
    asked = "SUBREDDIT: r/weather\nTITLE: Rain\nPOST: It rained.\nTL;DR:"
    assert [chat.messages for chat in both] == [[{"role": "user", "content": asked}, one] for one in (YES, NO)]


def test_of_several_turns_only_what_differs_is_compared(tmp_path):
    turns = [HI, YES, {"role": "user", "content": "why"}]
    row = {"chosen": [*turns, YES], "rejected": [*turns, NO]}
    (tmp_path / "a.jsonl").write_text(json.dumps(row))
    ((_, both),) = checked_preferences(rows_in(input_files([str(tmp_path)]), Reading()), Reading())
    assert [[message.get("weight", 1) for message in one.messages] for one in both] == [[1, 0, 1, 1]] * 2
    step = PREFERENCES["Step-DPO"] | {"initial_reason_steps": "so "}
    ((_, both),) = checked_preferences(rows(tmp_path / "b.jsonl", step), Reading())
    assert [one.messages[-1]["content"] for one in both] == ["so yes", "so no"]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [HI], "completion": [YES], "label": True},
        {"messages": [HI, YES], "label": True},
        {"prompt": "hi", "response": "yes", "is_safe": True},
        {"instruction": "hi", "input": "", "output": "yes", "kto_tag": True},
        {"conversations": [HI, YES], "kto_tag": True},
    ],
)
def test_labelled_answers_are_chosen_or_rejected(tmp_path, row):
    columns = {"label": "is_safe"} if "is_safe" in row else {}
    label = next(name for name in ("label", "is_safe", "kto_tag") if name in row)
    found = rows(tmp_path / "a.jsonl", row, row | {label: False})
    both = [pair for _, pair in checked_preferences(found, Reading(columns=columns))]
    assert [[one and one.messages for one in pair] for pair in both] == [[[HI, YES], None], [None, [HI, YES]]]


def test_rows_that_prefer_nothing_are_counted(tmp_path):
    rows = [
        {"prompt": "hi", "chosen": "yes", "rejected": "yes"},
        {"prompt": "hi", "chosen": "yes", "rejected": " "},
        {"prompt": "hi", "chosen": "yes", "rejected": "no"},
        {"prompt": "hi", "chosen": "yes", "rejected": "never"},
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    reading = Reading()
    assert len(list(checked_preferences(rows_in(input_files([str(tmp_path)]), reading), reading))) == 2
    assert list(reading.dropped.values()) == [1, 1, 1]


def test_ties_are_left_out_and_verdicts_that_differ_are_counted(tmp_path):
    safe = PREFERENCES["PKU-SafeRLHF"]
    found = rows(
        tmp_path / "a.jsonl",
        PREFERENCES["HelpSteer3"] | {"overall_preference": 0},
        PREFERENCES["arena"] | {"winner": "tie (bothbad)"},
        PREFERENCES["arena, 55k"] | {"winner_model_a": 0, "winner_tie": 1},
        PREFERENCES["WebGPT"] | {"score_0": 0.5},
        PREFERENCES["Nectar"] | {"answers": [{"answer": "yes", "rank": 1}, {"answer": "no", "rank": 1}]},
        safe | {"safer_response_id": 1},
        safe | {"safer_response_id": 0},
    )
    reading = Reading()
    answers = [[one.messages[-1] for one in both] for _, both in checked_preferences(found, reading)]
    assert answers == [[YES, NO]] * 2
    assert sorted(reading.dropped.values()) == [1, 1, 5]  # a verdict, a prompt that comes again, ties
    safer = Reading(columns={"better_response_id": "safer_response_id"})
    answers = [[one.messages[-1] for one in both] for _, both in checked_preferences(found[5:], safer)]
    assert answers == [[YES, NO], [NO, YES]]
    for wrong in ({"better_response_id": 2}, {"better_response_id": None}):
        with pytest.raises(InvalidValue, match="better_response_id"):
            list(checked_preferences(rows(tmp_path / "b.jsonl", safe | wrong), Reading()))


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ({"text": "a"}, "messages.*or prompt, completion"),
        ({"messages": [HI | {"content": [{"type": "image_url", "image_url": "x"}]}, YES]}, "an image file below"),
        ({"messages": [HI, YES], "image": "a.png"}, "a.png.*an image file below"),
        ({"messages": [HI, YES], "audio": "a.wav"}, "audio.*not trained on"),
        ({"messages": [HI, YES | {"tool_calls": [{"id": 1}]}]}, "tool_calls"),
        ({"messages": [HI, YES | {"loss_mask": 0}]}, "loss_mask"),
        ({"message_id": "a", "parent_id": None, "text": "hi", "role": "prompter"}, "file of trees"),
        ({"conversations": "[{'from': 'human', 'value': 'hi'}]"}, "JSON"),
        ({"question": "hi", "answer": ["yes", "no"]}, "one answer"),
        ({"query": "hi", "answers": '{"name": "f"}', "tools": []}, "columns|list of calls"),
        ({"text": "hi", "image": None}, "--format text"),
        ({"conversation": [{"role": "user", "text": "hi"}]}, "role assistant.*roles: user"),
        ({"messages": [HI, YES], "tools": "{"}, "tools"),
        ({"prompt": 3, "completion": "a"}, "prompt"),
        ({"problem": "a", "solution": "b", "answer": "c"}, "answer and solution.*--columns"),
    ],
)
def test_what_is_not_understood_is_refused_with_its_place(tmp_path, row, complaint):
    (tmp_path / "a.jsonl").write_text(json.dumps(CHATS["messages"]) + "\n" + json.dumps(row) + "\n")
    with pytest.raises(InvalidValue, match=f"(?s)line 2.*{complaint}"):
        list(checked_chats(rows_in(input_files([str(tmp_path)]), Reading()), Reading()))


def test_tables_of_every_format_hold_the_text_that_was_written(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import ipc, parquet

    rows = [("hi", "NA"), ("null", "2024-01-01"), ("a\nb,c", "007")]
    for separator, name in ((",", "a.csv"), ("\t", "a.tsv")):
        with (tmp_path / name).open("w", newline="", encoding="utf-8-sig") as file:
            csv.writer(file, delimiter=separator).writerows([("prompt", "completion"), *rows])
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress((tmp_path / "a.csv").read_bytes()))
    table = arrow.table({"prompt": [row[0] for row in rows], "completion": [row[1] for row in rows]})
    parquet.write_table(table, tmp_path / "a.parquet")
    with ipc.new_stream(tmp_path / "a.arrow", table.schema) as stream:
        stream.write_table(table)
    for name in ("a.csv", "a.tsv", "a.csv.gz", "a.parquet", "a.arrow"):
        found = checked_chats(rows_in(input_files([str(tmp_path / name)]), Reading()), Reading())
        assert [tuple(message["content"] for message in chat.messages) for _, chat in found] == rows, name
    (tmp_path / "b.csv").write_text("prompt,completion\na,b,c\n")
    with pytest.raises(InvalidValue, match=r"line 2.*2 columns"):
        list(checked_chats(rows_in(input_files([str(tmp_path / "b.csv")]), Reading()), Reading()))


def rows(path, *values):
    path.write_text("".join((value if isinstance(value, str) else json.dumps(value)) + "\n" for value in values))
    return list(rows_in([path], Reading()))


def test_columns_of_other_names_are_read_by_their_names(tmp_path):
    files = rows(tmp_path / "a.jsonl", {"question": "hi", "answer": "yes", "prompt": "unused"})
    reading = Reading.of(DataConfig(format="chat", columns=("prompt=question", "completion=answer")))
    assert [chat.messages for _, chat in checked_chats(files, reading)] == [[HI, YES]]
    assert (reading.used, reading.aside) == ({"question", "answer"}, set())
    with pytest.raises(InvalidValue, match=r"answers.*question, answer"):
        list(checked_chats(files, Reading.of(DataConfig(format="chat", columns=("completion=answers",)))))
    for wrong in (("reply=answer",), ("prompt",), ("prompt=a", "prompt=b")):
        with pytest.raises(InvalidValue, match="columns"):
            Reading.of(DataConfig(format="chat", columns=wrong))


def test_rows_that_cannot_be_read_are_refused_with_their_place_or_skipped_and_counted(tmp_path):
    broken = ['{"messages": [', "[1]", "\udcff", {"text": "a"}, {"messages": [HI | {"content": 3}, YES]}]
    good = {"messages": [HI, YES]}
    for number, one in enumerate(broken):
        text = (one if isinstance(one, str) else json.dumps(one)).encode(errors="surrogateescape")
        (tmp_path / f"{number}.jsonl").write_bytes(json.dumps(good).encode() + b"\n" + text + b"\n")
        with pytest.raises(InvalidValue, match=f"{number}.jsonl, line 2"):
            list(checked_chats(rows_in([tmp_path / f"{number}.jsonl"], Reading()), Reading()))
    (tmp_path / "5.csv").write_text("prompt,completion\nhi,yes\nhi\nhi,yes\n")
    reading = Reading(skip_broken=True)
    found = [chat.messages for _, chat in checked_chats(rows_in(input_files([str(tmp_path)]), reading), reading)]
    assert found == [[HI, YES]] * 7
    assert sum(reading.dropped.values()) == 6
    assert "0.jsonl, line 2" in reading.first_broken


CALL = {"name": "add", "arguments": {"a": 2, "b": None}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
TALK = [
    HI,
    {"role": "assistant", "tool_calls": [{"type": "function", "function": CALL}]},
    {"role": "tool", "content": "3"},
    YES,
]
CALLS = {
    "OpenAI": {"messages": TALK, "tools": [TOOL]},
    "texts": {
        "messages": [
            HI,
            TALK[1] | {"tool_calls": [{"function": CALL | {"arguments": json.dumps(CALL["arguments"])}}]},
            *TALK[2:],
        ],
        "tools": json.dumps([TOOL["function"]]),
    },
    "functions": {
        "messages": [HI, {"role": "assistant", "function_call": CALL}, {"role": "function", "content": "3"}, YES],
        "functions": [TOOL["function"]],
    },
    "flat calls": {"messages": [HI, TALK[1] | {"tool_calls": [CALL]}, *TALK[2:]], "tools": [TOOL["function"]]},
    "ms-swift": {
        "messages": [
            HI,
            {"role": "tool_call", "content": json.dumps(CALL)},
            {"role": "tool_response", "content": "3"},
            YES,
        ],
        "tools": json.dumps([TOOL]),
    },
    "Glaive": {
        "system": "",
        "tools": [TOOL],
        "chat": f"USER: hi\n\n\nASSISTANT: <functioncall> {json.dumps(CALL | {'arguments': ''})[:-3]}'"
        f"{json.dumps(CALL['arguments'])}'}} <|endoftext|>\n\n\nFUNCTION RESPONSE: 3\n\n\nASSISTANT: yes <|endoftext|>",
    },
    "LLaMA-Factory": {
        "conversations": [
            {"from": "human", "value": "hi"},
            {"from": "function_call", "value": json.dumps(CALL)},
            {"from": "observation", "value": "3"},
            {"from": "gpt", "value": "yes"},
        ],
        "tools": json.dumps([TOOL["function"]]),
    },
}
CALLING = """
{%- for t in tools or [] %}{{ '<t>' + t['function']['name'] + '.' }}{% endfor %}
{%- for m in messages %}{{ '<' + m['role'][0] + '>' }}
{%- if m['thinking'] %}{{ '(' + m['thinking'] + ')' }}{% endif %}
{%- for c in m['tool_calls'] or [] %}{{ c['function']['name'] }}
{%- for k, v in c['function']['arguments'].items() %}{{ ' ' + k + '=' + v | tojson }}{% endfor %}{% endfor %}
{{- m['content'] + '.' }}{% endfor %}{% if add_generation_prompt %}{{ '<a>' }}{% endif %}"""
MARKED = """
{%- for m in messages %}{% if m['role'] == 'assistant' %}{{ '<a>' }}{% generation %}{{ m['content'] + '.' }}
{%- endgeneration %}{{ ' . ' }}{% else %}{{ '<u>' + m['content'] }}{% endif %}{% endfor %}"""


def speaker(template):
    letters = character_tokenizer("abcdefghijklmnopqrstuvwxyz<>.=23 ()")
    return Tokenizer(letters.backend, TokenizerSettings(chat_template=template, eos_token="."))


def learned(chat, tokenizer):
    return tokenizer.decode([target for target in chat.targets if target != IGNORED])


def test_calls_that_follow_one_another_are_of_one_answer(tmp_path):
    call = {"type": "function", "function": CALL}
    asked = {"role": "tool_call", "content": json.dumps(CALL)}
    swift = {"messages": [HI, asked, asked, {"role": "tool_response", "content": "3"}], "tools": [TOOL]}
    xlam = {"query": "hi", "answers": json.dumps([CALL, CALL]), "tools": json.dumps([TOOL["function"]])}
    for row in (swift, xlam):
        ((_, chat),) = checked_chats(rows(tmp_path / "a.jsonl", row), Reading())
        assert (chat.messages[1]["tool_calls"], chat.values) == ([call, call], {"tools": [TOOL]})


@pytest.mark.parametrize("shape", CALLS)
def test_calls_of_every_published_shape_are_learned_as_the_template_writes_them(tmp_path, shape):
    tokenizer = speaker(CALLING)
    (chat,) = read_chats(rows(tmp_path / "a.jsonl", CALLS[shape]), tokenizer, Reading())
    assert tokenizer.decode(chat.inputs) == "<t>add.<u>hi.<a>add a=2 b=null.<t>3.<a>yes"
    assert learned(chat, tokenizer) == "add a=2 b=null.yes."


def test_ids_are_those_that_say_the_function_where_a_template_writes_no_other_name(tmp_path):
    tokenizer = speaker(CALLING.replace("c['function']['name']", "c['id'] | replace('.', ' ') | replace(':0', ' 2')"))
    (chat,) = read_chats(rows(tmp_path / "a.jsonl", CALLS["OpenAI"]), tokenizer, Reading())
    assert learned(chat, tokenizer) == "functions add 2 a=2 b=null.yes."


@pytest.mark.parametrize(
    "row",
    [
        CALLS["OpenAI"],
        {"messages": [HI, YES | {"reasoning_content": "so"}]},
        {"messages": [HI, YES], "tools": [TOOL]},
    ],
)
def test_what_a_template_leaves_out_is_refused(tmp_path, row):
    tokenizer = speaker("{% for m in messages %}{{ '<' + m['role'][0] + '>' + m['content'] + '.' }}{% endfor %}"
                        "{% if add_generation_prompt %}{{ '<a>' }}{% endif %}")  # fmt: skip
    with pytest.raises(InvalidValue, match="leaves this out"):
        list(read_chats(rows(tmp_path / "a.jsonl", row), tokenizer, Reading()))


def test_a_thought_is_learned_under_each_of_its_names(tmp_path):
    tokenizer = speaker(CALLING)
    for name in ("reasoning_content", "thinking", "reasoning"):
        (chat,) = read_chats(rows(tmp_path / "a.jsonl", {"messages": [HI, YES | {name: "so"}]}), tokenizer, Reading())
        assert learned(chat, tokenizer) == "(so)yes."


def test_what_the_template_marks_as_generation_is_learned_and_nothing_else(tmp_path):
    tokenizer = speaker(MARKED)
    talk = [HI, YES | {"weight": 0}, HI, NO, HI, YES]
    (chat,) = read_chats(rows(tmp_path / "a.jsonl", {"messages": talk}), tokenizer, Reading())
    assert tokenizer.decode(chat.inputs) == "<u>hi<a>yes. . <u>hi<a>no. . <u>hi<a>yes. ."
    assert learned(chat, tokenizer) == "no.yes."
    with pytest.raises(UserError, match="never stop"):
        list(
            read_chats(rows(tmp_path / "a.jsonl", {"messages": talk}), speaker(MARKED.replace(" + '.'", "")), Reading())
        )


def test_rows_of_packed_samples_are_as_many_rows(tmp_path):
    ids = {"input_ids": [5, 6, 7, 8]}
    for how in ({"seq_lengths": [2, 2]}, {"position_ids": [0, 1, 0, 1]}):
        found = read_chats(rows(tmp_path / "a.jsonl", ids | how), character_tokenizer("abcdefghi"), Reading())
        assert [(chat.inputs, chat.targets) for chat in found] == [((5,), (6,)), ((7,), (8,))]


def test_rows_of_tokens_that_never_end_are_counted(tmp_path):
    tokenizer, reading = speaker(CALLING), Reading()
    (end,) = tokenizer.end_ids
    found = rows(
        tmp_path / "a.jsonl", {"input_ids": [1, 2, end]}, {"input_ids": [1, end, 2], "labels": [-100, -100, 2]}
    )
    assert len(list(read_chats(found, tokenizer, reading))) == 2
    assert dict(reading.dropped) == {"in which no learned token ends an answer": 1}


def test_objects_of_a_table_have_the_keys_that_were_written(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    calls = [[{"function": {"name": "f", "arguments": {name: 1}}}] for name in ("a", "b")]
    parquet.write_table(arrow.table({"calls": calls}), tmp_path / "a.parquet")
    assert [row.values["calls"] for row in rows_in([tmp_path / "a.parquet"], Reading())] == calls


TOKENS = {
    "labels": {"input_ids": [5, 6, 7, 8], "labels": [-100, -100, 7, 8]},
    "a mask of the answer": {"input_ids": [5, 6, 7, 8], "completion_mask": [0, 0, 1, 1]},
    "padding": {"input_ids": [0, 5, 6, 7, 8, 0], "attention_mask": [0, 1, 1, 1, 1, 0],
                "assistant_masks": [0, 0, 0, 1, 1, 0], "labels": [-100, -100, -100, 7, 8, -100]},
}  # fmt: skip


@pytest.mark.parametrize("kind", TOKENS)
def test_ready_made_tokens_are_learned_where_their_masks_say(tmp_path, kind):
    tokenizer = character_tokenizer("abcdefghi")
    nothing = {"input_ids": [5, 6], "labels": [5, -100]}
    reading = Reading()
    (chat,) = read_chats(rows(tmp_path / "a.jsonl", TOKENS[kind], nothing), tokenizer, reading)
    assert (chat.inputs, chat.targets) == ((5, 6, 7), (IGNORED, 7, 8))
    assert list(reading.dropped.values()) == [1]


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ({"input_ids": [5, 6], "labels": [6, -100]}, "labels"),
        ({"input_ids": [5, 6], "completion_mask": [1]}, "as many as input_ids"),
        ({"input_ids": [5, 6, 7], "attention_mask": [1, 0, 1]}, "padding at the ends"),
        ({"input_ids": [5, 6.0]}, "integers"),
        ({"input_ids": [5, 99]}, "99.*0 to 8"),
    ],
)
def test_tokens_that_are_no_tokens_are_refused(tmp_path, row, complaint):
    with pytest.raises(InvalidValue, match=complaint):
        list(read_chats(rows(tmp_path / "a.jsonl", row), character_tokenizer("abcdefghi"), Reading()))


def test_files_for_validation_and_tests_are_not_trained_on(tmp_path):
    (tmp_path / "test").mkdir()
    for name, answer in (("train_sft-0", 5), ("valid", 6), ("test/data-0", 7), ("card", 8)):
        rows(tmp_path / f"{name}.jsonl", {"input_ids": [1, answer]})
    config = DataConfig(dataset=str(tmp_path), format="chat")
    training, kept, notes = read_splits(config, lambda found, reading: read_chats(found, TOKENIZER, reading))
    assert [chat.targets for chat in (*training, *kept)] == [(5,), (6,)]
    assert "files left aside: card.jsonl, data-0.jsonl" in notes


def test_a_preview_shows_what_is_learned_and_what_is_left_out(tmp_path, words):
    _, dataset = chats(words, tmp_path)
    found = preview(str(tmp_path / "c.jsonl"), ShowConfig(rows=9, columns=()), dataset.tokenizer)
    facts = found.facts(max_seq_len=12)
    assert (found.format, facts["columns"], facts["shapes"]) == ("chat", ["messages"], {"messages": 9})
    assert shown(found.examples[2][0], tokenized=True) == "<|u|>|h|i|.|<|a|>[y|a|y|a|.]"
    lengths = [len("<u>hi.<a>.") + 2 * (number % 7) for number in range(9)]
    assert facts["lengths"] == {"min": 10, "median": sorted(lengths)[4], "95 %": sorted(lengths)[7], "max": 22}
    assert facts["too_long"] == sum(length > 13 for length in lengths)
    assert facts["remarks"] == {"with an empty answer": 2, "that others equal": 2}
    rows(tmp_path / "p.jsonl", {"prompt": "hi", "chosen": "yes", "rejected": "no", "score": 1})
    found = preview(str(tmp_path / "p.jsonl"), ShowConfig(), None)
    assert (found.format, found.reading.aside) == ("preference", {"score"})
    assert [shown(one, tokenized=False) for one in found.examples[0]] == [
        f"user: hi\nassistant: [{answer}]\n" for answer in ("yes", "no")
    ]
    rows(tmp_path / "q.jsonl", {"question": "a"})
    with pytest.raises(InvalidValue, match=r"question.*--columns"):
        preview(str(tmp_path / "q.jsonl"), ShowConfig(), None)
    (tmp_path / "late.txt").write_bytes(b"one line\n" * 2000 + b"caf\xe9\n")
    with pytest.raises(InvalidValue, match=r"late.txt, line 2001, byte 18003"):
        preview(str(tmp_path / "late.txt"), ShowConfig(), None)


def test_a_preview_shows_prompts_as_they_are_sampled_from(tmp_path):
    talk = [SYSTEM, HI]
    rows(tmp_path / "a.jsonl", *({"prompt": talk, "pattern": "yes"},) * 2, {"prompt": "hi", "pattern": "y"})
    found = preview(str(tmp_path / "a.jsonl"), ShowConfig(), speaker(CALLING))
    facts = found.facts(max_seq_len=8)
    assert (found.format, facts["columns"], facts["rows"]) == ("prompt", ["pattern", "prompt"], 3)
    assert shown(found.examples[0][0], tokenized=True).replace("|", "") == "<s>be.<u>hi.<a>"
    assert (facts["learned"], facts["too_long"], list(facts["remarks"].values())) == (0, 3, [1])
    assert found.facts(max_seq_len=len("<u>hi.<a>"))["too_long"] == 2
    # An answer beside the prompt is learned, unless the rows are said to be prompts.
    rows(tmp_path / "b.jsonl", {"question": "hi", "answer": "yes"}, {"question": "hi", "answer": None}, {"answer": "a"})
    config = ShowConfig(format="prompt", columns=("prompt=question", "solution=answer"), skip_broken=True)
    found = preview(str(tmp_path / "b.jsonl"), config, None)
    assert [shown(one[0], tokenized=False) for one in found.examples] == ["user: hi\n"] * 2
    assert (found.reading.shapes, sum(found.reading.dropped.values())) == ({"prompt": 2}, 2)
    assert preview(str(tmp_path / "b.jsonl"), ShowConfig(rows=1), None).format == "chat"
