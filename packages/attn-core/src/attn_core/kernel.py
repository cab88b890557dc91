"""A kernel: name, what it accepts, what it costs, how it runs."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from attn_core.dropout import Dropout
from attn_core.errors import InvalidValue
from attn_core.packed import Packed
from attn_core.problem import PRICED, Problem

if TYPE_CHECKING:
    from torch import Tensor

    from attn_core.spec import AttentionSpec


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


@dataclass(frozen=True, kw_only=True, eq=False)
class Operands:
    """The tensors of one `attend` call.

    `query` [batch, query, heads, key_size]; `key` [batch, key, key_value_heads, key_size]; `value`
    [batch, key, key_value_heads, value_size]. `query_positions` and `key_positions` [batch or 1, length], int64,
    absolute, are None where positions are plainly aligned to the end of the keys. Queries are consecutive, each one
    position behind the last, wherever the first stands; keys whose positions are given may stand anywhere. `keep`
    [batch, key], bool, is None where every key is real. `parameters` are the score's weights by name; see
    `Score.weights`. `fields` [batch, key, ...] are what an `InnerAttention` remembers besides keys and values. `packed`
    says which texts lie end to end in every row; None where a row is one text. `dropout` says which weights become
    zero; None where all stay.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    query_positions: Tensor | None = None
    key_positions: Tensor | None = None
    keep: Tensor | None = None
    parameters: Mapping[str, Tensor] = dataclasses.field(default_factory=dict)
    fields: Mapping[str, Tensor] = dataclasses.field(default_factory=dict)
    packed: Packed | None = None
    dropout: Dropout | None = None


class Kernel(ABC):
    """One way to compute an operation. `accepts` maps fields of `Problem` to conditions.

    `alters` says how results differ from what is defined by more than the rounding of their type; a kernel that says so
    runs only where it is asked for by name.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    operation: ClassVar[str] = "attend"
    accepts: ClassVar[Mapping[str, Condition]]
    alters: ClassVar[str | None] = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        unknown = set(getattr(cls, "accepts", ())) - DEFAULTS.keys()
        if unknown:
            raise InvalidValue.of(f"{cls.__qualname__}.accepts", sorted(unknown), ", ".join(DEFAULTS))

    def available(self) -> str | None:
        """Why the kernel cannot run on this machine at all, or None if it can."""
        return None

    def refusals(self, problem: Problem) -> list[str]:
        """Every reason why this problem is not accepted; empty if it is."""
        if problem.operation != self.operation:
            return [f"operation: computes {self.operation}, not {problem.operation}"]
        reasons = []
        for field, default in DEFAULTS.items():
            value = getattr(problem, field)
            plainest = Anything() if field in PRICED else OneOf(*default if isinstance(default, tuple) else (default,))
            condition = self.accepts.get(field) or plainest
            why = condition.refuses(value)
            if why:
                reasons.append(f"{field}: {why}")
        return reasons

    @abstractmethod
    def cost(self, problem: Problem) -> float:
        """Predicted time as a share of the plain computation's; the least wins."""

    @abstractmethod
    def run(self, spec: AttentionSpec, operands: Operands) -> Tensor:
        """The output [batch, query, heads, value_size]."""


DEFAULTS = {field.name: field.default for field in dataclasses.fields(Problem) if field.name != "operation"}
