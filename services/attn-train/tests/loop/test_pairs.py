"""Learning from pairs: which are read, how they are batched, what the loss is, and that a run goes on bit for bit."""

from __future__ import annotations

import gzip
import sys

import pytest
import torch
from attn_core.errors import InvalidValue, MissingPackage, UnknownName
from attn_schema.training import (
    CheckpointConfig,
    DataConfig,
    EvaluationConfig,
    ModelConfig,
    OptimizerConfig,
    TrainingConfig,
)
from attn_train.admission import check_config
from attn_train.checkpoint import CheckpointFolder
from attn_train.data.load import load_dataset
from attn_train.data.pairs import SAMPLE_FILE
from attn_train.data.synthetic import synthetic_pairs
from attn_train.model import configured
from attn_train.records import StopFlag
from attn_train.tasks.base import PADDED
from attn_train.tasks.seq2seq import Seq2SeqTask, bleu, tokenize_pairs, translate
from attn_train.trainer import NullReporter, Trainer

FIELDS = {"hidden_size": 12, "embedding": 8, "maxout": 8, "max_seq_len": 12, "max_encoder_len": 12, "dropout": 0.1}


def specification(steps=12, **data) -> TrainingConfig:
    return TrainingConfig(
        model=ModelConfig.of("rnnsearch", FIELDS),
        data=DataConfig(**({"dataset": "copy", "max_pairs": 300} | data)),
        optimizer=OptimizerConfig(
            steps=steps, batch_size=8, learning_rate=1e-2, min_learning_rate=1e-3, label_smoothing=0.1, weight_decay=0.0
        ),
        checkpoint=CheckpointConfig(save_steps=5),
        evaluation=EvaluationConfig(eval_steps=6, logging_steps=1, bleu_sentences=4),
        seed=3,
    )


def dataset(tmp_path, **data):
    return load_dataset(specification(**data), tmp_path, lambda _: None)


def model_of(config, pairs):
    torch.manual_seed(1)
    family, made = configured(config.model, pairs.model_fields)
    return family.build(made)


class Book(NullReporter):
    def __init__(self):
        self.values = {}

    def metrics(self, step, values):
        self.values.setdefault(step, {}).update(values)


@pytest.fixture
def pairs(tmp_path):
    return dataset(tmp_path)


def test_a_last_measurement_that_fails_is_logged_and_the_model_is_kept(tmp_path, pairs, monkeypatch):
    monkeypatch.setitem(sys.modules, "sacrebleu.metrics.bleu", None)
    config, lines = specification(steps=2), []
    book, folder = Book(), CheckpointFolder(tmp_path / "checkpoints")
    book.log = lines.append
    assert Trainer(model_of(config, pairs), pairs, config, checkpoints=folder).run(book, StopFlag()) is None
    assert any("the final evaluation failed: MissingPackage" in line and "model is kept" in line for line in lines)
    assert "loss" in book.values[2]
    assert folder.newest() is not None


def test_a_recipe_that_measures_bleu_is_refused_at_submission_without_the_package(tmp_path, monkeypatch):
    check_config(specification(), home=tmp_path)
    monkeypatch.setattr("attn_train.tasks.seq2seq.find_spec", lambda name: None)
    with pytest.raises(MissingPackage, match=r"bleu_sentences.* needs attn-train\[bleu\]"):
        check_config(specification(), home=tmp_path)


