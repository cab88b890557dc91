"""Chooses the next token of every sequence of a batch from its logits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attn_engine.adjust import Draw, adjust
from attn_engine.chance import uniform
from attn_engine.draw import draw_token, first_largest

BLOCK = 256
"""Logits whose maximum is taken at once when the likeliest token is looked for."""


def choose_tokens(logits: Tensor, draws: Sequence[Draw]) -> list[int]:
    """Token ids, one a row of logits [rows, vocabulary]; -1 where the logits of a row are not numbers.

    A row's choice depends on that row alone.
    """
    return [_choose(row, draw) for row, draw in zip(logits.detach().unbind(0), draws, strict=True)]


def log_probabilities(logits: Tensor, tokens: Sequence[int], most: int) -> list[tuple[float, list[tuple[int, float]]]]:
    """For each row of logits [rows, vocabulary], the log-probability of its token and the `most` likeliest."""
    scores = logits.float().log_softmax(-1)
    own = scores.gather(1, torch.tensor(tokens, device=scores.device)[:, None])[:, 0].tolist()
    values, ids = scores.topk(min(most, scores.shape[-1]), dim=-1)
    pairs = [list(zip(i, v, strict=True)) for i, v in zip(ids.tolist(), values.tolist(), strict=True)]
    return list(zip(own, pairs, strict=True))


def likeliest(logits: Tensor) -> list[int]:
    """The first of the likeliest tokens of each row; -1 where it is not a finite number.

    The maximum of each block, then the place in the best block: on a CPU, torch finds a maximum ten times faster than
    its place, and with all threads.
    """
    missing = -logits.shape[-1] % BLOCK
    # Padding copies all logits, even with nothing.
    padded = torch.nn.functional.pad(logits, (0, missing), value=-torch.inf) if missing else logits.contiguous()
    blocks = padded.view(len(logits), -1, BLOCK)
    best = blocks.amax(-1).argmax(-1)
    values, places = blocks[torch.arange(len(logits), device=logits.device), best].max(-1)
    found: list[int] = (best * BLOCK + places).where(values.isfinite(), -1).tolist()
    return found


def _choose(row: Tensor, draw: Draw) -> int:
    sampling = draw.sampling
    scores = (row if draw.plain else adjust(row, draw)).float().cpu().numpy()
    if sampling.temperature == 0:
        return first_largest(scores)
    return draw_token(scores, sampling, uniform(draw.seed, draw.position))
