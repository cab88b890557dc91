"""The layer of PaTH attention (Yang et al. 2025, arXiv 2505.16381)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from attn_core import Attend, AttentionInputs, AttentionSpec, Fields, Heads, InnerAttention
from attn_core.kernels.base import batch_invariant
from attn_core.masking import LOWEST, allowed_pairs, of_query_heads, positions, shares, wide
from torch import Tensor, nn
from torch._higher_order_ops.scan import scan
from torch.nn.functional import logsigmoid, pad
from torch.utils.checkpoint import checkpoint

from attn_variants.attention.projections import by_heads, fresh_linear
from attn_variants.compute.norm import unit
from attn_variants.mechanisms.recurrence_layers import ShortConvolution


class Householder(NamedTuple):
    """The Householder-like matrices H_t = I - β_t w_t w_tᵀ of every token t, which transform queries.

    `direction` w [batch, num_kv_heads, key, size], of norm one or zero; `strength` β [batch, num_kv_heads, key].
    """

    direction: Tensor
    strength: Tensor


class Blocks(NamedTuple):
    """Tokens in blocks: [batch, num_kv_heads, blocks, token, size] each.

    The product of the matrices of a block maps a query q to q - (q·w) U, with U the `query_products`; `key_products` X
    give the change of the scores of the block's own keys (UT transform).
    """

    key: Tensor
    direction: Tensor
    key_products: Tensor
    query_products: Tensor


def path_scores(heads: Heads, query: Tensor, key: Tensor, paths: Householder, places: Tensor, block: int) -> Tensor:
    """q_iᵀ H_i H_{i-1} ... H_{j+1} k_j, [batch, heads, query, key]; entries above the diagonal are undefined.

    `query` [batch, heads, query, size] at `places` [batch or 1, query]; `key` [batch, num_kv_heads, key, size] at
    0, 1, ... Blocks of `block` tokens are processed from last to first; the product of a block's matrices is the
    identity minus `block` outer products (Yang et al. 2025, arXiv 2505.16381, section 3.2).
    """
    keys = key.shape[2]
    if keys == 0:
        return query.new_zeros(*query.shape[:3], 0)
    parts = Blocks(*(of_query_heads(heads, part) for part in in_blocks(key, paths, block)))
    columns: list[Tensor] = []
    for number in reversed(range(parts.key.shape[2])):
        tokens = torch.arange(number * block, (number + 1) * block, device=query.device)
        ahead = tokens > places[:, None, :, None]
        projections = (query @ parts.direction[:, :, number].transpose(-1, -2)).masked_fill(ahead, 0.0)
        columns.append(
            query @ parts.key[:, :, number].transpose(-1, -2) - projections @ parts.key_products[:, :, number]
        )
        query = query - projections @ parts.query_products[:, :, number]
    return torch.cat(columns[::-1], dim=-1)[..., :keys]


def scanned_scores(query: Tensor, key: Tensor, paths: Householder, places: Tensor) -> Tensor:
    """The result of `path_scores` for whole sequences, query by query, for graphs of any number of tokens. Keys and
    paths have the heads of the queries."""
    earlier = places[:, None, :, None] > torch.arange(key.shape[2], device=key.device)

    def one(turned: Tensor, token: list[Tensor]) -> tuple[Tensor, Tensor]:
        row, direction, strength, before = token
        along = (turned * direction[:, :, None]).sum(-1) * strength[..., None] * before
        turned = turned - along[..., None] * direction[:, :, None]
        return turned, (turned * row[:, :, None]).sum(-1)

    found: Tensor = scan(one, key, [query, *paths, earlier.to(query.dtype)], dim=2)[1]
    return found


def in_blocks(key: Tensor, paths: Householder, block: int) -> Blocks:
    """Cut keys and directions into blocks, and compute their products from one triangular system (UT transform)."""
    key, direction = split(key, block), split(paths.direction, block)
    strength = split(paths.strength[..., None], block)
    right_side = strength * torch.cat([(direction @ key.transpose(-1, -2)).tril(-1), direction], dim=-1)
    overlap = strength * (direction @ direction.transpose(-1, -2)).tril(-1)
    solved = torch.linalg.solve_triangular(overlap, right_side, upper=False, unitriangular=True)
    return Blocks(key, direction, solved[..., :block], solved[..., block:])


def split(rows: Tensor, block: int) -> Tensor:
    """Cut rows [batch, heads, key, size] into [batch, heads, blocks, token, size], padded with zeros at the end."""
    blocks = (rows.shape[2] + block - 1) // block
    return pad(rows, (0, 0, 0, blocks * block - rows.shape[2])).unflatten(2, (blocks, block))  # type: ignore[no-any-return, no-untyped-call]


@dataclass(frozen=True, eq=False)
class KeyBlocks:
    """The keys and matrices that queries of later blocks read, one tensor per block, repeated for all query heads.

    `keys` [batch, heads, token, size] are multiplied by the matrices from them to the end of their block, `passing`
    [batch, heads, size, size] is the product of all matrices of the block. `values` [batch, heads, token, value_size]
    and `key_padding_mask` [batch, token] (True for real tokens, None if all are) are those of the whole sequence, as
    are `fades` [batch, heads, token], the sums of all scaled log gates up to each token, None without gates.
    """

    keys: tuple[Tensor, ...]
    passing: tuple[Tensor, ...]
    values: Tensor
    key_padding_mask: Tensor | None
    fades: Tensor | None

    def attend(self, query: Tensor, own: Tensor, number: int) -> Tensor:
        """Outputs [batch, heads, token, value_size] of the queries of the block with index `number`.

        `query` [batch, heads, token, size] are multiplied by the matrices from the start of their block to them; `own`
        [batch, heads, token, token] are the scores within the block.
        """
        ahead = own.new_ones(own.shape[-2:], dtype=torch.bool).triu(1)
        # Masked before concatenation: the gradient of a slice of `scores` would hold one of all its columns in memory.
        columns = [own.masked_fill(ahead, LOWEST)]
        for earlier in reversed(range(number)):
            columns.append(query @ self.keys[earlier].transpose(-1, -2))
            if earlier:
                query = query @ self.passing[earlier]
        scores = torch.cat(columns[::-1], -1)
        keys = scores.shape[-1]
        if self.fades is not None:
            scores = scores + self.fades[:, :, keys - own.shape[-1] : keys, None] - self.fades[:, :, None, :keys]
        if self.key_padding_mask is None:
            return scores.softmax(-1) @ self.values[:, :, :keys]
        seen = pad(~ahead, (keys - own.shape[-1], 0), value=True)
        return shares(scores, self.key_padding_mask[:, None, None, :keys] & seen) @ self.values[:, :, :keys]


def path_attention(
    heads: Heads,
    rows: tuple[Tensor, Tensor, Tensor],
    paths: Householder,
    key_padding_mask: Tensor | None,
    block: int,
    fades: Tensor | None,
) -> Tensor:
    """Outputs [batch, heads, token, value_size] of whole sequences.

    `rows` are queries [batch, heads, token, size], keys and values [batch, num_kv_heads, token, size];
    `key_padding_mask` [batch, token] or None; `fades` are those of `KeyBlocks`. A query is multiplied by the matrices
    of its own block of `block` tokens, then by one product for each earlier block (Yang et al. 2025, arXiv 2505.16381,
    section 3.3). The backward pass recomputes one block of queries at a time, so that memory is linear in the length.
    """
    query, key, value = rows
    tokens = query.shape[2]
    if tokens == 0:
        return query.new_zeros(*query.shape[:3], value.shape[-1])
    parts = in_blocks(key, paths, block)
    transformed_keys = parts.key - parts.key_products.transpose(-1, -2) @ parts.direction
    one = torch.eye(query.shape[-1], dtype=query.dtype, device=query.device)
    passing = one - parts.direction.transpose(-1, -2) @ parts.query_products
    query = split(query, block)
    own_key, direction, key_products, query_products = (of_query_heads(heads, part) for part in parts)
    projections = (query @ direction.transpose(-1, -2)).tril()
    own = query @ own_key.transpose(-1, -2) - projections @ key_products
    missing = query.shape[2] * block - tokens
    key_blocks = KeyBlocks(
        of_query_heads(heads, transformed_keys).unbind(2),
        of_query_heads(heads, passing).unbind(2),
        of_query_heads(heads, pad(value, (0, 0, 0, missing))),
        None if key_padding_mask is None else pad(key_padding_mask, (0, missing)),
        None if fades is None else pad(fades, (0, missing)),
    )
    blocks = zip((query - projections @ query_products).unbind(2), own.unbind(2), range(query.shape[2]), strict=True)
    again = query.shape[2] > 1 and torch.is_grad_enabled() and not torch.compiler.is_compiling()
    out = [
        checkpoint(key_blocks.attend, *each, use_reentrant=False) if again else key_blocks.attend(*each)
        for each in blocks
    ]
    return torch.cat(out, 2)[:, :, :tokens]


class PathInner(InnerAttention, nn.Module):
    """Softmax attention whose queries are multiplied by the Householder-like matrices of all tokens after the key.

    Learned: `down` and `up`, the low-rank projection to directions, `convolution` of their last `taps` tokens, and
    `strength` (`nn.Linear`, zero bias), for β from 0 to 2; with a `forget_gate`, `forget` (`nn.Linear`, zero bias).
    Tokens are processed in blocks of `block`.
    """

    computes_itself = True

    def __init__(
        self, spec: AttentionSpec, *, hidden_size: int, forget_gate: bool, rank: int, taps: int, block: int
    ) -> None:
        super().__init__()
        heads = spec.heads
        self.spec = spec
        self.block = block
        self.down = fresh_linear(hidden_size, rank, bias=False)
        self.up = fresh_linear(rank, heads.key_value * heads.key_size, bias=False)
        self.convolution = ShortConvolution(heads.key_value * heads.key_size, taps)
        self.strength = fresh_linear(hidden_size, heads.key_value, bias=True)
        self.forget = fresh_linear(hidden_size, heads.query, bias=True) if forget_gate else None

    def remember(self, rows: Tensor, positions: Tensor) -> Fields:  # noqa: ARG002 -- the same everywhere
        """The cache fields of rows [..., hidden_size]: "direction" [..., num_kv_heads, key_size], before convolution,
        "strength" β [..., num_kv_heads], from 0 to 2, and with a gate "fade" [..., heads], its logarithm; the last two
        at least float32."""
        direction = by_heads(self.up(self.down(rows)), self.spec.heads.key_value)
        fade = {} if self.forget is None else {"fade": logsigmoid(wide(self.forget(rows)))}
        return {"direction": direction, "strength": 2 * wide(self.strength(rows)).sigmoid(), **fade}

    def forward(self, rows: Tensor, operands: AttentionInputs, attend: Attend) -> Tensor:
        """Outputs [batch, query, heads, value_size]."""
        apart = operands.query_positions is not None or operands.key_positions is not None
        apart = apart or torch.compiler.is_exporting()
        if not apart and operands.query.shape[1] == operands.key.shape[1] and not batch_invariant():
            return self.whole(operands)
        value = of_query_heads(self.spec.heads, wide(operands.value).transpose(1, 2))
        out = self.weights(rows, operands, attend) @ value
        return out.transpose(1, 2).to(operands.value.dtype)

    def whole(self, operands: AttentionInputs) -> Tensor:
        """The outputs of whole sequences, without holding the scores of all pairs in memory."""
        query, key, value = (wide(part).transpose(1, 2) for part in (operands.query, operands.key, operands.value))
        scaled = query * self.spec.heads.key_size**-0.5, key, value
        block = min(self.block, max(1, key.shape[2]))
        paths, fades = self.paths(operands), self.fades(operands)
        out = path_attention(self.spec.heads, scaled, paths, operands.key_padding_mask, block, fades)
        return out.transpose(1, 2).to(operands.value.dtype)

    def weights(self, rows: Tensor, operands: AttentionInputs, attend: Attend) -> Tensor:  # noqa: ARG002 -- computed here
        """Attention weights [batch, heads, query, key]."""
        heads = self.spec.heads
        query = wide(operands.query).transpose(1, 2) * heads.key_size**-0.5
        key = wide(operands.key).transpose(1, 2)
        block = min(self.block, max(1, key.shape[2]))
        places = positions(operands)[0]
        paths = self.paths(operands)
        if torch.compiler.is_exporting():
            paths = Householder(*(of_query_heads(heads, part) for part in paths))
            scores = scanned_scores(query, of_query_heads(heads, key), paths, places)
        else:
            scores = path_scores(heads, query, key, paths, places, block)
        fades = self.fades(operands)
        if fades is not None:
            at = places[:, None].expand(fades.shape[0], fades.shape[1], -1)
            scores = scores + fades.gather(2, at)[..., None] - fades[:, :, None]
        return shares(scores, allowed_pairs(self.spec.mask, operands))

    def fades(self, operands: AttentionInputs) -> Tensor | None:
        """The sums of the log gates of all cached tokens up to each, scaled like the scores, [batch, heads, key]; those
        of padding are 0. None without gates."""
        if self.forget is None:
            return None
        fade = wide(operands.fields["fade"])
        if operands.key_padding_mask is not None:
            fade = fade.masked_fill(~operands.key_padding_mask[..., None], 0.0)
        summed: Tensor = fade.cumsum(1).transpose(1, 2) * self.spec.heads.key_size**-0.5
        return summed

    def paths(self, operands: AttentionInputs) -> Householder:
        """The matrices of all cached tokens, at positions 0, 1, ...; those of padding are the identity."""
        direction, strength = wide(operands.fields["direction"]), wide(operands.fields["strength"])
        if operands.key_padding_mask is not None:
            direction = direction.masked_fill(~operands.key_padding_mask[:, :, None, None], 0.0)
            strength = strength.masked_fill(~operands.key_padding_mask[:, :, None], 0.0)
        convolved = self.convolution(direction.flatten(-2), None)[0]
        turned = unit(by_heads(convolved, self.spec.heads.key_value))
        return Householder(turned.transpose(1, 2), strength.to(turned.dtype).transpose(1, 2))
