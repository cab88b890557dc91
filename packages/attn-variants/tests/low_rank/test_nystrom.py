import pytest
import torch
from attn_core import Shape, configure, installed
from attn_core.errors import UserError
from attn_variants.mechanisms.low_rank_layers import pseudoinverse

WIDTH, HEADS = 12, 3


def test_the_iteration_finds_the_inverse_of_moore_and_penrose():
    matrix = torch.rand(2, 5, 5, dtype=torch.float64).softmax(-1)
    assert torch.allclose(pseudoinverse(matrix, 30), torch.linalg.pinv(matrix), rtol=1e-6, atol=1e-6)


def test_with_a_landmark_for_every_token_it_is_softmax_attention(build, agrees):
    options = {"landmarks": 7, "iterations": 60, "kernel": 0}
    layer = build("nystrom", options, hidden_size=WIDTH, num_heads=HEADS, causal=False)
    full = build("mha", hidden_size=WIDTH, num_heads=HEADS, causal=False)
    full.load_state_dict(layer.state_dict())
    rows = 2 * torch.randn(2, 7, WIDTH, dtype=torch.float64)
    agrees("nystrom", identity="a landmark for every token is mha").outputs(layer(rows), full(rows), 1e-6)
    assert torch.allclose(layer(rows[:, :4]), full(rows[:, :4]), rtol=0, atol=1e-6)


def test_landmarks_are_means_of_equal_stretches_of_the_real_tokens(build):
    from attn_variants.mechanisms.low_rank_layers import means, stretches
    from attn_variants.mechanisms.whole_sequence_layer import ranks

    rows = torch.arange(8.0, dtype=torch.float64)[None, None, :, None]
    key_padding_mask = torch.tensor([[True, True, False, True, True, True, False, True]])
    place, count = ranks(key_padding_mask, rows)
    of = place.clamp(min=0) * 3 // count
    sizes = stretches(of, key_padding_mask, 3)
    assert sizes.tolist() == [[2, 2, 2]]
    assert means(rows * key_padding_mask[:, None, :, None], of, sizes).flatten().tolist() == [0.5, 3.5, 6.0]


def test_the_price_grows_linearly_with_the_length():
    nystrom = installed().mechanisms.get("nystrom")
    config = configure(nystrom, {"landmarks": 8}, hidden_size=WIDTH, num_heads=HEADS, causal=False)
    prices = [nystrom.cost(config, Shape(query=tokens, key=tokens)).flops for tokens in (100, 200, 300)]
    assert prices[2] - prices[1] == prices[1] - prices[0]


@pytest.mark.parametrize("options", [{"landmarks": 0}, {"iterations": 0}, {"kernel": 4}, {"kernel": -1}])
def test_a_bad_option_is_refused(options):
    with pytest.raises(UserError):
        configure(installed().mechanisms.get("nystrom"), options, hidden_size=WIDTH, num_heads=HEADS)


@pytest.mark.oracle
@pytest.mark.parametrize("kernel", [0, 5])
def test_outputs_and_gradients_equal_those_of_the_package_nystrom_attention(build, agrees, kernel):
    # Theirs divides by the largest sums of all heads and sequences, so one of each is compared; nothing is padded.
    from nystrom_attention import NystromAttention

    their = NystromAttention(
        WIDTH, dim_head=6, num_heads=1, num_landmarks=4, residual=kernel > 0, residual_conv_kernel=kernel or 1
    ).double()
    options = {"landmarks": 4, "kernel": kernel}
    layer = build("nystrom", options, hidden_size=WIDTH, num_heads=1, head_dim=6, causal=False, bias=True)
    query, key, value = their.to_qkv.weight.chunk(3)
    none = torch.zeros(6, dtype=torch.float64)
    weights = {
        "query.weight": query,
        "key.weight": key,
        "value.weight": value,
        "output.weight": their.to_out[0].weight,
        "output.bias": their.to_out[0].bias,
        "query.bias": none,
        "key.bias": none,
        "value.bias": none,
    }
    layer.load_state_dict(weights | ({"inner.kernel": their.res_conv.weight} if kernel else {}))
    rows = torch.randn(1, 12, WIDTH, dtype=torch.float64)
    agrees("nystrom", package="nystrom-attention NystromAttention").functions(layer, their, rows, tolerance=1e-7)
