"""How weights lie in memory, as native/pack.hpp puts them there."""

from __future__ import annotations

from dataclasses import dataclass

PANEL = 16


@dataclass(frozen=True, kw_only=True)
class Form:
    """One layout: its number (`Format` of native/simd.hpp), and the bytes of a weight, steps apart.

    Inputs and outputs are filled up with zeros to multiples. `parts` is how many numbers an input becomes where both
    sides are multiplied in tiles: of bfloat16 three add up to a float32 exactly, of int8 two are a whole number of
    1/32512 of the largest of a row, beside int4 weights one with a step for every 32 inputs. `source` is the element
    type that weights have to come in, None for any; `steps` says that each output has a step, `groups` that each 32
    inputs of it have one and a least value. `attention` is how many bfloat16 numbers what attention between such layers
    multiplies becomes: one, to which it is rounded, or three, which add up to it; 0 where it is not in tiles.
    """

    number: int
    bytes: float
    inputs: int = 1
    outputs: int = PANEL
    parts: int = 0
    source: str | None = None
    steps: bool = False
    groups: bool = False
    attention: int = 0

    def size(self, outputs: int, inputs: int) -> int:
        """Bytes of weights [outputs, inputs]."""
        return int(self.padded(outputs) * (-(-inputs // self.inputs) * self.inputs) * self.bytes)

    def padded(self, outputs: int) -> int:
        """Outputs with those that fill the last panel."""
        return -(-outputs // self.outputs) * self.outputs


FORMS = {
    "float32": Form(number=0, bytes=4.0, source="float32"),
    "bfloat16": Form(number=1, bytes=2.0, source="bfloat16"),
    "int8": Form(number=2, bytes=1.0, steps=True),
    "int8_tiles": Form(number=5, bytes=1.0, inputs=64, outputs=32, parts=2, steps=True, attention=1),
    "int4": Form(number=3, bytes=0.5, groups=True),
    "int4_tiles": Form(number=3, bytes=0.5, parts=1, groups=True, attention=1),
    "bfloat16_exact": Form(number=4, bytes=2.0, inputs=32, outputs=32, parts=3, source="bfloat16", attention=3),
    "bfloat16_rounded": Form(number=4, bytes=2.0, inputs=32, outputs=32, parts=1, source="bfloat16", attention=1),
}
