"""Tensors that claim to be on a GPU but are computed on the CPU, to count what a step would cost on a GPU.

torch without CUDA computes with them as with any others, so `PretendCuda` observes the sequence of operations that a
real GPU would execute. It counts kernel launches, points at which the host waits for the device, and copies to the
device. A copy to the device also counts as a wait unless it is `non_blocking` and comes from pinned memory that was
allocated while counting; `LawBroken` is raised if the host writes to that memory before it has waited for the copy.
Triton kernels are counted but not executed; their outputs are zeros.
"""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from importlib.util import find_spec
from typing import Any
from unittest.mock import patch

import torch
from attn_core.kernels import devices
from attn_core.kernels.measured import table_here
from attn_core.plugins.catalog import installed_operation
from attn_testing.law import require
from torch import Tensor
from torch.utils import _foreach_utils
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

H200 = devices.Gpu("NVIDIA H200", (9, 0))
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
    "_unsafe_view",
    "_has_compatible_shallow_copy_type",
}
"""Operations that launch no kernel, or are counted separately."""
_ON_CPU = (
    torch._C.DispatchKey.CPU,
    torch._C.DispatchKey.CompositeImplicitAutograd,
    torch._C.DispatchKey.CompositeExplicitAutograd,
    torch._C.DispatchKey.CompositeExplicitAutogradNonFunctional,
)
"""The dispatch keys of kernels that can run on a CPU."""
_INDEXED = {"index", "index_put", "index_put_", "_index_put_impl_"}
"""Operations that copy indices to the device if these are on the host."""
_TAKES_INDICES = {"copy_"} | _INDEXED
"""Operations that accept CPU tensors together with GPU tensors on a real GPU."""
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
"""Operations that make the host wait: their result has a data-dependent size, or is a number on the host."""


class PretendCudaTensor(torch.Tensor):
    """A tensor whose `device` is `cuda:0` and whose values are those of `inner`, a tensor on the CPU.

    For torch itself it is a CPU tensor, as torch without CUDA has no device guard for CUDA.
    """

    inner: Any

    @staticmethod
    def __new__(cls, inner: Tensor) -> PretendCudaTensor:
        """Create a tensor with the shape, strides and dtype of `inner`."""
        made: PretendCudaTensor = torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype
        )
        made.inner = inner
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The device of the pretended GPU."""
        return DEVICE

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        """Always True."""
        return True

    def data_ptr(self) -> int:
        """The address of the first element of `inner`."""
        return int(self.inner.data_ptr())

    def cpu(self, *_: Any, **__: Any) -> Tensor:
        """The values as a CPU tensor; counts as a synchronization."""
        _note("cpu")
        numbers: Tensor = self.inner.clone()
        return numbers

    def tolist(self) -> Any:
        """The values as a list; counts as a synchronization."""
        _note("tolist")
        return self.inner.tolist()

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        """Like `Tensor.to`; a move to the CPU counts as a synchronization."""
        target = kwargs.get("device", args[0] if args else None)
        if isinstance(target, Tensor):
            return self.to(target.device, target.dtype, *args[1:], **kwargs)
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
        """Execute an operation outside of a `PretendCuda`: nothing is counted."""
        return computed(func, args, kwargs or {})


class PretendEvent:
    """Replaces `torch.cuda.Event`: a point in the work of the pretended GPU that the host can wait for."""

    def __init__(self) -> None:
        self._recorded: dict[PretendCuda, int] = {}

    def record(self, _: object = None) -> None:
        """Note how much work the pretended GPU was given before."""
        self._recorded = {counter: counter.work for counter in _COUNTING}

    def synchronize(self) -> None:
        """Wait for that work, and count it unless the host has waited for as much before."""
        for counter, work in self._recorded.items():
            if work > counter.done:
                counter.wait("event", work)


_COUNTING: list[PretendCuda] = []


def _note(name: str) -> None:
    for counter in _COUNTING:
        counter.wait(name)


def unwrapped(value: Any) -> Any:
    """The inner CPU tensor of a pretended GPU tensor; any other value unchanged."""
    return value.inner if isinstance(value, PretendCudaTensor) else value


def computed(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The result of an operation, on the pretended GPU if its arguments or its `device` argument are."""
    flat = list(tensors_in((args, kwargs)))
    there = any(isinstance(tensor, PretendCudaTensor) for tensor in flat)
    requested = kwargs.get("device")
    name = func.overloadpacket.__name__
    if requested is not None and not (there and name == "_to_copy"):
        # Copies from the device to the CPU go through `PretendCudaTensor.to`; all others are made by torch itself, for
        # which the tensor is a CPU tensor.
        there = torch.device(requested).type == "cuda" or (there and name.startswith("new_"))
    if requested is not None:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    if kwargs.get("pin_memory"):
        kwargs = {**kwargs, "pin_memory": False}
    result = run_of(func)(*tree_map(unwrapped, args), **tree_map(unwrapped, kwargs))
    if name in {"empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided"}:
        result.zero_()
    if name == "to" and result is unwrapped(args[0]) and isinstance(args[0], PretendCudaTensor) == there:
        return args[0]
    if func._schema.is_mutable and flat and name.endswith("_"):
        return args[0] if func._schema.returns else None
    if there:
        # A view created in inference mode of a normal tensor is not an inference tensor.
        kept = bool(flat) and not flat[0].is_inference() and func.is_view
        with torch.inference_mode(mode=False) if kept else nullcontext():
            return tree_map(lambda value: PretendCudaTensor(value) if isinstance(value, Tensor) else value, result)
    return result


