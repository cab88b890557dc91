"""Compressive memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from attn_core import (
    Capability,
    ComputedMechanism,
    Cost,
    Field,
    MechanismConfig,
    Paged,
    Paper,
    Shape,
    Slot,
    StateSpecs,
    Step,
)
from attn_core.checks import checked, require_choice, require_number, require_whole
from attn_core.errors import InvalidValue

from attn_variants.mechanisms.common import BASIC
from attn_variants.mechanisms.memory_sizes import MemorySizes

POOLINGS = ("convolution", "mean", "max")


@dataclass(frozen=True, kw_only=True)
class SegmentedConfig(MechanismConfig):
    """Sizes in tokens: a `segment`, a `memory` before it, and before that `compressed` rows, each of `rate` tokens.

    `rate` must divide `segment` and `memory`.
    """

    segment: int = checked(512, require_whole, ge=1, unit="tokens")
    memory: int = checked(512, require_whole, ge=1, unit="tokens")
    compressed: int = checked(512, require_whole, ge=1, unit="tokens")
    rate: int = checked(4, require_whole, ge=1, unit="tokens")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("segment", "memory"):
            if getattr(self, name) % self.rate:
                raise InvalidValue.of(name, getattr(self, name), f"a multiple of the rate {self.rate}")


@dataclass(frozen=True, kw_only=True)
class CompressiveConfig(SegmentedConfig):
    """Sizes in tokens: a `segment`, a `memory` before it, and before that `compressed` rows, each of `rate` tokens.

    `pooling` compresses `rate` tokens: by a learned "convolution", whose tokens are `dilation` apart, by their "mean",
    or by their element-wise "max". `reconstruction` is the weight of the paper's attention-reconstruction loss, which
    trains only the convolution to preserve what attention reads; `attn train` adds it to the loss.
    """

    pooling: str = checked("convolution", require_choice, POOLINGS)
    dilation: int = checked(1, require_whole, ge=1, unit="tokens")
    reconstruction: float = checked(0.0, require_number, ge=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pooling != "convolution":
            for name, unused in (("reconstruction", 0), ("dilation", 1)):
                if getattr(self, name) != unused:
                    allowed = f"{unused} with pooling {self.pooling!r}; other values only with 'convolution'"
                    raise InvalidValue.of(name, getattr(self, name), allowed)


class CompressiveMemory(ComputedMechanism):
    """Causal attention within a segment, over a memory of the tokens before it, and over a coarse memory before that.

    Tokens that leave the memory are not dropped at once but compressed, several rows to one. Positions are left to the
    model: the paper's relative positions are not part of this mechanism.
    """

    name = "compressive"
    counts_from_start = True  # segments are counted from the first row
    summary = "a memory of recent tokens and a compressed memory of older ones"
    paper = Paper(
        title="Compressive Transformers for Long-Range Sequence Modelling",
        authors="Rae et al.",
        year=2020,
        arxiv="1911.05507",
    )
    equation = (
        r"O = \mathrm{softmax}\left(\frac{Q [f_c(X_\mathrm{old}); X_\mathrm{mem}; X]^\top_{W_K}}{\sqrt{d_k}} + M\right)"
        r" [f_c(X_\mathrm{old}); X_\mathrm{mem}; X]_{W_V}"
    )
    sketch: ClassVar = {"segment": 4, "memory": 4, "compressed": 2, "rate": 2}
    capabilities = BASIC | frozenset({Capability.CAUSAL, Capability.INCREMENTAL, Capability.EXACT, Capability.PADDING})
    Config = CompressiveConfig

    def build(self, config: MechanismConfig) -> Any:
        """A new `CompressiveLayer`; raises `InvalidValue` unless the key/value heads divide the heads."""
        from attn_variants.mechanisms.compressive_layer import CompressiveLayer

        own = CompressiveConfig.of(config)
        return CompressiveLayer(
            config.head_layout,
            hidden_size=config.hidden_size,
            bias=config.bias,
            past=memory_sizes(config),
            pooling=own.pooling,
            reconstruction=own.reconstruction,
        )

    def state(self, config: MechanismConfig) -> StateSpecs:
        """Keys and values of a memory and a segment and of the compressed rows, and the inputs of the next such row."""
        past, heads = memory_sizes(config), (config.num_heads, config.head_layout.key_size)
        row, ring = Field(heads), Field((past.ring, *heads))
        far = {"key": ring, "value": ring, "pending": Field((past.before + past.rate, config.hidden_size))}
        return {"kv": Paged({"key": row, "value": row}, window=past.window), "compressed": Slot(far)}

    def cost(self, config: MechanismConfig, shape: Shape | Step) -> Cost:
        """The cost of projections and pairs and, beyond one segment, of compression; the last segment is padded.

        A step compresses complete groups of tokens, and scores everything that is stored, including masked rows.
        """
        own, inner = CompressiveConfig.of(config), config.num_heads * config.head_layout.key_size
        convolve = own.rate * config.hidden_size**2 if own.pooling == "convolution" else 0
        linear = 4 * config.hidden_size * inner
        biases = 3 * inner + config.hidden_size if config.bias else 0
        tokens = 2 * shape.batch * shape.query * linear
        pair, window = 4 * inner, own.memory + own.segment
        if isinstance(shape, Step):
            rows = (shape.remembered % own.rate + shape.query) // own.rate
            near = min(shape.remembered, window - 1) + shape.query
            pairs = shape.query * (own.compressed + window // own.rate + rows + near)
        elif shape.query <= own.segment:
            rows, pairs = 0, shape.query * shape.query
        else:
            rows = -(-shape.query // own.rate)
            pairs = -(-shape.query // own.segment) * own.segment * (own.compressed + window)
        tokens += 2 * shape.batch * rows * (convolve + linear // 2)
        return Cost(
            flops=tokens + shape.batch * pairs * pair,
            allowed_flops=tokens + shape.batch * least_pairs(own, shape) * pair,
            parameters=linear + biases + convolve,
        )


def least_pairs(config: SegmentedConfig, shape: Shape | Step) -> int:
    """The number of allowed pairs of a query and a token or compressed row, over the queries of a sequence."""
    pairs = 0
    for place in range(shape.remembered, shape.remembered + shape.query):
        before = max(0, place // config.segment * config.segment - config.memory)
        pairs += place + 1 - before + min(config.compressed, before // config.rate)
    return pairs


def memory_sizes(config: MechanismConfig) -> MemorySizes:
    """The sizes of the memory and of the compressed memory of a config."""
    own = SegmentedConfig.of(config)
    dilation = own.dilation if isinstance(own, CompressiveConfig) else 1
    sizes = {name: getattr(own, name) for name in ("segment", "memory", "compressed", "rate")}
    return MemorySizes(**sizes, dilation=dilation)
