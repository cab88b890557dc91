"""Linear layers for inference: formats of packed weights, and the kernels that multiply by them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from attn_core.errors import InvalidValue, KernelRefused
from attn_core.kernels.base import Anything, Condition, Kernel, OneOf, Problem
from attn_core.kernels.dispatch import Verdict, explain

if TYPE_CHECKING:
    from torch import Tensor, nn

WEIGHT_FORMATS = ("float32", "bfloat16", "int8", "int4", "fp8")
"""The formats in which weights of linear layers can be packed.

`int8` has a step per output, `int4` a step and a minimum per 32 inputs, as GGUF's Q4_1; `fp8` are 8-bit floats
(e4m3, arXiv 2209.05433) with a scale per output, on GPUs."""

BLOCK_FORMATS = {"q8_0": 8, "q4_0": 4, "q4_1": 4, "q4_k": 4, "q6_k": 6, "int4_zeros": 4}
"""Formats of stored weights that are kept in memory as they are, with the bits per weight: blocks of GGUF, and four
bits with a step and a zero point per 32 inputs, as in GPTQ and AWQ. A kernel gets weights as uint8
[outputs, bytes of a row]."""

FP8_FORMATS = {"fp8_channel": 8, "fp8_block": 8}
"""Formats of FP8 (e4m3) checkpoints that are kept as they are on GPUs, with the bits per weight: one scale per output,
and one per 128 inputs of an output, as for blocks of 128 x 128 (DeepSeek-V3, arXiv 2412.19437). A kernel gets weights
as uint8 [outputs, bytes of a row]: a float32 scale before all codes of a row, or before every 128."""

STORED_FORMATS = BLOCK_FORMATS | FP8_FORMATS
"""All formats in which stored weights are kept as they are, with the bits per weight."""

MOST_BITS = {"int8": 8, "int4": 4, "fp8": 8}
"""Formats that limit the bits per weight, and that round inputs, too."""

QUANTIZATIONS = ("auto", "none", *WEIGHT_FORMATS)
"""The options for packing the weights of a served model: `auto` packs them as they are stored where results only change
by rounding in float32 and do not depend on the other requests of a batch, else it packs nothing."""

Pack = Callable[[Sequence["nn.Linear"]], "nn.Module"]
"""Packs linear layers of one input into a single module for inference: [..., inputs] to their concatenated outputs.

A layer that joins linear layers of one input, or keeps some unpacked, has a method `pack(pack)`, which replaces those
that it only calls. In an attention layer without this method, and where it leaves them, linear layers are packed one by
one; a module's `read_weights`, a tuple of attribute names, lists its linear layers whose matrices are also read outside
of products. Where weights stay unchanged floats, `join(pack)` is called instead of `pack(pack)` if a layer has it: it
may join narrow layers, too, which other formats would round.
"""


@dataclass(frozen=True)
class KeptWeights:
    """Where kernels may keep the weights that they pack, for the next time that the same are packed.

    `folder` belongs to one content of a model, and may be removed at any time; `stored` has the names of the tensors
    in the model's files by the addresses at which they are mapped, as long as these weights are packed.
    """

    folder: Path
    stored: Mapping[int, str]


KEPT: ContextVar[KeptWeights | None] = ContextVar("KEPT", default=None)
"""Set while a model is packed whose weights may be kept."""


@dataclass(frozen=True, kw_only=True)
class LinearProblem(Problem):
    """Products of rows with the weights of a linear layer, packed in a format.

    `weights` is the format, of `WEIGHT_FORMATS` or `STORED_FORMATS`; `inputs` and `outputs` are sizes in elements;
    `dtype` is the type of the weights as they are given. `exact` requires that a row has bitwise the same result in a
    batch of any size, `float32` that sums are float32 throughout and inputs keep sixteen bits beside their neighbours,
    `weight_only` that only weights are in FP8, not inputs.
    """

    operation: ClassVar[str] = "linear"

    weights: str = "float32"
    inputs: int = 0
    outputs: int = 0
    exact: bool = False
    float32: bool = False
    weight_only: bool = False


class LinearKernel(Kernel[LinearProblem]):
    """An implementation of packing weights in a format and multiplying rows by them.

    Each row of a product depends only on its own row of inputs, however many rows are computed together, except for
    rounding; `exact` says that rounding does not differ either. `float32` says that sums are float32 throughout and
    that inputs are, too, or, for weights in blocks, keep at least 14 bits of the largest of 32; `weight_only`, for FP8
    formats, that inputs keep 16 bits. `accepts` follows from these, from `devices`, the types of devices, and from
    `sizes`, conditions on inputs and outputs.
    """

    problem: ClassVar[type[Problem]] = LinearProblem
    weights: ClassVar[str]
    exact: ClassVar[bool] = False
    float32: ClassVar[bool] = False
    weight_only: ClassVar[bool] = False
    devices: ClassVar[tuple[str, ...]] = ("cpu",)
    sizes: ClassVar[Mapping[str, Condition]] = {"inputs": Anything(), "outputs": Anything()}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        if hasattr(cls, "weights"):
            guarantees = {"exact": cls.exact, "float32": cls.float32, "weight_only": cls.weight_only}
            cls.accepts = {
                "weights": OneOf(cls.weights),
                "dtype": Anything(),
                "device": OneOf(*cls.devices),
                **cls.sizes,
                **{field: Anything() for field, guaranteed in guarantees.items() if guaranteed},
            }
        super().__init_subclass__(**kwargs)

    @abstractmethod
    def cost(self, problem: LinearProblem) -> float:
        """The predicted time for a batch of 16 rows relative to torch's own float32 product; the lowest is chosen."""

    @abstractmethod
    def pack(self, weight: Tensor, bias: Tensor | None) -> Any:
        """Build a module from [..., inputs] to [..., outputs], in the type of its input, for weight [outputs, inputs],
        or uint8 [outputs, bytes of a row] of a stored format."""

    def pack_rows(self, weights: Sequence[Tensor], bias: Tensor | None) -> Any | None:
        """Like `pack`, for the rows of several matrices one below another, which are not copied first; None if this is
        not supported."""
        return None

    def join(self, packed: Sequence[Any]) -> Any | None:
        """Join modules from `pack`, of the same input, into one with their concatenated outputs; None if this is not
        supported."""
        return None


