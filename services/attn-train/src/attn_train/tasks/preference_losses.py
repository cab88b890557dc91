"""Losses of preferences, of the log probabilities of answers: DPO and its kin, SimPO, ORPO and KTO.

`chosen` and `rejected` are tensors [pairs], in nats: log-ratios log π(y|x) - log π_ref(y|x) of policy and reference, or
log probabilities of the policy where a loss has no reference. Losses that are `AVERAGED` take them per token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from attn_schema.finetuning import ObjectiveConfig
from torch import Tensor
from torch.nn.functional import logsigmoid

AVERAGED = frozenset({"sigmoid_norm", "ipo", "simpo", "orpo"})
"""Losses of log probabilities per token of an answer, not of their sums."""


def sigmoid(chosen: Tensor, rejected: Tensor, objective: ObjectiveConfig) -> Tensor:
    """-log σ(β (r_w - r_l)): DPO (Rafailov et al. 2023, arXiv 2305.18290, equation 7)."""
    return -logsigmoid(objective.beta * (chosen - rejected))


def hinge(chosen: Tensor, rejected: Tensor, objective: ObjectiveConfig) -> Tensor:
    """max(0, 1 - β (r_w - r_l)): SLiC with a reference (Liu et al. 2023, arXiv 2309.06657, equation 10)."""
    return (1 - objective.beta * (chosen - rejected)).relu()


def ipo(chosen: Tensor, rejected: Tensor, objective: ObjectiveConfig) -> Tensor:
    """(r_w - r_l - 1 / 2β)² (Azar et al. 2023, arXiv 2310.12036, equation 17), of ratios per token."""
    return (chosen - rejected - 1 / (2 * objective.beta)).square()


def robust(chosen: Tensor, rejected: Tensor, objective: ObjectiveConfig) -> Tensor:
    """DPO without the bias of a share ε of preferences that are flipped (Chowdhury et al. 2024, arXiv 2403.00409,
    equation 7): ((1 - ε) L(w, l) - ε L(l, w)) / (1 - 2ε)."""
    share = objective.flipped
    kept, flipped = sigmoid(chosen, rejected, objective), sigmoid(rejected, chosen, objective)
    return ((1 - share) * kept - share * flipped) / (1 - 2 * share)


def apo_zero(chosen: Tensor, rejected: Tensor, objective: ObjectiveConfig) -> Tensor:
    """1 - σ(β r_w) + σ(β r_l): the chosen become likelier, the rejected less (D'Oosterlinck et al. 2024, arXiv
    2408.06266, equation 7)."""
    return 1 - (objective.beta * chosen).sigmoid() + (objective.beta * rejected).sigmoid()


def apo_down(chosen: Tensor, rejected: Tensor, objective: ObjectiveConfig) -> Tensor:
    """σ(β r_w) + 1 - σ(β (r_w - r_l)): both become less likely, the rejected more so (arXiv 2408.06266, equation 8)."""
    return (objective.beta * chosen).sigmoid() + 1 - (objective.beta * (chosen - rejected)).sigmoid()


def simpo(chosen: Tensor, rejected: Tensor, objective: ObjectiveConfig) -> Tensor:
    """-log σ(β (log π_w - log π_l) - γ), per token and without a reference (Meng et al. 2024, arXiv 2405.14734,
    equation 6)."""
    return -logsigmoid(objective.beta * (chosen - rejected) - objective.margin)


def orpo(chosen: Tensor, rejected: Tensor, objective: ObjectiveConfig) -> Tensor:
    """-log π_w - β log σ(log odds_w - log odds_l), odds π / (1 - π), per token and without a reference (Hong et al.
    2024, arXiv 2403.07691, equations 4 to 7, whose λ is β)."""
    odds = chosen - rejected - (log1mexp(chosen) - log1mexp(rejected))
    return -chosen - objective.beta * logsigmoid(odds)


PAIR_LOSSES: Mapping[str, Callable[[Tensor, Tensor, ObjectiveConfig], Tensor]] = {
    "sigmoid": sigmoid,
    "sigmoid_norm": sigmoid,
    "hinge": hinge,
    "ipo": ipo,
    "robust": robust,
    "apo_zero": apo_zero,
    "apo_down": apo_down,
    "simpo": simpo,
    "orpo": orpo,
}
"""Losses [pairs] of pairs, by the values of `ObjectiveConfig.preference_loss`."""


def log1mexp(log: Tensor) -> Tensor:
    """log(1 - exp(x)) for x < 0, without cancellation (Mächler 2012)."""
    small = log > -0.6931
    return torch.where(small, (-torch.expm1(log.where(small, -1.0))).log(), torch.log1p(-log.where(~small, -1.0).exp()))


def kto(ratios: Tensor, mismatched: Tensor, desirable: Tensor, objective: ObjectiveConfig) -> Tensor:
    """λ_D (1 - σ(β (r - z))) of desirable answers, λ_U (1 - σ(β (z - r))) of others (Ethayarajh et al. 2024, arXiv
    2402.01306, section 4.1); all are [examples].

    z is the mean log-ratio of the answers to the prompts before them in the batch, `mismatched`, at least 0; it
    estimates a divergence, and has no gradient.
    """
    reference = mismatched.mean().clamp(min=0).detach()
    gain = objective.beta * (ratios - reference)
    weight = torch.where(desirable, objective.desirable, objective.undesirable)
    return weight * (1 - torch.where(desirable, gain, -gain).sigmoid())
