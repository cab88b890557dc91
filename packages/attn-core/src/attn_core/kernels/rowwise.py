"""Operations on each row alone, between the matrices of a block and behind the last: what their kernels are asked.

Where nobody accepts, the caller computes with its tensor library, which is the definition.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

from attn_core.errors import InvalidValue
from attn_core.kernels.base import Kernel, Problem
from attn_core.kernels.dispatch import KernelTable
from attn_core.plugins.catalog import installed

if TYPE_CHECKING:
    from torch import Tensor

    from attn_core.batch import RowsInPlace

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


@dataclass(frozen=True, kw_only=True)
class RowProblem(Problem):
    """An operation on rows of `row_size` elements: a row to be normed, a head, a gate, logits over a vocabulary.

    `form` is one of the operation's in `ROW_FORMS`.
    """

    row_size: int = 0
    form: str = "plain"
    gradients: bool = False


class NormProblem(RowProblem):
    """RMSNorm, alone or of a sum."""

    operation: ClassVar[str] = RMS_NORM


class RotaryProblem(RowProblem):
    """Rotary positions, of which halves or neighbours are pairs."""

    operation: ClassVar[str] = ROTARY


class GateProblem(RowProblem):
    """A gate, by its activation."""

    operation: ClassVar[str] = GATE


class CrossEntropyProblem(RowProblem):
    """Losses of logits."""

    operation: ClassVar[str] = CROSS_ENTROPY


P = TypeVar("P", bound=RowProblem)


class RowKernel(Kernel[P]):
    """A kernel of one of these operations."""


class NormKernel(RowKernel[NormProblem]):
    """x / √(mean(x²) + eps) · gain over the last axis (Zhang and Sennrich 2019, arXiv 1910.07467)."""

    problem: ClassVar[type[Problem]] = NormProblem

    @abstractmethod
    def norm(self, rows: Tensor, gain: Tensor | None, eps: float) -> Tensor:
        """Rows [..., width] normed, in their type; `gain` [width] may be of another."""

    @abstractmethod
    def norm_sum(self, rows: Tensor, added: Tensor, gain: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
        """`rows` + `added`, of its type or a narrower one, and that normed, both [..., width] in the rows' type."""


class RotaryKernel(RowKernel[RotaryProblem]):
    """Rotates pairs of elements by an angle for each position (Su et al. 2021, arXiv 2104.09864)."""

    problem: ClassVar[type[Problem]] = RotaryProblem

    @abstractmethod
    def rotate(self, rows: Tensor, cosines: Tensor, sines: Tensor, *, interleaved: bool) -> Tensor:
        """Rows [..., tokens, heads, size] turned, in their type; elements behind those that turn stay.

        `cosines` and `sines` [tokens or ..., tokens, 1, turned], float32, are the same for both elements of a pair, but
        that the sine of the first is negative. Pairs are neighbours where `interleaved`, else of both halves.
        """

    def rotate_appended(
        self,
        projected: tuple[Tensor, Tensor, Tensor],
        turns: tuple[Tensor, Tensor],
        kept: RowsInPlace,
        *,
        interleaved: bool,
    ) -> Tensor | None:
        """Queries turned, and keys, turned, and values written to where rows are kept, by one kernel; None where it is
        none.

        `projected` are queries, keys and values [tokens, heads, size], `turns` cosines and sines as of `rotate`; `kept`
        has the fields "key" and "value", in the type of the queries, and says where the rows of these tokens go.
        """
        del projected, turns, kept, interleaved
        return None


class GateKernel(RowKernel[GateProblem]):
    """f(gate) ⊙ up (Shazeer 2020, arXiv 2002.05202), f computed again for the gradients."""

    problem: ClassVar[type[Problem]] = GateProblem

    @abstractmethod
    def gated(self, gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
        """Rows [..., width] of gates and of what they let through, of one type."""


class CrossEntropyKernel(RowKernel[CrossEntropyProblem]):
    """Losses of logits, and their gradients in the same memory."""

    problem: ClassVar[type[Problem]] = CrossEntropyProblem

    @abstractmethod
    def losses(self, logits: Tensor, ids: Tensor, targets: Targets, *, gradients: bool) -> Tensor:
        """Cross-entropy [rows], float32, in nats, of `ids` [rows], int64, under `logits` [rows, vocabulary].

        With `gradients`, those of each row's loss stand where its logits stood. Ignored rows have loss and gradients 0;
        ids outside the vocabulary, which the caller should refuse, NaN.
        """


PROBLEMS: Mapping[str, type[RowProblem]] = {
    kind.operation: kind for kind in (NormProblem, RotaryProblem, GateProblem, CrossEntropyProblem)
}


def row_problem(
    operation: str, row_size: int, *, form: str, dtype: str, device: str, gradients: bool = False
) -> RowProblem:
    """The problem of rows of `row_size` elements: those of a norm, of a rotated head, of a gate, of a vocabulary.

    Raises `InvalidValue` for an operation or form that does not exist.
    """
    if operation not in ROW_FORMS:
        raise InvalidValue.of("operation", operation, ", ".join(ROW_FORMS))
    if form not in ROW_FORMS[operation]:
        raise InvalidValue.of("form", form, ", ".join(ROW_FORMS[operation]))
    return PROBLEMS[operation](row_size=row_size, form=form, dtype=dtype, device=device, gradients=gradients)


Row = TypeVar("Row", bound=RowKernel[Any])
Result = TypeVar("Result")


def row_kernel(kind: Callable[..., Row], form: str, rows: Tensor, *others: Tensor | None) -> Row | None:
    """The kernel for rows [..., row_size]; None where the plain computation is as good, and where there is none.

    `kind` is a class of this module, `others` are the other tensors that gradients may flow to. Not to be called while
    torch.compile traces, which joins such operations by itself.
    """
    table = row_table(kind)
    if table is None or rows.stride(-1) != 1:
        return None
    gradients = any(part is not None and part.requires_grad for part in (rows, *others))
    found: Row | None = table.find(form, rows.shape[-1], rows.dtype, rows.device.type, gradients, below=1)
    return found


def row_result(
    kind: Callable[..., Row], form: str, compute: Callable[[Row], Result], rows: Tensor, *others: Tensor | None
) -> Result | None:
    """What `compute` makes of the kernel for rows, as of `row_kernel`; None where the plain computation is to be taken.

    Where this chip cannot run the kernel, that of the next one, which is said once.
    """
    table = row_table(kind)
    if table is None or rows.stride(-1) != 1:
        return None
    gradients = any(part is not None and part.requires_grad for part in (rows, *others))
    call = form, rows.shape[-1], rows.dtype, rows.device.type, gradients
    found: Result | None = table.run_below(call, compute, below=1)
    return found


@cache
def row_table(kind: Any) -> KernelTable[Any] | None:
    """The kernels of this kind; None where none can run on this machine."""
    table = KernelTable(installed().kernels, kind, partial(_problem, kind.problem.operation))
    return table if any(kernel.available() is None for kernel in table.kernels) else None


def _problem(operation: str, form: str, row_size: int, dtype: Any, device: str, gradients: bool) -> RowProblem:  # noqa: FBT001 -- part of a key
    kind = str(dtype).removeprefix("torch.")
    return row_problem(operation, row_size, form=form, dtype=kind, device=device, gradients=gradients)
