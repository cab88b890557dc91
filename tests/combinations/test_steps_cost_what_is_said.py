"""The price of one query behind its keys is what a step of decoding pays."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attn_core import Shape, configure, installed
from attn_testing.serving import Serving
from attn_testing.subject import Case
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

STEPPED: dict[str, dict[str, Any]] = {
    "differential": {},
    "dsa": {"index_heads": 2, "index_size": 4, "top": 6},
    "gated": {},
    "gated_deltanet": {},
    "mamba2": {},
    "mha": {},
    "moba": {"block": 4, "top": 3},
    "nsa": {"compress": 4, "stride": 2, "select": 4, "top": 3, "window": 3},
    "shaw": {},
    "transmla": {"latent": 8},
}
"""Mechanisms that keep all they need and whose one row meets just that."""


@pytest.mark.parametrize("tokens", [2, 5, 12, 21])
@pytest.mark.parametrize("name", STEPPED)
def test_a_step_pays_what_its_price_says(name: str, tokens: int) -> None:
    """The products of the step after `tokens` - 1 tokens are those of one query over `tokens` keys."""
    mechanism = installed().mechanisms.get(name)
    config = configure(mechanism, STEPPED[name], hidden_size=16, num_heads=4)
    case = Case(mechanism, config, {}, name)
    if hasattr(case.layer, "use_kernel"):
        case.layer.use_kernel("plain")
    rows, serving = case.rows(tokens), Serving(case)
    serving.open(0)
    serving.step({0: rows[:-1]})
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter, torch.no_grad():
        serving.step({0: rows[-1:]})
    assert counter.get_total_flops() == mechanism.cost(config, Shape(query=1, key=tokens)).flops
