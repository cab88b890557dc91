"""Cross-entropy of some rows of logits, and its gradients, as torch computes them."""

from __future__ import annotations

import torch
from attn_core.kernels.rowwise import Targets
from torch import Tensor
from torch.nn import functional


def capped(logits: Tensor, cap: float | None) -> Tensor:
    """cap · tanh(logits / cap), or the logits."""
    return logits if cap is None else cap * torch.tanh(logits / cap)


def mean_loss(logits: Tensor, ids: Tensor, targets: Targets) -> Tensor:
    """The mean, in nats, of `ids` [...] under logits [..., vocabulary], over those that are not ignored."""
    return functional.cross_entropy(
        capped(logits, targets.cap).flatten(0, -2),
        ids.flatten(),
        ignore_index=targets.ignored,
        label_smoothing=targets.smoothing,
    )


def losses(logits: Tensor, ids: Tensor, targets: Targets) -> Tensor:
    """Losses [rows], in float32 at least, of `ids` [rows] under logits [rows, vocabulary]."""
    return functional.cross_entropy(
        capped(wide(logits), targets.cap),
        ids,
        ignore_index=targets.ignored,
        label_smoothing=targets.smoothing,
        reduction="none",
    )


def judged(logits: Tensor, ids: Tensor, targets: Targets) -> tuple[Tensor, Tensor]:
    """The same, and the gradient of each row's loss [rows, vocabulary] in the type of the logits."""
    bounded = capped(wide(logits), targets.cap)
    counts = ids != targets.ignored
    known = ids.where(counts, 0)[:, None]
    logs = torch.log_softmax(bounded, dim=-1)
    found = -logs.gather(1, known)[:, 0] * (1 - targets.smoothing)
    if targets.smoothing:
        found -= targets.smoothing * logs.mean(-1)
    change = logs.exp_().sub_(targets.smoothing / logs.shape[-1])
    change.scatter_add_(1, known, change.new_full(known.shape, targets.smoothing - 1))
    if targets.cap is not None:
        change *= 1 - (bounded / targets.cap).square()
    return found.where(counts, 0), change.masked_fill_(~counts[:, None], 0).to(logits.dtype)


def wide(logits: Tensor) -> Tensor:
    """Logits in float32 at least."""
    return logits.float() if logits.dtype.itemsize < 4 else logits
