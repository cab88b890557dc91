import pytest
import torch
from attn_core import Shape, configure, installed, state_bytes
from attn_core.errors import InvalidValue

SMALL = {"segment": 4, "memory": 4, "compressed": 3, "rate": 2}


def by_loops(layer, rows, options):
    """The paper's algorithm 1 for rows [token, width]: segment by segment, with both memories as lists of rows."""
    past, size, out = layer.past, layer.size, []
    memory, compressed, gone = [], [], []
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
            gone = [*gone, *oldest]
            if past.dilation > 1:
                missing = [torch.zeros_like(oldest[0])] * (past.rate * past.dilation)
                oldest = torch.stack([*missing, *gone][:: -past.dilation][: past.rate][::-1])
            pooled = {"mean": oldest.mean(0), "max": oldest.amax(0)}
            small = pooled.get(options.get("pooling")) if layer.mix is None else layer.mix.weight @ oldest.flatten()
            compressed = [*compressed, small][-past.compressed :]
    return torch.stack(out) @ layer.output.weight.T


@pytest.mark.parametrize(
    "changed", [{}, {"memory": 8}, {"compressed": 1}, {"rate": 4}, {"segment": 2}, {"segment": 32}]
)
@pytest.mark.parametrize(
    "pooling", [{"pooling": "convolution"}, {"dilation": 2}, {"dilation": 3}, {"pooling": "mean"}, {"pooling": "max"}]
)
def test_it_equals_the_papers_algorithm_forward_and_gradient(build, agrees, changed, pooling):
    options = SMALL | changed | pooling
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
    "options",
    [
        {"segment": 64},
        {"segment": 4, "memory": 64},
        SMALL | {"rate": 1, "compressed": 64, "pooling": "mean"},
    ],
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
        (
            {"pooling": "sum"},
            "pooling: 'sum' is not allowed; allowed: one of 'convolution', 'mean', 'max'",
        ),
        ({"dilation": 0}, "dilation: 0"),
        ({"dilation": 2, "pooling": "max"}, "dilation: 2 .* allowed: 1 with pooling 'max'"),
        ({"pooling": "max", "reconstruction": 0.5}, "reconstruction: 0.5 .* allowed: 0 with pooling 'max'"),
        ({"reconstruction": -1}, "reconstruction: -1"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_by_name(options, message):
    with pytest.raises(InvalidValue, match=message):
        configure(installed().mechanisms.get("compressive"), options, hidden_size=8)


def reconstruction_by_loops(layer, rows, past):
    """Algorithm 2 for rows [token, width]: what each segment reads in the tokens that then leave the memory."""
    size, total, count = layer.size, 0.0, 0

    def read(query, seen):
        out = []
        for head in range(layer.heads):
            mine, parts = slice(head * size, (head + 1) * size), (layer.query, layer.key, layer.value)
            q, k, v = (linear.weight.detach()[mine] for linear in parts)
            shares = ((seen @ k.T) @ (q @ query) / size**0.5).softmax(0)
            out.append(shares @ (seen @ v.T))
        return torch.cat(out)

    for start in range(0, len(rows), past.segment):
        old = rows[max(0, start - past.memory) : max(0, start - past.memory + past.segment)].detach()
        if not len(old):
            continue
        new = torch.stack([layer.mix.weight @ block.flatten() for block in old.split(past.rate)])
        for row in rows[start : start + past.segment].detach():
            total = total + (read(row, old) - read(row, new)).square().sum()
            count += layer.heads * size
    return total / count


@pytest.mark.parametrize(
    "changed",
    [{}, {"memory": 8}, {"segment": 6, "memory": 6, "rate": 3}, {"dilation": 1}],
)
def test_the_reconstruction_loss_is_algorithm_2_and_trains_the_convolution_alone(build, agrees, changed):
    options = SMALL | changed | {"reconstruction": 0.5}
    layer = build("compressive", options, hidden_size=6, num_heads=2).train()
    rows = torch.randn(24, 6, dtype=torch.float64, requires_grad=True)
    assert layer.take_auxiliary_loss() is None
    layer(rows[None])
    ours, theirs = layer.take_auxiliary_loss(), 0.5 * reconstruction_by_loops(layer, rows, layer.past)
    loops = agrees("compressive", paper="algorithm 2 in loops")
    loops.outputs(ours[None], theirs[None], 1e-13)
    wanted = [rows, *layer.parameters()]
    found, expected = (torch.autograd.grad(loss, wanted, allow_unused=True) for loss in (ours, theirs))
    at = next(place for place, weight in enumerate(wanted) if weight is layer.mix.weight)
    assert [place for place, gradient in enumerate(found) if gradient is not None] == [at]
    loops.gradients([found[at]], [expected[at]], 1e-12)
    assert layer.take_auxiliary_loss() is None


def test_training_the_convolution_on_it_makes_less_be_lost(build):
    layer = build("compressive", SMALL | {"reconstruction": 1.0}, hidden_size=6, num_heads=2).train()
    rows = torch.randn(4, 24, 6, dtype=torch.float64)
    optimizer, losses = torch.optim.Adam([layer.mix.weight], lr=0.02), []
    for _ in range(60):
        layer(rows)
        losses.append(layer.take_auxiliary_loss())
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < 0.5 * losses[0]


def test_padding_is_neither_read_nor_reconstructed(build):
    layer = build("compressive", SMALL | {"reconstruction": 1.0}, hidden_size=6, num_heads=2).train()
    rows = torch.randn(1, 20, 6, dtype=torch.float64)
    layer(rows)
    alone = layer.take_auxiliary_loss()
    longer = torch.cat([rows, torch.randn(1, 5, 6, dtype=torch.float64)], dim=1)
    layer(longer, key_padding_mask=torch.arange(25)[None] < 20)
    torch.testing.assert_close(layer.take_auxiliary_loss(), alone)
