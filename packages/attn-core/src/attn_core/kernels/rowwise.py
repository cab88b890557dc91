"""Row-wise operations between the matrix products of a block and after the last one: problems and kernels.

Where no kernel accepts, or one returns None as it cannot read these tensors, the caller uses its tensor library, which
is the definition.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

from attn_core.errors import InvalidValue
from attn_core.kernels.base import TRAINED_IN, Kernel, Problem
from attn_core.plugins.catalog import installed_operation

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
"""The forms of each operation: a norm of rows or of a sum; the pairs of rotary positions; the activation of a gate."""

Activation = Literal["silu", "gelu", "gelu_tanh"]


@dataclass(frozen=True, kw_only=True)
class Targets:
    """The parameters of cross-entropy: rows whose target is `ignored` do not count; label smoothing spreads the share
    `smoothing` of a target over all ids (Szegedy et al. 2016, arXiv 1512.00567, section 7); and with `cap`, logits z
    are first replaced by cap · tanh(z / cap).
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
    """An operation on rows of `row_size` elements: hidden states, heads, gates, or logits over a vocabulary.

    `form` is one of the operation's forms in `ROW_FORMS`. `training` says that this is a step of training on a CPU,
    whose gradients are not differentiated again.
    """

    row_size: int = 0
    form: str = "plain"
    gradients: bool = False
    training: bool = False


class NormProblem(RowProblem):
    """RMSNorm, of rows or of a sum of rows."""

    operation: ClassVar[str] = RMS_NORM


class RotaryProblem(RowProblem):
    """Rotary positions, with pairs of elements from both halves or of neighbours."""

    operation: ClassVar[str] = ROTARY


class GateProblem(RowProblem):
    """A gate; `form` is its activation."""

    operation: ClassVar[str] = GATE


class CrossEntropyProblem(RowProblem):
    """Cross-entropy losses of logits."""

    operation: ClassVar[str] = CROSS_ENTROPY


P = TypeVar("P", bound=RowProblem)


class RowKernel(Kernel[P]):
    """Base class of the kernels of row-wise operations."""


class NormKernel(RowKernel[NormProblem]):
    """x / √(mean(x²) + eps) · gain over the last axis (Zhang and Sennrich 2019, arXiv 1910.07467)."""

    problem: ClassVar[type[Problem]] = NormProblem

    @abstractmethod
    def norm(self, rows: Tensor, gain: Tensor | None, eps: float) -> Tensor | None:
        """Normalised rows [..., width], in the type of `rows`; `gain` [width] may have another type."""

    @abstractmethod
    def norm_sum(self, rows: Tensor, added: Tensor, gain: Tensor | None, eps: float) -> tuple[Tensor, Tensor] | None:
        """`rows` + `added`, and the same normalised, both [..., width] in the type of `rows`.

        `added` has this type or a narrower one.
        """


class RotaryKernel(RowKernel[RotaryProblem]):
    """Rotates pairs of elements by an angle for each position (Su et al. 2021, arXiv 2104.09864)."""

    problem: ClassVar[type[Problem]] = RotaryProblem

    @abstractmethod
    def rotate(self, rows: Tensor, cosines: Tensor, sines: Tensor, *, interleaved: bool) -> Tensor | None:
        """Rotated rows [..., tokens, heads, size], in the type of `rows`; elements after the first `turned` are kept.

        `cosines` and `sines` [tokens or ..., tokens, 1, turned], float32, have equal values for both elements of a
        pair, except that the sine of the first is negated. Pairs are neighbours if `interleaved`, else one element is
        of each half.
        """

    def rotate_appended(
        self,
        projected: tuple[Tensor, Tensor, Tensor],
        turns: tuple[Tensor, Tensor],
        kept: RowsInPlace,
        *,
        interleaved: bool,
    ) -> Tensor | None:
        """Rotate queries, which are returned, and keys, and write the keys and values to the cache, all in one kernel;
        None if this is not supported.

        `projected` are queries, keys and values [tokens, heads, size], `turns` cosines and sines as in `rotate`; `kept`
        has the fields "key" and "value", in the type of the queries, and the slots of these tokens.
        """
        del projected, turns, kept, interleaved
        return None


class GateKernel(RowKernel[GateProblem]):
    """f(gate) ⊙ up (Shazeer 2020, arXiv 2002.05202); f is recomputed in the backward pass."""

    problem: ClassVar[type[Problem]] = GateProblem

    @abstractmethod
    def gated(self, gate: Tensor, up: Tensor, activation: Activation) -> Tensor | None:
        """f(gate) ⊙ up of rows [..., width] of one type."""


class CrossEntropyKernel(RowKernel[CrossEntropyProblem]):
    """Cross-entropy losses of logits, and their gradients in the memory of the logits."""

    problem: ClassVar[type[Problem]] = CrossEntropyProblem

    @abstractmethod
    def losses(self, logits: Tensor, ids: Tensor, targets: Targets, *, gradients: bool) -> Tensor | None:
        """Cross-entropy [rows], float32, in nats, of `ids` [rows], int64, under `logits` [rows, vocabulary].

        With `gradients`, the gradients of each row's loss overwrite its logits. Ignored rows have loss and gradients 0;
        ids outside the vocabulary, which the caller should refuse, have NaN.
        """


PROBLEMS: Mapping[str, type[RowProblem]] = {
    kind.operation: kind for kind in (NormProblem, RotaryProblem, GateProblem, CrossEntropyProblem)
}


def row_problem(
    operation: str, row_size: int, *, form: str, dtype: str, device: str, gradients: bool = False
) -> RowProblem:
    """The problem of a row-wise operation on rows of `row_size` elements, see `RowProblem`.

    Raises `InvalidValue` for an operation or form that does not exist.
    """
    if operation not in ROW_FORMS:
        raise InvalidValue.of("operation", operation, ", ".join(ROW_FORMS))
    if form not in ROW_FORMS[operation]:
        raise InvalidValue.of("form", form, ", ".join(ROW_FORMS[operation]))
    return PROBLEMS[operation](row_size=row_size, form=form, dtype=dtype, device=device, gradients=gradients)


Row = TypeVar("Row", bound=RowKernel[Any])
Result = TypeVar("Result")


def row_result(
    kind: Callable[..., Row], form: str, compute: Callable[[Row], Result], rows: Tensor, *others: Tensor | None
) -> Result | None:
    """The result of `compute` for the kernel for rows [..., row_size]; None if no kernel is faster than the plain
    computation.

    `kind` is a kernel class of this module, `others` are the other tensors that gradients may flow to. If this device
    cannot run the kernel, the next one is used, which is logged once. Not to be called while torch.compile traces,
    which fuses such operations by itself.
    """
    operation, training = installed_operation(kind), TRAINED_IN.get() is not None
    if operation is None or not operation.on(rows.device.type, training=training) or rows.stride(-1) != 1:
        return None
    gradients = any(part is not None and part.requires_grad for part in (rows, *others))
    sizes = {"row_size": rows.shape[-1], "dtype": rows.dtype, "device": rows.device.type, "training": training}
    found: Result | None = operation.run(compute, below=1, form=form, gradients=gradients, **sizes)
    return found
