"""Attention of the softmax family on a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from attn_core import Anything, AtMost, Condition, Kernel, OneOf, Operands, Problem

from attn_kernels_triton.machine import absence

if TYPE_CHECKING:
    from attn_core import AttentionSpec
    from torch import Tensor


@dataclass(frozen=True)
class InOrder:
    """A tuple with each of these words at most once, in this order."""

    words: tuple[str, ...]

    def refuses(self, value: Any) -> str | None:
        """Why the tuple is refused, or None if it is accepted."""
        places = [self.words.index(word) if word in self.words else -1 for word in value]
        if -1 not in places and places == sorted(set(places)):
            return None
        return f"{value!r} is not some of {', '.join(self.words)}, each once and in this order"


class TritonAttend(Kernel):
    """Never holds the scores; skips what nobody sees, and does not ask where everything is seen."""

    name = "triton_attend"
    summary = "fused attention on a GPU, any mask, with gradients"
    accepts: ClassVar[Mapping[str, Condition]] = {
        "score": OneOf("scaled_dot", "dot"),
        "modifiers": InOrder(("soft_cap", "alibi")),
        "distribution": OneOf("softmax", "softmax_one", "sink"),
        "mask": Anything(),
        "key_size": AtMost(256),
        "value_size": AtMost(256),
        "query_heads": Anything(),
        "key_value_heads": Anything(),
        "head_masks": Anything(),
        "length_bound": Anything(),
        "padded": Anything(),
        "placed": Anything(),
        "gradients": Anything(),
        "dtype": OneOf("float32", "bfloat16", "float16"),
        "device": OneOf("cuda"),
    }

    def available(self) -> str | None:
        """Why it cannot run on this machine, or None if it can."""
        return absence()

    def cost(self, problem: Problem) -> float:
        """What is left of the pairs, at a fifth of the plain computation's time for each.

        An estimate: the plain computation writes and reads every score, which on a GPU is all of its time.
        """
        return 0.02 + 0.18 * problem.density

    def run(self, spec: AttentionSpec, operands: Operands) -> Tensor:
        """The output [batch, query, heads, value_size]; see `attention.attend`."""
        from attn_kernels_triton.attention.attend import attend

        out: Tensor = attend(spec, operands)
        return out
