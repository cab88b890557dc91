"""Coverage (See et al. 2017, equations 10 and 11) against loops, and its memory."""

import pytest
import torch
from attn_core import Slot, Source, configure, installed, state_bytes
from attn_core.errors import InvalidValue


def by_loops(layer, rows, source):
    """The equations for rows [query, width] and a source [key, width], one head and one number at a time."""
    width, outputs, weights = layer.vector.shape[1], [], []
    for head in range(layer.heads):
        mine = slice(head * width, (head + 1) * width)
        covered = [torch.zeros((), dtype=rows.dtype) for _ in source]
        read, shares = [], []
        for row in rows:
            asked = layer.query.weight[mine] @ row + layer.query.bias[mine]
            scores = []
            for j, token in enumerate(source):
                inner = asked + layer.key.weight[mine] @ token + layer.of_coverage[head] * covered[j]
                scores.append(sum(layer.vector[head][d] * torch.tanh(inner[d]) for d in range(width)))
            share = [score.exp() / sum(other.exp() for other in scores) for score in scores]
            values = [layer.value.weight[mine] @ token + layer.value.bias[mine] for token in source]
            read.append(sum(part * value for part, value in zip(share, values, strict=True)))
            covered = [before + part for before, part in zip(covered, share, strict=True)]
            shares.append(torch.stack(share))
        outputs.append(torch.stack(read))
        weights.append(torch.stack(shares))
    return torch.cat(outputs, -1) @ layer.output.weight.T + layer.output.bias, torch.stack(weights)


@pytest.mark.parametrize("heads", [1, 2])
def test_it_equals_a_loop_over_the_equations_forward_and_gradient(build, agrees, heads):
    layer = build("coverage", hidden_size=6, num_heads=heads, bias=True)
    for weight in layer.parameters():
        torch.nn.init.normal_(weight)
    rows, source = (torch.randn(n, 6, dtype=torch.float64, requires_grad=True) for n in (4, 5))
    (expected, weights), out = by_loops(layer, rows, source), layer(rows[None], source[None])[0]
    loops = agrees("coverage", paper="the equations in loops")
    loops.outputs(out, expected, 1e-13)
    torch.testing.assert_close(layer.weights(rows[None], source[None])[0], weights)
    probe, wanted = torch.randn_like(out), [rows, source, *layer.parameters()]
    ours, theirs = (torch.autograd.grad((made * probe).sum(), wanted) for made in (out, expected))
    loops.gradients(ours, theirs, 1e-12)


def test_earlier_queries_matter_only_by_what_they_covered(build):
    layer = build("coverage", hidden_size=8, num_heads=2)
    rows, source = (torch.randn(2, n, 8, dtype=torch.float64) for n in (3, 5))
    with torch.no_grad():
        layer.of_coverage.zero_()
        first = layer.weights(rows, source)
        assert torch.equal(first[:, :, :1], layer.weights(rows[:, :1], source))
        torch.testing.assert_close(first[:, :, 2:], layer.weights(rows[:, 2:], source))
        layer.of_coverage.fill_(-5)
        assert not torch.allclose(layer.weights(rows, source)[:, :, 2], first[:, :, 2], atol=1e-3)


def test_it_keeps_the_source_and_a_sum_for_every_token_of_the_longest():
    mechanism = installed().mechanisms.get("coverage")
    specs = mechanism.state(configure(mechanism, hidden_size=8, num_heads=2, max_seq_len=10))
    assert {name: type(spec) for name, spec in specs.items()} == {"source": Source, "coverage": Slot}
    sizes = [state_bytes(specs, tokens=tokens, source=7, dtype="float32") for tokens in (1, 500)]
    assert sizes == [7 * 2 * 8 * 4 + 2 * 10 * 4] * 2


def test_a_source_longer_than_it_keeps_sums_for_is_refused(build):
    layer = build("coverage", hidden_size=8, max_seq_len=4)
    rows, source = torch.randn(1, 2, 8, dtype=torch.float64), torch.randn(1, 5, 8, dtype=torch.float64)
    with pytest.raises(InvalidValue, match="5 tokens' is not allowed; allowed: at most max_seq_len 4"):
        layer(rows, source)
    with pytest.raises(InvalidValue, match="at most max_seq_len 4"):
        layer.encode(source[0])
