"""A cache under test and the models it is tried for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from attn_core import CacheFamily, Field, Paged, Slot, Source, installed
from attn_core.errors import UserError
from attn_core.stores import ModelSpecs, StateStore, StoreSize

KEYS = {"key": Field((2, 3)), "value": Field((2, 4))}
SUMS = {"sum": Field((3, 2)), "count": Field((3,), "float64")}

SPECS: Mapping[str, ModelSpecs] = {
    "tokens": {"0": {"kv": Paged(KEYS)}, "1": {"kv": Paged(KEYS)}},
    "window": {"0": {"kv": Paged(KEYS, window=5)}},
    "window1": {"0": {"kv": Paged(KEYS, window=1)}},
    "slots": {"0": {"s": Slot(SUMS)}, "1": {"s": Slot({"h": Field((4,))})}},
    "source": {"0": {"source": Source(KEYS)}},
    "mixed": {
        "0": {"kv": Paged(KEYS), "s": Slot(SUMS)},
        "1": {"kv": Paged({"code": Field((3,), "int64"), "x": Field(())}, window=4), "source": Source(KEYS)},
        "2": {},
    },
    "bottleneck": {"0": {"source": Source(KEYS), "start": Source({"h": Field((4,))}, rows=1), "s": Slot(SUMS)}},
}
"""States of models, each kind alone and all together."""

SIZE = StoreSize(tokens=96, requests=4)


@dataclass(frozen=True, eq=False)
class CacheCase:
    """A cache for one model."""

    family: CacheFamily
    specs: ModelSpecs
    label: str

    def create(self, size: StoreSize = SIZE) -> StateStore:
        """An empty store."""
        return self.family.create(self.specs, size)

    @property
    def paged(self) -> bool:
        """Whether the model remembers rows per token."""
        return any(isinstance(spec, Paged) for states in self.specs.values() for spec in states.values())


@dataclass(frozen=True, eq=False)
class CacheSubject:
    """A cache by name or as an object."""

    given: str | CacheFamily

    @cached_property
    def family(self) -> CacheFamily:
        """The cache itself; raises `UnknownName` where no plugin offers it."""
        return installed().caches.get(self.given) if isinstance(self.given, str) else self.given

    @cached_property
    def cases(self) -> list[CacheCase]:
        """The models whose states the cache takes; it may refuse others with a `UserError`."""
        cases = [CacheCase(self.family, specs, label) for label, specs in SPECS.items()]
        return [case for case in cases if takes(case)]


def takes(case: CacheCase) -> bool:
    """Whether the cache takes the states of this model."""
    try:
        case.create()
    except UserError:
        return False
    return True
