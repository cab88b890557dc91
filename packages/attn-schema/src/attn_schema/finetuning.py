"""Configuration of fine-tuning: low-rank adapters (LoRA) on frozen, possibly quantized weights; DPO; distillation."""

from __future__ import annotations

from typing import Annotated, Literal

from attn_core.errors import InvalidValue

from attn_schema.schema import MODEL, Checked, in_panel

_lora = in_panel("LoRA")

MAX_RANK = 2**16
"""Maximum rank of an adapter."""
DEFAULT_ALPHA_PER_RANK = 2
"""The default of `lora_alpha`, as a multiple of `lora_rank`."""


class LoraConfig(Checked, frozen=True, kw_only=True):
    """A low-rank adapter (LoRA, Hu et al. 2021, arXiv 2106.09685) on a base model, whose weights are frozen.

    Without `lora_rank` there is no adapter, and all weights are trained.
    """

    lora_rank: (
        Annotated[int, _lora("Rank of the LoRA adapter; all weights are trained if not given.", ge=1, le=MAX_RANK)]
        | None
    ) = None
    lora_alpha: (
        Annotated[
            float,
            _lora("The adapter's output is scaled by lora_alpha / lora_rank; twice lora_rank if not given.", gt=0),
        ]
        | None
    ) = None
    lora_dropout: Annotated[float, _lora("Dropout probability of the adapter's inputs.", ge=0, lt=1)] = 0.0
    lora_target_modules: Annotated[
        tuple[str, ...],
        _lora(
            "Linear layers that get an adapter, by name suffix, such as q_proj; all linear layers of the blocks if "
            "empty."
        ),
    ] = ()
    use_rslora: Annotated[bool, _lora("Scale by lora_alpha / sqrt(lora_rank) (rsLoRA, arXiv 2312.03732).")] = False
    use_dora: Annotated[bool, _lora("Decompose weights into magnitude and direction (DoRA, arXiv 2402.09353).")] = False
    base_quantization: Annotated[
        Literal["none", "int8", "int4"],
        _lora("Quantization of the frozen weights of the base (QLoRA, arXiv 2305.14314)."),
    ] = "none"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lora_rank is not None:
            return
        for name in ("lora_alpha", "lora_dropout", "lora_target_modules", "use_rslora", "use_dora"):
            if getattr(self, name):
                raise InvalidValue.of(name, getattr(self, name), "none without lora_rank")
        if self.base_quantization != "none":
            raise InvalidValue.of("base_quantization", self.base_quantization, "none without lora_rank")

    @property
    def alpha(self) -> float:
        """`lora_alpha`, or its default, twice `lora_rank`."""
        return DEFAULT_ALPHA_PER_RANK * float(self.lora_rank or 1) if self.lora_alpha is None else self.lora_alpha


_objective = in_panel("Preferences and teacher")

BETAS = {"simpo": 2.0}
"""The defaults of `preference_beta`, by loss; that of the others is 0.1."""
REFERENCE_FREE = ("simpo", "orpo")
"""The losses of preferences that need no reference, and so no adapter."""
OPTIONS_OF_LOSSES = {
    "simpo_gamma": "simpo",
    "flipped_share": "robust",
    "desirable_weight": "kto",
    "undesirable_weight": "kto",
}
"""Options of single losses of preferences."""


class ObjectiveConfig(Checked, frozen=True, kw_only=True):
    """Training objectives other than next-token cross-entropy: preferences and distillation.

    Distillation adds a loss on a teacher's probabilities (arXiv 1503.02531).
    """

    preference_loss: Annotated[
        Literal["sigmoid", "sigmoid_norm", "hinge", "ipo", "robust", "apo_zero", "apo_down", "kto", "simpo", "orpo"],
        _objective(
            "Loss with data of the format preference: DPO (sigmoid; sigmoid_norm per token) and its kin, KTO, which "
            "also takes rows of prompt, completion and label, and SimPO and ORPO, which need no adapter."
        ),
    ] = "sigmoid"
    preference_beta: (
        Annotated[
            float,
            _objective(
                "Beta of the loss of preferences: with a reference, a higher one keeps the model closer to its base. 2 "
                "with simpo and 0.1 with the others if not given.",
                gt=0,
            ),
        ]
        | None
    ) = None
    simpo_gamma: (
        Annotated[float, _objective("Margin of SimPO by which chosen answers win; 1 if not given.", ge=0)] | None
    ) = None
    flipped_share: (
        Annotated[
            float, _objective("Share of flipped preferences that robust assumes; 0.1 if not given.", gt=0, lt=0.5)
        ]
        | None
    ) = None
    desirable_weight: (
        Annotated[float, _objective("Weight of desirable answers in KTO; 1 if not given.", ge=0)] | None
    ) = None
    undesirable_weight: (
        Annotated[float, _objective("Weight of undesirable answers in KTO; 1 if not given.", ge=0)] | None
    ) = None
    teacher: (
        Annotated[
            str,
            _objective(
                "Teacher model, by name or folder, whose probabilities are a training target in addition to the text "
                "(distillation, arXiv 1503.02531); it must have the same vocabulary as the model.",
                metavar="NAME|PATH",
                names=MODEL,
            ),
        ]
        | None
    ) = None
    distillation_temperature: (
        Annotated[float, _objective("Softmax temperature of teacher and model; 1 if not given.", gt=0)] | None
    ) = None
    distillation_weight: (
        Annotated[
            float,
            _objective(
                "Weight of the distillation loss; the cross-entropy has 1 minus this weight. 0.5 if not given.",
                gt=0,
                le=1,
            ),
        ]
        | None
    ) = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("distillation_temperature", "distillation_weight"):
            if getattr(self, name) is not None and self.teacher is None:
                raise InvalidValue.of(name, getattr(self, name), "none without a teacher")
        for name, loss in OPTIONS_OF_LOSSES.items():
            if getattr(self, name) is not None and self.preference_loss != loss:
                raise InvalidValue.of(name, getattr(self, name), f"none unless preference_loss is {loss}")

    @property
    def beta(self) -> float:
        """`preference_beta`, or its default."""
        return BETAS.get(self.preference_loss, 0.1) if self.preference_beta is None else self.preference_beta

    @property
    def margin(self) -> float:
        """`simpo_gamma`, or its default."""
        return 1.0 if self.simpo_gamma is None else self.simpo_gamma

    @property
    def flipped(self) -> float:
        """`flipped_share`, or its default."""
        return 0.1 if self.flipped_share is None else self.flipped_share

    @property
    def desirable(self) -> float:
        """`desirable_weight`, or its default."""
        return 1.0 if self.desirable_weight is None else self.desirable_weight

    @property
    def undesirable(self) -> float:
        """`undesirable_weight`, or its default."""
        return 1.0 if self.undesirable_weight is None else self.undesirable_weight
