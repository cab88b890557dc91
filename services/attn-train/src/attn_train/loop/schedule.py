"""The learning rate over a run."""

from __future__ import annotations

import math

from attn_train.spec import OptimizerSpec


def learning_rate(step: int, spec: OptimizerSpec) -> float:
    """The rate of update number `step`, counted from 0.

    It rises in equal parts from 0 to `spec.learning_rate`, which the last of `spec.warmup` updates has, and falls
    along half a cosine to `spec.min_learning_rate`, which the last update has (Loshchilov & Hutter 2017,
    arXiv 1608.03983, without restarts).
    """
    if step < spec.warmup:
        return spec.learning_rate * (step + 1) / spec.warmup
    falling = spec.steps - spec.warmup
    progress = (step - spec.warmup + 1) / falling
    share = 0.5 * (1.0 + math.cos(math.pi * progress))
    return spec.min_learning_rate + share * (spec.learning_rate - spec.min_learning_rate)
