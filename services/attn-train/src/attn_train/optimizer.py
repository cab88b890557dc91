"""Optimizers and learning rate schedules."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import torch
from attn_core.errors import CheckpointInvalid, InvalidValue
from attn_schema.optimization import OptimizerConfig
from torch import Tensor, nn

from attn_train.eight_bit import STATE, BlockwiseAdamW, eight_bit_weights


def learning_rate(step: int, config: OptimizerConfig, width: int | None = None) -> float:
    """Return the learning rate of step `step`, from 0: linear warm-up, then the decay of `config.lr_scheduler_type`.

    The peak is reached at step `warmup_steps - 1`. It is `learning_rate`, for noam multiplied by
    (width · warmup_steps)^-0.5, where `width` is the model's `hidden_size`. Raises `InvalidValue` for noam without it.
    """
    peak = _peak(config, width)
    if step < config.warmup_steps:
        return peak * (step + 1) / config.warmup_steps
    return DECAYS[config.lr_scheduler_type](step, peak, config)


def _peak(config: OptimizerConfig, width: int | None) -> float:
    if config.lr_scheduler_type != "noam":
        return config.learning_rate
    if width is None:
        raise InvalidValue.of(
            "lr_scheduler_type", "noam", "another schedule: this one needs the hidden_size of the model, which has none"
        )
    return float(config.learning_rate * (width * config.warmup_steps) ** -0.5)


def _fallen(step: int, config: OptimizerConfig) -> float:
    """Return the share of the steps after the warm-up that are done after this step, above 0 and at most 1."""
    return (step - config.warmup_steps + 1) / (config.steps - config.warmup_steps)


def _lowest(config: OptimizerConfig) -> float:
    return config.with_defaults().min_learning_rate or 0.0


def _cosine(step: int, peak: float, config: OptimizerConfig) -> float:
    """Cosine decay to `min_learning_rate` (Loshchilov & Hutter 2017, arXiv 1608.03983, without restarts)."""
    lowest = _lowest(config)
    return lowest + 0.5 * (1.0 + math.cos(math.pi * _fallen(step, config))) * (peak - lowest)


def _linear(step: int, peak: float, config: OptimizerConfig) -> float:
    return peak + _fallen(step, config) * (_lowest(config) - peak)


def _constant(step: int, peak: float, config: OptimizerConfig) -> float:  # noqa: ARG001 -- as all schedules
    return peak


def _wsd(step: int, peak: float, config: OptimizerConfig) -> float:
    """Warmup-stable-decay (arXiv 2404.06395): linear to `min_learning_rate` over the last `decay_steps` steps."""
    decay = int(config.with_defaults().decay_steps or 1)
    fallen = max(0.0, (step + 1 - (config.steps - decay)) / decay)
    return peak + fallen * (_lowest(config) - peak)


def _inverse_sqrt(step: int, peak: float, config: OptimizerConfig) -> float:
    """peak · (warmup / step)^0.5 with steps from 1; with the peak of noam, equation 3 of Vaswani et al. 2017."""
    return float(peak * (config.warmup_steps / (step + 1)) ** 0.5)


def _halving(step: int, peak: float, config: OptimizerConfig) -> float:
    """Halve the rate at `start_decay_steps` and every `decay_steps` after it (Sutskever et al. 2014, section 3.4)."""
    config = config.with_defaults()
    # Halvings are counted from the end of a longer warm-up, which ends at the peak.
    start, every = max(int(config.start_decay_steps or 0), config.warmup_steps), int(config.decay_steps or 1)
    return peak if step < start else peak * 0.5 ** (1 + (step - start) // every)


DECAYS: Mapping[str, Callable[[int, float, OptimizerConfig], float]] = {
    "cosine": _cosine,
    "linear": _linear,
    "constant": _constant,
    "inverse_sqrt": _inverse_sqrt,
    "noam": _inverse_sqrt,
    "halving": _halving,
    "wsd": _wsd,
}
"""Schedules by name: (step, peak, config) -> learning rate of a step after the warm-up; steps count from 0."""


def optimizer_of(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """Return the optimizer that `config.optim` names, for the model's trained parameters."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if config.optim == "muon":
        return MuonAndAdamW(model, config.with_defaults())
    if config.optim == "adamw_8bit":
        return AdamW8bit(model, config.with_defaults())
    if config.optim == "adamw":
        return adamw(trained, config.with_defaults(), decayed(model))
    return OPTIMIZERS[config.optim](trained, config.with_defaults())


