"""Conversations: which tokens are learned, what is refused, and the losses of preferences and of a teacher."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from attn_core.errors import InvalidValue, UserError
from attn_models.evaluation import IGNORED
from attn_models.tokenizers import Tokenizer, character_tokenizer
from attn_models.tokenizers.learned import byte_pair_tokenizer
from attn_models.tokenizers.settings import TokenizerSettings
from attn_schema.training import DataConfig
from attn_train.data import conversations
from attn_train.data.reading import Reading
from attn_train.data.token_shards.inputs import input_files
from attn_train.tasks.distillation import distillation_loss
from attn_train.tasks.instruction_tuning import chat_dataset

TEMPLATE = (
    "{% for m in messages %}{{ '<' + m['role'][0] + '>' + m['content'] + '.' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<a>' }}{% endif %}"
)
ALPHABET = "<>abcdefghijklmnopqrstuvwxyz. ?!"


@pytest.fixture
def tokenizer() -> Tokenizer:
    """Characters, with a template that ends each message with a full stop."""
    plain = character_tokenizer(ALPHABET)
    return Tokenizer(plain.backend, TokenizerSettings(chat_template=TEMPLATE, eos_token="."))


def read_chats(path, tokenizer):
    return list(
        conversations.read_chats(conversations.rows_in(input_files([str(path)]), Reading()), tokenizer, Reading())
    )


def read_preferences(path, tokenizer):
    return list(
        conversations.read_preferences(conversations.rows_in(input_files([str(path)]), Reading()), tokenizer, Reading())
    )


def written(path: Path, *lines: object) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def said(*turns: str) -> list[dict[str, str]]:
    return [{"role": turn.partition(":")[0], "content": turn.partition(":")[2]} for turn in turns]


def test_answers_and_what_ends_them_are_learned_and_nothing_else(tmp_path: Path, tokenizer: Tokenizer) -> None:
    conversation = said("system:be", "user:hi", "assistant:yes", "user:why", "assistant:no")
    (chat,) = read_chats(written(tmp_path / "a.jsonl", {"messages": conversation}), tokenizer)
    assert tokenizer.decode(chat.inputs) == "<s>be.<u>hi.<a>yes.<u>why.<a>no"
    learned = [target for target in chat.targets if target != IGNORED]
    assert tokenizer.decode(learned) == "yes.no."
    # A target is the token after its input.
    whole = [*chat.inputs, chat.targets[-1]]
    assert all(target in (IGNORED, whole[place + 1]) for place, target in enumerate(chat.targets))


def weighted(weight: object, turn: str) -> list[dict[str, object]]:
    return [message | {"weight": weight} for message in said(turn)]


UNKNOWN = ["tool_calls", "loss", "prefix", "Weight"]
"""Keys that formats of the field have, and that would change what is learned if they were known, or have no texts."""


def test_answers_of_weight_0_are_said_but_not_learned(tmp_path: Path, tokenizer: Tokenizer) -> None:
    conversation = [*said("user:hi"), *weighted(0, "assistant:yes"), *said("user:why"), *weighted(1, "assistant:no")]
    conversation += [{"role": "assistant", "content": "so", "weight": None, "name": None}]
    (chat,) = read_chats(written(tmp_path / "a.jsonl", {"messages": conversation}), tokenizer)
    assert tokenizer.decode(chat.inputs) == "<u>hi.<a>yes.<u>why.<a>no.<a>so"
    assert tokenizer.decode([target for target in chat.targets if target != IGNORED]) == "no.so."


GOOD = {"messages": said("user:hi", "assistant:yes")}


def test_what_cannot_be_encoded_is_refused_and_not_learned_as_an_object(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """A template of texts writes a list of parts as Python does, in which half a character is spelled out."""
    broken = written(tmp_path / "a.jsonl", {"messages": said("user:hi", "assistant:ye\ud800s")})
    with pytest.raises(InvalidValue, match="lone surrogates"):
        read_chats(broken, tokenizer)


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "line 2.*JSON"),
        ("[]", "line 2.*an object with columns"),
        ({"text": "a"}, "line 2.*columns: 'text'.*messages.*prompt"),
        ({"messages": 3}, "line 2.*a list of messages"),
        ({"messages": []}, "line 2.*messages .empty"),
        ({"messages": [{"role": "user"}]}, "content"),
        ({"messages": ["hi"]}, "line 2"),
        ({"messages": said("user:hi")}, "line 2.*a message with the role assistant"),
        ({"messages": [*said("user:hi"), *weighted(0, "assistant:a")]}, "line 2.*weight is not 0"),
        ({"messages": [*weighted(1, "user:hi"), *said("assistant:a")]}, r"line 2.*messages\[0\].weight"),
        *(
            ({"messages": [*said("user:hi"), *weighted(weight, "assistant:a")]}, r"line 2.*messages\[1\].weight")
            for weight in (0.5, 2, -1, True, "0", [0])
        ),
        *(
            ({"messages": [*said("user:hi"), {"role": "assistant", "content": "a", key: "b"}]}, rf"line 2.*\.{key}:")
            for key in UNKNOWN
        ),
    ],
    ids=str,
)
def test_lines_that_are_no_conversations_are_refused_by_file_and_number(
    tmp_path: Path, tokenizer: Tokenizer, line: object, complaint: str
) -> None:
    with pytest.raises(InvalidValue, match=complaint):
        read_chats(written(tmp_path / "a.jsonl", GOOD, line), tokenizer)


SEPARATORS = "\u2028\u2029\x85"
"""Characters that JSON does not escape, and that some readers of lines take for the end of one."""


def test_a_conversation_keeps_all_its_characters_in_every_kind_of_folder(tmp_path: Path) -> None:
    backend = character_tokenizer(ALPHABET + SEPARATORS).backend
    tokenizer = Tokenizer(backend, TokenizerSettings(chat_template=TEMPLATE, eos_token="."))
    line = json.dumps({"messages": said(f"user:a{SEPARATORS}b", f"assistant:c{SEPARATORS}d")}, ensure_ascii=False)
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + line.encode() + b"\r\n" + line.encode())
    (tmp_path / ".DS_Store").write_bytes(b"\x00\x00\xff\xfe")
    both = read_chats(tmp_path, tokenizer)
    assert [tokenizer.decode(chat.inputs) for chat in both] == [f"<u>a{SEPARATORS}b.<a>c{SEPARATORS}d"] * 2


def test_files_that_are_no_text_and_tokenizers_without_template_are_refused(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    binary = tmp_path / "b.jsonl"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InvalidValue, match="UTF-8"):
        read_chats(binary, tokenizer)
    with pytest.raises(UserError, match="no chat template"):
        read_chats(written(tmp_path / "a.jsonl", GOOD), character_tokenizer(ALPHABET))


def test_a_template_that_rewrites_what_was_said_is_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    forgetful = "{{ messages | length }}" + TEMPLATE
    backend = character_tokenizer(ALPHABET + "0123456789").backend
    other = Tokenizer(backend, TokenizerSettings(chat_template=forgetful, eos_token="."))
    line = {"messages": said("user:hi", "assistant:yes", "user:a", "assistant:b")}
    with pytest.raises(InvalidValue, match="begins each answer with its generation prompt"):
        read_chats(written(tmp_path / "a.jsonl", line), other)


DEFAULT_SYSTEM = "{% if messages[0]['role'] != 'system' %}{{ '<s>be nice.' }}{% endif %}" + TEMPLATE


@pytest.mark.parametrize(
    ("template", "conversation", "inputs", "learned"),
    [
        (TEMPLATE, said("assistant:yes", "user:why"), "<a>yes.<u>why", "yes."),
        (DEFAULT_SYSTEM, said("assistant:yes"), "<s>be nice.<a>yes", "yes."),
        (
            DEFAULT_SYSTEM,
            said("assistant:yes", "user:<a>", "assistant:no"),
            "<s>be nice.<a>yes.<u><a>.<a>no",
            "yes.no.",
        ),
        (DEFAULT_SYSTEM, said("user:hi", "assistant:yes"), "<s>be nice.<u>hi.<a>yes", "yes."),
        (
            DEFAULT_SYSTEM.replace("m['content']", "m['content'] | trim"),
            said("assistant: yes "),
            "<s>be nice.<a>yes",
            "yes.",
        ),
        ("{{ 'abc' }}" + TEMPLATE, said("assistant:<a>x"), "abc<a><a>x", "<a>x."),
    ],
)
def test_what_a_template_writes_before_the_first_answer_is_not_learned(
    tmp_path: Path, template: str, conversation: list[dict[str, str]], inputs: str, learned: str
) -> None:
    tokenizer = Tokenizer(
        character_tokenizer(ALPHABET).backend, TokenizerSettings(chat_template=template, eos_token=".")
    )
    (chat,) = read_chats(written(tmp_path / "a.jsonl", {"messages": conversation}), tokenizer)
    assert tokenizer.decode(chat.inputs) == inputs
    assert tokenizer.decode([target for target in chat.targets if target != IGNORED]) == learned


@pytest.mark.parametrize(
    ("template", "conversation"),
    [
        # Without the prompt before an answer, nothing says where the first one begins.
        (TEMPLATE.replace("'<a>'", "'<b>'"), said("assistant:yes")),
        # No answer ends with the end token, so that a model would never stop.
        (TEMPLATE.replace("+ '.'", "+ '!'"), said("user:hi", "assistant:yes")),
    ],
)
def test_a_template_that_does_not_say_where_answers_begin_and_end_is_refused(
    tmp_path: Path, template: str, conversation: list[dict[str, str]]
) -> None:
    tokenizer = Tokenizer(
        character_tokenizer(ALPHABET).backend, TokenizerSettings(chat_template=template, eos_token=".")
    )
    with pytest.raises(UserError):
        read_chats(written(tmp_path / "a.jsonl", {"messages": conversation}), tokenizer)


def test_where_earlier_answers_are_rewritten_each_answer_is_a_conversation_of_its_own(tmp_path: Path) -> None:
    last = "{{ ('?' if loop.last and m['role'] == 'assistant' else '') + m['content'] + '.' }}"
    template = TEMPLATE.replace("+ m['content'] + '.' }}", "}}" + last)
    tokenizer = Tokenizer(
        character_tokenizer(ALPHABET).backend, TokenizerSettings(chat_template=template, eos_token=".")
    )
    conversation = said("user:hi", "assistant:yes", "user:why", "assistant:no")
    chats = read_chats(written(tmp_path / "a.jsonl", {"messages": conversation}), tokenizer)
    assert [tokenizer.decode(chat.inputs) for chat in chats] == ["<u>hi.<a>?yes", "<u>hi.<a>yes.<u>why.<a>?no"]
    learned = [tokenizer.decode([target for target in chat.targets if target != IGNORED]) for chat in chats]
    assert learned == ["?yes.", "?no."]


def test_no_token_reaches_from_the_prompt_into_the_answer(tmp_path: Path) -> None:
    """A token of two line breaks, one of the prompt's end and one that the answer begins with."""
    backend = byte_pair_tokenizer(["\n\n" * 50, "<u>hi.<a>\n\n"] * 20, 280).backend
    template = TEMPLATE.replace("'>' + m", "'>\\n' + m").replace("<a>", "<a>\\n")
    tokenizer = Tokenizer(backend, TokenizerSettings(chat_template=template, eos_token="."))
    conversation = said("user:hi", "assistant:\nyes", "user:why", "assistant:\n\nno")
    (chat,) = read_chats(written(tmp_path / "a.jsonl", {"messages": conversation}), tokenizer)
    prompt = tokenizer.encode_chat(said("user:hi"))
    assert list(chat.inputs[: len(prompt)]) == prompt
    assert tokenizer.decode([target for target in chat.targets if target != IGNORED]) == "\nyes.\n\nno."
    assert tokenizer.decode(chat.inputs) == "<u>\nhi.<a>\n\nyes.<u>\nwhy.<a>\n\n\nno"


