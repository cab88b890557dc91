"""The loss on text that is not trained on."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from attn_train.loop.batches import Batches

IGNORED = -100
"""Targets that no loss looks at."""
TOKENS_AT_ONCE = 4096
"""Tokens of a text that are read together, in windows side by side."""


def next_token_loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy, in nats a token, of `targets` [batch, tokens] after `inputs`, but for those `IGNORED`.

    Models that can find it without holding all logits do.
    """
    own = getattr(model, "next_token_loss", None)
    if own is not None:
        loss: Tensor = own(inputs, targets, IGNORED)
        return loss
    return functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), ignore_index=IGNORED)


def text_loss(model: nn.Module, ids: Tensor, window: int) -> float:
    """The mean loss, in nats, of the tokens of a text [tokens], each after those before it in its window.

    Windows of so many tokens follow one another; the first token of the text follows none and is not judged.
    """
    inputs, targets = ids[:-1].long(), ids[1:].long()
    many = max(1, TOKENS_AT_ONCE // window) * window
    # Those that fill no window are one of their own.
    ends = [*range(many, len(targets), many), len(targets) // window * window, len(targets)]
    total = 0.0
    with torch.inference_mode():
        for start, end in pairwise([0, *ends]):
            if start < end:
                shape = (-1, min(window, end - start))
                loss = next_token_loss(model, inputs[start:end].view(shape), targets[start:end].view(shape))
                total += loss.item() * (end - start)
    return total / len(targets)


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
