"""Linear layers with quantized weights on a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl
from attn_core.errors import InvalidValue
from torch import Tensor, nn

from attn_kernels_triton.attention.forward import has_copier
from attn_kernels_triton.backends.conditions import FP8_CAPABILITY
from attn_kernels_triton.kernels.linear import LinearTile, Product, QuantizedWeights, add_parts, multiply_codes
from attn_kernels_triton.launch import Launch, processors
from attn_kernels_triton.machine import interpreted
from attn_kernels_triton.rowwise.rows import matrix

GROUP = 32
"""The number of inputs that share a step and a minimum in int4."""
TURN = 128
"""The number of inputs of one loop iteration: the same for all tiles, as it determines the order of the sums."""
FEWEST_TURNS = 8
"""The fewest loop iterations of a split of the inputs: a shorter one would mostly wait for its first weights."""


@dataclass(frozen=True)
class Choice:
    """Launch parameters for up to `most` rows: rows and outputs of a tile, warps and pipeline stages."""

    most: int
    rows: int
    outputs: int
    warps: int
    stages: int


DECODE = (Choice(16, 16, 64, 4, 4), Choice(32, 32, 64, 4, 4), Choice(64, 64, 64, 4, 3))
"""Launch parameters for decode steps, which are memory-bound and so split the inputs among programs (split-K)."""
PROMPT, NARROW_PROMPT = Choice(2**31, 128, 128, 8, 3), Choice(2**31, 64, 128, 8, 3)
"""Launch parameters for more rows; the second is for GPUs before Hopper, whose tensor cores read operands from
registers, and for FP8 weights with a scale per block."""
ADDED = LinearTile(tl.constexpr(4), tl.constexpr(256), None)
"""The tile of the kernel that adds the partial sums."""


@dataclass(frozen=True, eq=False)
class Held:
    """Quantized weights [outputs, inputs], see `kernels.linear.QuantizedWeights`, and a bias [outputs] or None."""

    data: Tensor
    steps: Tensor
    leasts: Tensor | None
    zeros: Tensor | None
    bias: Tensor | None
    inputs: int
    bits: int
    group: int | None
    zero: int | None = None
    e4m3: bool = False

    @property
    def outputs(self) -> int:
        """The number of outputs."""
        return self.data.shape[0]

    def codes(self, dtype: torch.dtype | None = None) -> QuantizedWeights:
        """The kernel argument that holds these weights; `dtype` reinterprets the bytes of `data`."""
        return QuantizedWeights(
            data=self.data if dtype is None else self.data.view(dtype),
            width=self.data.shape[1],
            steps=self.steps,
            leasts=self.leasts,
            zeros=self.zeros,
            groups=self.steps.shape[1] if self.group else None,
            bits=tl.constexpr(self.bits),
            group=tl.constexpr(self.group) if self.group else None,
            zero=tl.constexpr(self.zero) if self.zero else None,
            e4m3=tl.constexpr(self.e4m3),
        )


def splits_of(held: Held, device: torch.device) -> tuple[int, int]:
    """How the inputs are split among programs (split-K): loop iterations of each split, and the number of splits.

    Both depend on the weights and the GPU but not on the number of rows, so results are batch-invariant.
    """
    iterations = -(-held.inputs // TURN)
    blocks = -(-held.outputs // DECODE[0].outputs)
    wanted = min(-(-2 * processors(device) // blocks), iterations // FEWEST_TURNS)
    split_steps = -(-iterations // max(1, wanted))
    return split_steps, -(-iterations // split_steps)


E4M3 = torch.float8_e4m3fn


def has_e4m3(device: torch.device) -> bool:
    """Whether a device multiplies and converts e4m3 numbers."""
    if device.type != "cuda":
        return interpreted()
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= FP8_CAPABILITY


def linear_launches(rows: Tensor, held: Held, out: Tensor, scales: Tensor | None = None) -> list[Launch]:
    """The launches that multiply rows [row, inputs] and write `out` [row, outputs].

    Rows in e4m3 come with `scales`, see `Product`; their codes are multiplied in FP8.
    """
    count, outputs = out.shape
    # FP8 weights with a scale per block need a second accumulator, and so more registers.
    prompt = PROMPT if has_copier(rows.device) and not (held.e4m3 and held.group) else NARROW_PROMPT
    choice = next((choice for choice in DECODE if count <= choice.most), prompt)
    split_steps, splits = splits_of(held, rows.device)
    apart = splits > 1 and choice in DECODE
    parts = torch.empty(splits, count, outputs, dtype=torch.float32, device=rows.device) if apart else None
    call = Product(
        rows=matrix(rows),
        codes=held.codes(E4M3 if held.e4m3 and (scales is not None or has_e4m3(rows.device)) else None),
        bias=held.bias,
        out=matrix(out),
        parts=parts,
        count=count,
        inputs=held.inputs,
        outputs=outputs,
        split_steps=split_steps,
        splits=splits,
        tile=LinearTile(tl.constexpr(choice.rows), tl.constexpr(choice.outputs), tl.constexpr(TURN)),
        scales=matrix(scales),
    )
    blocks = -(-count // choice.rows) * -(-outputs // choice.outputs)
    options: dict[str, Any] = {"warps": choice.warps, "stages": choice.stages}
    found = [Launch(program=multiply_codes, programs=blocks * (splits if apart else 1), call=call, **options)]
    if apart:
        added = -(-count // ADDED.rows.value) * -(-outputs // ADDED.outputs.value)
        found.append(Launch(program=add_parts, programs=added, call=call._replace(tile=ADDED), warps=4, stages=1))
    return found


DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class CodedLinear(nn.Module):
    """A linear layer with quantized weights: [..., inputs] to [..., outputs] in the dtype of the inputs.

    Inputs in float32 are rounded to bfloat16. Weights are dequantized to the dtype of the inputs in registers, and
    products are summed in float32 in an order that does not depend on the number of rows: results are batch-invariant.
    """

    data: Tensor
    steps: Tensor
    leasts: Tensor | None
    zeros: Tensor | None
    bias: Tensor | None

    def __init__(self, held: Held, form: str) -> None:
        super().__init__()
        self.form, self.outputs, self.inputs = form, held.outputs, held.inputs
        self.bits, self.group, self.zero, self.e4m3 = held.bits, held.group, held.zero, held.e4m3
        for name in ("data", "steps", "leasts", "zeros", "bias"):
            self.register_buffer(name, getattr(held, name), persistent=False)

    @property
    def held(self) -> Held:
        """The quantized weights and the bias."""
        tensors = self.data, self.steps, self.leasts, self.zeros, self.bias
        return Held(*tensors, self.inputs, self.bits, self.group, self.zero, self.e4m3)

    def forward(self, rows: Tensor) -> Tensor:
        """Map [..., inputs] to [..., outputs]; raises `InvalidValue` for another size, dtype or device."""
        if rows.shape[-1:] != (self.inputs,) or rows.device != self.data.device or rows.dtype not in DTYPES:
            given = f"{rows.dtype} {list(rows.shape)} on {rows.device}"
            allowed = f"float32, bfloat16 or float16 [..., {self.inputs}] on {self.data.device}"
            raise InvalidValue.of("rows", given, allowed)
        if rows.device.type != "cuda" and not interpreted():
            raise InvalidValue.of("rows.device", str(rows.device), "a GPU: these kernels do not run on a CPU")
        flat = rows.reshape(-1, self.inputs)
        if flat.stride(-1) != 1:
            flat = flat.contiguous()
        out = torch.empty(flat.shape[0], self.outputs, dtype=rows.dtype, device=rows.device)
        for launch in self.launches(flat, out):
            launch.run(rows.device)
        return out.view(*rows.shape[:-1], self.outputs)

    def launches(self, rows: Tensor, out: Tensor) -> list[Launch]:
        """The launches that multiply rows [row, inputs], contiguous along the last axis, and write `out` [row,
        outputs]."""
        return linear_launches(rows.to(torch.bfloat16) if rows.dtype == torch.float32 else rows, self.held, out)

    def extra_repr(self) -> str:
        """The sizes and the weight format, for `repr`."""
        return f"inputs={self.inputs}, outputs={self.outputs}, weights={self.form}"


def _padded(weight: Tensor, to: int) -> Tensor:
    """Weights [outputs, inputs], their inputs padded to a multiple of `to` with the last column.

    Repeating values that occur already does not widen the range of a group.
    """
    short = -weight.shape[1] % to
    return weight if not short else torch.cat([weight, weight[:, -1:].expand(-1, short)], dim=1)


def bias_of(bias: Tensor | None) -> Tensor | None:
    """The bias [outputs] in float32 and contiguous, as the kernels read it."""
    return None if bias is None else bias.detach().float().contiguous()


def int8_linear(weight: Tensor, bias: Tensor | None) -> CodedLinear:
    """Quantize weights [outputs, inputs] to integers from -127 to 127 times one float32 step per output."""
    wide = weight.detach().float()
    steps = (wide.abs().amax(1) / 127).clamp_(min=torch.finfo(torch.float32).tiny)
    codes = torch.round(_padded(wide, 16) / steps.unsqueeze(1)).to(torch.int8)
    held = Held(codes.contiguous(), steps, None, None, bias_of(bias), weight.shape[1], 8, None)
    return CodedLinear(held, "int8")


def int4_linear(weight: Tensor, bias: Tensor | None) -> CodedLinear:
    """Quantize weights [outputs, inputs] to integers from 0 to 15 times a step plus a minimum, both float16, per 32
    inputs: GGUF's Q4_1."""
    wide = _padded(weight.detach().float(), GROUP)
    groups = wide.reshape(len(wide), -1, GROUP)
    leasts, most = groups.amin(-1).half(), groups.amax(-1)
    steps = ((most - leasts.float()) / 15).clamp_(min=torch.finfo(torch.float16).smallest_normal).half()
    codes = (groups - leasts.float().unsqueeze(-1)) / steps.float().unsqueeze(-1)
    held = Held(
        nibbles(torch.round(codes).clamp_(0, 15)), steps, leasts, None, bias_of(bias), weight.shape[1], 4, GROUP
    )
    return CodedLinear(held, "int4")


def nibbles(codes: Tensor) -> Tensor:
    """Pack integers from 0 to 15 [outputs, groups, 32] into uint8 [outputs, groups * 16]: inputs j and j + 16 share a
    byte."""
    lower, upper = torch.split(codes.to(torch.uint8), 16, dim=-1)
    return torch.bitwise_or(lower, upper << 4).flatten(1)
