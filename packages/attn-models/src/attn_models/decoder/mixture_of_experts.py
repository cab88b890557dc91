"""Mixtures of experts: routers, the layer itself and the loss that balances the load."""

from __future__ import annotations

import dataclasses
import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, cast

import torch
from attn_core.kernels.linear import Pack
from attn_schema.decoder import ExpertsConfig, FeedForwardConfig
from torch import Tensor, nn

from attn_models.decoder.layers import FeedForward, GatedFeedForward


class Router(nn.Module):
    """Routes each token to the experts with the highest scores W x; of equal scores the first.

    Tokens are routed independently, without a capacity limit. In training it also adds the number of tokens of every
    expert to `load` and, if `router_aux_loss_coef` is positive, keeps the imbalance of the last batch, both of the
    tokens that are True in `counted` [batch, tokens], if given. `summed` adds up the counts of all workers that share a
    batch. If a step has several batches, `step_load` is the load of all of them, and the imbalance of each is its part.
    Weights multiply the outputs of experts, or their inputs if `weighs_inputs` is true.
    """

    weighs_inputs: ClassVar[bool] = False

    def __init__(self, config: ExpertsConfig) -> None:
        super().__init__()
        self.experts, self.chosen = config.num_experts or 0, config.num_experts_per_tok or 0
        self.score = nn.Linear(config.hidden_size, self.experts, bias=config.router_bias)
        self.balance, self.rate = config.router_aux_loss_coef, 0.0
        self.summed: Callable[[Tensor], Tensor] = as_counted
        self.imbalance: Tensor | None = None
        self.counted: Tensor | None = None
        self.load: Tensor | None = None
        self.step_load: Tensor | None = None

    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The experts [rows, chosen] (int64) for `rows` [rows, width], one per token, best first, and their weights
        [rows, chosen], in the dtype of `rows`.
        """
        scores: Tensor = self.score(rows)
        # At least float32, as rounding to 16 bits could make close scores equal.
        scores = scores if scores.dtype == torch.float64 else scores.float()
        chosen = self.choose(scores)
        if self.training:
            if self.counted is not None:
                # A prediction module reads the last tokens of each row only.
                kept = self.counted[:, -(len(rows) // len(self.counted)) :].flatten()
                self.note(scores[kept], chosen[kept])
            else:
                self.note(scores, chosen)
        return chosen, self.weigh(scores, chosen).to(rows.dtype)

    def choose(self, scores: Tensor) -> Tensor:
        """The experts [rows, chosen] for `scores` [rows, experts], best first."""
        return best(scores, self.chosen)

    def note(self, scores: Tensor, chosen: Tensor) -> None:
        """Store the load of this training batch, and its part of the step's imbalance."""
        if not (self.balance or self.rate):
            return
        load = self.summed(torch.bincount(chosen.flatten(), minlength=self.experts))
        self.load = load if self.load is None else self.load + load
        if self.balance > 0:
            whole = load if self.step_load is None else self.step_load
            self.imbalance = imbalance(self.affinity(scores), whole, self.chosen)

    def affinity(self, scores: Tensor) -> Tensor:
        """Routing probabilities [rows, experts] for `scores` [rows, experts]; each row sums to one."""
        return scores.softmax(dim=-1)

    def __getstate__(self) -> dict[str, Any]:
        """The attributes without the imbalance of the last training batch, which belongs to the graph of that batch."""
        return {**vars(self), "imbalance": None}

    def take_imbalance(self) -> Tensor | None:
        """Return and clear the imbalance of the last training batch, which keeps the batch's autograd graph alive."""
        taken, self.imbalance = self.imbalance, None
        return taken

    @abstractmethod
    def weigh(self, scores: Tensor, chosen: Tensor) -> Tensor:
        """The weights [rows, chosen] of the experts `chosen` [rows, chosen], from `scores` [rows, experts]."""


class MixtralRouter(Router):
    """Weights are a softmax over the chosen experts' scores, so they sum to one (arXiv 2401.04088, section 2.1)."""

    def weigh(self, scores: Tensor, chosen: Tensor) -> Tensor:
        """Softmax over the chosen scores."""
        return scores.gather(-1, chosen).softmax(dim=-1)


class SwitchRouter(Router):
    """Weights are those of a softmax over all scores (Fedus et al. 2021, arXiv 2101.03961, equation 2).

    So the router receives gradients from the model's loss even if a token uses a single expert.
    """

    def weigh(self, scores: Tensor, chosen: Tensor) -> Tensor:
        """Softmax over all scores, gathered at the chosen experts."""
        return scores.softmax(dim=-1).gather(-1, chosen)


class Llama4Router(Router):
    """Weights are the sigmoids of the chosen scores; they multiply the inputs of the experts (Llama 4)."""

    weighs_inputs = True

    def weigh(self, scores: Tensor, chosen: Tensor) -> Tensor:
        """Sigmoids of the chosen scores."""
        return scores.gather(-1, chosen).sigmoid()


