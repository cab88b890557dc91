"""Losses of completions that a model has sampled: GRPO and its kin, and the divergences of distillation (GKD).

Tensors [tokens] hold the completions' tokens end to end; `rows` [tokens], int64, are the completions of these.
"""

from __future__ import annotations

import math

import torch
from attn_schema.on_policy import OnPolicyConfig
from torch import Tensor
from torch.nn.functional import kl_div, log_softmax

SMALL = 1e-4
"""Added to the standard deviation of rewards, as TRL has it."""


def advantages_of(rewards: Tensor, config: OnPolicyConfig) -> Tensor:
    """Return (r - mean) / std of rewards [prompts · num_generations], float32: the mean is that of the prompt's
    completions, the (unbiased) standard deviation theirs or the batch's (Shao et al. 2024, arXiv 2402.03300, 4.1.2)."""
    groups = rewards.view(-1, config.num_generations)
    centred = groups - groups.mean(1, keepdim=True)
    if config.scale_rewards == "group":
        centred = centred / (groups.std(1, keepdim=True) + SMALL)
    elif config.scale_rewards == "batch":
        centred = centred / (groups.std() + SMALL)
    return centred.flatten()


def summed(values: Tensor, rows: Tensor, count: int) -> Tensor:
    """Return the sums [count] of values [tokens] of each row."""
    return values.new_zeros(count).index_add(0, rows, values)


def grpo_loss(
    logprobs: tuple[Tensor, Tensor, Tensor | None], advantages: Tensor, rows: Tensor, config: OnPolicyConfig
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of a batch, and means over its tokens: the share of clipped ratios and the divergence `kl`.

    `logprobs` [tokens], in nats, are those of the policy that is trained, of the one that sampled and, if there is one,
    of the reference; `advantages` [completions].

    A token's loss is -min(ρ A, clip(ρ, 1 - ε_low, 1 + ε_high) A) + β kl, of the ratio ρ of trained and sampling policy
    and the divergence's estimate k3 (arXiv 2402.03300, equations 3 and 4), by default times ρ, which makes its gradient
    unbiased (arXiv 2512.02556). `loss_type` says how tokens are averaged.
    """
    (trained, sampled, reference), count = logprobs, len(advantages)
    lengths = summed(torch.ones_like(trained), rows, count).clamp(min=1)
    logs = trained - sampled
    if config.importance_sampling_level == "sequence":
        logs = (summed(logs, rows, count) / lengths)[rows]
    ratio, gain = logs.exp(), advantages[rows]
    low, high = 1 - config.epsilon_low, 1 + (config.epsilon_high or config.epsilon_low)
    losses = -torch.minimum(ratio * gain, ratio.clamp(low, high) * gain)
    clipped = ((ratio < low) & (gain < 0)) | ((ratio > high) & (gain > 0))
    tokens = max(1, len(rows))
    measured = {"clip_ratio": clipped.detach().sum() / tokens}
    if reference is not None:
        behind = reference - trained
        divergence = behind.exp() - behind - 1
        weighted = divergence * ratio if config.use_bias_correction_kl else divergence
        losses = losses + (config.beta or 0.0) * weighted
        measured["kl"] = divergence.detach().sum() / tokens
    if config.loss_type == "grpo":
        return (summed(losses, rows, count) / lengths).mean(), measured
    if config.loss_type == "dr_grpo":
        return losses.sum() / (count * config.max_completion_length), measured
    return losses.sum() / tokens, measured


def generalized_jsd(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """Return β KL(teacher || m) + (1 - β) KL(student || m) of logits [tokens, vocabulary], m = β teacher + (1 - β)
    student, the mean over tokens in nats; KL(teacher || student) for β = 0 and KL(student || teacher) for 1.

    Source: Agarwal et al. 2023, arXiv 2306.13649, equation 1.
    """
    ours, theirs = log_softmax(student.float(), -1), log_softmax(teacher.float(), -1)
    if beta == 0:
        found = kl_div(ours, theirs, reduction="sum", log_target=True)
    elif beta == 1:
        found = kl_div(theirs, ours, reduction="sum", log_target=True)
    else:
        mixture = torch.logaddexp(theirs + math.log(beta), ours + math.log1p(-beta))
        towards = (kl_div(mixture, logs, reduction="sum", log_target=True) for logs in (theirs, ours))
        found = beta * next(towards) + (1 - beta) * next(towards)
    return found / max(1, len(student))
