"""Attention to chosen blocks of whole sequences by a fused function, which meets a block with all who chose it at once.

Only methods and operators of tensors are used, so that the contract needs no tensor library.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from attn_core.chosen import Blocks
from attn_core.kernel import Operands
from attn_core.pairs import LOWEST

if TYPE_CHECKING:
    from torch import Tensor
else:
    Tensor = Any

Part = tuple[Tensor, Tensor]
"""Outputs [..., query, value_size] over some keys, and logarithms [..., query] of the sums of their exponentials."""


def whole(operands: Operands) -> bool:
    """Whether these are whole sequences without padding on a CPU, with keys and values of one size."""
    query, key = operands.query, operands.key
    plain = operands.query_positions is None and operands.key_positions is None and operands.keep is None
    alike = query.shape[1] == key.shape[1] and key.shape[-1] == operands.value.shape[-1]
    return plain and alike and query.device.type == "cpu"


@dataclass(frozen=True)
class WholeBlocks:
    """Reads by `fused`: called with scaled queries [batch, heads, query, size], keys and values of as many heads and
    `causal`, it gives a `Part`; `join` is torch's `cat`."""

    fused: Callable[..., Part]
    join: Callable[..., Tensor]

    def attend(self, query: Tensor, chosen: Tensor, blocks: Blocks) -> Tensor:
        """Outputs [batch, groups, query, shared, value_size] of whole sequences without padding.

        `query` [batch, groups, query, shared, size], scaled, at 0, 1, ...; `chosen` [batch, groups, query, top], int64:
        first the block that the query stands in, then different earlier ones, -1 where there is none. No gradients.
        """
        lanes = zip(*(rows.flatten(0, 1) for rows in (query, chosen, blocks.key, blocks.value)), strict=True)
        out = self.join([self.lane(*lane)[None] for lane in lanes])
        return out.reshape(*query.shape[:-1], out.shape[-1])

    def lane(self, query: Tensor, chosen: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Outputs [query, shared, value_size] of one group of one sequence."""
        own, height = self.own(query, key, value)
        top = chosen.shape[-1] - 1
        far = chosen[:, 1:].flatten()
        if not bool((far >= 0).any()):
            return own
        seen, heights = self.others(query, far, key, value)
        shape = query.shape[0], top, query.shape[1]
        seen, heights = seen.reshape(*shape, seen.shape[-1]), heights.reshape(shape)
        shares = self.join([height[:, None], heights], 1).softmax(1)[..., None]
        return own * shares[:, 0] + seen.mul_(shares[:, 1:]).sum(1)

    def own(self, query: Tensor, key: Tensor, value: Tensor) -> Part:
        """What queries [query, shared, size] see in their own blocks, up to themselves."""
        count, within, _ = key.shape
        tokens, shared, size = query.shape
        filled = query.new_zeros(count * within, shared, size)
        filled[:tokens] = query
        tiles = filled.reshape(count, within, shared, size).transpose(1, 2)
        of_heads = (rows[:, None].expand(-1, shared, -1, -1) for rows in (key, value))
        out, heights = self.fused(tiles, *of_heads, causal=True)
        return out.transpose(1, 2).flatten(0, 1)[:tokens], heights.transpose(1, 2).flatten(0, 1)[:tokens]

    def others(self, query: Tensor, far: Tensor, key: Tensor, value: Tensor) -> Part:
        """What queries see in earlier blocks, for each choice [query x top]; nothing, which weighs nothing, for -1."""
        tokens, shared, size = query.shape
        top = far.shape[0] // tokens
        order = far.argsort(stable=True)
        counts = (far + 1).bincount(minlength=len(key) + 1).tolist()
        rows = query.index_select(0, order[counts[0] :] // top)
        found, heights, start = [], [], 0
        for block, number in enumerate(counts[1:]):
            if number:
                some = rows[start : start + number].reshape(1, 1, number * shared, size)
                out, height = self.fused(some, key[block][None, None], value[block][None, None], causal=False)
                found.append(out.reshape(number, shared, -1))
                heights.append(height.reshape(number, shared))
                start += number
        # Where each choice stands among those that were met; one that is none takes the first, and weighs nothing.
        places = order.argsort() - counts[0]
        none = (places < 0)[:, None]
        places = places.clamp(min=0)
        return (
            self.join(found).index_select(0, places),
            self.join(heights).index_select(0, places).masked_fill(none, LOWEST),
        )
