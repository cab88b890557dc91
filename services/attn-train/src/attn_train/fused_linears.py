"""Joins linear layers with the same input into one matrix product in training, eagerly or in a compiled graph."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import combinations
from typing import Any

import torch
from attn_core.joint import Joins
from torch import Tensor, nn
from torch.nn import functional

SEVERAL = 2
"""The minimum number of layers to join."""

_of_thread = threading.local()


def read_together(model: nn.Module) -> Iterable[Any]:
    """Return the modules of a model that have layers with the same input, see `attn_core.joint.ReadsTogether`."""
    return (module for module in model.modules() if hasattr(module, "joint_layers"))


def join_products(model: nn.Module) -> None:
    """Make all modules with such layers compute them by one product where `joined` can."""
    for module in read_together(model):
        module.joins = joined


@contextmanager
def joining(joins: Joins) -> Iterator[None]:
    """A context in which `joined` calls `joins` in this thread, except while torch.compile traces."""
    before = getattr(_of_thread, "joins", None)
    _of_thread.joins = joins
    try:
        yield
    finally:
        _of_thread.joins = before


def joined(rows: Tensor, layers: Sequence[Any]) -> list[Tensor] | None:
    """Compute layers with the same input [..., inputs] by one product if that saves time; returns each [..., outputs].

    It does so within `joining`, and in a compiled graph under autocast, which casts the weights anyway: the casts are
    written into one matrix. Else, or if `can_join` is False, returns None, and the layers are to be called one by one.
    """
    if torch.compiler.is_compiling():
        return one_product(rows, layers) if casts(rows) and can_join(layers) and have_plain_parameters(layers) else None
    joins: Joins | None = getattr(_of_thread, "joins", None)
    return joins(rows, layers) if joins is not None and can_join(layers) else None


def can_join(layers: Sequence[Any]) -> bool:
    """Whether layers are at least two plain `nn.Linear` (see `is_plain`) with the same input size and element type, all
    or none with a bias, all or none trained, and without shared parameters."""
    if len(layers) < SEVERAL or not all(map(is_plain, layers)):
        return False
    first = layers[0].weight
    for layer in layers:
        if layer.in_features != layers[0].in_features or (layer.bias is None) != (layers[0].bias is None):
            return False
        for part in parts_of(layer):
            if part.dtype != first.dtype or part.requires_grad != first.requires_grad:
                return False
    shared = (one.weight is other.weight for one, other in combinations(layers, 2))
    biased = layers[0].bias is not None
    return not any(shared) and not any(biased and one.bias is other.bias for one, other in combinations(layers, 2))


def is_plain(layer: Any) -> bool:
    """Whether a layer is a plain `nn.Linear`: no subclass, no adapter, no hooks."""
    before = layer._forward_pre_hooks or layer._backward_pre_hooks  # noqa: SLF001 -- torch has no public names
    after = layer._forward_hooks or layer._backward_hooks  # noqa: SLF001
    return type(layer) is nn.Linear and not before and not after and not hasattr(layer, "adapted_weight")


def parts_of(layer: Any) -> list[Any]:
    """Return the weight and the bias, if any."""
    return [layer.weight] if layer.bias is None else [layer.weight, layer.bias]


def have_plain_parameters(layers: Sequence[Any]) -> bool:
    """Whether all parameters are plain `nn.Parameter` objects, not DTensors of torch.distributed."""
    return all(type(part) is nn.Parameter for layer in layers for part in parts_of(layer))


def casts(rows: Tensor) -> bool:
    """Whether autocast uses a 16-bit type on the device of this tensor."""
    kind = rows.device.type
    return torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) in {torch.bfloat16, torch.float16}


def one_product(rows: Tensor, layers: Sequence[Any]) -> list[Tensor]:
    """Compute layers by one product with their concatenated weights, cast to the type of autocast."""
    dtype = torch.get_autocast_dtype(rows.device.type)
    weight = torch.cat([layer.weight.to(dtype) for layer in layers])
    bias = None if layers[0].bias is None else torch.cat([layer.bias.to(dtype) for layer in layers])
    out = functional.linear(rows, weight, bias)
    return list(out.split_with_sizes([layer.out_features for layer in layers], dim=-1))
