"""AdamW, its learning rate schedule, and the precision of its updates."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from attn_schema.training import OptimizerConfig
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode


def learning_rate(step: int, config: OptimizerConfig) -> float:
    """The learning rate of step `step`, counted from 0: linear warm-up, then cosine decay.

    Step `warmup_steps - 1` has `learning_rate`, the last step `last_learning_rate` (Loshchilov & Hutter 2017,
    arXiv 1608.03983, without restarts).
    """
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    falling = config.steps - config.warmup_steps
    progress = (step - config.warmup_steps + 1) / falling
    share = 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.last_learning_rate + share * (config.learning_rate - config.last_learning_rate)


MOMENTS = ("exp_avg", "exp_avg_sq", "step")
"""State of AdamW for each parameter."""


def adamw(model: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW over the model's parameters; only matrices and larger ones decay, biases and gains do not."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    # The fused update makes one pass over the memory where the plain one makes a dozen.
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        fused=True,
    )


def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimiser's state as "moment:parameter" -> tensor; empty before the first step."""
    return {
        f"{moment}:{name}": optimizer.state[parameter][moment]
        for name, parameter in model.named_parameters()
        for moment in MOMENTS
        if moment in optimizer.state[parameter]
    }


def restore_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Put back what `optimizer_state` gave; KeyError if a trained parameter has none."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            saved = {moment: tensors[f"{moment}:{name}"] for moment in MOMENTS}
            optimizer.state[parameter] = {moment: tensor.to(parameter.device) for moment, tensor in saved.items()}


class Bfloat16Products(TorchFunctionMode):
    """Within it, linear layers of float32 multiply in bfloat16, forwards and backwards (arXiv 1905.12322).

    Weights, gradients, attention, norms and losses stay in float32. `torch.autocast` would take attention with it,
    whose bfloat16 form in torch is many times slower on a CPU.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Any function but that of linear layers is left as it is."""
        if func is functional.linear:
            return product(func, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def product(linear: Callable[..., Tensor], input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:  # noqa: A002 - torch's names
    """`linear` in bfloat16, its result in float32; what is not float32 is left alone."""
    if input.dtype is not torch.float32 or weight.dtype is not torch.float32:
        return linear(input, weight, bias)
    half = torch.bfloat16
    return linear(input.to(half), weight.to(half), None if bias is None else bias.to(half)).float()


PRECISIONS: Mapping[str, Callable[[], AbstractContextManager[object]]] = {
    "float32": nullcontext,
    "bfloat16": Bfloat16Products,
}
"""What updates are made in, by name."""
