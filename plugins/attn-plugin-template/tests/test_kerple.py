import math

import attn_plugin_template
import pytest
import torch
from attn_core import Causal, configure
from attn_core.errors import InvalidValue
from attn_testing import Agreement


def test_the_bias_is_that_of_the_paper():
    places, zeros = torch.arange(4), torch.zeros(1, 1, 4, 4, dtype=torch.float64)
    learned = {"log_r1": torch.tensor([2.0]).double().log(), "log_r2": torch.tensor([3.0]).double().log()}
    scores = attn_plugin_template.logarithmic_bias(zeros, torch.tensor(0), places[:, None], places, **learned)
    expected = [[-2.0 * math.log(1 + 3.0 * abs(i - j)) for j in range(4)] for i in range(4)]
    assert torch.allclose(scores[0, 0], torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-15)


def test_outputs_and_gradients_are_those_of_the_equation(record_property):
    kerple = attn_plugin_template.Kerple()
    layer = kerple.build(configure(kerple, {"r1": 0.5, "r2": 2.0}, hidden_size=12, num_heads=3)).double()
    learned = dict(layer.modifiers["function"].named_parameters())
    with torch.no_grad():
        learned["log_r1"] += torch.tensor([-0.3, 0.0, 0.4])
        learned["log_r2"] += torch.tensor([0.2, -0.5, 0.0])

    def by_loops(rows):
        query, key, value = ((rows @ part.weight.T).view(7, 3, 4) for part in (layer.query, layer.key, layer.value))
        out = []
        for i in range(7):
            for h in range(3):
                r1, r2 = learned["log_r1"][h].exp(), learned["log_r2"][h].exp()
                fall = torch.stack([r1 * (1 + r2 * (i - j)).log() for j in range(i + 1)])
                out.append((key[: i + 1, h] @ query[i, h] / 2 - fall).softmax(0) @ value[: i + 1, h])
        return torch.stack(out).view(7, 12) @ layer.output.weight.T

    oracle = Agreement(record_property, "kerple_log", paper="the equation in loops")
    rows = torch.randn(7, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    oracle.functions(lambda given: layer(given[None])[0], by_loops, rows, tolerance=1e-12)
    for name, weight in learned.items():
        outs = layer(rows[None]), by_loops(rows)
        ours, theirs = (torch.autograd.grad(out.square().sum(), weight)[0] for out in outs)
        assert ours.abs().min() > 1e-3
        assert torch.allclose(ours, theirs, rtol=1e-12, atol=1e-12), name


def test_strength_and_onset_are_learned_and_saved():
    kerple = attn_plugin_template.Kerple()
    config = configure(kerple, {"r1": 0.5, "r2": 2.0}, hidden_size=8, num_heads=2)
    layer = kerple.build(config)
    names = ["modifiers.function.log_r1", "modifiers.function.log_r2"]
    assert [name for name in layer.state_dict() if name.startswith("modifiers")] == names
    assert torch.allclose(layer.state_dict()[names[1]].exp(), torch.tensor([2.0, 2.0]))
    rows = torch.randn(2, 9, 8, generator=torch.Generator().manual_seed(0))
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    layer(rows).square().sum().backward()
    optimizer.step()
    moved = layer.state_dict()
    assert all((moved[name].exp() - start).abs().min() > 1e-4 for name, start in zip(names, (0.5, 2.0), strict=True))
    again = kerple.build(config)
    again.load_state_dict(moved)
    assert torch.equal(again(rows), layer(rows))


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
