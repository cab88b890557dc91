import math

import attn_plugin_template
import pytest
import torch
from attn_core import Causal, configure
from attn_core.errors import InvalidValue
from attn_testing import Agreement, MechanismLaws


class TestKerple(MechanismLaws):
    mechanism = "kerple_log"
    options = {"r1": 0.5, "r2": 2.0}


def test_the_bias_is_that_of_the_paper():
    bias = attn_plugin_template.LogarithmicBias(r1=2.0, r2=3.0)
    scores = bias(torch.zeros(1, 1, 4, 4, dtype=torch.float64), 0, torch.arange(4)[:, None], torch.arange(4))
    expected = [[-2.0 * math.log(1 + 3.0 * abs(i - j)) for j in range(4)] for i in range(4)]
    assert torch.allclose(scores[0, 0], torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-15)


def test_outputs_and_gradients_are_those_of_the_equation(record_property):
    kerple = attn_plugin_template.Kerple()
    layer = kerple.build(configure(kerple, {"r1": 0.5, "r2": 2.0}, hidden_size=12, num_heads=3)).double()

    def by_loops(rows):
        query, key, value = ((rows @ part.weight.T).view(7, 3, 4) for part in (layer.query, layer.key, layer.value))
        out = []
        for i in range(7):
            for h in range(3):
                fall = torch.tensor([0.5 * math.log(1 + 2.0 * (i - j)) for j in range(i + 1)], dtype=rows.dtype)
                out.append((key[: i + 1, h] @ query[i, h] / 2 - fall).softmax(0) @ value[: i + 1, h])
        return torch.stack(out).view(7, 12) @ layer.output.weight.T

    oracle = Agreement(record_property, "kerple_log", paper="the equation in loops")
    rows = torch.randn(7, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    oracle.functions(lambda given: layer(given[None])[0], by_loops, rows, tolerance=1e-12)


def test_a_larger_strength_moves_weight_to_near_keys():
    kerple = attn_plugin_template.Kerple()
    rows = torch.randn(1, 8, 16, generator=torch.Generator().manual_seed(0))
    shares = []
    for strength in (0.01, 1.0, 10.0):
        torch.manual_seed(0)
        layer = kerple.build(configure(kerple, {"r1": strength}, hidden_size=16, num_heads=2))
        shares.append(layer.weights(rows)[:, :, -1, -1].mean().item())
    assert shares == sorted(shares)


@pytest.mark.parametrize("option", ["r1", "r2"])
def test_a_bias_that_does_not_fall_is_refused_by_name(option):
    with pytest.raises(InvalidValue, match=option):
        configure(attn_plugin_template.Kerple(), {option: 0.0}, hidden_size=8)


def test_the_mask_is_a_value_of_the_config():
    kerple = attn_plugin_template.Kerple()
    assert kerple.spec(configure(kerple, hidden_size=8)).mask == Causal()
