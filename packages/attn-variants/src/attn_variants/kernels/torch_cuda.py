"""PyTorch's fused attention on a GPU, one kernel per backend: FlashAttention 2, cuDNN, xFormers and FlexAttention."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable, Mapping
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from attn_core import AttentionInputs
from attn_core.kernels import devices
from attn_core.kernels.attend import AttendKernel, AttendProblem
from attn_core.kernels.base import Anything, AtMost, Condition, OneOf

from attn_variants.kernels.attend import TABLES

if TYPE_CHECKING:
    from attn_core import AttentionSpec
    from torch import Tensor

AMPERE, HOPPER = (8, 0), (9, 0)
"""Compute capabilities: the lowest for FlashAttention 2 and cuDNN attention, and that of H100 and H200."""

BANDS: Mapping[str, Condition] = {
    "score": OneOf("scaled_dot", "dot"),
    "mask": OneOf("full", "causal"),
    "query_heads": Anything(),
    "key_value_heads": Anything(),
    "gradients": Anything(),
    "dtype": OneOf("bfloat16", "float16"),
    "device": OneOf("cuda"),
}
"""The conditions of kernels that take no mask tensor: full or causal attention in 16 bits."""

UNSUPPORTED_MESSAGES = (
    "no available kernel",
    "no valid execution plans",
    "no execution plans",
    "mha_graph",
    "cudnn frontend",
    "flashattention only supports",
    "flash attention only supports",
    "no kernel image is available",
    "not compiled with",
    "was not compiled",
)
"""Parts of PyTorch's error messages, in lower case, that mean that the device or the build lacks a kernel."""


class TorchGpuKernel(AttendKernel):
    """Base class of the kernels that call PyTorch's own attention on a GPU."""

    def available(self) -> str | None:
        """Why it cannot run on this machine, or None if it can."""
        return None if devices.has_gpu() else devices.NO_GPU

    def unsupported(self, error: Exception) -> str | None:
        """The message of an error which means that the device or build lacks the kernel; None for other errors."""
        message = str(error)
        # Exact classes only: OutOfMemoryError, for example, is derived from RuntimeError.
        missing = type(error) in {RuntimeError, NotImplementedError} and any(
            words in message.lower() for words in UNSUPPORTED_MESSAGES
        )
        return f"{type(error).__name__}: {message.splitlines()[0]}" if missing else None

    def run(self, spec: AttentionSpec, operands: AttentionInputs) -> Tensor:
        """The output [batch, query, heads, value_size]; the first call of each kind also tries the backward pass."""
        from attn_variants.compute.warm_up import warm_up_backward

        warm_up_backward((self.name, *backward_kind(spec, operands)), partial(self.compute, spec), operands)
        return self.compute(spec, operands)

    def run_in_graph(self, spec: AttentionSpec, name: str, operands: AttentionInputs) -> Tensor:  # noqa: ARG002 -- as of others
        """The output while torch.compile traces, without trying the backward pass."""
        return self.compute(spec, operands)

    @abstractmethod
    def compute(self, spec: AttentionSpec, operands: AttentionInputs) -> Tensor:
        """The output [batch, query, heads, value_size]."""


class TorchFlash(TorchGpuKernel):
    """PyTorch's FlashAttention 2 (Dao 2023, arXiv 2307.08691): full and causal attention in 16 bits."""

    name = "torch_flash"
    summary = "torch's FlashAttention 2, full or causal, on a GPU"
    accepts: ClassVar[Mapping[str, Condition]] = {**BANDS, "key_size": AtMost(256), "value_size": AtMost(256)}

    def available(self) -> str | None:
        """Why it cannot run on this machine, or None if it can."""
        return super().available() or too_old(self.name)

    def further_refusals(self, problem: AttendProblem) -> list[str]:
        """Refuses keys and values of different sizes."""
        return one_size(problem)

    def cost(self, problem: AttendProblem) -> float:
        """Proportional to the mask's density; 330 TFLOP/s on an H100, where cuDNN reaches 630 (pytorch 142132)."""
        return 0.02 + (0.25 if on_hopper() else 0.17) * problem.density

    def compute(self, spec: AttentionSpec, operands: AttentionInputs) -> Tensor:
        """The output [batch, query, heads, value_size]; see `compute.torch_cuda.flash`."""
        from attn_variants.compute.torch_cuda import flash

        return flash(spec, operands)


class TorchCudnn(TorchGpuKernel):
    """cuDNN's attention, PyTorch's fastest on Hopper; causal calls of unequal lengths use FlashAttention 2 instead."""

    name = "torch_cudnn"
    summary = "cuDNN's fused attention, full or causal, on a GPU"
    accepts: ClassVar[Mapping[str, Condition]] = {**BANDS, "key_size": AtMost(128), "value_size": AtMost(128)}

    def available(self) -> str | None:
        """Why it cannot run on this machine, or None if it can."""
        return super().available() or without_cudnn() or too_old(self.name)

    def further_refusals(self, problem: AttendProblem) -> list[str]:
        """Refuses keys and values of different sizes, and sizes that are not multiples of 8."""
        uneven = [f"key_size: {problem.key_size} is not a multiple of 8"] if problem.key_size % 8 else []
        return uneven + one_size(problem)

    def cost(self, problem: AttendProblem) -> float:
        """Proportional to the mask's density; before Hopper, no faster than FlashAttention 2."""
        return 0.02 + (0.13 if on_hopper() else 0.19) * problem.density

    def compute(self, spec: AttentionSpec, operands: AttentionInputs) -> Tensor:
        """The output [batch, query, heads, value_size]; see `compute.torch_cuda.cudnn`."""
        from attn_variants.compute.torch_cuda import cudnn

        return cudnn(spec, operands)