def test_batches_hold_pairs_of_about_one_length_padded_at_the_end(pairs):
    known, task = set(pairs.training), Seq2SeqTask(pairs, specification())
    spread = []
    for _ in range(40):
        source, keep, inputs, targets = task.next_batch()
        assert torch.equal(keep.long().cummin(-1).values, keep.long())
        lengths = (targets != PADDED).sum(-1)
        for row, length in enumerate(lengths.tolist()):
            whole = (*inputs[row, :length].tolist(), int(targets[row, length - 1]))
            assert (tuple(source[row][keep[row]].tolist()), whole) in known
            assert torch.equal(inputs[row, 1:length], targets[row, : length - 1])
        spread.append(int(lengths.max() - lengths.min()))
    everything = [len(target) for _, target in pairs.training]
    assert sorted(spread)[len(spread) // 2] < (max(everything) - min(everything)) / 2
    assert task.tokens > 0


def test_the_loss_is_cross_entropy_with_smoothed_targets_over_real_tokens(pairs):
    config = specification()
    model, task = model_of(config, pairs).eval(), Seq2SeqTask(pairs, config)
    source, keep, inputs, targets = batch = task.next_batch()
    chances = model(inputs, source, keep).log_softmax(-1)
    rows = [
        0.9 * -chances[b, t, targets[b, t]] + 0.1 * -chances[b, t].mean()
        for b in range(8)
        for t in range(targets.shape[1])
        if targets[b, t] != PADDED
    ]
    torch.testing.assert_close(task.loss(model, batch), torch.stack(rows).mean())


def test_an_interrupted_run_goes_on_bit_for_bit(pairs, tmp_path):
    config, whole, parts = specification(), Book(), Book()
    Trainer(model_of(config, pairs), pairs, config).run(whole, StopFlag())
    folder = CheckpointFolder(tmp_path / "checkpoints")

    class EnoughError(Exception):
        pass

    class Breaks(Book):
        def metrics(self, step, values):
            super().metrics(step, values)
            if step == 7:
                raise EnoughError

    broken = Breaks()
    with pytest.raises(EnoughError):
        Trainer(model_of(config, pairs), pairs, config, checkpoints=folder).run(broken, StopFlag())
    resumed = Trainer(model_of(config, pairs), pairs, config, checkpoints=folder)
    assert resumed.resume()
    assert resumed.step == 5
    resumed.run(parts, StopFlag())
    for step in range(6, 13):
        assert parts.values[step]["loss"] == whole.values[step]["loss"]
    assert parts.values[12]["validation_loss"] == whole.values[12]["validation_loss"]
    assert parts.values[12]["bleu"] == whole.values[12]["bleu"]


def test_a_model_learns_and_what_it_writes_is_measured(tmp_path):
    config = specification(steps=150)
    examples = [(f"{a} {b}", f"{b} {a}") for a in "abcd" for b in "abcd"]
    pairs = tokenize_pairs(examples * 4, examples, tokenizer="word", longest=(12, 12))
    model, book = model_of(config, pairs), Book()
    Trainer(model, pairs, config).run(book, StopFlag())
    written = translate(model, pairs.tokenizer, [source for source, _ in examples])
    right = sum(ours.split() == theirs.split() for ours, (_, theirs) in zip(written, examples, strict=True))
    assert right >= 12
    assert book.values[150]["bleu"] == pytest.approx(bleu(written[:4], [target for _, target in examples[:4]]))
    assert bleu(["the cat sat on the mat"], ["the cat sat on the mat"]) == pytest.approx(100)
    assert model.training


def test_pairs_are_read_from_columns_folders_and_compressed_files(tmp_path):
    (tmp_path / "pairs.tsv").write_text("a dog\tein hund\twho\na cat\teine katze\n\tleer\n" * 5, "utf-8")
    read = dataset(tmp_path, dataset=str(tmp_path / "pairs.tsv"), tokenizer="word")
    assert len(read.training) + len(read.validation) == 10
    for side, text in (("en", "a dog\na cat\n"), ("de", "ein hund\neine katze\n")):
        with gzip.open(tmp_path / f"train.{side}.gz", "wt") as file:
            file.write(text)
        (tmp_path / f"val.{side}").write_text(text)
    read = dataset(tmp_path, dataset=str(tmp_path), languages="de-en", tokenizer="byte_pairs:270")
    assert (len(read.training), list(read.texts)) == (2, [("ein hund", "a dog"), ("eine katze", "a cat")])


def test_the_shipped_sample_has_pairs_with_their_writers(tmp_path):
    read = dataset(tmp_path, dataset="tatoeba-en-zh", max_pairs=200, tokenizer="byte_pairs:400")
    assert read.tokenizer.vocab_size == 400
    with gzip.open(SAMPLE_FILE, "rt", encoding="utf-8") as file:
        rows = [line.split("\t") for line in file]
    assert len(rows) == 3000
    assert all(len(row) == 3 and "CC-BY 2.0 (France)" in row[2] for row in rows)


@pytest.mark.parametrize(
    ("content", "data", "error", "said"),
    [
        ("one column\n", {}, InvalidValue, "line 1"),
        (b"\xff\xfe\tx\n", {}, InvalidValue, "UTF-8"),
        ("a\tb\n", {"languages": "en-de"}, InvalidValue, "columns"),
        ("", {}, InvalidValue, "at least one pair"),
        ("a\tb\n", {"tokenizer": "byte_pairs:many"}, InvalidValue, "whole number"),
        (None, {"languages": ""}, InvalidValue, "FROM-TO"),
        (None, {"languages": "en-xx"}, InvalidValue, "train.xx"),
        (None, {"languages": "../x-en"}, InvalidValue, "FROM-TO"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path, content, data, error, said):
    path = tmp_path / "pairs.tsv"
    if content is None:
        path.mkdir()
        (path / "train.en").write_text("a\n")
    else:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(error, match=said):
        dataset(tmp_path, **{"dataset": str(path), "tokenizer": "word"} | data)


def test_sides_of_unequal_length_and_unknown_names_are_named(tmp_path):
    (tmp_path / "train.en").write_text("a\nb\n")
    (tmp_path / "train.de").write_text("a\n")
    with pytest.raises(InvalidValue, match="as many lines"):
        dataset(tmp_path, dataset=str(tmp_path), languages="en-de")
    with pytest.raises(UnknownName, match="dictionary"):
        dataset(tmp_path, dataset="dictionery")


def test_rules_are_what_they_say():
    for source, target in synthetic_pairs("reverse", 20, 0):
        assert target.split() == source.split()[::-1]
    pairs = synthetic_pairs("dictionary", 400, 0, longest=9)
    words = {}
    for source, target in pairs:
        order = source.split()
        for place in range(0, len(order), 2):
            order[place : place + 2] = order[place : place + 2][::-1]
        for one, other in zip(order, target.split(), strict=True):
            assert words.setdefault(one, other) == other
    assert len(set(words.values())) == len(words) == 40
    assert pairs == synthetic_pairs("dictionary", 400, 0, longest=9)


def test_languages_are_refused_where_there_are_no_pairs(config, changed, tmp_path, words):
    (tmp_path / "words.txt").write_text(words)
    asked = changed(config, data__dataset=str(tmp_path / "words.txt"), data__languages="en-de")
    with pytest.raises(InvalidValue, match="languages"):
        check_config(asked, home=tmp_path)


@pytest.mark.parametrize("name", ["val", "valid", "dev"])
def test_files_for_validation_are_found_by_their_usual_names_and_empty_sides_are_counted(tmp_path, name):
    lines = {"train": ["a b", "", "c d", "e"], name: ["a", "b"]}
    for part, texts in lines.items():
        for side in ("en", "de"):
            (tmp_path / f"{part}.{side}").write_text("".join(f"{text}\n" for text in texts))
    found = dataset(tmp_path, dataset=f"{tmp_path}/", languages="en-de", max_pairs=0, tokenizer="word")
    assert (len(found.training), len(found.validation), found.empty) == (3, 2, 1)
    (tmp_path / f"{name}.de").unlink()
    with pytest.raises(InvalidValue, match=rf"{name}\.de"):
        dataset(tmp_path, dataset=f"{tmp_path}/", languages="en-de", max_pairs=0, tokenizer="word")
