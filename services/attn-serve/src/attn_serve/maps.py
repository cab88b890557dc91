"""Attention maps of a loaded model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attn_core.errors import ContextLengthExceeded, Incompatible, InvalidValue
from attn_models.loading import LoadedModel

from attn_serve.answers import MapAnswer
from attn_serve.reader import Reader
from attn_serve.requests import MapsWanted

LONGEST = 1024
"""Tokens up to which maps are computed: they grow with the square."""


def compute_maps(loaded: LoadedModel, wanted: MapsWanted, reader: Reader) -> list[MapAnswer]:
    """The weights of the wanted layers and heads, float32; of a model with a source, those over the source.

    Raises `InvalidValue` for a token, layer or head that does not exist, too long a prompt, or a source where there is
    none to read or the other way round; `Incompatible` for a mechanism without weights.
    """
    ids, source = reader.read(wanted.prompt), reader.source(wanted.prompt)
    mechanisms, count = loaded.mechanisms, getattr(loaded.config, "heads", 0)
    if len(ids) > loaded.model.context:
        raise ContextLengthExceeded.of(len(ids), 0, loaded.model.context)
    if len(ids) > LONGEST:
        raise InvalidValue.of("prompt", f"{len(ids)} tokens", f"at most {LONGEST} tokens for attention maps")
    if not mechanisms:
        raise Incompatible(f"a model of the family {loaded.family!r} has no attention to draw")
    _require("prompt.tokens", ids, loaded.config.vocabulary)
    _require("layers", wanted.layers, len(mechanisms))
    _require("heads", wanted.heads, count)
    layers = sorted(set(wanted.layers)) or list(range(len(mechanisms)))
    heads = sorted(set(wanted.heads)) or list(range(count))
    with torch.inference_mode():
        maps = loaded.model.attention_maps(torch.tensor(ids), layers, *_sources(loaded, source))
        chosen = {layer: maps[layer][heads].float().contiguous() for layer in layers}
    labels = tuple(reader.spelling.token(i).text for i in ids)
    keys = labels if source is None else tuple(reader.spelling.token(i).text for i in source)
    return [
        MapAnswer(
            layer=layer,
            mechanism=mechanisms[layer],
            heads=tuple(heads),
            shape=(len(heads), len(labels), weights.shape[-1]),
            weights=weights.numpy().tobytes(),
            labels=labels,
            # The token that ends a grid is read and has no weight.
            key_labels=keys[: weights.shape[-1]],
        )
        for layer, weights in chosen.items()
    ]


def _sources(loaded: LoadedModel, source: Sequence[int] | None) -> tuple[torch.Tensor, ...]:
    if (source is None) != (loaded.source_context is None):
        needed = "none, the model has no source" if loaded.source_context is None else "one, as the model attends to it"
        raise InvalidValue.of("prompt.source", None if source is None else f"{len(source)} tokens", needed)
    if source is None:
        return ()
    _require("prompt.source.tokens", source, loaded.config.vocabulary)
    return (torch.tensor(source),)


def _require(field: str, values: Sequence[int], limit: int) -> None:
    for value in values:
        if not 0 <= value < limit:
            raise InvalidValue.of(field, value, f"0 to {limit - 1}")
