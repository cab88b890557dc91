"""The weights of an adapter: those of each adapted linear layer, and of changed tables of tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from attn_core.errors import InvalidValue, WrongState
from torch import nn

from attn_models.lora.layer import LoraLayer
from attn_models.lora.peft_config import AdapterConfig, matches
from attn_models.lora.sites import is_named, lora_sites
from attn_models.lora.tables import EMBEDDING, TABLES, TableChange, fits, fresh_tables, is_tied, table_of

SEPARATOR = "/"
"""Replaces the dots in layer names, because keys of an `nn.ModuleDict` must not contain dots."""


class LoraAdapter(nn.Module):
    """The layers of an adapter by the names of the model's own linear layers, such as `blocks.0.attention.query`, and
    the changes of its embedding and unembedding by these names.

    `key` identifies the adapter in caches, so that results of one adapter are not used for another.
    """

    def __init__(
        self,
        config: AdapterConfig,
        layers: Mapping[str, LoraLayer],
        key: str = "",
        tables: Mapping[str, TableChange] | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.key = key
        self.tables = nn.ModuleDict(tables or {})
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

    def table(self, name: str) -> TableChange:
        """The change of the model's `embedding` or `unembedding`, one of `tables`."""
        return cast("TableChange", self.tables[name])

    @classmethod
    def fresh(
        cls,
        model: Any,
        config: AdapterConfig,
        *,
        modules: Mapping[str, Sequence[str]],
        targets: Sequence[str] = (),
        dropout: float = 0.0,
    ) -> LoraAdapter:
        """A new adapter that does not change the model yet: B is zero, A is initialised like torch's linear layers.

        `modules` maps the names of the model's linear layers and tables to those in the base's checkpoint, the last of
        which is PEFT's. Layers of which a name ends in one of `targets` are adapted, or all linear layers without
        targets. Raises `InvalidValue` for a target that matches no layer, for a pattern of `config` that matches no
        adapted one, and as `fresh_tables` does.
        """
        sites, tables = lora_sites(model), fresh_tables(model, config, modules, targets)
        chosen = {name: site for name, site in sites.items() if not targets or is_named(name, modules, targets)}
        for target in targets:
            if not any(is_named(name, modules, [target]) for name in (*sites, *tables)):
                known = sorted({modules.get(name, (name,))[0].rpartition(".")[2] for name in sites})
                raise InvalidValue.of("lora_target_modules", target, ", ".join(known))
        called = {name: modules.get(name, (name,))[-1] for name in (*chosen, *tables)}
        for field in ("rank_pattern", "alpha_pattern"):
            for pattern in getattr(config, field):
                if not any(matches(pattern, name) for name in called.values()):
                    raise InvalidValue.of(field, pattern, "the end of the name of an adapted layer, as in PEFT")
        made = {}
        for name, site in chosen.items():
            a = torch.empty(config.rank(called[name]), site.inputs)
            # The bound of Kaiming initialisation with a = √5.
            nn.init.uniform_(a, -1 / math.sqrt(site.inputs), 1 / math.sqrt(site.inputs))
            b = torch.zeros(site.outputs, len(a))
            magnitude = site.weight().norm(dim=1).float() if config.use_dora else None
            made[name] = LoraLayer(a, b, config.scaling(called[name]), magnitude)
            made[name].dropout = dropout
        return cls(config, made, tables=tables).to(next(model.parameters()).device)


@torch.no_grad()
def merge_adapter(model: Any, adapter: LoraAdapter) -> None:
    """Merge the adapter into the model's weights in place; raises `WrongState` if they are packed, or if it changes one
    of two tied tables."""
    changed = {name: adapter.table(name).over(table_of(model, name)) for name in adapter.tables}
    tables = list(changed.values())
    if tables and is_tied(model) and not (len(tables) == len(TABLES) and torch.allclose(tables[0], tables[1])):
        raise WrongState("the adapter changes one of two tables that the model has tied: it cannot be merged")
    for name, table in changed.items():
        layer = model.embedding if name == EMBEDDING or is_tied(model) else model.unembedding
        require_plain(name, layer).weight.copy_(table)
    sites = lora_sites(model)
    for name in adapter:
        site, layer = sites[name], adapter.of(name)
        if layer is not None:
            weight = require_plain(name, site.module).weight
            weight[site.start : site.start + site.outputs] = layer.eval().merged(site).to(weight.dtype)


@contextmanager
def merged_adapter(model: Any, adapter: LoraAdapter) -> Iterator[None]:
    """A context in which the adapter is merged into the model's weights, which are the same bits again after it; raises
    as `merge_adapter` does."""
    sites, mode = lora_sites(model), adapter.training
    weights = {id(weight): weight for weight in (require_plain(name, sites[name].module).weight for name in adapter)}
    weights |= {id(table): table for table in (table_of(model, name) for name in adapter.tables)}
    before = [weight.detach().clone() for weight in weights.values()]
    try:
        merge_adapter(model, adapter)
        yield
    finally:
        with torch.no_grad():
            for weight, kept in zip(weights.values(), before, strict=True):
                weight.copy_(kept)
        adapter.train(mode)


def require_plain(name: str, module: nn.Module | None) -> nn.Linear:
    """The layer `name`; raises `WrongState` if its weights are packed."""
    if not isinstance(module, nn.Linear | nn.Embedding):
        raise WrongState(f"{name}: its weights are packed; load the model with quantization=none to merge")
    return cast("nn.Linear", module)


def require_fits(adapter: LoraAdapter, model: Any) -> None:
    """Raise `InvalidValue`, naming the layer, if the model lacks a layer of the adapter or its shape differs."""
    sites = lora_sites(model)
    for name in adapter.tables:
        if not fits(adapter.table(name), table_of(model, name)):
            raise InvalidValue.of("adapter", f"another {name}", f"one of {list(table_of(model, name).shape)}")
    for name in adapter:
        layer = adapter.of(name)
        if layer is None or name not in sites:
            raise InvalidValue.of("adapter", name, "linear layers of the model")
        site = sites[name]
        given = (layer.a.shape[1], layer.b.shape[0])
        if given != (site.inputs, site.outputs):
            raise InvalidValue.of("adapter", f"{name} of {given[0]} inputs and {given[1]} outputs",
                                  f"{site.inputs} inputs and {site.outputs} outputs, as in the model")  # fmt: skip
