"""Three forms of a gated linear recurrence: recurrent (token by token), parallel (all pairs) and chunked."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from attn_core.decays import by_halves
from attn_core.kernels.recurrence import Steps
from torch import Tensor
from torch._higher_order_ops.scan import scan
from torch.nn.functional import pad


def recurrent(steps: Steps, before: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The recurrent form: outputs [batch, tokens, heads, value_size] and the state after the last token.

    The state is [batch, heads, key_size, value_size]; `before` is the initial state, None for zeros.
    """
    memory = steps.nothing() if before is None else before
    outs = []
    for token in range(steps.key.shape[1]):
        memory = updated(steps, token, memory)
        outs.append(read(memory, steps.query[:, token]))
    return torch.stack(outs, dim=1) if outs else steps.value[:, :0], memory


def scanned(steps: Steps, before: Tensor | None) -> tuple[Tensor, Tensor]:
    """The result of `recurrent` for graphs of any number of tokens, in which a loop would be unrolled."""

    def one(memory: Tensor, parts: list[Tensor]) -> tuple[Tensor, Tensor]:
        token = Steps(*(parts.pop(0)[:, None] if part is not None else None for part in steps))  # type: ignore[arg-type]
        memory = updated(token, 0, memory)
        return memory, read(memory, token.query[:, 0])

    given = [part for part in steps if part is not None]
    after, out = scan(one, steps.nothing() if before is None else before, given, dim=1)
    return out, after


