import pytest
import torch
from attn_core import configure, installed, state_bytes
from attn_core.errors import InvalidValue, UnknownName

SMALL = {"segment": 4, "memory": 4, "compressed": 3, "rate": 2}


def most_used_by_loops(layer, rows):
    """Rows [token, width], segment by segment: every weight that a token gets is noted beside it in the memory."""
    past, size, out = layer.past, layer.size, []
    memory, kept = [], []
    for start in range(0, len(rows), past.segment):
        segment = range(start, min(start + past.segment, len(rows)))
        weights = {place: [] for place in segment} | dict(memory)
        for asking in segment:
            seen = [*kept, *(place for place, _ in memory), *range(start, asking + 1)]
            heads = []
            for head in range(layer.heads):
                mine = slice(head * size, (head + 1) * size)
                query, key, value = (linear.weight[mine] for linear in (layer.query, layer.key, layer.value))
                shares = ((rows[seen] @ key.T) @ (query @ rows[asking]) / size**0.5).softmax(0)
                heads.append(shares @ (rows[seen] @ value.T))
                for place, share in zip(seen[len(kept) :], shares[len(kept) :].tolist(), strict=True):
                    weights[place].append(share)
            out.append(torch.cat(heads))
        memory += [(place, weights[place]) for place in segment]
        leaving, memory = memory[: max(0, len(memory) - past.memory)], memory[-past.memory :]
        means = {place: sum(noted) / len(noted) for place, noted in leaving}
        best = sorted(means, key=means.__getitem__, reverse=True)[: len(leaving) // past.rate]
        kept = [*kept, *sorted(best)][-past.compressed :]
    return torch.stack(out) @ layer.output.weight.T


@pytest.mark.parametrize(
    "changed", [{}, {"memory": 8}, {"memory": 6}, {"compressed": 1}, {"rate": 4}, {"segment": 2}, {"segment": 32}]
)
def test_the_tokens_that_stay_are_those_of_loops_that_note_every_weight(build, agrees, changed):
    layer = build("most_used", SMALL | changed, hidden_size=6, num_heads=2)
    rows = 3 * torch.randn(23, 6, dtype=torch.float64)
    rows.requires_grad_()
    expected, out = most_used_by_loops(layer, rows), layer(rows[None])[0]
    loops = agrees("most_used", paper="most-used tokens in loops")
    loops.outputs(out, expected, 1e-13)
    probe = torch.randn_like(out)
    wanted = [rows, *layer.parameters()]
    loops.gradients(*(torch.autograd.grad((made * probe).sum(), wanted) for made in (out, expected)), 1e-12)


@pytest.mark.parametrize("options", [{"segment": 64}, {"memory": 64}, SMALL | {"rate": 1, "compressed": 64}])
def test_a_memory_of_everything_is_causal_attention(build, agrees, options):
    layer, plain = build("most_used", options, hidden_size=8, num_heads=2), build("mha", hidden_size=8, num_heads=2)
    plain.load_state_dict(layer.state_dict())
    same = agrees("most_used", identity="a memory of everything is mha")
    same.functions(layer, plain, torch.randn(2, 30, 8, dtype=torch.float64), tolerance=1e-12)


def test_the_token_that_all_read_stays_when_the_rest_of_its_segment_is_gone(build):
    layer = build("most_used", SMALL | {"rate": 4, "compressed": 1}, hidden_size=8, num_heads=1)
    torch.nn.init.eye_(layer.key.weight)
    with torch.no_grad():
        layer.query.weight.zero_()
        layer.query.weight[0, 0] = 20.0
    rows = torch.rand(1, 12, 8, dtype=torch.float64)
    rows[..., 0] = 0.5
    rows[0, 2, 0] = 2.0
    for place in range(4):
        changed = rows.clone()
        changed[0, place, 1:] += 1.0
        same = torch.allclose(layer(rows)[0, 8:], layer(changed)[0, 8:], rtol=0, atol=1e-12)
        assert same == (place != 2)


def test_padding_is_never_kept(build):
    layer = build("most_used", SMALL, hidden_size=6, num_heads=2)
    rows = 3 * torch.randn(1, 20, 6, dtype=torch.float64)
    longer = torch.cat([rows, 9 * torch.randn(1, 7, 6, dtype=torch.float64)], dim=1)
    out = layer(longer, key_padding_mask=torch.arange(27)[None] < 20)
    torch.testing.assert_close(out[:, :20], layer(rows))


def test_the_state_stops_growing():
    most_used = installed().mechanisms.get("most_used")
    specs = most_used.state(configure(most_used, SMALL, hidden_size=32, num_heads=4))
    slot = (2 * 3 * 32 + 8) * 4
    assert state_bytes(specs, tokens=5, dtype="float32") == 5 * 2 * 32 * 4 + slot
    assert state_bytes(specs, tokens=999, dtype="float32") == 8 * 2 * 32 * 4 + slot


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rate": 3}, "segment: 512 is not allowed; allowed: a multiple of the rate 3"),
        ({"compressed": 0}, "compressed: 0"),
        ({"pooling": "mean"}, "pooling"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_by_name(options, message):
    most_used = installed().mechanisms.get("most_used")
    with pytest.raises((InvalidValue, UnknownName), match=message):
        configure(most_used, options, hidden_size=8)
