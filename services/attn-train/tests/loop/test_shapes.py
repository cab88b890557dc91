"""Conversations and preferences as they are published: which rows are taken, as what, and what is left aside."""

from __future__ import annotations

import csv
import gzip
import json

import pytest
from attn_core.errors import InvalidValue
from attn_train.data.conversations import checked_chats, checked_preferences
from attn_train.data.shapes import Notes

HI, YES, NO = (
    {"role": role, "content": text} for role, text in (("user", "hi"), ("assistant", "yes"), ("assistant", "no"))
)
SYSTEM = {"role": "system", "content": "be"}

CHATS = {
    "messages": {"messages": [HI, YES]},
    "a further column": {"messages": [HI, YES], "id": 3},
    "parts": {"messages": [HI | {"content": [{"type": "text", "text": "hi"}]}, YES]},
    "texts": {"prompt": "hi", "completion": "yes"},
    "messages in two columns": {"prompt": [HI], "completion": [YES]},
    "ShareGPT": {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}]},
    "Alpaca": {"instruction": "hi", "input": "", "output": "yes"},
    "nulls": {"messages": [HI | {"tool_calls": None, "name": None}, YES], "tools": None},
}


@pytest.mark.parametrize("shape", CHATS)
def test_conversations_of_every_published_shape_are_the_same(tmp_path, shape):
    (tmp_path / "a.jsonl").write_text(json.dumps(CHATS[shape]) + "\n")
    notes = Notes()
    ((_, messages),) = checked_chats(tmp_path, notes)
    assert messages == [HI, YES]
    assert notes.aside == ({"id"} if "id" in CHATS[shape] else set())


def test_the_input_of_an_instruction_follows_it_and_a_system_message_comes_first(tmp_path):
    row = {"instruction": "add", "input": "1 2", "output": "3", "system": "be"}
    (tmp_path / "a.json").write_text(json.dumps([row]))
    ((_, messages),) = checked_chats(tmp_path / "a.json", Notes())
    assert messages == [SYSTEM, {"role": "user", "content": "add\n\n1 2"}, {"role": "assistant", "content": "3"}]


ULTRA = {
    "prompt": "hi",
    "prompt_id": "x",
    "chosen": [HI, YES],
    "rejected": [HI, NO],
    "messages": [HI, YES],
    "score_chosen": 8.0,
    "score_rejected": 2.0,
}
PREFERENCES = {
    "messages": {"prompt": [HI], "chosen": [YES], "rejected": [NO]},
    "texts": {"prompt": "hi", "chosen": "yes", "rejected": "no"},
    "UltraFeedback": ULTRA,
    "the prompt within": {"chosen": [HI, YES], "rejected": [HI, NO]},
}


@pytest.mark.parametrize("shape", PREFERENCES)
def test_preferences_of_every_published_shape_are_the_same(tmp_path, shape):
    (tmp_path / "a.jsonl").write_text(json.dumps(PREFERENCES[shape]) + "\n")
    notes = Notes()
    ((_, both),) = checked_preferences(tmp_path, notes)
    assert both == [[HI, YES], [HI, NO]]
    assert notes.aside == (set(ULTRA) - {"prompt", "chosen", "rejected"} if shape == "UltraFeedback" else set())


def test_of_several_turns_only_what_differs_is_compared(tmp_path):
    turns = [HI, YES, {"role": "user", "content": "why"}]
    row = {"chosen": [*turns, YES], "rejected": [*turns, NO]}
    (tmp_path / "a.jsonl").write_text(json.dumps(row))
    ((_, both),) = checked_preferences(tmp_path, Notes())
    assert [[message.get("weight", 1) for message in one] for one in both] == [[1, 0, 1, 1]] * 2


def test_rows_that_prefer_nothing_are_counted(tmp_path):
    rows = [
        {"prompt": "hi", "chosen": "yes", "rejected": "yes"},
        {"prompt": "hi", "chosen": "yes", "rejected": " "},
        {"prompt": "hi", "chosen": "yes", "rejected": "no"},
        {"prompt": "hi", "chosen": "yes", "rejected": "never"},
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    notes = Notes()
    assert len(list(checked_preferences(tmp_path, notes))) == 2
    assert list(notes.dropped.values()) == [1, 1, 1]


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ({"text": "a"}, "messages; or conversations"),
        ({"messages": [HI | {"content": [{"type": "image_url", "image_url": "x"}]}, YES]}, "parts of text"),
        ({"messages": [HI, YES | {"tool_calls": [{"id": 1}]}]}, "tool_calls"),
        ({"prompt": 3, "completion": "a"}, "prompt"),
    ],
)
def test_what_is_not_understood_is_refused_with_its_place(tmp_path, row, complaint):
    (tmp_path / "a.jsonl").write_text(json.dumps(CHATS["messages"]) + "\n" + json.dumps(row) + "\n")
    with pytest.raises(InvalidValue, match=f"(?s)line 2.*{complaint}"):
        list(checked_chats(tmp_path, Notes()))


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
        found = [messages for _, messages in checked_chats(tmp_path / name, Notes())]
        assert [tuple(message["content"] for message in messages) for messages in found] == rows, name
    (tmp_path / "b.csv").write_text("prompt,completion\na,b,c\n")
    with pytest.raises(InvalidValue, match=r"line 2.*2 columns"):
        list(checked_chats(tmp_path / "b.csv", Notes()))
