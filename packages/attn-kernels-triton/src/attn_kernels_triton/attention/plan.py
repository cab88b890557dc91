"""An attention spec and its inputs as the arguments that all attention kernels share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import triton.language as tl
from attn_core import AttentionInputs, AttentionSpec, Mask
from attn_core.dropout import Dropout
from attn_core.graph_safety import device_cache
from attn_core.kernels.devices import sent
from attn_core.masking import positions, seen_pairs
from attn_core.masks import Band, band_of
from attn_core.modifiers import Alibi, BiasTable, SoftCap
from attn_core.scores import ScaledDot
from torch import Tensor

from attn_kernels_triton.attention.block_lists import Grid, Lists, lists_of, with_map
from attn_kernels_triton.attention.tiles import Sizes
from attn_kernels_triton.attention.varlen import Listed, Text, longest, texts_of, tiles_of
from attn_kernels_triton.checks import FARTHEST
from attn_kernels_triton.kernels.arguments import NO_BLOCKS, NOTHING_DROPPED, Blocks, Dropped, Places, Rule, Shape

LEAST = 16
"""The smallest `far` of a bias: Triton would turn an integer argument of 1 into a constant."""


def bias_of(spec: AttentionSpec, parameters: Mapping[str, Tensor]) -> Tensor | None:
    """The sum of all learned biases [heads, 2 far + 1], float32, or None if there are none.

    They are for distances key - query from -far to far; larger distances use the outermost bias. Gradients flow to the
    tables in `parameters`.
    """
    learned = [modifier for modifier in spec.modifiers if isinstance(modifier, BiasTable)]
    if not learned:
        return None
    far = max(LEAST, *(modifier.far for modifier in learned))
    total: Tensor | None = None
    for modifier in learned:
        table = parameters[f"modifiers.{modifier.kind}.table"].float()
        found = table.t().contiguous()[:, buckets(modifier, far, table.device)]
        total = found if total is None else total + found
    return total


@device_cache(64)
def buckets(modifier: BiasTable, far: int, device: torch.device) -> Tensor:
    """The bucket of every distance from -far to far, int64; cached, because it is the same in every step."""
    # A tensor that is cached in an engine step (inference mode) must be usable in training, too.
    with torch.inference_mode(mode=False):
        return modifier.bucket(torch.arange(-far, far + 1, device=device))


EVERYTHING = Band(None, None)
LARGE_BLOCK, SMALL_BLOCK = 128, 64
SHORT = 1024
"""The number of keys up to which small blocks are used: they fit a mask better, while large ones use the GPU better."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """The arguments that all kernels of a call share.

    `sink` [heads], float32, is None without attention sinks, and `bias`, see `Rule`, is None without learned biases;
    gradients flow to both. `texts` are the packed documents, None if each batch row is one.
    """

    sizes: Sizes
    batch: int
    shape: Shape
    rule: Rule
    places: Places
    lists: Lists | None
    sink: Tensor | None
    bias: Tensor | None
    texts: tuple[Text, ...] | None
    dropped: Dropped

    @property
    def by_query(self) -> Blocks:
        """Block lists for programs that own queries."""
        return NO_BLOCKS if self.lists is None else constant(self.lists.by_query)

    @property
    def by_key(self) -> Blocks:
        """Block lists for programs that own keys."""
        return NO_BLOCKS if self.lists is None else constant(self.lists.by_key)

    @property
    def by_pair(self) -> Blocks:
        """Block lists for programs that look up the block of each pair."""
        if self.lists is None:
            return NO_BLOCKS
        return constant(with_map(self.lists.by_query, self.shape.keys))

    def tiles(self, listed: Listed, device: torch.device) -> tuple[int, Tensor | None]:
        """The number of tiles for each head, and their list if texts are packed."""
        if self.texts is not None:
            found = tiles_of(self.texts, listed, device)
            return len(found), found
        rows = self.shape.keys if listed.by_key else self.shape.queries
        return -(-rows // listed.rows) * self.batch, None


def plan_of(spec: AttentionSpec, operands: AttentionInputs) -> Plan:
    """The plan of an attention call whose operands have been checked."""
    query, key = operands.query, operands.key
    sizes = Sizes(query.dtype, query.shape[-1], operands.value.shape[-1], query.shape[1], key.shape[1])
    has_positions = operands.query_positions is not None or operands.key_positions is not None
    varlen = texts_of(spec.mask, operands)
    band = band_of(spec.mask) if varlen is None else varlen.band
    places = places_of(
        operands, has_positions=has_positions, by_pairs=None if band else spec.mask if has_positions else None
    )
    lists, texts = None, None
    if varlen is not None:
        texts = varlen.texts
        lengths = [longest(text[place] for text in texts) for place in (2, 4)]
        sizes = sizes._replace(queries=lengths[0], keys=lengths[1], varlen=True)
    if band is None and not has_positions:
        size = LARGE_BLOCK if sizes.keys > SHORT else SMALL_BLOCK
        group = spec.heads.query // spec.heads.key_value
        sizes = sizes._replace(block=size)
        lists = lists_of(spec.mask, Grid(sizes.queries, sizes.keys, size), group, query.device)
    sink, bias = sink_of(spec, query, operands.parameters), bias_of(spec, operands.parameters)
    return Plan(
        sizes=sizes._replace(biased=bias is not None, dropped=operands.dropout is not None),
        batch=query.shape[0],
        shape=Shape(spec.heads.query, spec.heads.query // spec.heads.key_value, query.shape[1], key.shape[1]),
        rule=with_learned(rule_of(spec, query, band or EVERYTHING), sink, bias),
        places=places,
        lists=lists,
        sink=sink,
        bias=bias,
        texts=texts,
        dropped=dropped_of(operands),
    )


def dropped_of(operands: AttentionInputs) -> Dropped:
    """The dropout argument of the kernels."""
    dropout = operands.dropout
    if dropout is None:
        return NOTHING_DROPPED
    seed = seed_of(dropout)
    rest = torch.tensor([dropout.offset, dropout.first, dropout.threshold], dtype=torch.int64, device=seed.device)
    return Dropped(torch.cat([seed.view(1), rest]).to(operands.query.device), dropout.scale)


def seed_of(dropout: Dropout) -> Tensor:
    """The dropout seed as an int64 scalar tensor, whose 64 bits the kernels use."""
    return torch.as_tensor(dropout.signed_seed, dtype=torch.int64, device="cpu")


def rule_of(spec: AttentionSpec, query: Tensor, band: Band) -> Rule:
    """The rule that turns the query-key products of a spec into logits, without sinks and learned biases."""
    scale = 1.0
    if isinstance(spec.score, ScaledDot):
        scale = query.shape[-1] ** -0.5 if spec.score.scale is None else spec.score.scale
    rule = Rule(scale=float(scale), left=near(band.left), right=near(band.right))
    for modifier in spec.modifiers:
        if isinstance(modifier, SoftCap):
            rule = rule._replace(cap=float(modifier.cap))
        elif isinstance(modifier, Alibi):
            rule = rule._replace(slopes=slopes_on(tuple(modifier.slopes(spec.heads.query)), query.device))
    return rule


@device_cache(64)
def slopes_on(slopes: tuple[float, ...], device: torch.device) -> Tensor:
    """Slopes [heads], float32, on a device.

    Cached, because a step that copies numbers from the host cannot be captured in a CUDA graph.
    """
    with torch.inference_mode(mode=False):
        return sent(torch.tensor(slopes, dtype=torch.float32), device)


def near(reach: int | None) -> int | None:
    """The reach of a mask, clamped to `FARTHEST`, which no position exceeds."""
    return None if reach is None else min(reach, FARTHEST)


def with_learned(rule: Rule, sink: Tensor | None, bias: Tensor | None) -> Rule:
    """The rule with the logits of sinks [heads] and biases [heads, 2 far + 1], both detached."""
    if bias is not None:
        rule = rule._replace(bias=bias.detach(), far=bias.shape[1] // 2)
    return rule._replace(sinks=None if sink is None else sink.detach())


def sink_of(spec: AttentionSpec, query: Tensor, parameters: Mapping[str, Tensor]) -> Tensor | None:
    """The sink logit of each head, [heads], float32; None for a plain softmax."""
    if spec.distribution.kind == "softmax":
        return None
    logit = parameters.get("distribution.logit")
    if logit is None:
        return query.new_zeros(spec.heads.query, dtype=torch.float32)
    return logit.float()


def places_of(operands: AttentionInputs, *, has_positions: bool, by_pairs: Mask | None) -> Places:
    """Padding, positions and allowed pairs as the kernels read them; `by_pairs` is a mask to evaluate for all pairs."""
    found = Places()
    if operands.key_padding_mask is not None:
        key_padding_mask = operands.key_padding_mask.to(torch.uint8)
        found = found._replace(key_padding_mask=key_padding_mask, keep_batch=stride(key_padding_mask))
    if has_positions:
        query, key = (places.to(torch.int32).contiguous() for places in positions(operands))
        found = found._replace(query=query, query_batch=stride(query), key=key, key_batch=stride(key))
    if by_pairs is not None:
        pairs = seen_pairs(by_pairs, *positions(operands), operands.key_padding_mask).to(torch.uint8).contiguous()
        head = 0 if pairs.shape[1] == 1 else pairs.stride(1)
        found = found._replace(pairs=pairs, pairs_batch=stride(pairs), pairs_head=head)
    return found


def stride(tensor: Tensor) -> int:
    """The stride of the batch axis, 0 if it is broadcast."""
    return 0 if tensor.shape[0] == 1 else tensor.stride(0)


def constant(blocks: Blocks) -> Blocks:
    """The lists with their block size as a compile-time constant."""
    return blocks._replace(size=tl.constexpr(blocks.size))
