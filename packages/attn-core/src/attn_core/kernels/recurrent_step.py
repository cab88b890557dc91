"""Decode steps of linear recurrences over states in slots: problem, inputs, kernels, and the choice of a kernel.

A kernel of this operation computes one token of each request, from the outputs of the layer's input projections to the
input of its output projection, and reads and writes the states in the store's memory.
"""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from attn_core.batch import RaggedBatch, SlotsInPlace, Span
from attn_core.errors import InvalidValue
from attn_core.kernels.base import Kernel, Problem
from attn_core.kernels.dispatch import Operation
from attn_core.kernels.recurrence import Decay
from attn_core.plugins.registry import Registry

if TYPE_CHECKING:
    from torch import Tensor
else:
    Tensor = Any

FeatureMap = Literal["none", "silu", "elu_plus_one"]
DecayForm = Literal["log", "log_sigmoid", "softplus"]
RotaryForm = Literal["none", "halves", "pairs"]
OutputGate = Literal["none", "silu", "sigmoid"]


@dataclass(frozen=True, kw_only=True)
class RecurrentStepSpec:
    """A decode step as data: a memory S [key_size, value_size] for each of `num_heads` heads, and what surrounds it.

    Queries and keys have `num_key_heads` heads, each shared by the same number of consecutive memories; values, decays,
    strengths and gates have `num_heads`. The operations, in this order:

    - a causal convolution over the last `taps` queries, keys and values, each channel by itself; 0 for none
    - `feature_map`: SiLU of queries, keys and values, or elu(x) + 1 of queries and keys
    - `rotary` positions of queries and keys, with pairs of elements from both "halves" or of neighbours ("pairs")
    - `unit`: queries and keys are normalised to length one (1e-6 is added to the squared length); then both are scaled
    - g, the log decay of each head or channel (`decay`): given as it is ("log"), ln σ(x) / temperature ("log_sigmoid"),
      or -e^rate softplus(x + bias) ("softplus")
    - `step_size`: values v are multiplied by softplus(x + bias), the step size of Mamba-2
    - the update S' = diag(e^g) S, S = S' + k v^T, by the `delta_rule` S = S' + σ(β) k (v - S'^T k)^T; then o = S^T q
    - `normalizer`: S has one more column, the sum of keys z; o is divided by z^T q + ε
    - `skip`: o plus D_h times the value before its step size
    - RMSNorm of o over `norm_heads` heads at a time, 0 for none, and a gate, σ(x) or SiLU(x), after it or before it
    """

    num_heads: int = 1
    num_key_heads: int = 1
    key_size: int = 1
    value_size: int = 1
    taps: int = 0
    feature_map: FeatureMap = "none"
    rotary: RotaryForm = "none"
    unit: bool = False
    decay: Decay = "none"
    decay_form: DecayForm = "log"
    step_size: bool = False
    delta_rule: bool = False
    normalizer: bool = False
    skip: bool = False
    norm_heads: int = 0
    gate: OutputGate = "none"
    norm_before_gate: bool = True

    def __post_init__(self) -> None:
        for name in ("num_heads", "num_key_heads", "key_size", "value_size"):
            if getattr(self, name) < 1:
                raise InvalidValue.of(name, getattr(self, name), "a whole number from 1")
        if self.num_heads % self.num_key_heads:
            raise InvalidValue.of("num_key_heads", self.num_key_heads, f"a divisor of the {self.num_heads} heads")
        if self.norm_heads < 0 or (self.norm_heads and self.num_heads % self.norm_heads):
            raise InvalidValue.of("norm_heads", self.norm_heads, f"0, or a divisor of the {self.num_heads} heads")
        if self.step_size and self.decay_form != "softplus":
            raise InvalidValue.of("decay_form", self.decay_form, "softplus, which computes the step sizes")

    @property
    def channels(self) -> int:
        """Number of elements of the queries, keys and values of a token."""
        return 2 * self.num_key_heads * self.key_size + self.num_heads * self.value_size

    @property
    def columns(self) -> int:
        """Number of columns of a memory."""
        return self.value_size + self.normalizer


@dataclass(frozen=True, kw_only=True)
class RecurrentStepProblem(RecurrentStepSpec, Problem):
    """A decode step of a linear recurrence on inputs of `dtype`; memories are float32."""

    operation: ClassVar[str] = "recurrent_step"

    gradients: bool = False


def recurrent_step_problem(
    spec: RecurrentStepSpec, *, dtype: str, device: str, gradients: bool = False
) -> RecurrentStepProblem:
    """The problem of computing a decode step of this spec."""
    known = {field.name: getattr(spec, field.name) for field in dataclasses.fields(RecurrentStepSpec)}
    return RecurrentStepProblem(**known, dtype=dtype, device=device, gradients=gradients)


class ConvolutionInputs(NamedTuple):
    """A causal convolution of each channel: `weight` [channels, taps], the newest token last, and `bias` [channels] or
    None. `starts` are the first channels of queries, of keys and of values, each of which are consecutive."""

    weight: Tensor
    bias: Tensor | None
    starts: tuple[int, int, int]


