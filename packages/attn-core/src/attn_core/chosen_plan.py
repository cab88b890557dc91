"""Which kernel reads chosen blocks, decided once per kind of call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attn_core.catalog import installed
from attn_core.chosen import Choices, ChosenKernel, ChosenSpec, KeyBlocks, chosen_problem
from attn_core.dispatch import choose
from attn_core.heads import Heads
from attn_core.kernel import Operands

if TYPE_CHECKING:
    from torch import Tensor
else:
    Tensor = Any

Flags = tuple[bool, bool]
"""Whether gradients are wanted, and rows padded or their positions given."""


class ChosenPlan:
    """The kernels by which one layer reads chosen blocks."""

    def __init__(self, heads: Heads) -> None:
        self.spec = ChosenSpec(heads=heads)
        self._kernels = tuple(kernel for kernel in installed().kernels if isinstance(kernel, ChosenKernel))
        self._chosen: dict[tuple[Any, str, Flags], int] = {}

    def read(self, choices: Choices, blocks: KeyBlocks, operands: Operands) -> Tensor:
        """Outputs, see `ChosenKernel.read`, of choices among the keys of these operands; raises `KernelRefused`."""
        query = choices.query
        gradients = any(rows.requires_grad for rows in (query, blocks.key, blocks.value))
        given = operands.keep, operands.query_positions, operands.key_positions
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
            problem = chosen_problem(self.spec, dtype=kind, device=device, gradients=flags[0], padded=flags[1])
            kernel = choose(installed().kernels, problem)
            self._chosen[key] = next(place for place, one in enumerate(self._kernels) if one is kernel)
        return self._chosen[key]


# As of `RecurrencePlan`: torch.compile calls `index` while tracing and keeps the number.
ChosenPlan.index._dynamo_marked_constant = True  # type: ignore[attr-defined]  # noqa: SLF001
