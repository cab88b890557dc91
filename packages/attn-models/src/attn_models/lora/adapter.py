"""The weights of an adapter: two low-rank matrices for each adapted linear layer, and with DoRA a magnitude."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self, cast

import torch
from attn_core.errors import InvalidValue, WrongState
from torch import Tensor, nn
from torch.nn import functional

from attn_models.lora.peft_config import AdapterConfig
from attn_models.lora.sites import LoraSite, lora_sites

SEPARATOR = "/"
"""Replaces the dots in layer names, because keys of an `nn.ModuleDict` must not contain dots."""


class LoraLayer(nn.Module):
    """The LoRA term `scaling` B A x of one layer (arXiv 2106.09685, section 4.1): A [rank, inputs], B [outputs, rank].

    With a `magnitude` m [outputs], the layer's output is m (W x + scaling B A x) / |W + scaling B A|, norms taken over
    the inputs of each output and held constant in backward passes (DoRA, arXiv 2402.09353, equations 5 and 11).
    """

    def __init__(self, a: Tensor, b: Tensor, scaling: float, magnitude: Tensor | None = None) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(a), nn.Parameter(b)
        self.magnitude = None if magnitude is None else nn.Parameter(magnitude)
        self.scaling = scaling
        self.dropout = 0.0
        self._norm: Tensor | None = None

    def product(self, rows: Tensor) -> Tensor:
        """The low-rank product `scaling` B A x [..., outputs] for `rows` [..., inputs]."""
        if self.dropout and self.training:
            rows = functional.dropout(rows, self.dropout)
        low = functional.linear(rows.to(self.a.dtype), self.a)
        return (functional.linear(low, self.b) * self.scaling).to(rows.dtype)

    def change(self, rows: Tensor, out: Tensor, site: LoraSite) -> Tensor:
        """The term to add to the layer's output `out` [..., outputs] for `rows` [..., inputs]."""
        added = self.product(rows)
        if self.magnitude is None:
            return added
        scale = (self.magnitude / self.norm(site)).to(out.dtype)
        bias = site.bias()
        plain = out if bias is None else out - bias.to(out.dtype)
        return (scale - 1) * plain + scale * added

    def norm(self, site: LoraSite) -> Tensor:
        """|W + scaling B A| [outputs]; computed once outside of training."""
        if self._norm is not None:
            return self._norm
        with torch.no_grad():
            norm: Tensor = (site.weight() + self.delta()).norm(dim=1)
        self._norm = None if self.training else norm
        return norm

    def train(self, mode: bool = True) -> Self:  # noqa: FBT001, FBT002 -- as torch has it
        """As in torch; what training changes is computed again."""
        self._norm = None
        return super().train(mode)

    def delta(self) -> Tensor:
        """scaling B A [outputs, inputs]."""
        return self.scaling * (self.b @ self.a)

    def merged(self, site: LoraSite) -> Tensor:
        """The weight [outputs, inputs] of the layer with the adapter merged into it."""
        changed = site.weight() + self.delta()
        if self.magnitude is None:
            return changed
        return (self.magnitude / self.norm(site))[:, None] * changed


class LoraAdapter(nn.Module):
    """The layers of an adapter by the names of the model's own linear layers, such as `blocks.0.attention.query`.

    `key` identifies the adapter in caches, so that results of one adapter are not used for another.
    """

    def __init__(self, config: AdapterConfig, layers: Mapping[str, LoraLayer], key: str = "") -> None:
        super().__init__()
        self.config = config
        self.key = key
        self.layers = nn.ModuleDict({name.replace(".", SEPARATOR): layer for name, layer in layers.items()})

    def __len__(self) -> int:
        """The number of layers."""
        return len(self.layers)

    def __iter__(self) -> Iterator[str]:
        """The names of the layers."""
        return (name.replace(SEPARATOR, ".") for name in self.layers)

    def of(self, name: str) -> LoraLayer | None:
        """The adapter layer for the model's layer `name`; None if there is none."""
        place = name.replace(".", SEPARATOR)
        return cast("LoraLayer", self.layers[place]) if place in self.layers else None

    @classmethod
    def fresh(
        cls,
        model: Any,
        config: AdapterConfig,
        *,
        modules: Mapping[str, str],
        targets: Sequence[str] = (),
        dropout: float = 0.0,
    ) -> LoraAdapter:
        """A new adapter that does not change the model yet: B is zero, A is initialised like torch's linear layers.

        `modules` maps the names of the model's linear layers to those in the base's checkpoint. Layers of which either
        name ends in one of `targets` are adapted, or all layers without targets. Raises `InvalidValue` for a target
        that matches no linear layer.
        """
        sites = lora_sites(model)
        chosen = {name: site for name, site in sites.items() if not targets or _chosen(name, modules, targets)}
        for target in targets:
            if not any(_chosen(name, modules, [target]) for name in sites):
                known = sorted({modules.get(name, name).rpartition(".")[2] for name in sites})
                raise InvalidValue.of("lora_target_modules", target, ", ".join(known))
        made = {}
        for name, site in chosen.items():
            a = torch.empty(config.r, site.inputs)
            # The bound of Kaiming initialisation with a = √5.
            nn.init.uniform_(a, -1 / math.sqrt(site.inputs), 1 / math.sqrt(site.inputs))
            b = torch.zeros(site.outputs, config.r)
            magnitude = site.weight().norm(dim=1).float() if config.use_dora else None
            made[name] = LoraLayer(a, b, config.scaling(modules.get(name, name)), magnitude)
            made[name].dropout = dropout
        return cls(config, made).to(next(model.parameters()).device)


def _chosen(name: str, modules: Mapping[str, str], targets: Sequence[str]) -> bool:
    names = {name, modules.get(name, name)}
    return any(one == target or one.endswith(f".{target}") for one in names for target in targets)


@torch.no_grad()
def merge_adapter(model: Any, adapter: LoraAdapter) -> None:
    """Merge the adapter into the model's weights in place; raises `WrongState` if they are packed."""
    sites = lora_sites(model)
    for name in adapter:
        site, layer = sites[name], adapter.of(name)
        if not isinstance(site.module, nn.Linear):
            raise WrongState(f"{name}: its weights are packed; load the model with quantization=none to merge")
        if layer is not None:
            site.module.weight[site.start : site.start + site.outputs] = (
                layer.eval().merged(site).to(site.module.weight.dtype)
            )


def require_fits(adapter: LoraAdapter, model: Any) -> None:
    """Raise `InvalidValue`, naming the layer, if the model lacks a layer of the adapter or its shape differs."""
    sites = lora_sites(model)
    for name in adapter:
        layer = adapter.of(name)
        if layer is None or name not in sites:
            raise InvalidValue.of("adapter", name, "linear layers of the model")
        site = sites[name]
        given = (layer.a.shape[1], layer.b.shape[0])
        if given != (site.inputs, site.outputs):
            raise InvalidValue.of("adapter", f"{name} of {given[0]} inputs and {given[1]} outputs",
                                  f"{site.inputs} inputs and {site.outputs} outputs, as in the model")  # fmt: skip
