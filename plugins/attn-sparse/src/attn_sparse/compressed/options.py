"""The options of attention to a window and to compressed entries, and the sizes that follow from them."""

from __future__ import annotations

from dataclasses import dataclass

from attn_core import MechanismConfig
from attn_core.checks import require_number, require_whole
from attn_core.errors import InvalidValue


@dataclass(frozen=True, kw_only=True)
class CompressedConfig(MechanismConfig):
    """A query attends to the last `window` tokens, and to one compressed entry for each `every` tokens; None for none.

    With `overlap` an entry also mixes the tokens of the block before its own. Of the entries those with the `top` best
    index scores are attended to, which an indexer of `index_heads` heads of `index_size` elements gives, or all if it
    is None. Queries are projected through `query_latent` elements, and the output through `output_latent` elements for
    each of `output_groups` groups of heads. `norm_eps` is that of all norms. `align` is the weight of the training loss
    that aligns the softmax of index scores with the attention that entries get.
    """

    window: int = 128
    every: int | None = 4
    overlap: bool = True
    top: int | None = 512
    index_heads: int = 4
    index_size: int = 32
    query_latent: int = 256
    output_groups: int = 4
    output_latent: int = 128
    norm_eps: float = 1e-6
    align: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("window", "index_heads", "index_size", "query_latent", "output_groups", "output_latent"):
            require_whole(name, getattr(self, name), ge=1)
        for name, unit in (("every", "tokens"), ("top", "entries")):
            require_whole(name, getattr(self, name), ge=2 if name == "every" else 1, unit=unit, optional=True)
        require_number("norm_eps", self.norm_eps, gt=0)
        require_number("align", self.align, ge=0)
        if self.rotary is not None and int(self.size * self.rotary.fraction) % 2:
            given = f"{self.rotary.fraction} of head_size {self.size}"
            raise InvalidValue.of("rotary", given, "an even number of elements, as they are rotated in pairs")
        if self.heads_width % self.output_groups:
            allowed = f"a divisor of the {self.heads_width} elements of all heads"
            raise InvalidValue.of("output_groups", self.output_groups, allowed)

    @property
    def size(self) -> int:
        """The number of elements of a head, and of an entry, which is key and value at once."""
        return self.head_layout.key_size

    @property
    def heads_width(self) -> int:
        """The number of elements of the outputs of all heads."""
        return self.num_heads * self.size

    @property
    def parts(self) -> int:
        """How often a token is projected for compressed entries: for its own and, with `overlap`, the next one."""
        return 1 + self.overlap

    @property
    def indexed(self) -> bool:
        """Whether entries are selected."""
        return self.every is not None and self.top is not None

    def turned(self, size: int) -> int:
        """How many of the last of `size` elements rotary positions are applied to: as many as of a head."""
        return 0 if self.rotary is None else min(int(self.size * self.rotary.fraction), size // 2 * 2)

    def entries(self, tokens: int) -> int:
        """The number of entries that `tokens` tokens complete."""
        return 0 if self.every is None else tokens // self.every

    def entries_seen(self, tokens: int, most: int | None = None) -> int:
        """The number of pairs of the first `tokens` queries and entries before them, at most `most` for each query."""
        if self.every is None:
            return 0
        if most is not None and tokens > self.every * most:
            return self.entries_seen(self.every * most) + (tokens - self.every * most) * most
        blocks, rest = divmod(tokens, self.every)
        return self.every * blocks * (blocks - 1) // 2 + blocks * (rest + 1)
