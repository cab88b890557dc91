"""REINFORCE for layers that sample keys: records of their samples, the loss that trains them, and its baseline.

Xu et al. 2015 (arXiv 1502.03044), section 4.1; Williams 1992.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(frozen=True, eq=False)
class SampledKeys:
    """The keys that a layer sampled in one training pass.

    `log_probability` of each sample and `entropy` of the distribution it was drawn from, in nats. Both are [batch,
    num_heads, query_len], have gradients to queries and keys, and are zero for a query that may see no key.
    """

    log_probability: Tensor
    entropy: Tensor


class SamplesKeys:
    """Base class, beside `torch.nn.Module`, of modules that sample keys in training.

    `samples` are those of the last training pass: None before the first one and after a pass that sampled nothing.
    """

    samples: SampledKeys | None = None
    recorded: list[SampledKeys] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """The attributes without the samples, which belong to the graph of one pass: copies have had no pass."""
        return {name: value for name, value in vars(self).items() if name not in {"samples", "recorded"}}

    def keep(self, samples: SampledKeys | None) -> None:
        """Record the samples of a training pass; the module itself calls this once in every pass."""
        self.samples = samples
        if samples is not None and self.recorded is not None:
            self.recorded.append(samples)


def samples_keys(model: nn.Module) -> bool:
    """Whether a layer of the model samples keys in training."""
    return any(isinstance(module, SamplesKeys) for module in model.modules())


@contextmanager
def recorded_samples(model: nn.Module) -> Iterator[list[SampledKeys]]:
    """A context that collects the samples of all layers of the model, from every call inside it, in a list."""
    found: list[SampledKeys] = []
    layers = [module for module in model.modules() if isinstance(module, SamplesKeys)]
    for layer in layers:
        layer.recorded = found
    try:
        yield found
    finally:
        for layer in layers:
            layer.recorded = None


def reinforce_loss(
    samples: Iterable[SampledKeys],
    reward: Tensor,
    baseline: Tensor | float = 0.0,
    *,
    reward_weight: float = 1.0,
    entropy_weight: float = 0.002,
) -> Tensor:
    """The REINFORCE loss -mean(λ_r (reward - baseline) Σ log p + λ_e Σ entropy), a scalar (Xu et al., equation 11).

    `samples` are those of every sampling layer. `reward` is [batch], such as the log likelihood of a whole output, or
    [batch, query_len], one per query; log probabilities are summed over layers and heads, and over queries where the
    reward is [batch]. Reward and baseline get no gradient. The baseline changes the variance of the gradient only.
    """
    advantage = reward_weight * (reward - baseline).detach()
    gain: Any = advantage * 0.0
    axes = (1, 2) if reward.dim() == 1 else (1,)
    for layer in samples:
        gain = gain + advantage * layer.log_probability.sum(axes) + entropy_weight * layer.entropy.sum(axes)
    return -gain.mean()  # type: ignore[no-any-return]


class MovingBaseline:
    """Moving average of the mean reward: b ← decay b + (1 - decay) mean(reward) (Xu et al. 2015, section 4.2.1).

    `value` is the average so far; with `initial` None it starts at the first mean reward.
    """

    def __init__(self, decay: float = 0.9, initial: float | None = None) -> None:
        self.decay = decay
        self.value = initial

    def update(self, reward: Tensor) -> float:
        """Include these rewards in the average; returns the baseline from before."""
        mean = float(reward.detach().mean())
        before = mean if self.value is None else self.value
        self.value = self.decay * before + (1 - self.decay) * mean
        return before
