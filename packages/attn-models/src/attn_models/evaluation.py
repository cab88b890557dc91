"""How well a model foretells a text."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attn_core.errors import InvalidValue
from torch.nn.functional import cross_entropy

from attn_models.decoder.decoder import Decoder
from attn_models.sources.progress import Report, Step, silent

LONGEST = 1024
"""Tokens of one window, where the model's context is longer."""


def text_loss(
    model: Decoder, token_ids: Sequence[int], *, report: Report = silent, stage: str = "loss of the text"
) -> float:
    """The mean negative log likelihood of a text, nats per token.

    The text is cut into windows of the model's context, at most 1024 tokens; the first token of a window is given.
    Windows are reported as they are done.
    Raises `InvalidValue` for a text of fewer than two tokens.
    """
    if len(token_ids) < 2:
        raise InvalidValue.of("text", f"{len(token_ids)} tokens", "two tokens or more")
    window = min(model.context, LONGEST)
    total, count = 0.0, 0
    with torch.no_grad():
        for start in range(0, len(token_ids) - 1, window):
            tokens = torch.as_tensor(token_ids[start : start + window], dtype=torch.int64)
            if len(tokens) < 2:
                continue
            logits = model(tokens[None])[0, :-1]
            wide = logits.double() if logits.dtype == torch.float64 else logits.float()
            total += cross_entropy(wide, tokens[1:], reduction="sum").item()
            count += len(tokens) - 1
            report(Step(stage, start + len(tokens), len(token_ids), "tokens"))
    return total / count
