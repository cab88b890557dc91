"""Linear layers as they are served: how weights are kept, and who multiplies by them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from attn_core.errors import InvalidValue, KernelRefused

if TYPE_CHECKING:
    from torch import Tensor, nn

WEIGHT_FORMATS = ("float32", "bfloat16", "int8", "int4")
"""What the weights of linear layers may be kept as.

`int8` has a step per output, `int4` a step and a least value per 32 inputs, as GGUF's Q4_1."""

QUANTIZATIONS = ("auto", "none", *WEIGHT_FORMATS)
"""What a server may be told to do with the weights of a model: `auto` packs them as they are stored where that changes
no number but for rounding in float32 and keeps requests alone equal to requests in a crowd, else nothing."""

Pack = Callable[[Sequence["nn.Linear"]], "nn.Module"]
"""CosSin linear layers of the same inputs into one module without training: [..., inputs] to their outputs side by
side.

A layer that wants its weights packed for serving has a method `pack(pack)`, which replaces those that it only calls.
"""


@dataclass(frozen=True, kw_only=True)
class LinearShape:
    """What is to be packed: the element type is that of the weights as they are given."""

    inputs: int
    outputs: int
    dtype: str = "float32"


class LinearKernel(ABC):
    """One way to keep weights in a format and to multiply rows by them.

    Each row of the product depends on its own row of inputs only, however many are computed together, but for
    rounding: `exact` says that not even that changes. `float32` says that inputs and sums are float32 to the end, so
    that weights that the format holds as they are stored lose nothing.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    weights: ClassVar[str]
    exact: ClassVar[bool] = False
    float32: ClassVar[bool] = False

    def available(self) -> str | None:
        """Why the kernel cannot run on this machine at all, or None if it can."""
        return None

    def refuses(self, shape: LinearShape) -> str | None:
        """Why weights of this shape are refused, or None if they are accepted."""
        return None

    @abstractmethod
    def cost(self) -> float:
        """Predicted time for a batch of 16 rows, as a share of torch's own float32 product; the least wins."""

    @abstractmethod
    def pack(self, weight: Tensor, bias: Tensor | None) -> Any:
        """A module [..., inputs] to [..., outputs], in the type of its input, for weight [outputs, inputs]."""


def choose_linear(
    kernels: Iterable[LinearKernel], weights: str, shape: LinearShape, name: str | None = None
) -> LinearKernel:
    """The cheapest kernel that keeps weights in this format and takes this shape, or the one called `name`.

    Raises `InvalidValue` for a format that does not exist, `KernelRefused` where nobody can, saying why.
    """
    if weights not in WEIGHT_FORMATS:
        raise InvalidValue.of("weights", weights, ", ".join(WEIGHT_FORMATS))
    asked = [kernel for kernel in kernels if kernel.weights == weights and name in (None, kernel.name)]
    refused = {kernel: kernel.available() or kernel.refuses(shape) for kernel in asked}
    able = [kernel for kernel, reason in refused.items() if reason is None]
    if able:
        return min(able, key=lambda kernel: kernel.cost())
    said = "; ".join(f"{kernel.name} ({reason})" for kernel, reason in refused.items())
    named = f" called {name!r}" if name else ""
    raise KernelRefused(
        f"no linear kernel{named} packs {shape.outputs} x {shape.inputs} weights as {weights}: "
        f"{said or 'none is installed'}",
        weights=weights,
    )
