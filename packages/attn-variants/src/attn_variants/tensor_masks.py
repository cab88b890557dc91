"""Masks and biases that are given as tensors, one entry per pair of a query and a key.

They are data of one call, unlike the masks and modifiers of `attn_core`, which are configuration: two of them are equal
only if they are the same object, and kernels are chosen without reading their entries.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from attn_core import AttentionSpec, Causal, Full, Mask
from attn_core.errors import InvalidValue
from attn_core.modifiers import Modifier
from torch import Tensor


@dataclass(frozen=True, eq=False)
class TensorMask(Mask):
    """The pairs that both `base` and `tensor` allow.

    `tensor` is bool, broadcasts to [batch, num_heads, query_len, key_len] and is True where a query may attend to a key
    (the convention of `scaled_dot_product_attention`). Row i belongs to query i of the call and column j to key j. None
    is a placeholder for any tensor, used when a kernel is chosen.
    """

    tensor: Tensor | None
    base: Mask
    kind = "tensor"

    def allows(self, query: Any, key: Any) -> Any:
        """Bool [batch or 1, num_heads or 1, query_len, key_len].

        Raises `InvalidValue` if the tensor does not broadcast to these positions, or without a tensor.
        """
        if self.tensor is None or not isinstance(query, Tensor):
            raise InvalidValue.of("mask", "a tensor", "a mask with a rule, to evaluate single pairs")
        shape = (query.shape[-2], key.shape[-1])
        if any(given not in {1, wanted} for given, wanted in zip(self.tensor.shape[-2:], shape, strict=True)):
            raise InvalidValue.of("mask", tuple(self.tensor.shape), f"[..., {shape[0]}, {shape[1]}]")
        return self.tensor & self.base.allows(query, key)

    @property
    def lookahead(self) -> int | None:
        """The lookahead of the base mask."""
        return self.base.lookahead

    @property
    def heads(self) -> int | None:
        """The number of masks of the base mask, one per head; None if it is the same for all heads."""
        return self.base.heads

    @property
    def by_length(self) -> bool:
        """Whether the base mask depends on the number of keys."""
        return self.base.by_length

    @property
    def closed(self) -> bool:
        """Always False, as the entries are not read."""
        return False

    def over(self, keys: Any) -> Mask:
        """The mask over `keys` keys."""
        return TensorMask(self.tensor, self.base.over(keys))

    def of_head(self, head: int) -> Mask:
        """The mask of query head `head`."""
        tensor = self.tensor
        if tensor is not None and tensor.dim() > 2 and tensor.shape[-3] > 1:
            tensor = tensor[..., head : head + 1, :, :]
        return TensorMask(tensor, self.base.of_head(head))


@dataclass(frozen=True, eq=False)
class TensorBias(Modifier):
    """Adds `tensor`, which broadcasts to [batch, num_heads, query_len, key_len], to the scores.

    Entries must be finite: pairs that may not attend belong in a `TensorMask`. None is a placeholder for any tensor.
    """

    tensor: Tensor | None
    kind = "tensor_bias"
    splits_heads = False


ANY_BIAS = TensorBias(None)
"""The placeholder for every `TensorBias` when a kernel is chosen."""


@lru_cache(maxsize=256)
def any_tensor(base: Mask) -> TensorMask:
    """The placeholder for every `TensorMask` over this base mask when a kernel is chosen."""
    return TensorMask(None, base)


def causal_mask(mask: Mask | None, *, is_causal: bool) -> Mask:
    """Combine a mask with `Causal()` if `is_causal`; None is the full mask."""
    if not is_causal:
        return Full() if mask is None else mask
    return Causal() if mask is None or mask.kind == "full" else mask & Causal()


def kind_of(mask: Tensor | None) -> str:
    """The kind of a mask tensor for `with_placeholder`: "mask" if it is bool, "bias" if not, "" without one."""
    return "" if mask is None else "mask" if mask.dtype == torch.bool else "bias"


def with_placeholder(spec: AttentionSpec, kind: str) -> AttentionSpec:
    """The spec of `with_tensor` for any tensor of this kind: equal for calls that differ only in their tensors."""
    if not kind:
        return spec
    modifiers = (*spec.modifiers, ANY_BIAS) if kind == "bias" else spec.modifiers
    return dataclasses.replace(spec, mask=any_tensor(spec.mask), modifiers=modifiers)


def with_tensor(spec: AttentionSpec, mask: Tensor | None) -> AttentionSpec:
    """Add a mask tensor, as taken by `scaled_dot_product_attention`, to the spec; None changes nothing.

    A bool tensor is True where a query may attend. A floating-point tensor is added to the scores after the modifiers
    of the spec; entries of -inf hide a key. Both broadcast to [batch, num_heads, query_len, key_len]. Raises
    `InvalidValue` for other types.
    """
    if mask is None:
        return spec
    if mask.dtype == torch.bool:
        return dataclasses.replace(spec, mask=TensorMask(mask, spec.mask))
    if not mask.dtype.is_floating_point:
        raise InvalidValue.of("mask", str(mask.dtype), "a bool tensor (True may attend) or a floating-point bias")
    # A row of only -inf must give zeros, not NaN, as hidden keys do.
    hidden = mask == -torch.inf
    bias = TensorBias(mask.masked_fill(hidden, 0.0))
    return dataclasses.replace(spec, mask=TensorMask(~hidden, spec.mask), modifiers=(*spec.modifiers, bias))
