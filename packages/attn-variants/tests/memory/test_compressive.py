import pytest
import torch
from attn_core import Shape, configure, installed, state_bytes
from attn_core.errors import InvalidValue

SMALL = {"segment": 4, "memory": 4, "compressed": 3, "rate": 2}


def by_loops(layer, rows, options):
    """The paper's algorithm 1 for rows [token, width]: segment by segment, with both memories as lists of rows."""
    past, size, out = layer.past, layer.size, []
    memory, compressed = [], []
    for start in range(0, len(rows), past.segment):
        segment = list(rows[start : start + past.segment])
        for index, row in enumerate(segment):
            seen = torch.stack([*compressed, *memory, *segment[: index + 1]])
            heads = []
            for head in range(layer.heads):
                mine = slice(head * size, (head + 1) * size)
                query, key, value = (linear.weight[mine] for linear in (layer.query, layer.key, layer.value))
                shares = ((seen @ key.T) @ (query @ row) / size**0.5).softmax(0)
                heads.append(shares @ (seen @ value.T))
            out.append(torch.cat(heads))
        memory += segment
        while len(memory) > past.memory:
            oldest, memory = torch.stack(memory[: past.rate]), memory[past.rate :]
            small = oldest.mean(0) if layer.mix is None else layer.mix.weight @ oldest.flatten()
            compressed = [*compressed, small][-past.compressed :]
    return torch.stack(out) @ layer.output.weight.T


@pytest.mark.parametrize(
    "changed", [{}, {"memory": 8}, {"compressed": 1}, {"rate": 4}, {"segment": 2}, {"segment": 32}]
)
@pytest.mark.parametrize("pooling", ["convolution", "mean"])
def test_it_equals_the_papers_algorithm_forward_and_gradient(build, agrees, changed, pooling):
    options = SMALL | changed | {"pooling": pooling}
    layer = build("compressive", options, hidden_size=6, num_heads=2)
    rows = torch.randn(23, 6, dtype=torch.float64, requires_grad=True)
    expected, out = by_loops(layer, rows, options), layer(rows[None])[0]
    loops = agrees("compressive", paper="algorithm 1 in loops")
    loops.outputs(out, expected, 1e-13)
    probe = torch.randn_like(out)
    wanted = [rows, *layer.parameters()]
    ours, theirs = (
        torch.autograd.grad((made * probe).sum(), wanted, allow_unused=True, materialize_grads=True)
        for made in (out, expected)
    )
    loops.gradients(ours, theirs, 1e-12)


@pytest.mark.parametrize(
    "options", [{"segment": 64}, {"segment": 4, "memory": 64}, SMALL | {"rate": 1, "compressed": 64, "pooling": "mean"}]
)
def test_a_memory_of_everything_is_causal_attention(build, agrees, options):
    layer, plain = build("compressive", options, hidden_size=8, num_heads=2), build("mha", hidden_size=8, num_heads=2)
    plain.load_state_dict({name: value for name, value in layer.state_dict().items() if "mix" not in name})
    same = agrees("compressive", identity="a memory of everything is mha")
    same.functions(layer, plain, torch.randn(2, 30, 8, dtype=torch.float64), tolerance=1e-12)


def test_the_state_stops_growing():
    compressive = installed().mechanisms.get("compressive")
    specs = compressive.state(configure(compressive, SMALL, hidden_size=32, num_heads=4))
    slot = (2 * (3 + 4) * 32 + 2 * 32) * 4
    assert state_bytes(specs, tokens=5, dtype="float32") == 5 * 2 * 32 * 4 + slot
    assert state_bytes(specs, tokens=999, dtype="float32") == 8 * 2 * 32 * 4 + slot


def test_the_price_grows_linearly_with_the_length():
    compressive = installed().mechanisms.get("compressive")
    config = configure(compressive, SMALL, hidden_size=32, num_heads=4)
    prices = [compressive.cost(config, Shape(query=length, key=length)).flops for length in (640, 1280)]
    assert prices[1] == 2 * prices[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rate": 3}, "segment: 512 is not allowed; allowed: a multiple of the rate 3"),
        ({"memory": 6}, "memory: 6"),
        ({"compressed": 0}, "compressed: 0"),
        ({"pooling": "max"}, "pooling: 'max' is not allowed; allowed: one of 'convolution', 'mean'"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_by_name(options, message):
    with pytest.raises(InvalidValue, match=message):
        configure(installed().mechanisms.get("compressive"), options, hidden_size=8)
