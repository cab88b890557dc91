"""The loss over texts kept for validation, in batches that are padded at the end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from attn_train.loop.evaluation import IGNORED
from attn_train.loop.lessons import VALIDATION_SEED, Done

PADDED = IGNORED
"""The target of what only fills a batch."""

Text = TypeVar("Text")


def validation_mean(
    model: nn.Module,
    kept: Sequence[Text],
    collated: Callable[[Sequence[Text]], tuple[Tensor, ...]],
    loss: Callable[[tuple[Tensor, ...]], Tensor],
    *,
    batch: int,
    batches: int,
    done: Done,
) -> float | None:
    """The mean `loss` a target over at most `batches` batches of texts, the same ones each time; None without texts.

    The last part of a collated batch are its targets. The model is left in the mode it was in.
    """
    if not kept:
        return None
    order = torch.randperm(len(kept), generator=torch.Generator().manual_seed(VALIDATION_SEED)).tolist()
    training, total, tokens = model.training, 0.0, 0
    model.eval()
    device = next(model.parameters()).device
    with torch.inference_mode():
        for start in range(0, min(len(kept), batches * batch), batch):
            parts = collated([kept[place] for place in order[start : start + batch]])
            count = int((parts[-1] != PADDED).sum())
            total += loss(tuple(part.to(device) for part in parts)).item() * count
            tokens += count
            done()
    model.train(training)
    return total / tokens
