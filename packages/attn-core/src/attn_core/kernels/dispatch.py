"""Choosing a kernel for a problem of any operation, explaining the choice, and caching it."""

from __future__ import annotations

import dataclasses
import logging
import math
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, NoReturn, TypeVar

from attn_core.errors import KernelRefused
from attn_core.kernels.base import Kernel, OneOf, Problem, batch_invariant
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
    verdicts = explain([kernels.get(name)] if name else list(kernels), problem, name)
    if verdicts and verdicts[0].accepted:
        return verdicts[0].kernel
    raise refusal(verdicts, problem, name)


def refusal(verdicts: Iterable[Verdict[K]], problem: Problem, name: str | None) -> KernelRefused:
    """The error for a problem that the kernel called `name`, or every kernel, refuses."""
    reasons = "; ".join(f"{verdict.kernel.name} ({', '.join(verdict.reasons)})" for verdict in verdicts)
    what = f"kernel {name!r} refuses" if name else "no installed kernel accepts"
    return KernelRefused(f"{what} {problem.operation}: {reasons or 'none is installed'}", kernel=name or "")


_said: set[str] = set()


def say_once(text: str) -> None:
    """Log a warning, only once per process."""
    if text not in _said:
        _said.add(text)
        log.warning("%s", text)


NONE = -1
"""The index that stands for no kernel."""


