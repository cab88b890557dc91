"""Attention whose matrix products are computed in FP8 (e4m3)."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl
from attn_core import AttentionInputs, AttentionSpec
from attn_core.errors import InvalidValue
from attn_core.graph_safety import device_cache
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from attn_kernels_triton.attention.forward import Attended, Inputs, empty, has_copier, inputs_of
from attn_kernels_triton.attention.plan import Plan, plan_of
from attn_kernels_triton.attention.tiles import NARROWEST, NEWER, Choice, Sizes, tile_of
from attn_kernels_triton.checks import check, check_count
from attn_kernels_triton.kernels.arguments import Places, Rule
from attn_kernels_triton.kernels.fp8 import BLOCK, AttendCodes, MakeCodes, attend_codes, make_codes
from attn_kernels_triton.launch import Launch, power_of_two, rows

SEED = 20240711


@device_cache(32)
def rotation(width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A random diagonal of signs times a Hadamard matrix [width, width], `width` a power of two.

    The seed is fixed, so the matrix is always the same. Its entries are 1 and -1: it is not divided by the square root
    of the width, so that every dtype represents it exactly.
    """
    signs = torch.randint(0, 2, (width, 1), generator=torch.Generator().manual_seed(SEED)) * 2 - 1
    matrix = torch.ones(1, 1, dtype=torch.int64)
    while len(matrix) < width:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return (signs * matrix).to(device=device, dtype=dtype)


LEAST_KEYS = 32
"""The smallest number of keys that one matrix instruction sums over."""

CODED_CHOICES: dict[int, Choice] = {
    64: Choice(128, 128, 8, 3, "descriptors"),
    128: Choice(128, 128, 8, 2 if NEWER else 3, "descriptors"),
    256: Choice(64, 64, 8, 3, "descriptors"),
}
"""Launch parameters by head width; none of these spills registers on sm_90a, which a test checks."""
WINDOWED_CHOICES = CODED_CHOICES | {128: Choice(128, 64, 8, 3, "descriptors")}
"""Launch parameters where a sliding window bounds the keys on the left, whose second bound takes registers."""


def coded_choice(sizes: Sizes, rule: Rule) -> Choice:
    """The default launch parameters, with tiles no larger than the operands."""
    chosen = (CODED_CHOICES if rule.left is None else WINDOWED_CHOICES)[max(NARROWEST, sizes.width)]
    queries, keys = power_of_two(sizes.queries), max(LEAST_KEYS, power_of_two(sizes.keys))
    return chosen._replace(queries=min(chosen.queries, queries), keys=min(chosen.keys, keys))


def described_codes(choice: Choice, query: Tensor, key: Tensor, value: Tensor) -> tuple[TensorDescriptor, ...]:
    """TMA descriptors of the codes of queries and keys [batch * head * row, width], values [batch * head * width,
    row]."""
    flat = query.flatten(0, 2), key.flatten(0, 2), value.flatten(0, 2)
    tiles = [choice.queries, query.shape[3]], [choice.keys, key.shape[3]], [value.shape[2], choice.keys]
    return tuple(TensorDescriptor.from_tensor(part, tile) for part, tile in zip(flat, tiles, strict=True))


ROWS: int = BLOCK.value
"""The number of rows that share a scale."""
LEAST_WIDTH = 32
"""The smallest number of codes that one matrix instruction sums over."""


class Coded(NamedTuple):
    """A tensor in FP8: codes [batch, head, row, width] (of values [batch, head, width, row]) and scales [batch, head,
    block]."""

    codes: Tensor
    scales: Tensor


def width_of(size: int) -> int:
    """The head size, padded to the width of the codes."""
    return max(LEAST_WIDTH, power_of_two(size))


