"""A feed-forward made of many, of which each token uses a few."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import cast

import torch
from attn_core.kernels.linear import Pack
from torch import Tensor, nn

from attn_models.decoder.config import DecoderConfig
from attn_models.decoder.feedforward import FeedForward, GatedFeedForward
from attn_models.decoder.mixture import Experts
from attn_models.decoder.routers import ROUTERS


class MixtureOfExperts(nn.Module):
    """Σᵢ gᵢ(x) FFNᵢ(x) over the experts that the router chooses for the token x (arXiv 2401.04088, section 2.1), and
    what the shared experts say to every token (arXiv 2401.06066, section 3.2), times σ(w·x) where they are gated.

    Every token reaches all the experts it chose, whatever its neighbours chose: there is no capacity to overflow. The
    shared experts are one feed-forward of all their inner elements, which is their sum.
    """

    def __init__(
        self, config: DecoderConfig, experts: Experts, build: Callable[[DecoderConfig], FeedForward | GatedFeedForward]
    ) -> None:
        super().__init__()
        self.chosen = experts.per_token
        self.router = ROUTERS[config.routing](config.width, experts)
        one = dataclasses.replace(config, hidden=experts.hidden)
        self.experts = nn.ModuleList(build(one) for _ in range(experts.count))
        several = dataclasses.replace(config, hidden=experts.shared * experts.hidden) if experts.shared else None
        self.shared = None if several is None else build(several)
        self.shared_gate = nn.Linear(config.width, 1, bias=False) if experts.gated else None

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., width] to [..., width]; an expert that nobody chose is not run."""
        rows = hidden.reshape(-1, hidden.shape[-1])
        chosen, weights = self.router(rows)
        mixed = torch.zeros_like(rows)
        for index in chosen.unique().tolist():
            row, place = (chosen == index).nonzero(as_tuple=True)
            fed = self.experts[index](rows[row]) * weights[row, place, None]
            mixed = mixed.index_add(0, row, fed.to(mixed.dtype))
        if self.shared is not None:
            said = self.shared(rows)
            mixed = mixed + (said if self.shared_gate is None else torch.sigmoid(self.shared_gate(rows)) * said)
        return mixed.view_as(hidden)

    def pack(self, pack: Pack) -> None:
        """Pack the matrices of every expert for serving; the router stays exact, as near scores decide the path,
        and so does the gate, which is small."""
        for expert in self._each():
            expert.pack(pack)
        if self.shared is not None:
            self.shared.pack(pack)

    def idle_parameters(self) -> int:
        """Parameters that one token does not use."""
        one = sum(parameter.numel() for parameter in self._each()[0].parameters())
        return (len(self.experts) - self.chosen) * one

    def _each(self) -> Sequence[FeedForward | GatedFeedForward]:
        return cast("Sequence[FeedForward | GatedFeedForward]", self.experts)


def active_parameters(model: nn.Module) -> int:
    """Parameters that one token uses, of a model whose weights are not packed: all but those of idle experts."""
    idle = sum(module.idle_parameters() for module in model.modules() if isinstance(module, MixtureOfExperts))
    return sum(parameter.numel() for parameter in model.parameters()) - idle
