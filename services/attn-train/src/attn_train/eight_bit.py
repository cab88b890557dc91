"""AdamW with moments of 8 bits, in blocks of 256 weights, each with a scale (Dettmers et al. 2021, arXiv 2110.02861).

Of the second moment v, the root is kept, on a scale down to 2^-31 of the largest in its block, finer near to that, so
that only 0 is stored as 0: a small v that became 0 would make a step many times the learning rate. Of the first moment
m, m / √v is kept, which is of order 1 however small gradients are, on a linear scale. Rounding is up or down by a fixed
sequence over steps and places, by which codes keep their mean: rounded to the nearest, v would never decay, as it does
by less than half a unit in a step.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

BLOCK = 256
"""Weights that share a scale."""
LEAST = 4096
"""Smaller weights, and tables of embeddings, keep moments in float32, as in bitsandbytes and transformers."""
AT_ONCE = 1 << 18
"""Elements that are updated at once, a multiple of `BLOCK`, as their moments are in float32 meanwhile."""
ROOTS = 255
"""Units of the scale of roots."""
OCTAVES = 32
"""How many times a root may be halved before it counts as the least; the scale is coarser there."""
RATIOS = 127
"""Units of the linear scale on either side of 0."""
GOLDEN = (math.sqrt(5) - 1) / 2
"""The fractional parts of the multiples of this number, and of other roots, are spread evenly (Weyl's sequence)."""
SCALES = ("exp_avg_scale", "exp_avg_sq_scale")
"""The names of scales, float32 [blocks]."""
STATE = ("exp_avg", "exp_avg_sq", *SCALES, "step")
"""The state tensors of a weight: m / √v in int8 and √v in uint8, of its shape, and their scales."""


def eight_bit_weights(model: nn.Module) -> set[nn.Parameter]:
    """Return the trained parameters whose moments are kept in 8 bits."""
    tables = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    large = {p for p in model.parameters() if p.requires_grad and p.numel() >= LEAST and p.is_contiguous()}
    return large - tables


def state_bytes(model: nn.Module) -> int:
    """Return the bytes of the moments and scales of a model's trained parameters."""
    eight = eight_bit_weights(model)
    small = sum(8 * p.numel() for p in model.parameters() if p.requires_grad and p not in eight)
    return small + sum(2 * p.numel() + 8 * -(-p.numel() // BLOCK) for p in eight)


class BlockwiseAdamW(torch.optim.Optimizer):
    """AdamW (arXiv 1711.05101) whose moments are kept as this module says; an update itself is computed in float32."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient once."""
        del closure
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state.update(_fresh(parameter))
        state["step"] += 1
        parts = [parameter.view(-1), gradient.reshape(-1), *(state[name].view(-1) for name in STATE[:-1])]
        for start in range(0, parameter.numel(), AT_ONCE):
            values = [part[start : start + AT_ONCE] for part in parts[:4]]
            scales = [part[start // BLOCK :][: AT_ONCE // BLOCK] for part in parts[4:]]
            _update_part([*values, *scales], state["step"].double(), group)


def _fresh(parameter: Tensor) -> dict[str, Tensor]:
    blocks = -(-parameter.numel() // BLOCK)
    made = {
        "exp_avg": torch.zeros_like(parameter, dtype=torch.int8),
        "exp_avg_sq": torch.zeros_like(parameter, dtype=torch.uint8),
        "step": torch.zeros((), device=parameter.device),
    }
    return made | {name: torch.zeros(blocks, device=parameter.device) for name in SCALES}


def _update_part(parts: list[Tensor], step: Tensor, group: dict[str, Any]) -> None:
    """Update a part of a weight, in float32 or less, and its moments, given as the weight, gradient and `STATE`."""
    weight, gradient, ratios, roots, ratio_scale, root_scale = parts
    (beta1, beta2), count = group["betas"], weight.numel()
    slope = _blocks(gradient).float()
    root = _roots(_blocks(roots), root_scale)
    mean = (_blocks(ratios) * (ratio_scale / RATIOS)[:, None]).mul_(root).lerp_(slope, 1 - beta1)
    root = root.square_().mul_(beta2).addcmul_(slope, slope, value=1 - beta2).sqrt_()
    size = (1 - beta2**step).sqrt().float()
    change = (mean / root.div(size).add_(group["eps"])).mul_((group["lr"] / (1 - beta1**step)).float())
    weight.mul_(1 - group["lr"] * group["weight_decay"]).sub_(change.view(-1)[:count])
    root_scale.copy_(root.amax(1))
    codes = _codes(root, root_scale, _spread(step, 2))
    roots.copy_(codes.view(-1)[:count])
    ratio = torch.where(codes > 0, mean / _roots(codes, root_scale), 0.0)
    ratio_scale.copy_(ratio.abs().amax(1))
    units = ratio * (RATIOS / ratio_scale.clamp(min=1e-30))[:, None] + _spread(step, 3)
    ratios.copy_(units.floor_().clamp_(-RATIOS, RATIOS).view(-1)[:count])


def _blocks(values: Tensor) -> Tensor:
    """Return values [count] as [blocks, BLOCK], with zeros at the end."""
    return nn.functional.pad(values, (0, -len(values) % BLOCK)).view(-1, BLOCK)


def _roots(codes: Tensor, scale: Tensor) -> Tensor:
    """Return the roots [blocks, BLOCK] of codes, of which 0 is 0 and `ROOTS` the scale."""
    halvings = (ROOTS - codes.float()).square_().mul_(OCTAVES / ROOTS**2)
    return halvings.neg_().exp2_().mul_(scale[:, None]).mul_(codes > 0)


def _codes(roots: Tensor, scale: Tensor, spread: Tensor) -> Tensor:
    """Return the code of each root, rounded up or down by `spread` [BLOCK] so that codes keep their mean over steps."""
    halvings = (roots / scale[:, None]).log2_().neg_()
    place = ROOTS - halvings.mul_(ROOTS**2 / OCTAVES).clamp_(min=0.0).sqrt_()
    return torch.where(roots > 0, place.add_(spread).floor_().clamp_(1, ROOTS), 0.0)


def _spread(step: Tensor, root: int) -> Tensor:
    """Return a number from 0 to 1 for each place in a block, float32 [BLOCK], spread evenly over steps and places."""
    places = torch.arange(BLOCK, device=step.device, dtype=torch.float64)
    return (step * GOLDEN + places * math.sqrt(root)).frac_().float()
