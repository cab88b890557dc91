"""CL-9, CL-41, CL-53, CL-54: price and memory of every mechanism grow with the length as its paper says.

Prices are products counted in closed form; that they are those which are paid is a law of the conformance kit. Memory
is measured: the most bytes of tensors that live at once.
"""

from __future__ import annotations

import math
import statistics
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from attn_core import Capability, Mechanism, MechanismConfig, Shape, configure, installed
from cases import each
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

LENGTHS = [2**power for power in range(8, 14)]
Options = Callable[[int], Mapping[str, Any]]


def always(**options: Any) -> Options:
    """The same options at every length."""
    return lambda length: options


def root(length: int) -> int:
    """The power of two nearest to √length."""
    return 2 ** round(math.log2(length) / 2)


def compressed(**options: int) -> Mapping[str, Any]:
    """Compressed rows without an indexer, between projections as narrow as can be."""
    return options | {"top": None, "overlap": False, "query_latent": 1, "output_groups": 1, "output_latent": 1}


# fmt: off
QUADRATIC = (
    "adaptive_entmax", "additive", "alibi", "alignment", "concat", "cosine", "coverage", "dependency",
    "dependency_depth",
    "differential", "dot", "entmax", "forgetting", "gat", "gated", "gemma", "general", "gqa", "hard", "kerple_log",
    "local_p", "location", "low_rank", "lstmn", "luong", "mha", "mqa", "nope", "parallax", "positions_added",
    "positions_concatenated", "qk_l2_norm", "qk_norm", "relative_bias", "rope", "sampled", "shaw", "sigmoid", "sink",
    "soft_cap", "softmax_one", "sparsemax", "stick_breaking", "t5_bias", "visual_hard", "visual_soft",
    "selective", "wall",
)
LINEAR = (
    "comba", "deltanet", "efficient", "gated_deltanet", "gated_deltanet2", "gated_deltaproduct", "gla", "kda",
    "lightning", "linear", "log_linear_mamba2", "mamba2", "mesa_net", "momentum_deltanet", "ntm", "performer",
    "precond_deltanet", "precond_kda", "retnet", "rwkv7", "rwkv7_channel", "short_conv",
)
# fmt: on
EXPONENTS: dict[str, tuple[float, Options]] = {
    **dict.fromkeys(QUADRATIC, (2.0, always())),
    **dict.fromkeys(LINEAR, (1.0, always())),
    "disentangled": (2.0, always(buckets=4, max_distance=8)),
    "mla": (2.0, always(latent=8, rotary_size=4)),
    "path": (2.0, always(rank=4, block=8)),
    "transmla": (2.0, always(latent=8)),
    # The indexer meets every past token, however few of them the attention then reads.
    "quest": (2.0, always(block=4, top=2)),  # so do the bounds of pages of one size
    "dsa": (2.0, always(index_heads=2, index_size=4, top=32)),
    "indexed_blocks": (2.0, always(block=8, top=4, index_size=4)),
    "sparse_mla": (2.0, always(index_heads=4, index_size=4, top=32, latent=2, query_latent=2, rotary_size=2)),
    # Paths of length two: √n keys a query, where blocks, strides or clusters are as large as √n.
    "fixed": (1.5, lambda length: {"block": root(length), "summaries": 1}),
    "strided": (1.5, lambda length: {"stride": round(length**0.5)}),
    "moba": (1.5, lambda length: {"block": root(length), "top": 2}),
    "compressed": (1.5, lambda n: compressed(window=root(n), every=root(n))),
    "nsa": (1.5, lambda n: dict.fromkeys(("compress", "stride", "select", "window"), root(n)) | {"top": 2}),
    "qsa": (1.5, lambda n: {"block": root(n), "top": 2 * root(n), "index_heads": 1, "index_size": 4}),
    "routing": (1.5, lambda length: {"clusters": root(length), "window": root(length)}),
    "routing_causal": (1.5, lambda length: {"clusters": root(length), "window": root(length)}),
    "sinkhorn_causal": (1.5, lambda length: {"block": root(length)}),
    "sinkhorn": (1.5, lambda length: {"block": root(length)}),
    "attention_sinks": (1.0, always(sinks=2, window=14)),
    "bigbird": (1.0, always(block=4, random=1)),
    "block_local": (1.0, always(block=16)),
    "chunk_ring": (1.0, always(chunk=16)),
    "chunked": (1.0, always(chunk=16)),
    "clustered": (1.0, always(clusters=8, bits=16, top=8)),
    "compressive": (1.0, always(segment=16, memory=16, compressed=16)),
    "most_used": (1.0, always(segment=4, memory=4, compressed=4)),
    "dilated_window": (1.0, always(window=8)),
    "h2o": (1.0, always(heavy=6, recent=10)),
    "snapkv": (1.0, always(budget=8, interval=8, window=2)),
    "tova": (1.0, always(budget=16)),
    "key_value": (1.0, always()),
    "key_value_predict": (1.0, always()),
    "linformer": (1.0, always(rank=16)),
    "local_m": (1.0, always()),
    "longformer": (1.0, always(window=8)),
    # n log n in the paper: log n is of the sort that brings the tokens of a bucket together, which multiplies nothing.
    "lsh": (1.0, always(buckets=8, chunk=16)),
    "lsh_causal": (1.0, always(buckets=8, window=16)),
    "neighborhood": (1.0, always(size=9)),
    "nystrom": (1.0, always(landmarks=8)),
    "sliding_window": (1.0, always(window=16)),
}