def decayed(model: nn.Module) -> set[nn.Parameter]:
    """Return the parameters that weight decay applies to: those of at least two dimensions, in which rows are vectors
    that a product is taken with, as opposed to biases and the like, which modules name in `no_weight_decay`."""
    # By name, as a worker's shard of a parameter is not the one that the module holds.
    spared = {
        f"{path}.{name}".removeprefix(".")
        for path, module in model.named_modules()
        for name in getattr(module, "no_weight_decay", ())
    }
    return {part for name, part in model.named_parameters() if part.dim() >= 2 and name not in spared}


def adamw(
    trained: list[nn.Parameter], config: OptimizerConfig, decays: Container[nn.Parameter]
) -> torch.optim.Optimizer:
    """AdamW; weight decay applies to the parameters in `decays`."""
    # The fused update makes one pass over memory instead of about a dozen.
    return torch.optim.AdamW(_decay_groups(trained, config, decays), **_adam_settings(config), fused=True)


def _decay_groups(
    trained: list[nn.Parameter], config: OptimizerConfig, decays: Container[nn.Parameter]
) -> list[dict[str, Any]]:
    groups: list[dict[str, Any]] = [
        {"params": [p for p in trained if p in decays], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p not in decays], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _adam_settings(config: OptimizerConfig) -> dict[str, Any]:
    betas = config.beta1 or 0.0, config.beta2 or 0.0
    return {"lr": config.learning_rate, "betas": betas, "eps": config.epsilon or 0.0}


def sgd(trained: list[nn.Parameter], config: OptimizerConfig) -> torch.optim.Optimizer:
    """Stochastic gradient descent, with momentum if configured."""
    return torch.optim.SGD(trained, lr=config.learning_rate, momentum=config.momentum or 0.0)


def adadelta(trained: list[nn.Parameter], config: OptimizerConfig) -> torch.optim.Optimizer:
    """Adadelta (Zeiler 2012, arXiv 1212.5701); the paper uses a learning rate of 1."""
    rho, epsilon = config.rho or 0.0, config.epsilon or 0.0
    return torch.optim.Adadelta(trained, lr=config.learning_rate, rho=rho, eps=epsilon)


OPTIMIZERS: Mapping[str, Callable[[list[nn.Parameter], OptimizerConfig], torch.optim.Optimizer]] = {
    "sgd": sgd,
    "adadelta": adadelta,
}
"""Functions that create an optimizer from parameters and a config with all defaults filled in, by name."""


def muon_weights(model: nn.Module) -> set[nn.Parameter]:
    """Return the parameters that Muon updates: the matrices of hidden layers, that is of linear layers and experts.

    Embeddings and the layers that models name in `output_layers` are not among them, nor what is tied to one.
    """
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    outputs = (getattr(module, name) for module in model.modules() for name in getattr(module, "output_layers", ()))
    tables += [module for module in outputs if module is not None]
    spared = {parameter for module in tables for parameter in module.parameters()}
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    return {p for module in linear for p in module.parameters() if p.dim() == 2 and p not in spared}


class Joined(torch.optim.Optimizer):
    """Several optimizers, each of some parameters, as one."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        self._parts = parts
        groups = [group for part in parts for group in part.param_groups]
        super().__init__([p for group in groups for p in group["params"]], {})
        # The groups are shared with the parts, so a learning rate that is set here applies to them.
        self.param_groups = groups
        for part in parts:
            part.state = self.state

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parameters once."""
        del closure
        for part in self._parts:
            part.step()


class MuonAndAdamW(Joined):
    """Muon for the matrices of hidden layers, AdamW for all other parameters (Jordan et al. 2024; arXiv 2502.16982).

    Muon's updates are scaled to the RMS of AdamW's (equation 4 of the latter), so that both use the same learning rate.
    """

    def __init__(self, model: nn.Module, config: OptimizerConfig) -> None:
        trained, matrices = [p for p in model.parameters() if p.requires_grad], muon_weights(model)
        hidden, rest = [p for p in trained if p in matrices], [p for p in trained if p not in matrices]
        parts: list[torch.optim.Optimizer] = []
        if hidden:
            parts.append(
                torch.optim.Muon(
                    hidden,
                    lr=config.learning_rate,
                    weight_decay=config.weight_decay or 0.0,
                    momentum=config.momentum or 0.0,
                    adjust_lr_fn="match_rms_adamw",
                )
            )
        if rest:
            parts.append(adamw(rest, config, decayed(model)))
        super().__init__(parts)


class AdamW8bit(Joined):
    """AdamW with moments of 8 bits for the `eight_bit_weights` of a model, and of float32 for all others."""

    def __init__(self, model: nn.Module, config: OptimizerConfig) -> None:
        eight, decays = eight_bit_weights(model), decayed(model)
        rest = [p for p in model.parameters() if p.requires_grad and p not in eight]
        parts: list[torch.optim.Optimizer] = [adamw(rest, config, decays)] if rest else []
        if eight:
            large = [p for p in model.parameters() if p in eight]
            groups = _decay_groups(large, config, decays)
            parts.append(BlockwiseAdamW(groups, _adam_settings(config)))
        super().__init__(parts)


def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the optimizer's state as "moment:parameter" -> tensor; empty before the first step and for plain SGD."""
    return {
        f"{moment}:{name}": tensor
        for name, parameter in model.named_parameters()
        for moment, tensor in optimizer.state.get(parameter, {}).items()
        if isinstance(tensor, Tensor)
    }


MOMENTS: Mapping[str, tuple[str, ...]] = {
    "adamw": ("exp_avg", "exp_avg_sq", "step"),
    "sgd": ("momentum_buffer",),
    "adadelta": ("square_avg", "acc_delta", "step"),
    "muon": ("momentum_buffer",),
    "adamw_8bit": STATE,
}
"""The state tensors of each parameter after the first step, by optimizer; plain SGD has none."""

PARTLY: Mapping[str, Callable[[nn.Module], set[nn.Parameter]]] = {
    "muon": muon_weights,
    "adamw_8bit": eight_bit_weights,
}
"""The parameters that optimizers update in their own way, by their names; AdamW updates all others."""


def restore_optimizer_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor], config: OptimizerConfig
) -> None:
    """Restore what `optimizer_state` returned.

    A parameter without any state, which has had no gradient yet, gets none. Raises `CheckpointInvalid` if only a part
    of a parameter's state is there.
    """
    own = PARTLY[config.optim](model) if config.optim in PARTLY else None
    for name, parameter in model.named_parameters():
        moments = MOMENTS[config.optim] if config.optim != "sgd" or config.momentum else ()
        if own is not None and parameter not in own:
            moments = MOMENTS["adamw"]
        if parameter.requires_grad and moments:
            saved = {moment: tensors[key] for moment in moments if (key := f"{moment}:{name}") in tensors}
            if 0 < len(saved) < len(moments):
                raise CheckpointInvalid.of(name, f"its optimizer state has {', '.join(saved)} of {', '.join(moments)}")
            if saved:
                optimizer.state[parameter] = {moment: tensor.to(parameter.device) for moment, tensor in saved.items()}
