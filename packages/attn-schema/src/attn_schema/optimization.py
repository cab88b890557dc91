"""Configuration of the optimizer and the learning rate schedule."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated, Literal, Self

from attn_core.errors import InvalidValue

from attn_schema.schema import Checked, in_panel

OPTIMIZER_PANEL = "Optimizer"
_optimizer = in_panel(OPTIMIZER_PANEL)

MAX_STEPS = 2**40
"""Maximum number of steps of a run."""
MAX_BATCH = 2**20
"""Maximum number of sequences of a batch, and of batches whose gradients are accumulated."""

OPTIMIZER_FIELDS: Mapping[str, Mapping[str, float]] = {
    "adamw": {"weight_decay": 0.1, "beta1": 0.9, "beta2": 0.99, "epsilon": 1e-8},
    "adamw_8bit": {"weight_decay": 0.1, "beta1": 0.9, "beta2": 0.99, "epsilon": 1e-8},
    "sgd": {"momentum": 0.0},
    "adadelta": {"rho": 0.95, "epsilon": 1e-6},
    "muon": {"weight_decay": 0.1, "momentum": 0.95, "beta1": 0.9, "beta2": 0.99, "epsilon": 1e-8},
}
"""The fields that each optimizer takes in addition to the learning rate, with their defaults."""

SCHEDULE_FIELDS: Mapping[str, tuple[str, ...]] = {
    "cosine": ("min_learning_rate",),
    "linear": ("min_learning_rate",),
    "constant": (),
    "inverse_sqrt": (),
    "noam": (),
    "halving": ("start_decay_steps", "decay_steps"),
    "wsd": ("min_learning_rate", "decay_steps"),
}
"""The fields that each schedule takes in addition to `learning_rate` and `warmup_steps`."""


class OptimizerConfig(Checked, frozen=True, kw_only=True):
    """The optimizer and its learning rate schedule.

    Optimizers: adamw (arXiv 1711.05101; Adam with weight_decay 0), sgd, adadelta (arXiv 1212.5701), muon (arXiv
    2502.16982; for matrices of hidden layers, with adamw for all other parameters), and adamw_8bit, adamw with moments
    of 8 bits for weights of at least 4096 elements that are no embeddings. Schedules, each after a linear
    warm-up: cosine (arXiv 1608.03983), linear, constant, inverse_sqrt, noam (arXiv 1706.03762, equation 3), halving
    (arXiv 1409.3215, section 3.4) and wsd (warm-up, stable, decay; arXiv 2404.06395). A field that the chosen optimizer
    or schedule does not use is rejected.
    """

    steps: Annotated[int, _optimizer("Number of optimizer steps.", ge=1, le=MAX_STEPS)] = 2000
    batch_size: Annotated[int, _optimizer("Sequences, pairs or images in a step.", ge=1, le=MAX_BATCH)] = 12
    optim: Annotated[Literal["adamw", "adamw_8bit", "sgd", "adadelta", "muon"], _optimizer("Optimizer.")] = "adamw"
    learning_rate: Annotated[
        float, _optimizer("Peak learning rate; with noam the factor of its formula.", gt=0, short="--lr")
    ] = 1e-3
    lr_scheduler_type: Annotated[
        Literal["cosine", "linear", "constant", "inverse_sqrt", "noam", "halving", "wsd"],
        _optimizer(
            "Learning rate schedule after the warm-up: cosine and linear decay to min_learning_rate, inverse_sqrt "
            "decays with the inverse square root of the step, noam is hidden_size^-0.5 times that, halving halves it "
            "every decay_steps, wsd keeps it constant until decay_steps before the end, then decays to "
            "min_learning_rate."
        ),
    ] = "cosine"
    min_learning_rate: (
        Annotated[
            float,
            _optimizer("Final learning rate, for cosine, linear and wsd; learning_rate / 10 if not given.", ge=0),
        ]
        | None
    ) = None
    warmup_steps: Annotated[int, _optimizer("Steps over which the learning rate rises from 0.", ge=0, le=MAX_STEPS)] = 0
    start_decay_steps: (
        Annotated[int, _optimizer("Steps before halving begins; two thirds of steps if not given.", ge=0, le=MAX_STEPS)]
        | None
    ) = None
    decay_steps: (
        Annotated[
            int,
            _optimizer(
                "Steps between halvings, a fifteenth of steps if not given; for wsd, steps of the decay, a tenth if "
                "not given.",
                ge=1,
                le=MAX_STEPS,
            ),
        ]
        | None
    ) = None
    weight_decay: (
        Annotated[float, _optimizer("Decoupled weight decay of matrices, for adamw and muon; 0.1 if not given.", ge=0)]
        | None
    ) = None
    beta1: (
        Annotated[
            float, _optimizer("Decay rate of the running mean of gradients, for adamw; 0.9 if not given.", ge=0, lt=1)
        ]
        | None
    ) = None
    beta2: (
        Annotated[
            float,
            _optimizer(
                "Decay rate of the running mean of squared gradients, for adamw; 0.99 if not given.", ge=0, lt=1
            ),
        ]
        | None
    ) = None
    epsilon: (
        Annotated[
            float,
            _optimizer("Added to denominators for stability; 1e-8 for adamw, 1e-6 for adadelta if not given.", gt=0),
        ]
        | None
    ) = None
    momentum: (
        Annotated[float, _optimizer("Momentum; if not given, 0 for sgd and 0.95 for muon.", ge=0, lt=1)] | None
    ) = None
    rho: (
        Annotated[float, _optimizer("Decay rate of the running means of adadelta; 0.95 if not given.", ge=0, lt=1)]
        | None
    ) = None
    gradient_accumulation_steps: Annotated[
        int,
        _optimizer(
            "Batches of batch_size whose gradients are accumulated for one step, equivalent to one larger batch.",
            ge=1,
            le=MAX_BATCH,
        ),
    ] = 1
    max_grad_norm: Annotated[
        float, _optimizer("Maximum norm of the whole gradient, to which it is clipped; 0 disables clipping.", ge=0)
    ] = 1.0
    max_grad_norm_ratio: (
        Annotated[
            float,
            _optimizer(
                "Skip the update of a step whose gradient norm is more than this many times the median of the last "
                "100, or not finite; no update is skipped if not given.",
                gt=1,
            ),
        ]
        | None
    ) = None
    ema_decay: (
        Annotated[
            float,
            _optimizer(
                "Decay rate of an exponential moving average of the weights, which is then evaluated and exported; if "
                "not given, the last weights are.",
                gt=0,
                lt=1,
            ),
        ]
        | None
    ) = None
    label_smoothing: Annotated[
        float,
        _optimizer(
            "Label smoothing: probability of the targets that the training loss spreads over the vocabulary or "
            "classes.",
            ge=0,
            lt=1,
        ),
    ] = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_known(OPTIMIZER_FIELDS, self.optim)
        self._require_known(SCHEDULE_FIELDS, self.lr_scheduler_type)
        if self.min_learning_rate is not None and self.min_learning_rate > self.learning_rate:
            allowed = f"0 to learning_rate {self.learning_rate:g}"
            raise InvalidValue.of("min_learning_rate", self.min_learning_rate, allowed)
        if self.lr_scheduler_type == "wsd" and self.warmup_steps + (self.decay_steps or 0) > self.steps:
            allowed = f"1 to {self.steps - self.warmup_steps}, the steps after the warm-up"
            raise InvalidValue.of("decay_steps", self.decay_steps, allowed)
        if self.warmup_steps > self.steps:
            raise InvalidValue.of("warmup_steps", self.warmup_steps, f"0 to steps {self.steps}")
        if self.lr_scheduler_type in {"noam", "inverse_sqrt"} and not self.warmup_steps:
            allowed = f"at least 1 with {self.lr_scheduler_type}, whose formula divides by it"
            raise InvalidValue.of("warmup_steps", self.warmup_steps, allowed)

    def _require_known(self, fields: Mapping[str, Collection[str]], chosen: str) -> None:
        """Raise `InvalidValue` for a given field that `chosen` does not take, but another choice does."""
        for name in {name: None for names in fields.values() for name in names}:
            if getattr(self, name) is not None and name not in fields[chosen]:
                takers = ", ".join(other for other, names in fields.items() if name in names)
                raise InvalidValue.of(name, getattr(self, name), f"none with {chosen}; only {takers} takes it")

    def with_defaults(self) -> Self:
        """A copy in which every field of the chosen optimizer and schedule has a value."""
        scheduled = {
            "min_learning_rate": self.learning_rate / 10,
            "start_decay_steps": self.steps * 2 // 3,
            "decay_steps": max(1, self.steps // (10 if self.lr_scheduler_type == "wsd" else 15)),
        }
        taken = {name: scheduled[name] for name in SCHEDULE_FIELDS[self.lr_scheduler_type]}
        taken |= OPTIMIZER_FIELDS[self.optim]
        return self.replace(**{name: value for name, value in taken.items() if getattr(self, name) is None})
