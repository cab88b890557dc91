"""The loss on text that is not trained on."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from attn_train.loop.batches import Batches

IGNORED = -100
"""Targets that no loss looks at."""


def next_token_loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy, in nats a token, of `targets` [batch, tokens] after `inputs`, but for those `IGNORED`.

    Models that can find it without holding all logits do.
    """
    own = getattr(model, "next_token_loss", None)
    if own is not None:
        loss: Tensor = own(inputs, targets, IGNORED)
        return loss
    return functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), ignore_index=IGNORED)


def mean_loss(model: nn.Module, batches: Batches, count: int, done: Callable[[], None] = lambda: None) -> float:
    """The mean loss over `count` batches, without dropout; the model is left in the mode it was in.

    `done` is called after each batch.
    """
    training = model.training
    model.eval()
    device = next(model.parameters()).device
    total = 0.0
    with torch.inference_mode():
        for _ in range(count):
            inputs, targets = (part.to(device) for part in batches.draw())
            total += next_token_loss(model, inputs, targets).item()
            done()
    model.train(training)
    return total / count
