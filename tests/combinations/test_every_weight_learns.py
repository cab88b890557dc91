"""Every weight of every mechanism learns from the first step of training: by the loss of the model, or by its own."""

from __future__ import annotations

import pytest
import torch
from attn_core import configure, installed
from attn_testing.laws.passes import auxiliary_loss

SCORE = {"score.query_weight", "score.key_weight", "score.bias", "score.vector"}
UNMOVED = {
    "hard": {"query.weight", "key.weight"},  # an arg max has no slope
    "sampled": {"query.weight", "key.weight"},  # nor has a draw, which takes the mean's place every other time
    "visual_hard": {"query.weight", "key.weight", *SCORE},  # likewise; learning by reward has tests of its own
    "routing_causal": {"query.weight"},  # so few tokens are each alone in a cluster
}


@pytest.mark.parametrize("name", [mechanism.name for mechanism in installed().mechanisms])
def test_all_weights_learn_from_the_first_step(name: str) -> None:
    mechanism = installed().mechanisms.get(name)
    torch.manual_seed(0)
    config = configure(mechanism, mechanism.sketch, hidden_size=16, num_heads=4)
    layer = mechanism.build(config).double().train()
    rows = torch.randn(2, 12, 16, dtype=torch.float64)
    source = (torch.randn(2, 5, 16, dtype=torch.float64),) if mechanism.only_cross else ()
    out = layer(rows, *source)
    ((out * torch.randn_like(out)).sum() + auxiliary_loss(layer)).backward()
    still = {each for each, weight in layer.named_parameters() if weight.grad is None or not weight.grad.any()}
    assert still <= UNMOVED.get(name, set())
