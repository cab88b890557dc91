"""Building blocks that layers share: projections, initialisation, norms, dropout of weights and argument checks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Protocol

import torch
from attn_core import AttentionInputs
from attn_core.errors import InvalidValue
from attn_core.kernels.devices import sent
from attn_core.kernels.linear import Pack
from torch import Tensor, nn

from attn_variants.compute.dropout import new_dropout
from attn_variants.compute.kept import in_trace
from attn_variants.compute.norm import fused_norm


def unit(rows: Tensor, epsilon: float = 1e-6) -> Tensor:
    """Rows [..., size] of length one; zeros stay zeros, for `epsilon` is added to the squared length."""
    return rows * torch.rsqrt(rows.square().sum(-1, keepdim=True) + epsilon)


def rms_normed(rows: Tensor, weight: Tensor | None, epsilon: float) -> Tensor:
    """Rows [..., size] of root mean square one, times `weight` [size] if given (Zhang & Sennrich 2019)."""
    found = fused_norm(rows, weight, epsilon)
    if found is not None:
        return found
    normed = rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + epsilon)
    return normed if weight is None else normed * weight.to(rows.dtype)


def by_heads(rows: Tensor, heads: int) -> Tensor:
    """Rows [..., heads · size] as [..., heads, size]."""
    return rows.reshape(*rows.shape[:-1], heads, rows.shape[-1] // heads)


def weight_of(linear: nn.Linear) -> Tensor:
    """The matrix [outputs, inputs] of a linear layer, with the adapter in it that is in use (`adapted_weight`), if any.

    For matrices that are used otherwise than by calling the layer.
    """
    adapted: Callable[[], Tensor] | None = getattr(linear, "adapted_weight", None)
    return linear.weight if adapted is None else adapted()


def fresh_linear(into: int, out: int, *, bias: bool) -> nn.Linear:
    """A linear layer drawn uniformly by Glorot's rule, its biases zero."""
    linear = nn.Linear(into, out, bias=bias)
    nn.init.xavier_uniform_(linear.weight)
    if bias:
        nn.init.zeros_(linear.bias)
    return linear


def multiplied_in(rows: Tensor) -> torch.dtype:
    """The type in which linear layers multiply rows: autocast's, or their own."""
    kind = rows.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else rows.dtype


def glorot_parameter(*shape: int) -> nn.Parameter:
    """Weights [heads, into, out], uniform by Glorot's rule for each head, or vectors [heads, size] in ±1/√size."""
    bound = (6 / (shape[-2] + shape[-1])) ** 0.5 if len(shape) > 2 else shape[-1] ** -0.5
    return nn.Parameter((torch.rand(shape) * 2 - 1) * bound)


def refuse_source(source: Tensor | None) -> None:
    """Raise `InvalidValue` where a source is given to a layer of self-attention."""
    if source is not None:
        raise InvalidValue.of("source", tuple(source.shape), "None: this layer attends within one sequence")


def softmax_over(scores: Tensor, allowed: Tensor | None) -> Tensor:
    """Weights over the last axis; zeros, and no gradient, where nothing is allowed.

    `allowed` broadcasts with the scores, True keeps.
    """
    if allowed is None:
        return torch.softmax(scores, dim=-1)
    lowest = torch.finfo(scores.dtype).min
    return torch.softmax(scores.masked_fill(~allowed, lowest), dim=-1).masked_fill(~allowed, 0.0)


class DropsWeights(Protocol):
    """A layer with dropout of attention weights: while it is `training`, with probability `dropout`."""

    training: bool
    dropout: float


def with_dropout(inputs: AttentionInputs, layer: DropsWeights) -> AttentionInputs:
    """The inputs with a fresh seed for the layer's dropout; unchanged in evaluation and where the probability is 0.

    The seed comes from the CPU's generator whatever the device, so that nothing waits for a GPU. Activations that
    `torch.utils.checkpoint` recomputes get the same seed, as it restores the generator.
    """
    if not layer.training or not layer.dropout:
        return inputs
    return dataclasses.replace(inputs, dropout=new_dropout(layer.dropout))


QUERY_KEY_VALUE = ("query", "key", "value")
"""The layers that most mechanisms have of one input."""


class JointProjection(nn.Module):
    """`whole` maps rows [..., inputs] to the outputs of several layers, `sizes` of each, side by side.

    `names` are those of the layers.
    """

    def __init__(self, whole: nn.Module, sizes: Sequence[int], names: Sequence[str]) -> None:
        super().__init__()
        self.whole = whole
        self.sizes = list(sizes)
        self.names = tuple(names)

    @classmethod
    def of(cls, pack: Pack, layers: Sequence[nn.Linear], names: Sequence[str] = QUERY_KEY_VALUE) -> JointProjection:
        """Layers of one input, packed as one."""
        return cls(pack(layers), [layer.out_features for layer in layers], names)

    def forward(self, rows: Tensor) -> list[Tensor]:
        """The outputs [..., size] of each layer."""
        return list(self.whole(rows).split(self.sizes, dim=-1))

    def parts(self) -> list[JointPart]:
        """A module for each layer, where one is wanted alone."""
        return [JointPart(self, index) for index in range(len(self.sizes))]


class JointPart(nn.Module):
    """One of the layers of a joint projection."""

    def __init__(self, joint: JointProjection, index: int) -> None:
        super().__init__()
        self.joint = joint
        self.index = index

    def forward(self, rows: Tensor) -> Tensor:
        """The outputs [..., size] of this layer alone; computes the others too."""
        parts: list[Tensor] = self.joint(rows)
        return parts[self.index]


def document_positions(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """Positions [rows], int64, of rows that hold documents of these lengths end to end; each begins anew.

    All layers of a batch are given the same tensor, which a GPU fetches without anybody waiting.
    """
    return _counted(lengths).to(device) if in_trace() else _document_positions(lengths, device)


@lru_cache(maxsize=8)
def _document_positions(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    # A tensor made in inference mode could not take part in training later.
    with torch.inference_mode(mode=False):
        return sent(_counted(lengths), device)


def _counted(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([position for length in lengths for position in range(length)], dtype=torch.int64)
