"""Tensors that hold states: fields of equal rows share one allocation, so clearing or moving a request is one call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from attn_core import Field, Fields, Paged, Slot, Source, StateSpec
from attn_core.errors import InvalidValue
from attn_core.states import dtype_name
from attn_core.stores import ModelSpecs
from torch import Tensor

Key = tuple[str, str, str]
"""Layer, state and field."""

Kind = TypeVar("Kind", bound=StateSpec)


@dataclass(frozen=True, eq=False)
class Bank:
    """Fields of one row shape and element type: `rows[i]` is the memory of the field `keys[i]`."""

    keys: tuple[Key, ...]
    rows: Tensor


def tensor_dtype(name: str) -> torch.dtype:
    """torch's element type of this name."""
    found: torch.dtype = getattr(torch, dtype_name(name))
    return found


def states_of(specs: ModelSpecs, kind: type[Kind]) -> Iterator[tuple[str, str, Kind]]:
    """Layer, state name and spec of every state of one kind; raises `InvalidValue` for a spec of no kind."""
    for layer, states in specs.items():
        for state, spec in states.items():
            if not isinstance(spec, Paged | Slot | Source):
                raise InvalidValue.of(f"{layer}.{state}", type(spec).__name__, "Paged, Slot or Source")
            if isinstance(spec, kind):
                yield layer, state, spec


def banks(
    fields: Mapping[Key, Field], default_dtype: str, allocate: Callable[[int, Field, torch.dtype], Tensor]
) -> list[Bank]:
    """One bank for each kind of row; `allocate(count, field, dtype)` makes zeros [count, ..., *field.shape]."""
    kinds: dict[tuple[tuple[int, ...], str], list[Key]] = {}
    for key, field in fields.items():
        kinds.setdefault((field.shape, dtype_name(field.dtype or default_dtype)), []).append(key)
    return [
        Bank(tuple(keys), allocate(len(keys), fields[keys[0]], tensor_dtype(dtype)))
        for (_, dtype), keys in kinds.items()
    ]


def tensors_of(held: Sequence[Bank]) -> dict[Key, Tensor]:
    """The memory of every field of these banks."""
    return {key: rows for bank in held for key, rows in zip(bank.keys, bank.rows.unbind(0), strict=True)}


def by_state(tensors: Mapping[Key, Tensor]) -> dict[tuple[str, str], dict[str, Tensor]]:
    """The same tensors as (layer, state) -> field -> tensor."""
    found: dict[tuple[str, str], dict[str, Tensor]] = {}
    for (layer, state, field), tensor in tensors.items():
        found.setdefault((layer, state), {})[field] = tensor
    return found


def check_names(where: str, given: Fields, known: Mapping[str, object]) -> None:
    """Refuse rows that are not exactly the fields of the state."""
    if given.keys() != known.keys():
        raise InvalidValue.of(where, sorted(given), f"exactly the fields {sorted(known)}")


def check_shape(where: str, given: Tensor, expected: tuple[int, ...]) -> None:
    """Refuse rows of another shape than the state's."""
    if tuple(given.shape) != expected:
        raise InvalidValue.of(where, tuple(given.shape), f"the shape {expected}")
