"""Chosen blocks of whole sequences, each met by all who chose it at once."""

from __future__ import annotations

import torch
from attn_core.kernels.selected import KeyBlocks, SelectedBlocks
from attn_core.masking import LOWEST
from torch import Tensor

Part = tuple[Tensor, Tensor]
"""Outputs [..., query, value_size] over some keys, and logarithms [..., query] of the sums of their exponentials."""


def attend_whole(choices: SelectedBlocks, blocks: KeyBlocks) -> Tensor:
    """Outputs, as of `SelectedBlocksKernel.read`, where queries stand at 0, 1, ... and all keys are real; no
    gradients.
    """
    query, chosen, _ = choices
    lanes = zip(*(rows.flatten(0, 1) for rows in (query, chosen, blocks.key, blocks.value)), strict=True)
    out = torch.stack([lane(*parts) for parts in lanes])
    return out.reshape(*query.shape[:-1], out.shape[-1])


def lane(query: Tensor, chosen: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Outputs [query, shared, value_size] of one group of one sequence; its keys are [block, within, size]."""
    near, height = own(query, key, value)
    top = chosen.shape[-1] - 1
    far = chosen[:, 1:].flatten()
    if not bool((far >= 0).any()):
        return near
    seen, heights = others(query, far, key, value)
    shape = query.shape[0], top, query.shape[1]
    seen, heights = seen.reshape(*shape, seen.shape[-1]), heights.reshape(shape)
    shares = torch.cat([height[:, None], heights], dim=1).softmax(1)[..., None]
    return near * shares[:, 0] + seen.mul_(shares[:, 1:]).sum(1)


def own(query: Tensor, key: Tensor, value: Tensor) -> Part:
    """What queries [query, shared, size] see in their own blocks, up to themselves."""
    within, rest = key.shape[1], query.shape[0] % key.shape[1]
    whole = query.shape[0] // within
    parts = [within_blocks(query[: whole * within], key[:whole], value[:whole])] if whole else []
    if rest:
        last = (rows[whole : whole + 1, :rest] for rows in (key, value))
        parts.append(within_blocks(query[whole * within :], *last))
    outs, heights = zip(*parts, strict=True)
    return torch.cat(outs), torch.cat(heights)


def within_blocks(query: Tensor, key: Tensor, value: Tensor) -> Part:
    """The same where the queries fill their blocks."""
    shared = query.shape[1]
    tiles = torch.unflatten(query, 0, key.shape[:2]).transpose(1, 2)
    of_heads = (rows[:, None].expand(-1, shared, -1, -1) for rows in (key, value))
    out, heights = fused(tiles, *of_heads, causal=True)
    return out.transpose(1, 2).flatten(0, 1), heights.transpose(1, 2).flatten(0, 1)


def others(query: Tensor, far: Tensor, key: Tensor, value: Tensor) -> Part:
    """What queries see in earlier blocks, for each choice [query x top]; nothing, which weighs nothing, for -1."""
    tokens, shared, size = query.shape
    top = far.shape[0] // tokens
    order = far.argsort(stable=True)
    counts = (far + 1).bincount(minlength=len(key) + 1).tolist()
    rows = query.index_select(0, order[counts[0] :] // top)
    found, heights, start = [], [], 0
    for block, number in enumerate(counts[1:]):
        if number:
            some = rows[start : start + number].reshape(1, 1, number * shared, size)
            out, height = fused(some, key[block][None, None], value[block][None, None], causal=False)
            found.append(out.reshape(number, shared, -1))
            heights.append(height.reshape(number, shared))
            start += number
    # Where each choice stands among those that were met; one that is none takes the first, and weighs nothing.
    places = order.argsort() - counts[0]
    none = (places < 0)[:, None]
    places = places.clamp(min=0)
    return (
        torch.cat(found).index_select(0, places),
        torch.cat(heights).index_select(0, places).masked_fill(none, LOWEST),
    )


def fused(query: Tensor, key: Tensor, value: Tensor, *, causal: bool) -> Part:
    """What scaled queries [batch, heads, query, size] see of keys of as many heads, by torch's flash attention.

    Where that is switched off, or sizes of keys and values differ, which it does not take, by products.
    """
    enabled = torch.backends.cuda.flash_sdp_enabled()  # type: ignore[no-untyped-call]
    if enabled and key.shape[-1] == value.shape[-1]:
        attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # noqa: SLF001 -- the only one with sums
        found: Part = attend(query, key, value, 0.0, causal, scale=1.0)
        return found
    scores = query @ key.transpose(-1, -2)
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(later, LOWEST)
    heights = scores.logsumexp(-1)
    return (scores - heights[..., None]).exp() @ value, heights
