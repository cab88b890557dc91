"""Sparse mechanisms against other people's implementations of them, forward and gradient."""

import pytest
import torch
from attn_core import AttentionInputs, AttentionSpec, Causal, Heads, Window, configure, installed
from attn_core.masking import seen_pairs
from attn_core.masks import BigBird, PerHead, Segments, Tree, mask_mod
from attn_testing.problems import MASKS
from attn_variants.compute import plain
from attn_variants.compute.block_sparse.attend import attend
from torch.nn.functional import scaled_dot_product_attention

pytestmark = pytest.mark.oracle

WIDTH, HEADS = 16, 4


def layer_of(name, options=None, **shared):
    """A float64 layer whose output projection changes nothing."""
    mechanism = installed().mechanisms.get(name)
    layer = mechanism.build(configure(mechanism, options, hidden_size=WIDTH, num_heads=HEADS, **shared)).double()
    with torch.no_grad():
        layer.output.weight.copy_(torch.eye(WIDTH))
    return layer


def rows_of(length):
    return torch.randn(2, length, WIDTH, dtype=torch.float64)


def same_weights(layer, other, names):
    with torch.no_grad():
        for own, their in names:
            other.get_submodule(their).weight.copy_(layer.get_submodule(own).weight)
    return [(layer.get_submodule(own).weight, other.get_submodule(their).weight) for own, their in names]


@pytest.mark.parametrize("places", [(0,), (0, 5, 11), ()], ids=str)
def test_longformer_equals_that_of_transformers(agrees, places):
    from transformers import LongformerConfig
    from transformers.models.longformer.modeling_longformer import LongformerSelfAttention

    layer = layer_of("longformer", {"window": 4, "global_positions": places}, causal=False)
    config = LongformerConfig(
        hidden_size=WIDTH, num_attention_heads=HEADS, attention_window=[4], attention_probs_dropout_prob=0.0
    )
    other = LongformerSelfAttention(config, 0).double()
    for name in ("query", "key", "value", "query_global", "key_global", "value_global"):
        torch.nn.init.zeros_(other.get_submodule(name).bias)
    names = [(name, name) for name in ("query", "key", "value")]
    if places:
        names += [(f"inner.{name}", f"{name}_global") for name in ("query", "key", "value")]
    pairs = same_weights(layer, other, names)
    mask = torch.zeros(2, 16, dtype=torch.float64)
    mask[:, list(places)] = 10000.0

    def theirs(rows):
        return other(rows, mask, mask < 0, mask > 0, bool(places))[0]

    # Its softmax is in float32 whatever the inputs are.
    oracle = agrees("longformer", package="transformers LongformerSelfAttention")
    oracle.functions(layer, theirs, rows_of(16), weights=pairs, tolerance=2e-6)


