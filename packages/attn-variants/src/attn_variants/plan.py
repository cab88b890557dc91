"""Which kernel computes a spec, decided once per kind of call."""

from __future__ import annotations

import torch
from attn_core import AttentionSpec, Kernel, Operands, attend_problem, choose, installed
from torch import Tensor


class KernelPlan:
    """The kernels of one spec. `name` asks for one kernel, which then raises where it refuses."""

    def __init__(self, spec: AttentionSpec, name: str | None = None) -> None:
        self.spec = spec
        self.name = name
        self._kernels: tuple[Kernel, ...] = tuple(installed().kernels)
        self._chosen: dict[tuple[torch.dtype, str, bool, bool], int] = {}

    def run(self, operands: Operands) -> Tensor:
        """The output [batch, query, heads, value_size] from the chosen kernel; raises `KernelRefused`."""
        query = operands.query
        padded = operands.keep is not None or operands.query_positions is not None or operands.key_positions is not None
        index: int = self.index(query.dtype, query.device.type, torch.is_grad_enabled(), padded)
        return self._kernels[index].run(self.spec, operands)

    def index(self, dtype: torch.dtype, device: str, gradients: bool, padded: bool) -> int:  # noqa: FBT001
        """The place of the chosen kernel among the installed ones."""
        key = (dtype, device, gradients, padded)
        if key not in self._chosen:
            name = str(dtype).removeprefix("torch.")
            problem = attend_problem(self.spec, dtype=name, device=device, gradients=gradients, padded=padded)
            self._chosen[key] = self._kernels.index(choose(installed().kernels, problem, self.name))
        return self._chosen[key]


# torch.compile calls `index` while tracing and keeps the number; a kernel object could not be kept so. This is all that
# torch.compiler.assume_constant_result does, which would import the compiler, two seconds, into every process.
KernelPlan.index._dynamo_marked_constant = True  # type: ignore[attr-defined]  # noqa: SLF001
