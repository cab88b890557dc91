"""Labelled texts: files, labels that were never seen, and that labels of short and long texts are learned."""

from __future__ import annotations

import gzip
import random

import pytest
import torch
from attn_core.errors import InvalidValue, UnknownName
from attn_models.loading.encoders import load_classifier
from attn_schema.training import DataConfig, ModelConfig, OptimizerConfig, TrainingConfig
from attn_train.data.labels import load_labels, questions, read_labels
from attn_train.evaluation import evaluate
from attn_train.records import StopFlag
from attn_train.tasks.token_classification import collate
from attn_train.trainer import Trainer
from attn_train.worker import build_model

FIELDS = {"hidden_size": 32, "num_layers": 1, "num_heads": 2, "intermediate_size": 32, "max_seq_len": 24}


def texts(count, words, seed):
    """Lines LABEL<tab>TEXT: one word in ten of each text, good or bad, is its label."""
    drawn = random.Random(seed)
    rows = []
    for _ in range(count):
        row, label = [drawn.choice("abcdefg") for _ in range(words)], drawn.choice(["bad", "good"])
        for place in drawn.sample(range(words), max(1, words // 10)):
            row[place] = label
        rows.append(f"{label}\t{' '.join(row)}\n")
    return "".join(rows)


def spec(path, steps, **fields):
    return TrainingConfig(
        model=ModelConfig.of("text_classifier", FIELDS | fields),
        data=DataConfig(dataset=str(path), tokenizer="word"),
        optimizer=OptimizerConfig(
            steps=steps, batch_size=16, learning_rate=5e-3, min_learning_rate=1e-3, warmup_steps=min(5, steps)
        ),
    )


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"mechanism": "longformer", "options": {"window": 8}, "max_seq_len": 100},
        {"mechanism": "linformer", "options": {"rank": 8}, "max_seq_len": 100},
    ],
    ids=["short", "long by longformer", "long by linformer"],
)
def test_labels_are_learned_from_a_word_that_the_weights_name(record, tmp_path, fields):
    words = fields.get("max_seq_len", 10)
    (tmp_path / "train.tsv").write_text(texts(400, words, 0))
    (tmp_path / "val.tsv.gz").write_bytes(gzip.compress(texts(40, words, 1).encode()))
    config = spec(tmp_path, 100, **fields)
    dataset = load_labels(config.data, words, "word")
    torch.manual_seed(0)
    model = build_model(config, dataset)
    Trainer(model, dataset, config).run(record(), StopFlag())
    folder = dataset.save(tmp_path / "m", model)
    (tmp_path / "test.tsv").write_text(texts(40, words, 2))
    assert evaluate(folder, str(tmp_path / "test.tsv"), tmp_path) == {"texts": 40.0, "accuracy": 1.0}
    again, names, tokenizer = load_classifier(folder)
    assert names == ["bad", "good"]
    batch = collate(dataset.validation)
    with torch.inference_mode():
        torch.testing.assert_close(again(*batch[:-1]), model.eval()(*batch[:-1]))
        weights = again.weights(*batch[:2])
    torch.testing.assert_close(weights.sum(-1), torch.ones(40))
    if not fields:
        telling = {tokenizer.encode(name)[0] for name in names}
        found = [int(tokens[row.argmax()]) in telling for tokens, row in zip(batch[0], weights, strict=True)]
        assert sum(found) > 20  # of 40 by chance 4


def test_padding_changes_no_label(tmp_path):
    (tmp_path / "t.tsv").write_text(texts(30, 5, 0) + texts(30, 9, 1))
    dataset = load_labels(DataConfig(dataset=str(tmp_path / "t.tsv")), 24, "word")
    model = build_model(spec(tmp_path / "t.tsv", 1), dataset).eval()
    short = min(dataset.training, key=lambda one: len(one.tokens))
    long = max(dataset.training, key=lambda one: len(one.tokens))
    alone, padded = (model(*collate(batch)[:2])[0] for batch in ([short], [short, long]))
    torch.testing.assert_close(alone, padded)


def test_texts_are_cut_at_the_context_and_that_is_said(tmp_path):
    (tmp_path / "t.tsv").write_text(texts(30, 12, 0))
    dataset = load_labels(DataConfig(dataset=str(tmp_path / "t.tsv")), 8, "word")
    assert {len(one.tokens) for one in dataset.training} == {8}
    assert "30 were cut" in dataset.summary


@pytest.mark.parametrize(
    ("text", "said"),
    [("good a b\n", "LABEL"), ("\tno label\n", "LABEL"), ("good\ta\ngood\tb\n", "two labels"), ("", "two labels")],
)
def test_files_that_are_not_labelled_texts_are_refused(tmp_path, text, said):
    (tmp_path / "t.tsv").write_text(text)
    with pytest.raises(InvalidValue, match=said):
        load_labels(DataConfig(dataset=str(tmp_path / "t.tsv"), validation_fraction=0.0), 8, "word")


def test_a_label_that_was_never_seen_is_refused_by_name(record, tmp_path):
    (tmp_path / "train.tsv").write_text(texts(30, 5, 0))
    (tmp_path / "dev.tsv").write_text("ugly\ta b\n")
    with pytest.raises(InvalidValue, match="ugly"):
        load_labels(DataConfig(dataset=str(tmp_path)), 8, "word")
    config = spec(tmp_path / "train.tsv", 1)
    dataset = load_labels(config.data, 24, "word")
    folder = dataset.save(tmp_path / "m", build_model(config, dataset))
    with pytest.raises(InvalidValue, match="ugly"):
        evaluate(folder, str(tmp_path / "dev.tsv"), tmp_path)
    with pytest.raises(UnknownName, match="labelled texts"):
        load_labels(DataConfig(dataset="anwers"), 8, "word")


def test_the_included_questions_are_those_with_a_question_mark():
    found = questions()
    assert sum(one.label == "question" for one in found) == 484
    assert all(one.text[-1] not in ".?" or one.text.endswith("..") for one in found[:500])
    assert read_labels([]) == []
