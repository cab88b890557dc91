"""Kernels, the problems they are asked, and the conditions under which they accept.

An operation is a subclass of `Problem`, which says as data what is to be computed, and a subclass of `Kernel`, whose
`run` says by its types what kernels of the operation are given and return. A plugin declares one of its own in the
same way: nothing here or in `dispatch` knows which operations there are.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from attn_core.errors import InvalidValue


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One call of an operation, as data. Subclasses name the operation and add fields, each with a default.

    Every default is the plainest case; a kernel that does not mention a field accepts its default only, so a field that
    is added later is refused until a kernel says otherwise. Fields in `priced` are the exception: they change what a
    call costs, never what it means, so a kernel that does not mention them accepts them all.
    """

    operation: ClassVar[str]
    priced: ClassVar[frozenset[str]] = frozenset()

    dtype: str = "float32"
    device: str = "cpu"

    @classmethod
    def defaults(cls) -> Mapping[str, Any]:
        """The default of each field by name."""
        return _defaults(cls)  # type: ignore[arg-type]  # classes can be hashed

    def measured_as(self) -> dict[str, Any] | None:
        """The fields of the `MeasuredCall` that the problem is one of; None where nothing like it is measured."""
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
        return f"{value!r} is not of {', '.join(map(repr, self.values)) or 'nothing'}"


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
    """One way to compute an operation. `accepts` maps fields of its problems to conditions.

    The kernel class of an operation sets `problem` and adds an abstract method, `run` where there is one way to call
    it. `alters` says how results differ from what is defined by more than the rounding of their type; a kernel that
    says so runs only where it is asked for by name.
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
            other = problem.operation
            if other == self.operation:
                other = f"what more a {type(problem).__name__} says than a {self.problem.__name__}"
            return [f"operation: computes {self.operation}, not {other}"]
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
        """Reasons that no condition on one field can say, each with a field in front."""
        return []

    @abstractmethod
    def cost(self, problem: P) -> float:
        """Predicted time as a share of the plain computation's; the least wins."""

    def remark(self, problem: P) -> str | None:
        """What is worth knowing where this kernel is chosen for the problem; None where nothing is."""
        return None

    def unsupported(self, error: Exception) -> str | None:
        """Why this chip cannot run the kernel, where that is what an error of `run` means; None for other errors."""
        return None
