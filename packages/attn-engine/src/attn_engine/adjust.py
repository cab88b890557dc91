"""Changes to the logits of one row before a token is chosen."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attn_engine.sampling import Sampling


@dataclass(frozen=True, eq=False)
class Draw:
    """One row to choose for: the settings, the seed and the position of the new token.

    Where the settings need them: `seen` [vocabulary], bool, tokens that have occurred; `counts` [vocabulary], how often
    each was generated; `allowed` [vocabulary], bool, tokens that may come next.
    """

    sampling: Sampling
    seed: int
    position: int
    seen: Tensor | None = None
    counts: Tensor | None = None
    allowed: Tensor | None = None

    @property
    def plain(self) -> bool:
        """Whether `adjust` changes nothing."""
        return self.seen is self.counts is self.allowed is None and not self.sampling.logit_bias


def adjust(logits: Tensor, draw: Draw) -> Tensor:
    """Logits [vocabulary] after penalties, bias and what is not allowed, in this order; float32."""
    sampling = draw.sampling
    logits = logits.float()
    penalty = sampling.repetition_penalty
    if penalty != 1 and draw.seen is not None:
        punished = torch.where(logits > 0, logits / penalty, logits * penalty)
        logits = torch.where(draw.seen, punished, logits)
    if draw.counts is not None:
        logits = logits - sampling.frequency_penalty * draw.counts - sampling.presence_penalty * (draw.counts > 0)
    if sampling.logit_bias:
        ids = torch.tensor(list(sampling.logit_bias), device=logits.device)
        bias = torch.tensor(list(sampling.logit_bias.values()), dtype=logits.dtype, device=logits.device)
        logits = logits.index_add(0, ids, bias)
    if draw.allowed is not None:
        logits = logits.masked_fill(~draw.allowed, -torch.inf)
    return logits
