"""The oracle for kernels: attention of a spec by its definition. Slow, and evidently correct in float64."""

from __future__ import annotations

import torch
from attn_core import AttentionInputs, AttentionSpec
from torch import Tensor

from attn_testing.oracle.distributions import DISTRIBUTIONS, attention_weights
from attn_testing.oracle.modifiers import MODIFIERS, modified, value_additions
from attn_testing.oracle.pairing import allowed_pairs, places
from attn_testing.oracle.scores import SCORES, scores

__all__ = ["DISTRIBUTIONS", "MODIFIERS", "SCORES", "allowed_pairs", "attend", "places"]


def attend(spec: AttentionSpec, operands: AttentionInputs) -> Tensor:
    """The output [batch, query, heads, value_size], computed in the dtype of the operands."""
    groups = list(spec.heads.group_of)
    energies = scores(spec, operands)
    for modifier in spec.modifiers:
        energies = modified(spec, modifier, energies, operands)
    allowed = allowed_pairs(spec, operands).expand(energies.shape)
    weights = attention_weights(spec, energies, allowed, operands)
    out = torch.einsum("bhqk,bkhd->bqhd", weights, operands.value[:, :, groups])
    return out + value_additions(spec, weights, operands)
