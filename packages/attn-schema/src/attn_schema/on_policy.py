"""Configuration of training on what the model itself samples: GRPO on rewards, and distillation (GKD)."""

from __future__ import annotations

from typing import Annotated, Literal

from attn_core.errors import InvalidValue

from attn_schema.optimization import MAX_STEPS
from attn_schema.schema import MAX_INT32, Checked, in_panel
from attn_schema.settings import addresses_of

_sampled = in_panel("On-policy: GRPO and GKD")

MAX_GENERATIONS = 64
"""Maximum number of completions of a prompt, those of a request."""
BETA = 0.5
"""The default of `beta` in distillation; that of GRPO is 0."""


class OnPolicyConfig(Checked, frozen=True, kw_only=True):
    """Training on completions that the model samples: GRPO (Shao et al. 2024, arXiv 2402.03300) with data of the format
    prompt, and generalized knowledge distillation (GKD, Agarwal et al. 2023, arXiv 2306.13649) with `lmbda`.

    The names are those of TRL's `GRPOConfig` and `GKDConfig`, except for `epsilon_low`, as `epsilon` is AdamW's.
    """

    reward_funcs: Annotated[
        tuple[str, ...], _sampled("Rewards of completions by name, added up; see `attn list rewards`.", metavar="NAME")
    ] = ()
    reward_weights: Annotated[tuple[float, ...], _sampled("Weight of each reward; 1 if not given.")] = ()
    num_generations: Annotated[
        int,
        _sampled(
            "Completions of each prompt, whose rewards are compared; batch_size counts completions and is a multiple.",
            ge=2,
            le=MAX_GENERATIONS,
        ),
    ] = 4
    num_iterations: Annotated[int, _sampled("Steps on the same completions.", ge=1, le=MAX_STEPS)] = 1
    max_completion_length: Annotated[int, _sampled("Maximum number of tokens of a completion.", ge=1, le=MAX_INT32)] = (
        256
    )
    temperature: Annotated[
        float, _sampled("Temperature of sampling; with GRPO also that of the policy which is trained.", gt=0)
    ] = 1.0
    beta: (
        Annotated[
            float,
            _sampled(
                "GRPO: weight of the KL divergence from the base, 0 if not given. GKD: 0 for the divergence "
                "KL(teacher || student), 1 for its reverse, 0.5 (if not given) for that of Jensen and Shannon.",
                ge=0,
            ),
        ]
        | None
    ) = None
    epsilon_low: Annotated[
        float, _sampled("The ratio of policies is clipped at 1 - epsilon_low (TRL's epsilon).", gt=0, le=1)
    ] = 0.2
    epsilon_high: (
        Annotated[float, _sampled("It is clipped at 1 + epsilon_high, epsilon_low if not given.", gt=0)] | None
    ) = None
    loss_type: Annotated[
        Literal["grpo", "bnpo", "dr_grpo", "dapo"],
        _sampled(
            "Mean of the tokens' losses: of each completion first (grpo), over the tokens of a batch (bnpo) or of a "
            "step (dapo), or by completions of the maximum length (dr_grpo)."
        ),
    ] = "dapo"
    use_bias_correction_kl: Annotated[
        bool, _sampled("Weight the divergence by the ratio too, so that its gradient is unbiased (arXiv 2512.02556).")
    ] = True
    scale_rewards: Annotated[
        Literal["group", "batch", "none"],
        _sampled("Whether advantages are divided by the standard deviation of the prompt's rewards or of the batch's."),
    ] = "group"
    importance_sampling_level: Annotated[
        Literal["token", "sequence"],
        _sampled("Whether a token or a whole completion (GSPO, arXiv 2507.18071) has a ratio; sequence needs grpo."),
    ] = "token"
    mask_truncated_completions: Annotated[
        bool, _sampled("Do not train on completions that max_completion_length has cut off.")
    ] = False
    batch_invariant: Annotated[
        bool,
        _sampled(
            "GRPO: compute the forward passes of sampling and of training by the same operations in the same order, so "
            "that the ratio of the first step is exactly 1; in float32 on a CPU."
        ),
    ] = False
    lmbda: (
        Annotated[
            float,
            _sampled(
                "GKD, with a teacher and chats: share of the batches whose answers the model samples; those of the "
                "others are the dataset's.",
                ge=0,
                le=1,
            ),
        ]
        | None
    ) = None

    rollout_server: Annotated[
        str,
        _sampled(
            "GRPO: HOST:PORT of a running server whose engines sample, in place of one in the process of training; for "
            "admins.",
            metavar="HOST:PORT",
        ),
    ] = ""
    rollout_model: Annotated[
        str,
        _sampled("Name of the base model there, whose weights are replaced by those that are trained.", metavar="NAME"),
    ] = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rollout_server:
            self._require_server()
        elif self.rollout_model:
            raise InvalidValue.of("rollout_model", self.rollout_model, "none without rollout_server")
        if self.reward_weights and len(self.reward_weights) != len(self.reward_funcs):
            allowed = f"{len(self.reward_funcs)}, one for each of reward_funcs"
            raise InvalidValue.of("reward_weights", f"{len(self.reward_weights)} weights", allowed)
        if self.importance_sampling_level == "sequence" and self.loss_type != "grpo":
            allowed = "grpo with importance_sampling_level sequence, whose ratios are those of completions"
            raise InvalidValue.of("loss_type", self.loss_type, allowed)
        if self.lmbda is not None and (self.beta or 0) > 1:
            raise InvalidValue.of("beta", self.beta, "0 to 1 with lmbda")

    def require(self, form: str, teacher: str | None, batch_size: int) -> None:
        """Raise `InvalidValue` for options that do not go with a data format, teacher and batch size."""
        if form == "prompt":
            self._require_groups(batch_size)
            return
        mine = {"lmbda", "beta", "temperature", "max_completion_length"} if self.lmbda is not None else set()
        for name in self.__struct_fields__:
            if name not in mine and getattr(self, name) != getattr(OnPolicyConfig(), name):
                raise InvalidValue.of(name, getattr(self, name), "none unless format is prompt (GRPO)")
        if self.lmbda is not None and (form != "chat" or teacher is None):
            raise InvalidValue.of("lmbda", self.lmbda, "none without a teacher and the format chat (GKD)")

    def _require_server(self) -> None:
        try:
            addresses_of(self.rollout_server)
        except InvalidValue as error:
            raise InvalidValue.of("rollout_server", self.rollout_server, error.metadata["allowed"]) from None
        if not self.rollout_model:
            raise InvalidValue.of("rollout_model", "", "the name of a model of rollout_server")

    def _require_groups(self, batch_size: int) -> None:
        if not self.reward_funcs:
            raise InvalidValue.of("reward_funcs", "none", "at least one with the format prompt, which has no answers")
        if self.lmbda is not None:
            raise InvalidValue.of("lmbda", self.lmbda, "none with the format prompt, which has no answers")
        if batch_size % self.num_generations:
            allowed = f"a multiple of num_generations, {self.num_generations}: it counts completions"
            raise InvalidValue.of("batch_size", batch_size, allowed)
