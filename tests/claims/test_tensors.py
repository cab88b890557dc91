"""CL-53, CL-54: what runs keeps the exponents of the papers: no tensor is larger, and hashing sorts each token once."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from attn_core import Capability, configure, installed
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# fmt: off
WITHOUT_OPTIONS = (
    "deltanet", "efficient", "forgetting", "gated_deltanet", "gla", "kda", "key_value", "key_value_predict",
    "lightning", "linear", "mamba2", "ntm", "performer", "retnet",
)
# fmt: on
LINEAR: dict[str, dict[str, int]] = {
    "attention_sinks": {"sinks": 2, "window": 14},
    "bigbird": {"block": 4, "random": 1},
    "block_local": {"block": 16},
    "chunked": {"chunk": 16},
    "clustered": {"clusters": 8, "bits": 16, "top": 8},
    "compressive": {"segment": 16, "memory": 16, "compressed": 16},
    "dilated_window": {"window": 8},
    "linformer": {"rank": 16, "length": 4096},
    "longformer": {"window": 8},
    "lsh": {"buckets": 8, "chunk": 16},
    "neighborhood": {"size": 9},
    "nystrom": {"landmarks": 8},
    "sliding_window": {"window": 16},
    **{name: {} for name in WITHOUT_OPTIONS},
}
ROOTS = {
    "fixed": ("block",),
    "moba": ("block",),
    "nsa": ("compress", "stride", "select", "window"),
    "routing": ("clusters", "window"),
    "sinkhorn": ("block",),
    "strided": ("stride",),
}


class Seen(TorchDispatchMode):
    """The most elements of any tensor that an operation makes, and the elements that are sorted."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = self.sorted = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for made in out if isinstance(out, tuple | list) else [out]:
            if isinstance(made, Tensor):
                self.largest = max(self.largest, made.untyped_storage().nbytes() // made.element_size())
        if "sort" in func.name():
            self.sorted += args[0].numel()
        return out


def seen(name: str, length: int, options: dict[str, int]) -> Seen:
    """What one forward over `length` tokens makes."""
    torch.manual_seed(0)
    mechanism = installed().mechanisms.get(name)
    layer = mechanism.build(configure(mechanism, options, width=8, heads=2, causal=mechanism.can(Capability.CAUSAL)))
    with torch.no_grad(), Seen() as found:
        layer.eval()(torch.randn(1, length, 8))
    return found


def growth(name: str, options: dict[int, dict[str, int]]) -> float:
    """The exponent by which the largest tensor grows from the first length to the last."""
    (short, few), (long, many) = options.items()
    return math.log(seen(name, long, many).largest / seen(name, short, few).largest, long / short)


@pytest.mark.parametrize("name", LINEAR)
def test_cl_53_no_tensor_of_a_linear_mechanism_grows_faster_than_the_length(name: str) -> None:
    short = 64 if installed().mechanisms.get(name).sequential else 1024
    assert growth(name, dict.fromkeys((short, 4 * short), LINEAR[name])) < 1.1


@pytest.mark.parametrize("name", ROOTS)
def test_cl_54_no_tensor_grows_faster_than_its_three_halves_where_blocks_are_roots_of_the_length(name: str) -> None:
    assert growth(name, {length: dict.fromkeys(ROOTS[name], math.isqrt(length)) for length in (1024, 4096)}) < 1.6


def test_cl_53_all_pairs_are_one_tensor_where_the_definition_needs_them() -> None:
    """That the measure sees what it must not see elsewhere."""
    assert growth("additive", {256: {}, 1024: {}}) == pytest.approx(2, abs=0.1)


@pytest.mark.parametrize("length", [128, 512])
def test_cl_54_hashing_sorts_every_token_once_a_head_and_round(length: int) -> None:
    """So it takes n log n comparisons, beside products that grow with n."""
    assert seen("lsh", length, {"buckets": 8, "chunk": 16, "rounds": 3}).sorted == 3 * 2 * length
