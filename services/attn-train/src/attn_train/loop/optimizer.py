"""The optimiser of a model, and its state as tensors by name."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from attn_train.spec import OptimizerSpec

MOMENTS = ("exp_avg", "exp_avg_sq", "step")
"""What AdamW remembers of each parameter."""


def adamw(model: nn.Module, spec: OptimizerSpec) -> torch.optim.AdamW:
    """AdamW over the model's parameters; only matrices and larger ones decay, biases and gains do not."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": spec.weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    # The fused update makes one pass over the memory where the plain one makes a dozen.
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=spec.learning_rate,
        betas=(spec.beta1, spec.beta2),
        fused=True,
    )


def moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimiser's state as "moment:parameter" -> tensor; empty before the first step."""
    return {
        f"{moment}:{name}": optimizer.state[parameter][moment]
        for name, parameter in model.named_parameters()
        for moment in MOMENTS
        if moment in optimizer.state[parameter]
    }


def restore_moments(model: nn.Module, optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Put back what `moments` gave; KeyError if a trained parameter has none."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            saved = {moment: tensors[f"{moment}:{name}"] for moment in MOMENTS}
            optimizer.state[parameter] = {moment: tensor.to(parameter.device) for moment, tensor in saved.items()}
