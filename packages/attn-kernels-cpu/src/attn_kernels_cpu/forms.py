"""The memory layouts of packed weights, see native/pack.hpp."""

from __future__ import annotations

from dataclasses import dataclass, replace

PANEL = 16


@dataclass(frozen=True, kw_only=True)
class Form:
    """A memory layout of weights: its number (`Format` of native/simd.hpp), and the bytes of a weight without steps.

    Inputs and outputs are padded with zeros to multiples of `inputs` and `outputs`. `parts` is the number of numbers
    that an input is split into for products in AMX tiles (0: no tiles): three bfloat16 that add up to a float32
    exactly, one bfloat16, two int8 for multiples of 1/32512 of a row's largest input, or, with int4 weights, one int8
    with a step per 32 inputs. `source` is the dtype that weights are converted to before packing, None for any; `steps`
    is whether each output has a step. `attention` is the number of bfloat16 numbers that operands of attention between
    such layers are split into: one (rounded), three (exact), or 0 without tiles.

    `scale_bytes` is the size of the scales of an output per `group` inputs; `block` is the size of these inputs as
    stored in a file, 0 if weights come as floats. `int16` is whether inputs of weights in blocks are rounded
    to int16, else to int8.
    """

    number: int
    bytes: float
    inputs: int = 1
    outputs: int = PANEL
    parts: int = 0
    source: str | None = None
    steps: bool = False
    attention: int = 0
    scale_bytes: int = 0
    group: int = 32
    block: int = 0
    int16: bool = False

    def size(self, outputs: int, inputs: int) -> int:
        """The size of weights [outputs, inputs] in bytes."""
        return int(self.padded(outputs) * (-(-inputs // self.inputs) * self.inputs) * self.bytes)

    def padded(self, outputs: int) -> int:
        """The number of outputs, padded to whole panels."""
        return -(-outputs // self.outputs) * self.outputs

    def inputs_of(self, row: int) -> int:
        """The number of inputs of a row with `row` elements, or with `row` bytes of blocks."""
        return row // self.block * self.group if self.block else row


def _in_blocks(
    name: str, number: int, weight_bytes: float, *, scale_bytes: int, block: int, group: int = 32
) -> dict[str, Form]:
    """The two layouts of a block format: with inputs rounded to int8, and to int16 (`_int16`)."""
    rounded = Form(number=number, bytes=weight_bytes, scale_bytes=scale_bytes, block=block, group=group)
    return {name: rounded, f"{name}_int16": replace(rounded, int16=True)}


FORMS = {
    "float32": Form(number=0, bytes=4.0, source="float32"),
    "bfloat16": Form(number=1, bytes=2.0, source="bfloat16"),
    "int8": Form(number=2, bytes=1.0, steps=True),
    "int8_tiles": Form(number=5, bytes=1.0, inputs=64, outputs=32, parts=2, steps=True, attention=1),
    "int4": Form(number=3, bytes=0.5, scale_bytes=4),
    "int4_tiles": Form(number=3, bytes=0.5, scale_bytes=4, parts=1, attention=1),
    "bfloat16_exact": Form(number=4, bytes=2.0, inputs=32, outputs=32, parts=3, source="bfloat16", attention=3),
    "bfloat16_rounded": Form(number=4, bytes=2.0, inputs=32, outputs=32, parts=1, source="bfloat16", attention=1),
    **_in_blocks("q8_0", 6, 1.0, scale_bytes=2, block=34),
    **_in_blocks("q4_0", 7, 0.5, scale_bytes=2, block=18),
    **_in_blocks("q4_1", 3, 0.5, scale_bytes=4, block=20),
    **_in_blocks("q4_k", 8, 0.5, scale_bytes=20, group=256, block=144),
    **_in_blocks("q6_k", 9, 0.75, scale_bytes=18, group=256, block=210),
    **_in_blocks("int4_zeros", 10, 0.5, scale_bytes=3, block=19),
}