class Operation(Generic[K]):
    """The kernels of one operation, of which one is chosen once per kind of call and kept.

    `kernel_class` is the class of the operation's kernels. A kind of call is given by keywords, hashable fields from
    which `describe` makes the problem, by default `kernel_class.problem`; a `dtype` may be one of the tensor library.
    `name` selects one kernel; a name of none raises `UnknownName`. A layer keeps an operation and queries it in every
    call: the problem is made and the kernels are compared only for the first call of a kind.

    It may be used while torch.compile traces. A graph is compiled before its kernels run: so that a kernel which this
    device cannot run is found when it is chosen, `trial` then runs it on a small call of the given fields.
    """

    def __init__(
        self,
        registry: Registry[Kernel[Any]],
        kernel_class: Callable[..., K],
        describe: Callable[..., Problem] | None = None,
        name: str | None = None,
        trial: Callable[..., None] | None = None,
    ) -> None:
        self.registry = registry
        kind: Any = kernel_class  # a class, which may be abstract: type[K] would be refused
        self.kernel_class = kernel_class
        self.describe: Callable[..., Problem] = describe or kind.problem
        self.trial = trial
        selected = list(registry) if name is None else [registry.get(name)]
        self.name = None if name is None else selected[0].name
        self.kernels: tuple[K, ...] = tuple(kernel for kernel in selected if isinstance(kernel, kind))
        self._chosen: dict[tuple[Any, ...], int] = {}
        self._failed: dict[tuple[Any, ...], set[str]] = {}
        self._devices: dict[tuple[str, bool], bool] = {}

    def __reduce__(self) -> Any:
        """Copied and pickled as a new operation of the same registry; choices and failures belong to this process."""
        return Operation, (self.registry, self.kernel_class, self.describe, self.name, self.trial)

    @property
    def able(self) -> bool:
        """Whether any kernel can run on this machine."""
        return any(kernel.available() is None for kernel in self.kernels)

    def on(self, device: str, *, training: bool = False) -> bool:
        """Whether any kernel accepts calls on devices of this type, and in `training`, if its problem says so: quicker
        than `find` where none does."""
        key = device, training
        if key not in self._devices:
            usual = {"device": (device, OneOf(Problem.device)), "training": (training, OneOf(False))}  # noqa: FBT003
            self._devices[key] = any(
                all(kernel.accepts.get(name, own).refuses(value) is None for name, (value, own) in usual.items())
                for kernel in self.kernels
            )
        return self._devices[key]

    def problem(self, **call: Any) -> Problem:
        """The problem of a kind of call."""
        if "dtype" in call:
            call["dtype"] = str(call["dtype"]).removeprefix("torch.")
        return dataclasses.replace(self.describe(**call), batch_invariant=batch_invariant())

    def find(self, below: float = math.inf, **call: Any) -> K | None:
        """The accepting kernel of the lowest cost; None where all refuse or cost no less than `below`."""
        index: int = self.index(below, call)
        return None if index == NONE else self.kernels[index]

    def require(self, **call: Any) -> K:
        """The accepting kernel of the lowest cost; raises `KernelRefused` if there is none."""
        index: int = self.index(math.inf, call)
        if index == NONE:
            self.refuse(**call)
        return self.kernels[index]

    def run(self, compute: Callable[[K], Result], below: float = math.inf, **call: Any) -> Result | None:
        """Call `compute` with the kernel of `find`; None if there is none.

        If this device cannot run the kernel, the next one is used, which is logged once. A kernel that was selected by
        name is not replaced: its error is raised. So is the error of a kernel that is selected again after it failed,
        as while torch.compile traces, where the first selection is a constant.
        """
        failed: K | None = None
        while (index := self.index(below, call)) != NONE:
            kernel = self.kernels[index]
            try:
                return compute(kernel)
            except Exception as error:
                why = None if self.name else kernel.unsupported(error)
                if why is None or kernel is failed:
                    raise
            self.exclude(kernel, why, call)
            failed = kernel
        return None

    def exclude(self, kernel: K, why: str, call: Mapping[str, Any]) -> None:
        """Do not choose this kernel again for this kind of call; logs once that it is replaced, and `why`."""
        kind = (*call, *call.values())
        self._failed.setdefault(kind, set()).add(kernel.name)
        self._chosen = {key: index for key, index in self._chosen.items() if key[3:] != kind}
        say_once(f"kernel {kernel.name} cannot run on this device, the next one is used instead: {why}")

    def index(self, below: float, call: Mapping[str, Any]) -> int:
        """The index of the chosen kernel in `kernels`, or `NONE`."""
        compiling = self.trial is not None and sys.modules["torch"].compiler.is_compiling()
        key = (below, compiling, batch_invariant(), *call, *call.values())
        while (index := self._chosen.get(key)) is None:
            best = next(iter(self.verdicts(**call)), None)
            acceptable = best is not None and best.cost is not None and best.cost < below
            self._chosen[key] = self.kernels.index(best.kernel) if acceptable and best is not None else NONE
            why = self.failure(best.kernel, **call) if compiling and acceptable and best is not None else None
            if why is not None and best is not None:
                self.exclude(best.kernel, why, call)
        return index

    def failure(self, kernel: K, **call: Any) -> str | None:
        """Why this device cannot run a kernel, by a trial; None if it can, and for errors with another meaning, which
        are left to the call itself."""
        if self.trial is None or self.name or type(kernel).unsupported is Kernel.unsupported:
            return None
        try:
            self.trial(kernel, **call)
        except Exception as error:  # noqa: BLE001 -- a kernel may raise anything
            return kernel.unsupported(error)
        return None

    def verdicts(self, **call: Any) -> list[Verdict[K]]:
        """The verdict, as from `explain`, of every kernel that has not failed to run calls of this kind."""
        failed = self._failed.get((*call, *call.values()), ())
        return explain(
            [kernel for kernel in self.kernels if kernel.name not in failed], self.problem(**call), self.name
        )

    def refuse(self, **call: Any) -> NoReturn:
        """Raise `KernelRefused` for a kind of call, with the reasons of every kernel."""
        raise refusal(self.verdicts(**call), self.problem(**call), self.name)


# torch.compile calls these while tracing and keeps the number as a constant, which it cannot do with a kernel object.
# torch.compiler.assume_constant_result does no more, but would import the compiler, two seconds, in every process.
Operation.index._dynamo_marked_constant = True  # type: ignore[attr-defined]  # noqa: SLF001
Operation.refuse._dynamo_marked_constant = True  # type: ignore[attr-defined]  # noqa: SLF001
