"""The linear layers that adapters can change: their places in a model, plain or packed, and their checkpoint names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from attn_models.adapters.base import Layout, StoredTensor
from attn_models.adapters.state_dict import init_empty_weights
from attn_models.decoder.decoder import Decoder
from attn_models.decoder.mixture_of_experts import Router

BLOCKS = "blocks."
"""The prefix of the names of layers in a decoder's blocks."""


@dataclass(frozen=True, eq=False)
class LoraSite:
    """The current place of a linear layer in a model: outputs `start` to `start` + `outputs` of `module`, which may be
    packed or joined with others."""

    name: str
    module: nn.Module
    start: int
    inputs: int
    outputs: int

    def weight(self) -> Tensor:
        """Its weight [outputs, inputs], in float32 if it is packed."""
        return dense_weight(self.module, self.inputs)[self.start : self.start + self.outputs]

    def bias(self) -> Tensor | None:
        """Its bias [outputs], if it has one."""
        bias = getattr(self.module, "bias", None)
        return None if bias is None else cast("Tensor", bias)[self.start : self.start + self.outputs]


@torch.no_grad()
def dense_weight(module: nn.Module, inputs: int) -> Tensor:
    """The weight [outputs, inputs] of a linear layer; that of a packed layer is its output for the identity matrix."""
    if isinstance(module, nn.Linear):
        return module.weight.detach()
    device = next((buffer.device for buffer in module.buffers()), torch.device("cpu"))
    # `forward` instead of a call, which would run hooks that add the output of an adapter.
    rows: Tensor = module.forward(torch.eye(inputs, device=device))
    bias = getattr(module, "bias", None)
    return (rows if bias is None else rows - cast("Tensor", bias)[: rows.shape[1]]).T


def lora_sites(model: Any) -> dict[str, LoraSite]:
    """The linear layers of a decoder's blocks by name, packed or not, without routers and gates of experts.

    For a model that is not a `Decoder`, all linear layers except `unembedding`.
    """
    if not isinstance(model, Decoder):
        found = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
        return {
            name: LoraSite(name, module, 0, module.in_features, module.out_features)
            for name, module in found.items()
            if name != "unembedding"
        }
    with init_empty_weights():
        plain = Decoder(model.config)
    return {
        name: _site(model, name, layer)
        for name, layer in plain.named_modules()
        if isinstance(layer, nn.Linear) and name.startswith(BLOCKS) and not _routes(plain, name)
    }


def is_named(name: str, modules: Mapping[str, Sequence[str]], targets: Sequence[str]) -> bool:
    """Whether a layer's own name, or one of those that `modules` has for it, is one of the targets or ends in one."""
    names = {name, *modules.get(name, ())}
    return any(one == target or one.endswith(f".{target}") for one in names for target in targets)


def _routes(plain: nn.Module, name: str) -> bool:
    owner, _, leaf = name.rpartition(".")
    return isinstance(plain.get_submodule(owner), Router) or leaf == "shared_expert_gate"


def _site(model: nn.Module, name: str, plain: nn.Linear) -> LoraSite:
    owner_name, _, leaf = name.rpartition(".")
    owner: Any = model.get_submodule(owner_name)
    sizes = plain.in_features, plain.out_features
    both = getattr(owner, "both", None)
    if both is not None and leaf in ("gate", "up"):
        return LoraSite(name, both, 0 if leaf == "gate" else sizes[1], *sizes)
    part: Any = getattr(owner, leaf)
    joint = getattr(part, "joint", None)
    if joint is not None:
        # One of several layers that read the same input and are joined.
        return LoraSite(name, joint.whole, sum(joint.sizes[: part.index]), *sizes)
    return LoraSite(name, part, 0, *sizes)


WEIGHT = ".weight"


@dataclass(frozen=True)
class StoredModule:
    """A linear layer of a checkpoint, `name`, and the layers of the model, `parts`, that its outputs are split into.

    `sizes` are the numbers of outputs of the parts; the checkpoint's outputs are `groups` equal blocks, each of which
    contains an equal share of every part in order. The model's weights are the checkpoint's times `scale`.

    A stack of `experts` is a parameter, not a layer: `parts` are those of each expert in turn, `sizes` and `groups`
    those of one. PEFT takes the inputs of a `swapped` stack for its outputs.
    """

    name: str
    parts: tuple[str, ...]
    sizes: tuple[int, ...]
    groups: int = 1
    scale: float = 1.0
    experts: int = 0
    swapped: bool = False


def stored_modules(model: Any, layout: Layout | None) -> list[StoredModule]:
    """The linear layers of a checkpoint in `layout`; each linear layer of the model is part of exactly one of them.

    A layer for which the checkpoint has no linear layer keeps the model's own name, and so do all without a layout.
    """
    sites = lora_sites(model)
    found: list[StoredModule] = []
    if layout is not None and isinstance(model, Decoder):
        with init_empty_weights():
            parameters = list(Decoder(model.config).state_dict())
        items = layout.tensor_mappings(parameters)
        found = [made for item in items if (made := _stored(item, sites, layout.name)) is not None]
    known = {part for module in found for part in module.parts}
    return found + [StoredModule(name, (name,), (site.outputs,)) for name, site in sites.items() if name not in known]


UNMARKED = frozenset({"llama4", "llama4_text"})
"""Families whose stacks are [experts, inputs, outputs] without transformers saying so (`is_transposed`) to PEFT."""


def _stored(item: StoredTensor, sites: dict[str, LoraSite], family: str) -> StoredModule | None:
    """The linear layer, or the stack, of a checkpoint whose weight is the tensor `item`; None unless its parts are all
    in `sites`."""
    parts = tuple(name.removesuffix(WEIGHT) for name in item.parameters)
    named = (*item.parameters, *([] if item.stacked else [item.name]))
    if not all(name.endswith(WEIGHT) for name in named) or not all(part in sites for part in parts):
        return None
    each = parts[: len(parts) // item.stacked] if item.stacked else parts
    sizes, swapped = tuple(sites[part].outputs for part in each), item.transposed and family in UNMARKED
    stored = item.name.removesuffix(WEIGHT)
    return StoredModule(stored, parts, sizes, item.groups, item.scale, item.stacked, swapped)