class DecayInputs(NamedTuple):
    """The inputs from which log decays are computed: `rows` [requests, num_heads, key_size or 1], or [1, ...] where
    they are the same for all requests; for the form "softplus", `rate` [num_heads], natural logarithms, and `bias`
    [num_heads, key_size or 1]; for "log_sigmoid", `temperature`."""

    rows: Tensor
    rate: Tensor | None = None
    bias: Tensor | None = None
    temperature: float = 1.0


class OutputInputs(NamedTuple):
    """The parameters of the operations on outputs: `skip` [num_heads]; the gain `norm`, [value_size] for all heads,
    [num_heads * value_size], or None, and its `eps`; `gate` [requests, num_heads, value_size]; `normalizer_eps` is
    added to the normalizer's divisor."""

    skip: Tensor | None = None
    norm: Tensor | None = None
    eps: float = 0.0
    gate: Tensor | None = None
    normalizer_eps: float = 0.0


NO_OUTPUT = OutputInputs()


@dataclass(frozen=True, kw_only=True, eq=False)
class RecurrentStepInputs:
    """The tensors of a step, floats of any type, dense along their last axis.

    `query`, `key` [requests, num_key_heads, key_size] and `value` [requests, num_heads, value_size] are the outputs of
    the projections. `state` holds the memories "S" [slots, num_heads, key_size, columns], float32, and the last inputs
    of the convolution, "tail" [slots, taps - 1, channels]; requests have different slots. `scales` are the factors of
    queries and keys. `cos_sin` are cosines and signed sines [requests, 1, rotated], float32, as for `RotaryKernel`.
    `strength` [requests, num_heads] are β before the sigmoid.
    """

    spec: RecurrentStepSpec
    query: Tensor
    key: Tensor
    value: Tensor
    state: SlotsInPlace
    scales: tuple[float, float] = (1.0, 1.0)
    convolution: ConvolutionInputs | None = None
    cos_sin: tuple[Tensor, Tensor] | None = None
    decay: DecayInputs | None = None
    strength: Tensor | None = None
    output: OutputInputs = NO_OUTPUT


class RecurrentStepKernel(Kernel[RecurrentStepProblem]):
    """Computes a decode step of a linear recurrence over states in place."""

    problem: ClassVar[type[Problem]] = RecurrentStepProblem

    @abstractmethod
    def run(self, inputs: RecurrentStepInputs) -> Tensor:
        """Outputs [requests, num_heads * value_size] in the type of the values; the states of the slots are replaced.

        On a device that cannot run the kernel, it raises before any state is changed. Its launch grids and the
        addresses that it reads depend only on the shapes and addresses of the inputs, so that it can be captured in a
        CUDA graph.
        """


PLAIN = 1.0
"""The cost of a layer's own computation of a step: kernels that cost no less are not used."""


class RecurrentStepDispatcher:
    """Chooses the kernels of one layer's decode steps among `kernels`, usually `installed().kernels`."""

    def __init__(self, kernels: Registry[Kernel[Any]]) -> None:
        self.operation: Operation[Any] = Operation(kernels, RecurrentStepKernel, recurrent_step_problem)

    @cached_property
    def able(self) -> bool:
        """Whether any kernel can run on this machine."""
        return self.operation.able

    def run(
        self,
        spec: RecurrentStepSpec,
        like: Tensor,
        view: Any,
        inputs: Callable[[SlotsInPlace], RecurrentStepInputs],
        *,
        gradients: bool,
        request: int | None = None,
    ) -> Tensor | None:
        """Compute a decode step with a kernel, see `RecurrentStepKernel.run`; None if the layer has to compute it.

        That is if no kernel accepts, or if `view`, a `SlotView`, gives no access to the store's memory. `like` are the
        layer's inputs, from which type and device are read: those of all requests of the batch or, with `request`, of
        the request of that number, which computes one token while others compute several. `inputs` is called only if
        there is a kernel. If this device cannot run a kernel, the next one is used, which is logged once.
        """
        if not self.able:
            return None
        call = {"spec": spec, "dtype": like.dtype, "device": like.device.type, "gradients": gradients}
        if self.operation.find(below=PLAIN, **call) is None:
            return None
        in_place = getattr(view, "in_place", None)
        slots_in_place = None if in_place is None else in_place()
        if slots_in_place is None:
            return None
        if request is not None:
            slots_in_place = SlotsInPlace(slots_in_place.fields, slots_in_place.slots[request : request + 1])
        given = inputs(slots_in_place)
        return self.operation.run(lambda kernel: kernel.run(given), below=PLAIN, **call)

    def single_tokens(
        self, batch: RaggedBatch, step: Callable[[Span, RaggedBatch], Tensor | None]
    ) -> Iterator[tuple[Span, Tensor]]:
        """For each request of one token in a batch in which others have several: its span, and the output of `step` for
        it alone. Ends where `step` returns None; empty if no kernel can run on this machine."""
        for span, alone in batch.single_tokens() if self.able else ():
            out = step(span, alone)
            if out is None:
                return
            yield span, out