def run_of(func: Any) -> Any:
    """The function that computes an operation on the CPU; it returns zeros if only GPUs have a kernel for it."""
    if func in _WIDE_PRODUCTS:
        return wide_product
    if not isinstance(func, torch._ops.OpOverload) or any(map(func.has_kernel_for_dispatch_key, _ON_CPU)):
        return func
    return partial(zeros_of, func)


_WIDE_PRODUCTS = {torch.ops.aten.mm.dtype, torch.ops.aten.mm.dtype_out}
"""Matrix products with an output dtype wider than that of the operands, which CPUs do not support."""


def wide_product(left: Tensor, right: Tensor, dtype: torch.dtype, *, out: Tensor | None = None) -> Tensor:
    """The product of two matrices in a wider dtype, rounded as on a GPU."""
    return torch.mm(left.to(dtype), right.to(dtype), out=out)


def zeros_of(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Zeros with the shapes and dtypes of the results of an operation, which are computed with meta tensors."""

    def changed(kind: str, value: Any) -> Any:
        return tree_map(lambda part: part.to(kind) if isinstance(part, Tensor) else part, value)

    shapes = func(*changed("meta", args), **changed("meta", kwargs))
    return tree_map(lambda part: torch.zeros_like(part, device="cpu") if isinstance(part, Tensor) else part, shapes)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """All tensors in nested arguments."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from tensors_in(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from tensors_in(part)


def left_behind(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The CPU tensors with at least one dimension that an operation takes together with GPU tensors although a real GPU
    refuses them."""
    given = list(tensors_in((args, kwargs or {})))
    if func.overloadpacket.__name__ in _TAKES_INDICES or not any(isinstance(one, PretendCudaTensor) for one in given):
        return []
    return [tensor for tensor in given if tensor.dim() and not isinstance(tensor, PretendCudaTensor)]


class PretendCuda(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts, in its context, what a GPU would do: `syncs` by name, `copies` to it, and kernel `launches` by name."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.launches: Counter[str] = Counter()
        self.programs: Counter[str] = Counter()
        """The number of launches of each Triton program, by name."""
        self.grids: list[tuple[str, int, tuple[int, ...]]] = []
        """The launched Triton programs in order: name, grid size, and the addresses of their tensors."""
        self.syncs: Counter[str] = Counter()
        self.copies = 0
        self.work = 0
        """The number of operations that the device was given."""
        self.done = 0
        """How many of them the host knows to be done, as it waited for them."""
        self._pinned: dict[int, torch.UntypedStorage] = {}
        """Pinned host memory by address; kept alive, so that no other memory gets its address."""
        self._copying: list[tuple[int, Tensor, Tensor]] = []
        """Copies of pinned memory that may not have ended: number of the operation, source, and what it held."""

    def reset(self) -> None:
        """Reset all counters."""
        self.launches.clear()
        self.programs.clear()
        self.syncs.clear()
        self.grids.clear()
        self.copies = 0

    def wait(self, name: str, work: int | None = None) -> None:
        """Count a wait of the host for this much work, or all; raises `LawBroken` if a copy was overwritten before."""
        self.syncs[name] += 1
        self.done = self.work if work is None else max(self.done, work)
        ended = [entry for entry in self._copying if entry[0] <= self.done]
        self._copying = [entry for entry in self._copying if entry[0] > self.done]
        for _, source, held in ended:
            require(torch.equal(source, held), "pinned memory was overwritten before its copy to the device had ended")

    @property
    def total(self) -> int:
        """The number of kernels launched, including Triton programs."""
        return self.launches.total() + self.programs.total()

    def __enter__(self) -> PretendCuda:
        self._lifted = torch._C._only_lift_cpu_tensors()
        torch._C._set_only_lift_cpu_tensors(True)
        self._patched = ExitStack()
        for owner, name, other in (
            (torch.cuda, "_lazy_init", lambda: None),
            (torch.cuda, "Event", PretendEvent),
            (torch.cuda, "current_stream", lambda *_: None),
            (torch, "tensor", _moved(torch.tensor)),
            (torch, "autocast", _autocast),
            (torch.Tensor, "pin_memory", lambda part: self._noted_as_pinned(part.clone())),
            (torch._C, "_group_tensors_by_device_and_dtype", _grouped),
            (_foreach_utils, "_foreach_supported_types", [torch.Tensor, PretendCudaTensor]),
        ):
            self._patched.enter_context(patch.object(owner, name, other))
        super().__enter__()  # type: ignore[no-untyped-call]
        _COUNTING.append(self)
        return self

    def __exit__(self, *exception: object) -> None:
        torch._C._set_only_lift_cpu_tensors(self._lifted)
        self._patched.close()
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        _COUNTING.remove(self)
        if exception[0] is None:
            self.wait("end")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute an operation and count it."""
        kwargs = kwargs or {}
        before = any(isinstance(tensor, PretendCudaTensor) for tensor in tensors_in((args, kwargs)))
        result = computed(func, args, kwargs)
        if kwargs.get("pin_memory"):
            self._noted_as_pinned(result)
        if before or any(isinstance(tensor, PretendCudaTensor) for tensor in tensors_in(result)):
            self._count(func, args, kwargs, result)
        return result

    def launched(self, name: str, grid: int, pointers: tuple[int, ...]) -> None:
        """Count the launch of a Triton program."""
        self.work += 1
        self.programs[name] += 1
        self.grids.append((name, grid, pointers))

    def _count(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        name, after = func.overloadpacket.__name__, any(isinstance(t, PretendCudaTensor) for t in tensors_in(result))
        self.work += 1
        if name in _WAITING or self._selects_by_mask(name, args):
            self.wait(name)
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
        non_blocking = _argument(func, "non_blocking", args, kwargs)
        if isinstance(source, PretendCudaTensor):
            if not after:
                # A non-blocking copy to pinned memory does not wait; the host reads it after an event.
                if not (non_blocking and self._is_pinned(result)):
                    self.wait(name)
            elif name == "copy_" or result is not source:
                self.launches[name] += 1
        elif name == "copy_" and not source.dim():
            self.launches["fill_"] += 1  # x[i] = 1: torch fills in the number on the device
        else:
            self._brought(source, non_blocking=non_blocking)

    def _brought(self, source: Tensor, *, non_blocking: bool) -> None:
        """Count a copy of a host tensor to the device."""
        self.copies += 1
        if not non_blocking:
            self.wait("blocking copy to the device")
        elif not self._is_pinned(source):
            self.wait("copy of memory that is not pinned")
        else:
            self._copying.append((self.work, source, source.clone()))

    def _noted_as_pinned(self, here: Tensor) -> Tensor:
        storage = here.untyped_storage()
        self._pinned[storage.data_ptr()] = storage
        return here

    def _is_pinned(self, here: Tensor) -> bool:
        return here.untyped_storage().data_ptr() in self._pinned

    @staticmethod
    def _selects_by_mask(name: str, args: Any) -> bool:
        return name in _INDEXED and any(index is not None and index.dtype == torch.bool for index in args[1])


def _argument(func: Any, wanted: str, args: Any, kwargs: dict[str, Any]) -> bool:
    """A boolean argument of an operation; False if it is not given."""
    names = [argument.name for argument in func._schema.arguments]
    return bool(kwargs.get(wanted, dict(zip(names, args, strict=False)).get(wanted, False)))


@contextmanager
def pretended_gpu(gpu: devices.Gpu = H200) -> Iterator[PretendCuda]:
    """Context manager that counts what a GPU would do; kernels are dispatched as on the given GPU.

    Triton programs are counted but not executed.
    """
    counter = PretendCuda()

    def run(launch: Any, _: torch.device) -> None:
        if launch.programs:
            pointers = tuple(tensor.data_ptr() for tensor in tensors_in(tuple(launch.call)))
            counter.launched(launch.program.__name__, launch.programs, pointers)

    with ExitStack() as stack:
        stack.enter_context(patch.object(devices, "has_gpu", lambda: True))
        stack.enter_context(patch.object(devices, "nvidia_gpu", lambda: gpu))
        for name, answer in (("get_device_capability", gpu.capability), ("get_device_name", gpu.name)):
            stack.enter_context(patch.object(torch.cuda, name, lambda *_, answer=answer: answer))
        if find_spec("triton") and find_spec("attn_kernels_triton"):
            launches = importlib.import_module("attn_kernels_triton.launch")
            stack.enter_context(patch.object(launches.Launch, "run", run))
            for module in ("launch", "paged.step", "products"):
                owner = importlib.import_module(f"attn_kernels_triton.{module}")
                stack.enter_context(patch.object(owner, "processors", lambda _: launches.USUAL))
        # Clear what was cached for a machine without a GPU, or with another one.
        for cached in (installed_operation, table_here):
            cached.cache_clear()
            stack.callback(cached.cache_clear)
        yield stack.enter_context(counter)


def to_pretended(model: torch.nn.Module) -> None:
    """Move the weights of a model to the pretended GPU, where it can be run and trained."""
    for module in model.modules():
        for name, weight in list(module._parameters.items()):
            if weight is not None:
                there = PretendCudaTensor(weight.detach())
                module._parameters[name] = torch.nn.Parameter(there, weight.requires_grad)
        for name, buffer in list(module._buffers.items()):
            if buffer is not None:
                module._buffers[name] = PretendCudaTensor(buffer)


def _grouped(lists: list[list[Tensor | None]], with_indices: bool = False) -> Any:
    """An optimizer's tensors grouped by device and dtype, with the device corrected for pretended GPU tensors, which
    torch takes for CPU tensors."""
    found = _GROUPS(lists, with_indices)
    there = any(isinstance(tensor, PretendCudaTensor) for tensor in lists[0])
    return {(DEVICE if there else device, dtype): group for (device, dtype), group in found.items()}


_GROUPS = torch._C._group_tensors_by_device_and_dtype


def _autocast(device_type: str, *args: Any, **kwargs: Any) -> AbstractContextManager[Any]:
    """`torch.autocast` that also supports the pretended GPU, whose tensors torch takes for CPU tensors."""
    if device_type != DEVICE.type:
        return torch.amp.autocast(device_type, *args, **kwargs)
    return _GpuAutocast(*args, **kwargs)


class _GpuAutocast(torch.amp.autocast_mode.autocast):
    """CPU autocast that is also reported as GPU autocast; matrix products have the same dtype as on a GPU."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__("cpu", *args, **kwargs)

    def __enter__(self) -> Any:
        kind = DEVICE.type
        self._before = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        torch.set_autocast_enabled(kind, self._enabled)
        torch.set_autocast_dtype(kind, self.fast_dtype)
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *exception: Any) -> Any:
        enabled, dtype = self._before
        torch.set_autocast_enabled(DEVICE.type, enabled)
        torch.set_autocast_dtype(DEVICE.type, dtype)
        return super().__exit__(*exception)


def _moved(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`torch.tensor` that creates GPU tensors on the CPU and copies them, as torch without CUDA cannot create them."""

    def tensor(data: Any, *, device: Any = None, **options: Any) -> Tensor:
        made = make(data, **options)
        return made if device is None else made.to(device)

    return tensor