def configured(name: str, options: Mapping[str, Any], width: int, context: int) -> tuple[Mechanism, MechanismConfig]:
    """A mechanism and its config, causal where it can be."""
    mechanism = installed().mechanisms.get(name)
    causal = mechanism.can(Capability.CAUSAL)
    return mechanism, configure(mechanism, options, hidden_size=width, num_heads=2, causal=causal, max_seq_len=context)


def price(name: str, length: int, options: Mapping[str, Any]) -> int:
    """What a perfect kernel multiplies, for heads so narrow that pairs of tokens outweigh projections."""
    mechanism, config = configured(name, options, 4, LENGTHS[-1])
    return mechanism.cost(config, Shape(query=length, key=length)).allowed_flops


def slope(prices: list[int]) -> float:
    """The exponent of the power of the length that fits best: least squares between logarithms."""
    return statistics.linear_regression([math.log(n) for n in LENGTHS], [math.log(p) for p in prices]).slope


def test_every_mechanism_has_an_exponent_of_its_paper() -> None:
    assert set(EXPONENTS) == set(installed().mechanisms.names())


@each("name", EXPONENTS)
def test_cl_54_the_price_grows_as_the_power_of_the_length_that_the_paper_says(name: str) -> None:
    exponent, options = EXPONENTS[name]
    found = slope([price(name, length, options(length)) for length in LENGTHS])
    assert found == pytest.approx(exponent, abs=0.1)


class Live(TorchDispatchMode):
    """The most bytes that tensors made meanwhile weigh at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._held: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for made in out if isinstance(out, tuple | list) else [out]:
            if isinstance(made, Tensor):
                self._hold(made.untyped_storage())
        return out

    def _hold(self, storage: torch.UntypedStorage) -> None:
        key, weight = storage._cdata, storage.nbytes()
        if key not in self._held:
            self._held.add(key)
            self.now += weight
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._free, key, weight)

    def _free(self, key: int, weight: int) -> None:
        self._held.discard(key)
        self.now -= weight


def peak(name: str, length: int, options: Mapping[str, Any], *, training: bool) -> int:
    """The most bytes that live at once in a forward over `length` tokens, and its backward in training."""
    torch.manual_seed(0)
    mechanism, config = configured(name, options, 8, length)
    layer, source = mechanism.build(config), [torch.randn(1, length, 8)] * config.cross
    with torch.set_grad_enabled(training), Live() as live:
        out = layer.train(training)(torch.randn(1, length, 8), *source)
        if training:
            out.sum().backward()
    return live.peak


def memory_exponent(name: str, options: Options, *, training: bool) -> float:
    """The power of the length by which the peak grows from one length to four times it."""
    short = 64 if installed().mechanisms.get(name).sequential else 1024
    first, last = (peak(name, length, options(length), training=training) for length in (short, 4 * short))
    return math.log(last / first, 4)


@pytest.mark.sweep(lambda name, training: name)
@pytest.mark.parametrize("training", [False, True], ids=["forward", "training"])
@pytest.mark.parametrize("name", [name for name, (exponent, _) in EXPONENTS.items() if exponent < 2])
def test_cl_53_memory_grows_no_faster_than_the_price(name: str, *, training: bool) -> None:
    exponent, options = EXPONENTS[name]
    assert memory_exponent(name, options, training=training) < exponent + 0.1


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gemma", {"window": 16, "cap": 30.0}),
        ("local_m", {"score": "dot"}),
        ("local_m", {"score": "concat", "radius": 2}),
        ("local_m", {"score": "location"}),
    ],
)
def test_cl_53_memory_under_a_window_is_linear_whatever_the_score(name: str, options: Mapping[str, Any]) -> None:
    assert memory_exponent(name, always(**options), training=True) < 1.1


@pytest.mark.parametrize("training", [False, True], ids=["forward", "training"])
@pytest.mark.parametrize("name", ["forgetting", "path"])
def test_cl_53_all_pairs_are_met_block_by_block_where_the_module_can(name: str, *, training: bool) -> None:
    assert memory_exponent(name, EXPONENTS[name][1], training=training) < 1.2


@pytest.mark.parametrize("name", ["general", "luong"])
def test_cl_53_all_pairs_are_seen_in_memory_where_the_definition_needs_them(name: str) -> None:
    """That the measure sees what it must not see elsewhere."""
    assert memory_exponent(name, EXPONENTS[name][1], training=True) == pytest.approx(2, abs=0.1)
