"""Weights as integers of four bits: GPTQ (Frantar et al. 2022, arXiv 2210.17323) and AWQ (Lin et al. 2023, arXiv
2306.00978)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from attn_core.errors import Incompatible
from torch import Tensor, nn

from attn_models.decoder.decoder import Decoder
from attn_models.decoder.layers import GatedFeedForward
from attn_models.weights.grouped_weights import Awq

BITS, LEVELS = 4, 15
GROUPS = (128, 64, 32, 16)
"""The numbers of inputs that may share a scale, of which the largest that divides all layers is used."""
DAMPING = 0.01
"""The share of the mean of its diagonal that is added to x xᵀ (section 3.3 of GPTQ)."""
POWERS = 20
"""The number of powers of the inputs' size that are tried as scales (section 3.2 of AWQ)."""
PROJECTIONS = ("query", "key", "value", "output")


@dataclass(frozen=True, eq=False)
class Integers:
    """The matrix s (q - z): q [outputs, inputs], and z and s [outputs, groups] of consecutive inputs; s is a float16's
    value, z from 1 to 15."""

    numbers: Tensor
    zeros: Tensor
    scales: Tensor

    def weight(self) -> Tensor:
        """The matrix [outputs, inputs]."""
        size = self.numbers.shape[1] // self.zeros.shape[1]
        scales, zeros = (part.repeat_interleave(size, dim=1) for part in (self.scales, self.zeros))
        return scales * (self.numbers - zeros)

    def gptq(self) -> dict[str, Tensor]:
        """The tensors of AutoGPTQ's layout: integers along the inputs, z - 1."""
        size = self.numbers.shape[1] // self.zeros.shape[1]
        return {
            "qweight": packed(self.numbers).T.contiguous(),
            "qzeros": packed(self.zeros.T - 1),
            "scales": self.scales.T.half().contiguous(),
            "g_idx": (torch.arange(self.numbers.shape[1]) // size).int(),
        }

    def awq(self) -> dict[str, Tensor]:
        """The tensors of AutoAWQ's GEMM layout: integers along the outputs, in the order of its kernels."""
        order = torch.tensor(Awq.order).argsort()
        placed = (part.T.reshape(part.shape[1], -1, 8)[..., order].flatten(1) for part in (self.numbers, self.zeros))
        numbers, zeros = map(packed, placed)
        return {"qweight": numbers, "qzeros": zeros, "scales": self.scales.T.half().contiguous()}


def packed(numbers: Tensor) -> Tensor:
    """Integers of four bits [rows, count] in int32 words [rows, count / 8], the first in the lowest bits."""
    shifted = numbers.long().reshape(len(numbers), -1, 32 // BITS) << torch.arange(0, 32, BITS)
    words: Tensor = shifted.sum(-1).to(torch.uint32).view(torch.int32)
    return words


def linear_weights(model: Decoder) -> dict[str, Tensor]:
    """The weights of the linear layers of all blocks, by the names of parameters."""
    return {
        f"blocks.{name}.weight": module.weight
        for name, module in model.blocks.named_modules()
        if isinstance(module, nn.Linear)
    }


def group_size(model: Decoder) -> int:
    """The number of inputs that share a scale in all linear layers of the blocks.

    Raises `Incompatible` for experts, weights that are not in linear layers, and sizes that no group divides.
    """
    if model.config.num_experts:
        raise Incompatible("feed-forwards with experts cannot be quantised to integers", field="num_experts")
    weights = linear_weights(model)
    matrices = {f"blocks.{name}" for name, parameter in model.blocks.named_parameters() if parameter.ndim > 1}
    if other := sorted(matrices - weights.keys()):
        raise Incompatible(f"only linear layers can be quantised to integers, not {other[0]!r}")
    sizes = sorted({tuple(weight.shape) for weight in weights.values()})
    for group in GROUPS:
        if all(inputs % group == 0 and outputs % 8 == 0 for outputs, inputs in sizes):
            return group
    raise Incompatible(f"matrices {sizes} have no groups of {GROUPS[-1]} inputs and 8 outputs")


def gptq_block(block: nn.Module, products: Mapping[str, Tensor], group: int) -> dict[str, Integers]:
    """The linear layers of a block by name, rounded one input after the other."""
    return {name: gptq(block.get_parameter(f"{name}.weight"), each, group) for name, each in products.items()}


def gptq(weight: Tensor, product: Tensor, group: int) -> Integers:
    """A matrix [outputs, inputs] as integers, rounded input by input, the others of which make up for the error as the
    inputs' mean product [inputs, inputs] says (algorithm 1)."""
    left, product = weight.double().clone(), product.double().clone()
    unread = product.diagonal() == 0
    product.diagonal()[unread] = 1
    left[:, unread] = 0
    product.diagonal().add_(DAMPING * product.diagonal().mean())
    upper = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(product)), upper=True)
    numbers, grids = torch.empty_like(left), []
    for start in range(0, left.shape[1], group):
        stop = start + group
        scale, zero = _grid(left[:, start:stop])
        grids.append((zero, scale))
        errors = left.new_empty(len(left), group)
        for column in range(start, stop):
            numbers[:, column] = (left[:, column] / scale + zero).round().clamp(0, LEVELS)
            errors[:, column - start] = left[:, column] - scale * (numbers[:, column] - zero)
            errors[:, column - start] /= upper[column, column]
            left[:, column:stop] -= errors[:, column - start, None] * upper[column, column:stop]
        left[:, stop:] -= errors @ upper[start:stop, stop:]
    zeros, scales = (torch.stack(part, dim=1) for part in zip(*grids, strict=True))
    return Integers(numbers, zeros, scales)


