"""Fixed positions of sines and cosines (Vaswani et al. 2017)."""

import pytest
import torch
from attn_core import RaggedBatch
from attn_core.rotary import sinusoidal
from attn_models.decoder.decoder import Decoder
from attn_schema.decoder import DecoderConfig

GOLDEN = {
    1: [0.841471, 0.540302, 0.099833, 0.995004, 0.0099998, 0.99995, 0.001, 0.9999995],
    3: [0.141120, -0.989992, 0.295520, 0.955336, 0.0299955, 0.999550, 0.003, 0.9999955],
}


def sinusoids(positions, width):
    return sinusoidal(torch.as_tensor(positions), width)


@pytest.mark.parametrize("position", GOLDEN)
def test_golden_numbers_of_eight_elements(position):
    expected = torch.tensor(GOLDEN[position], dtype=torch.float64)
    assert torch.allclose(sinusoids(position, 8), expected, rtol=0, atol=6e-7)


def test_a_step_turns_every_pair_by_its_own_angle_wherever_it_starts():
    pairs = torch.view_as_complex(sinusoids(range(20), 8).view(20, 4, 2))
    turned = pairs[5:] / pairs[:-5]
    assert torch.allclose(turned, turned[:1].expand_as(turned), rtol=0, atol=1e-13)


def test_an_odd_width_drops_the_last_cosine():
    assert sinusoids(range(6), 7).shape == (6, 7)
    exponents = -2 * torch.arange(4, dtype=torch.float64) / 7
    assert torch.allclose(sinusoids(3, 7)[::2], torch.sin(3 * 10000**exponents), rtol=0, atol=1e-14)


def test_positions_far_away_stay_right_in_float32():
    far = torch.tensor([10**6 + 1])
    assert torch.allclose(sinusoidal(far, 8).float().double(), sinusoids(far, 8), rtol=0, atol=1e-7)


def test_embeddings_are_multiplied_by_the_root_of_the_width_before_the_waves_are_added():
    model = Decoder(
        DecoderConfig(vocab_size=11, max_seq_len=16, hidden_size=12, num_layers=1, num_heads=2, positions="sinusoidal")
    )
    model = model.double()
    tokens = torch.arange(9)[None]
    entering = []
    model.blocks[0].register_forward_pre_hook(lambda _, given: entering.append(given[0]))
    model(tokens)
    expected = model.embedding(tokens) * 12**0.5 + sinusoids(range(9), 12)
    assert torch.equal(entering[0], expected)


def test_a_step_at_a_position_adds_the_waves_of_that_position():
    model = Decoder(
        DecoderConfig(vocab_size=11, max_seq_len=16, hidden_size=12, num_layers=1, num_heads=2, positions="sinusoidal")
    )
    model = model.double()
    batch = RaggedBatch.of([1, 1], [4, 7], lambda numbers: torch.tensor(numbers))
    embedded = model.embed(torch.tensor([3, 5]), batch.positions)
    expected = model.embedding(torch.tensor([3, 5])) * 12**0.5 + sinusoids([4, 7], 12)
    assert torch.equal(embedded, expected)


def test_waves_are_those_of_marian_in_transformers_in_another_order():
    from transformers.models.marian.modeling_marian import MarianSinusoidalPositionalEmbedding

    peer = MarianSinusoidalPositionalEmbedding(50, 16)
    peer.weight.data = peer.create_weight()
    sines, cosines = peer.weight.double().chunk(2, dim=-1)
    theirs = torch.stack([sines, cosines], dim=-1).flatten(-2)
    assert torch.allclose(sinusoids(range(50), 16), theirs, rtol=0, atol=1e-6)
