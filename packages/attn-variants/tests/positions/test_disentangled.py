"""Disentangled attention beside its equation, written pair by pair."""

import math

import pytest
import torch
from attn_core import configure, installed

DISENTANGLED = installed().mechanisms.get("disentangled")


def built(layer=0, num_kv_heads=2, **options):
    given = {"buckets": 4, "max_distance": 12, **options}
    sizes = {"hidden_size": 16, "num_heads": 4, "num_kv_heads": num_kv_heads, "causal": False, "bias": True}
    sizes["layer"] = layer
    return DISENTANGLED.build(configure(DISENTANGLED, given, **sizes)).double()


def row(distance, options):
    """The vector of a distance, exact up to half of the buckets, then by ranges."""
    size, half = abs(distance), (options.buckets or 0) // 2
    if options.buckets and size > half:
        far = math.log(size / half) / math.log((options.max_distance - 1) / half) * (half - 1)
        size = half + math.ceil(far - 1e-6)
    return min(max(int(math.copysign(size, distance)) + options.span, 0), 2 * options.span - 1)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"separate": True, "norm_eps": 1e-5},
        {"query_positions": False},
        {"key_positions": False, "separate": True},
        {"buckets": None, "max_distance": 5},
        {"buckets": 10, "max_distance": 30},
    ],
)
def test_it_is_the_sum_of_its_products(options, agrees):
    torch.manual_seed(0)
    layer, rows = built(**options), torch.randn(1, 23, 16, dtype=torch.float64)
    own = layer.options
    vectors = layer.vectors()
    query, key, value = (getattr(layer, name)(rows[0]).unflatten(-1, (-1, 4)) for name in ("query", "key", "value"))
    keys = (layer.position_key or layer.key)(vectors).unflatten(-1, (-1, 4))
    queries = (layer.position_query or layer.query)(vectors).unflatten(-1, (-1, 4))
    out = torch.zeros(23, 4, 4, dtype=torch.float64)
    for head in range(4):
        for place in range(23):
            scores = []
            for other in range(23):
                at = row(place - other, own)
                score = query[place, head] @ key[other, head // 2]
                score = score + own.query_positions * (query[place, head] @ keys[at, head // 2])
                score = score + own.key_positions * (key[other, head // 2] @ queries[at, head])
                scores.append(score / math.sqrt(4 * own.products))
            out[place, head] = torch.stack(scores).softmax(0) @ value[:, head // 2]
    agrees("disentangled", paper="its equation, pair by pair").outputs(
        layer(rows)[0], layer.output(out.flatten(1)), 1e-12
    )


def test_layers_share_vectors():
    layers = [built(layer=place) for place in range(3)]
    DISENTANGLED.share_weights([(layer.mechanism_config, layer) for layer in layers])
    assert len({id(layer.vectors) for layer in layers}) == 1


@pytest.mark.oracle
@pytest.mark.parametrize("separate", [False, True])
def test_it_is_that_of_transformers(separate, agrees):
    transformers = pytest.importorskip("transformers")
    module = pytest.importorskip("transformers.models.deberta_v2.modeling_deberta_v2")
    config = transformers.DebertaV2Config(
        hidden_size=16,
        num_attention_heads=4,
        relative_attention=True,
        pos_att_type=["c2p", "p2c"],
        position_buckets=4,
        max_relative_positions=12,
        share_att_key=not separate,
    )
    theirs = module.DisentangledSelfAttention(config).double().eval()
    ours = built(num_kv_heads=None, separate=separate).eval()
    names = {"query_proj": ours.query, "key_proj": ours.key, "value_proj": ours.value}
    names |= {"pos_key_proj": ours.position_key, "pos_query_proj": ours.position_query} if separate else {}
    for name, layer in names.items():
        getattr(theirs, name).load_state_dict(layer.state_dict())

    def other(rows):
        seen = torch.ones(1, 1, rows.shape[1], rows.shape[1])
        return ours.output(theirs(rows, seen, rel_embeddings=ours.vectors())[0])

    # Theirs takes the root of the scale in float32.
    agrees("disentangled", package="transformers DisentangledSelfAttention").functions(
        ours, other, torch.randn(2, 23, 16, dtype=torch.float64), tolerance=1e-6
    )
