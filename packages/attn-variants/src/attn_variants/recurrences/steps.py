"""What a linear recurrence does at every token, as tensors."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Steps(NamedTuple):
    """The updates of a memory S [batch, heads, key_size, value_size] and what is read from it, for some tokens.

    Additive, where `strength` is None:   S_t = diag(e^decay_t) S_{t-1} + k_t v_t^T
    By the delta rule, with strength β:   S_t = S' + β_t k_t (v_t - S'^T k_t)^T with S' = diag(e^decay_t) S_{t-1}
    Read after the update in both cases:  o_t = S_t^T q_t

    `query` and `key` [batch, tokens, heads, key_size], `value` [batch, tokens, heads, value_size]; `decay`, natural
    logarithms, at most 0 and finite, [batch or 1, tokens, heads, key_size] a channel or [..., 1] a head, None where
    nothing is forgotten; `strength` [batch, tokens, heads]. All of one floating type.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    decay: Tensor | None = None
    strength: Tensor | None = None

    def kept(self, keep: Tensor | None) -> Steps:
        """The steps with those of padded tokens undone; `keep` [batch, tokens], bool, True where a token is real.

        A padded token neither writes nor lets anything fade; what it reads means nothing.
        """
        if keep is None:
            return self
        real = keep[:, :, None, None]
        return Steps(
            query=self.query,
            key=torch.where(real, self.key, 0),
            value=torch.where(real, self.value, 0),
            decay=None if self.decay is None else torch.where(real, self.decay, 0),
            strength=None if self.strength is None else torch.where(keep[:, :, None], self.strength, 0),
        )

    def nothing(self) -> Tensor:
        """An empty memory for these steps."""
        batch, _, heads, size = self.key.shape
        return self.key.new_zeros(batch, heads, size, self.value.shape[-1])