def linear_problem(form: str, sizes: tuple[int, int], *, quantization: str, dtype: str, device: str) -> LinearProblem:
    """The problem of a linear layer of `sizes` (outputs, inputs) in the weight format `form`, in a model that computes
    in `dtype` and is packed with the option `quantization`.

    With `auto`, and for stored formats that are kept as they are, results must be `exact`, and as `float32` says if the
    model computes in float32. Inputs are rounded to FP8 only for the option `fp8`, not because
    weights are stored in FP8.
    """
    exact = quantization == "auto" or (form in STORED_FORMATS and quantization not in MOST_BITS)
    return LinearProblem(
        weights=form,
        inputs=sizes[1],
        outputs=sizes[0],
        dtype="uint8" if form in STORED_FORMATS else dtype,
        device=device,
        exact=exact,
        float32=exact and dtype == "float32",
        weight_only=form in FP8_FORMATS and quantization != "fp8",
    )


def explain_linear(kernels: Iterable[LinearKernel], problem: LinearProblem) -> list[Verdict[LinearKernel]]:
    """The verdicts, as from `explain`, of the kernels of the problem's format that are as exact as it requires."""
    requirements = {"exact": problem.exact, "float32": problem.float32, "weight_only": problem.weight_only}
    candidates = (kernel for kernel in kernels if kernel.weights == problem.weights)
    return explain(
        [
            kernel
            for kernel in candidates
            if all(getattr(kernel, f) for f, required in requirements.items() if required)
        ],
        problem,
    )


def choose_linear(kernels: Iterable[LinearKernel], problem: LinearProblem, name: str | None = None) -> LinearKernel:
    """The cheapest kernel that accepts the problem, or the one called `name`.

    Raises `InvalidValue` for a format that does not exist, `KernelRefused` where all refuse, with reasons.
    """
    if problem.weights not in WEIGHT_FORMATS and problem.weights not in STORED_FORMATS:
        raise InvalidValue.of("weights", problem.weights, ", ".join(WEIGHT_FORMATS))
    verdicts = explain_linear([kernel for kernel in kernels if name in (None, kernel.name)], problem)
    if verdicts and verdicts[0].accepted:
        return verdicts[0].kernel
    refusals = "; ".join(f"{verdict.kernel.name} ({', '.join(verdict.reasons)})" for verdict in verdicts)
    named = f" called {name!r}" if name else ""
    raise KernelRefused(
        f"no linear kernel{named} packs {problem.outputs} x {problem.inputs} weights as {problem.weights}: "
        f"{refusals or 'none is installed'}",
        weights=problem.weights,
    )
