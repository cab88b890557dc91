"""Choosing a kernel for a problem, and explaining the choice."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from attn_core.errors import KernelRefused
from attn_core.kernels.base import Kernel, Problem
from attn_core.plugins.registry import Registry


@dataclass(frozen=True)
class Verdict:
    """What one kernel says of a problem: its predicted cost, or why it refused."""

    kernel: Kernel
    reasons: tuple[str, ...]
    cost: float | None

    @property
    def accepted(self) -> bool:
        """Whether the kernel would run."""
        return self.cost is not None


def explain(kernels: Iterable[Kernel], problem: Problem, name: str | None = None) -> list[Verdict]:
    """The verdict of every kernel, the chosen one first, then by cost, then who refused.

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


def choose(kernels: Registry[Kernel], problem: Problem, name: str | None = None) -> Kernel:
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
