"""Which experts a token is sent to, and how much each of them counts."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor, nn

from attn_models.decoder.mixture import Experts


class Router(nn.Module):
    """Sends each token to the experts with its highest scores W x; of equal scores the first experts are taken.

    It looks at each token alone, and no expert is ever full. In training it also keeps how evenly the last tokens
    were spread, where the config asks for `balance`.
    """

    def __init__(self, width: int, experts: Experts) -> None:
        super().__init__()
        self.experts, self.chosen = experts.count, experts.per_token
        self.score = nn.Linear(width, experts.count, bias=False)
        self.balance = experts.balance
        self.imbalance: Tensor | None = None

    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The experts [rows, chosen] (int64) of rows [rows, width], best first, and their weights, as `rows`' type."""
        scores: Tensor = self.score(rows)
        # Near scores must not become equal by the rounding of 16-bit exponentials.
        scores = scores if scores.dtype == torch.float64 else scores.float()
        chosen = self.choose(scores)
        if self.training:
            self.note(scores, chosen)
        return chosen, self.weigh(scores, chosen).to(rows.dtype)

    def choose(self, scores: Tensor) -> Tensor:
        """The experts [rows, chosen] of scores [rows, experts], best first."""
        return best(scores, self.chosen)

    def note(self, scores: Tensor, chosen: Tensor) -> None:
        """Keep how evenly the tokens of this training pass are spread."""
        if self.balance > 0:
            self.imbalance = imbalance(self.affinity(scores), chosen)

    def affinity(self, scores: Tensor) -> Tensor:
        """How much of each token every expert wants, [rows, experts], of scores [rows, experts]; rows sum to one."""
        return scores.softmax(dim=-1)

    def take_imbalance(self) -> Tensor | None:
        """What the last training pass left, once: it holds on to the graph of that pass."""
        taken, self.imbalance = self.imbalance, None
        return taken

    @abstractmethod
    def weigh(self, scores: Tensor, chosen: Tensor) -> Tensor:
        """The weights [rows, chosen] of the chosen experts of scores [rows, experts]."""


class MixtralRouter(Router):
    """Weights are a softmax over the scores of the chosen alone, so they sum to one (arXiv 2401.04088, section 2.1)."""

    def weigh(self, scores: Tensor, chosen: Tensor) -> Tensor:
        """Softmax of what was chosen."""
        return scores.gather(-1, chosen).softmax(dim=-1)


class SwitchRouter(Router):
    """Weights are the chosen's part of a softmax over all scores (Fedus et al. 2021, arXiv 2101.03961, equation 2).

    So the router learns from the model's loss even where a token uses a single expert.
    """

    def weigh(self, scores: Tensor, chosen: Tensor) -> Tensor:
        """What was chosen of the softmax."""
        return scores.softmax(dim=-1).gather(-1, chosen)


def best(scores: Tensor, number: int) -> Tensor:
    """The places [..., number] of the highest scores [..., scores], highest first; of equal ones the first."""
    # Sorted stably: topk does not say which of two equal scores it takes.
    return scores.argsort(dim=-1, descending=True, stable=True)[..., :number]


def imbalance(affinity: Tensor, chosen: Tensor) -> Tensor:
    """E Σᵢ fᵢ Pᵢ of rows [rows, E] that sum to one and choices [rows, chosen]: 1 where tokens spread evenly, E where
    all go to one.

    fᵢ is the fraction of choices that fell on expert i, Pᵢ the mean of what it wants (arXiv 2101.03961, equations 4 to
    6, whose tokens choose one). Gradients flow through P alone.
    """
    return affinity.shape[-1] * (fractions(chosen, affinity) * affinity.mean(dim=0)).sum()


def fractions(chosen: Tensor, like: Tensor) -> Tensor:
    """The part of the choices [rows, chosen] that fell on each expert of `like` [rows, experts], as its type."""
    counts = torch.bincount(chosen.flatten(), minlength=like.shape[-1])
    return counts.to(like.dtype) / max(chosen.numel(), 1)


def balance_loss(model: nn.Module) -> Tensor | float:
    """The sum of `balance` times the imbalance of every router in the last training pass; 0 where there is none.

    To be added to the loss of that pass, before its gradients are taken, once.
    """
    routers = [module for module in model.modules() if isinstance(module, Router)]
    taken = [(router.balance, router.take_imbalance()) for router in routers]
    return sum((balance * value for balance, value in taken if value is not None), start=0.0)