def blocks_of(count: int) -> int:
    """The number of blocks of `ROWS` rows that hold `count` rows."""
    return -(-count // ROWS)


def empty_codes(given: Tensor, *, transposed: bool) -> Coded:
    """Allocate codes and scales for a tensor [batch, row, head, size]; `transposed` stores codes as [width, row]."""
    batch, count, heads, size = given.shape
    held = [blocks_of(count) * ROWS, width_of(size)]
    codes = given.new_empty(batch, heads, *(held[::-1] if transposed else held), dtype=torch.float8_e4m3fn)
    return Coded(codes, given.new_empty(batch, heads, blocks_of(count), dtype=torch.float32))


def codes_launch(given: Tensor, into: Coded, *, transposed: bool, rotated: bool) -> Launch:
    """The launch that quantizes a tensor [batch, row, head, size] into codes, after a rotation if `rotated`."""
    batch, count, heads, size = given.shape
    width = width_of(size)
    call = MakeCodes(
        rows=rows(given),
        count=count,
        heads=heads,
        rotation=rotation(width, given.dtype, given.device) if rotated else None,
        codes=into.codes,
        scales=into.scales,
        size=tl.constexpr(size),
        width=tl.constexpr(width),
        transposed=tl.constexpr(transposed),
    )
    return Launch(program=make_codes, programs=batch * heads * blocks_of(count), call=call, warps=8, stages=1)


class CodedInputs(NamedTuple):
    """Queries, keys and values in FP8; `rotated` is whether queries and keys were rotated before rounding."""

    query: Coded
    key: Coded
    value: Coded
    rotated: bool


@torch.compiler.disable  # type: ignore[untyped-decorator]
def attend(spec: AttentionSpec, operands: AttentionInputs, *, rotated: bool = True) -> Tensor:
    """The output [batch, query, heads, value_size] in the dtype of the values, without gradients.

    Raises `InvalidValue` for operands that the kernels do not support, see `checked_plan`, and for GPUs of compute
    capability below 9.0.
    """
    plan = checked_plan(spec, operands)
    inputs = Inputs(*(tensor.detach() for tensor in inputs_of(operands)))
    result, coded = empty(plan, inputs), empty_coded(inputs, rotated=rotated)
    for launch in launches(plan, inputs, coded, result):
        launch.run(inputs.query.device)
    return result.out


def checked_plan(spec: AttentionSpec, operands: AttentionInputs) -> Plan:
    """The plan of a call; raises `InvalidValue` unless operands have 16 bits and are on a GPU with TMA, and the mask is
    a band (full, causal or a window), without padding, positions, packed documents, learned biases or dropout."""
    check(spec, operands)
    query, plan = operands.query, plan_of(spec, operands)
    if query.dtype.itemsize != torch.bfloat16.itemsize:
        raise InvalidValue.of("query.dtype", str(query.dtype), "bfloat16 or float16")
    for name, tensor in (("query", query), ("key", operands.key), ("value", operands.value)):
        check_codes(name, tensor)
    if not has_copier(query.device):
        raise InvalidValue.of("query.device", str(query.device), "a GPU of compute capability 9.0 or more")
    if plan.rule.scale <= 0:
        raise InvalidValue.of("score.scale", plan.rule.scale, "a number above zero")
    if operands.varlen is not None:
        raise InvalidValue.of("varlen", operands.varlen, "None: packed documents are not supported")
    if plan.bias is not None or operands.dropout is not None:
        raise InvalidValue.of("modifiers, dropout", "learned biases or dropout", "neither")
    if plan.lists is not None or plan.texts is not None or plan.places != Places():
        raise InvalidValue.of(
            "mask", str(spec.mask), "full, causal or a window, without padding and explicit positions"
        )
    return plan


def check_codes(name: str, rows: Tensor) -> None:
    """Raise `InvalidValue` if the codes of a tensor [batch, row, head, size], padded to whole blocks, have offsets that
    do not fit 32 bits."""
    batch, count, heads, size = rows.shape
    held = blocks_of(count) * ROWS
    check_count(f"{name}: codes of a head", held * width_of(size))
    check_count(f"{name}: rows of all heads", batch * heads * max(held, width_of(size)))


def empty_coded(inputs: Inputs, *, rotated: bool) -> CodedInputs:
    """Allocate the codes and scales of queries, keys and values."""
    query, key = (empty_codes(tensor, transposed=False) for tensor in (inputs.query, inputs.key))
    return CodedInputs(query, key, empty_codes(inputs.value, transposed=True), rotated)


def launches(plan: Plan, inputs: Inputs, coded: CodedInputs, result: Attended) -> list[Launch]:
    """The launches that quantize the inputs, then the one that attends to the codes; without queries or keys there are
    none, and the output is set to zero."""
    if not min(plan.sizes.queries, plan.sizes.keys):
        result.out.zero_()
        return []
    made = [
        codes_launch(inputs.query, coded.query, transposed=False, rotated=coded.rotated),
        codes_launch(inputs.key, coded.key, transposed=False, rotated=coded.rotated),
        codes_launch(inputs.value, coded.value, transposed=True, rotated=False),
    ]
    return [*made, attend_launch(plan, coded, result)]


def attend_launch(plan: Plan, coded: CodedInputs, result: Attended) -> Launch:
    """The launch of the attention kernel over FP8 codes."""
    sizes, choice = plan.sizes, coded_choice(plan.sizes, plan.rule)
    widths = width_of(sizes.key_size), width_of(sizes.value_size)
    scale = plan.rule.scale / widths[0] if coded.rotated else plan.rule.scale
    call = AttendCodes(
        query_scales=coded.query.scales,
        key_scales=coded.key.scales,
        value_scales=coded.value.scales,
        out=rows(result.out),
        lse=result.lse,
        shape=plan.shape,
        rule=plan.rule._replace(scale=scale),
        places=plan.places,
        tile=tile_of(choice, sizes)._replace(key_width=tl.constexpr(widths[0]), value_width=tl.constexpr(widths[1])),
    )
    programs = -(-plan.sizes.queries // choice.queries) * plan.batch * plan.shape.heads
    tiles = described_codes(choice, coded.query.codes, coded.key.codes, coded.value.codes)
    return Launch(
        program=attend_codes, programs=programs, call=call, warps=choice.warps, stages=choice.stages, tiles=tiles
    )
