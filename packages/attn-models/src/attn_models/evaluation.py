"""Cross-entropy of a language model on a text, from which its perplexity follows."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from attn_core.errors import InvalidValue
from torch import Tensor, nn

from attn_models.losses import mean_cross_entropy
from attn_models.sources.progress import Report, Step, silent

IGNORED = -100
"""Targets that losses ignore: `torch.nn.functional.cross_entropy`'s `ignore_index`."""
MAX_WINDOW = 1024
"""The number of tokens in a window, unless the model's context is shorter."""
TOKENS_PER_BATCH = 4096
"""The number of tokens in one batch of `text_loss`."""


def next_token_loss(model: nn.Module, inputs: Tensor, targets: Tensor, smoothing: float = 0.0) -> Tensor:
    """Mean cross-entropy, in nats per token, of `targets` [batch, tokens] after `inputs` [batch, tokens], int64.

    Targets that are `IGNORED` do not count, and if all are, the loss is 0; `smoothing` is the fraction of each target
    that label smoothing spreads over the vocabulary (Szegedy et al. 2016, arXiv 1512.00567, section 7). Uses the
    model's own `next_token_loss` if there is one, which need not hold all logits at once.
    """
    own = getattr(model, "next_token_loss", None)
    if own is not None:
        loss: Tensor = own(inputs, targets, IGNORED, smoothing)
        return loss
    return mean_cross_entropy(model(inputs), targets, IGNORED, smoothing)


def text_loss(
    model: nn.Module,
    token_ids: Sequence[int] | Tensor,
    window: int,
    *,
    report: Report = silent,
    stage: str = "loss of the text",
) -> float:
    """Mean negative log likelihood of the tokens of a text, in nats per token; its exponential is the perplexity.

    The text, token ids [tokens] on any device, is split into consecutive windows of `window` inputs, which are computed
    in batches. Each token except the first of the text is predicted once, from the inputs before it in its window.
    `report` is called after each batch. Raises `InvalidValue` for a text of fewer than two tokens.
    """
    if len(token_ids) < 2:
        raise InvalidValue.of("text", f"{len(token_ids)} tokens", "two tokens or more")
    weights = next(iter(model.parameters()), None)
    ids = torch.as_tensor(token_ids, device=None if weights is None else weights.device).long()
    inputs, targets = ids[:-1], ids[1:]
    batch = max(1, TOKENS_PER_BATCH // window) * window
    # The remaining tokens form a last, shorter window.
    ends = [*range(batch, len(targets), batch), len(targets) // window * window, len(targets)]
    total = 0.0
    with torch.inference_mode():
        for start, end in pairwise([0, *ends]):
            if start < end:
                shape = (-1, min(window, end - start))
                loss = next_token_loss(model, inputs[start:end].view(shape), targets[start:end].view(shape))
                total += loss.item() * (end - start)
                report(Step(stage, end, len(targets), "tokens"))
    return total / len(targets)
