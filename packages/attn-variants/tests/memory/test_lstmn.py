import pytest
import torch
from attn_core import configure, installed, state_bytes


def by_loops(layer, rows):
    """The equations of the paper for rows [token, width], one head at a time."""
    size, hidden_states = layer.size, []
    for head in range(layer.heads):
        mine = slice(head * size, (head + 1) * size)
        gates = (rows @ layer.gates.weight.T + layer.gates.bias).view(len(rows), layer.heads, 4, size)[:, head]
        asked = rows @ layer.attend_input.weight[mine].T
        recurrent = layer.recurrent[head].view(size, 4, size)
        hidden, memory, summary = [], [], torch.zeros(size, dtype=rows.dtype)
        for token in range(len(rows)):
            found, held = torch.zeros(size, dtype=rows.dtype), torch.zeros(size, dtype=rows.dtype)
            if hidden:
                inner = [
                    layer.vector[head]
                    @ torch.tanh(past @ layer.attend_hidden[head] + asked[token] + summary @ layer.attend_summary[head])
                    for past in hidden
                ]
                shares = torch.stack(inner).softmax(0)
                found, held = shares @ torch.stack(hidden), shares @ torch.stack(memory)
            i, f, g, o = (gates[token, gate] + found @ recurrent[:, gate] for gate in range(4))
            memory.append(torch.sigmoid(f) * held + torch.sigmoid(i) * torch.tanh(g))
            hidden.append(torch.sigmoid(o) * torch.tanh(memory[-1]))
            summary = found
        hidden_states.append(torch.stack(hidden))
    return torch.cat(hidden_states, -1) @ layer.output.weight.T


@pytest.mark.parametrize("heads", [1, 2])
def test_it_equals_a_loop_over_the_equations_forward_and_gradient(build, agrees, heads):
    layer = build("lstmn", hidden_size=6, num_heads=heads)
    rows = torch.randn(6, 6, dtype=torch.float64, requires_grad=True)
    expected, out = by_loops(layer, rows), layer(rows[None])[0]
    loops = agrees("lstmn", paper="the equations in loops")
    loops.outputs(out, expected, 1e-14)
    probe = torch.randn_like(out)
    wanted = [rows, *layer.parameters()]
    ours, theirs = (torch.autograd.grad((made * probe).sum(), wanted) for made in (out, expected))
    loops.gradients(ours, theirs, 1e-13)


def test_attention_to_the_last_token_alone_makes_it_an_lstm(build, agrees, monkeypatch):
    layer = build("lstmn", hidden_size=4, num_heads=1)
    monkeypatch.setattr(
        layer,
        "_attention_weights",
        lambda query, keys, allowed: torch.eye(keys.shape[2], dtype=keys.dtype)[-1:].expand(2, 1, -1),
    )
    cell = torch.nn.LSTMCell(4, 4).double()
    with torch.no_grad():
        cell.weight_ih.copy_(layer.gates.weight)
        cell.weight_hh.copy_(layer.recurrent[0].T)
        cell.bias_ih.copy_(layer.gates.bias)
        cell.bias_hh.zero_()
    rows = torch.randn(2, 7, 4, dtype=torch.float64)
    state, hidden = None, []
    for token in range(7):
        state = cell(rows[:, token], state)
        hidden.append(state[0])
    expected = torch.stack(hidden, 1) @ layer.output.weight.T
    agrees("lstmn", package="torch nn.LSTMCell, all attention on the last token").outputs(layer(rows), expected, 1e-15)


def test_weights_are_shares_of_the_tokens_before(build):
    weights = build("lstmn", hidden_size=6, num_heads=2).weights(torch.randn(2, 5, 6, dtype=torch.float64))
    assert torch.equal(weights, weights.tril(-1))
    assert torch.allclose(weights[:, :, 1:].sum(-1), torch.ones(2, 2, 4, dtype=torch.float64), rtol=0, atol=1e-14)


def test_the_tapes_and_what_scores_read_are_three_rows_a_token():
    lstmn = installed().mechanisms.get("lstmn")
    specs = lstmn.state(configure(lstmn, hidden_size=32, num_heads=4))
    assert state_bytes(specs, tokens=10, dtype="float32") == (3 * 10 + 1) * 32 * 4
