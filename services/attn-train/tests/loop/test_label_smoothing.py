"""Targets spread over the vocabulary or classes in the training loss of every task, and in no validation loss.

The oracle is the definition: the share e of each target is 1/V on every token (Szegedy et al. 2016, section 7).
"""

from __future__ import annotations

import pytest
import torch
from attn_core import installed
from attn_models.decoder.decoder import Decoder
from attn_schema.decoder import DecoderConfig
from attn_train.tasks.base import PADDED
from attn_train.tasks.completion import completion_dataset
from attn_train.trainer import Trainer
from torch import nn

SHARE = 0.25


def smoothed(logits, targets, share):
    """The mean over rows that count, row by row: -(1 - e) log p(target) - e/V Σ log p."""
    total, count = 0.0, 0
    for row, target in zip(logits.flatten(0, -2).double(), targets.flatten().tolist(), strict=True):
        if target == PADDED:
            continue
        logs = row - row.exp().sum().log()
        total, count = total - (1 - share) * logs[target] - share * logs.mean(), count + 1
    return total / count


@pytest.fixture
def decoder(text):
    """A decoder that predicts one more token ahead, and caps its logits."""
    torch.manual_seed(0)
    fields = {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "max_seq_len": 8, "mechanism": "mha"}
    family = next(family for family in installed().models if family.name == "decoder")
    made = family.configure({**fields, "vocab_size": text.tokenizer.vocab_size, "final_logit_softcapping": 5.0})
    assert isinstance(made, DecoderConfig)
    model = family.build(made)
    assert isinstance(model, Decoder)
    return model.eval()


def test_a_decoder_s_loss_is_the_definition_s(decoder, text, config, changed):
    task = text.task(changed(config, optimizer__label_smoothing=SHARE))
    tokens, targets = task.next_batch()
    expected = smoothed(decoder(tokens), targets, SHARE)
    torch.testing.assert_close(task.loss(decoder, (tokens, targets)).double(), expected, rtol=1e-5, atol=1e-6)
    assert abs(expected - smoothed(decoder(tokens), targets, 0.0)) > 1e-3


def test_a_completion_s_loss_is_the_definition_s_over_what_is_to_be_written(config, changed):
    pairs = [("a b", "b a"), ("c", "c")]
    made = completion_dataset(pairs, validation=0.0, max_length=8)
    model = nn.Sequential(nn.Embedding(made.tokenizer.vocab_size, 4), nn.Linear(4, made.tokenizer.vocab_size))
    task = made.task(changed(config, optimizer__label_smoothing=SHARE))
    tokens, targets = task.next_batch()
    expected = smoothed(model(tokens), targets, SHARE)
    torch.testing.assert_close(task.loss(model, (tokens, targets)).double(), expected, rtol=1e-5, atol=1e-6)


def test_validation_is_not_smoothed(bigram, text, config, changed):
    plain, smooth = (Trainer(bigram(), text, changed(config, optimizer__label_smoothing=e)) for e in (0.0, SHARE))
    assert plain.validation_loss(2) == smooth.validation_loss(2)
