"""QSA beside the layer of transformers' Qwen4-Exp and in loops."""

import pytest
import torch
from attn_core import Rotary, configure, installed
from attn_core.errors import InvalidValue
from attn_sparse.qsa import Qsa
from attn_testing import Agreement, MechanismLaws
from attn_testing.float64 import in_float64

QSA = Qsa()
OPTIONS = {"index_heads": 16, "index_size": 6, "block": 3, "top": 6, "align": 0.0}
LINEARS = {"key": "k_proj", "value": "v_proj", "output": "o_proj"}
NORMS = {"norm.query_gain": "q_norm", "norm.key_gain": "k_norm"} | {
    "inner.indexer.query_norm.weight": "indexer.q_layernorm",
    "inner.indexer.norm.weight": "indexer.k_layernorm",
}


class TestQsa(MechanismLaws):
    mechanism = "qsa"
    options = {"index_heads": 16, "index_size": 6, "block": 2, "top": 4}


def shared(**settings):
    return {"hidden_size": 32, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8} | settings


@pytest.mark.oracle
def test_it_equals_the_layer_of_transformers_forward_and_gradient(record_property):
    settings = pytest.importorskip("transformers.models.qwen4_exp.configuration_qwen4_exp")
    modeling = pytest.importorskip("transformers.models.qwen4_exp.modeling_qwen4_exp")
    config = settings.Qwen4ExpTextConfig(
        hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_hidden_layers=1,
        indexer_n_heads=16, indexer_kv_heads=1, indexer_head_dim=6, indexer_budget=6, indexer_compress_ratio=3,
        layer_types=["indexed_attention"], rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5,
                         "mrope_section": [1, 1, 0]},
    )  # fmt: skip
    config._attn_implementation = "eager"
    with in_float64():
        theirs, turns = modeling.Qwen4ExpTextAttention(config, 0), modeling.Qwen4ExpTextRotaryEmbedding(config)
        theirs, turns = theirs.double(), turns.double()
        torch.manual_seed(0)
        for weight in theirs.parameters():
            torch.nn.init.normal_(weight, std=0.4)
        ours = QSA.build(configure(QSA, OPTIONS, **shared(rotary=Rotary(fraction=0.5)))).double()
        known = theirs.state_dict()
        query, gate = torch.unflatten(known["q_proj.weight"], 0, (4, 2, 8)).unbind(1)
        index = torch.split(known["indexer.index_qk_proj.weight"], [96, 6])
        state = {f"{mine}.weight": known[f"{other}.weight"] for mine, other in LINEARS.items()}
        state |= {mine: 1 + known[f"{other}.weight"] for mine, other in NORMS.items()}
        state |= {"query.weight": query.flatten(0, 1), "inner.gate.weight": gate.flatten(0, 1)}
        state |= {"inner.indexer.query.weight": index[0], "inner.indexer.key.weight": index[1]}
        ours.load_state_dict(state)
        rows, places = torch.randn(2, 23, 32), torch.arange(23)[None]
        later = torch.ones(23, 23, dtype=torch.bool).triu(1)
        mask = torch.zeros(23, 23).masked_fill(later, torch.finfo(torch.float64).min).expand(2, 1, -1, -1)

        def attend(given):
            turned = turns(given, places.expand(3, 2, -1))
            return theirs(given, [part.expand(2, -1, -1) for part in turned], mask)[0]

        weights = [(getattr(ours, mine).weight, getattr(theirs, LINEARS[mine]).weight) for mine in ("key", "value")]
        weights.append((ours.norm.key_gain, theirs.k_norm.weight))
        same = Agreement(record_property, "qsa", package="transformers Qwen4ExpTextAttention")
        same.functions(ours, attend, rows, tolerance=1e-10, weights=weights)


def test_blocks_of_all_tokens_without_a_gate_are_normalised_attention(record_property):
    plain = installed().mechanisms.get("qk_norm")
    made = plain.build(configure(plain, {"eps": 1e-6}, **shared())).double()
    layer = QSA.build(configure(QSA, OPTIONS | {"top": 24}, **shared())).double()
    layer.load_state_dict(made.state_dict(), strict=False)
    torch.nn.init.zeros_(layer.inner.gate.weight)
    rows = torch.randn(2, 23, 32, dtype=torch.float64)
    same = Agreement(record_property, "qsa", identity="all blocks and open gates are qk_norm")
    same.functions(lambda given: 2 * layer(given), made, rows, tolerance=1e-12)


def test_a_query_reads_its_best_complete_blocks_and_the_open_one():
    layer = QSA.build(configure(QSA, OPTIONS, **shared())).double()
    indexer = layer.inner.indexer
    for norm in (indexer.query_norm, indexer.norm):
        torch.nn.init.normal_(norm.weight)
    rows, unseen = torch.randn(20, 32, dtype=torch.float64), 0
    read = layer.weights(rows[None])[0] > 0
    keys = rows @ indexer.key.weight.T
    for token in range(20):
        queries = indexer.query_norm((indexer.query.weight @ rows[token]).view(16, 6))
        means = [indexer.norm(keys[3 * b : 3 * b + 3].mean(0)) for b in range((token + 1) // 3)]
        worth = [torch.relu(queries @ mean).sum().item() for mean in means]
        best = sorted(range(len(worth)), key=lambda b: -worth[b])[:2]
        expected = [s for s in range(token + 1) if s // 3 in best or s // 3 == (token + 1) // 3]
        unseen += token not in expected
        assert all(read[head, token].nonzero().flatten().tolist() == expected for head in range(4))
    assert unseen, "the block that ends at the query never lost"


@pytest.mark.parametrize(
    ("options", "message"), [({"top": 7}, "top: 7"), ({"block": 0}, "block: 0"), ({"index_size": 2}, "index_size: 2")]
)
def test_sizes_that_do_not_fit_are_refused_by_name(options, message):
    with pytest.raises(InvalidValue, match=message):
        configure(QSA, OPTIONS | options, **shared(rotary=Rotary()))