def best(scores: Tensor, number: int) -> Tensor:
    """The indices [..., number] of the highest `scores` [..., scores], highest first; of equal ones the first."""
    # A stable sort: topk does not define which of two equal scores it takes.
    return scores.argsort(dim=-1, descending=True, stable=True)[..., :number]


def as_counted(counts: Tensor) -> Tensor:
    """Return `counts` unchanged: the default of `Router.summed`, for a process that has its batches to itself."""
    return counts


def imbalance(affinity: Tensor, load: Tensor, chosen: int) -> Tensor:
    """The load imbalance E Σᵢ fᵢ Pᵢ from probabilities `affinity` [rows, E] and the number of tokens `load` [E] that
    chose each expert, `chosen` experts each: 1 for a uniform load, E if all tokens are routed to one expert.

    fᵢ is the fraction of choices of expert i, Pᵢ the mean of its probability (arXiv 2101.03961, equations 4 to
    6, whose tokens choose one). Gradients flow through P alone. If `load` counts the tokens of further rows, of other
    workers or batches, the result is the part of the given rows, and the parts add up to the imbalance of all.
    """
    counted = load.to(affinity.dtype)
    choices = counted.sum().clamp(min=1)
    return affinity.shape[-1] * (counted / choices * affinity.sum(dim=0)).sum() * chosen / choices


@contextmanager
def counted_tokens(model: nn.Module, counted: Tensor) -> Iterator[None]:
    """While this is open, the routers of `model` take the load only of tokens that are True in `counted` [batch,
    tokens], such as those that are no padding."""
    routers = [module for module in model.modules() if isinstance(module, Router)]
    for router in routers:
        router.counted = counted
    try:
        yield
    finally:
        for router in routers:
            router.counted = None


def router_aux_loss(model: nn.Module) -> Tensor | float:
    """The auxiliary load-balancing loss of the last training batch: the sum over routers of `router_aux_loss_coef`
    times the imbalance; 0 without any.

    Add it once to the loss of that batch, before its backward pass.
    """
    routers = [module for module in model.modules() if isinstance(module, Router)]
    taken = [(router.balance, router.take_imbalance()) for router in routers]
    return sum((balance * value for balance, value in taken if value is not None), start=0.0)


EPSILON = 1e-20
"""Added to sums of sigmoids, which may be 0, before dividing by them."""


class GroupedRouter(Router):
    """Chooses groups of neighbouring experts first, then experts from these groups only (arXiv 2405.04434, 2.2.2)."""

    def __init__(self, config: ExpertsConfig) -> None:
        super().__init__(config)
        self.groups, self.groups_chosen = config.n_group or 1, config.topk_group or 1
        self.scale = config.routed_scaling_factor

    def choose(self, scores: Tensor) -> Tensor:
        """The experts with the best selection scores from the best groups."""
        wanted = self.selection_scores(scores)
        if self.groups_chosen < self.groups:
            grouped = wanted.reshape(*wanted.shape[:-1], self.groups, -1)
            groups = best(self.group_scores(grouped), self.groups_chosen)
            outside = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter(-1, groups, value=False)
            wanted = grouped.masked_fill(outside[..., None], -math.inf).flatten(-2)
        return best(wanted, self.chosen)

    @abstractmethod
    def selection_scores(self, scores: Tensor) -> Tensor:
        """The scores [rows, experts] by which experts are selected, from router scores [rows, experts]."""

    @abstractmethod
    def group_scores(self, grouped: Tensor) -> Tensor:
        """The scores [rows, groups] by which groups are selected, from selection scores [rows, groups, experts per
        group].
        """


class DeepseekV2Router(GroupedRouter):
    """Softmax over all experts; a group's score is that of its best expert. Weights are not normalised."""

    def selection_scores(self, scores: Tensor) -> Tensor:
        """The router scores themselves, as a softmax would keep their order."""
        return scores

    def group_scores(self, grouped: Tensor) -> Tensor:
        """The highest score of each group."""
        return grouped.amax(dim=-1)

    def weigh(self, scores: Tensor, chosen: Tensor) -> Tensor:
        """Softmax over all scores, gathered at the chosen experts, times the scale."""
        return scores.softmax(dim=-1).gather(-1, chosen) * self.scale


