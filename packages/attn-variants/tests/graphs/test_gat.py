import attn_variants
import pytest
import torch
from attn_core import Shape, configure, installed
from attn_core.errors import UserError
from attn_variants.mechanisms.gat_layer import GraphLayer

WIDTH, HEADS, TOKENS = 12, 3, 6
EDGES = ((0, 1), (2, 1), (5, 1), (1, 0), (3, 4), (4, 3), (1, 5), (0, 1))


def graph(build, **options):
    shared = {"causal": False, "bias": False} | {
        name: options.pop(name) for name in ("causal", "bias") if name in options
    }
    layer: GraphLayer = build("gat", options, hidden_size=WIDTH, num_heads=HEADS, **shared)
    return layer


def by_hand(layer, rows, neighbours):
    """The equations of the paper; `neighbours[i]` are those that token i attends to."""
    shape, out = layer.shape, []
    for i in range(len(rows)):
        heads = []
        for head in range(shape.config.num_heads):
            weight = layer.value.weight[head * shape.size : (head + 1) * shape.size].detach()
            both = torch.cat([layer.target[head], layer.source[head]]).detach()
            energies = [both @ torch.cat([weight @ rows[i], weight @ rows[j]]) for j in neighbours[i]]
            energies = [e if e > 0 else shape.slope * e for e in energies]
            shares = torch.stack(energies).softmax(0) if energies else []
            heads.append(
                sum((a * (weight @ rows[j]) for a, j in zip(shares, neighbours[i], strict=True)), 0 * weight[:, 0])
            )
        out.append(torch.cat(heads) if shape.merge == "concat" else torch.stack(heads).mean(0))
    return torch.stack(out)