def largest_so_far(rows: Tensor) -> Tensor:
    """The largest of each row and those before it, along dimension 1; as a scan where a graph is exported, as ONNX has
    no such operator."""
    if not torch.compiler.is_exporting():
        return rows.cummax(dim=1).values

    def one(most: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
        most = torch.maximum(most, row).contiguous()
        return most, most.clone()

    found: Tensor = scan(one, rows[:, 0].clone(memory_format=torch.contiguous_format), rows, dim=1)[1]
    return found


def updated(steps: Steps, token: int, memory: Tensor) -> Tensor:
    """The state [batch, heads, key_size, value_size] after one token."""
    key, value = steps.key[:, token], steps.value[:, token]
    if steps.decay is not None:
        memory = memory * steps.decay[:, token].exp()[..., None]
    if steps.strength is not None:
        value = steps.strength[:, token, :, None] * (value - read(memory, key))
    return torch.addcmul(memory, key[..., None], value[..., None, :])


def read(memory: Tensor, query: Tensor) -> Tensor:
    """Multiply queries [batch, heads, key_size] by the state: [batch, heads, value_size]."""
    if torch.compiler.is_exporting():
        # A matrix product of unknown batch needs sizes, which the body of a scan in ONNX does not get.
        return (query[..., None] * memory).sum(-2)
    return torch.matmul(query[..., None, :], memory)[..., 0, :]


def faded_pairs(query: Tensor, key: Tensor, faded: Tensor | None) -> Tensor:
    """The decayed products Σ_c q_ic k_jc e^(faded_ic - faded_jc) at [i, j] for j ≤ i, and zero for j > i.

    `faded` are cumulative log decays, [..., tokens, 1 or key_size].
    """
    if faded is None or query.shape[-2] == 0:
        return torch.matmul(query, key.transpose(-1, -2)).tril_()
    if faded.shape[-1] > 1:
        return by_halves(query, key, faded)
    # For later keys the exponent is above 0 and is clamped, as the exponential could be infinite.
    left = (faded - faded.transpose(-1, -2)).clamp(max=0).exp()
    return torch.matmul(query, key.transpose(-1, -2)).tril_() * left


def parallel(steps: Steps) -> Tensor:
    """The parallel form: outputs [batch, tokens, heads, value_size], from a zero state."""
    return torch.matmul(effective_weights(steps), steps.value.transpose(1, 2)).transpose(1, 2)


def effective_weights(steps: Steps) -> Tensor:
    """The weights [batch, heads, query, key] of the values in the outputs; they may be negative and need not sum to 1.

    Additive updates: the decayed products of queries and keys. Delta rule: these times (I + A)^-1 diag(β), where A
    contains the decayed products of keys with keys, times β (Yang et al. 2024, arXiv 2406.06484, §3.2).
    """
    query, key = steps.query.transpose(1, 2), steps.key.transpose(1, 2)
    faded = None if steps.decay is None else steps.decay.cumsum(1).transpose(1, 2)
    reach = faded_pairs(query, key, faded)
    if steps.strength is None:
        return reach
    strength = steps.strength.transpose(1, 2)
    overlap = strength[..., None] * faded_pairs(key, key, faded).tril(-1)
    # reach (I + overlap)^-1, as the solution X of X (I + overlap) = reach.
    solved: Tensor = torch.linalg.solve_triangular(overlap, reach, upper=False, left=False, unitriangular=True)
    weights: Tensor = solved * strength[..., None, :]
    return weights


Product = Callable[[Tensor, Tensor], Tensor]


def prefixes(transition: Tensor, own: Tensor, product: Product) -> Tensor:
    """The state S_c = product(transition_c, S_{c-1}) + own_c after every chunk c, in the shape of `own`."""
    # A loop over chunks would make torch.compile trace every length again.
    prefix = by_doubling if torch.compiler.is_compiling() else one_by_one
    return prefix(transition, own, product)


def one_by_one(transition: Tensor, own: Tensor, product: Product) -> Tensor:
    """`prefixes` by a loop, with the least work: one product per chunk."""
    memories = [own[:, 0]]
    for chunk in range(1, own.shape[1]):
        memories.append(product(transition[:, chunk], memories[-1]) + own[:, chunk])
    return torch.stack(memories, dim=1)


def by_doubling(transition: Tensor, own: Tensor, product: Product) -> Tensor:
    """`prefixes` by a parallel scan with a logarithmic number of rounds (Hillis & Steele 1986)."""
    reach = 1
    while reach < own.shape[1]:
        own = own + product(transition, _shifted(own, reach))
        transition = product(transition, _shifted(transition, reach))
        reach *= 2
    return own


def _shifted(rows: Tensor, places: int) -> Tensor:
    """Shift rows [batch, chunks, ...] by `places` chunks, filling with zeros."""
    padded = torch.nn.functional.pad(rows, (0, 0) * (rows.dim() - 2) + (places, 0))
    return padded[:, : rows.shape[1]]


class Chunk(NamedTuple):
    """The steps of every chunk, [batch, chunks, heads, tokens of a chunk, size] each.

    `faded` are the cumulative log decays from the start of the chunk.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    faded: Tensor | None
    strength: Tensor | None


def chunked(steps: Steps, before: Tensor | None, chunk: int) -> tuple[Tensor, Tensor]:
    """The chunked form: the result of `recurrent`, with pairs computed within chunks of `chunk` tokens."""
    if steps.key.shape[1] == 0:
        return steps.value, steps.nothing() if before is None else before
    if torch.compiler.is_exporting():
        return scanned(steps, before)
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
    """Cut [batch, tokens, heads, size] into [batch, chunks, heads, chunk, size], padded with zeros at the end."""
    chunks = (rows.shape[1] + chunk - 1) // chunk
    padded = pad(rows, (0, 0, 0, 0, 0, chunks * chunk - rows.shape[1]))
    # Contiguous, as otherwise every product would copy it.
    return padded.reshape(rows.shape[0], chunks, chunk, *rows.shape[2:]).transpose(2, 3).contiguous()


def _additive(part: Chunk, before: Tensor | None) -> tuple[Tensor, Tensor]:
    """Outputs [batch, chunks, heads, tokens, value_size] and the last state, for additive updates."""
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
    """`_additive` for the delta rule, by the WY form (Yang et al. 2024, arXiv 2406.06484, §3.2; 2412.06464, §3.3).

    A chunk writes the values U - W S, where S is the state before it, and U and W solve one triangular system.
    """
    size = part.value.shape[-1]
    overlap = strength * faded_pairs(part.key, part.key, part.faded).tril(-1)
    right_side = strength * torch.cat([part.value, _early(part.key, part)], dim=-1)
    solved = torch.linalg.solve_triangular(overlap, right_side, upper=False, unitriangular=True)
    written, corrected = solved[..., :size], solved[..., size:]
    late = _late(part).transpose(-1, -2)
    # Both products at once: what a chunk adds to the state, and what it removes from the state before it.
    effect = torch.matmul(late, solved)
    same = torch.eye(effect.shape[-2], dtype=effect.dtype, device=effect.device)
    left = same if part.faded is None else same * part.faded[..., -1, :].exp()[..., None]
    start, until = _memories(left - effect[..., size:], effect[..., :size], before, torch.matmul)
    values = written - torch.matmul(corrected, start)
    reach = faded_pairs(part.query, part.key, part.faded)
    return torch.matmul(reach, values).add_(torch.matmul(_early(part.query, part), start)), until[:, -1]


def _memories(left: Tensor, own: Tensor, before: Tensor | None, product: Product) -> tuple[Tensor, Tensor]:
    """The states before and after every chunk, [batch, chunks, heads, key_size, value_size] each."""
    if before is not None:
        first = own[:, :1] + product(left[:, :1], before[:, None])
        own = torch.cat([first, own[:, 1:]], dim=1)
    until = prefixes(left, own, product)
    return _earlier(until, before), until


def _earlier(until: Tensor, before: Tensor | None) -> Tensor:
    """The states before every chunk, from those after every chunk."""
    first = torch.zeros_like(until[:, :1]) if before is None else before[:, None]
    return torch.cat([first, until[:, :-1]], dim=1)


def _early(rows: Tensor, part: Chunk) -> Tensor:
    """Rows times the decay from the start of the chunk to their token."""
    return rows if part.faded is None else rows * part.faded.exp()


def _late(part: Chunk) -> Tensor:
    """Keys times the decay from their token to the end of the chunk."""
    return part.key if part.faded is None else part.key * (part.faded[..., -1:, :] - part.faded).exp()
