"""Operations on each row alone, between the matrices of a block and behind the last: what their kernels are asked.

Where nobody accepts, the caller computes with its tensor library, which is the definition.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

from attn_core.errors import InvalidValue, KernelRefused
from attn_core.kernels.attend import AttentionInputs
from attn_core.kernels.base import Kernel, Problem
from attn_core.kernels.dispatch import explain
from attn_core.plugins.catalog import installed

if TYPE_CHECKING:
    from torch import Tensor

    from attn_core.spec import AttentionSpec

RMS_NORM, ROTARY, GATE, CROSS_ENTROPY = "rms_norm", "rotary", "gate", "cross_entropy"

ROW_FORMS = {
    RMS_NORM: ("plain", "added"),
    ROTARY: ("halves", "pairs"),
    GATE: ("silu", "gelu", "gelu_tanh"),
    CROSS_ENTROPY: ("plain",),
}
"""The forms of each operation: of norms alone or of a sum; what rotary positions pair; the activation of a gate."""

Activation = Literal["silu", "gelu", "gelu_tanh"]


@dataclass(frozen=True, kw_only=True)
class Targets:
    """How predictions are judged: rows whose target is `ignored` do not count, the share `smoothing` of a target is
    spread over all ids (Szegedy et al. 2016, arXiv 1512.00567, section 7), and logits z are first cap · tanh(z / cap).
    """

    ignored: int = -100
    smoothing: float = 0.0
    cap: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.smoothing < 1:
            raise InvalidValue.of("smoothing", self.smoothing, "a number from 0, below 1")
        if self.cap is not None and not self.cap > 0:
            raise InvalidValue.of("cap", self.cap, "a number above 0, or None")


class RowKernel(Kernel):
    """A kernel of one of these operations; has a method of its own in place of `run`."""

    def run(self, spec: AttentionSpec, operands: AttentionInputs) -> Tensor:
        """Raise `KernelRefused`: this is another operation."""
        raise KernelRefused(f"kernel {self.name!r} computes {self.operation}, not attend", kernel=self.name)


class NormKernel(RowKernel):
    """x / √(mean(x²) + eps) · gain over the last axis (Zhang and Sennrich 2019, arXiv 1910.07467)."""

    operation: ClassVar[str] = RMS_NORM

    @abstractmethod
    def norm(self, rows: Tensor, gain: Tensor | None, eps: float) -> Tensor:
        """Rows [..., width] normed, in their type; `gain` [width] may be of another."""

    @abstractmethod
    def norm_sum(self, rows: Tensor, added: Tensor, gain: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
        """`rows` + `added`, and that normed, both [..., width] in their type."""


class RotaryKernel(RowKernel):
    """CosSin pairs of elements by an angle for each position (Su et al. 2021, arXiv 2104.09864)."""

    operation: ClassVar[str] = ROTARY

    @abstractmethod
    def rotate(self, rows: Tensor, cosines: Tensor, sines: Tensor, *, interleaved: bool) -> Tensor:
        """Rows [..., tokens, heads, size] turned, in their type; elements behind those that turn stay.

        `cosines` and `sines` [tokens or ..., tokens, 1, turned], float32, are the same for both elements of a pair, but
        that the sine of the first is negative. Pairs are neighbours where `interleaved`, else of both halves.
        """


class GateKernel(RowKernel):
    """f(gate) ⊙ up (Shazeer 2020, arXiv 2002.05202), f computed again for the gradients."""

    operation: ClassVar[str] = GATE

    @abstractmethod
    def gated(self, gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
        """Rows [..., width] of gates and of what they let through, of one type."""


class CrossEntropyKernel(RowKernel):
    """Losses of logits, and their gradients in the same memory."""

    operation: ClassVar[str] = CROSS_ENTROPY

    @abstractmethod
    def losses(self, logits: Tensor, ids: Tensor, targets: Targets, *, gradients: bool) -> Tensor:
        """Cross-entropy [rows], float32, in nats, of `ids` [rows], int64, under `logits` [rows, vocabulary].

        With `gradients`, those of each row's loss stand where its logits stood. Ignored rows have loss and gradients 0;
        ids outside the vocabulary, which the caller should refuse, NaN.
        """


Row = TypeVar("Row", bound=RowKernel)


def row_problem(operation: str, width: int, *, form: str, dtype: str, device: str, gradients: bool = False) -> Problem:
    """The problem of rows of `width` elements: those of a norm, of a head that turns, of a gate, of a vocabulary.

    Raises `InvalidValue` for an operation or form that does not exist.
    """
    if operation not in ROW_FORMS:
        raise InvalidValue.of("operation", operation, ", ".join(ROW_FORMS))
    if form not in ROW_FORMS[operation]:
        raise InvalidValue.of("form", form, ", ".join(ROW_FORMS[operation]))
    return Problem(operation=operation, width=width, form=form, dtype=dtype, device=device, gradients=gradients)


def row_kernel(kind: Callable[..., Row], form: str, rows: Tensor, *others: Tensor | None) -> Row | None:
    """The kernel for rows [..., width]; None where the plain computation is as good, and on machines without any.

    `kind` is a class of this module, `others` are the other tensors that gradients may flow to. Not to be called while
    torch.compile traces, which joins such operations by itself.
    """
    if not able(kind) or rows.stride(-1) != 1:
        return None
    gradients = any(part is not None and part.requires_grad for part in (rows, *others))
    known = str(rows.dtype).removeprefix("torch."), rows.device.type
    found: Row | None = chosen(kind, rows.shape[-1], form, *known, gradients)
    return found


@cache
def able(kind: Any) -> tuple[RowKernel, ...]:
    """The kernels of this kind that can run on this machine."""
    return tuple(kernel for kernel in installed().kernels if isinstance(kernel, kind) and kernel.available() is None)


@cache
def chosen(kind: Any, width: int, form: str, dtype: str, device: str, gradients: bool) -> Any:  # noqa: FBT001 -- part of a key
    """The accepting kernel of least predicted cost, if that is less than the plain computation's."""
    problem = row_problem(kind.operation, width, form=form, dtype=dtype, device=device, gradients=gradients)
    best = explain(able(kind), problem)[0]
    return best.kernel if best.cost is not None and best.cost < 1 else None