def test_conversations_that_do_not_fit_are_counted_and_none_left_is_refused(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    long = {"messages": said("user:" + "a" * 50, "assistant:yes")}
    path = written(tmp_path / "a.jsonl", GOOD, long, GOOD)
    dataset = chat_dataset(DataConfig(dataset=str(path), validation_fraction=0.0), tokenizer, max_length=30)
    assert len(dataset.training) == 2
    assert "1 left out as too long" in dataset.summary
    with pytest.raises(InvalidValue, match="max_seq_len"):
        chat_dataset(DataConfig(dataset=str(written(tmp_path / "b.jsonl", long))), tokenizer, max_length=30)


def test_preferences_share_their_prompt_and_differ_in_what_is_learned(tmp_path: Path, tokenizer: Tokenizer) -> None:
    line = {"prompt": said("user:hi"), "chosen": said("assistant:yes"), "rejected": said("assistant:no")}
    (pair,) = read_preferences(written(tmp_path / "a.jsonl", line), tokenizer)
    learned = [
        tokenizer.decode([target for target in chat.targets if target != IGNORED])
        for chat in (pair.chosen, pair.rejected)
    ]
    assert learned == ["yes.", "no."]
    with pytest.raises(InvalidValue, match="rejected"):
        read_preferences(written(tmp_path / "b.jsonl", {name: line[name] for name in ("prompt", "chosen")}), tokenizer)


def test_the_loss_of_a_teacher_is_zero_for_itself_and_else_the_divergence() -> None:
    teacher = torch.tensor([[0.0, 1.0, 2.0], [3.0, 0.0, 0.0]])
    assert distillation_loss(teacher, teacher, 2.0).item() == pytest.approx(0.0, abs=1e-7)
    student = torch.zeros(2, 3)
    p = [[math.exp(x / 2) for x in row] for row in teacher.tolist()]
    p = [[x / sum(row) for x in row] for row in p]
    expected = 4 * sum(x * math.log(x * 3) for row in p for x in row) / 2
    assert distillation_loss(student, teacher, 2.0).item() == pytest.approx(expected, rel=1e-5)
