"""Longformer's global tokens, which attend with projections of their own."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from attn_core import AttentionInputs, AttentionSpec, Full, InnerAttention
from attn_core.errors import InvalidValue
from attn_core.inner import Attend
from torch import Tensor, nn

from attn_variants.attention.kernels import AttentionKernels
from attn_variants.attention.layer import SpecLayer
from attn_variants.compute import plain
from attn_variants.compute.dropout import with_dropout
from attn_variants.compute.plain import attention_weights
from attn_variants.tensor_masks import TensorMask

GLOBAL_OFFSET = 1
"""The offset of the random numbers for dropout of global rows, so that they differ from those of local rows."""


class LongformerLayer(SpecLayer):
    """A `SpecLayer` around `GlobalAttention` that also accepts different global tokens for each sequence."""

    only_spec = False
    takes_global_tokens = True

    def reset_parameters(self) -> None:
        """Initialise the projections; those of global tokens begin as copies of the others (Beltagy et al. 2020)."""
        super().reset_parameters()
        with torch.no_grad():
            for name in ("query", "key", "value"):
                getattr(self.inner, name).load_state_dict(getattr(self, name).state_dict())

    def forward(
        self,
        query: Tensor,
        source: Tensor | None = None,
        *,
        global_tokens: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        **others: Any,
    ) -> Tensor:
        """Compute attention over whole sequences [batch, token, hidden_size] -> [batch, token, hidden_size].

        `global_tokens` [batch, token], bool, is True for tokens that are global besides the positions of the config; it
        requires a mask of all pairs, so time and memory are quadratic in the length. `key_padding_mask` [batch, token],
        bool, True where a token is real. Raises `InvalidValue` for global tokens of another shape or dtype.
        """
        if global_tokens is None:
            return super().forward(query, source, key_padding_mask=key_padding_mask, **others)
        operands, near = self._of_each(query, source, key_padding_mask, global_tokens)
        local = plain.attend(near, with_dropout(operands, self))
        out = self.inner.replaced(local, query, with_dropout(operands, self), self._all_global(global_tokens))
        return self.output(out.flatten(-2))  # type: ignore[no-any-return]

    def weights(
        self,
        query: Tensor,
        source: Tensor | None = None,
        *,
        global_tokens: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        **others: Any,
    ) -> Tensor:
        """Attention weights [batch, heads, query, key]; see `forward` for the arguments."""
        if global_tokens is None:
            return super().weights(query, source, key_padding_mask=key_padding_mask, **others)
        operands, near = self._of_each(query, source, key_padding_mask, global_tokens)
        rows = self._all_global(global_tokens)[:, None, :, None]
        whole = attention_weights(self.inner.spec, self.inner.global_operands(query, operands, slice(None)))
        return torch.where(rows, whole, attention_weights(near, operands))

    def _of_each(
        self, rows: Tensor, source: Tensor | None, key_padding_mask: Tensor | None, global_tokens: Tensor
    ) -> tuple[AttentionInputs, AttentionSpec]:
        """The inputs of local attention, and its spec with a mask of the allowed pairs."""
        if global_tokens.shape != rows.shape[:2] or global_tokens.dtype != torch.bool:
            given = f"{global_tokens.dtype} {tuple(global_tokens.shape)}"
            raise InvalidValue.of("global_tokens", given, f"torch.bool {tuple(rows.shape[:2])}, [batch, token]")
        places = torch.arange(rows.shape[1], device=rows.device)
        masks = [self.spec.mask.of_head(head) for head in range(self.spec.mask.heads or 1)]
        near = torch.stack([mask.allows(places[:, None], places) for mask in masks])
        allowed = near | self._all_global(global_tokens)[:, None, None, :]
        spec = dataclasses.replace(self.spec, mask=TensorMask(tensor=allowed, base=Full()))
        return self._operands(rows, source, key_padding_mask), spec

    def _all_global(self, global_tokens: Tensor) -> Tensor:
        places = torch.tensor(self.inner.global_positions(global_tokens), dtype=torch.int64)
        return global_tokens.index_fill(1, places.to(global_tokens.device), value=True)


class GlobalAttention(nn.Module, InnerAttention):
    """Replaces the outputs at global positions by attention to all tokens with projections of its own.

    Learned: `query`, `key`, `value` (`nn.Linear` of `hidden_size` inputs), which begin as copies of the layer's own.
    """

    def __init__(self, spec: AttentionSpec, positions: tuple[int, ...], *, hidden_size: int, bias: bool) -> None:
        super().__init__()
        heads = spec.heads
        self.spec = dataclasses.replace(spec, mask=Full())
        self.positions = positions
        self.query = nn.Linear(hidden_size, heads.query * heads.key_size, bias=bias)
        self.key = nn.Linear(hidden_size, heads.key_value * heads.key_size, bias=bias)
        self.value = nn.Linear(hidden_size, heads.key_value * heads.value_size, bias=bias)
        self.use_kernel(None)

    def use_kernel(self, name: str | None) -> None:
        """Use the kernel of this name for global queries from now on; None chooses the cheapest."""
        self.kernels = AttentionKernels(self.spec, name)

    def forward(self, rows: Tensor, operands: AttentionInputs, attend: Attend) -> Tensor:
        """Outputs [batch, query, heads, value_size] for rows [batch, query, hidden_size]."""
        local = attend(operands)
        at = self.global_positions(rows)
        if not at:
            return local
        seen = self.kernels.run(self.global_operands(rows, operands, at))
        return local.index_copy(1, torch.tensor(at, device=rows.device), seen.to(local.dtype))

    def weights(self, rows: Tensor, operands: AttentionInputs, attend: Attend) -> Tensor:
        """Attention weights [batch, heads, query, key]; those of global queries use the global projections."""
        local = attend(operands)
        at = self.global_positions(rows)
        if not at:
            return local
        seen = attention_weights(self.spec, self.global_operands(rows, operands, at))
        return local.index_copy(2, torch.tensor(at, device=rows.device), seen)

    def replaced(self, local: Tensor, rows: Tensor, operands: AttentionInputs, global_tokens: Tensor) -> Tensor:
        """Replace the outputs of the global tokens of each sequence, `global_tokens` [batch, token], bool, in `local`.

        Global tokens are gathered and padded to the largest number of them in a sequence.
        """
        count = int(global_tokens.sum(1).max()) if global_tokens.numel() else 0
        if not count:
            return local
        first, index = global_tokens.to(torch.int8).topk(count, dim=1)
        some = rows.gather(1, index[..., None].expand(-1, -1, rows.shape[-1]))
        inputs = self.global_operands(rows, operands, slice(0))
        query = self.query(some).unflatten(-1, (self.spec.heads.query, self.spec.heads.key_size))
        seen = self.kernels.run(dataclasses.replace(inputs, query=query)).to(local.dtype)
        at = index[..., None, None].expand(seen.shape)
        return local.scatter(1, at, torch.where(first.bool()[..., None, None], seen, local.gather(1, at)))

    def global_positions(self, rows: Tensor) -> list[int]:
        """The global positions that lie within the sequence."""
        return [position for position in self.positions if position < rows.shape[1]]

    def global_operands(self, rows: Tensor, operands: AttentionInputs, at: list[int] | slice) -> AttentionInputs:
        """The inputs of global attention: queries at `at` [batch, global, heads, size], keys and values of all rows."""
        heads = self.spec.heads
        return AttentionInputs(
            query=self.query(rows[:, at]).unflatten(-1, (heads.query, heads.key_size)),
            key=self.key(rows).unflatten(-1, (heads.key_value, heads.key_size)),
            value=self.value(rows).unflatten(-1, (heads.key_value, heads.value_size)),
            key_padding_mask=operands.key_padding_mask,
            dropout=operands.dropout and dataclasses.replace(operands.dropout, offset=GLOBAL_OFFSET),
        )
