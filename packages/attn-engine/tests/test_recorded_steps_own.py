"""What a recorded step reads of caches stays in memory when the caches evict it, as long as the step is kept."""

from __future__ import annotations

import functools
import gc
import inspect
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from pretend_cuda import tensors_in, unwrapped
from pretended import gpu
from test_prompt_step_costs import MECHANISMS, engine_of, submit
from test_step_costs import GREEDY, model_of
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["gpu"]

SPECS = {name: options for name, options in MECHANISMS.items() if options.get("positions") != "none"}
"""Those with rotary positions, whose angles are cached."""


class Reads(TorchDispatchMode):
    """The addresses of the memory that operations read."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.addresses |= {address(tensor) for tensor in tensors_in((args, kwargs or {}))}
        return func(*args, **kwargs or {})


def address(tensor: Tensor) -> int:
    return unwrapped(tensor).untyped_storage().data_ptr()


def caches() -> list[Any]:
    """The caches of functions of ours that hold tensors."""
    ours = [module for name, module in sys.modules.items() if name.startswith("attn_")]
    functions = [part for module in ours for part in vars(module).values() if inspect.isfunction(part)]
    cells = [cell.cell_contents for function in functions for cell in function.__closure__ or ()]
    named = [*cells, *(part for module in ours for part in vars(module).values())]
    found = {id(one): one for one in named if type(one) is functools._lru_cache_wrapper}
    return [one for one in found.values() if next(held(one), None) is not None]


def held(value: Any, deep: int = 3) -> Iterator[Tensor]:
    """The tensors that a cache holds."""
    for part in gc.get_referents(value):
        if isinstance(part, Tensor):
            yield part
        elif deep and isinstance(part, tuple | list | dict):
            yield from held(part, deep - 1)
        elif deep and type(part).__name__ == "_lru_list_elem":
            yield from held(part, deep)


def read_and_held(gpu, engine) -> dict[int, StorageWeakRef]:
    """The memory that a step with prompts and one of single tokens read and that only caches hold, by address."""
    gpu.reset()
    submit(engine, "one", 20, GREEDY)
    with Reads() as reads:
        engine.step()
        engine.step()
    addresses = reads.addresses | {pointer for *_, pointers in gpu.grids for pointer in pointers}
    found = [unwrapped(tensor).untyped_storage() for cache in caches() for tensor in held(cache)]
    addresses.discard(0)  # of tensors without elements
    return {one.data_ptr(): StorageWeakRef(one) for one in found if one.data_ptr() in addresses}


@pytest.mark.parametrize("name", [*SPECS, "alibi"])
def test_what_recorded_steps_read_outlives_its_eviction_and_not_the_steps(gpu, name):
    engine = engine_of(model_of(2, name, **MECHANISMS[name]))[0]
    weak = read_and_held(gpu, engine)
    assert weak
    for cache in caches():
        cache.cache_clear()
    gc.collect()
    assert not [one for one in weak.values() if one.expired()]
    del engine
    gc.collect()
    assert all(one.expired() for one in weak.values())
