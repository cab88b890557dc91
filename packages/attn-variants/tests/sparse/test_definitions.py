"""Sparse mechanisms against their papers' definitions, one query at a time in float64, and their limits."""

import itertools

import pytest
import torch
from attn_core import Rotary, Shape, configure, installed
from attn_core.errors import InvalidValue, KernelRefused
from attn_testing.serving import Serving
from attn_testing.subject import Subject

WIDTH, HEADS, SIZE = 16, 4, 4


def neighbours(query, length, size, dilation):
    same = [j for j in range(length) if j % dilation == query % dilation]
    first = max(0, min(same.index(query) - size // 2, len(same) - size))
    return same[first : first + size]


def cells(query, size, dilation, grid):
    rows, columns = grid
    down = neighbours(query // columns, rows, size, dilation)
    return [row * columns + j for row in down for j in neighbours(query % columns, columns, size, dilation)]


def dilated(query, head, window, dilations):
    step = dilations[head % len(dilations)]
    return [j for j in range(query + 1) if (query - j) % step == 0 and (query - j) // step < window]


SETS = {
    "dilated_window": lambda i, n, h, o: dilated(i, h, **o),
    "strided": lambda i, n, h, o: [j for j in range(i + 1) if i - j <= o["stride"] or (i - j) % o["stride"] == 0],
    "fixed": lambda i, n, h, o: [
        j for j in range(i + 1) if j // o["block"] == i // o["block"] or j % o["block"] >= o["block"] - o["summaries"]
    ],
    "chunked": lambda i, n, h, o: [j for j in range(i + 1) if j // o["chunk"] == i // o["chunk"]],
    "attention_sinks": lambda i, n, h, o: [j for j in range(i + 1) if j < o["sinks"] or i - j < o["window"]],
    "block_local": lambda i, n, h, o: [j for j in range(i + 1) if i // o["block"] - j // o["block"] <= o["reach"]],
    "chunk_ring": lambda i, n, h, o: [
        j for j in range(n) if (i // o["chunk"] - j // o["chunk"]) % -(-n // o["chunk"]) <= o["reach"]
    ],
    "neighborhood": lambda i, n, h, o: [j for j in cells(i, **o) if j < n] if "grid" in o else neighbours(i, n, **o),
}
"""The keys of query i of n and head h under some options, as the papers' sets say."""

CASES = [
    ("dilated_window", {"window": 3, "dilations": (1, 4)}, True),
    ("strided", {"stride": 5}, True),
    ("fixed", {"block": 6, "summaries": 2}, True),
    ("chunked", {"chunk": 7}, True),
    ("attention_sinks", {"sinks": 3, "window": 5}, True),
    ("block_local", {"block": 4, "reach": 2}, True),
    ("chunk_ring", {"chunk": 4, "reach": 1}, False),
    ("neighborhood", {"size": 5, "dilation": 1}, False),
    ("neighborhood", {"size": 4, "dilation": 3}, False),
    ("neighborhood", {"size": 3, "dilation": 1, "grid": (4, 6)}, False),
]


@pytest.mark.parametrize(("name", "options", "causal"), CASES, ids=str)
@pytest.mark.parametrize("kernel", [None, "plain", "torch_sdpa", "block_sparse"])
def test_outputs_and_gradients_are_those_of_the_definition(agrees, name, options, causal, kernel):
    mechanism = installed().mechanisms.get(name)
    layer = mechanism.build(configure(mechanism, options, hidden_size=WIDTH, num_heads=HEADS, causal=causal)).double()
    layer.use_kernel(kernel)
    rows = torch.randn(2, 23, WIDTH, dtype=torch.float64, requires_grad=True)
    query, key, value = (linear(rows).unflatten(-1, (HEADS, SIZE)) for linear in (layer.query, layer.key, layer.value))
    expected = torch.zeros_like(query)
    for b, i, h in itertools.product(range(2), range(23), range(HEADS)):
        seen = SETS[name](i, 23, h, options)
        expected[b, i, h] = torch.softmax(key[b, seen, h] @ query[b, i, h] / SIZE**0.5, 0) @ value[b, seen, h]
    expected = layer.output(expected.flatten(-2))
    probe = torch.linspace(-1, 1, expected.numel(), dtype=torch.float64).view_as(expected)
    leaves = [rows, layer.query.weight, layer.key.weight, layer.value.weight]
    out = layer(rows)
    sets = agrees(name, paper="the paper's sets of keys, query by query")
    sets.outputs(out, expected, 1e-12)
    sets.gradients(*(torch.autograd.grad((made * probe).sum(), leaves) for made in (out, expected)), 1e-11)


def turned(vector, place, rotary):
    """A head [..., size] turned to a place: pairs of halves by place · base^(-2p/size)."""
    half = vector.shape[-1] // 2
    angles = place * rotary.base ** (-torch.arange(half, dtype=torch.float64) / half)
    first, second = vector[..., :half], vector[..., half:]
    return torch.cat(
        [first * angles.cos() - second * angles.sin(), first * angles.sin() + second * angles.cos()], dim=-1
    )


def test_rotary_positions_of_attention_sinks_are_places_in_the_cache(agrees):
    sinks, window, rotary = 2, 4, Rotary()
    mechanism = installed().mechanisms.get("attention_sinks")
    options = {"sinks": sinks, "window": window}
    layer = mechanism.build(configure(mechanism, options, hidden_size=WIDTH, num_heads=HEADS, rotary=rotary)).double()
    rows = torch.randn(15, WIDTH, dtype=torch.float64)
    query, key, value = (linear(rows).unflatten(-1, (HEADS, SIZE)) for linear in (layer.query, layer.key, layer.value))
    expected = torch.zeros_like(query)
    for i, h in itertools.product(range(15), range(HEADS)):
        cache = [j for j in range(i + 1) if j < sinks or i - j < window]
        keys = torch.stack([turned(key[j, h], place, rotary) for place, j in enumerate(cache)])
        weights = torch.softmax(keys @ turned(query[i, h], len(cache) - 1, rotary) / SIZE**0.5, 0)
        expected[i, h] = weights @ value[cache, h]
    places = agrees("attention_sinks", paper="positions in the cache, query by query")
    places.outputs(layer(rows[None])[0], layer.output(expected.flatten(-2)), 1e-12)


def test_attention_sinks_remember_as_much_of_a_long_stream_as_of_a_short_one():
    subject = Subject("attention_sinks", {"sinks": 2, "window": 4})
    serving = Serving(subject.cases[0])
    serving.open(0)
    weights = []
    for tokens in (6, 1, 30, 1):
        serving.step({0: subject.cases[0].rows(tokens)})
        weights.append(serving.store.live_bytes(0, serving.done[0]))
    assert len(set(weights)) == 1


def test_longformer_whose_tokens_are_all_global_is_full_attention_with_the_global_projections(agrees):
    catalog = installed().mechanisms
    longformer, full = catalog.get("longformer"), catalog.get("mha")
    options = {"window": 2, "global_positions": tuple(range(9))}
    layer = longformer.build(configure(longformer, options, hidden_size=WIDTH, num_heads=HEADS, causal=False)).double()
    other = full.build(configure(full, hidden_size=WIDTH, num_heads=HEADS, causal=False)).double()
    weights = {f"{name}.weight": getattr(layer.inner, name).weight for name in ("query", "key", "value")}
    other.load_state_dict({**weights, "output.weight": layer.output.weight})
    rows = torch.randn(2, 9, WIDTH, dtype=torch.float64)
    agrees("longformer", identity="all tokens global is mha").functions(layer, other, rows, tolerance=1e-12)
    assert torch.allclose(layer.weights(rows), other.weights(rows), rtol=0, atol=1e-13)


LIMITS = [
    ("dilated_window", {"window": 40, "dilations": (1,)}),
    ("strided", {"stride": 1}),
    ("fixed", {"block": 3, "summaries": 3}),
    ("chunked", {"chunk": 12}),
    ("attention_sinks", {"sinks": 12, "window": 1}),
    ("block_local", {"block": 1, "reach": 12}),
    ("bigbird", {"block": 3, "random": 0}),
    ("chunk_ring", {"chunk": 4, "reach": 2}),
    ("neighborhood", {"size": 12}),
]


@pytest.mark.parametrize(("name", "options"), LIMITS, ids=str)
def test_where_everything_is_seen_each_is_multi_head_attention(name, options):
    catalog = installed().mechanisms
    sparse, full = catalog.get(name), catalog.get("mha")
    causal = name not in {"bigbird", "neighborhood", "chunk_ring"}
    layer = sparse.build(configure(sparse, options, hidden_size=WIDTH, num_heads=HEADS, causal=causal)).double()
    other = full.build(configure(full, hidden_size=WIDTH, num_heads=HEADS, causal=causal)).double()
    other.load_state_dict(layer.state_dict())
    rows = torch.randn(2, 12, WIDTH, dtype=torch.float64)
    assert torch.allclose(layer(rows), other(rows), rtol=0, atol=1e-13)


def test_heads_of_the_fixed_pattern_read_summary_cells_of_their_own():
    mechanism = installed().mechanisms.get("fixed")
    options = {"block": 8, "summaries": 2, "pattern": "heads"}
    mask = mechanism.spec(configure(mechanism, options, hidden_size=WIDTH, num_heads=4)).mask
    assert [key for key in range(8) if mask.of_head(1).allows(20, key)] == [6, 7]
    assert [key for key in range(8) if mask.of_head(3).allows(20, key)] == [4, 5]
    assert mask.of_head(0) == mask.of_head(2)


@pytest.mark.parametrize(
    ("name", "options", "exponent", "slack"),
    [
        ("strided", {}, 1.5, 0.05),
        ("chunked", {"chunk": 64}, 1.0, 0.05),
        ("block_local", {"block": 64}, 1.0, 0.12),
        ("attention_sinks", {"sinks": 4, "window": 60}, 1.0, 0.08),
        ("dilated_window", {"window": 16, "dilations": (1, 2)}, 1.0, 0.05),
        ("neighborhood", {"size": 33}, 1.0, 0.01),
        ("chunk_ring", {"chunk": 32}, 1.0, 0.01),
        ("bigbird", {"block": 8, "random": 1}, 1.0, 0.12),
        ("longformer", {"window": 32}, 1.0, 0.05),
    ],
)
def test_cl_41_pairs_that_are_left_grow_as_the_papers_say(name, options, exponent, slack):
    mechanism = installed().mechanisms.get(name)
    encoder = name in {"bigbird", "neighborhood", "longformer", "chunk_ring"}
    found = []
    for length in (256, 4096):
        own = {"stride": round(length**0.5)} if name == "strided" else options
        config = configure(mechanism, own, hidden_size=1, num_heads=1, causal=not encoder)
        found.append(mechanism.spec(config).mask.count(length, length))
        cost = mechanism.cost(config, Shape(query=length, key=length))
        assert cost.allowed_flops <= cost.flops
    grown = torch.tensor(found[1] / found[0]).log2().item() / 4
    assert abs(grown - exponent) <= slack


BAD = [
    ("neighborhood", {"grid": (3,)}, r"grid: \(3,\) is not allowed; allowed: two numbers"),
    ("neighborhood", {"grid": (3, 0)}, r"grid: \(3, 0\)"),
    ("dilated_window", {"dilations": (1, 0)}, r"dilations: \(1, 0\) is not allowed"),
    ("dilated_window", {"dilations": ()}, r"dilations: \(\) is not allowed; allowed: at least one"),
    ("dilated_window", {"dilations": 2}, r"dilations: 2"),
    ("dilated_window", {"window": 0}, r"window: 0"),
    ("longformer", {"window": -1}, r"window: -1"),
    ("longformer", {"global_positions": (-1,)}, r"global_positions: \(-1,\)"),
    ("strided", {"stride": 0}, r"stride: 0"),
    (
        "strided",
        {"pattern": "both"},
        r"pattern: 'both' is not allowed; allowed: one of 'union', 'heads', 'local', 'column'",
    ),
    ("fixed", {"block": 4, "summaries": 5}, r"fixed\.summaries: 5"),
    ("bigbird", {"block": 0}, r"block: 0"),
    ("bigbird", {"random": -1}, r"random: -1"),
    ("bigbird", {"parts": ("middle",)}, r"parts: \('middle',\)"),
    ("neighborhood", {"size": 0}, r"size: 0"),
    ("chunked", {"chunk": 1.5}, r"chunk: 1\.5"),
    ("block_local", {"reach": -1}, r"reach: -1"),
    ("attention_sinks", {"sinks": 0}, r"sinks: 0"),
    ("chunk_ring", {"chunk": 0}, r"chunk: 0"),
    ("chunk_ring", {"reach": -1}, r"reach: -1"),
]


@pytest.mark.parametrize(("name", "options", "message"), BAD, ids=str)
def test_bad_options_are_refused_by_name_with_what_is_allowed(name, options, message):
    with pytest.raises(InvalidValue, match=message):
        configure(installed().mechanisms.get(name), options, hidden_size=WIDTH, num_heads=HEADS)


@pytest.mark.parametrize("name", ["bigbird", "neighborhood", "longformer"])
def test_encoders_refuse_to_be_causal_by_name(name):
    mechanism = installed().mechanisms.get(name)
    with pytest.raises(InvalidValue, match=rf"causal: True .*allowed: False: mechanism '{name}' has no causal form"):
        mechanism.build(configure(mechanism, hidden_size=WIDTH, num_heads=HEADS, causal=True))


@pytest.mark.parametrize("name", ["strided", "fixed", "attention_sinks"])
def test_patterns_that_look_back_refuse_not_to_be_causal_by_name(name):
    mechanism = installed().mechanisms.get(name)
    with pytest.raises(InvalidValue, match=rf"causal: False .*allowed: True: mechanism '{name}' only looks back"):
        mechanism.build(configure(mechanism, hidden_size=WIDTH, num_heads=HEADS, causal=False))


def test_a_kernel_asked_for_by_name_that_refuses_raises():
    mechanism = installed().mechanisms.get("mha")
    layer = mechanism.build(configure(mechanism, hidden_size=WIDTH, num_heads=HEADS))
    layer.use_kernel("block_sparse")
    with pytest.raises(KernelRefused, match="mask: 'causal'"):
        layer(torch.randn(1, 3, WIDTH))


@pytest.mark.parametrize(("steps", "stride", "tokens"), [(2, 8, 64), (3, 4, 64), (4, 3, 81)])
def test_strides_reach_every_earlier_position_in_their_steps_and_not_in_fewer(steps, stride, tokens):
    mechanism = installed().mechanisms.get("strided")
    config = configure(mechanism, {"steps": steps, "stride": stride}, hidden_size=8)
    mask = mechanism.spec(config).mask
    seen = [{j for j in range(tokens) if mask.allows(i, j)} for i in range(tokens)]
    powers = [stride**power for power in range(steps)]
    for i, own in enumerate(seen):
        near = {i - a * power for power in powers[:-1] for a in range(stride + 1)}
        assert own == {j for j in near | set(range(i, -1, -powers[-1])) if j >= 0}
    reached = [[own] for own in seen]
    for i, levels in enumerate(reached):
        for _ in range(steps - 1):
            levels.append(set().union(*(seen[j] for j in levels[-1])))
        assert levels[-1] == set(range(i + 1))
    assert reached[-1][-2] != set(range(tokens))
    assert mask.count(tokens, tokens) == sum(map(len, seen))


@pytest.mark.parametrize(
    ("steps", "stride", "accepted"), [(8, 2, True), (8, 1, True), (9, 1, False), (8, 2**9, False), (8, 2**8, True)]
)
@pytest.mark.parametrize("pattern", ["union", "heads", "column"])
def test_distances_of_strides_that_no_text_has_are_refused(steps, stride, accepted, pattern):
    mechanism = installed().mechanisms.get("strided")
    options = {"steps": steps, "stride": stride, "pattern": pattern}
    if not accepted:
        with pytest.raises(InvalidValue, match="steps"):
            configure(mechanism, options, hidden_size=8)
        return
    layer = mechanism.build(configure(mechanism, options, hidden_size=8, num_heads=2))
    assert layer(torch.randn(1, 9, 8)).isfinite().all()
