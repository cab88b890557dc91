"""CL-9, CL-41, CL-53, CL-54: the price of every mechanism grows with the length as its paper says.

Prices are products counted in closed form; that they are those which are paid is a law of the conformance kit.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from attn_core import Capability, Shape, configure, installed

LENGTHS = [2**power for power in range(8, 14)]
Options = Callable[[int], Mapping[str, Any]]


def always(**options: Any) -> Options:
    """The same options at every length."""
    return lambda length: options


def root(length: int) -> int:
    """The power of two nearest to √length."""
    return 2 ** round(math.log2(length) / 2)


# fmt: off
QUADRATIC = (
    "adaptive_entmax", "additive", "alibi", "alignment", "concat", "cosine", "cross", "dependency", "dependency_depth",
    "differential", "dot", "entmax", "forgetting", "gat", "gated", "gemma", "general", "gqa", "hard", "kerple_log",
    "local_p", "location", "low_rank", "lstmn", "luong", "mha", "mqa", "nope", "positions_added",
    "positions_concatenated", "qk_l2_norm", "qk_norm", "relative_bias", "rope", "sampled", "shaw", "sigmoid", "sink",
    "soft_cap", "softmax_one", "sparsemax", "stick_breaking", "t5_bias", "visual_hard", "visual_soft",
)
LINEAR = (
    "deltanet", "efficient", "gated_deltanet", "gla", "kda", "lightning", "linear", "mamba2", "ntm",
    "performer", "retnet",
)
# fmt: on
EXPONENTS: dict[str, tuple[float, Options]] = {
    **dict.fromkeys(QUADRATIC, (2.0, always())),
    **dict.fromkeys(LINEAR, (1.0, always())),
    "mla": (2.0, always(latent=8, rotary_size=4)),
    "path": (2.0, always(rank=4)),
    "transmla": (2.0, always(latent=8)),
    # The indexer meets every past token, however few of them the attention then reads.
    "dsa": (2.0, always(index_heads=2, index_size=4, top=32)),
    # Paths of length two: √n keys a query, where blocks, strides or clusters are as large as √n.
    "fixed": (1.5, lambda length: {"block": root(length), "summaries": 1}),
    "strided": (1.5, lambda length: {"stride": round(length**0.5)}),
    "moba": (1.5, lambda length: {"block": root(length), "top": 2}),
    "nsa": (1.5, lambda n: dict.fromkeys(("compress", "stride", "select", "window"), root(n)) | {"top": 2}),
    "routing": (1.5, lambda length: {"clusters": root(length), "window": root(length)}),
    "sinkhorn": (1.5, lambda length: {"block": root(length)}),
    "attention_sinks": (1.0, always(sinks=2, window=14)),
    "bigbird": (1.0, always(block=4, random=1)),
    "block_local": (1.0, always(block=16)),
    "chunked": (1.0, always(chunk=16)),
    "clustered": (1.0, always(clusters=8, bits=16, top=8)),
    "compressive": (1.0, always(segment=16, memory=16, compressed=16)),
    "dilated_window": (1.0, always(window=8)),
    "key_value": (1.0, always()),
    "key_value_predict": (1.0, always()),
    "linformer": (1.0, always(rank=16)),
    "local_m": (1.0, always()),
    "longformer": (1.0, always(window=8)),
    # n log n in the paper: log n is of the sort that brings the tokens of a bucket together, which multiplies nothing.
    "lsh": (1.0, always(buckets=8, chunk=16)),
    "neighborhood": (1.0, always(size=9)),
    "nystrom": (1.0, always(landmarks=8)),
    "sliding_window": (1.0, always(window=16)),
}


def price(name: str, length: int, options: Mapping[str, Any]) -> int:
    """What a perfect kernel multiplies, for heads so narrow that pairs of tokens outweigh projections."""
    mechanism = installed().mechanisms.get(name)
    config = configure(mechanism, options, width=4, heads=2, causal=mechanism.can(Capability.CAUSAL))
    return mechanism.cost(config, Shape(query=length, key=length)).allowed_flops


def slope(prices: list[int]) -> float:
    """The exponent of the power of the length that fits best: least squares between logarithms."""
    return statistics.linear_regression([math.log(n) for n in LENGTHS], [math.log(p) for p in prices]).slope


def test_every_mechanism_has_an_exponent_of_its_paper() -> None:
    assert set(EXPONENTS) == set(installed().mechanisms.names())


@pytest.mark.parametrize("name", EXPONENTS)
def test_cl_54_the_price_grows_as_the_power_of_the_length_that_the_paper_says(name: str) -> None:
    exponent, options = EXPONENTS[name]
    found = slope([price(name, length, options(length)) for length in LENGTHS])
    assert found == pytest.approx(exponent, abs=0.1)
