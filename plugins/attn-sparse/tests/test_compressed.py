"""Compressed rows beside the attention of transformers' DeepSeek-V4, and what only they guarantee."""

import pytest
import torch
from attn_core import Rotary, configure, state_bytes
from attn_core.errors import InvalidValue
from attn_core.rotary import Yarn
from attn_sparse.compressed import Compressed
from attn_testing import Agreement
from attn_testing.float64 import in_float64

COMPRESSED = Compressed()
SIZES = {"window": 5, "query_latent": 20, "output_groups": 2, "output_latent": 6, "norm_eps": 1e-5}
KINDS = {
    "sliding_attention": {"every": None, "top": None},
    "heavily_compressed_attention": {"every": 4, "overlap": False, "top": None},
    "compressed_sparse_attention": {"every": 2, "top": 3, "index_heads": 16, "index_size": 6},
}
ENTRIES = {"value": "kv_proj", "gate": "gate_proj", "norm": "kv_norm"}
NAMES = (
    {"query_down": "q_a_proj", "query_norm": "q_a_norm", "query_up": "q_b_proj", "entry": "kv_proj"}
    | {"entry_norm": "kv_norm", "output_down": "o_a_proj", "output": "o_b_proj"}
    | {f"compressor.{ours}": f"compressor.{theirs}" for ours, theirs in ENTRIES.items()}
    | {f"indexer.compressor.{ours}": f"compressor.indexer.{theirs}" for ours, theirs in ENTRIES.items()}
    | {"indexer.query": "compressor.indexer.q_b_proj", "indexer.weight": "compressor.indexer.scorer.weights_proj"}
)
NAMES = {f"{ours}.weight": f"{theirs}.weight" for ours, theirs in NAMES.items()} | {
    "sinks": "sinks",
    "compressor.bias": "compressor.position_bias",
    "indexer.compressor.bias": "compressor.indexer.position_bias",
}


