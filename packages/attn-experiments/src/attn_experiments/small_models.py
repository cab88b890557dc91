"""Small models of the installed families, and the training loop that all experiments share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from attn_core import installed
from torch import Tensor, nn

Batch = tuple[Tensor, ...]


def build(family: str, seed: int, **fields: Any) -> Any:
    """Build a model of a family with these config fields; its weights are initialised from the seed."""
    found = installed().models.get(family)
    torch.manual_seed(seed)
    return found.build(found.configure(fields))


def layer(mechanism: str, **shared: Any) -> Any:
    """Build an attention layer of a mechanism with these sizes; `options` has the mechanism's options."""
    from attn_core import configure

    found = installed().mechanisms.get(mechanism)
    return found.build(configure(found, shared.pop("options", None), **shared))


def learn(
    model: nn.Module,
    loss_of: Callable[[int], Tensor],
    steps: int,
    *,
    rate: float = 3e-3,
    warmup: int = 0,
    clip: float | None = 1.0,
) -> list[float]:
    """Train with AdamW for `steps` steps on `loss_of(step)`, and return the losses.

    The learning rate rises linearly over `warmup` steps and falls linearly to a tenth.
    """
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / max(warmup, 1), 1.0) * (1.0 - 0.9 * step / max(steps, 1))
    )
    losses = []
    for step in range(steps):
        loss = loss_of(step)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    model.eval()
    return losses


def next_token_loss(logits: Tensor, wanted: Tensor) -> Tensor:
    """Cross-entropy of logits [batch, tokens, vocabulary] with tokens [batch, tokens]."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten())


def weights_of(model: nn.Module) -> int:
    """The number of parameters of a model."""
    return sum(weight.numel() for weight in model.parameters())


def mean(values: Iterable[float]) -> float:
    """The mean of some numbers."""
    found = list(values)
    return sum(found) / len(found)
