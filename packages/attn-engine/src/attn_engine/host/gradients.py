"""How much the next token depends on each token of a prompt: gradient times input, without a backward pass.

Packed weights have no backward kernels. The gradient of f with respect to an embedding x_i, times x_i, is the
derivative of f along x_i, and a central difference along x_i approximates it with forward passes only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import get_ident
from typing import Any, NamedTuple

import torch
from attn_models.loading import LoadedModel
from attn_models.loading.sentences import SentenceEncoder
from torch import Tensor

STEP = 0.005
"""The relative step by which an embedding is scaled up and down; the error of the difference is quadratic in it."""
MAX_TOKENS = 64
"""The maximum length of a prompt whose gradients are computed: each token takes two passes over the whole prompt."""
ROWS = 16
"""The number of sequences in one forward pass."""
TOLERANCE = 0.05
"""How far the sum of the derivatives along single embeddings may be from the derivative along all embeddings at once,
relative to the sum of their magnitudes."""


class Gradients(NamedTuple):
    """Gradient times input of each token, in nats, for the next token `target`; or in `note` why there are none."""

    contributions: tuple[float, ...] = ()
    target: int | None = None
    note: str = ""


def input_gradients(loaded: LoadedModel | SentenceEncoder, ids: Sequence[int]) -> Gradients:
    """Gradient times input of each prompt token, for the log probability of the most likely next token."""
    embedding = getattr(loaded.model, "embedding", None)
    encodes = isinstance(loaded, SentenceEncoder) or loaded.max_encoder_len is not None
    if encodes or not isinstance(embedding, torch.nn.Module):
        return Gradients(note="gradients by prompt tokens are computed for decoders only")
    if len(ids) > MAX_TOKENS:
        return Gradients(note=f"gradients are computed for at most {MAX_TOKENS} tokens; the prompt has {len(ids)}")
    tokens = torch.tensor(ids, device=loaded.device)
    with torch.inference_mode():
        rows = embedding(tokens)
        plain = _log_probabilities(loaded.model, embedding, tokens, rows[None])[0]
        target = int(plain.argmax())
        found = _differences(loaded.model, embedding, tokens, rows)[:, target] / (2 * STEP)
    contributions, together = found[:-1], found[-1]
    flat = bool(
        (contributions == 0).all()
    )  # a quantized, piecewise constant function has zero slope, but tokens may matter
    if (
        flat
        or not torch.isfinite(found).all()
        or (contributions.sum() - together).abs() > TOLERANCE * contributions.abs().sum() + 1e-3
    ):
        note = "no gradients: the model's numerical precision is too low, as with weights in int8 or bfloat16"
        return Gradients(note=note)
    return Gradients(contributions=tuple(contributions.tolist()), target=target)


def _differences(model: Any, embedding: torch.nn.Module, tokens: Tensor, rows: Tensor) -> Tensor:
    """f(x (1 + step)) - f(x (1 - step)) [tokens + 1, vocabulary]: for each token alone, then for all at once.

    `rows` are the embeddings [tokens, width].
    """
    count = len(tokens)
    chosen = torch.cat([torch.eye(count), torch.ones(1, count)]).to(rows)[..., None]
    differences = []
    for part in torch.split(chosen, ROWS):
        ahead, behind = (
            _log_probabilities(model, embedding, tokens, rows * (1 + sign * STEP * part)) for sign in (1, -1)
        )
        differences.append(ahead - behind)
    return torch.cat(differences)


def _log_probabilities(model: Any, embedding: torch.nn.Module, tokens: Tensor, rows: Tensor) -> Tensor:
    """Log probabilities [sequences, vocabulary] of the next token, in float64, for the embeddings `rows`
    [sequences, tokens, width]."""
    with _embedded(embedding, rows):
        logits = model(tokens[None].expand(len(rows), -1))
    return torch.log_softmax(logits[:, -1].double(), -1)


@contextmanager
def _embedded(embedding: torch.nn.Module, rows: Tensor) -> Iterator[None]:
    """Let the embedding module return these rows [sequences, tokens, width] in this thread; others are unaffected."""
    mine = get_ident()
    handle = embedding.register_forward_hook(lambda _module, _args, out: rows if get_ident() == mine else out)
    try:
        yield
    finally:
        handle.remove()