@pytest.mark.parametrize(("block", "random"), [(2, 1), (3, 2)])
def test_big_bird_equals_that_of_transformers_with_the_same_random_blocks(agrees, block, random):
    import numpy as np
    from transformers import BigBirdConfig
    from transformers.models.big_bird.modeling_big_bird import BigBirdBlockSparseAttention, BigBirdModel

    blocks = 12
    length = blocks * block
    layer = layer_of("bigbird", {"block": block, "random": random, "seed": 5}, causal=False)
    bound = layer.spec.mask.over(length)
    drawn = []
    for head in range(HEADS):
        mask = bound.of_head(head)
        rows = []
        for row in range(1, blocks - 1):
            columns = {key // block for key in range(length) if mask.allows(row * block, key)}
            rows.append(sorted(columns - {0, blocks - 1, row - 1, row, row + 1}))
        drawn.append(np.array(rows))
    config = BigBirdConfig(
        hidden_size=WIDTH,
        num_attention_heads=HEADS,
        block_size=block,
        num_random_blocks=random,
        use_bias=False,
        attention_probs_dropout_prob=0.0,
    )
    # In evaluation its random blocks are all block 0.
    other = BigBirdBlockSparseAttention(config).double().train()
    other._bigbird_block_rand_mask_with_head = lambda **_: drawn
    pairs = same_weights(layer, other, [(name, name) for name in ("query", "key", "value")])
    whole, band, start, end = BigBirdModel.create_masks_for_block_sparse_attn(
        torch.ones(2, length, dtype=torch.float64), block
    )

    def theirs(rows):
        return other(rows, band, start, end, whole, whole)[0]

    oracle = agrees("bigbird", package="transformers BigBirdBlockSparseAttention")
    oracle.functions(layer, theirs, rows_of(length), weights=pairs, tolerance=1e-10)


@pytest.mark.parametrize("causal", [True, False])
def test_block_local_attention_equals_that_of_local_attention(agrees, causal):
    from local_attention import LocalAttention

    layer = layer_of("block_local", {"block": 4}, causal=causal)
    other = LocalAttention(window_size=4, causal=causal, use_rotary_pos_emb=False)

    def theirs(rows):
        query, key, value = (part.transpose(1, 2) for part in layer.project(rows, None))
        return other(query, key, value).transpose(1, 2).flatten(-2)

    agrees("block_local", package="local-attention LocalAttention").functions(
        layer, theirs, rows_of(20), tolerance=1e-12
    )


@pytest.mark.parametrize(("name", "options"), [("sliding_window", {"window": 5}), ("chunked", {"chunk": 5})])
def test_windows_and_chunks_are_those_of_transformers(agrees, name, options):
    from transformers.masking_utils import chunked_overlay, sliding_window_overlay

    overlay = (
        sliding_window_overlay(5) if name == "sliding_window" else chunked_overlay(5, torch.zeros(1, dtype=torch.int64))
    )
    seen = torch.tensor(
        [[key <= query and bool(overlay(0, 0, query, key)) for key in range(23)] for query in range(23)]
    )
    layer = layer_of(name, options)

    def theirs(rows):
        parts = (part.transpose(1, 2) for part in layer.project(rows, None))
        return scaled_dot_product_attention(*parts, attn_mask=seen).transpose(1, 2).flatten(-2)

    agrees(name, package=f"transformers {overlay.__qualname__.partition('.')[0]}").functions(
        layer, theirs, rows_of(23), tolerance=1e-12
    )


def test_flex_attention_computes_what_masks_say():
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    for queries, keys, mask in every_mask():
        spec = spec_with(mask)
        query, memory = torch.randn(1, queries, HEADS, 8), torch.randn(2, 1, keys, HEADS, 8)
        operands = AttentionInputs(query=query, key=memory[0], value=memory[1])
        block_mask = create_block_mask(mask_mod(mask, queries, keys), 1, HEADS, queries, keys, device="cpu")
        turned = (rows.transpose(1, 2) for rows in (operands.query, operands.key, operands.value))
        out = flex_attention(*turned, block_mask=block_mask).transpose(1, 2)
        assert torch.allclose(out, plain.attend(spec, operands), rtol=0, atol=1e-5), mask


def every_mask():
    per_head = PerHead(tuple(Window(left=2 + head, dilation=1 + head % 2) for head in range(HEADS)))
    for mask in (*MASKS.values(), per_head, BigBird(block=1, random=1, number_of_heads=HEADS), per_head & Causal()):
        yield 9, 9, mask
        yield 4, 9, mask


def spec_with(mask):
    return AttentionSpec(heads=Heads(query=HEADS, key_value=HEADS, key_size=8, value_size=8), mask=mask)


@pytest.mark.parametrize("mask", [Segments((3, 1, 5)) & Causal(), Tree((-1, 0, 0, 2, 1), context=4)], ids=str)
def test_masks_given_to_torch_give_the_same(mask):
    tokens = torch.randn(3, 2, 9, HEADS, 8, dtype=torch.float64)
    operands = AttentionInputs(query=tokens[0], key=tokens[1], value=tokens[2])
    places = torch.arange(9)[None]
    query, key, value = tokens.transpose(2, 3)
    expected = scaled_dot_product_attention(query, key, value, attn_mask=seen_pairs(mask, places, places))
    assert torch.allclose(attend(spec_with(mask), operands), expected.transpose(1, 2), rtol=0, atol=1e-12)
