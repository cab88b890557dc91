import pytest
import torch
from attn_core import configure
from attn_recurrent.mamba2 import Mamba2
from attn_testing import Agreement
from transformers import Mamba2Config
from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

WIDTH, HEADS, HEAD, STATE = 16, 4, 8, 6


def pair(groups):
    """The mixer of transformers and ours, with the same weights, in evaluation mode."""
    theirs = Mamba2Mixer(
        Mamba2Config(
            hidden_size=WIDTH,
            num_heads=HEADS,
            head_dim=HEAD,
            state_size=STATE,
            n_groups=groups,
            expand=2,
            num_hidden_layers=1,
            chunk_size=16,
        ),
        0,
    ).eval()
    mechanism = Mamba2()
    ours = mechanism.build(
        configure(mechanism, {"state_size": STATE, "groups": groups, "chunk": 8}, hidden_size=WIDTH, num_heads=HEADS)
    )
    with torch.no_grad():
        for mine, other in (
            (ours.input.weight, theirs.in_proj.weight),
            (ours.output.weight, theirs.out_proj.weight),
            (ours.filters, theirs.conv1d.weight[:, 0]),
            (ours.filter_bias, theirs.conv1d.bias),
            (ours.rate, theirs.A_log),
            (ours.step_bias, theirs.dt_bias),
            (ours.skip, theirs.D),
            (ours.norm, theirs.norm.weight),
        ):
            mine.copy_(other)
    return ours, theirs


@pytest.mark.parametrize("groups", [1, 2])
def test_the_layer_and_its_gradient_are_those_of_transformers(record_property, groups):
    torch.manual_seed(0)
    ours, theirs = pair(groups)
    oracle = Agreement(record_property, "mamba2", package="transformers Mamba2Mixer")
    oracle.functions(ours, theirs, torch.randn(2, 37, WIDTH), tolerance=1e-4)  # theirs is float32 inside
