"""Kernels of recurrences and of selected blocks, chosen once per kind of call."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from attn_core.errors import KernelRefused
from attn_core.heads import Heads
from attn_core.kernels.attend import AttentionInputs
from attn_core.kernels.dispatch import choose, explain
from attn_core.kernels.recurrence import RECURRENCE, Decay, RecurrenceKernel, RecurrenceSpec, Steps, recurrence_problem
from attn_core.kernels.selected import (
    KeyBlocks,
    SelectedBlocks,
    SelectedBlocksKernel,
    SelectedBlocksSpec,
    selected_blocks_problem,
)
from attn_core.plugins.catalog import installed

if TYPE_CHECKING:
    from torch import Tensor
else:
    Tensor = Any


Flags = tuple[bool, bool]
"""Whether gradients are wanted, and rows padded or their positions given."""


class SelectedBlocksPlan:
    """The kernels by which one layer reads chosen blocks."""

    def __init__(self, heads: Heads) -> None:
        self.spec = SelectedBlocksSpec(heads=heads)
        self._kernels = tuple(kernel for kernel in installed().kernels if isinstance(kernel, SelectedBlocksKernel))
        self._chosen: dict[tuple[Any, str, Flags], int] = {}

    def read(self, choices: SelectedBlocks, blocks: KeyBlocks, operands: AttentionInputs) -> Tensor:
        """Outputs, see `SelectedBlocksKernel.read`, of choices among the keys of these operands; raises
        `KernelRefused`.
        """
        query = choices.query
        gradients = any(rows.requires_grad for rows in (query, blocks.key, blocks.value))
        given = operands.key_padding_mask, operands.query_positions, operands.key_positions
        # A bool of its own: a comparison of lengths that a compiler follows is none yet.
        behind = bool(operands.query.shape[1] != operands.key.shape[1])
        padded = behind or any(part is not None for part in given)
        index: int = self.index(query.dtype, query.device.type, (gradients, padded))
        return self._kernels[index].read(choices, blocks)

    def index(self, dtype: Any, device: str, flags: Flags) -> int:
        """The place of the chosen kernel among those that read chosen blocks."""
        key = dtype, device, flags
        if key not in self._chosen:
            kind = str(dtype).removeprefix("torch.")
            problem = selected_blocks_problem(self.spec, dtype=kind, device=device, gradients=flags[0], padded=flags[1])
            kernel = choose(installed().kernels, problem)
            self._chosen[key] = next(place for place, one in enumerate(self._kernels) if one is kernel)
        return self._chosen[key]


# As of `RecurrencePlan`: torch.compile calls `index` while tracing and keeps the number.
SelectedBlocksPlan.index._dynamo_marked_constant = True  # type: ignore[attr-defined]  # noqa: SLF001


NOBODY = -1
NARROW = 2
"""Bytes of an element of 16 bits."""

Kind = tuple[int, int, int, Decay, bool]
"""Heads, their key and value size, what fades, and whether keys write by the delta rule."""


class RecurrencePlan:
    """The kernels of one layer's recurrence. `name` asks for one kernel, which then raises where it refuses."""

    def __init__(self, name: str | None = None) -> None:
        self.name = name
        offered = tuple(kernel for kernel in installed().kernels if isinstance(kernel, RecurrenceKernel))
        self._kernels = tuple(kernel for kernel in offered if name in (None, kernel.name))
        self._chosen: dict[tuple[Kind, Any, str, tuple[bool, bool], float], int] = {}

    def run(self, steps: Steps, before: Tensor | None, chunk: int, computed: Any = None) -> tuple[Tensor, Tensor]:
        """Outputs and memory, see `RecurrenceKernel.run_steps`; raises `KernelRefused` where nobody accepts.

        `computed` as of `handed`; outputs are in the type of the steps.
        """
        kernel, given = self.handed(steps, before, computed)
        out, after = (kernel or self.required(steps, before, single=False)).run_steps(given, before, chunk)
        return out if given is steps else out.to(steps.value.dtype), after

    def decode(self, steps: Steps, before: Tensor) -> tuple[Tensor, Tensor]:
        """The same for one token of each sequence."""
        return self.required(steps, before, single=True).run_steps(steps, before, 1)

    def handed(
        self, steps: Steps, before: Tensor | None, computed: Any, *, below: float = math.inf
    ) -> tuple[RecurrenceKernel | None, Steps]:
        """The kernel for several tokens, as of `kernel`, and the steps that it is given.

        `computed` is the type in which the model multiplies, None for that of the steps: where it has 16 bits and the
        kernel `mixes`, queries, keys and values are rounded to it.
        """
        if computed is not None and computed.itemsize == NARROW:
            kernel = self.kernel(steps, before, below=below, dtype=computed)
            if kernel is not None and kernel.mixes:
                return kernel, steps.narrowed(computed)
        return self.kernel(steps, before, below=below), steps

    def required(self, steps: Steps, before: Tensor | None, *, single: bool) -> RecurrenceKernel:
        """The kernel, as of `kernel`; raises `KernelRefused` where nobody accepts."""
        kernel = self.kernel(steps, before, single=single)
        if kernel is None:
            asked = f"kernel {self.name!r} does not compute" if self.name else "no installed kernel computes"
            raise KernelRefused(f"{asked} this {RECURRENCE}; attn-variants brings one", kernel=self.name or "")
        return kernel

    def kernel(
        self,
        steps: Steps,
        before: Tensor | None = None,
        *,
        single: bool = False,
        below: float = math.inf,
        dtype: Any = None,
    ) -> RecurrenceKernel | None:
        """The accepting kernel of least predicted cost, None where all refuse or cost no less than `below`.

        `single` says that each sequence has one token, `dtype` in which type queries, keys and values are handed on,
        None for their own. A layer with a plain computation of its own asks below 1, which is what that costs.
        """
        value = steps.value
        gradients = any(part is not None and part.requires_grad for part in (*steps, before))
        kind = value.shape[2], steps.key.shape[3], value.shape[3], steps.fades, steps.strength is not None
        index: int = self.index(kind, dtype or value.dtype, value.device.type, (gradients, single), below)
        return None if index == NOBODY else self._kernels[index]

    def index(self, kind: Kind, dtype: Any, device: str, flags: tuple[bool, bool], below: float) -> int:
        """The place of the chosen kernel among those that compute recurrences, `NOBODY` where there is none.

        Flags are gradients, and one token of each sequence.
        """
        key = kind, dtype, device, flags, below
        if key not in self._chosen:
            heads, key_size, value_size, decay, delta_rule = kind
            layout = Heads(query=heads, key_value=heads, key_size=key_size, value_size=value_size)
            problem = recurrence_problem(
                RecurrenceSpec(heads=layout, decay=decay, delta_rule=delta_rule),
                dtype=str(dtype).removeprefix("torch."),
                device=device,
                gradients=flags[0],
                tokens=int(flags[1]),
            )
            verdicts = explain(self._kernels, problem)
            best = verdicts[0] if verdicts else None
            able = best is not None and best.cost is not None and best.cost < below
            self._chosen[key] = self._kernels.index(best.kernel) if able and best is not None else NOBODY
        return self._chosen[key]


# As of attn-variants' `KernelPlan`: torch.compile calls `index` while tracing and keeps the number.
RecurrencePlan.index._dynamo_marked_constant = True  # type: ignore[attr-defined]  # noqa: SLF001
