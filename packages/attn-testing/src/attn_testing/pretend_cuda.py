"""Tensors that say they are on a GPU and are computed on the CPU, so that what a step costs there can be counted.

`torch` without CUDA computes with them as with any others: what a `PretendCuda` sees is the sequence of operations that
a real GPU would get. It counts kernels that would be launched, points at which the host waits for the device, and
copies to it. A copy to the device waits as well, unless it is asked for as `non_blocking` and comes from pinned memory
that was made while counting. Kernels of Triton are counted and not computed; their outputs are zeros.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

DEVICE = torch.device("cuda", 0)
_ALLOCATIONS = {
    "empty",
    "empty_strided",
    "empty_like",
    "new_empty",
    "new_empty_strided",
    "empty_permuted",
    "lift_fresh",
    "detach",
    "alias",
    "_local_scalar_dense",
    "item",
    "is_nonzero",
    "set_",
    "resize_",
    "sym_size",
    "_reshape_alias",
    "_has_compatible_shallow_copy_type",
}
"""Operations that launch no kernel, or are counted apart."""
_COPIES = {"_to_copy", "to", "copy_"}
_WAITING = {
    "_local_scalar_dense",
    "item",
    "is_nonzero",
    "nonzero",
    "masked_select",
    "unique_dim",
    "_unique2",
    "bincount",
    "unique_consecutive",
    "equal",
}
"""Operations whose result has a size that only the device knows, or is a number for the host."""
_INDEXED = {"index", "index_put", "index_put_", "_index_put_impl_"}
"""Operations that bring indices to the device, where these are on the host."""


class PretendCudaTensor(torch.Tensor):
    """A tensor that says its device is `cuda:0`, whose numbers are those of `inner`, a tensor on the CPU.

    To torch itself it is one on the CPU: torch without CUDA has nothing that could guard another device.
    """

    inner: Any

    @staticmethod
    def __new__(cls, inner: Tensor) -> PretendCudaTensor:
        """A tensor of the shape, strides and type of `inner`."""
        made: PretendCudaTensor = torch.Tensor._make_wrapper_subclass(  # noqa: SLF001
            cls, inner.shape, strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype
        )
        made.inner = inner
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The pretended GPU."""
        return DEVICE

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        """True."""
        return True

    def data_ptr(self) -> int:
        """The address of the numbers."""
        return int(self.inner.data_ptr())

    def cpu(self, *_: Any, **__: Any) -> Tensor:
        """The numbers, once the device is done."""
        _note("cpu")
        numbers: Tensor = self.inner.clone()
        return numbers

    def tolist(self) -> Any:
        """The numbers, once the device is done."""
        _note("tolist")
        return self.inner.tolist()

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        """As `Tensor.to`; to the CPU, the numbers once the device is done."""
        target = kwargs.get("device", args[0] if args else None)
        if isinstance(target, str | torch.device):
            if torch.device(target).type == "cpu":
                return self.cpu().to(*args, **kwargs)
            args = args[1:] if "device" not in kwargs else args
            kwargs.pop("device", None)
            return super().to(*args, **kwargs) if args or kwargs.keys() - {"non_blocking"} else self
        return super().to(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Compute outside of a `PretendCuda`: nothing is counted."""
        return computed(func, args, kwargs or {})


_COUNTING: list[PretendCuda] = []


def _note(name: str) -> None:
    for counter in _COUNTING:
        counter.syncs[name] += 1


def unwrapped(value: Any) -> Any:
    """The tensor on the CPU, or anything else as it is."""
    return value.inner if isinstance(value, PretendCudaTensor) else value


def computed(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The result of an operation, on the pretended GPU if its arguments are there or it is asked for there."""
    flat = list(tensors_in((args, kwargs)))
    there = any(isinstance(tensor, PretendCudaTensor) for tensor in flat)
    asked = kwargs.get("device")
    name = func.overloadpacket.__name__
    if asked is not None:
        there = torch.device(asked).type == "cuda" or (there and name.startswith("new_"))
        kwargs = {**kwargs, "device": torch.device("cpu")}
    if kwargs.get("pin_memory"):
        kwargs = {**kwargs, "pin_memory": False}
    result = func(*tree_map(unwrapped, args), **tree_map(unwrapped, kwargs))
    if name in {"empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided"}:
        result.zero_()
    if name == "to" and result is unwrapped(args[0]) and isinstance(args[0], PretendCudaTensor) == there:
        return args[0]
    if func._schema.is_mutable and flat and name.endswith("_"):  # noqa: SLF001
        return args[0]
    if there:
        # A view made in inference mode of a tensor that was not is none of an inference tensor.
        kept = bool(flat) and not flat[0].is_inference() and func.is_view
        with torch.inference_mode(mode=False) if kept else nullcontext():
            return tree_map(lambda value: PretendCudaTensor(value) if isinstance(value, Tensor) else value, result)
    return result


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors of nested arguments."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from tensors_in(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from tensors_in(part)


class PretendCuda(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts, while it is entered, what a GPU would be asked: `syncs`, `copies` to it, and `launches` by name."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.launches: Counter[str] = Counter()
        self.programs: Counter[str] = Counter()
        """Launches of Triton programs, by name."""
        self.grids: list[tuple[str, int, tuple[int, ...]]] = []
        """Triton programs in order: name, grid, and the addresses of the tensors they were given."""
        self.syncs: Counter[str] = Counter()
        self.copies = 0
        self._pinned: dict[int, torch.UntypedStorage] = {}
        """Pinned memory of the host, by address; kept, so that no other gets its address."""

    def reset(self) -> None:
        """Count from nothing again."""
        self.launches.clear()
        self.programs.clear()
        self.syncs.clear()
        self.grids.clear()
        self.copies = 0

    @property
    def total(self) -> int:
        """Kernels launched, Triton's included."""
        return self.launches.total() + self.programs.total()

    def __enter__(self) -> PretendCuda:
        self._lifted = torch._C._only_lift_cpu_tensors()  # noqa: SLF001
        torch._C._set_only_lift_cpu_tensors(True)  # noqa: FBT003, SLF001
        self._starts, self._makes = torch.cuda._lazy_init, torch.tensor  # noqa: SLF001
        torch.cuda._lazy_init = lambda: None  # noqa: SLF001
        torch.tensor = _moved(self._makes)
        super().__enter__()  # type: ignore[no-untyped-call]
        _COUNTING.append(self)
        return self

    def __exit__(self, *exception: object) -> None:
        torch._C._set_only_lift_cpu_tensors(self._lifted)  # noqa: SLF001
        torch.cuda._lazy_init, torch.tensor = self._starts, self._makes  # noqa: SLF001
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        _COUNTING.remove(self)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count an operation and compute it."""
        kwargs = kwargs or {}
        before = any(isinstance(tensor, PretendCudaTensor) for tensor in tensors_in((args, kwargs)))
        result = computed(func, args, kwargs)
        if kwargs.get("pin_memory"):
            self._pinned[result.untyped_storage().data_ptr()] = result.untyped_storage()
        if before or any(isinstance(tensor, PretendCudaTensor) for tensor in tensors_in(result)):
            self._count(func, args, kwargs, result)
        return result

    def launched(self, name: str, grid: int, pointers: tuple[int, ...]) -> None:
        """Count a Triton program."""
        self.programs[name] += 1
        self.grids.append((name, grid, pointers))

    def _count(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        name, after = func.overloadpacket.__name__, any(isinstance(t, PretendCudaTensor) for t in tensors_in(result))
        if name in _WAITING or self._selects_by_mask(name, args):
            self.syncs[name] += 1
        for index in args[1] if name in _INDEXED else ():
            if index is not None and not isinstance(index, PretendCudaTensor):
                self._brought(index, non_blocking=False)
        if name in _COPIES:
            self._count_copy(func, args, kwargs, result, after=after)
        elif name not in _ALLOCATIONS and not func.is_view:
            self.launches[name] += 1

    def _count_copy(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any, *, after: bool) -> None:
        name = func.overloadpacket.__name__
        source = args[1] if name == "copy_" else args[0]
        if isinstance(source, PretendCudaTensor):
            if not after:
                self.syncs[name] += 1
            elif name == "copy_" or result is not source:
                self.launches[name] += 1
        elif name == "copy_" and not source.dim():
            self.launches["fill_"] += 1  # x[i] = 1: torch makes the number on the device
        else:
            self._brought(source, non_blocking=_argument(func, "non_blocking", args, kwargs))

    def _brought(self, source: Tensor, *, non_blocking: bool) -> None:
        """Count a copy of a tensor of the host to the device."""
        self.copies += 1
        if not non_blocking:
            self.syncs["blocking copy to the device"] += 1
        elif source.untyped_storage().data_ptr() not in self._pinned:
            self.syncs["copy of memory that is not pinned"] += 1

    @staticmethod
    def _selects_by_mask(name: str, args: Any) -> bool:
        return name in _INDEXED and any(index is not None and index.dtype == torch.bool for index in args[1])


def _argument(func: Any, wanted: str, args: Any, kwargs: dict[str, Any]) -> bool:
    """An argument of an operation that is False where it is not given."""
    names = [argument.name for argument in func._schema.arguments]  # noqa: SLF001
    return bool(kwargs.get(wanted, dict(zip(names, args, strict=False)).get(wanted, False)))


def to_pretended(model: torch.nn.Module) -> None:
    """Put the weights of a model on the pretended GPU; it can be run then, in inference mode, but not trained."""
    for module in model.modules():
        for name, weight in list(module._parameters.items()):  # noqa: SLF001
            if weight is not None:
                there = PretendCudaTensor(weight.detach())
                module._parameters[name] = torch.nn.Parameter(there, requires_grad=False)  # noqa: SLF001
        for name, buffer in list(module._buffers.items()):  # noqa: SLF001
            if buffer is not None:
                module._buffers[name] = PretendCudaTensor(buffer)  # noqa: SLF001


def _moved(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`torch.tensor` that makes what is asked for on a GPU on the CPU, and copies it: torch without CUDA cannot."""

    def tensor(data: Any, *, device: Any = None, **options: Any) -> Tensor:
        made = make(data, **options)
        return made if device is None else made.to(device)

    return tensor
