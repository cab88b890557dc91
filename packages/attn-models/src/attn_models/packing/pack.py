"""Packing the weights of a decoder for serving."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from attn_core import BlockStep, LinearShape, choose_linear, installed
from attn_core.errors import Incompatible, WrongState
from torch import Tensor, nn

from attn_models.decoder.block import Block
from attn_models.decoder.decoder import Decoder
from attn_models.packing.embedding import StoredEmbedding


def pack_weights(model: nn.Module, weights: str, dtype: torch.dtype = torch.float32, kernel: str | None = None) -> None:
    """Keep the weights of the model's linear layers in the format `weights` from now on, and compute in `dtype`.

    Feed-forwards, the unembedding (a tied one too) and the attentions that have a method `pack` are packed, each by
    the cheapest installed `LinearKernel` that can, or by the one called `kernel`; steps of whole blocks are computed by
    a `BlockKernel` where one can. With `int4` the unembedding is kept as int8: it is where fewer bits hurt most.
    Embeddings keep the type they have, norms and what is not packed become `dtype`.
    Afterwards the model can be run, but neither trained nor saved.

    Raises `InvalidValue` for an unknown format, `KernelRefused` where nobody can pack a layer, `WrongState` for a
    model that is packed already, `Incompatible` for one that is no `Decoder`.
    """
    if not isinstance(model, Decoder):
        raise Incompatible(f"only weights of decoders can be packed, not those of a {type(model).__name__}")
    if model.weights is not None:
        raise WrongState(f"the model's weights are packed already, as {model.weights}")

    def pack(layers: Sequence[nn.Linear], form: str = weights) -> nn.Module:
        matrices = [layer.weight.detach() for layer in layers]
        weight = torch.cat(matrices) if len(layers) > 1 else matrices[0]
        # torch's stubs say that a layer always has a bias.
        biased = cast("Tensor | None", layers[0].bias) is not None
        bias = torch.cat([layer.bias.detach() for layer in layers]) if biased else None
        shape = LinearShape(
            inputs=weight.shape[1], outputs=weight.shape[0], dtype=str(weight.dtype).removeprefix("torch.")
        )
        chosen = choose_linear(installed().linears, form, shape, kernel if form == weights else None)
        packed: nn.Module = chosen.pack(weight, bias)
        return packed

    with torch.no_grad():
        model.head = pack([model.unembedding or _tied(model)], "int8" if weights == "int4" else weights)
        for block in cast("Sequence[Block]", model.blocks):
            for part in (block.attention, block.feed_forward):
                if hasattr(part, "pack"):
                    part.pack(pack)
        model.embedding = StoredEmbedding(model.embedding.weight, dtype)
        if model.positions is not None:
            model.positions = StoredEmbedding(model.positions.weight, dtype)
        model.unembedding = None
        _convert_parameters(model, dtype)
    for block in cast("Sequence[Block]", model.blocks):
        block.joined = _joined(block)
    model.weights = weights


def _joined(block: Block) -> BlockStep | None:
    """The whole block as one step, from the first kernel that can."""
    parts = block.parts()
    if parts is None:
        return None
    for kernel in installed().blocks:
        if kernel.available() is None and kernel.refuses(parts) is None:
            return kernel.build(parts)
    return None


def _tied(model: Decoder) -> nn.Linear:
    """A linear layer over the embedding's own memory."""
    with torch.device("meta"):
        head = nn.Linear(model.config.width, model.vocabulary, bias=False)
    head.weight = nn.Parameter(model.embedding.weight.detach(), requires_grad=False)
    return head


def _convert_parameters(model: nn.Module, dtype: torch.dtype) -> None:
    """What was not packed, in the type that is computed with; packed weights are buffers and stay."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