class TorchEfficient(TorchGpuKernel):
    """PyTorch's memory-efficient attention (Rabe and Staats 2021, arXiv 2112.05682), from xFormers.

    Supports float32 too, and any mask or bias, by a tensor with an entry for each pair.
    """

    name = "torch_efficient"
    summary = "torch's memory-efficient attention, any mask or bias as a tensor, on a GPU"
    accepts: ClassVar[Mapping[str, Condition]] = {
        **TABLES,
        "dtype": OneOf("float32", "bfloat16", "float16"),
        "device": OneOf("cuda"),
    }

    def cost(self, problem: AttendProblem) -> float:
        """An estimate: half of the plain time if there is a mask tensor, else proportional to the mask's density."""
        masked = problem.padded or problem.modifiers or problem.mask not in {"full", "causal"}
        if problem.head_masks:
            return 0.8
        return 0.5 if masked else 0.05 + 0.3 * problem.density

    def compute(self, spec: AttentionSpec, operands: AttentionInputs) -> Tensor:
        """The output [batch, query, heads, value_size]; see `compute.torch_cuda.efficient`."""
        from attn_variants.compute.torch_cuda import efficient

        return efficient(spec, operands)


FLEXIBLE = (
    "causal",
    "window",
    "composite",
    "prefix",
    "global",
    "strided",
    "fixed",
    "big_bird",
    "blocks",
    "segments",
    "chunked",
    "predicate",
    "per_head",
)
"""Masks whose rule FlexAttention can compile."""


class TorchFlex(TorchGpuKernel):
    """PyTorch's FlexAttention (arXiv 2412.05496), which compiles a kernel for each mask and each pair of lengths.

    The first call of each takes seconds, so it is chosen only where measurements show that it is the fastest.
    """

    name = "torch_flex"
    summary = "torch's compiled FlexAttention, for masks with a rule, on a GPU"
    accepts: ClassVar[Mapping[str, Condition]] = {
        "score": OneOf("scaled_dot", "dot"),
        "modifiers": OneOf("soft_cap", "alibi"),
        "mask": OneOf(*FLEXIBLE),
        "key_size": OneOf(16, 32, 64, 128, 256),
        "value_size": OneOf(16, 32, 64, 128, 256),
        "query_heads": Anything(),
        "key_value_heads": Anything(),
        "head_masks": Anything(),
        "gradients": Anything(),
        "dtype": OneOf("float32", "bfloat16", "float16"),
        "device": OneOf("cuda"),
    }

    def cost(self, problem: AttendProblem) -> float:
        """Proportional to the mask's density, plus a part that makes other sparse kernels preferred unless measured."""
        return 0.3 + 0.2 * problem.density

    def unsupported(self, error: Exception) -> str | None:
        """The message of an error of PyTorch's compiler or of `TorchGpuKernel.unsupported`; None for other errors."""
        module = type(error).__module__
        if module.startswith(("torch._dynamo", "torch._inductor", "triton")):
            return f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"
        return super().unsupported(error)

    def compute(self, spec: AttentionSpec, operands: AttentionInputs) -> Tensor:
        """The output [batch, query, heads, value_size]; see `compute.torch_flex.attend`."""
        from attn_variants.compute.torch_flex import attend

        out: Tensor = attend(spec, operands)
        return out


def backward_kind(spec: AttentionSpec, operands: AttentionInputs) -> tuple[Hashable, ...]:
    """The key by which backward passes are tried once: what PyTorch chooses their kernels by, except exact lengths."""
    query, key = operands.query, operands.key
    modifiers = (modifier.kind for modifier in spec.modifiers)
    explicit = operands.key_padding_mask is not None, operands.key_positions is not None
    lengths = query.shape[1] == key.shape[1], query.shape[1] == 1
    sizes = query.dtype, query.shape[2:], key.shape[2], operands.value.shape[-1]
    return spec.mask.kind, spec.distribution.kind, *modifiers, *explicit, *lengths, *sizes


def on_hopper() -> bool:
    """Whether this machine's GPU is a Hopper or newer; True without a GPU, for plans made for another machine."""
    gpu = devices.nvidia_gpu()
    return gpu is None or gpu.capability >= HOPPER


def too_old(name: str) -> str | None:
    """Why a kernel for Ampere and newer cannot run on this machine's GPU, or None if it can."""
    gpu = devices.nvidia_gpu()
    if gpu is None or gpu.capability >= AMPERE:
        return None
    return f"{name} needs compute capability 8.0 or newer, {gpu.name} has {gpu.capability[0]}.{gpu.capability[1]}"


def without_cudnn() -> str | None:
    """Why cuDNN cannot run on this machine, or None if it may."""
    return None if devices.nvidia_gpu() is not None else "cuDNN needs an NVIDIA GPU"


def one_size(problem: AttendProblem) -> list[str]:
    """The refusal of keys and values of different sizes; empty if the sizes are the same."""
    if problem.key_size == problem.value_size:
        return []
    return [f"value_size: {problem.value_size} differs from key_size {problem.key_size}"]
