import pytest
import torch
from attn_core import configure, installed
from attn_core.errors import UserError
from attn_variants.mechanisms.clusters_layers import Routing
from torch.nn.functional import normalize


def rows(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def routing(**changed):
    options = {"heads": 2, "size": 5, "clusters": 3, "window": 4, "decay": 0.9, "seed": 1}
    return Routing(**options | changed).double().eval()


def test_one_cluster_as_wide_as_the_sequence_is_softmax_attention(build, agrees):
    layer = build("routing", {"clusters": 1, "window": 9}, hidden_size=12, num_heads=3, causal=False)
    full = build("mha", hidden_size=12, num_heads=3, causal=False)
    full.load_state_dict({name: weight for name, weight in layer.state_dict().items() if "centroids" not in name})
    same = agrees("routing", identity="one cluster as wide as the sequence is mha")
    same.functions(layer.eval(), full, rows(2, 7, 12), tolerance=1e-12)


def test_a_token_gets_the_mean_of_its_clusters_and_without_any_nothing(agrees):
    layer, (query, key, value) = routing(clusters=2, window=2), (rows(1, 2, 6, 5) for _ in range(3))
    out, expected = layer(query, key, value, None), torch.zeros(2, 6, 5, dtype=torch.float64)
    for head in range(2):
        counts = torch.zeros(6)
        for centroid in layer.centroids[head]:
            near = [(normalize(one[0, head], dim=-1) @ centroid).topk(2).indices for one in (query, key)]
            weights = (query[0, head, near[0]] @ key[0, head, near[1]].T / 5**0.5).softmax(-1)
            expected[head, near[0]] += weights @ value[0, head, near[1]]
            counts[near[0]] += 1
        expected[head] /= counts.clamp(min=1)[:, None]
        assert (counts == 0).any()
    agrees("routing", paper="clusters one by one").outputs(out[0], expected, 1e-13)
    assert torch.equal(out[0].any(-1), expected.any(-1))


def test_in_training_centroids_turn_towards_the_tokens_nearest_to_them_and_in_use_they_rest():
    layer, query = routing(clusters=2, decay=0.5), rows(1, 2, 6, 5)
    before = layer.centroids.clone()
    layer(query, query, query, None)
    assert torch.equal(layer.centroids, before)
    layer.train()(query, query, query, None)
    assert torch.equal(layer.centroids, before)
    layer.after_update(lambda value: value)
    for head in range(2):
        own = normalize(query[0, head], dim=-1)
        nearest = (own @ before[head].T).argmax(-1)
        for cluster in range(2):
            members = own[nearest == cluster]
            target = before[head, cluster]
            if len(members):
                target = normalize(0.5 * target + 0.5 * normalize(members.sum(0), dim=0), dim=0)
            assert torch.allclose(layer.centroids[head, cluster], target, rtol=0, atol=1e-12)


def test_padding_turns_no_centroid():
    one, other = routing().train(), routing().train()
    query = rows(1, 2, 6, 5)
    key_padding_mask = torch.tensor([[True, True, True, True, False, False]])
    one(query, query, query, key_padding_mask)
    other(*(query[:, :, :4],) * 3, None)
    for layer in (one, other):
        layer.after_update(lambda value: value)
    assert torch.allclose(one.centroids, other.centroids, rtol=0, atol=1e-12)


@pytest.mark.parametrize("options", [{"clusters": 0}, {"window": 0}, {"decay": 1.5}])
def test_a_bad_option_is_refused(options):
    with pytest.raises(UserError):
        configure(installed().mechanisms.get("routing"), options, hidden_size=12, num_heads=3, causal=False)


@pytest.mark.oracle
def test_outputs_and_gradients_equal_those_of_the_package_routing_transformer(agrees):
    from routing_transformer.routing_transformer import KmeansAttention

    layer = routing()
    their = KmeansAttention(3, 4, 2, 5).double().eval()
    their.kmeans.means.copy_(layer.centroids)
    their.kmeans.initted.fill_(value=True)
    agrees("routing", package="routing-transformer KmeansAttention").functions(
        lambda q, k, v: layer(q, k, v, None),
        lambda q, k, v: their(q, k, v)[0],
        *(rows(2, 2, 9, 5) for _ in range(3)),
        tolerance=5e-5,  # theirs adds 1e-5 to the number of clusters that a token is in
    )
