"""Linear recurrences: problem, inputs, kernels, and the choice of a layer's kernel."""

from __future__ import annotations

import math
import sys
from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from attn_core.errors import KernelRefused
from attn_core.heads import Heads
from attn_core.kernels.base import Kernel, Problem
from attn_core.kernels.dispatch import Operation
from attn_core.plugins.registry import Registry

if TYPE_CHECKING:
    from torch import Tensor
else:
    Tensor = Any

Decay = Literal["none", "head", "channel"]
"""Granularity of the decay of a memory: none, one rate per head, or one rate per channel of the keys."""


class Steps(NamedTuple):
    """The tokens of a linear recurrence, which update a memory S [batch, heads, key_size, value_size] and read from it.

    Additive, where `strength` is None:   S_t = diag(e^decay_t) S_{t-1} + k_t v_t^T
    By the delta rule, with strength β:   S_t = S' + β_t k_t (v_t - S'^T k_t)^T with S' = diag(e^decay_t) S_{t-1}
    Read after the update in both cases:  o_t = S_t^T q_t

    `query` and `key` [batch, tokens, heads, key_size], `value` [batch, tokens, heads, value_size]; `decay`, natural
    logarithms, at most 0 and finite, [batch or 1, tokens, heads, key_size] per channel or [..., 1] per head, None
    without decay; `strength` [batch, tokens, heads]. All of one floating type.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    decay: Tensor | None = None
    strength: Tensor | None = None

    def kept(self, key_padding_mask: Tensor | None) -> Steps:
        """The same tokens, of which padding has no effect; `key_padding_mask` [batch, tokens], bool, is True where a
        token is real.

        A padded token neither writes to the memory nor decays it; its output is undefined.
        """
        if key_padding_mask is None:
            return self
        real = key_padding_mask[:, :, None, None]
        return Steps(
            query=self.query,
            key=self.key.where(real, 0),
            value=self.value.where(real, 0),
            decay=None if self.decay is None else self.decay.where(real, 0),
            strength=None if self.strength is None else self.strength.where(key_padding_mask[:, :, None], 0),
        )

    def narrowed(self, dtype: Any) -> Steps:
        """The steps with queries, keys and values converted to `dtype`; decays and strengths stay as they are."""
        return self._replace(query=self.query.to(dtype), key=self.key.to(dtype), value=self.value.to(dtype))

    def nothing(self) -> Tensor:
        """An empty memory, zeros [batch, heads, key_size, value_size], for these steps."""
        batch, _, heads, size = self.key.shape
        return self.key.new_zeros(batch, heads, size, self.value.shape[-1])

    @property
    def fades(self) -> Decay:
        """The granularity of the decay."""
        if self.decay is None:
            return "none"
        return "head" if self.decay.shape[-1] == 1 else "channel"


@dataclass(frozen=True, kw_only=True)
class RecurrenceSpec:
    """A linear recurrence as data, with one memory per head; `delta_rule` says that it uses the delta rule."""

    heads: Heads
    decay: Decay = "none"
    delta_rule: bool = False


@dataclass(frozen=True, kw_only=True)
class RecurrenceProblem(Problem):
    """A linear recurrence with this granularity of `decay`; `delta_rule` says that it uses the delta rule.

    `tokens` is the number of tokens of each sequence, for cost estimates; 0 where unknown.
    """

    operation: ClassVar[str] = "recurrence"
    priced: ClassVar[frozenset[str]] = frozenset({"tokens"})

    decay: str = "none"
    delta_rule: bool = False
    key_size: int = 0
    value_size: int = 0
    query_heads: int = 1
    key_value_heads: int = 1
    gradients: bool = False
    tokens: int = 0


def recurrence_problem(
    spec: RecurrenceSpec, *, dtype: str, device: str, gradients: bool = False, tokens: int = 0
) -> RecurrenceProblem:
    """The problem of computing a recurrence over sequences of `tokens` tokens, 0 where that is not known."""
    return RecurrenceProblem(
        decay=spec.decay,
        delta_rule=spec.delta_rule,
        key_size=spec.heads.key_size,
        value_size=spec.heads.value_size,
        query_heads=spec.heads.query,
        key_value_heads=spec.heads.key_value,
        gradients=gradients,
        dtype=dtype,
        device=device,
        tokens=tokens,
    )


class RecurrenceKernel(Kernel[RecurrenceProblem]):
    """Computes the outputs and the memories of linear recurrences.

    A kernel with `mixes` takes queries, keys and values of 16 bits together with decays, strengths and memories in
    float32, and sums in float32; it gets such inputs where the model computes in 16 bits. Other kernels get float32.
    """

    problem: ClassVar[type[Problem]] = RecurrenceProblem
    mixes: ClassVar[bool] = False

    @abstractmethod
    def run(self, steps: Steps, before: Tensor | None, chunk: int) -> tuple[Tensor, Tensor]:
        """Outputs [batch, tokens, heads, value_size] and the memory [batch, heads, key_size, value_size] after them.

        `before` is the memory at the start, None for an empty one. `chunk` is the number of tokens that may be computed
        pairwise at once, which only affects the speed; kernels may use another number. Gradients flow to steps and
        `before`.
        """


TRIAL = 64
"""The number of tokens of a trial."""

NARROW = 2
"""Bytes of a 16-bit element."""


class RecurrenceDispatcher:
    """Chooses the kernels of one layer's recurrence among `kernels`, usually `installed().kernels`.

    `name` selects one kernel; an error is raised where it refuses.
    """

    def __init__(self, kernels: Registry[Kernel[Any]], name: str | None = None) -> None:
        self.name = name
        self.operation: Operation[Any] = Operation(kernels, RecurrenceKernel, name=name, trial=_trial)

    def run(self, steps: Steps, before: Tensor | None, chunk: int, computed: Any = None) -> tuple[Tensor, Tensor]:
        """Outputs and memory, see `RecurrenceKernel.run`; raises `KernelRefused` where no kernel accepts.

        `computed` is the type of the model's matrix products, None for that of the steps: if it has 16 bits and the
        kernel `mixes`, queries, keys and values are rounded to it. Outputs have the type of the steps. If this device
        cannot run the kernel, the next one is used, which is logged once.
        """
        found = self.run_below(steps, before, chunk, computed)
        if found is None:
            raise self._refused()
        return found

    def decode(self, steps: Steps, before: Tensor) -> tuple[Tensor, Tensor]:
        """Like `run`, for one token of each sequence."""
        found = self.run_below(steps, before, 1, single=True)
        if found is None:
            raise self._refused()
        return found

    def run_below(
        self,
        steps: Steps,
        before: Tensor | None,
        chunk: int,
        computed: Any = None,
        *,
        single: bool = False,
        below: float = math.inf,
    ) -> tuple[Tensor, Tensor] | None:
        """Like `run`, or like `decode` for a `single` token of each sequence, with a kernel that costs less than
        `below`; None if there is none, for a layer with a plain computation of its own."""
        call = _call(steps, before, single=single)
        if computed is not None and computed.itemsize == NARROW and not single:
            mixed = self.operation.run(
                lambda kernel: kernel.run(steps.narrowed(computed), before, chunk) if kernel.mixes else None,
                below,
                **call | {"dtype": computed},
            )
            if mixed is not None:
                return mixed[0].to(steps.value.dtype), mixed[1]
        return self.operation.run(lambda kernel: kernel.run(steps, before, chunk), below, **call)

    def _refused(self) -> KernelRefused:
        refusal = f"kernel {self.name!r} does not compute" if self.name else "no installed kernel computes"
        return KernelRefused(f"{refusal} this recurrence; attn-variants provides one", kernel=self.name or "")


def _call(steps: Steps, before: Tensor | None, *, single: bool) -> dict[str, Any]:
    """The fields of `RecurrenceProblem` for a call; `single` says that each sequence has one token."""
    value = steps.value
    return {
        "decay": steps.fades,
        "delta_rule": steps.strength is not None,
        "key_size": steps.key.shape[3],
        "value_size": value.shape[3],
        "query_heads": value.shape[2],
        "key_value_heads": value.shape[2],
        "gradients": any(part is not None and part.requires_grad for part in (*steps, before)),
        "dtype": value.dtype,
        "device": value.device.type,
        "tokens": int(single),
    }


def _trial(kernel: RecurrenceKernel, **call: Any) -> None:
    """Run a kernel, and its backward pass if there are gradients, on zeros of `TRIAL` tokens of this kind of call."""
    torch: Any = sys.modules["torch"]  # loaded by the caller; the contract itself needs no tensor library
    narrow = call["dtype"]
    wide = torch.float32 if kernel.mixes else narrow

    def rows(size: int | None, dtype: Any) -> Any:
        sizes = (1, call["tokens"] or TRIAL, call["query_heads"], *(() if size is None else (size,)))
        return torch.zeros(sizes, dtype=dtype, device=call["device"], requires_grad=call["gradients"])

    channels = {"none": None, "head": 1, "channel": call["key_size"]}[call["decay"]]
    steps = Steps(
        rows(call["key_size"], narrow),
        rows(call["key_size"], narrow),
        rows(call["value_size"], narrow),
        None if channels is None else rows(channels, wide),
        rows(None, wide) if call["delta_rule"] else None,
    )
    with torch.set_grad_enabled(call["gradients"]):
        out, after = kernel.run(steps, None, TRIAL)
        if call["gradients"]:
            torch.autograd.backward(out.sum() + after.sum())
