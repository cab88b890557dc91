"""`torch.nn.MultiheadAttention` and back: modules exchanged for any mechanism's, and weights under torch's names."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from attn_core import AttentionSpec
from attn_core.errors import Incompatible, InvalidValue
from torch import Tensor, nn

from attn_variants.multihead_attention import TORCH_NAMES, MultiheadAttention

PARTS = ("query", "key", "value")


def replace(model: nn.Module, mechanism: str, *, layers: Iterable[int] | None = None, **options: Any) -> list[str]:
    """Exchange the `torch.nn.MultiheadAttention` modules in `model`, in place, for others with a mechanism's.

    `layers` are their places in the order of `model.named_modules()`, by default all.

    Weights are kept wherever the mechanism has a parameter of the same name and shape; returns the names of the
    parameters that were drawn instead. Raises `Incompatible` for a model without such modules, `InvalidValue` for
    layers that do not exist, and the errors of `MultiheadAttention`; nothing is exchanged then.
    """
    found = [item for item in model.named_modules() if isinstance(item[1], nn.MultiheadAttention) and item[0]]
    if not found:
        raise Incompatible(f"a {type(model).__name__} has no torch.nn.MultiheadAttention inside")
    chosen = range(len(found)) if layers is None else list(layers)
    if not all(type(layer) is int and layer in range(len(found)) for layer in chosen):
        raise InvalidValue.of("layers", chosen, f"whole numbers from 0 to {len(found) - 1}")
    exchanged = {found[layer][0]: _like(found[layer][1], mechanism, options) for layer in chosen}
    drawn = []
    for name, new in exchanged.items():
        parent, _, leaf = name.rpartition(".")
        kept = _own_names(model.get_submodule(name))
        for own, parameter in new.named_parameters():
            if own in kept and kept[own].shape == parameter.shape:
                parameter.data.copy_(kept[own])
            else:
                drawn.append(f"{name}.{own}")
        setattr(model.get_submodule(parent), leaf, new.train(model.training))
    return drawn


def _like(old: nn.MultiheadAttention, mechanism: str, options: dict[str, Any]) -> MultiheadAttention:
    """A module with a mechanism that takes and gives what `old` does."""
    added = {"add_bias_kv": old.bias_k is not None, "add_zero_attn": old.add_zero_attn}
    shape = {"bias": old.in_proj_bias is not None, "kdim": old.kdim, "vdim": old.vdim, "batch_first": old.batch_first}
    place = {"device": old.out_proj.weight.device, "dtype": old.out_proj.weight.dtype}
    given = {**added, **shape, **place, **options}
    return MultiheadAttention(old.embed_dim, old.num_heads, old.dropout, mechanism=mechanism, **given)


def _own_names(old: nn.Module) -> dict[str, Tensor]:
    """The parameters of a module of torch under the names of `MultiheadAttention`."""
    found = {TORCH_NAMES.get(name, name): tensor.detach() for name, tensor in old.state_dict().items()}
    for kind in ("weight", "bias"):
        joint = found.pop(f"in_proj_{kind}", None)
        if joint is not None:
            found |= {f"attention.{part}.{kind}": rows for part, rows in zip(PARTS, joint.chunk(3), strict=True)}
    return found


def torch_state_dict(module: MultiheadAttention) -> dict[str, Tensor]:
    """The weights of `module` as a state dict of a `torch.nn.MultiheadAttention`, which computes the same with them.

    Keys and values that heads share are repeated. Raises `Incompatible` for a mechanism that is not plain attention.
    """
    spec = getattr(module.attention, "spec", None)
    if spec is None or not module.takes_pairs or spec != AttentionSpec(heads=spec.heads):
        raise Incompatible(f"torch's module does not compute mechanism {module.mechanism.name!r}")
    own = {name: tensor.detach() for name, tensor in module.state_dict().items()}
    for name in [f"attention.{part}.{kind}" for part in PARTS[1:] for kind in ("weight", "bias")]:
        if name in own:
            rows = own[name].unflatten(0, (spec.heads.key_value, -1))
            own[name] = rows[list(spec.heads.group_of)].flatten(0, 1)
    if (module.kdim, module.vdim) == (module.embed_dim, module.embed_dim):
        own["in_proj_weight"] = torch.cat([own.pop(f"attention.{part}.weight") for part in PARTS])
    if "attention.query.bias" in own:
        own["in_proj_bias"] = torch.cat([own.pop(f"attention.{part}.bias") for part in PARTS])
    theirs = {ours: name for name, ours in TORCH_NAMES.items()}
    return {theirs.get(name, name): tensor for name, tensor in own.items()}
