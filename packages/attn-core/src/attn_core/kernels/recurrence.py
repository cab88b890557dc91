"""Linear recurrences: what kernels of the operation `recurrence` are asked and given."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from attn_core.errors import KernelRefused
from attn_core.heads import Heads
from attn_core.kernels.attend import AttentionInputs
from attn_core.kernels.base import Kernel, Problem

if TYPE_CHECKING:
    from torch import Tensor

    from attn_core.spec import AttentionSpec
else:
    Tensor = Any

RECURRENCE = "recurrence"

Decay = Literal["none", "head", "channel"]
"""What of a memory fades at a rate of its own: nothing, each head, each channel of the keys."""


class Steps(NamedTuple):
    """The updates of a memory S [batch, heads, key_size, value_size] and what is read from it, for some tokens.

    Additive, where `strength` is None:   S_t = diag(e^decay_t) S_{t-1} + k_t v_t^T
    By the delta rule, with strength β:   S_t = S' + β_t k_t (v_t - S'^T k_t)^T with S' = diag(e^decay_t) S_{t-1}
    Read after the update in both cases:  o_t = S_t^T q_t

    `query` and `key` [batch, tokens, heads, key_size], `value` [batch, tokens, heads, value_size]; `decay`, natural
    logarithms, at most 0 and finite, [batch or 1, tokens, heads, key_size] a channel or [..., 1] a head, None where
    nothing is forgotten; `strength` [batch, tokens, heads]. All of one floating type.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    decay: Tensor | None = None
    strength: Tensor | None = None

    def kept(self, key_padding_mask: Tensor | None) -> Steps:
        """The steps with those of padded tokens undone; `key_padding_mask` [batch, tokens], bool, True where a token is
        real.

        A padded token neither writes nor lets anything fade; what it reads means nothing.
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
        """The steps with queries, keys and values in this type; decays and strengths stay as they are."""
        return self._replace(query=self.query.to(dtype), key=self.key.to(dtype), value=self.value.to(dtype))

    def nothing(self) -> Tensor:
        """An empty memory for these steps."""
        batch, _, heads, size = self.key.shape
        return self.key.new_zeros(batch, heads, size, self.value.shape[-1])

    @property
    def fades(self) -> Decay:
        """What fades at a rate of its own."""
        if self.decay is None:
            return "none"
        return "head" if self.decay.shape[-1] == 1 else "channel"


@dataclass(frozen=True, kw_only=True)
class RecurrenceSpec:
    """A linear recurrence as data: every head keeps a memory; `delta_rule` says that keys write by the delta rule."""

    heads: Heads
    decay: Decay = "none"
    delta_rule: bool = False


class RecurrenceKernel(Kernel):
    """Computes what linear recurrences read and remember; has `run_steps` in place of `run`.

    One that `mixes` takes queries, keys and values of 16 bits beside decays, strengths and memories of float32, and
    sums in float32; it is handed them so where the model computes in 16 bits. All others are handed float32.
    """

    operation: ClassVar[str] = RECURRENCE
    mixes: ClassVar[bool] = False

    def run(self, spec: AttentionSpec, operands: AttentionInputs) -> Tensor:
        """Raise `KernelRefused`: this is another operation."""
        raise KernelRefused(f"kernel {self.name!r} computes {RECURRENCE}, not attend", kernel=self.name)

    @abstractmethod
    def run_steps(self, steps: Steps, before: Tensor | None, chunk: int) -> tuple[Tensor, Tensor]:
        """Outputs [batch, tokens, heads, value_size] and the memory [batch, heads, key_size, value_size] after them.

        `before` is the memory at the start, None for an empty one. `chunk` tokens may meet pair by pair, which
        changes the speed only; kernels may take another number. Gradients flow to steps and `before`.
        """


def recurrence_problem(
    spec: RecurrenceSpec, *, dtype: str, device: str, gradients: bool = False, tokens: int = 0
) -> Problem:
    """The problem of computing a recurrence; `tokens` of a sequence, 0 where they are not known."""
    return Problem(
        operation=RECURRENCE,
        decay=spec.decay,
        delta_rule=spec.delta_rule,
        key_size=spec.heads.key_size,
        value_size=spec.heads.value_size,
        query_heads=spec.heads.query,
        key_value_heads=spec.heads.key_value,
        gradients=gradients,
        dtype=dtype,
        device=device,
        queries=tokens,
    )
