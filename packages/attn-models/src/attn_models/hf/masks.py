"""What transformers' masks say, in positions and real keys."""

from __future__ import annotations

from typing import Any

import torch
from attn_core.errors import Incompatible
from torch import Tensor


def whole_mask(*arguments: Any, **words: Any) -> Tensor:
    """The mask [batch, 1, query, key], bool, True where a query sees a key; never left out, whatever it allows."""
    from transformers.masking_utils import sdpa_mask

    mask: Any = sdpa_mask(*arguments, **words | {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False})
    return mask  # type: ignore[no-any-return]


def read_mask(mask: Tensor | None, *, causal: bool, window: int | None) -> tuple[Tensor, Tensor]:
    """The positions of queries [batch, query] and which keys are real [batch, key]; keys stand at 0, 1, ...

    `window` is how many tokens a query sees, itself among them, where the model says so. Raises `Incompatible` for a
    mask that says anything else, such as packed sequences: it must not be passed over.
    """
    if mask is None:
        raise Incompatible("transformers gave no mask; register with attn_models.hf, which registers masks as well")
    if mask.dtype != torch.bool or mask.ndim != 4 or mask.shape[1] != 1:
        raise Incompatible(f"a mask {list(mask.shape)} of {mask.dtype} is not one of booleans for all heads")
    seen = mask[:, 0]
    places = torch.arange(seen.shape[2], device=mask.device)
    keep = seen.any(1)
    if causal:
        # The last key that a query sees is its own.
        query = torch.where(seen, places, 0).amax(-1)
        said = keep[:, None] & (places <= query[..., None])
        said = said & (places > query[..., None] - window) if window else said
    else:
        query = torch.arange(seen.shape[1], device=mask.device).expand(seen.shape[0], -1)
        said = keep[:, None].expand_as(seen)
    # Queries that are padding see nothing or too much; nobody reads what they get.
    if not torch.equal(said & seen.any(-1, keepdim=True), seen):
        raise Incompatible("the model's mask is not causal, a window or padding; mechanisms have no place for it")
    return query, keep
