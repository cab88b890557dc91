"""Masked tokens: how many, how, and that guessing them is learned and measured."""

from __future__ import annotations

import pytest
import torch
from attn_core.errors import InvalidValue
from attn_models.loading.encoders import load_masked
from attn_models.loading.sentences import load_sentence_encoder
from attn_schema.training import DataConfig, ModelConfig, OptimizerConfig, TrainingConfig
from attn_train.records import StopFlag
from attn_train.tasks.language_modeling import tokenize
from attn_train.tasks.masked_language_modeling import MaskedTextDataset, Masking, masked_logits, masked_metrics
from attn_train.trainer import Trainer
from attn_train.worker import build_model

FIELDS = {"hidden_size": 64, "num_layers": 1, "num_heads": 2, "intermediate_size": 64, "max_seq_len": 12}


@pytest.fixture
def dataset(words):
    return MaskedTextDataset.of(tokenize(words))


def masked_spec(steps, **fields):
    return TrainingConfig(
        model=ModelConfig.of("masked_lm", FIELDS | fields),
        data=DataConfig(dataset="/nowhere"),
        optimizer=OptimizerConfig(
            steps=steps, batch_size=32, learning_rate=5e-3, min_learning_rate=5e-4, warmup_steps=1
        ),
    )


def test_fifteen_percent_are_chosen_and_eight_ninths_of_the_changed_are_hidden():
    tokens = torch.arange(50_000) % 997
    tokenizer = MaskedTextDataset.of(tokenize("abc")).tokenizer
    masking = Masking(tokens, tokenizer, context=100, batch=400, seed=1)
    masking._vocabulary = 10**9  # so that no token is replaced by itself
    shown, places, truth = masking.next_batch()
    assert places.shape == truth.shape == (400, 15)
    assert all(len(set(row)) == 15 for row in places.tolist())
    original = shown.scatter(1, places, truth)
    assert ((original[:, 1:] - original[:, :-1]) % 997 == 1).all()
    given = shown.gather(1, places)
    hidden, kept = (given == tokenizer.mask_id), (given == truth)
    assert hidden.float().mean().item() == pytest.approx(0.8, abs=0.02)
    assert kept.float().mean().item() == pytest.approx(0.1, abs=0.02)


def test_equal_seeds_mask_alike(dataset):
    one, two, other = (
        Masking(dataset.text.training, dataset.tokenizer, context=20, batch=4, seed=seed).next_batch()
        for seed in (1, 1, 2)
    )
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    assert not torch.equal(one[0], other[0])


def test_guesses_are_the_whole_models_logits_at_the_places(dataset):
    model = build_model(masked_spec(1), dataset)
    batch = dataset.task(masked_spec(1)).next_batch()
    logits = model(batch[0])
    expected = torch.stack([row[places] for row, places in zip(logits, batch[1], strict=True)])
    torch.testing.assert_close(masked_logits(model, batch), expected)


def test_words_are_guessed_from_both_sides_and_the_folder_guesses_alike(dataset, record, tmp_path):
    config = masked_spec(160)
    model = build_model(config, dataset)
    Trainer(model, dataset, config).run(record(), StopFlag())
    found = dataset.task(config).final_metrics(model, lambda: None)
    # The likeliest character alone is right about one time in six.
    assert found["masked_accuracy"] > 0.5
    again, tokenizer = load_masked(dataset.save(tmp_path / "m", model))
    masking = Masking(dataset.text.validation, tokenizer, context=12, batch=8, seed=3)
    same = Masking(dataset.text.validation, tokenizer, context=12, batch=8, seed=3)
    drawn, alike = ([drawn.next_batch() for _ in range(3)] for drawn in (masking, same))
    assert masked_metrics(again, drawn) == masked_metrics(model, alike)
    assert load_sentence_encoder(tmp_path / "m").embed(["key value"]).shape == (1, 64)


def test_a_context_without_neighbours_is_refused(dataset):
    with pytest.raises(InvalidValue, match="at least 2 tokens"):
        Masking(dataset.text.training, dataset.tokenizer, context=1, batch=4, seed=1)


def test_without_text_for_validation_nothing_is_measured(words):
    dataset = MaskedTextDataset.of(tokenize(words, validation=0.0))
    task = dataset.task(masked_spec(1))
    model = build_model(masked_spec(1), dataset)
    assert task.validation_loss(model, 2, lambda: None) is None
    assert task.final_metrics(model, lambda: None) == {}


def test_byte_pairs_are_learned_from_what_is_trained_on(words):
    tokens = tokenize(words[:2000] + "ZZZZ" * 500, tokenizer="byte_pairs:300", validation=0.5)
    assert tokens.tokenizer.vocab_size <= 300
    assert tokens.tokenizer.decode(tokens.training.tolist()).startswith(words[:100])
    assert "ZZ" not in tokens.tokenizer.backend.get_vocab()
