"""Attention to blocks that an indexer selects, beside that of transformers' MiniMax-M3 and in loops."""

import pytest
import torch
from attn_core import Rotary, configure, installed
from attn_core.errors import InvalidValue
from attn_sparse.indexed_blocks import IndexedBlocks
from attn_testing import Agreement
from attn_testing.float64 import in_float64

BLOCKS = IndexedBlocks()
OPTIONS = {"index_size": 10, "block": 3, "top": 3, "norm_eps": 1e-6}
LINEARS = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "output": "o_proj"} | {
    "inner.query": "indexer.q_proj",
    "inner.key": "indexer.k_proj",
}
NORMS = {"norm.query_gain": "q_norm.weight", "norm.key_gain": "k_norm.weight"} | {
    "inner.query_norm.weight": "indexer.q_norm.weight",
    "inner.key_norm.weight": "indexer.k_norm.weight",
}


@pytest.mark.oracle
@pytest.mark.parametrize("local", [1, 2])
def test_it_equals_the_layer_of_transformers_forward_and_gradient(record_property, local):
    settings = pytest.importorskip("transformers.models.minimax_m3_vl.configuration_minimax_m3_vl")
    modeling = pytest.importorskip("transformers.models.minimax_m3_vl.modeling_minimax_m3_vl")
    config = settings.MiniMaxM3VLTextConfig(
        hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=8, index_n_heads=2, index_head_dim=10,
        index_block_size=3, index_topk_blocks=3, index_local_blocks=local, layer_types=["minimax_m3_sparse"],
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}, num_hidden_layers=1,
    )  # fmt: skip
    config._attn_implementation = "eager"
    with in_float64():
        theirs, turns = modeling.MiniMaxM3VLAttention(config, 0).double(), modeling.MiniMaxM3VLRotaryEmbedding(config)
        torch.manual_seed(0)
        for weight in theirs.parameters():
            torch.nn.init.normal_(weight, std=0.4)
        shared = {"hidden_size": 32, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
        made = configure(BLOCKS, OPTIONS | {"local": local}, **shared, rotary=Rotary(fraction=0.5))
        ours, known = BLOCKS.build(made).double(), theirs.state_dict()
        state = {f"{mine}.weight": known[f"{other}.weight"] for mine, other in LINEARS.items()}
        ours.load_state_dict(state | {mine: 1 + known[other] for mine, other in NORMS.items()})
        rows, places = torch.randn(2, 23, 32), torch.arange(23)[None]

        def attend(given):
            return theirs(given, turns(given, places), None, position_ids=places)[0]

        weights = [(getattr(ours, mine).weight, getattr(theirs, LINEARS[mine]).weight) for mine in ("query", "value")]
        weights.append((ours.norm.key_gain, theirs.k_norm.weight))
        same = Agreement(record_property, "indexed_blocks", package="transformers MiniMaxM3VLAttention")
        same.functions(ours, attend, rows, tolerance=1e-10, weights=weights)


def test_reading_all_blocks_is_causal_attention(record_property):
    gqa = installed().mechanisms.get("gqa")
    shared = {"hidden_size": 16, "num_heads": 4, "num_kv_heads": 2}
    plain = gqa.build(configure(gqa, **shared)).double()
    layer = BLOCKS.build(configure(BLOCKS, OPTIONS | {"top": 9, "norm_eps": None}, **shared)).double()
    layer.load_state_dict(plain.state_dict(), strict=False)
    rows = torch.randn(2, 23, 16, dtype=torch.float64)
    same = Agreement(record_property, "indexed_blocks", identity="all blocks read are gqa")
    same.functions(layer, plain, rows, tolerance=1e-12)


@pytest.mark.parametrize("local", [1, 3])
def test_a_query_reads_its_newest_blocks_and_the_best_of_the_others(local):
    layer = BLOCKS.build(configure(BLOCKS, OPTIONS | {"local": local}, hidden_size=16, num_heads=4, num_kv_heads=2))
    layer, rows = layer.double(), torch.randn(20, 16, dtype=torch.float64)
    read, inner = layer.weights(rows[None])[0] > 0, layer.inner
    keys = inner.key_norm(inner.key(rows))
    for token in range(20):
        for group in range(2):
            query = inner.query_norm(inner.query(rows[token]).view(2, -1)[group])
            worth = [max((query @ keys[j]).item() for j in range(3 * b, min(3 * b + 3, token + 1)))
                     for b in range(token // 3 + 1)]  # fmt: skip
            near = list(range(max(0, token // 3 - local + 1), token // 3 + 1))
            others = sorted(set(range(len(worth))) - set(near), key=lambda b: -worth[b])
            chosen = {*near, *others[: 3 - local]}
            expected = [j for j in range(token + 1) if j // 3 in chosen]
            for head in (2 * group, 2 * group + 1):
                assert read[head, token].nonzero().flatten().tolist() == expected


@pytest.mark.parametrize("padded", [0, 4])
def test_the_indexer_learns_how_blocks_share_the_attention_and_no_other_weight_does(padded):
    """KL(p ‖ softmax(best score / √size)) over the chosen blocks but a query's own, in loops."""
    shared = {"hidden_size": 16, "num_heads": 4, "num_kv_heads": 2}
    layer = BLOCKS.build(configure(BLOCKS, OPTIONS | {"align": 2.0}, **shared)).double().train()
    rows, inner, tokens = torch.randn(1, 20, 16, dtype=torch.float64), layer.inner, 20 - padded
    kept = torch.arange(20)[None] < tokens
    weights = layer.weights(rows, key_padding_mask=kept)[0].detach().unflatten(0, (2, 2)).mean(1)
    keys, loss = inner.key_norm(inner.key(rows[0])), torch.zeros((), dtype=torch.float64)
    for token in range(tokens):
        for group in range(2):
            query = inner.query_norm(inner.query(rows[0, token]).view(2, -1)[group])
            shares = {b: weights[group, token, 3 * b : 3 * b + 3].sum() for b in range(token // 3)}
            chosen = [b for b, share in shares.items() if share > 0]
            if chosen:
                worth = torch.stack([(keys[3 * b : 3 * b + 3] @ query).max() for b in chosen]) * 10**-0.5
                target = torch.stack([shares[b] for b in chosen]) / sum(shares[b] for b in chosen)
                loss = loss + (target * (target.log() - worth.log_softmax(0))).sum() / (2 * tokens)
    layer(rows, key_padding_mask=kept)
    found = inner.take_auxiliary_loss()
    torch.testing.assert_close(found, 2.0 * loss)
    learned = list(inner.parameters())
    gradients = torch.autograd.grad(found, learned, retain_graph=True), torch.autograd.grad(2.0 * loss, learned)
    for mine, other in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, other)
    others = [weight for name, weight in layer.named_parameters() if not name.startswith("inner.")]
    assert all(grad is None for grad in torch.autograd.grad(found, others, allow_unused=True))


@pytest.mark.parametrize(
    ("options", "message"),
    [({"local": 4}, "local: 4"), ({"block": 0}, "block: 0"), ({"index_size": 2}, "index_size: 2")],
)
def test_sizes_that_do_not_fit_are_refused_by_name(options, message):
    with pytest.raises(InvalidValue, match=message):
        configure(BLOCKS, OPTIONS | options, hidden_size=16, num_heads=4, rotary=Rotary())
