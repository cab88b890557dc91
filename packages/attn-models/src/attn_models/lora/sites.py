"""The linear layers that adapters change: where a model has them, plain or packed, and what checkpoints call them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from attn_models.adapters.base import Layout, StoredTensor
from attn_models.adapters.state_dict import init_empty_weights
from attn_models.decoder.decoder import Decoder
from attn_models.decoder.mixture_of_experts import Router

BLOCKS = "blocks."
"""What names of layers of a decoder's blocks begin with."""


@dataclass(frozen=True, eq=False)
class LoraSite:
    """A linear layer as a model has it now: outputs `start` to `start` + `outputs` of `module`, which may be packed."""

    name: str
    module: nn.Module
    start: int
    inputs: int
    outputs: int

    def weight(self) -> Tensor:
        """Its weight [outputs, inputs], float32 where it is packed."""
        return dense_weight(self.module, self.inputs)[self.start : self.start + self.outputs]

    def bias(self) -> Tensor | None:
        """Its bias [outputs], if it has one."""
        bias = getattr(self.module, "bias", None)
        return None if bias is None else cast("Tensor", bias)[self.start : self.start + self.outputs]


@torch.no_grad()
def dense_weight(module: nn.Module, inputs: int) -> Tensor:
    """The weight [outputs, inputs] of a linear layer; of a packed one what it multiplies unit rows to."""
    if isinstance(module, nn.Linear):
        return module.weight.detach()
    device = next((buffer.device for buffer in module.buffers()), torch.device("cpu"))
    # Not by a call, which adds what an adapter in use says.
    rows: Tensor = module.forward(torch.eye(inputs, device=device))
    bias = getattr(module, "bias", None)
    return (rows if bias is None else rows - cast("Tensor", bias)[: rows.shape[1]]).T


def lora_sites(model: Any) -> dict[str, LoraSite]:
    """The linear layers of a model's blocks by name, routers and gates of experts left out, packed or not.

    Of a model that is no `Decoder`, all its linear layers but the last one, `unembedding`.
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
        # One of several layers of one input that are joined.
        return LoraSite(name, joint.whole, sum(joint.sizes[: part.index]), *sizes)
    return LoraSite(name, part, 0, *sizes)


WEIGHT = ".weight"


@dataclass(frozen=True)
class StoredModule:
    """A linear layer of a checkpoint, `name`, and the layers of our model that its outputs are split into.

    `sizes` are their outputs, in each of `groups` equal blocks one after the other; ours are theirs times `scale`.
    """

    name: str
    parts: tuple[str, ...]
    sizes: tuple[int, ...]
    groups: int = 1
    scale: float = 1.0


def stored_modules(model: Any, layout: Layout | None) -> list[StoredModule]:
    """What a checkpoint of a layout calls the linear layers of a model: each of our layers is in one of them.

    Where the checkpoint has no linear layer for one, or there is no layout, it has our own name.
    """
    sites = lora_sites(model)
    found: list[StoredModule] = []
    if layout is not None and isinstance(model, Decoder):
        with init_empty_weights():
            parameters = list(Decoder(model.config).state_dict())
        found = [made for item in layout.tensor_mappings(parameters) if (made := _stored(item, sites)) is not None]
    known = {part for module in found for part in module.parts}
    return found + [StoredModule(name, (name,), (site.outputs,)) for name, site in sites.items() if name not in known]


def _stored(item: StoredTensor, sites: dict[str, LoraSite]) -> StoredModule | None:
    """The linear layer that a tensor of a checkpoint is the weight of, if it is one of these sites."""
    parts = tuple(name.removesuffix(WEIGHT) for name in item.parameters)
    if not all(name.endswith(WEIGHT) for name in (item.name, *item.parameters)) or not all(p in sites for p in parts):
        return None
    sizes = tuple(sites[part].outputs for part in parts)
    return StoredModule(item.name.removesuffix(WEIGHT), parts, sizes, item.groups, item.scale)
