import pytest
import torch
from attn_core import configure, installed
from attn_core.errors import UserError
from attn_variants.mechanisms.clusters_layers import SortedBlocks


def rows(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def test_one_block_is_softmax_attention(build, agrees):
    layer = build("sinkhorn", {"block": 9}, hidden_size=12, num_heads=3, causal=False)
    full = build("mha", hidden_size=12, num_heads=3, causal=False)
    full.load_state_dict(layer.state_dict())
    agrees("sinkhorn", identity="one block is mha").functions(layer, full, rows(2, 7, 12), tolerance=1e-12)


def test_rows_and_columns_of_the_mixture_sum_to_one_over_the_real_blocks():
    layer = SortedBlocks(block=3, iterations=200, temperature=1.0)
    real = torch.ones(1, 4, 3, dtype=torch.bool)
    real[0, 3] = False
    real[0, 2, 1:] = False
    query, key = (rows(1, 2, 4, 3, 5).masked_fill(~real[:, None, :, :, None], 0.0) for _ in range(2))
    mix = layer.mixture(query, key, real)
    ones = torch.tensor([1.0, 1.0, 1.0, 0.0], dtype=torch.float64).expand(1, 2, 4)
    for axis in (-1, -2):
        assert torch.allclose(mix.sum(axis), ones, rtol=0, atol=1e-9)


def test_a_low_temperature_sorts_blocks_to_where_they_are_alike():
    layer = SortedBlocks(block=2, iterations=50, temperature=1e-3)
    directions = torch.eye(4, dtype=torch.float64)[None, None, :, None].expand(1, 1, 4, 2, 4)
    order = [2, 0, 3, 1]
    mix = layer.mixture(directions, directions[:, :, order], torch.ones(1, 4, 2, dtype=torch.bool))
    assert torch.allclose(mix[0, 0], torch.eye(4, dtype=torch.float64)[order].T, rtol=0, atol=1e-12)


def test_outputs_and_gradients_equal_the_definition_in_loops(agrees):
    layer = SortedBlocks(block=2, iterations=3, temperature=0.5)
    given = [rows(1, 1, 5, 4) for _ in range(3)]

    def by_hand(query, key, value):
        q, k, v = (one[0, 0] for one in (query, key, value))
        blocks = [slice(0, 2), slice(2, 4), slice(4, 5)]
        mix = torch.stack(
            [torch.stack([q[a].mean(0) @ k[b].mean(0) / 4**0.5 / 0.5 for b in blocks]) for a in blocks]
        ).exp()
        for _ in range(3):
            mix = mix / mix.sum(1, keepdim=True)
            mix = mix / mix.sum(0, keepdim=True)
        k, v = (torch.cat([one, one.new_zeros(1, 4)]).view(3, 2, 4) for one in (k, v))
        out = []
        for token in range(5):
            block = token // 2
            own = 2 if block < 2 else 1
            keys = torch.cat([k[block, :own], torch.einsum("b,bmd->md", mix[block], k)])
            values = torch.cat([v[block, :own], torch.einsum("b,bmd->md", mix[block], v)])
            out.append((keys @ q[token] / 2).softmax(0) @ values)
        return torch.stack(out)[None, None]

    loops = agrees("sinkhorn", paper="blocks and normalisations in loops")
    loops.functions(lambda *tensors: layer(*tensors, None), by_hand, *given, tolerance=1e-12)


@pytest.mark.parametrize("options", [{"block": 0}, {"iterations": 0}, {"temperature": 0.0}])
def test_a_bad_option_is_refused(options):
    with pytest.raises(UserError):
        configure(installed().mechanisms.get("sinkhorn"), options, hidden_size=12, num_heads=3, causal=False)


@pytest.mark.oracle
def test_the_mixture_is_that_of_the_package_sinkhorn_transformer_without_its_noise(agrees):
    from sinkhorn_transformer.sinkhorn_transformer import sinkhorn_sorting_operator

    layer = SortedBlocks(block=3, iterations=5, temperature=0.75)
    real = torch.ones(2, 4, 3, dtype=torch.bool)

    def theirs(query, key):
        means = [given.flatten(0, 1).mean(2) for given in (query, key)]
        pairs = torch.einsum("bie,bje->bij", *means) * 5**-0.5
        return sinkhorn_sorting_operator(pairs / 0.75, 5).view(2, 2, 4, 4)

    oracle = agrees("sinkhorn", package="sinkhorn-transformer sinkhorn_sorting_operator")
    given = rows(2, 2, 4, 3, 5), rows(2, 2, 4, 3, 5)
    oracle.functions(lambda query, key: layer.mixture(query, key, real), theirs, *given, tolerance=1e-12)
