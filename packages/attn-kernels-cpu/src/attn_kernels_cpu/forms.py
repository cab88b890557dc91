"""How weights lie in memory, as native/pack.hpp puts them there."""

from __future__ import annotations

from dataclasses import dataclass, replace

PANEL = 16


@dataclass(frozen=True, kw_only=True)
class Form:
    """One layout: its number (`Format` of native/simd.hpp), and the bytes of a weight, steps apart.

    Inputs and outputs are filled up with zeros to multiples. `parts` is how many numbers an input becomes where both
    sides are multiplied in tiles: of bfloat16 three add up to a float32 exactly, of int8 two are a whole number of
    1/32512 of the largest of a row, beside int4 weights one with a step for every 32 inputs. `source` is the element
    type that weights have to come in, None for any; `steps` says that each output has a step. `attention` is how many
    bfloat16 numbers what attention between such layers multiplies becomes: one, to which it is rounded, or three, which
    add up to it; 0 where it is not in tiles.

    `scale_bytes` are those that an output has beside its weights for each `group` inputs; `block` are the bytes that
    these inputs take in rows of blocks as they are stored, 0 where weights come as floats. `widened` says that weights
    in blocks become float32 as they are read, and inputs are not rounded.
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
    widened: bool = False

    def size(self, outputs: int, inputs: int) -> int:
        """Bytes of weights [outputs, inputs]."""
        return int(self.padded(outputs) * (-(-inputs // self.inputs) * self.inputs) * self.bytes)

    def padded(self, outputs: int) -> int:
        """Outputs with those that fill the last panel."""
        return -(-outputs // self.outputs) * self.outputs

    def inputs_of(self, row: int) -> int:
        """The inputs of a row that has so many elements, or bytes of blocks."""
        return row // self.block * self.group if self.block else row


def _in_blocks(
    name: str, number: int, weight_bytes: float, *, scale_bytes: int, block: int, group: int = 32
) -> dict[str, Form]:
    """Weights in one kind of blocks, with inputs in int8 and with inputs in float32."""
    rounded = Form(number=number, bytes=weight_bytes, scale_bytes=scale_bytes, block=block, group=group)
    return {name: rounded, f"{name}_widened": replace(rounded, widened=True)}


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
