"""Losses of padded rows, computed without padding and once for what rows share, are those of the whole batch."""

from __future__ import annotations

import pytest
import torch
from attn_core import Capability, installed
from attn_core.reinforce import samples_keys
from attn_models.decoder.decoder import Decoder
from attn_models.decoder.packing import packed_rows, packs
from attn_models.evaluation import IGNORED
from attn_models.losses import LOGITS
from cases import kind_of
from torch.nn import functional

CAUSAL = sorted(mechanism.name for mechanism in installed().mechanisms if mechanism.can(Capability.CAUSAL))
ROWS, LONGEST = 6, 20


def batch():
    """Padded conversations: three begin as others do, one ends where the other goes on, one has no target."""
    generator = torch.Generator().manual_seed(1)
    tokens, targets = torch.randint(1, 31, (2, ROWS, LONGEST), generator=generator)
    tokens[3:5, :9], tokens[1, :4] = tokens[:2, :9], tokens[0, :4]
    tokens[2] = tokens[0]
    for row, end in enumerate((20, 12, 15, 11, 10, 0)):
        targets[row, :5] = targets[row, end:] = IGNORED
    return tokens, targets


@pytest.mark.sweep(lambda name: kind_of(name))
@pytest.mark.parametrize("name", CAUSAL)
def test_losses_and_gradients_are_those_of_padded_rows(name, tiny):
    model = Decoder(tiny(mechanism=name)).double()
    if samples_keys(model):
        pytest.skip("draws keys")
    tokens, targets = batch()
    kept = targets != IGNORED
    plain = functional.cross_entropy(model(tokens)[kept], targets[kept], reduction="none")
    found = model.losses_at(tokens, targets)
    torch.testing.assert_close(found, plain)
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    scale = torch.linspace(-1, 2, len(plain), dtype=plain.dtype)
    each = [torch.autograd.grad((loss * scale).sum(), weights, allow_unused=True) for loss in (plain, found)]
    for one, other in zip(*each, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other)
    torch.testing.assert_close(model.next_token_loss(tokens, targets), plain.mean())


def test_different_tokens_are_computed_once(tiny):
    tokens, targets = batch()
    rows = packed_rows(tokens, targets != IGNORED, share=True)
    ends = (20, 12, 15, 11, 10)
    prefixes = {tuple(tokens[row, : n + 1].tolist()) for row, end in enumerate(ends) for n in range(end)}
    assert rows.tokens.numel() == len(prefixes) < sum(ends) == sum(rows.lengths)
    assert packed_rows(tokens, targets != IGNORED, share=False).tokens.numel() == sum(ends)
    assert packs(Decoder(tiny()), targets != IGNORED)


def test_losses_of_frozen_tables_hold_few_logits(monkeypatch, tiny):
    monkeypatch.setitem(LOGITS, "cpu", 4 * 31)
    model = Decoder(tiny(feed_forward="swiglu")).double()
    tokens, targets = batch()
    kept = targets != IGNORED
    model.requires_grad_(False)
    trained = model.blocks[0].feed_forward.up.weight.requires_grad_()
    losses = (
        model.losses_at(tokens, targets),
        functional.cross_entropy(model(tokens)[kept], targets[kept], reduction="none"),
    )
    scale = torch.linspace(-1, 2, len(losses[0]), dtype=losses[0].dtype)
    found, plain = (torch.autograd.grad((loss * scale).sum(), trained) for loss in losses)
    torch.testing.assert_close(losses[0], losses[1])
    torch.testing.assert_close(found, plain)
