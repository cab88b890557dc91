"""Learned tables over distances: T5's, plain ones, and those of Shaw et al."""

import math

import pytest
import torch
from attn_core import configure, installed
from attn_core.errors import InvalidValue
from attn_core.modifiers import T5Bias


def doubles(*shape):
    return torch.randn(*shape, dtype=torch.float64)


@pytest.mark.oracle
@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("buckets", "longest"), [(32, 128), (16, 40)])
def test_buckets_are_those_of_the_t5_of_transformers(agrees, bidirectional, buckets, longest):
    from transformers.models.t5.modeling_t5 import T5Attention

    distance = torch.arange(-400, 401)
    theirs = T5Attention._relative_position_bucket(distance, bidirectional, buckets, longest)
    ours = T5Bias(buckets=buckets, max_distance=longest, bidirectional=bidirectional).bucket(distance)
    agrees("t5_bias", package="transformers T5Attention").outputs(ours, theirs, 0)


@pytest.mark.oracle
@pytest.mark.parametrize("causal", [True, False])
def test_attention_and_its_gradients_are_those_of_the_t5_of_transformers(build, agrees, causal):
    from transformers.models.t5.configuration_t5 import T5Config
    from transformers.models.t5.modeling_t5 import T5Attention

    config = T5Config(d_model=24, d_kv=6, num_heads=4, is_decoder=causal, dropout_rate=0.0)
    peer = T5Attention(config, has_relative_attention_bias=True).double().eval()
    layer = build("t5_bias", hidden_size=24, num_heads=4, causal=causal)
    pairs = {
        "query": peer.q.weight,
        "key": peer.k.weight,
        "value": peer.v.weight,
        "output": peer.o.weight,
        "modifiers.t5_bias.table": peer.relative_attention_bias.weight,
    }
    ours = dict(layer.named_parameters())
    with torch.no_grad():
        for name, weight in pairs.items():
            ours[name if "table" in name else f"{name}.weight"].copy_(weight)
    mask = torch.full((150, 150), -1e300, dtype=torch.float64).triu(1)[None, None] if causal else None

    def theirs(rows):
        bias = peer.compute_bias(150, 150)
        return peer(rows, mask=mask, position_bias=bias if mask is None else bias + mask)[0]

    tables = layer.modifiers["t5_bias"].table, peer.relative_attention_bias.weight
    agrees("t5_bias", package="transformers T5Attention").functions(
        layer, theirs, doubles(2, 150, 24), weights=[(layer.query.weight, peer.q.weight), tables], tolerance=1e-10
    )


def shaw_by_loops(layer, rows, clip):
    """The paper's equations 3 and 4, one pair at a time."""
    query, key, value = (part[0] for part in layer.project(rows[None], None))
    tokens, heads, size = query.shape
    keys, values = (layer.modifiers[kind].table for kind in ("relative_keys", "relative_values"))
    out = []
    for i in range(tokens):
        for h in range(heads):
            row = [max(-clip, min(clip, j - i)) + clip for j in range(i + 1)]
            scores = [query[i, h] @ (key[j, h] + keys[h % len(keys), row[j]]) / math.sqrt(size) for j in range(i + 1)]
            weights = torch.softmax(torch.stack(scores), 0)
            out.append(sum(w * (value[j, h] + values[h % len(values), row[j]]) for j, w in enumerate(weights)))
    return layer.output(torch.stack(out).view(tokens, -1))


@pytest.mark.parametrize("options", [{"clip": 2}, {"clip": 9}, {"clip": 3, "share": True}], ids=str)
def test_shaw_is_the_equations_of_the_paper_forward_and_backward(build, agrees, options):
    layer = build("shaw", options, hidden_size=12, num_heads=2)
    rows = doubles(6, 12)
    found, expected, upstream = layer(rows[None])[0], shaw_by_loops(layer, rows, options["clip"]), doubles(6, 12)
    loops = agrees("shaw", paper="equations 3 and 4 in loops")
    loops.outputs(found, expected, 1e-13)
    weights = list(layer.parameters())
    ours, theirs = (torch.autograd.grad((out * upstream).sum(), weights) for out in (found, expected))
    loops.gradients(ours, theirs, 1e-12)


def test_without_distances_the_vectors_are_one_bias_of_the_values(build, agrees):
    layer, mha = build("shaw", {"clip": 0}, hidden_size=12, num_heads=2), build("mha", hidden_size=12, num_heads=2)
    state = layer.state_dict()
    table = state.pop("modifiers.relative_values.table")
    state.pop("modifiers.relative_keys.table")
    mha.load_state_dict(state)
    same = agrees("shaw", identity="without distances it is mha with one bias of the values")
    same.functions(layer, lambda rows: mha(rows) + layer.output(table.flatten()), doubles(1, 7, 12), tolerance=1e-12)


