"""Attention with fixed sparsity patterns: windows, blocks, strides and their unions."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from functools import reduce
from typing import ClassVar

from attn_core import AttentionSpec, Causal, DeclaredMechanism, Mask, MechanismConfig, Paper, Window
from attn_core.checks import checked, require_choice, require_whole
from attn_core.errors import InvalidValue
from attn_core.masks import BigBird, Chunked, ChunkRing, Neighbourhood, NeighbourhoodGrid, PerHead, Summaries
from attn_core.masks import Fixed as FixedMask
from attn_core.masks import Strided as StridedMask

from attn_variants.mechanisms.common import (
    DECODER,
    ENCODER,
    GROUPED_SELF,
    PATTERNS,
    ValueSizeConfig,
    heads_of,
    whole_numbers,
    window_mask,
)


class SlidingWindow(DeclaredMechanism):
    """Scaled dot-product attention to the nearest positions only; the cache is a ring buffer of `window` tokens."""

    name = "sliding_window"
    summary = "attention to the nearest positions only"
    used_by = ("Mistral 7B", "Phi-3", "ModernBERT")
    paper = Paper(
        title="Longformer: The Long-Document Transformer", authors="Beltagy et al.", year=2020, arxiv="2004.05150"
    )
    equation = (
        r"O = \mathrm{softmax}\left(\frac{Q K^\top}{\sqrt{d_k}} + M\right) V,\quad"
        r" M_{ij} = 0 \text{ if } 0 \le i - j < w \text{ else } -\infty"
    )
    sketch: ClassVar = {"window": 4}
    capabilities = GROUPED_SELF

    @dataclass(frozen=True, kw_only=True)
    class Config(ValueSizeConfig):
        """`window` is the number of visible tokens: if causal, the query's own and `window - 1` before it, as in
        Mistral; else half of `window` on either side of the query's own, as in Longformer. `value_size` is the size of
        the values of a head, `head_dim` by default."""

        window: int = checked(256, require_whole, ge=1, unit="tokens")

    def spec(self, config: MechanismConfig) -> AttentionSpec:
        """The attention spec; raises `InvalidValue` unless the key/value heads divide the heads."""
        window = self.Config.of(config).window
        return AttentionSpec(heads=heads_of(config), mask=window_mask(config, window), rotary=config.rotary)


class DilatedWindow(DeclaredMechanism):
    """A sliding window over every d-th position, with a dilation d per head.

    The cache reaches back as far as the window of the most dilated head.
    """

    name = "dilated_window"
    summary = "sliding windows with gaps (dilation), which may differ between heads"
    paper = Paper(
        title="Longformer: The Long-Document Transformer", authors="Beltagy et al.", year=2020, arxiv="2004.05150"
    )
    equation = (
        r"O_h = \mathrm{softmax}\left(\frac{Q_h K_h^\top}{\sqrt{d_k}} + M_h\right) V_h,\quad"
        r" M_{h,ij} = 0 \text{ if } d_h \mid i - j \text{ and } |i - j| \le \tfrac{w}{2} d_h \text{ else } -\infty"
    )
    sketch: ClassVar = {"window": 3}
    capabilities = GROUPED_SELF

    @dataclass(frozen=True, kw_only=True)
    class Config(MechanismConfig):
        """`window` is the number of visible tokens, as in 'sliding_window', in steps of the dilation.

        `dilations` are those of the heads in turn, 1 for none: head h has `dilations[h % len(dilations)]`.
        """

        window: int = checked(256, require_whole, ge=1, unit="tokens")
        dilations: tuple[int, ...] = checked((1, 2), whole_numbers, 1)

        def __post_init__(self) -> None:
            super().__post_init__()
            if not self.dilations:
                raise InvalidValue.of("dilations", self.dilations, "at least one")

    def spec(self, config: MechanismConfig) -> AttentionSpec:
        """The attention spec; raises `InvalidValue` unless the key/value heads divide the heads."""
        options = self.Config.of(config)
        windows = [self.window(options.window, step, causal=config.causal) for step in options.dilations]
        masks = tuple(windows[head % len(windows)] for head in range(config.num_heads))
        mask = masks[0] if len(set(masks)) == 1 else PerHead(masks)
        return AttentionSpec(heads=config.head_layout, mask=mask, rotary=config.rotary)

    @staticmethod
    def window(size: int, dilation: int, *, causal: bool) -> Mask:
        """The window of one head."""
        left, right = (size - 1, 0) if causal else (size // 2, size // 2)
        return Window(left=left, right=right, dilation=dilation)


class BlockLocalAttention(DeclaredMechanism):
    """A query sees its own block and the neighbouring blocks; if causal, its own up to itself and those before."""

    name = "block_local"
    summary = "attention to a query's own block and the adjacent ones"
    paper = Paper(title="Image Transformer", authors="Parmar et al.", year=2018, arxiv="1802.05751")
    equation = (
        r"O = \mathrm{softmax}\left(\frac{Q K^\top}{\sqrt{d_k}} + M\right) V,\quad"
        r" M_{ij} = 0 \text{ if } |\lfloor i/b \rfloor - \lfloor j/b \rfloor| \le r \text{ else } -\infty"
    )
    sketch: ClassVar = {"block": 3}
    capabilities = GROUPED_SELF

    @dataclass(frozen=True, kw_only=True)
    class Config(MechanismConfig):
        """`block` b is the number of tokens of a block; `reach` r, the number of blocks before (and, unless causal,
        after) its own that a query sees."""

        block: int = checked(128, require_whole, ge=1, unit="tokens")
        reach: int = checked(1, require_whole, ge=0)

    def spec(self, config: MechanismConfig) -> AttentionSpec:
        """The attention spec; raises `InvalidValue` unless the key/value heads divide the heads."""
        options = self.Config.of(config)
        ahead = 0 if config.causal else options.reach
        near: Mask = Chunked(size=options.block, back=options.reach, ahead=ahead)
        mask = near & Causal() if config.causal else near
        return AttentionSpec(heads=config.head_layout, mask=mask, rotary=config.rotary)


class ChunkedAttention(DeclaredMechanism):
    """A query sees only its own chunk, up to itself if causal; the cache is a ring buffer of one chunk."""

    name = "chunked"
    summary = "attention within chunks of a fixed size"
    used_by = ("Llama 4",)
    paper = Paper(
        title="The Llama 4 herd: The beginning of a new era of natively multimodal AI innovation",
        authors="Meta AI",
        year=2025,
    )
    equation = (
        r"O = \mathrm{softmax}\left(\frac{Q K^\top}{\sqrt{d_k}} + M\right) V,\quad"
        r" M_{ij} = 0 \text{ if } \lfloor i/c \rfloor = \lfloor j/c \rfloor \text{ and } j \le i \text{ else } -\infty"
    )
    sketch: ClassVar = {"chunk": 4}
    capabilities = GROUPED_SELF

    @dataclass(frozen=True, kw_only=True)
    class Config(MechanismConfig):
        """`chunk` c is the number of tokens of a chunk, 8192 in Llama 4."""

        chunk: int = checked(8192, require_whole, ge=1, unit="tokens")

    def spec(self, config: MechanismConfig) -> AttentionSpec:
        """The attention spec; raises `InvalidValue` unless the key/value heads divide the heads."""
        chunk = self.Config.of(config).chunk
        own: Mask = Chunked(size=chunk)
        mask = own & Causal() if config.causal else own
        return AttentionSpec(heads=config.head_layout, mask=mask, rotary=config.rotary)


class ChunkRingAttention(DeclaredMechanism):
    """A query sees its own chunk and those before it, in a ring: the last chunk precedes the first.

    These are the local attention layers that alternate with LSH layers in the Reformer's code.
    """

    name = "chunk_ring"
    summary = "attention to a query's own chunk and the ones before it, with the chunks in a ring"
    paper = Paper(title="Reformer: The Efficient Transformer", authors="Kitaev et al.", year=2020, arxiv="2001.04451")
    equation = (
        r"O = \mathrm{softmax}\left(\frac{Q K^\top}{\sqrt{d_k}} + M\right) V,\quad"
        r" M_{ij} = 0 \text{ if } (\lfloor i/c \rfloor - \lfloor j/c \rfloor) \bmod \lceil n/c \rceil \le r"
        r" \text{ else } -\infty"
    )
    sketch: ClassVar = {"chunk": 3}
    capabilities = ENCODER

    @dataclass(frozen=True, kw_only=True)
    class Config(MechanismConfig):
        """`chunk` c is the number of tokens of a chunk; `reach` r, the number of chunks before its own that a query
        sees."""

        chunk: int = checked(64, require_whole, ge=1, unit="tokens")
        reach: int = checked(1, require_whole, ge=0)

    def spec(self, config: MechanismConfig) -> AttentionSpec:
        """The spec; raises `Incompatible` if causal, `InvalidValue` unless the key/value heads divide the heads."""
        options = self.Config.of(config)
        mask = ChunkRing(size=options.chunk, back=options.reach)
        return AttentionSpec(heads=config.head_layout, mask=mask, rotary=config.rotary)


MOST_STEPS = 8
"""The most steps of strided attention: a million tokens need a stride of 6 in 8, and each more doubles the time."""


SPARSE_TRANSFORMER = Paper(
    title="Generating Long Sequences with Sparse Transformers", authors="Child et al.", year=2019, arxiv="1904.10509"
)


class StridedAttention(DeclaredMechanism):
    """Attends to the last l positions and every l-th one before; for l near √n, any earlier one is two steps away.

    All keys are cached, as different queries see different keys. Suited to periodic inputs, such as rows of pixels; for
    text the paper prefers 'fixed'.
    """

    name = "strided"
    summary = "attention to the latest positions and every l-th position before them"
    paper = SPARSE_TRANSFORMER
    equation = (
        r"A^{(1)}_i = \{\max(0, i - l), \dots, i\},\quad A^{(2)}_i = \{j \le i : (i - j) \bmod l = 0\},\quad"
        r" o_i = \mathrm{softmax}\left(\frac{q_i K_{A_i}^\top}{\sqrt{d_k}}\right) V_{A_i}"
    )
    sketch: ClassVar = {"stride": 3}
    capabilities = DECODER

    @dataclass(frozen=True, kw_only=True)
    class Config(MechanismConfig):
        """`stride` l is the stride in tokens, near the p-th root of the length, where p is the number of `steps` in
        which any earlier position is reached; of its p patterns, A^m has l positions at distances of l^(m-1), and the
        last all of them. `pattern` is "union", "heads" (A¹ to A^p in turn), "local" (A¹) or "column" (A^p)."""

        stride: int = checked(128, require_whole, ge=1, unit="tokens")
        pattern: str = checked("union", require_choice, PATTERNS)
        steps: int = checked(2, require_whole, ge=2, le=MOST_STEPS)

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.stride ** (self.steps - 1) >= 1 << 63:
                raise InvalidValue.of("steps", self.steps, f"fewer, for distances below 2⁶³ at stride {self.stride}")

    def spec(self, config: MechanismConfig) -> AttentionSpec:
        """The spec; raises `Incompatible` unless causal, `InvalidValue` unless the key/value heads divide the heads."""
        options = self.Config.of(config)
        stride, steps = options.stride, options.steps
        near = [Window(left=stride, dilation=stride**step) for step in range(steps - 1)]
        patterns: list[Mask] = [*near, Window(left=None, dilation=stride ** (steps - 1))]
        union: Mask = StridedMask(stride) if steps == 2 else reduce(operator.or_, patterns)
        masks: dict[str, Mask] = {"union": union, "local": patterns[0], "column": patterns[-1]}
        mask = masks.get(options.pattern)
        if mask is None:
            mask = PerHead(tuple(patterns[head % steps] for head in range(config.num_heads)))
        return AttentionSpec(heads=config.head_layout, mask=mask, rotary=config.rotary)


class FixedAttention(DeclaredMechanism):
    """Attends to a query's own block and to the last c cells of every earlier block, which summarise it.

    With a context length n, `max_seq_len`, a decoder caches the last l tokens and the c n/l summary cells; without one,
    all tokens.
    """

    name = "fixed"
    summary = "attention to a query's own block and to the last positions of every earlier block"
    paper = SPARSE_TRANSFORMER
    equation = (
        r"A^{(1)}_i = \{j \le i : \lfloor j/l \rfloor = \lfloor i/l \rfloor\},\quad"
        r" A^{(2)}_i = \{j \le i : j \bmod l \ge l - c\},\quad"
        r" o_i = \mathrm{softmax}\left(\frac{q_i K_{A_i}^\top}{\sqrt{d_k}}\right) V_{A_i}"
    )
    sketch: ClassVar = {"block": 4, "summaries": 1}
    capabilities = DECODER

    @dataclass(frozen=True, kw_only=True)
    class Config(MechanismConfig):
        """`block` l is the number of tokens of a block; `summaries` c, that of its summary cells: 8, 16 or 32 for
        blocks of 128 or 256, as the paper advises; `pattern` is "union", "heads", "local" (A¹) or "column" (A²).

        With "heads", even heads have A¹, and odd heads A², in turn with the last c cells of a block, the c before them,
        and so on.
        """

        block: int = checked(128, require_whole, ge=1, unit="tokens")
        summaries: int = checked(8, require_whole, ge=1, unit="tokens")
        pattern: str = checked("union", require_choice, PATTERNS)

        def __post_init__(self) -> None:
            super().__post_init__()
            FixedMask(block=self.block, summaries=self.summaries)

    def spec(self, config: MechanismConfig) -> AttentionSpec:
        """The spec; raises `Incompatible` unless causal, `InvalidValue` unless the key/value heads divide the heads."""
        options = self.Config.of(config)
        both = FixedMask(block=options.block, summaries=options.summaries)
        masks: dict[str, Mask] = {"union": both, "local": both.local, "column": both.column}
        mask = masks.get(options.pattern)
        if mask is None:
            mask = PerHead(tuple(self.of_head(both, head) for head in range(config.num_heads)))
        return AttentionSpec(heads=config.head_layout, mask=mask, rotary=config.rotary)

    @staticmethod
    def of_head(both: FixedMask, head: int) -> Mask:
        """The mask of one head with the pattern "heads"."""
        if head % 2 == 0:
            return both.local
        shift = head // 2 % (both.block // both.summaries)
        return Summaries(block=both.block, cells=both.summaries, shift=shift)


BIG_BIRD = ("window", "global", "random")
"""The parts of BigBird's mask."""


