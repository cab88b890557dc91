"""Linear layers as they are served: how weights are kept, and who multiplies by them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from attn_core.errors import InvalidValue, KernelRefused
from attn_core.kernels.base import Anything, Condition, Kernel, OneOf, Problem
from attn_core.kernels.dispatch import Verdict, explain

if TYPE_CHECKING:
    from torch import Tensor, nn

WEIGHT_FORMATS = ("float32", "bfloat16", "int8", "int4", "fp8")
"""What the weights of linear layers may be kept as.

`int8` has a step per output, `int4` a step and a least value per 32 inputs, as GGUF's Q4_1; `fp8` are floats of 8 bits
(e4m3, arXiv 2209.05433) times a scale per output, on GPUs."""

BLOCK_FORMATS = {"q8_0": 8, "q4_0": 4, "q4_1": 4, "q4_k": 4, "q6_k": 6, "int4_zeros": 4}
"""Formats in which files store weights and in which they stay, with the bits of a weight: blocks of GGUF, and four bits
with a step and a zero point per 32 inputs, as GPTQ and AWQ have them. Weights come to a kernel as uint8
[outputs, bytes of a row]."""

FP8_FORMATS = {"fp8_channel": 8, "fp8_block": 8}
"""Formats of checkpoints in FP8 (e4m3), in which weights stay on GPUs, with the bits of a weight: a scale for each
output, and one for 128 inputs of an output, as blocks of 128 x 128 have them (DeepSeek-V3, arXiv 2412.19437). Weights
come to a kernel as uint8 [outputs, bytes of a row]: a float32 scale before all codes, or before each 128."""

STORED_FORMATS = BLOCK_FORMATS | FP8_FORMATS
"""All formats in which weights of files stay as they are, with the bits of a weight."""

MOST_BITS = {"int8": 8, "int4": 4, "fp8": 8}
"""Formats that say how many bits a weight takes at most, and round inputs."""

QUANTIZATIONS = ("auto", "none", *WEIGHT_FORMATS)
"""What a server may be told to do with the weights of a model: `auto` packs them as they are stored where that changes
no number but for rounding in float32 and keeps requests alone equal to requests in a crowd, else nothing."""

Pack = Callable[[Sequence["nn.Linear"]], "nn.Module"]
"""Turns linear layers of the same inputs into one module without training: [..., inputs] to their outputs side by
side.

A layer that joins layers of one input, or keeps some as they are, has a method `pack(pack)`, which replaces those that
it only calls. In an attention without it, and in what it leaves, linear layers are packed one by one; `read_weights`, a
tuple of attributes of the module that they are in, names those whose matrices are read apart from their products. Where
weights stay floats as they are, `join(pack)` is called in place of `pack(pack)` if a layer has it: it may join narrow
layers too, which other formats would round.
"""


@dataclass(frozen=True, kw_only=True)
class LinearProblem(Problem):
    """Products of rows with the weights of a linear layer, kept in a format.

    `weights` is the format, of `WEIGHT_FORMATS` or `STORED_FORMATS`; `inputs` and `outputs` are sizes in elements;
    `dtype` is that of the weights as they are given. `exact` asks that a row gives the same bits alone
    and beside others, `float32` that inputs and sums are float32 to the end, `weight_only` that weights alone are in
    FP8, and inputs are not.
    """

    operation: ClassVar[str] = "linear"

    weights: str = "float32"
    inputs: int = 0
    outputs: int = 0
    exact: bool = False
    float32: bool = False
    weight_only: bool = False


class LinearKernel(Kernel[LinearProblem]):
    """One way to keep weights in a format and to multiply rows by them.

    Each row of the product depends on its own row of inputs only, however many are computed together, but for
    rounding: `exact` says that not even that changes. `float32` says that inputs and sums are float32 to the end, so
    that weights that the format holds as they are stored lose nothing; `weight_only`, of formats of FP8, that inputs
    keep 16 bits. What is accepted follows from these, from `devices`, types of devices, and from `sizes`, conditions on
    inputs and outputs.
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
            asked = {"exact": cls.exact, "float32": cls.float32, "weight_only": cls.weight_only}
            cls.accepts = {
                "weights": OneOf(cls.weights),
                "dtype": Anything(),
                "device": OneOf(*cls.devices),
                **cls.sizes,
                **{field: Anything() for field, offered in asked.items() if offered},
            }
        super().__init_subclass__(**kwargs)

    @abstractmethod
    def cost(self, problem: LinearProblem) -> float:
        """Predicted time for a batch of 16 rows, as a share of torch's own float32 product; the least wins."""

    @abstractmethod
    def pack(self, weight: Tensor, bias: Tensor | None) -> Any:
        """A module [..., inputs] to [..., outputs], in the type of its input, for weight [outputs, inputs], or
        uint8 [outputs, bytes of a row] of a stored format."""

    def join(self, packed: Sequence[Any]) -> Any | None:
        """Modules that `pack` made, of the same inputs, as one: their outputs side by side; None where it is not
        offered."""
        return None


def linear_problem(form: str, sizes: tuple[int, int], *, quantization: str, dtype: str, device: str) -> LinearProblem:
    """What a model that computes in `dtype` asks of weights in a format, of `sizes` outputs and inputs, where
    `quantization` says how it is packed.

    Where nobody asked for another format, which is `auto` and blocks that stay as they are stored, a row has the same
    bits in any crowd, and inputs and sums are float32 to the end where the model computes in float32. Inputs are
    rounded to FP8 where `fp8` says so, and not because weights are stored so.
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
    """The verdicts, as of `explain`, of the kernels of the problem's format that compute as exactly as it asks."""
    told = {"exact": problem.exact, "float32": problem.float32, "weight_only": problem.weight_only}
    asked = (kernel for kernel in kernels if kernel.weights == problem.weights)
    return explain(
        [kernel for kernel in asked if all(getattr(kernel, f) for f, wanted in told.items() if wanted)], problem
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
    said = "; ".join(f"{verdict.kernel.name} ({', '.join(verdict.reasons)})" for verdict in verdicts)
    named = f" called {name!r}" if name else ""
    raise KernelRefused(
        f"no linear kernel{named} packs {problem.outputs} x {problem.inputs} weights as {problem.weights}: "
        f"{said or 'none is installed'}",
        weights=problem.weights,
    )
