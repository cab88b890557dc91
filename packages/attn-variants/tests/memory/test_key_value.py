import pytest
import torch
from attn_core import configure, installed, state_bytes
from attn_core.errors import InvalidValue


def by_loops(layer, rows, window, parts):
    """The equations of the paper for rows [token, width], one token and head at a time."""
    split = (rows @ layer.split.weight.T).view(len(rows), parts, layer.heads, layer.size)
    out = []
    for token in range(len(rows)):
        for head in range(layer.heads):
            key, value, last = split[:, 0, head], split[:, 1, head], split[token, -1, head]
            read = torch.zeros(layer.size, dtype=rows.dtype)
            past = range(max(0, token - window), token)
            if past:
                own = key[token] @ layer.of_own[head]
                scores = [layer.vector[head] @ torch.tanh(key[i] @ layer.of_past[head] + own) for i in past]
                read = torch.stack(scores).softmax(0) @ value[past.start : past.stop]
            out.append(torch.tanh(read @ layer.of_read[head] + last @ layer.of_last[head]))
    return torch.stack(out).view(len(rows), -1) @ layer.output.weight.T


@pytest.mark.parametrize(("name", "parts"), [("key_value", 2), ("key_value_predict", 3)])
@pytest.mark.parametrize("window", [1, 3, 20])
def test_it_equals_a_loop_over_the_equations_forward_and_gradient(build, agrees, name, parts, window):
    layer = build(name, {"window": window}, hidden_size=6, num_heads=2)
    rows = torch.randn(8, 6, dtype=torch.float64, requires_grad=True)
    expected, out = by_loops(layer, rows, window, parts), layer(rows[None])[0]
    loops = agrees(name, paper="the equations in loops")
    loops.outputs(out, expected, 1e-14)
    probe = torch.randn_like(out)
    wanted = [rows, *layer.parameters()]
    ours, theirs = (torch.autograd.grad((made * probe).sum(), wanted) for made in (out, expected))
    loops.gradients(ours, theirs, 1e-13)


def test_a_token_weighs_only_the_window_before_it(build):
    weights = build("key_value", {"window": 3}, hidden_size=6, num_heads=2).weights(
        torch.randn(1, 9, 6, dtype=torch.float64)
    )
    back = torch.arange(9)[:, None] - torch.arange(9)
    assert torch.equal(weights[0] > 0, ((back > 0) & (back <= 3)).expand(2, 9, 9))
    assert torch.allclose(weights[0, :, 1:].sum(-1), torch.ones(2, 8, dtype=torch.float64), rtol=0, atol=1e-14)


def test_what_predicts_is_not_remembered():
    sizes = []
    for name in ("key_value", "key_value_predict"):
        mechanism = installed().mechanisms.get(name)
        specs = mechanism.state(configure(mechanism, {"window": 5}, hidden_size=32, num_heads=4))
        sizes.append(state_bytes(specs, tokens=100, dtype="float32"))
    assert sizes == [6 * 2 * 32 * 4] * 2


def test_a_window_of_nothing_is_refused():
    with pytest.raises(InvalidValue, match="window: 0"):
        configure(installed().mechanisms.get("key_value"), {"window": 0}, hidden_size=8)
