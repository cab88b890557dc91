"""Linear layers whose weights are kept in few bits on a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl
from attn_core.errors import InvalidValue
from torch import Tensor, nn

from attn_kernels_triton.attention.forward import has_copier
from attn_kernels_triton.backends.conditions import FP8_CAPABILITY
from attn_kernels_triton.kernels.linear import Codes, LinearTile, Product, add_parts, multiply_codes
from attn_kernels_triton.launch import Launch, processors
from attn_kernels_triton.machine import interpreted
from attn_kernels_triton.rowwise.rows import matrix

GROUP = 32
"""Inputs that share a step and a least value as int4."""
TURN = 128
"""Inputs of a turn of the loop: the same for all tiles, as the order in which products are added follows from it."""
FEWEST_TURNS = 8
"""Turns of the loop below which a share of the inputs would mostly wait for its first weights."""


@dataclass(frozen=True)
class Choice:
    """A tile for up to so many rows, and how it is compiled."""

    most: int
    rows: int
    outputs: int
    warps: int
    stages: int


DECODE = (Choice(16, 16, 64, 4, 4), Choice(32, 32, 64, 4, 4), Choice(64, 64, 64, 4, 3))
"""Of steps of decoding, whose programs share the inputs of an output: what they wait for is memory."""
PROMPT, NARROW_PROMPT = Choice(2**31, 128, 128, 8, 3), Choice(2**31, 64, 128, 8, 3)
"""Of more rows; the second on chips before Hopper, where operands of the matrix unit take registers."""
ADDED = LinearTile(tl.constexpr(4), tl.constexpr(256), None)
"""Of the program that adds shares."""


@dataclass(frozen=True, eq=False)
class Held:
    """Weights as `kernels.linear.Codes` has them, [outputs, inputs], and a bias [outputs] or None."""

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
        """Rows of the weights."""
        return self.data.shape[0]

    def codes(self, dtype: torch.dtype | None = None) -> Codes:
        """As programs get them, the bytes of `data` as `dtype` where it is given."""
        return Codes(
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


def shares_of(held: Held, device: torch.device) -> tuple[int, int]:
    """How many turns of the loop are summed at a time, and how often.

    It follows from the weights and the chip, and not from the rows: a row has the same sums in any crowd.
    """
    turns = -(-held.inputs // TURN)
    blocks = -(-held.outputs // DECODE[0].outputs)
    wanted = min(-(-2 * processors(device) // blocks), turns // FEWEST_TURNS)
    share = -(-turns // max(1, wanted))
    return share, -(-turns // share)


E4M3 = torch.float8_e4m3fn


def has_e4m3(device: torch.device) -> bool:
    """Whether a device multiplies numbers of e4m3, and makes others of them."""
    if device.type != "cuda":
        return interpreted()
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= FP8_CAPABILITY


def linear_launches(rows: Tensor, held: Held, out: Tensor, scales: Tensor | None = None) -> list[Launch]:
    """The programs over rows [row, inputs] that write `out` [row, outputs]; rows of e4m3 have `scales` as of `Product`,
    and their matrix products are those of codes."""
    count, outputs = out.shape
    # Sums of blocks of e4m3 take registers beside those that they are added to.
    prompt = PROMPT if has_copier(rows.device) and not (held.e4m3 and held.group) else NARROW_PROMPT
    choice = next((choice for choice in DECODE if count <= choice.most), prompt)
    share, shares = shares_of(held, rows.device)
    apart = shares > 1 and choice in DECODE
    parts = torch.empty(shares, count, outputs, dtype=torch.float32, device=rows.device) if apart else None
    call = Product(
        rows=matrix(rows),
        codes=held.codes(E4M3 if held.e4m3 and (scales is not None or has_e4m3(rows.device)) else None),
        bias=held.bias,
        out=matrix(out),
        parts=parts,
        count=count,
        inputs=held.inputs,
        outputs=outputs,
        share=share,
        shares=shares,
        tile=LinearTile(tl.constexpr(choice.rows), tl.constexpr(choice.outputs), tl.constexpr(TURN)),
        scales=matrix(scales),
    )
    blocks = -(-count // choice.rows) * -(-outputs // choice.outputs)
    options: dict[str, Any] = {"warps": choice.warps, "stages": choice.stages}
    found = [Launch(program=multiply_codes, programs=blocks * (shares if apart else 1), call=call, **options)]
    if apart:
        added = -(-count // ADDED.rows.value) * -(-outputs // ADDED.outputs.value)
        found.append(Launch(program=add_parts, programs=added, call=call._replace(tile=ADDED), warps=4, stages=1))
    return found


DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class CodedLinear(nn.Module):
    """Rows [..., inputs] to [..., outputs], in the type of the rows; those of float32 are rounded to bfloat16.

    Weights become numbers of the rows' type in registers, products are summed in float32, in an order that does not
    depend on how many rows there are: a row has the bits alone that it has in any crowd.
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
        """The weights."""
        tensors = self.data, self.steps, self.leasts, self.zeros, self.bias
        return Held(*tensors, self.inputs, self.bits, self.group, self.zero, self.e4m3)

    def forward(self, rows: Tensor) -> Tensor:
        """Rows [..., inputs] to [..., outputs]; raises `InvalidValue` for rows of another size, type or place."""
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
        """The programs over rows [row, inputs], dense along their last axis, that write `out` [row, outputs]."""
        return linear_launches(rows.to(torch.bfloat16) if rows.dtype == torch.float32 else rows, self.held, out)

    def extra_repr(self) -> str:
        """Sizes and format, as torch's own layers show theirs."""
        return f"inputs={self.inputs}, outputs={self.outputs}, weights={self.form}"


def _padded(weight: Tensor, to: int) -> Tensor:
    """Rows of whole multiples of `to`, filled up with what they end in, which makes no group wider."""
    short = -weight.shape[1] % to
    return weight if not short else torch.cat([weight, weight[:, -1:].expand(-1, short)], dim=1)


def bias_of(bias: Tensor | None) -> Tensor | None:
    """A bias [outputs] as programs read it, in float32."""
    return None if bias is None else bias.detach().float().contiguous()


def int8_linear(weight: Tensor, bias: Tensor | None) -> CodedLinear:
    """Weights [outputs, inputs] as whole numbers from -127 to 127 times a step for each output, in float32."""
    wide = weight.detach().float()
    steps = (wide.abs().amax(1) / 127).clamp_(min=torch.finfo(torch.float32).tiny)
    codes = torch.round(_padded(wide, 16) / steps.unsqueeze(1)).to(torch.int8)
    held = Held(codes.contiguous(), steps, None, None, bias_of(bias), weight.shape[1], 8, None)
    return CodedLinear(held, "int8")


def int4_linear(weight: Tensor, bias: Tensor | None) -> CodedLinear:
    """Weights [outputs, inputs] as whole numbers from 0 to 15 times a step plus a least value, both half floats, for
    each 32 inputs: GGUF's Q4_1."""
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
    """Numbers from 0 to 15 [outputs, groups, 32] as uint8 [outputs, 16 a group], input j and j + 16 in a byte."""
    lower, upper = torch.split(codes.to(torch.uint8), 16, dim=-1)
    return torch.bitwise_or(lower, upper << 4).flatten(1)
