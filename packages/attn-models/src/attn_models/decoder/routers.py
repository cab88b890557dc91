"""Routers that hold a token to a few groups of experts, as DeepSeek's do, and all routers by name."""

from __future__ import annotations

import math
from abc import abstractmethod

import torch
from torch import Tensor, nn

from attn_models.decoder.mixture import Experts
from attn_models.decoder.routing import MixtralRouter, Router, SwitchRouter, best

SMALL = 1e-20
"""Added to sums of sigmoids, which may all be 0."""


class GroupedRouter(Router):
    """Chooses groups of neighbouring experts first, then experts of these groups alone (arXiv 2405.04434, 2.2.2)."""

    def __init__(self, width: int, experts: Experts) -> None:
        super().__init__(width, experts)
        self.groups, self.groups_chosen = experts.groups, experts.groups_per_token
        self.scale = experts.scale

    def choose(self, scores: Tensor) -> Tensor:
        """The best experts of the best groups."""
        wanted = self.preference(scores)
        if self.groups_chosen < self.groups:
            grouped = wanted.reshape(*wanted.shape[:-1], self.groups, -1)
            groups = best(self.of_groups(grouped), self.groups_chosen)
            outside = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter(-1, groups, value=False)
            wanted = grouped.masked_fill(outside[..., None], -math.inf).flatten(-2)
        return best(wanted, self.chosen)

    @abstractmethod
    def preference(self, scores: Tensor) -> Tensor:
        """By what experts are chosen, [rows, experts], of scores [rows, experts]."""

    @abstractmethod
    def of_groups(self, grouped: Tensor) -> Tensor:
        """By what groups are chosen, [rows, groups], of preferences [rows, groups, experts of one]."""


class DeepseekV2Router(GroupedRouter):
    """A softmax over all; a group is as good as its best expert. Weights are not made to sum to one."""

    def preference(self, scores: Tensor) -> Tensor:
        """The scores themselves, whose order a softmax keeps."""
        return scores

    def of_groups(self, grouped: Tensor) -> Tensor:
        """The best of each."""
        return grouped.amax(dim=-1)

    def weigh(self, scores: Tensor, chosen: Tensor) -> Tensor:
        """What was chosen of the softmax, times the scale."""
        return scores.softmax(dim=-1).gather(-1, chosen) * self.scale


class DeepseekV3Router(GroupedRouter):
    """Sigmoids s; experts are chosen by s + b, and weighed by s alone (DeepSeek-V3, arXiv 2412.19437, section 2.1.2).

    No loss moves the biases b, float32: `level` lowers those of experts that had more than the mean to do since it was
    last called, and raises the others', by one `rate` each (Wang et al. 2024, arXiv 2408.15664). So tokens spread
    without a gradient that disturbs what the model learns.
    """

    correction: Tensor

    def __init__(self, width: int, experts: Experts) -> None:
        super().__init__(width, experts)
        self.register_buffer("correction", torch.zeros(experts.count, dtype=torch.float32))
        self.rate = experts.rate
        self.load: Tensor | None = None

    def preference(self, scores: Tensor) -> Tensor:
        """Sigmoids, and the biases that spread tokens."""
        return scores.sigmoid() + self.correction

    def of_groups(self, grouped: Tensor) -> Tensor:
        """The sum of the best two of each."""
        return grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(dim=-1)

    def weigh(self, scores: Tensor, chosen: Tensor) -> Tensor:
        """Sigmoids of the chosen, made to sum to the scale."""
        parts = scores.sigmoid().gather(-1, chosen)
        return parts / (parts.sum(dim=-1, keepdim=True) + SMALL) * self.scale

    def affinity(self, scores: Tensor) -> Tensor:
        """Sigmoids made to sum to one (section 2.1.2, equation 18)."""
        parts = scores.sigmoid()
        return parts / (parts.sum(dim=-1, keepdim=True) + SMALL)

    def note(self, scores: Tensor, chosen: Tensor) -> None:
        """Count the tokens of every expert, too."""
        super().note(scores, chosen)
        if self.rate:
            counts = torch.bincount(chosen.flatten(), minlength=self.experts)
            self.load = counts if self.load is None else self.load + counts

    def level(self) -> None:
        """Move every bias by one rate towards an even load, by what was counted since the last call."""
        taken, self.load = self.load, None
        if taken is not None:
            load = taken.to(self.correction.dtype)
            self.correction += self.rate * (load.mean() - load).sign()


def level_experts(model: nn.Module) -> None:
    """After an update of the weights: move the biases of every router that has some (`DeepseekV3Router.level`)."""
    for module in model.modules():
        if isinstance(module, DeepseekV3Router):
            module.level()


ROUTERS: dict[str, type[Router]] = {
    "mixtral": MixtralRouter,
    "switch": SwitchRouter,
    "deepseek_v2": DeepseekV2Router,
    "deepseek_v3": DeepseekV3Router,
}
