"""A whole decoder block as one computation, for kernels that join what stands between two of its sums."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from attn_core.batch import LayerState, RaggedBatch
from attn_core.spec import AttentionSpec

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class AttentionParts:
    """What the layer of a spec is made of once its weights are packed.

    `projections` maps rows [..., width] to queries, keys and values side by side, `output` what heads read to rows.
    `cos_sin(rows, batch)` gives cosines and signed sines [tokens, 1, rotated], float32, for the positions of a batch;
    None where positions turn nothing.
    """

    spec: AttentionSpec
    projections: Any
    output: Any
    cos_sin: Callable[[Tensor, RaggedBatch], tuple[Tensor, Tensor] | None]


@dataclass(frozen=True, kw_only=True, eq=False)
class GatedParts:
    """W₂ (SiLU(W_g x) ⊙ W₁ x) once its weights are packed: `both` maps rows to gate and up side by side."""

    both: Any
    down: Any


@dataclass(frozen=True, kw_only=True, eq=False)
class BlockParts:
    """x + attention(norm(x)), then x + feed_forward(norm(x)), both norms RMSNorm with a gain [width] and `eps`."""

    attention: AttentionParts
    feed_forward: GatedParts
    attention_gain: Tensor
    feed_forward_gain: Tensor
    eps: float


class BlockStep(Protocol):
    """One block's step."""

    def step(self, hidden: Tensor, batch: RaggedBatch, state: LayerState) -> Tensor | None:
        """What `hidden` [tokens, width], which may be written over, becomes; None, with nothing done, where the states
        cannot be reached."""
        ...


class StackStep(Protocol):
    """The steps of blocks, each of which is given what comes from the one before."""

    def step(self, hidden: Tensor, batch: RaggedBatch, states: Iterable[LayerState]) -> Tensor | None:
        """What `hidden` [tokens, width], which may be written over, becomes; None, with nothing done, where the states
        of a block cannot be reached. `states` are those of each block, in order, and may be asked for one by one."""
        ...


class BlockKernel(ABC):
    """Computes whole blocks of the kinds that it does not refuse."""

    name: ClassVar[str]
    summary: ClassVar[str]

    def available(self) -> str | None:
        """Why the kernel cannot run on this machine at all, or None if it can."""
        return None

    @abstractmethod
    def refuses(self, parts: BlockParts) -> str | None:
        """Why a block of these parts is refused, or None if it is accepted."""

    @abstractmethod
    def build(self, parts: BlockParts) -> BlockStep:
        """The step of a block; keeps the parts."""

    def stack(self, steps: Sequence[Any]) -> StackStep | None:
        """Steps that `build` gave as one, which may be faster than one after another; None where it is not offered."""
        return None