def pair(kind):
    """The attention of transformers, with weights far from their initial values, ours with the same, and its angles."""
    from transformers.models.deepseek_v4 import configuration_deepseek_v4
    from transformers.models.deepseek_v4 import modeling_deepseek_v4 as modeling

    config = configuration_deepseek_v4.DeepseekV4Config(
        hidden_size=32, num_attention_heads=4, head_dim=12, qk_rope_head_dim=4, q_lora_rank=20, o_groups=2,
        o_lora_rank=6, sliding_window=5, index_n_heads=16, index_head_dim=6, index_topk=3, num_hidden_layers=1,
        layer_types=[kind], compress_rope_theta=300.0, rms_norm_eps=1e-5,
        compress_rates={"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
        rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    )  # fmt: skip
    config._attn_implementation = "eager"
    theirs = modeling.DeepseekV4Attention(config, 0)
    torch.manual_seed(0)
    for name, weight in theirs.named_parameters():
        torch.nn.init.normal_(weight, mean=float("norm" in name), std=0.4)
    scaled = Rotary(base=300.0, fraction=1 / 3, interleaved=True, scaling=Yarn(
        factor=4.0, original_max_position_embeddings=16, attention=1.0))  # fmt: skip
    plain = Rotary(fraction=1 / 3, interleaved=True)
    sizes = {"hidden_size": 32, "num_heads": 4, "head_dim": 12}
    rotary = plain if kind == "sliding_attention" else scaled
    ours = COMPRESSED.build(configure(COMPRESSED, SIZES | KINDS[kind], rotary=rotary, **sizes))
    ours.load_state_dict({name: theirs.state_dict()[NAMES[name]] for name in ours.state_dict()})
    return theirs.double().eval(), ours.double().eval(), modeling.DeepseekV4RotaryEmbedding(config)


@pytest.mark.oracle
@pytest.mark.parametrize("kind", KINDS)
def test_it_equals_the_layer_of_transformers_forward_and_gradient(record_property, kind):
    pytest.importorskip("transformers")
    with in_float64():
        theirs, ours, angles = pair(kind)
        rows, places = torch.randn(2, 23, 32), torch.arange(23)[None]
        far = torch.ones(23, 23, dtype=torch.bool).tril(0).triu(-4)
        mask = torch.zeros(23, 23).masked_fill(~far, float("-inf"))[None, None].expand(2, 1, -1, -1)

        def attend(given):
            both = {name: angles(given, places, layer_type=name) for name in ("main", "compress")}
            return theirs(given, both, places.expand(2, -1), mask)[0]

        known = dict(theirs.named_parameters())
        learned = {name: weight for name, weight in ours.named_parameters() if not name.startswith("indexer.")}
        same = Agreement(record_property, "compressed", package="transformers DeepseekV4Attention")
        weights = [(weight, known[NAMES[name]]) for name, weight in learned.items()]
        same.functions(ours, attend, rows, tolerance=1e-10, weights=weights)


def test_a_sequence_holds_the_window_the_entries_and_the_open_block():
    options = {"window": 128, "every": 4, "top": 512, "index_size": 128}
    state = COMPRESSED.state(configure(COMPRESSED, options, hidden_size=64, num_heads=64, head_dim=512))
    entries, open_block = 250 * (512 + 128), 8 * 2 * 2 * (512 + 128)
    assert state_bytes(state, tokens=1003, dtype="bfloat16") == 2 * (128 * 512 + entries + open_block)


def test_entries_never_change_once_they_are_complete():
    layer = COMPRESSED.build(configure(COMPRESSED, SIZES | KINDS["compressed_sparse_attention"], hidden_size=32))
    torch.nn.init.normal_(layer.compressor.bias)
    rows = torch.randn(1, 20, 32)
    found = [layer._far(layer._projected(rows[:, :n]), torch.ones(1, n, dtype=torch.bool)) for n in (20, 13, 4, 1)]
    for one in found[1:]:
        torch.testing.assert_close(one.rows, found[0].rows[:, : one.rows.shape[1]])
    assert [one.rows.shape[1] for one in found] == [10, 6, 2, 0]


def test_the_indexer_learns_how_entries_share_the_attention_and_no_other_weight_does():
    """KL(p ‖ softmax(I)) over the chosen entries, in loops; queries without an entry are part of the mean."""
    options = SIZES | KINDS["compressed_sparse_attention"] | {"align": 2.0}
    layer = COMPRESSED.build(configure(COMPRESSED, options, hidden_size=32, num_heads=4)).double().train()
    rows, loss = torch.randn(1, 20, 32, dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    places = torch.arange(20)[None]
    near = layer._entries(rows, places)[0].detach()
    far = layer._far(layer._projected(rows), torch.ones(1, 20, dtype=torch.bool))
    asked = layer._asked(rows, places)
    for token in range(2, 20):
        entries = (token + 1) // 2
        heads = torch.relu(torch.einsum("hs,es->he", asked.index[0][0, token], far.index[0, :entries]))
        scores = asked.index[1][0, token] @ heads
        chosen = scores.topk(min(3, entries)).indices
        seen = torch.cat([near[max(0, token - 4) : token + 1], far.rows[0, chosen].detach()])
        logits = torch.cat([asked.query[0, token].detach() @ seen.T, layer.sinks.detach()[:, None]], 1)
        weights = logits.softmax(1)[:, -1 - len(chosen) : -1].mean(0)
        target = weights / weights.sum()
        loss = loss + (target * (target.log() - scores[chosen].log_softmax(0))).sum() / 20
    layer(rows)
    found, learned = layer.take_auxiliary_loss(), list(layer.indexer.parameters())
    torch.testing.assert_close(found, 2.0 * loss)
    gradients = torch.autograd.grad(found, learned, retain_graph=True), torch.autograd.grad(2.0 * loss, learned)
    for mine, other in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, other)
    others = [weight for name, weight in layer.named_parameters() if not name.startswith("indexer.")]
    assert all(grad is None for grad in torch.autograd.grad(found, others, allow_unused=True))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 1}, "every: 1"),
        ({"top": 0}, "top: 0"),
        ({"output_groups": 5}, "output_groups: 5 is not allowed; allowed: a divisor of the 32 elements"),
        ({"window": 0}, "window: 0"),
    ],
)
def test_options_out_of_range_are_refused_by_name(options, message):
    with pytest.raises(InvalidValue, match=message):
        configure(COMPRESSED, SIZES | options, hidden_size=32, num_heads=4)
