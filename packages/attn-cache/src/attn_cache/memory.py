"""Allocation of state tensors. Fields with equal row shape and dtype share one tensor, so that clearing or copying the
state of a request is one call for all of them."""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from attn_core import Field, Fields, Paged, Slot, Source, StateSpec
from attn_core.errors import InvalidValue
from attn_core.states import dtype_name
from attn_core.stores import ModelSpecs
from torch import Tensor

FieldKey = tuple[str, str, str]
"""Names of layer, state and field."""

StateKey = tuple[str, str]
"""Names of layer and state."""

LAZY_BYTES = 1 << 20
"""Tensors smaller than this are allocated with `torch.zeros`."""

Kind = TypeVar("Kind", bound=StateSpec)


@dataclass(frozen=True, eq=False)
class FieldStack:
    """Fields of one row shape and dtype: `rows` is [fields, ...], and `rows[i]` is the memory of field `keys[i]`."""

    keys: tuple[FieldKey, ...]
    rows: Tensor


def tensor_dtype(name: str) -> torch.dtype:
    """The `torch.dtype` of a dtype name such as "float32"."""
    found: torch.dtype = getattr(torch, dtype_name(name))
    return found


def states_of(specs: ModelSpecs, kind: type[Kind]) -> Iterator[tuple[str, str, Kind]]:
    """Layer name, state name and spec of every state of one kind.

    Raises `InvalidValue` for a spec that is neither `Paged` nor `Slot` nor `Source`.
    """
    for layer, states in specs.items():
        for state, spec in states.items():
            if not isinstance(spec, Paged | Slot | Source):
                raise InvalidValue.of(f"{layer}.{state}", type(spec).__name__, "Paged, Slot or Source")
            if isinstance(spec, kind):
                yield layer, state, spec


def allocate_stacks(
    fields: Mapping[FieldKey, Field], default_dtype: str, allocate: Callable[[int, Field, torch.dtype], Tensor]
) -> list[FieldStack]:
    """One stack per (row shape, dtype); `allocate(count, field, dtype)` returns zeros [count, ..., *field.shape]."""
    kinds: dict[tuple[tuple[int, ...], str], list[FieldKey]] = {}
    for key, field in fields.items():
        kinds.setdefault((field.shape, dtype_name(field.dtype or default_dtype)), []).append(key)
    return [
        FieldStack(tuple(keys), allocate(len(keys), fields[keys[0]], tensor_dtype(dtype)))
        for (_, dtype), keys in kinds.items()
    ]


def field_tensors(stacks: Sequence[FieldStack]) -> dict[FieldKey, Tensor]:
    """The memory of each field: views into the stacks."""
    return {key: rows for stack in stacks for key, rows in zip(stack.keys, stack.rows.unbind(0), strict=True)}


def by_state(tensors: Mapping[FieldKey, Tensor]) -> dict[StateKey, dict[str, Tensor]]:
    """The same tensors as (layer, state) -> field -> tensor."""
    found: dict[StateKey, dict[str, Tensor]] = {}
    for (layer, state, field), tensor in tensors.items():
        found.setdefault((layer, state), {})[field] = tensor
    return found


def check_names(where: str, given: Fields, known: Mapping[str, object]) -> None:
    """Raise `InvalidValue` unless exactly the fields of the state are given."""
    if given.keys() != known.keys():
        raise InvalidValue.of(where, sorted(given), f"exactly the fields {sorted(known)}")


def check_shape(where: str, given: Tensor, expected: tuple[int, ...]) -> None:
    """Raise `InvalidValue` for a tensor of another shape than the state's."""
    if tuple(given.shape) != expected:
        raise InvalidValue.of(where, tuple(given.shape), f"the shape {expected}")


def lazy_zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros of this shape; on a CPU physical memory is committed only when it is first touched.

    `torch.zeros` on a CPU writes every page at once, so memory reserved for the longest sequences would be committed
    whether it is used or not. Anonymous `mmap` memory is zero without being written.
    """
    size = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or size < LAZY_BYTES or not hasattr(mmap, "MAP_ANONYMOUS"):
        return torch.zeros(*shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype).view(*shape)
