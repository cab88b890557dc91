"""Configuration of fine-tuning: low-rank adapters (LoRA) on frozen, possibly quantized weights; DPO; distillation."""

from __future__ import annotations

import math
import re
from typing import Annotated, Literal

from attn_core.errors import InvalidValue
from msgspec import Meta

from attn_schema.schema import MAX_INT32, MODEL, Checked, fields_of, in_panel

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
            "Layers that get an adapter, by name suffix, such as q_proj, embed_tokens or the parameter gate_up_proj of "
            "stacked experts; all linear layers of the blocks if empty."
        ),
    ] = ()
    rank_pattern: Annotated[
        tuple[str, ...], _lora("Ranks of single layers, as PATTERN=RANK; patterns match the ends of names, as in PEFT.")
    ] = ()
    alpha_pattern: Annotated[tuple[str, ...], _lora("Values of lora_alpha for single layers, as PATTERN=ALPHA.")] = ()
    modules_to_save: Annotated[
        tuple[str, ...],
        _lora("Layers all of whose weights are trained and saved with the adapter: embed_tokens, lm_head."),
    ] = ()
    trainable_token_indices: Annotated[
        tuple[Annotated[int, Meta(ge=0, le=MAX_INT32)], ...],
        _lora("Ids of the tokens whose embeddings are trained, such as those that are new."),
    ] = ()
    use_rslora: Annotated[bool, _lora("Scale by lora_alpha / sqrt(lora_rank) (rsLoRA, arXiv 2312.03732).")] = False
    use_dora: Annotated[bool, _lora("Decompose weights into magnitude and direction (DoRA, arXiv 2402.09353).")] = False
    base_quantization: Annotated[
        Literal["none", "int8", "int4"],
        _lora(
            "Quantization of the frozen weights of the base (QLoRA, arXiv 2305.14314); weights that are stored in "
            "blocks of so many bits stay so."
        ),
    ] = "none"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.ranks, self.alphas  # noqa: B018 -- which are checked so
        if self.lora_rank is not None:
            return
        for info in fields_of(LoraConfig):
            if getattr(self, info.name) != info.default:
                raise InvalidValue.of(info.name, getattr(self, info.name), "none without lora_rank")

    @property
    def alpha(self) -> float:
        """`lora_alpha`, or its default, twice `lora_rank`."""
        return DEFAULT_ALPHA_PER_RANK * float(self.lora_rank or 1) if self.lora_alpha is None else self.lora_alpha

    @property
    def ranks(self) -> dict[str, int]:
        """`rank_pattern` as ranks by pattern."""
        return {key: int(value) for key, value in self._pattern("rank_pattern", whole=True).items()}

    @property
    def alphas(self) -> dict[str, float]:
        """`alpha_pattern` as values by pattern."""
        return self._pattern("alpha_pattern")

    def _pattern(self, name: str, *, whole: bool = False) -> dict[str, float]:
        found: dict[str, float] = {}
        for given in getattr(self, name):
            key, _, value = given.rpartition("=")
            try:
                re.compile(key)
                found[key] = float(value)
            except (ValueError, re.error):
                found[key] = math.nan
            if not key or not 0 < found[key] <= MAX_RANK or (whole and found[key] % 1):
                kind = f"a whole number from 1 to {MAX_RANK}" if whole else "a number above 0"
                raise InvalidValue.of(name, given, f"PATTERN=NUMBER, a regular expression and {kind}")
        return found


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
