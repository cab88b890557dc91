"""A linear recurrence by chunks: pairs within a chunk, the memory between chunks. The form for training.

Time and memory are linear in the tokens: tokens · (chunk + key_size · value_size / chunk) numbers a head.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from attn_core.kernels.recurrence import Steps
from torch import Tensor
from torch.nn.functional import pad

from attn_variants.recurrences.pairs import faded_pairs
from attn_variants.recurrences.scan import Product, prefixes


class Chunk(NamedTuple):
    """The steps of every chunk, [batch, chunks, heads, tokens of a chunk, size] each.

    `faded` are the sums of the log decays from the start of the chunk.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    faded: Tensor | None
    strength: Tensor | None


def chunked(steps: Steps, before: Tensor | None, chunk: int) -> tuple[Tensor, Tensor]:
    """What `recurrent` computes, with `chunk` tokens meeting pair by pair; `before` None is an empty memory."""
    if steps.key.shape[1] == 0:
        return steps.value, steps.nothing() if before is None else before
    part = _chunks(steps, chunk)
    out, after = _additive(part, before) if part.strength is None else _delta(part, part.strength, before)
    return out.transpose(2, 3).flatten(1, 2)[:, : steps.key.shape[1]], after


def _chunks(steps: Steps, chunk: int) -> Chunk:
    query, key, value, decay, strength = (
        None if part is None else _split(part, chunk)
        for part in (*steps[:4], None if steps.strength is None else steps.strength[..., None])
    )
    return Chunk(query, key, value, None if decay is None else decay.cumsum(-2), strength)  # type: ignore[arg-type]


def _split(rows: Tensor, chunk: int) -> Tensor:
    """[batch, chunks, heads, chunk, size] of [batch, tokens, heads, size], with rows of zeros at the end."""
    chunks = (rows.shape[1] + chunk - 1) // chunk
    padded = pad(rows, (0, 0, 0, 0, 0, chunks * chunk - rows.shape[1]))
    # Contiguous, or every product would copy it once more.
    return padded.reshape(rows.shape[0], chunks, chunk, *rows.shape[2:]).transpose(2, 3).contiguous()


def _additive(part: Chunk, before: Tensor | None) -> tuple[Tensor, Tensor]:
    """Outputs [batch, chunks, heads, tokens, value_size] and the memory after them."""
    own = torch.matmul(_late(part).transpose(-1, -2), part.value)
    if part.faded is None:
        until = own.cumsum(1) if before is None else own.cumsum(1) + before[:, None]
        start = _earlier(until, before)
    else:
        left = part.faded[..., -1, :].exp()[..., None]
        start, until = _memories(left, own, before, torch.mul)
    reach = faded_pairs(part.query, part.key, part.faded)
    return torch.matmul(reach, part.value).add_(torch.matmul(_early(part.query, part), start)), until[:, -1]


def _delta(part: Chunk, strength: Tensor, before: Tensor | None) -> tuple[Tensor, Tensor]:
    """The same for the delta rule, by the WY form (Yang et al. 2024, arXiv 2406.06484, §3.2; 2412.06464, §3.3).

    What a chunk writes is U - W S for the memory S before it, where U and W solve one triangular system.
    """
    size = part.value.shape[-1]
    overlap = strength * faded_pairs(part.key, part.key, part.faded).tril(-1)
    told = strength * torch.cat([part.value, _early(part.key, part)], dim=-1)
    solved = torch.linalg.solve_triangular(overlap, told, upper=False, unitriangular=True)
    written, corrected = solved[..., :size], solved[..., size:]
    late = _late(part).transpose(-1, -2)
    # Both products at once: what a chunk adds, and what it takes from the memory before it.
    effect = torch.matmul(late, solved)
    same = torch.eye(effect.shape[-2], dtype=effect.dtype, device=effect.device)
    left = same if part.faded is None else same * part.faded[..., -1, :].exp()[..., None]
    start, until = _memories(left - effect[..., size:], effect[..., :size], before, torch.matmul)
    news = written - torch.matmul(corrected, start)
    reach = faded_pairs(part.query, part.key, part.faded)
    return torch.matmul(reach, news).add_(torch.matmul(_early(part.query, part), start)), until[:, -1]


def _memories(left: Tensor, own: Tensor, before: Tensor | None, product: Product) -> tuple[Tensor, Tensor]:
    """The memory before and after every chunk, [batch, chunks, heads, key_size, value_size] each."""
    if before is not None:
        first = own[:, :1] + product(left[:, :1], before[:, None])
        own = torch.cat([first, own[:, 1:]], dim=1)
    until = prefixes(left, own, product)
    return _earlier(until, before), until


def _earlier(until: Tensor, before: Tensor | None) -> Tensor:
    """The memory before every chunk, of that after it."""
    first = torch.zeros_like(until[:, :1]) if before is None else before[:, None]
    return torch.cat([first, until[:, :-1]], dim=1)


def _early(rows: Tensor, part: Chunk) -> Tensor:
    """Rows times what is left, at their token, of the memory before the chunk."""
    return rows if part.faded is None else rows * part.faded.exp()


def _late(part: Chunk) -> Tensor:
    """Keys times what is left of them at the end of the chunk."""
    return part.key if part.faded is None else part.key * (part.faded[..., -1:, :] - part.faded).exp()
