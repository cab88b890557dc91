"""How many queries and keys meet at once in codes."""

from __future__ import annotations

from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from attn_kernels_triton.attention.tiles import NARROWEST, Choice, Sizes
from attn_kernels_triton.kernels.arguments import Rule
from attn_kernels_triton.launch import power_of_two

LEAST_KEYS = 32
"""Keys whose weights the matrix unit sums over at once."""

CODED_CHOICES: dict[int, Choice] = {
    64: Choice(128, 128, 8, 2, "descriptors"),
    128: Choice(128, 128, 8, 2, "descriptors"),
    256: Choice(64, 64, 8, 2, "descriptors"),
}
"""By the width; none of these spills on sm_90a, as a test sees to."""
WINDOWED_CHOICES = CODED_CHOICES | {128: Choice(128, 64, 8, 2, "descriptors")}
"""Where queries see only so far back: a second bound takes registers."""


def coded_choice(sizes: Sizes, rule: Rule) -> Choice:
    """What is shipped, never larger than the operands."""
    chosen = (CODED_CHOICES if rule.left is None else WINDOWED_CHOICES)[max(NARROWEST, sizes.width)]
    queries, keys = power_of_two(sizes.queries), max(LEAST_KEYS, power_of_two(sizes.keys))
    return chosen._replace(queries=min(chosen.queries, queries), keys=min(chosen.keys, keys))


def described(choice: Choice, query: Tensor, key: Tensor, value: Tensor) -> tuple[TensorDescriptor, ...]:
    """Tiles of codes [head of batch and row, width], of values [head of batch and width, row]."""
    flat = query.flatten(0, 2), key.flatten(0, 2), value.flatten(0, 2)
    tiles = [choice.queries, query.shape[3]], [choice.keys, key.shape[3]], [value.shape[2], choice.keys]
    return tuple(TensorDescriptor.from_tensor(part, tile) for part, tile in zip(flat, tiles, strict=True))
