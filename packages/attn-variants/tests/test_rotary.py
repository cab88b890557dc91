import pytest
import torch
from attn_core import Rotary
from attn_variants.compute.rotary import cos_sin_of, cos_sin_to, pair_swapped, rotate

SIZE = 16
LAYOUTS = [Rotary(), Rotary(interleaved=True)]


def turned(rows, rotary=LAYOUTS[0], start=0):
    """Rows [tokens, heads, size] at positions from `start`."""
    positions = torch.arange(start, start + rows.shape[0])
    cos_sin = cos_sin_of(rotary, int(SIZE * rotary.fraction), positions, torch.float64)
    return rotate(rows, cos_sin, interleaved=rotary.interleaved)


def by_complex_numbers(rows, base):
    """The paper's layout: neighbours are one complex number, multiplied by e^(i m θ)."""
    pairs = torch.view_as_complex(rows.reshape(*rows.shape[:-1], -1, 2).contiguous())
    theta = base ** (-torch.arange(0, SIZE, 2, dtype=torch.float64) / SIZE)
    angles = torch.arange(rows.shape[0], dtype=torch.float64)[:, None, None] * theta
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)


@pytest.mark.parametrize("base", [10000.0, 500000.0])
def test_neighbours_turn_as_complex_numbers(agrees, base):
    rows = torch.randn(9, 2, SIZE, dtype=torch.float64)
    ours = turned(rows, Rotary(base=base, interleaved=True))
    agrees("rope", paper="complex numbers").outputs(ours, by_complex_numbers(rows, base), 1e-14)


def test_the_two_layouts_differ_by_a_permutation_of_the_elements():
    rows = torch.randn(9, 2, SIZE, dtype=torch.float64)
    halves_first = torch.arange(SIZE).view(-1, 2).T.flatten()
    assert torch.equal(turned(rows, LAYOUTS[1])[..., halves_first], turned(rows[..., halves_first], LAYOUTS[0]))


@pytest.mark.parametrize("rotary", LAYOUTS, ids=["halves", "neighbours"])
def test_products_depend_on_the_distance_only_and_norms_stay(rotary):
    query, key = torch.randn(5, 1, SIZE, dtype=torch.float64), torch.randn(5, 1, SIZE, dtype=torch.float64)
    products = [
        torch.einsum("qhd,khd->hqk", turned(query, rotary, start), turned(key, rotary, start)) for start in (0, 1000)
    ]
    assert torch.allclose(products[0], products[1], rtol=0, atol=1e-11)
    assert torch.allclose(turned(query, rotary).norm(dim=-1), query.norm(dim=-1), rtol=0, atol=1e-14)


def test_the_rest_of_a_head_is_left_as_it_is():
    rows = torch.randn(6, 2, SIZE, dtype=torch.float64)
    out = turned(rows, Rotary(fraction=0.5))
    assert torch.equal(out[..., 8:], rows[..., 8:])
    assert (out[1:, :, :8] - rows[1:, :, :8]).abs().min() > 0


def test_sixteen_bit_rows_keep_their_type_and_are_turned_in_float32():
    rows = torch.randn(300, 1, SIZE).bfloat16()
    cos_sin = cos_sin_to(Rotary(), SIZE, 300, rows)
    out = rotate(rows, cos_sin, interleaved=False)
    assert cos_sin.cosines.dtype == torch.float32
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, rotate(rows.float(), cos_sin, interleaved=False).bfloat16())


def test_a_table_made_while_serving_can_be_trained_with():
    with torch.inference_mode():
        cos_sin_to(Rotary(base=777.0), SIZE, 10, torch.zeros(1))
    rows = torch.randn(10, 1, SIZE, requires_grad=True)
    rotate(rows, cos_sin_to(Rotary(base=777.0), SIZE, 10, rows), interleaved=False).sum().backward()
    assert rows.grad.abs().sum() > 0


def test_swapping_twice_changes_nothing():
    rows = torch.randn(3, 4, SIZE)
    assert torch.equal(pair_swapped(pair_swapped(rows)), rows)


@pytest.mark.oracle
def test_halves_turn_as_in_the_llama_of_transformers(agrees):
    from transformers.models.llama.configuration_llama import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    parameters = {"rope_type": "default", "rope_theta": 100000.0}
    config = LlamaConfig(hidden_size=2 * SIZE, num_attention_heads=2, head_dim=SIZE, rope_parameters=parameters)
    rows = torch.randn(64, 2, SIZE, dtype=torch.float64)
    cosines, sines = LlamaRotaryEmbedding(config)(rows, torch.arange(64)[None])

    def theirs(given):
        by_head = given.transpose(0, 1)[None]
        return apply_rotary_pos_emb(by_head, by_head, cosines, sines)[0][0].transpose(0, 1)

    # transformers takes its angles in float32, whatever the rows are.
    oracle = agrees("rope", package="transformers LlamaRotaryEmbedding")
    oracle.functions(lambda given: turned(given, Rotary(base=100000.0)), theirs, rows, tolerance=1e-5)


@pytest.mark.oracle
def test_neighbours_turn_as_in_the_package_rotary_embedding_torch(agrees):
    from rotary_embedding_torch import RotaryEmbedding

    peer = RotaryEmbedding(dim=SIZE, theta=10000.0, cache_if_possible=False).double()
    with torch.no_grad():  # theirs makes its frequencies in float32
        peer.freqs.copy_(10000.0 ** (-torch.arange(0, SIZE, 2, dtype=torch.float64) / SIZE))
    oracle = agrees("rope", package="rotary-embedding-torch RotaryEmbedding")
    oracle.functions(
        lambda rows: turned(rows, LAYOUTS[1]),
        lambda rows: peer.rotate_queries_or_keys(rows.transpose(0, 1)).transpose(0, 1),
        torch.randn(64, 2, SIZE, dtype=torch.float64),
        tolerance=1e-6,  # theirs turns in float32
    )
