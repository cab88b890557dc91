"""Kernels, the problems they are asked, and the conditions under which they accept."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from attn_core.errors import InvalidValue

if TYPE_CHECKING:
    pass


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One operation to compute. Every default is the plainest case; a kernel that does not mention a field
    accepts its default only, so what is added here later is refused until a kernel says otherwise.

    `queries`, `keys`, `density` and `reach` are the exception: they change what a call costs, never what it means, so a
    kernel that does not mention them accepts them all. `density` is the share of all pairs that is left to a kernel
    which skips, for every `TILE` neighbouring queries, the keys that none of them may see. `reach` is the number of
    neighbouring positions that hold all that a query can see. Unknown, they are 0, 0, 1 and 0.

    `has_positions` says that positions are given, `kv_unordered` that those of the keys are: they may stand in any
    order.

    `varlen` says that rows hold several texts, see `Varlen`; whoever finds no kernel for that computes text by text.
    `dropout` says that weights are dropped at random, see `Dropout`.

    Of `attend_paged`, see `paged_problem`, `rows` says how a cache keeps the rows that are met. Of `chosen`, see
    `selected_blocks_problem`, sizes say what there is to know. Of `recurrence`, see `recurrence_problem`, `decay` says
    what fades, `delta_rule` that keys write by the delta rule. Of operations on rows, see `row_problem`, `width` is the
    number of elements, `form` which of its forms.
    """

    operation: str = "attend"
    score: str = "scaled_dot"
    modifiers: tuple[str, ...] = ()
    mask: str = "full"
    distribution: str = "softmax"
    key_size: int = 0
    value_size: int = 0
    query_heads: int = 1
    key_value_heads: int = 1
    irregular_groups: bool = False
    head_masks: bool = False
    length_bound: bool = False
    padded: bool = False
    has_positions: bool = False
    kv_unordered: bool = False
    varlen: bool = False
    dropout: bool = False
    weights: bool = False
    gradients: bool = False
    dtype: str = "float32"
    device: str = "cpu"
    rows: str = "plain"
    decay: str = "none"
    delta_rule: bool = False
    width: int = 0
    form: str = "plain"
    queries: int = 0
    keys: int = 0
    density: float = 1.0
    reach: int = 0


PRICED = frozenset({"queries", "keys", "density", "reach"})
"""Fields that only inform prices."""


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
    def run(self, spec: Any, operands: Any) -> Any:
        """The output [batch, query, heads, value_size]."""


DEFAULTS = {field.name: field.default for field in dataclasses.fields(Problem) if field.name != "operation"}