def neighbours_of(edges, tokens, self_loops, causal):
    found = [{j for j, i in edges if i == token} | ({token} if self_loops else set()) for token in range(tokens)]
    return [sorted(j for j in own if j <= token or not causal) for token, own in enumerate(found)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("self_loops", [False, True])
@pytest.mark.parametrize("merge", ["concat", "mean"])
def test_outputs_equal_the_equations_in_loops(build, agrees, merge, self_loops, causal):
    rows = torch.randn(TOKENS, WIDTH, dtype=torch.float64)
    along = graph(build, edges=EDGES, merge=merge, self_loops=self_loops, causal=causal)
    expected = by_hand(along, rows, neighbours_of(EDGES, TOKENS, self_loops, causal))
    loops = agrees("gat", paper="equations 1 to 6 in loops")
    loops.outputs(along(rows[None])[0], expected, 1e-13)
    every = [(j, i) for i in range(TOKENS) for j in range(TOKENS) if i != j]
    full = graph(build, merge=merge, self_loops=self_loops, causal=causal)
    expected = by_hand(full, rows, neighbours_of(every, TOKENS, self_loops, causal))
    loops.outputs(full(rows[None])[0], expected, 1e-13)


@pytest.mark.parametrize("causal", [False, True])
def test_the_complete_graph_by_its_edges_equals_all_pairs(build, causal):
    every = [(j, i) for i in range(TOKENS + 2) for j in range(TOKENS + 2)]
    full, along = graph(build, causal=causal), graph(build, edges=every, causal=causal)
    along.load_state_dict(full.state_dict())
    rows = torch.randn(2, TOKENS, WIDTH, dtype=torch.float64)
    key_padding_mask = torch.tensor([[True] * TOKENS, [True, False, True, True, False, False]])
    for given in (None, key_padding_mask):
        found = []
        for layer in (full, along):
            inputs = rows.clone().requires_grad_()
            out = layer(inputs, key_padding_mask=given)
            found.append(
                (out, layer.weights(rows, key_padding_mask=given), *torch.autograd.grad(out.square().sum(), inputs))
            )
        for one, other in zip(*found, strict=True):
            assert torch.allclose(one, other, rtol=0, atol=1e-12)


def test_a_token_without_neighbours_gets_zeros_and_no_gradient(build):
    layer = graph(build, edges=EDGES, self_loops=False)
    rows = torch.randn(1, TOKENS, WIDTH, dtype=torch.float64, requires_grad=True)
    out = layer(rows)
    assert not out[0, 2].any()
    out[0, 2].sum().backward()
    assert not rows.grad.any()


@pytest.mark.parametrize(("batch", "tokens"), [(0, 3), (2, 0)])
def test_no_graphs_and_graphs_without_nodes_give_no_rows(batch, tokens):
    layer = attn_variants.layer("gat", hidden_size=8, num_heads=2, causal=False)
    edges = [torch.empty(0, 2, dtype=torch.int64)] * batch
    assert layer(torch.randn(batch, tokens, 8), edges=edges).shape == (batch, tokens, 8)


def test_the_price_grows_linearly_with_the_length_along_edges():
    gat = installed().mechanisms.get("gat")
    config = configure(gat, {"edges": EDGES}, hidden_size=WIDTH, num_heads=HEADS)
    prices = [gat.cost(config, Shape(query=tokens, key=tokens)).flops for tokens in (100, 200)]
    assert prices[1] == 2 * prices[0]


@pytest.mark.parametrize(
    "options",
    [
        {"edges": []},
        {"edges": [(0, -1)]},
        {"edges": [(0, 1, 2)]},
        {"edges": 3},
        {"edges": [(0, 0.5)]},
        {"merge": "sum"},
        {"slope": 1},
    ],
)
def test_a_bad_option_is_refused(options):
    with pytest.raises(UserError):
        configure(installed().mechanisms.get("gat"), options, hidden_size=WIDTH, num_heads=HEADS)


@pytest.mark.oracle
@pytest.mark.parametrize("merge", ["concat", "mean"])
@pytest.mark.parametrize("self_loops", [True, False])
def test_outputs_and_gradients_equal_those_of_torch_geometric(build, agrees, merge, self_loops):
    from torch_geometric.nn import GATConv

    size = WIDTH if merge == "mean" else WIDTH // HEADS
    their = GATConv(WIDTH, size, num_heads=HEADS, concat=merge == "concat", add_self_loops=self_loops).double()
    torch.nn.init.normal_(their.bias)
    layer = graph(build, edges=EDGES, merge=merge, self_loops=self_loops, bias=True)
    layer.load_state_dict(
        {
            "value.weight": their.lin.weight,
            "target": their.att_dst[0],
            "source": their.att_src[0],
            "bias": their.bias,
        }
    )
    rows = torch.randn(TOKENS, WIDTH, dtype=torch.float64)
    index = torch.tensor(sorted(set(EDGES))).T
    geometric = agrees("gat", package="torch-geometric GATConv")
    geometric.functions(lambda x: layer(x[None])[0], lambda x: their(x, index), rows, tolerance=1e-12)


@pytest.mark.parametrize("self_loops", [True, False])
@pytest.mark.parametrize("merge", ["concat", "mean"])
def test_each_example_may_have_a_graph_of_its_own(build, merge, self_loops):
    layer = graph(build, self_loops=self_loops, merge=merge).double()
    rows = torch.randn(3, TOKENS, WIDTH, dtype=torch.float64)
    graphs = [EDGES, ((0, 1), (4, 2), (2, 2)), ()]
    given = [torch.tensor(edges, dtype=torch.int64).reshape(-1, 2) for edges in graphs]
    found, weights = layer(rows, edges=given), layer.weights(rows, edges=given)
    for place, edges in enumerate(graphs):
        neighbours = neighbours_of(edges, TOKENS, self_loops, False)
        torch.testing.assert_close(found[place], by_hand(layer, rows[place], neighbours))
        seen = [[j for j in range(TOKENS) if weights[place, 0, i, j] > 0] for i in range(TOKENS)]
        assert seen == neighbours


@pytest.mark.parametrize(
    ("edges", "said"),
    [
        ([[[0, 1]]], "1 graphs"),
        ([[[0, 1]], [[0, 6]]], "tokens from 0 to 5"),
        ([[[0, 1]], [[0.0, 1.0]]], "int64"),
        ([[[0, 1]], [[0, 1, 2]]], "edges, 2"),
    ],
)
def test_graphs_that_do_not_fit_the_examples_are_refused(build, edges, said):
    layer = graph(build).double()
    with pytest.raises(UserError, match=said):
        layer(torch.randn(2, TOKENS, WIDTH, dtype=torch.float64), edges=[torch.tensor(own) for own in edges])


def test_weights_are_dropped_in_training_alone(build):
    layer = build("gat", {}, hidden_size=WIDTH, num_heads=HEADS, causal=False, dropout=0.6).double()
    rows = torch.randn(1, TOKENS, WIDTH, dtype=torch.float64)
    layer.eval()
    kept = layer(rows)
    layer.train()
    torch.manual_seed(0)
    drawn = torch.stack([layer(rows) for _ in range(3000)])
    assert not torch.allclose(drawn[0], kept)
    torch.testing.assert_close(drawn.mean(0), kept, rtol=0, atol=0.1)
