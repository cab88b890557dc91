"""Choosing a kernel for a problem of any operation, explaining the choice, and remembering it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from attn_core.errors import KernelRefused
from attn_core.kernels.base import Kernel, Problem
from attn_core.plugins.registry import Registry

K = TypeVar("K", bound=Kernel[Any])


@dataclass(frozen=True)
class Verdict(Generic[K]):
    """What one kernel says of a problem: its predicted cost, or why it refused."""

    kernel: K
    reasons: tuple[str, ...]
    cost: float | None

    @property
    def accepted(self) -> bool:
        """Whether the kernel would run."""
        return self.cost is not None


def explain(kernels: Iterable[K], problem: Problem, name: str | None = None) -> list[Verdict[K]]:
    """The verdict of every kernel, the chosen one first, then by cost, then those that refused.

    Kernels that alter what is computed refuse unless they are asked for by this name.
    """
    verdicts = []
    for kernel in kernels:
        absent = kernel.available()
        reasons = [absent] if absent else kernel.refusals(problem)
        if kernel.alters and kernel.name != name:
            reasons.append(f"only by name: {kernel.alters}")
        verdicts.append(Verdict(kernel, tuple(reasons), None if reasons else kernel.cost(problem)))
    return sorted(verdicts, key=lambda verdict: (not verdict.accepted, verdict.cost or 0.0, verdict.kernel.name))


def choose(kernels: Registry[K], problem: Problem, name: str | None = None) -> K:
    """The accepting kernel of least predicted cost, or the one called `name`.

    Raises `KernelRefused` where the named kernel, or every kernel, refuses; nothing is replaced silently.
    """
    asked = [kernels.get(name)] if name else list(kernels)
    verdicts = explain(asked, problem, name)
    if verdicts and verdicts[0].accepted:
        return verdicts[0].kernel
    said = "; ".join(f"{verdict.kernel.name} ({', '.join(verdict.reasons)})" for verdict in verdicts)
    what = f"kernel {name!r} refuses" if name else "no installed kernel accepts"
    raise KernelRefused(f"{what} {problem.operation}: {said or 'none is installed'}", kernel=name or "")


NONE = -1
"""The index where no kernel is chosen."""


class KernelTable(Generic[K]):
    """The kernels of one kind, of which one is chosen once per kind of call.

    `kind` is the kernel class of an operation, `problem` makes the problem of a kind of call from its arguments, which
    must be hashable. `name` asks for one kernel. A layer keeps a table and asks it in every call: the problem is only
    made, and the kernels only asked, for the first call of a kind. May be asked while torch.compile traces.
    """

    def __init__(
        self,
        registry: Registry[Kernel[Any]],
        kind: Callable[..., K],
        problem: Callable[..., Problem],
        name: str | None = None,
    ) -> None:
        self.registry = registry
        offered: Any = kind  # a class, which may be abstract: type[K] would be refused
        self.kind = kind
        self.problem = problem
        self.name = name
        asked = (kernel for kernel in registry if name in (None, kernel.name))
        self.kernels: tuple[K, ...] = tuple(kernel for kernel in asked if isinstance(kernel, offered))
        self._chosen: dict[tuple[Any, ...], int] = {}

    def __deepcopy__(self, _memo: object) -> KernelTable[K]:
        """A new table of the same kernels, which are not copied."""
        return KernelTable(self.registry, self.kind, self.problem, self.name)

    def find(self, *call: Any, below: float = math.inf) -> K | None:
        """The accepting kernel of least predicted cost, None where all refuse or cost no less than `below`."""
        index: int = self.index(call, below)
        return None if index == NONE else self.kernels[index]

    def require(self, *call: Any) -> K:
        """The accepting kernel of least predicted cost; raises as `choose` where there is none."""
        index: int = self.required_index(call)
        return self.kernels[index]

    def index(self, call: tuple[Any, ...], below: float = math.inf) -> int:
        """The place of the chosen kernel among `kernels`, `NONE` where there is none."""
        key = (below, *call)
        index = self._chosen.get(key)
        if index is None:
            verdicts = explain(self.kernels, self.problem(*call), self.name)
            best = verdicts[0] if verdicts else None
            able = best is not None and best.cost is not None and best.cost < below
            index = self._chosen[key] = self.kernels.index(best.kernel) if able and best is not None else NONE
        return index

    def required_index(self, call: tuple[Any, ...]) -> int:
        """The same; raises as `choose` where there is none."""
        index = self.index(call)
        if index == NONE:
            choose(self.registry, self.problem(*call), self.name)
        return index


# torch.compile calls these while tracing and keeps the number; a kernel object could not be kept so. This is all that
# torch.compiler.assume_constant_result does, which would import the compiler, two seconds, into every process.
KernelTable.index._dynamo_marked_constant = True  # type: ignore[attr-defined]  # noqa: SLF001
KernelTable.required_index._dynamo_marked_constant = True  # type: ignore[attr-defined]  # noqa: SLF001