class BigBirdAttention(DeclaredMechanism):
    """Blocks of tokens attend to their neighbours, to the first and the last block, and to random blocks per head.

    Sequences of up to (5 + 2 random) blocks have full attention, as in the authors' code; the last block may be shorter
    than the others. The random blocks depend on the head, the length and `seed`, by default the index of the layer, so
    that the layers of an encoder see different blocks, as in the authors' code.
    """

    name = "bigbird"
    summary = "attention to a window of blocks, global first and last blocks, and random blocks"
    paper = Paper(
        title="Big Bird: Transformers for Longer Sequences", authors="Zaheer et al.", year=2020, arxiv="2007.14062"
    )
    equation = (
        r"o_i = \mathrm{softmax}\left(\frac{q_i K_{A_i}^\top}{\sqrt{d_k}}\right) V_{A_i},\quad"
        r" A_i = \{j : |\beta_i - \beta_j| \le 1 \text{ or } \beta_i \in \{0, m\} \text{ or } \beta_j \in \{0, m\}"
        r" \text{ or } \beta_j \in R_h(\beta_i)\},\quad \beta_i = \lfloor i/b \rfloor"
    )
    sketch: ClassVar = {"block": 1, "random": 1}
    capabilities = ENCODER

    @dataclass(frozen=True, kw_only=True)
    class Config(MechanismConfig):
        """`block` is the number of tokens of a block; `random`, the number of random blocks per block of queries and
        head, drawn from `seed`, by default the index of the layer. `parts` are those of "window", "global" and "random"
        that the mask has (table 1 of the paper); without the window a query sees its own block."""

        block: int = checked(64, require_whole, ge=1, unit="tokens")
        random: int = checked(3, require_whole, ge=0)
        seed: int | None = checked(None, require_whole, ge=0, optional=True)
        parts: tuple[str, ...] = BIG_BIRD

        def __post_init__(self) -> None:
            super().__post_init__()
            listed = isinstance(self.parts, list | tuple)
            if not listed or any(part not in BIG_BIRD or self.parts.count(part) > 1 for part in self.parts):
                raise InvalidValue.of("parts", self.parts, f"a list of different ones of {', '.join(BIG_BIRD)}")
            object.__setattr__(self, "parts", tuple(self.parts))

    def spec(self, config: MechanismConfig) -> AttentionSpec:
        """The spec; raises `Incompatible` if causal, `InvalidValue` unless the key/value heads divide the heads."""
        options = self.Config.of(config)
        mask = BigBird(
            block=options.block,
            random=options.random if "random" in options.parts else 0,
            seed=config.layer if options.seed is None else options.seed,
            number_of_heads=config.num_heads,
            window="window" in options.parts,
            ends="global" in options.parts,
        )
        return AttentionSpec(heads=config.head_layout, mask=mask, rotary=config.rotary)


