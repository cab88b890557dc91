"""Attention maps of a loaded model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attn_core.errors import ContextLengthExceeded, InvalidValue
from attn_models.loading import LoadedModel

from attn_serve.answers import MapAnswer
from attn_serve.requests import MapsWanted

LONGEST = 1024
"""Tokens up to which maps are computed: they grow with the square."""


def compute_maps(loaded: LoadedModel, ids: Sequence[int], wanted: MapsWanted, labels: Sequence[str]) -> list[MapAnswer]:
    """The weights of the wanted layers and heads, float32.

    Raises `InvalidValue` for a token, layer or head that does not exist or too long a prompt, `Incompatible` for a
    mechanism without weights.
    """
    config = loaded.config
    if len(ids) > loaded.model.context:
        raise ContextLengthExceeded.of(len(ids), 0, loaded.model.context)
    if len(ids) > LONGEST:
        raise InvalidValue.of("prompt", f"{len(ids)} tokens", f"at most {LONGEST} tokens for attention maps")
    _require("prompt.tokens", ids, config.vocabulary)
    _require("layers", wanted.layers, config.layers)
    _require("heads", wanted.heads, config.heads)
    layers = sorted(set(wanted.layers)) or list(range(config.layers))
    heads = sorted(set(wanted.heads)) or list(range(config.heads))
    with torch.inference_mode():
        maps = loaded.model.attention_maps(torch.tensor(ids), layers)
        chosen = {layer: maps[layer][heads].float().contiguous() for layer in layers}
    return [
        MapAnswer(
            layer=layer,
            mechanism=config.choice(layer).mechanism,
            heads=tuple(heads),
            shape=(len(heads), len(ids), len(ids)),
            weights=weights.numpy().tobytes(),
            labels=tuple(labels),
        )
        for layer, weights in chosen.items()
    ]


def _require(field: str, values: Sequence[int], limit: int) -> None:
    for value in values:
        if not 0 <= value < limit:
            raise InvalidValue.of(field, value, f"0 to {limit - 1}")
