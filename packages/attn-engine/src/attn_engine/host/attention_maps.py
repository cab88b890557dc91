"""Attention maps of a loaded model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from attn_core.errors import ContextLengthExceeded, Incompatible, InvalidValue
from attn_models.loading import LoadedModel
from attn_models.loading.sentences import SentenceEncoder
from attn_schema import AttentionMap, AttentionMapsRequest, Tensor

from attn_engine.host.gradients import Gradients, input_gradients
from attn_engine.host.tokenization import PromptTokenizer
from attn_engine.out_of_memory import within_memory

MAX_TOKENS = 1024
"""The maximum number of prompt tokens for attention maps, whose size is quadratic in it."""


def compute_maps(
    loaded: LoadedModel | SentenceEncoder, request: AttentionMapsRequest, tokenizer: PromptTokenizer
) -> list[AttentionMap]:
    """The float32 attention weights of the requested layers and heads; cross-attention for an encoder-decoder model.

    Raises `InvalidValue` for a token, layer or head that does not exist, a prompt of more than `MAX_TOKENS` tokens, or
    an encoder prompt that is missing or not allowed; `ContextLengthExceeded` for a prompt longer than the model's
    context; `Incompatible` for a mechanism without weights, and for images.
    """
    if any(True for _ in request.prompt.images):
        raise Incompatible("attention maps of prompts with images are not computed", field="prompt.chat")
    ids, encoder_ids = tokenizer.ids(request.prompt), tokenizer.encoder_ids(request.prompt)
    # Of a model with both kinds, `loaded.mechanisms` has self-attention too.
    mechanisms: tuple[str, ...] = getattr(loaded.model, "mechanisms", loaded.mechanisms)
    count = getattr(loaded.config, "num_heads", 0)
    if len(ids) > loaded.model.max_seq_len:
        raise ContextLengthExceeded.of(len(ids), 0, loaded.model.max_seq_len)
    if len(ids) > MAX_TOKENS:
        raise InvalidValue.of("prompt", f"{len(ids)} tokens", f"at most {MAX_TOKENS} tokens for attention maps")
    if not mechanisms:
        raise Incompatible(f"a model of the family {loaded.family!r} has no attention layers")
    _require("prompt.token_ids", ids, loaded.config.vocab_size)
    _require("layers", request.layers, len(mechanisms))
    _require("heads", request.heads, count)
    layers = sorted(set(request.layers)) or list(range(len(mechanisms)))
    heads = sorted(set(request.heads)) or list(range(count))
    chosen = _weights(loaded, ids, encoder_ids, layers, heads)
    gradients = input_gradients(loaded, ids) if request.gradients else Gradients()
    read = ids if encoder_ids is None else encoder_ids
    # A decoder looks at its source to generate the next token: figure 3 of Bahdanau et al. 2015 labels its rows so.
    queries = ids if encoder_ids is None else (*ids[1:], _next_token(loaded, ids, encoder_ids))
    keys = tuple(map(tokenizer.text, read))
    return [
        AttentionMap(
            layer=layer,
            mechanism=mechanisms[layer],
            heads=tuple(heads),
            attention_weights=Tensor(shape=tuple(weights.shape), data=weights.numpy().tobytes()),
            query_tokens=tuple(map(tokenizer.text, queries)),
            # There may be fewer keys than tokens: the token that ends an image has no weight.
            key_tokens=keys[: weights.shape[-1]],
            cross_attention=encoder_ids is not None,
            **(_gradient_fields(gradients, tokenizer) if layer == layers[0] else {}),
        )
        for layer, weights in chosen.items()
    ]


def _gradient_fields(gradients: Gradients, tokenizer: PromptTokenizer) -> dict[str, Any]:
    following = "" if gradients.target is None else tokenizer.text(gradients.target)
    return {"input_gradients": gradients.contributions, "next_token": following, "gradients_note": gradients.note}


@torch.inference_mode()
def _next_token(loaded: LoadedModel | SentenceEncoder, ids: Sequence[int], encoder_ids: Sequence[int]) -> int:
    """The most likely token after `ids` over a source."""
    tokens, source = (torch.tensor([read], device=loaded.device) for read in (ids, encoder_ids))
    return int(loaded.model(tokens, source)[0, -1].argmax())


@torch.inference_mode()
def _weights(
    loaded: LoadedModel | SentenceEncoder,
    ids: Sequence[int],
    encoder_ids: Sequence[int] | None,
    layers: list[int],
    heads: list[int],
) -> dict[int, torch.Tensor]:
    """Attention weights [heads, query, key] by layer, on the CPU; raises `OutOfCapacity` if memory is too small."""
    encoder_inputs = _encoder_inputs(loaded, encoder_ids)

    def computed() -> dict[int, torch.Tensor]:
        maps = loaded.model.attention_maps(torch.tensor(ids, device=loaded.device), layers, *encoder_inputs)
        return {layer: maps[layer][heads].float().contiguous().cpu() for layer in layers}

    return within_memory(computed, loaded.device, f"the attention maps of {len(ids)} tokens in {len(layers)} layers")


def _encoder_inputs(loaded: LoadedModel | SentenceEncoder, ids: Sequence[int] | None) -> tuple[torch.Tensor, ...]:
    if (ids is None) != (loaded.max_encoder_len is None):
        allowed = (
            "none, as the model has no encoder" if loaded.max_encoder_len is None else "one, for the model's encoder"
        )
        raise InvalidValue.of("prompt.encoder_prompt", None if ids is None else f"{len(ids)} tokens", allowed)
    if ids is None:
        return ()
    _require("prompt.encoder_prompt.token_ids", ids, loaded.config.vocab_size)
    return (torch.tensor(ids, device=loaded.device),)


def _require(field: str, values: Sequence[int], limit: int) -> None:
    for value in values:
        if not 0 <= value < limit:
            raise InvalidValue.of(field, value, f"0 to {limit - 1}")
