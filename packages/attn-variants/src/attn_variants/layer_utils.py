"""Building blocks that layers share: projections, initialisation, norms, dropout of weights and argument checks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from attn_core import AttentionInputs
from attn_core.errors import InvalidValue
from attn_core.graph_safety import device_cache
from attn_core.kernels.devices import sent
from attn_core.kernels.linear import Pack
from torch import Tensor, nn

from attn_variants.compute.dropout import new_dropout
from attn_variants.compute.kept import in_trace
from attn_variants.compute.norm import fused_norm


def unit(rows: Tensor, epsilon: float = 1e-6) -> Tensor:
    """Rows [..., size] scaled to L2 norm one; zeros stay zeros, as `epsilon` is added to the squared norm."""
    return rows * torch.rsqrt(rows.square().sum(-1, keepdim=True) + epsilon)


def rms_normed(rows: Tensor, weight: Tensor | None, epsilon: float) -> Tensor:
    """RMSNorm of rows [..., size], times `weight` [size] if given (Zhang & Sennrich 2019)."""
    found = fused_norm(rows, weight, epsilon)
    if found is not None:
        return found
    normed = rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + epsilon)
    return normed if weight is None else normed * weight.to(rows.dtype)


def by_heads(rows: Tensor, heads: int) -> Tensor:
    """Reshape rows [..., heads · size] to [..., heads, size]."""
    return rows.reshape(*rows.shape[:-1], heads, rows.shape[-1] // heads)


def weight_of(linear: nn.Linear) -> Tensor:
    """The matrix [outputs, inputs] of a linear layer, including its active adapter (`adapted_weight`), if any.

    For code that uses the matrix without calling the layer.
    """
    adapted: Callable[[], Tensor] | None = getattr(linear, "adapted_weight", None)
    return linear.weight if adapted is None else adapted()


def fresh_linear(into: int, out: int, *, bias: bool) -> nn.Linear:
    """A linear layer with Glorot-uniform weights and zero biases."""
    linear = nn.Linear(into, out, bias=bias)
    nn.init.xavier_uniform_(linear.weight)
    if bias:
        nn.init.zeros_(linear.bias)
    return linear


def multiplied_in(rows: Tensor) -> torch.dtype:
    """The dtype in which linear layers multiply rows: that of autocast if enabled, else the rows' own."""
    kind = rows.device.type
    # The meta device has no autocast, and torch raises when asked for it.
    return torch.get_autocast_dtype(kind) if kind != "meta" and torch.is_autocast_enabled(kind) else rows.dtype


def glorot_parameter(*shape: int) -> nn.Parameter:
    """Weights [heads, into, out], Glorot-uniform for each head, or vectors [heads, size], uniform in ±1/√size."""
    bound = (6 / (shape[-2] + shape[-1])) ** 0.5 if len(shape) > 2 else shape[-1] ** -0.5
    return nn.Parameter((torch.rand(shape) * 2 - 1) * bound)


def refuse_source(source: Tensor | None) -> None:
    """Raise `InvalidValue` if a source is given to a self-attention layer."""
    if source is not None:
        raise InvalidValue.of("source", tuple(source.shape), "None for self-attention")


def softmax_over(scores: Tensor, allowed: Tensor | None) -> Tensor:
    """Softmax over the last axis; zeros, and no gradient, in rows where nothing is allowed.

    `allowed` is bool, broadcasts with the scores and is True for scores to keep.
    """
    if allowed is None:
        return torch.softmax(scores, dim=-1)
    lowest = torch.finfo(scores.dtype).min
    return torch.softmax(scores.masked_fill(~allowed, lowest), dim=-1).masked_fill(~allowed, 0.0)


class DropsWeights(Protocol):
    """A layer that drops attention weights with probability `dropout` while it is `training`."""

    training: bool
    dropout: float


def with_dropout(inputs: AttentionInputs, layer: DropsWeights) -> AttentionInputs:
    """The inputs with a new seed for the layer's dropout; unchanged in evaluation or if the probability is 0.

    The seed is drawn from the CPU generator on every device, which avoids a GPU synchronisation. Activations that
    `torch.utils.checkpoint` recomputes get the same seed, as it restores the generator.
    """
    if not layer.training or not layer.dropout:
        return inputs
    return dataclasses.replace(inputs, dropout=new_dropout(layer.dropout))


QUERY_KEY_VALUE = ("query", "key", "value")
"""The names of the projections that most mechanisms apply to one input."""


class JointProjection(nn.Module):
    """Several linear layers of one input, packed into one: `whole` concatenates their outputs, of these `sizes`.

    `names` are those of the layers.
    """

    def __init__(self, whole: nn.Module, sizes: Sequence[int], names: Sequence[str]) -> None:
        super().__init__()
        self.whole = whole
        self.sizes = list(sizes)
        self.names = tuple(names)

    @classmethod
    def of(cls, pack: Pack, layers: Sequence[nn.Linear], names: Sequence[str] = QUERY_KEY_VALUE) -> JointProjection:
        """Pack layers of one input into one."""
        return cls(pack(layers), [layer.out_features for layer in layers], names)

    def forward(self, rows: Tensor) -> list[Tensor]:
        """The outputs [..., size] of each layer."""
        return list(self.whole(rows).split(self.sizes, dim=-1))

    def parts(self) -> list[JointPart]:
        """A module for each layer, to call one of them alone."""
        return [JointPart(self, index) for index in range(len(self.sizes))]


class JointPart(nn.Module):
    """One of the layers of a joint projection."""

    def __init__(self, joint: JointProjection, index: int) -> None:
        super().__init__()
        self.joint = joint
        self.index = index

    def forward(self, rows: Tensor) -> Tensor:
        """The outputs [..., size] of this layer; the other layers are computed too and dropped."""
        parts: list[Tensor] = self.joint(rows)
        return parts[self.index]


def document_positions(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """Positions [rows], int64, of documents of these lengths packed end to end; they restart at 0 in each document.

    The tensor is cached, so that all layers of a batch share it, and is copied to a GPU without synchronising.
    """
    return _counted(lengths).to(device) if in_trace() else _document_positions(lengths, device)


@device_cache(8)
def _document_positions(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    # A tensor made in inference mode could not take part in training later.
    with torch.inference_mode(mode=False):
        return sent(_counted(lengths), device)


def _counted(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([position for length in lengths for position in range(length)], dtype=torch.int64)
