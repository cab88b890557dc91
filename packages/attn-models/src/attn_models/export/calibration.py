"""What the linear layers of a decoder read on a text: what weights are quantised by."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from attn_core.errors import Incompatible
from torch import Tensor, nn

from attn_models.decoder.decoder import Decoder


def calibrated(model: Decoder, windows: Tensor) -> Iterator[tuple[str, nn.Module, dict[str, Tensor]]]:
    """Each block with its name, and the mean products x xᵀ [inputs, inputs] of the inputs of its linear layers by name.

    `windows` [windows, tokens] are token ids. The caller may change a block's weights before it asks for the next one,
    which then reads what the changed block computes. Raises `Incompatible` for layers that share keys and values.
    """
    if type(model) is not Decoder or model.config.kv_sharing:
        raise Incompatible("only a Decoder whose layers have their own keys and values can be calibrated")
    entering: list[Tensor] = []
    first = model.blocks[0].register_forward_pre_hook(lambda _, given: entering.append(given[0]))
    try:
        with torch.no_grad():
            for window in windows:
                model.hidden(window[None])
    finally:
        first.remove()
    for index, block in enumerate(model.blocks):
        with torch.no_grad():
            with _products(block) as products:
                for hidden in entering:
                    block(hidden)
            yield f"blocks.{index}", block, {name: total / windows.numel() for name, total in products.items()}
            entering = [block(hidden) for hidden in entering]


def importance_of(model: Decoder, windows: Tensor) -> Mapping[str, Tensor]:
    """The mean square of each input [inputs] of the weights of linear layers, by the names of parameters."""
    return {
        f"{prefix}.{name}.weight": product.diagonal().clone()
        for prefix, _, products in calibrated(model, windows)
        for name, product in products.items()
    }


@contextmanager
def _products(block: nn.Module) -> Iterator[dict[str, Tensor]]:
    """The sums of x xᵀ of the inputs of the block's linear layers, while it is computed."""
    found: dict[str, Tensor] = {}

    def add(name: str, given: tuple[Any, ...]) -> None:
        rows = given[0].flatten(0, -2).float()
        found[name] = found.get(name, 0) + rows.T @ rows

    handles = [
        module.register_forward_pre_hook(lambda _, given, name=name: add(name, given))
        for name, module in block.named_modules()
        if isinstance(module, nn.Linear)
    ]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