@pytest.mark.oracle
def test_relative_keys_are_those_of_wav2vec2_bert_in_transformers(build, agrees):
    from transformers.models.wav2vec2_bert.configuration_wav2vec2_bert import Wav2Vec2BertConfig
    from transformers.models.wav2vec2_bert.modeling_wav2vec2_bert import Wav2Vec2BertSelfAttention

    config = Wav2Vec2BertConfig(
        hidden_size=24,
        num_attention_heads=4,
        position_embeddings_type="relative_key",
        left_max_position_embeddings=3,
        right_max_position_embeddings=3,
        attention_dropout=0.0,
    )
    peer = Wav2Vec2BertSelfAttention(config).double().eval()
    layer = build("shaw", {"clip": 3, "share": True}, hidden_size=24, num_heads=4, causal=False, bias=True)
    theirs = {"query": peer.linear_q, "key": peer.linear_k, "value": peer.linear_v, "output": peer.linear_out}
    with torch.no_grad():
        for name, linear in theirs.items():
            getattr(layer, name).weight.copy_(linear.weight)
            getattr(layer, name).bias.copy_(linear.bias)
        layer.modifiers["relative_keys"].table[0].copy_(peer.distance_embedding.weight)
        layer.modifiers["relative_values"].table.zero_()
    oracle = agrees("shaw", package="transformers Wav2Vec2BertSelfAttention, keys only")
    oracle.functions(layer, lambda rows: peer(rows)[0], doubles(2, 11, 24), tolerance=1e-12)


def test_a_bias_of_minus_the_distance_is_alibi(build, agrees):
    layer, alibi = (
        build("relative_bias", {"clip": 20}, hidden_size=16, num_heads=4),
        build("alibi", hidden_size=16, num_heads=4),
    )
    state = layer.state_dict()
    state.pop("modifiers.relative_bias.table")
    alibi.load_state_dict(state)
    distance = torch.arange(-20, 21, dtype=torch.float64).abs()
    with torch.no_grad():
        layer.modifiers["relative_bias"].table.copy_(-distance[:, None] * 2.0 ** -torch.arange(2, 9, 2))
    same = agrees("relative_bias", identity="a bias of minus the distance is alibi")
    same.functions(layer, alibi, doubles(1, 9, 16), tolerance=1e-12)


@pytest.mark.parametrize(
    ("mechanism", "options", "named"),
    [
        ("t5_bias", {"buckets": 1}, "buckets"),
        ("t5_bias", {"buckets": 32, "max_distance": 8}, "max_distance"),
        ("shaw", {"clip": -1}, "clip"),
        ("shaw", {"clip": 2.5}, "clip"),
        ("shaw", {"share": "yes"}, "share"),
        ("relative_bias", {"clip": 0}, "clip"),
        ("soft_cap", {"cap": 0}, "cap"),
        ("qk_norm", {"eps": -1}, "eps"),
        ("gemma", {"norm_eps": 0}, "norm_eps"),
        ("gemma", {"cap": -1}, "cap"),
        ("gemma", {"window": 0}, "window"),
        ("gemma", {"chunk": 0}, "chunk"),
        ("gemma", {"chunk": 4, "window": 4}, "chunk"),
        ("gemma", {"temperature": 0.0}, "temperature"),
        ("gemma", {"scale": float("nan")}, "scale"),
        ("gemma", {"base": 100.0}, "base"),
    ],
)
def test_bad_options_are_refused_by_name(mechanism, options, named):
    with pytest.raises(InvalidValue, match=named):
        configure(installed().mechanisms.get(mechanism), options, hidden_size=8)


@pytest.mark.oracle
@pytest.mark.parametrize("heads", [4, 6])
def test_linear_biases_are_those_of_bloom_in_transformers(build, agrees, heads):
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    layer = build("alibi", hidden_size=24, num_heads=heads)
    bias = build_alibi_tensor(torch.ones(1, 9), heads, torch.float64)[None]  # per key: a softmax sees no shift of a row
    mask = bias + torch.full((9, 9), float("-inf"), dtype=torch.float64).triu(1)

    def theirs(rows):
        parts = (linear(rows).unflatten(-1, (heads, -1)) for linear in (layer.query, layer.key, layer.value))
        out = torch.nn.functional.scaled_dot_product_attention(
            *(part.transpose(1, 2) for part in parts), attn_mask=mask
        )
        return layer.output(out.transpose(1, 2).flatten(-2))

    agrees("alibi", package="transformers Bloom build_alibi_tensor").functions(
        layer, theirs, doubles(2, 9, 24), tolerance=1e-12
    )
