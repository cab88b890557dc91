"""Text becomes tokens, and tokens become batches."""

from __future__ import annotations

import pytest
import torch
from attn_core.errors import CheckpointInvalid, InvalidValue
from attn_schema.text_files import files_of
from attn_schema.training import DataConfig
from attn_train.data.load import load_text
from attn_train.tasks.base import RandomWindows
from attn_train.tasks.language_modeling import read_text, tokenize


@pytest.mark.parametrize("text", ["hello world", "naïve — 😀 \n\t end", "a"])
def test_character_ids_are_those_of_the_tokenizer_and_give_the_text_back(text):
    tokens = tokenize(text, validation=0.0)
    assert tokens.training.tolist() == tokens.tokenizer.encode(text)
    assert tokens.tokenizer.decode(tokens.training.tolist()) == text
    assert len(tokens.validation) == 0


def test_the_end_of_the_text_is_kept_for_validation():
    tokens = tokenize("abcdefghij" * 10, validation=0.15)
    assert tokens.training.tolist() == [i % 10 for i in range(85)]
    assert tokens.validation.tolist() == [i % 10 for i in range(85, 100)]


def test_a_tokenizer_folder_is_used_for_a_text_of_many_lines(tmp_path):
    made = tokenize("abc\n").tokenizer
    for name, content in made.files().items():
        if isinstance(content, bytes):
            (tmp_path / name).write_bytes(content)
    text = "cab\n" * 25_000
    tokens = tokenize(text, tokenizer=str(tmp_path), validation=0.5)
    assert torch.cat([tokens.training, tokens.validation]).tolist() == made.encode("cab\n") * 25_000


def test_a_folder_without_a_tokenizer_and_an_empty_text_are_refused(tmp_path):
    with pytest.raises(CheckpointInvalid, match=r"tokenizer\.json"):
        tokenize("abc", tokenizer=str(tmp_path))
    with pytest.raises(InvalidValue, match="empty"):
        tokenize("")


def test_files_of_a_folder_are_joined_in_sorted_order_with_plain_line_ends(tmp_path):
    (tmp_path / "b.txt").write_bytes(b"two\r\n")
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\n")
    (tmp_path / ".DS_Store").write_bytes(b"\xff")
    assert read_text(files_of(tmp_path)) == "one\ntwo\n"
    assert read_text([tmp_path / "b.txt"]) == "two\n"


def test_a_file_that_is_not_utf_8_or_not_there_is_refused_by_name(tmp_path):
    (tmp_path / "bad.txt").write_bytes(b"ok\xff")
    with pytest.raises(InvalidValue, match=r"bad\.txt.*byte 2"):
        read_text([tmp_path / "bad.txt"])
    with pytest.raises(InvalidValue, match=r"none\.txt.*No such file"):
        read_text([tmp_path / "none.txt"])


def test_a_batch_is_windows_of_the_text_with_the_next_token_as_target():
    tokens = torch.arange(100, dtype=torch.int32)
    batches = RandomWindows(tokens, context=5, batch=50, seed=1)
    inputs, targets = batches.next_batch()
    assert inputs.shape == targets.shape == (50, 5)
    assert inputs.dtype == torch.int64
    assert torch.equal(targets, inputs + 1)
    assert torch.equal(inputs - inputs[:, :1], torch.arange(5).expand(50, 5))
    starts = set(torch.cat([batches.next_batch()[0][:, 0] for _ in range(100)]).tolist())
    assert starts == set(range(95))


def test_a_text_of_one_window_is_enough_and_a_shorter_one_is_refused():
    inputs, targets = RandomWindows(torch.arange(6), context=5, batch=2, seed=0).next_batch()
    assert inputs.tolist() == [[0, 1, 2, 3, 4]] * 2
    assert targets.tolist() == [[1, 2, 3, 4, 5]] * 2
    with pytest.raises(InvalidValue, match="5 tokens"):
        RandomWindows(torch.arange(5), context=5, batch=2, seed=0)


@pytest.mark.parametrize("tokenizer", ["character", "byte_pairs:270"])
def test_files_for_validation_are_measured_and_files_of_rows_are_read_alone(tmp_path, tokenizer):
    for name in ("train", "valid", "test"):
        (tmp_path / f"wiki.{name}.txt").write_text(f"{name} " * 30)
    config = DataConfig(dataset=str(tmp_path), tokenizer=tokenizer)
    found = load_text(config, tmp_path, lambda _: None)
    assert found.tokenizer.decode(found.training.tolist()) == "train " * 30
    assert found.tokenizer.decode(found.validation.tolist()) == "valid " * 30
    (tmp_path / "train.jsonl").write_text('{"text": "row"}\n' * 30)
    assert "left aside: wiki.test.txt, wiki.train.txt, wiki.valid.txt" in load_text(config, tmp_path, print).summary
    with pytest.raises(InvalidValue, match="without files of rows"):
        read_text(files_of(tmp_path))