def rounded(weight: Tensor, group: int) -> Integers:
    """A matrix [outputs, inputs] as integers, each weight rounded to the nearest one."""
    parts = weight.double().reshape(len(weight), -1, group)
    scales, zeros = _grid(parts)
    numbers = (parts / scales[..., None] + zeros[..., None]).round().clamp(0, LEVELS)
    return Integers(numbers.flatten(1), zeros, scales)


def _grid(weights: Tensor) -> tuple[Tensor, Tensor]:
    """The scale and zero point [...] of groups of weights [..., inputs], whose range holds 0."""
    low, high = weights.amin(-1).clamp(max=0), weights.amax(-1).clamp(min=0)
    scale = ((high - low) / LEVELS).half().double()
    scale = torch.where(scale > 0, scale, 1.0)
    return scale, (-low / scale).round().clamp(1, LEVELS)


def awq_block(block: Any, products: Mapping[str, Tensor], group: int) -> dict[str, Integers]:
    """The linear layers of a block by name, rounded after inputs of large size were scaled up.

    The scales are divided out of what makes the inputs: a norm's gain, or the rows of the linear layer before.
    Raises `Incompatible` for attention that reads more than its projections.
    """
    for names, divide in _scalable(block):
        product, layers = products[names[0]].double(), [block.get_submodule(name) for name in names]
        size = product.diagonal().sqrt().clamp(min=1e-4)
        tried = [size ** (step / POWERS) for step in range(POWERS)]
        scales = [each / (each.max() * each.min()).sqrt() for each in tried]
        losses = [sum(_loss(layer.weight.double(), scale, product, group) for layer in layers) for scale in scales]
        best = scales[min(range(POWERS), key=lambda index: float(losses[index]))].float()
        divide(best)
        for layer in layers:
            layer.weight.mul_(best)
    return {name: rounded(block.get_parameter(f"{name}.weight"), group) for name in products}


def _loss(weight: Tensor, scale: Tensor, product: Tensor, group: int) -> Tensor:
    """The mean squared error of the outputs, if the weights are rounded after they were scaled."""
    error = rounded(weight * scale, group).weight() / scale - weight
    return ((error @ product) * error).sum()


def _scalable(block: Any) -> Iterator[tuple[Sequence[str], Callable[[Tensor], None]]]:
    """Layers of a block that share an input, and what divides that input by scales [inputs]; the last layers first."""
    attention, forward = block.attention, block.feed_forward
    linears = {name for name, module in attention.named_modules() if isinstance(module, nn.Linear)}
    spec = getattr(attention, "spec", None)
    if linears != set(PROJECTIONS) or spec is None or spec.weights:
        raise Incompatible(f"AWQ scales what projections read; mechanism {block.mechanism.name!r} reads it itself")
    if not block.pre_norm or isinstance(block.attention_norm, nn.Identity):
        raise Incompatible("AWQ divides the gains of norms before the sublayers, which this model does not have")
    if type(forward) is GatedFeedForward:
        yield ["feed_forward.down"], partial(_divide, forward.up)
    entering = ["feed_forward.gate", "feed_forward.up"] if hasattr(forward, "gate") else ["feed_forward.up"]
    yield entering, partial(_divide, block.feed_forward_norm)
    if attention.value.out_features == attention.output.in_features:
        yield ["attention.output"], partial(_divide, attention.value)
    yield [f"attention.{name}" for name in PROJECTIONS[:3]], partial(_divide, block.attention_norm)


def _divide(module: Any, scale: Tensor) -> None:
    """Divide the outputs of a norm or a linear layer by `scale` [outputs]."""
    for parameter in module.parameters():
        parameter.div_(scale[:, None] if parameter.ndim > 1 else scale)