class NeighborhoodAttention(DeclaredMechanism):
    """Every query sees its k nearest positions; at the edges the neighbourhood is shifted, not truncated.

    In one dimension, where sequences shorter than k tokens have full attention, or in a 2-D grid that the sequence
    fills row by row.
    """

    name = "neighborhood"
    summary = "attention to exactly the k nearest positions, at the edges too"
    paper = Paper(title="Neighborhood Attention Transformer", authors="Hassani et al.", year=2023, arxiv="2204.07143")
    equation = (
        r"o_i = \mathrm{softmax}\left(\frac{q_i K_{\rho(i)}^\top}{\sqrt{d_k}}\right) V_{\rho(i)},\quad"
        r" \rho(i) = \{s, \dots, s + k - 1\},\quad s = \min(\max(i - \lfloor k/2 \rfloor, 0), n - k)"
    )
    sketch: ClassVar = {"size": 5}
    capabilities = ENCODER

    @dataclass(frozen=True, kw_only=True)
    class Config(MechanismConfig):
        """`size` k is that of the neighbourhood; `dilation`, that between its positions, 1 for none (Hassani and Shi
        2022).

        `grid` is None, or the (rows, columns) of a 2-D grid, in which a neighbourhood has k² cells.
        """

        size: int = checked(127, require_whole, ge=1, unit="tokens")
        dilation: int = checked(1, require_whole, ge=1, unit="tokens")
        grid: tuple[int, ...] | None = None

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.grid is not None:
                object.__setattr__(self, "grid", whole_numbers("grid", self.grid, 1))
                if len(self.grid) != 2:
                    raise InvalidValue.of("grid", self.grid, "two numbers: rows and columns")

    def spec(self, config: MechanismConfig) -> AttentionSpec:
        """The spec; raises `Incompatible` if causal, `InvalidValue` unless the key/value heads divide the heads."""
        options = self.Config.of(config)
        mask: Mask = Neighbourhood(size=options.size, dilation=options.dilation)
        if options.grid is not None:
            rows, columns = options.grid
            mask = NeighbourhoodGrid(size=options.size, dilation=options.dilation, rows=rows, columns=columns)
        return AttentionSpec(heads=config.head_layout, mask=mask, rotary=config.rotary)
