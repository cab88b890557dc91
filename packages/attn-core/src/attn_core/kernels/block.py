"""Whole decoder blocks as fused computations: parts, problem and kernels."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from attn_core.batch import LayerState, RaggedBatch
from attn_core.kernels.attend import BAND
from attn_core.kernels.base import Kernel, Problem
from attn_core.masks.bands import Window
from attn_core.spec import AttentionSpec

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class AttentionParts:
    """The parts of a spec's layer whose weights are packed.

    `projections` maps hidden states [..., width] to concatenated queries, keys and values; `output` is the output
    projection. `cos_sin(rows, batch)` returns cosines and signed sines [tokens, 1, rotated], float32, for the positions
    of a batch; None without rotary positions. `gains` are those of the norm of queries and keys, if the spec has one.
    """

    spec: AttentionSpec
    projections: Any
    output: Any
    cos_sin: Callable[[Tensor, RaggedBatch], tuple[Tensor, Tensor] | None]
    gains: Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True, eq=False)
class GatedParts:
    """W₂ (f(W_g x) ⊙ W₁ x) with packed weights: `both` maps x to W_g x and W₁ x, concatenated; `down` is W₂, and f the
    `activation`."""

    both: Any
    down: Any
    activation: str = "silu"


@dataclass(frozen=True, kw_only=True, eq=False)
class BlockParts:
    """x + attention(norm(x)), then x + feed_forward(norm(x)); norms are RMSNorm with a gain [hidden_size] and `eps`.

    With `attended_gain` and `fed_gain`, what is added to x is normed, too.
    """

    attention: AttentionParts
    feed_forward: GatedParts
    attention_gain: Tensor
    feed_forward_gain: Tensor
    eps: float
    attended_gain: Tensor | None = None
    fed_gain: Tensor | None = None


class BlockStep(Protocol):
    """The step of one block.

    One that is `composed` gives the bits of the block's parts, computed one by one, where `batch_invariant()`; others
    are not used there.
    """

    composed: bool

    def step(self, hidden: Tensor, batch: RaggedBatch, state: LayerState) -> Tensor | None:
        """The block's output for `hidden` [tokens, hidden_size], which it may overwrite; None, with nothing computed,
        where the kernel cannot read the states."""
        ...


class StackStep(Protocol):
    """The step of consecutive blocks, each of which gets the output of the one before."""

    def step(self, hidden: Tensor, batch: RaggedBatch, states: Iterable[LayerState]) -> Tensor | None:
        """The output of the last block for `hidden` [tokens, hidden_size], which may be overwritten; None, with nothing
        computed, where the kernel cannot read the states of a block. `states` are those of each block, in order, and
        may be consumed lazily."""
        ...


@dataclass(frozen=True, kw_only=True)
class BlockProblem(Problem):
    """A pre-norm block with a gated feed-forward network, as described by `BlockParts`.

    `linears` is the class, "module.name", of the modules that multiply by packed weights, "mixed" where they differ.
    The fields of the attention are as in `SpecProblem`; `mask` is `BAND` for causal masks and causal windows without
    dilation, `norm` the kind of the norm of queries and keys, "" without one, `cross` says that keys come from another
    sequence. `output_norms` says that what is added to x is normed.
    """

    operation: ClassVar[str] = "block"

    linears: str = ""
    score: str = "scaled_dot"
    modifiers: tuple[str, ...] = ()
    mask: str = "full"
    distribution: str = "softmax"
    key_size: int = 0
    value_size: int = 0
    query_heads: int = 1
    key_value_heads: int = 1
    irregular_groups: bool = False
    norm: str = ""
    cross: bool = False
    intermediate_size: int = 0
    activation: str = "silu"
    output_norms: bool = False


def block_problem(parts: BlockParts) -> BlockProblem:
    """The problem of computing a block of these parts."""
    attention, gated = parts.attention, parts.feed_forward
    spec, mask = attention.spec, attention.spec.mask
    linears = {_class_of(part) for part in (attention.projections, attention.output, gated.both, gated.down)}
    band = isinstance(mask, Window) and mask.right == 0 and mask.dilation == 1
    return BlockProblem(
        linears=linears.pop() if len(linears) == 1 else "mixed",
        score=spec.score.kind,
        modifiers=tuple(modifier.kind for modifier in spec.modifiers),
        mask=BAND if band or mask.kind == "causal" else mask.kind,
        distribution=spec.distribution.kind,
        key_size=spec.heads.key_size,
        value_size=spec.heads.value_size,
        query_heads=spec.heads.query,
        key_value_heads=spec.heads.key_value,
        irregular_groups=spec.heads.per_group is None,
        norm="" if spec.norm is None else spec.norm.kind,
        cross=spec.cross,
        intermediate_size=getattr(gated.down, "inputs", 0),
        activation=gated.activation,
        output_norms=parts.attended_gain is not None or parts.fed_gain is not None,
    )


def _class_of(module: Any) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


class BlockKernel(Kernel[BlockProblem]):
    """Computes whole blocks."""

    problem: ClassVar[type[Problem]] = BlockProblem

    @abstractmethod
    def build(self, parts: BlockParts) -> BlockStep:
        """Build the step of a block, which keeps a reference to the parts."""

    def stack(self, steps: Sequence[Any]) -> StackStep | None:
        """Combine steps from `build` into one, which may be faster than one after another; None if not supported."""
        return None
