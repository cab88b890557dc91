"""Log-linear Mamba-2 beside the plain torch function of fla-core, and at positions that it does not know."""

import importlib.metadata
import importlib.util

import pytest
import torch
from attn_core import configure
from attn_recurrent.log_linear_mamba2 import LogLinearMamba2
from attn_recurrent.log_linear_mamba2.levels import Leveled, one_chunk, weights
from attn_recurrent.sequences import in_chunks
from attn_testing import Agreement
from torch.nn.functional import conv1d, silu, softplus

HEADS, GROUPS, STATE = 4, 2, 5


def leveled(tokens, levels, first=0):
    def drawn(heads, size, make=torch.randn):
        return make(2, heads, tokens, size, dtype=torch.float64)

    torch.manual_seed(0)
    place = (first + torch.arange(tokens))[None, None, :, None].expand(2, 1, -1, -1)
    parts = drawn(GROUPS, STATE), drawn(GROUPS, STATE), drawn(HEADS, 3), -drawn(HEADS, 1, torch.rand)
    return Leveled(*parts, drawn(HEADS, levels), place)


@pytest.mark.parametrize("chunk", [1, 5, 8, 64])
@pytest.mark.parametrize("levels", [2, 4, 7])
def test_buckets_of_any_chunks_hold_what_pairs_of_tokens_say(levels, chunk):
    """Also where sequences are longer than the levels reach, so that the last bucket holds the rest."""
    system = leveled(41, levels)
    out, _ = in_chunks(one_chunk, system, torch.zeros(2, HEADS, levels - 1, STATE, 3, dtype=torch.float64), chunk)
    torch.testing.assert_close(out, weights(system) @ system.value, rtol=1e-12, atol=1e-12)


def test_levels_are_the_halves_of_a_binary_tree():
    """For token 6 = 110: itself; 5 and 4 below the second digit; 0 to 3 below the third."""
    system = leveled(8, 4)
    levels = system.levels(system.place ^ system.place.transpose(-1, -2))[0, 0]
    assert levels[6, :7].tolist() == [3, 3, 3, 3, 2, 2, 0]
    assert levels[7].tolist() == [3, 3, 3, 3, 2, 2, 1, 0]


@pytest.mark.oracle
@pytest.mark.parametrize("tokens", [20, 32])
def test_it_is_that_of_fla(record_property, tokens):
    path = importlib.metadata.distribution("fla-core").locate_file("fla/ops/log_linear_attn/naive.py")
    spec = importlib.util.spec_from_file_location("fla_naive_log_linear_attn", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    mechanism = LogLinearMamba2()
    options = {"state_size": STATE, "groups": GROUPS, "levels": 6, "chunk": 8}
    layer = mechanism.build(configure(mechanism, options, hidden_size=12, num_heads=HEADS, bias=True))
    for name, weight in layer.named_parameters():
        torch.nn.init.normal_(weight, mean=float(name in {"norm", "levels"}), std=0.4)

    def peer(rows):
        inner, shared = layer.inner, GROUPS * STATE
        gate, mixed, step, scale = layer.input(rows).split([inner, inner + 2 * shared, HEADS, HEADS * 6], dim=-1)
        mixed = conv1d(
            mixed.transpose(1, 2), layer.filters[:, None], layer.filter_bias, padding=3, groups=layer.channels
        )[..., :tokens]  # fmt: skip
        value, write, read = silu(mixed).transpose(1, 2).split([inner, shared, shared], dim=-1)
        value, step = value.unflatten(-1, (HEADS, -1)), softplus(step + layer.step_bias)
        read, write = (part.unflatten(-1, (GROUPS, STATE)) for part in (read, write))
        scale = softplus(layer.levels * scale.unflatten(-1, (HEADS, 6)))
        out = module.naive_log_linear_attn(read, write, value * step[..., None], -layer.rate.exp() * step, scale)
        gated = (out + layer.skip[:, None] * value).flatten(-2) * silu(gate)
        groups = gated.unflatten(-1, (GROUPS, -1))
        normed = groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + 1e-5)
        return layer.output(normed.flatten(-2) * layer.norm)

    same = Agreement(record_property, "log_linear_mamba2", package="fla-core naive_log_linear_attn")
    learned = [(weight, weight) for weight in layer.parameters()]
    same.functions(layer, peer, torch.randn(2, tokens, 12), tolerance=2e-4, weights=learned)
