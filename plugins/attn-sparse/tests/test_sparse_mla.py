"""Sparse latent attention beside that of transformers' DeepSeek-V3.2, GLM-5 and GLM-5.3, and its own guarantees."""

import importlib

import pytest
import torch
from attn_core import Rotary, Step, configure, installed, state_bytes
from attn_core.errors import InvalidValue
from attn_sparse.sparse_mla import SparseMla
from attn_testing import Agreement
from attn_testing.float64 import in_float64

MLA = SparseMla()
SIZES = {"latent": 12, "query_latent": 20, "rotary_size": 4, "nope_size": 8, "value_size": 6}
INDEX = {"index_heads": 16, "index_size": 10, "top": 5}
NAMES = {
    "query_down": "q_a_proj",
    "query_norm": "q_a_layernorm",
    "query_up": "q_b_proj",
    "latent_norm": "kv_a_layernorm",
    "output": "o_proj",
    "inner.indexer.query": "indexer.wq_b",
    "inner.indexer.key": "indexer.wk",
    "inner.indexer.norm": "indexer.k_norm",
    "inner.indexer.weight": "indexer.weights_proj",
}


POOLED = {"rotary_size": 0, "top": 6, "pool": 3, "norm_eps": 1e-5}


def pair(family, options, keys):
    """The attention of a family of transformers, with weights far from their initial values, and ours with the same."""
    title = {"deepseek_v32": "DeepseekV32", "glm_moe_dsa": "GlmMoeDsa", "glm5_next": "Glm5NextText"}[family]
    settings = importlib.import_module(f"transformers.models.{family}.configuration_{family}")
    modeling = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    sizes = {"kv_lora_rank": 12, "q_lora_rank": 20, "v_head_dim": 6, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8}
    sizes |= {"index_n_heads": 16, "index_head_dim": 10, "index_topk": 5, "num_hidden_layers": 1}
    config = getattr(settings, f"{title}Config")(
        hidden_size=32, num_attention_heads=4, num_key_value_heads=4, **sizes | keys
    )
    config._attn_implementation = "eager"
    theirs, turns = (
        getattr(modeling, f"{title}Attention")(config, 0),
        getattr(modeling, f"{title}RotaryEmbedding", None),
    )
    torch.manual_seed(0)
    for name, weight in theirs.named_parameters():
        torch.nn.init.normal_(weight, mean=float("norm" in name), std=0.4)
    rotary = None if turns is None else Rotary(interleaved=True)
    ours = MLA.build(configure(MLA, SIZES | INDEX | options, hidden_size=32, num_heads=4, rotary=rotary))
    joined, turned = theirs.kv_a_proj_with_mqa.weight.tensor_split([12])
    by_head = theirs.kv_b_proj.weight.unflatten(0, (4, -1)).split([8, 6], dim=1)
    state = {f"{mine}.{leaf}": theirs.state_dict()[f"{other}.{leaf}"] for mine, other in NAMES.items()
             for leaf in ("weight", "bias") if f"{other}.{leaf}" in theirs.state_dict()}  # fmt: skip
    state |= {"latent.weight": joined} | ({} if turns is None else {"rotary_key.weight": turned})
    state |= {f"inner.indexer.{mine}": getattr(theirs.indexer, f"index_kpool_compress_{other}")
              for mine, other in (("pool_gate.weight", "gate"), ("pool_bias", "ape")) if turns is None}  # fmt: skip
    state |= {f"{name}.weight": part.flatten(0, 1) for name, part in zip(("key_up", "value_up"), by_head, strict=True)}
    ours.load_state_dict(state)
    return theirs.double().eval(), ours.double().eval(), turns and turns(config)


@pytest.mark.oracle
@pytest.mark.parametrize(
    ("family", "options", "keys"),
    [
        ("deepseek_v32", {"index_interleaved": False}, {}),
        ("glm_moe_dsa", {"index_interleaved": True}, {}),
        ("glm5_next", POOLED, {"qk_rope_head_dim": 0, "index_topk": 6, "index_kpool": 3}),
    ],
)
def test_it_equals_the_layer_of_transformers_forward_and_gradient(record_property, family, options, keys):
    pytest.importorskip("transformers")
    with in_float64():
        theirs, ours, turns = pair(family, options, keys)
        rows = torch.randn(2, 23, 32)
        places = torch.arange(23)[None]
        mask = torch.zeros(23, 23).masked_fill(torch.ones(23, 23, dtype=torch.bool).triu(1), float("-inf"))

        def attend(given):
            if turns is None:
                return theirs(given, torch.ones(given.shape[:2], dtype=torch.bool))[0]
            return theirs(given, turns(given, places), mask[None, None].expand(2, 1, -1, -1), position_ids=places)[0]

        weights = [(getattr(ours, mine).weight, getattr(theirs, NAMES[mine]).weight) for mine in ("query_up", "output")]
        weights.append((ours.latent_norm.weight, theirs.kv_a_layernorm.weight))
        package = f"transformers {type(theirs).__name__}"
        same = Agreement(record_property, "sparse_mla", package=package)
        same.functions(ours, attend, rows, tolerance=1e-10, weights=weights)


def test_with_all_tokens_chosen_it_is_latent_attention(record_property):
    mla = installed().mechanisms.get("mla")
    shared = {"hidden_size": 32, "num_heads": 4, "rotary": Rotary(interleaved=True)}
    plain = mla.build(configure(mla, SIZES, **shared)).double()
    layer = MLA.build(configure(MLA, SIZES | INDEX | {"top": 64}, **shared)).double().eval()
    layer.load_state_dict(plain.state_dict(), strict=False)
    rows = torch.randn(2, 23, 32, dtype=torch.float64)
    same = Agreement(record_property, "sparse_mla", identity="all tokens chosen are mla")
    same.outputs(layer(rows), plain(rows), 1e-12)


def test_a_token_remembers_a_latent_a_rotary_key_and_an_index_key():
    state = MLA.state(configure(MLA, {"index_size": 128}, hidden_size=512, num_heads=8))
    assert state_bytes(state, tokens=10, dtype="bfloat16") == 10 * 2 * (512 + 64 + 128)


def test_with_pools_it_remembers_an_index_key_for_each_and_those_of_the_open_one():
    options = {"index_size": 128, "pool": 16, "rotary_size": 0}
    state = MLA.state(configure(MLA, options, hidden_size=512, num_heads=8))
    assert state_bytes(state, tokens=1003, dtype="bfloat16") == 2 * (1003 * 512 + 62 * 128 + 16 * 2 * 128)


def test_beyond_top_a_decoded_token_pays_for_the_index_only():
    config = configure(MLA, SIZES | INDEX, hidden_size=32, num_heads=4)
    one, other = (MLA.cost(config, Step(remembered=keys)).flops for keys in (1000, 2000))
    assert other - one == 1000 * 2 * 16 * 11


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rotary_size": 12}, "rotary_size: 12 is not allowed; allowed: at most the index_size 10"),
        ({"rotary_size": 3}, "rotary_size: 3"),
        ({"query_latent": 0}, "query_latent: 0"),
        ({"pool": 1}, "pool: 1"),
        ({"pool": 2}, "top: 5 is not allowed; allowed: a multiple of the 2 tokens of a pool"),
        ({"score_factor": 0.0}, "score_factor: 0"),
    ],
)
def test_options_out_of_range_are_refused_by_name(options, message):
    with pytest.raises(InvalidValue, match=message):
        configure(MLA, SIZES | INDEX | options, hidden_size=32, num_heads=4)
