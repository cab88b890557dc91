"""Trainings that go wrong: a loss that is no number, a model that has become worse than guessing, equal rewards."""

from __future__ import annotations

import math
from collections.abc import Mapping

from attn_core.errors import UserError

from attn_train.tasks.base import Dataset, TrainingTask

MEASUREMENTS = 3
"""How many bad losses in a row end a training."""
DEAD = 0.9
"""A gradient of zero is bad at a loss above so many times that of equal probabilities."""
LEARNED, FACTOR, MARGIN = 1.1, 1.25, 1.0
"""A loss is bad above `FACTOR` times that of equal probabilities plus `MARGIN` nats, once it was at most `LEARNED`
times that: far enough that neither the first steps nor a hard batch are taken for a divergence."""

STEPS = 20
"""After so many steps in a row with equal rewards alone, that is said."""


class TrainingDiverged(UserError):  # noqa: N818 - named, as all errors here, for what happened
    """The loss is NaN or infinite, or has risen far above that of a guess."""

    reason = "TRAINING_DIVERGED"


def require_finite(name: str, value: float, step: int) -> None:
    """Raise `TrainingDiverged` for a value that is no number."""
    if not math.isfinite(value):
        _fail(name, value, step, "")


def _fail(name: str, value: float, step: int, why: str) -> None:
    text = f"the {name} is {value:g} at step {step}{why}; a lower learning rate or a longer warm-up may help"
    raise TrainingDiverged(text, step=step, loss=value)


class Divergence:
    """Watches the cross-entropy of a task with a vocabulary; other losses have no value that says too much."""

    def __init__(self, dataset: Dataset, task: TrainingTask) -> None:
        size = dataset.model_fields.get("vocab_size")
        self._guess = math.log(size) if size and getattr(task, "cross_entropy", True) else math.inf
        self._learned, self._bad = False, 0

    def is_bad(self, loss: float) -> bool:
        """Whether a model that has learned something has lost it; its weights replace no checkpoint."""
        return self._learned and loss > FACTOR * self._guess + MARGIN

    def measured(self, loss: float, norm: float, step: int, *, last: bool) -> None:
        """Take a loss that is reported, and the gradient's norm; raises `TrainingDiverged` for one that is no number,
        for the third bad one in a row, and for a bad one at the `last` step.

        No better than a guess without any gradient is bad, too: all units are saturated, and no step changes that.
        """
        require_finite("loss", loss, step)
        self._learned = self._learned or loss <= LEARNED * self._guess < math.inf
        dead = norm == 0 and loss > DEAD * self._guess
        self._bad = self._bad + 1 if dead or self.is_bad(loss) else 0
        if self._bad < (1 if last else MEASUREMENTS):
            return
        if dead:
            _fail("gradient norm", norm, step, f" and the loss {loss:.3g}: no weight changes any more")
        else:
            _fail("loss", loss, step, f", far above {self._guess:.3g}, that of equal probabilities")


class EqualRewards:
    """Watches for steps in which the completions of every prompt are rewarded alike, so that no advantage differs from
    0."""

    def __init__(self) -> None:
        self._since: int | None = None
        self._said = False

    def measured(self, values: Mapping[str, float], step: int) -> str | None:
        """Take the metrics of the steps up to this one; return what to log, once."""
        share = values.get("frac_reward_zero_std")
        if share is None:
            return None
        if share < 1 or self._since is None:
            self._since = step
        if self._said or step - self._since < STEPS:
            return None
        self._said = True
        when = f"from step {self._since + 1} to {step}"
        equal = f"{when} the completions of every prompt were rewarded alike (frac_reward_zero_std is 1)"
        return f"{equal}: nothing is learned from them; other prompts or rewards may help"