class DeepseekV3Router(GroupedRouter):
    """Sigmoids s; experts are chosen by s + b, and weighted by s alone (DeepSeek-V3, arXiv 2412.19437, section 2.1.2).

    The biases b, float32, have no gradient: `update_biases` lowers those of experts with more than the mean load since
    its last call and raises the others, by `rate` each (auxiliary-loss-free load balancing, Wang et al. 2024,
    arXiv 2408.15664).
    """

    correction: Tensor

    def __init__(self, config: ExpertsConfig) -> None:
        super().__init__(config)
        self.register_buffer("correction", torch.zeros(self.experts, dtype=torch.float32))
        self.rate = config.router_bias_update_rate

    def selection_scores(self, scores: Tensor) -> Tensor:
        """Sigmoids plus the load-balancing biases."""
        return scores.sigmoid() + self.correction

    def group_scores(self, grouped: Tensor) -> Tensor:
        """The sum of the two highest scores of each group."""
        return grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(dim=-1)

    def weigh(self, scores: Tensor, chosen: Tensor) -> Tensor:
        """Sigmoids of the chosen scores, normalised to sum to the scale."""
        parts = scores.sigmoid().gather(-1, chosen)
        return parts / (parts.sum(dim=-1, keepdim=True) + EPSILON) * self.scale

    def affinity(self, scores: Tensor) -> Tensor:
        """Sigmoids normalised to sum to one (section 2.1.2, equation 18)."""
        parts = scores.sigmoid()
        return parts / (parts.sum(dim=-1, keepdim=True) + EPSILON)

    def update_biases(self) -> None:
        """Move every bias by `rate` towards a uniform load, according to the token counts since the last call."""
        if self.load is not None:
            load, self.load = self.load.to(self.correction.dtype), None
            self.correction += self.rate * (load.mean() - load).sign()


def update_router_biases(model: nn.Module) -> None:
    """Move the load-balancing biases of every router that has them (`DeepseekV3Router.update_biases`).

    Call it after each optimizer step.
    """
    for module in model.modules():
        if isinstance(module, DeepseekV3Router):
            module.update_biases()


ROUTERS: dict[str, type[Router]] = {
    "mixtral": MixtralRouter,
    "switch": SwitchRouter,
    "llama4": Llama4Router,
    "deepseek_v2": DeepseekV2Router,
    "deepseek_v3": DeepseekV3Router,
}


class MixtureOfExperts(nn.Module):
    """Σᵢ gᵢ(x) FFNᵢ(x), or Σᵢ FFNᵢ(gᵢ(x) x), over the experts that the router chooses for x (2401.04088, 2.1), plus
    the output of the shared experts (arXiv 2401.06066, section 3.2), multiplied by σ(w·x) if they are gated.

    There is no capacity limit: a token's output does not depend on other tokens. The shared experts are one
    feed-forward of their summed inner size, which computes the sum of their outputs.
    """

    def __init__(
        self, config: ExpertsConfig, build: Callable[[FeedForwardConfig], FeedForward | GatedFeedForward]
    ) -> None:
        super().__init__()
        self.router = ROUTERS[config.routing](config)
        self.chosen, width = self.router.chosen, config.expert_width
        one = dataclasses.replace(config, intermediate_size=width)
        self.experts = nn.ModuleList(build(one) for _ in range(self.router.experts))
        shared = config.n_shared_experts
        several = dataclasses.replace(config, intermediate_size=shared * width) if shared else None
        self.shared = None if several is None else build(several)
        self.shared_expert_gate = nn.Linear(config.hidden_size, 1, bias=False) if config.shared_expert_gate else None

    def forward(self, hidden: Tensor, routed: Tensor | None = None) -> Tensor:
        """Map `hidden` [..., width] to [..., width]; experts without tokens are not run.

        The router reads `routed` [..., any width] in place of `hidden`, if it is given.
        """
        rows = hidden.reshape(-1, hidden.shape[-1])
        chosen, weights = self.router(rows if routed is None else routed.reshape(len(rows), -1))
        mixed = torch.zeros_like(rows)
        for index in chosen.unique().tolist():
            row, place = (chosen == index).nonzero(as_tuple=True)
            expert_weights = weights[row, place, None]
            read = rows[row] * expert_weights if self.router.weighs_inputs else rows[row]
            fed = self.experts[index](read)
            fed = fed if self.router.weighs_inputs else fed * expert_weights
            mixed = mixed.index_add(0, row, fed.to(mixed.dtype))
        if self.shared is not None:
            shared_output = self.shared(rows)
            mixed = mixed + (
                shared_output
                if self.shared_expert_gate is None
                else torch.sigmoid(self.shared_expert_gate(rows)) * shared_output
            )
        return mixed.view_as(hidden)

    def pack(self, pack: Pack) -> None:
        """Prepack or quantize the matrices of every expert, but not those of the router, where rounding could change
        which experts are chosen, or of the shared experts' gate, which is small."""
        for expert in self._each():
            expert.pack(pack)
        if self.shared is not None:
            self.shared.pack(pack)

    def idle_parameters(self) -> int:
        """The number of parameters that one token does not use."""
        one = sum(parameter.numel() for parameter in self._each()[0].parameters())
        return (len(self.experts) - self.chosen) * one

    def _each(self) -> Sequence[FeedForward | GatedFeedForward]:
        return cast("Sequence[FeedForward | GatedFeedForward]", self.experts)


def active_parameters(model: nn.Module) -> int:
    """The number of parameters that one token uses: all but those of idle experts. The model must not be quantized."""
    idle = sum(module.idle_parameters() for module in model.modules() if isinstance(module, MixtureOfExperts))
    return sum(parameter.numel() for parameter in model.parameters()) - idle
