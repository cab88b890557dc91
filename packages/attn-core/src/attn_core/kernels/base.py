"""The base classes of kernels and problems, and the conditions under which a kernel accepts a problem.

An operation consists of a subclass of `Problem`, which describes a computation as data, and a subclass of `Kernel`,
whose `run` defines the inputs and outputs of the operation's kernels. A plugin can define an operation in the same way:
nothing here or in `dispatch` depends on which operations exist.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from attn_core.errors import InvalidValue

INVARIANT: ContextVar[bool] = ContextVar("batch_invariant", default=False)
"""Set while everything that is computed must be batch-invariant."""

TRAINED_IN: ContextVar[str | None] = ContextVar("trained_in", default=None)
"""The element type in which products are multiplied in a training step on a CPU, whose gradients are not differentiated
again; None elsewhere."""


def batch_invariant() -> bool:
    """Whether results must be batch-invariant now, see `Problem`: a layer with several forms then computes the one form
    whose results are the same for whole sequences and in steps."""
    return INVARIANT.get()


def needs_operations(mode: object) -> bool:
    """Whether this dispatch mode of PyTorch, or None, needs PyTorch's own operations, as FLOP counters do.

    A mode with an attribute `sees_kernels` that is true does not: it watches which memory is allocated, by kernels too.
    """
    return mode is not None and not getattr(mode, "sees_kernels", False)


# torch.compile cannot trace a context variable; the modes that set it are not compiled.
batch_invariant._dynamo_marked_constant = True  # type: ignore[attr-defined]  # noqa: SLF001


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One kind of call of an operation, as data. Subclasses name the operation and add fields, each with a default.

    Every default is the simplest case. A kernel whose `accepts` lacks a field only accepts its default, so that a field
    that is added later is refused until a kernel declares support. Fields in `priced` are the exception: they affect
    the cost of a call, not its result, so that a kernel whose `accepts` lacks them accepts all their values.

    With `batch_invariant`, the result of a token must be the same, bit for bit, whatever is computed beside it: other
    sequences, padding, and how many tokens of its own sequence a call has.
    """

    operation: ClassVar[str]
    priced: ClassVar[frozenset[str]] = frozenset()

    dtype: str = "float32"
    device: str = "cpu"
    batch_invariant: bool = False

    @classmethod
    def defaults(cls) -> Mapping[str, Any]:
        """The default of each field by name."""
        return _defaults(cls)  # type: ignore[arg-type]  # classes can be hashed

    def measured_as(self) -> dict[str, Any] | None:
        """The fields of the `MeasuredCall` of this problem; None for problems that are never measured."""
        return None


@cache
def _defaults(kind: type[Problem]) -> Mapping[str, Any]:
    return MappingProxyType({field.name: field.default for field in dataclasses.fields(kind)})


class Condition(Protocol):
    """What a kernel requires of one field of a problem."""

    def refuses(self, value: Any) -> str | None:
        """Why the value is refused, or None if it is accepted."""
        ...


@dataclass(frozen=True)
class OneOf:
    """One of these values; for a tuple, every entry must be one of them."""

    values: tuple[Any, ...]

    def __init__(self, *values: Any) -> None:
        object.__setattr__(self, "values", values)

    def refuses(self, value: Any) -> str | None:
        entries = value if isinstance(value, tuple) else (value,)
        if all(entry in self.values for entry in entries):
            return None
        if not self.values:
            return f"{value!r} is not supported"
        if len(self.values) == 1 and not isinstance(value, tuple):
            return f"must be {self.values[0]!r}, not {value!r}"
        return f"{value!r} is not one of {', '.join(map(repr, self.values))}"


@dataclass(frozen=True)
class AtMost:
    """A number up to `limit`."""

    limit: int

    def refuses(self, value: Any) -> str | None:
        return None if value <= self.limit else f"{value} is more than {self.limit}"


@dataclass(frozen=True)
class AtLeast:
    """A number from `limit` on."""

    limit: int

    def refuses(self, value: Any) -> str | None:
        return None if value >= self.limit else f"{value} is less than {self.limit}"


@dataclass(frozen=True)
class MultipleOf:
    """A multiple of `base`."""

    base: int

    def refuses(self, value: Any) -> str | None:
        return f"{value} is not a multiple of {self.base}" if value % self.base else None


@dataclass(frozen=True)
class Anything:
    """Any value."""

    def refuses(self, value: Any) -> str | None:
        return None


P = TypeVar("P", bound=Problem)


class Kernel(ABC, Generic[P]):
    """An implementation of an operation. `accepts` maps fields of its problems to conditions.

    The base class of an operation's kernels sets `problem` and adds an abstract method, usually `run`. `alters`
    describes how results differ from the operation's definition by more than rounding; a kernel that sets it only runs
    where it is selected by name.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    problem: ClassVar[type[Problem]]
    accepts: ClassVar[Mapping[str, Condition]]
    alters: ClassVar[str | None] = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        accepts = getattr(cls, "accepts", None)
        if accepts is not None:
            known = cls.problem.defaults()
            unknown = set(accepts) - known.keys()
            if unknown:
                raise InvalidValue.of(f"{cls.__qualname__}.accepts", sorted(unknown), ", ".join(known))

    @property
    def operation(self) -> str:
        """The name of the operation."""
        return self.problem.operation

    def available(self) -> str | None:
        """Why the kernel cannot run on this machine at all, or None if it can."""
        return None

    def refusals(self, problem: P) -> list[str]:
        """Every reason why this problem is not accepted; empty if it is."""
        if type(problem) is not self.problem:
            if problem.operation == self.operation:
                own, given = self.problem.__name__, type(problem).__name__
                return [f"operation: accepts a {own}, not a {given}, which may have more fields"]
            return [f"operation: computes {self.operation}, not {problem.operation}"]
        reasons = []
        for field, default in problem.defaults().items():
            condition = self.accepts.get(field)
            if condition is None:
                if field in problem.priced:
                    continue
                condition = OneOf(*default if isinstance(default, tuple) else (default,))
            why = condition.refuses(getattr(problem, field))
            if why:
                reasons.append(f"{field}: {why}")
        return reasons + self.further_refusals(problem)

    def further_refusals(self, problem: P) -> list[str]:
        """Further reasons, which no condition on a single field can express, each starting with a field's name."""
        return []

    @abstractmethod
    def cost(self, problem: P) -> float:
        """The predicted time relative to the plain computation's; the kernel of the lowest cost is chosen."""

    def remark(self, problem: P) -> str | None:
        """A note for users if this kernel is chosen for the problem; None for no note."""
        return None

    def unsupported(self, error: Exception) -> str | None:
        """Why this device cannot run the kernel, if an `error` of `run` means that; None for other errors."""
        return None
