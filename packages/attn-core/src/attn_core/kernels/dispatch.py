"""Choosing a kernel for a problem of any operation, explaining the choice, and caching it."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

from attn_core.errors import KernelRefused
from attn_core.kernels.base import Kernel, Problem
from attn_core.kernels.measured import measured_share
from attn_core.plugins.registry import Registry

K = TypeVar("K", bound=Kernel[Any])
Result = TypeVar("Result")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Verdict(Generic[K]):
    """The verdict of one kernel on a problem: its cost, or the reasons why it refuses.

    `cost` is relative to the plain computation's time: measured on this machine's GPU if `measured_on` names it, else
    predicted. `remark` is a note for users if the kernel is chosen.
    """

    kernel: K
    reasons: tuple[str, ...]
    cost: float | None
    measured_on: str | None = None
    remark: str | None = None

    @property
    def accepted(self) -> bool:
        """Whether the kernel accepts the problem."""
        return self.cost is not None


def explain(kernels: Iterable[K], problem: Problem, name: str | None = None) -> list[Verdict[K]]:
    """The verdict of every kernel: those that accept by ascending cost, the chosen one first, then those that refuse.

    A kernel that alters results (`Kernel.alters`) refuses unless `name` is its name.
    """
    verdicts = []
    for kernel in kernels:
        unavailable = kernel.available()
        reasons = [unavailable] if unavailable else kernel.refusals(problem)
        if kernel.alters and kernel.name != name:
            reasons.append(f"only used if selected by name: {kernel.alters}")
        verdicts.append(Verdict(kernel, tuple(reasons), None) if reasons else accepting(kernel, problem))
    return sorted(verdicts, key=lambda verdict: (not verdict.accepted, verdict.cost or 0.0, verdict.kernel.name))


def accepting(kernel: K, problem: Problem) -> Verdict[K]:
    """The verdict of a kernel that accepts; a measured cost takes precedence over a predicted one."""
    relative_time, device = measured_share(problem, kernel.name)
    cost = kernel.cost(problem) if relative_time is None else relative_time
    return Verdict(kernel, (), cost, None if relative_time is None else device, kernel.remark(problem))


def choose(kernels: Registry[K], problem: Problem, name: str | None = None) -> K:
    """The accepting kernel of the lowest cost, or the one called `name`.

    Raises `KernelRefused` where the named kernel, or every kernel, refuses; a named kernel is never replaced silently.
    """
    candidates = [kernels.get(name)] if name else list(kernels)
    verdicts = explain(candidates, problem, name)
    if verdicts and verdicts[0].accepted:
        return verdicts[0].kernel
    refusals = "; ".join(f"{verdict.kernel.name} ({', '.join(verdict.reasons)})" for verdict in verdicts)
    what = f"kernel {name!r} refuses" if name else "no installed kernel accepts"
    raise KernelRefused(f"{what} {problem.operation}: {refusals or 'none is installed'}", kernel=name or "")


_said: set[str] = set()


def say_once(text: str) -> None:
    """Log a warning, only once per process."""
    if text not in _said:
        _said.add(text)
        log.warning("%s", text)


def say_replaced(kernel: str, why: str) -> None:
    """Warn once that this device cannot run a kernel, so that another kernel is used."""
    say_once(f"kernel {kernel} cannot run on this device, the next one is used instead: {why}")


class Replaceable:
    """An operator of compiled graphs that runs one kernel, or the next one on a device that cannot run the first.

    A graph is compiled before its kernels run, so that the operator has to detect this. `kind` in `run` identifies a
    kind of call, the same in the forward and the backward pass: after a first failure, all later calls of the kind use
    the next kernel, because its results lack what the first kernel's backward pass reads.
    """

    def __init__(self, kernel: str, unsupported: Callable[[Exception], str | None]) -> None:
        self.kernel = kernel
        self.unsupported = unsupported
        self._replaced: set[Hashable] = set()

    def run(self, kind: Hashable, compute: Callable[[], Result], replace: Callable[[], Result] | None) -> Result:
        """The result of `compute`, or, if its error means that this device cannot run the kernel, of `replace`.

        The replacement is logged once. Other errors are raised, and all errors if `replace` is None, as for a kernel
        that was selected by name.
        """
        if replace is None:
            return compute()
        if kind not in self._replaced:
            try:
                return compute()
            except Exception as error:
                why = self.unsupported(error)
                if why is None:
                    raise
            self._replaced.add(kind)
            say_replaced(self.kernel, why)
        return replace()

    def forget(self) -> None:
        """Clear the recorded failures, so that the kernel is tried again for calls of every kind."""
        self._replaced.clear()


NONE = -1
"""The index that stands for no kernel."""


class KernelTable(Generic[K]):
    """The kernels of one operation, of which one is chosen once per kind of call.

    `kind` is the kernel class of the operation; `problem` makes the problem of a kind of call from its arguments, which
    must be hashable. `name` selects one kernel; a name of none raises `UnknownName`. A layer keeps a table and queries
    it in every call: the problem is made and the kernels are compared only for the first call of a kind. It may be used
    while torch.compile traces.
    """

    def __init__(
        self,
        registry: Registry[Kernel[Any]],
        kind: Callable[..., K],
        problem: Callable[..., Problem],
        name: str | None = None,
    ) -> None:
        self.registry = registry
        kernel_class: Any = kind  # a class, which may be abstract: type[K] would be refused
        self.kind = kind
        self.problem = problem
        selected = list(registry) if name is None else [registry.get(name)]
        self.name = None if name is None else selected[0].name
        self.kernels: tuple[K, ...] = tuple(kernel for kernel in selected if isinstance(kernel, kernel_class))
        self._chosen: dict[tuple[Any, ...], int] = {}
        self._failed: dict[tuple[Any, ...], set[str]] = {}

    def __reduce__(self) -> Any:
        """Copied and pickled as a new table of the same registry; choices and failures belong to this process."""
        return KernelTable, (self.registry, self.kind, self.problem, self.name)

    def find(self, *call: Any, below: float = math.inf) -> K | None:
        """The accepting kernel of the lowest cost; None where all refuse or cost no less than `below`."""
        index: int = self.index(call, below)
        return None if index == NONE else self.kernels[index]

    def require(self, *call: Any) -> K:
        """The accepting kernel of the lowest cost; raises `KernelRefused` if there is none."""
        index: int = self.required_index(call)
        return self.kernels[index]

    def run(self, call: tuple[Any, ...], compute: Callable[[K], Result]) -> Result:
        """Call `compute` with the kernel of `require`, or with the next one if this device cannot run the kernel.

        The replacement is logged once. A kernel that was selected by name is not replaced: its error is raised. So is
        the error of a kernel that is selected again after it failed, as while torch.compile traces, where the first
        selection is a constant.
        """
        # `require` raises where there is no kernel.
        return cast("Result", self._run_first(lambda: self.require(*call), call, compute))

    def run_below(
        self, call: tuple[Any, ...], compute: Callable[[K], Result], below: float = math.inf
    ) -> Result | None:
        """Like `run`, but with the kernel of `find`; returns None if there is none, or none is left."""
        return self._run_first(lambda: self.find(*call, below=below), call, compute)

    def _run_first(
        self, choose: Callable[[], K | None], call: tuple[Any, ...], compute: Callable[[K], Result]
    ) -> Result | None:
        excluded: K | None = None
        while (kernel := choose()) is not None:
            try:
                return compute(kernel)
            except Exception as error:
                why = self.unsupported(kernel, error)
                if why is None or kernel is excluded:
                    raise
            self.exclude(call, kernel, why)
            excluded = kernel
        return None

    def unsupported(self, kernel: K, error: Exception) -> str | None:
        """Why this device cannot run a kernel, if its error means that; None if the error is to be raised, which
        includes any error of a kernel that was selected by name."""
        return None if self.name else kernel.unsupported(error)

    def exclude(self, call: tuple[Any, ...], kernel: K, why: str) -> None:
        """Do not choose this kernel again for this kind of call; logs once that it is replaced, and `why`."""
        self._failed.setdefault(call, set()).add(kernel.name)
        self._chosen = {key: index for key, index in self._chosen.items() if key[1:] != call}
        say_replaced(kernel.name, why)

    def leave_out(self, name: str) -> None:
        """Remove the kernel of this name from the table, for all kinds of calls."""
        self.kernels = tuple(kernel for kernel in self.kernels if kernel.name != name)
        self._chosen.clear()

    def index(self, call: tuple[Any, ...], below: float = math.inf) -> int:
        """The index of the chosen kernel in `kernels`, or `NONE`."""
        key = (below, *call)
        index = self._chosen.get(key)
        if index is None:
            failed = self._failed.get(call, ())
            candidates = [kernel for kernel in self.kernels if kernel.name not in failed]
            verdicts = explain(candidates, self.problem(*call), self.name)
            best = verdicts[0] if verdicts else None
            acceptable = best is not None and best.cost is not None and best.cost < below
            index = self._chosen[key] = self.kernels.index(best.kernel) if acceptable and best is not None else NONE
        return index

    def required_index(self, call: tuple[Any, ...]) -> int:
        """Like `index`, but raises `KernelRefused` if there is no kernel."""
        index = self.index(call)
        if index == NONE:
            choose(self.registry, self.problem(*call), self.name)
        return index


# torch.compile calls these while tracing and keeps the number as a constant, which it cannot do with a kernel object.
# torch.compiler.assume_constant_result does no more, but would import the compiler, two seconds, in every process.
KernelTable.index._dynamo_marked_constant = True  # type: ignore[attr-defined]  # noqa: SLF001
KernelTable.required_index._dynamo_marked_constant = True  # type: ignore[attr-defined]  # noqa: SLF001
