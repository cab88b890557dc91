"""The layer against torch's own, and the mechanisms against one another."""

import pytest
import torch
from attn_core import RaggedBatch, Rotary, configure, installed
from attn_core.batch import Rows
from attn_core.errors import Incompatible, InvalidValue, KernelRefused, UnknownName
from torch import nn


def copied_into_torch(layer, width, heads):
    """`nn.MultiheadAttention` with the layer's weights."""
    theirs = nn.MultiheadAttention(width, heads, batch_first=True, bias=True).double()
    with torch.no_grad():
        theirs.in_proj_weight.copy_(torch.cat([layer.query.weight, layer.key.weight, layer.value.weight]))
        theirs.in_proj_bias.copy_(torch.cat([layer.query.bias, layer.key.bias, layer.value.bias]))
        theirs.out_proj.weight.copy_(layer.output.weight)
        theirs.out_proj.bias.copy_(layer.output.bias)
    return theirs


@pytest.mark.parametrize("causal", [True, False])
def test_multi_head_attention_is_that_of_torch(build, agrees, causal):
    layer = build("mha", hidden_size=24, num_heads=3, causal=causal, bias=True)
    for bias in (layer.query.bias, layer.key.bias, layer.value.bias, layer.output.bias):
        nn.init.normal_(bias)
    rows = torch.randn(2, 6, 24, dtype=torch.float64)
    key_padding_mask = torch.tensor([[True] * 6, [True] * 4 + [False] * 2])
    dropped = torch.ones(6, 6).triu(1).bool() if causal else None
    peer, options = copied_into_torch(layer, 24, 3), {"key_padding_mask": ~key_padding_mask, "attn_mask": dropped}
    agrees("mha", package="torch nn.MultiheadAttention").functions(
        lambda given: layer(given, key_padding_mask=key_padding_mask),
        lambda given: peer(given, given, given, **options)[0],
        rows,
        weights=[(layer.output.weight, peer.out_proj.weight), (layer.output.bias, peer.out_proj.bias)],
        tolerance=1e-12,
    )
    _, weights = peer(rows, rows, rows, average_attn_weights=False, **options)
    assert torch.allclose(layer.weights(rows, key_padding_mask=key_padding_mask), weights, rtol=0, atol=1e-13)


def test_cross_attention_is_that_of_torch(build, agrees):
    layer = build("mha", hidden_size=24, num_heads=3, bias=True, cross=True)
    rows, source = torch.randn(2, 4, 24, dtype=torch.float64), torch.randn(2, 7, 24, dtype=torch.float64)
    key_padding_mask = torch.tensor([[True] * 7, [True] * 5 + [False] * 2])
    peer = copied_into_torch(layer, 24, 3)
    agrees("mha", package="torch nn.MultiheadAttention over a source").functions(
        lambda query, memory: layer(query, memory, key_padding_mask=key_padding_mask),
        lambda query, memory: peer(query, memory, memory, key_padding_mask=~key_padding_mask)[0],
        rows,
        source,
        tolerance=1e-12,
    )
    _, weights = peer(rows, source, source, key_padding_mask=~key_padding_mask, average_attn_weights=False)
    assert torch.allclose(layer.weights(rows, source, key_padding_mask=key_padding_mask), weights, rtol=0, atol=1e-13)


@pytest.mark.parametrize(("name", "key_value_heads"), [("gqa", 2), ("mqa", 1), ("gqa", 4)])
def test_grouped_heads_are_multi_head_attention_with_copied_keys_and_values(build, agrees, name, key_value_heads):
    grouped = build(name, hidden_size=16, num_heads=4, num_kv_heads=key_value_heads)
    whole = build("mha", hidden_size=16, num_heads=4)
    state = grouped.state_dict()
    for part in ("key.weight", "value.weight"):
        state[part] = state[part].view(key_value_heads, 4, 16).repeat_interleave(4 // key_value_heads, 0).flatten(0, 1)
    whole.load_state_dict(state)
    same = agrees(name, identity="mha with copied keys and values")
    same.functions(grouped, whole, torch.randn(2, 5, 16, dtype=torch.float64), tolerance=1e-12)


@pytest.mark.parametrize(("name", "key_value_heads"), [("gqa", 2), ("mqa", 1)])
def test_grouped_heads_are_those_of_torchs_attention(build, agrees, name, key_value_heads):
    layer = build(name, hidden_size=16, num_heads=4, num_kv_heads=key_value_heads)

    def theirs(rows):
        query, key, value = (
            linear(rows).unflatten(-1, (-1, 4)).transpose(1, 2) for linear in (layer.query, layer.key, layer.value)
        )
        out = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return layer.output(out.transpose(1, 2).flatten(-2))

    layer.use_kernel("plain")
    oracle = agrees(name, package="torch scaled_dot_product_attention, enable_gqa")
    oracle.functions(layer, theirs, torch.randn(2, 5, 16, dtype=torch.float64), tolerance=1e-12)


def test_gqa_without_a_number_of_key_value_heads_shares_among_as_few_as_it_can():
    gqa = installed().mechanisms.get("gqa")
    counts = {
        heads: gqa.spec(configure(gqa, hidden_size=36, num_heads=heads)).heads.key_value for heads in (1, 4, 9, 12)
    }
    assert counts == {1: 1, 4: 2, 9: 3, 12: 6}


def test_a_window_as_long_as_the_sequence_is_causal_attention(build, agrees):
    windowed, whole = (
        build("sliding_window", {"window": 6}, hidden_size=16, num_heads=2),
        build("mha", hidden_size=16, num_heads=2),
    )
    whole.load_state_dict(windowed.state_dict())
    rows = torch.randn(1, 6, 16, dtype=torch.float64)
    same = agrees("sliding_window", identity="a window as long as the sequence is mha")
    same.functions(windowed, whole, rows, tolerance=1e-12)
    longer = torch.randn(1, 9, 16, dtype=torch.float64)
    assert (windowed(longer) - whole(longer)).abs().amax(-1)[0, 6:].min() > 1e-6


def test_a_window_of_one_sees_itself_only(build):
    layer = build("sliding_window", {"window": 1}, hidden_size=8, num_heads=2)
    rows = torch.randn(1, 5, 8, dtype=torch.float64)
    assert torch.allclose(layer(rows), layer.output(layer.value(rows)), rtol=0, atol=1e-13)


def test_general_attention_with_the_identity_is_unscaled_dot_attention(build, agrees):
    general, dot = build("general", hidden_size=16, num_heads=2), build("mha", hidden_size=16, num_heads=2)
    with torch.no_grad():
        general.score.weight.copy_(torch.eye(8, dtype=torch.float64).expand(2, 8, 8) * 8**-0.5)
    dot.load_state_dict({name: weight for name, weight in general.state_dict().items() if "score" not in name})
    same = agrees("general", identity="a scaled identity is mha")
    same.functions(general, dot, torch.randn(2, 5, 16, dtype=torch.float64), tolerance=1e-12)


def test_additive_attention_is_its_network_pair_by_pair(build, agrees):
    layer = build("additive", {"intermediate_size": 5}, hidden_size=8, num_heads=2, num_kv_heads=1, causal=False)
    for parameter in layer.score.parameters():
        nn.init.normal_(parameter)
    rows = torch.randn(1, 4, 8, dtype=torch.float64)
    query, key = layer.query(rows).view(4, 2, 4), layer.key(rows).view(4, 1, 4)
    weights, score = layer.weights(rows)[0], layer.score
    for head in range(2):
        for i in range(4):
            hidden = [
                query[i, head] @ score.query_weight[head] + key[j, 0] @ score.key_weight[0] + score.bias[head]
                for j in range(4)
            ]
            energies = torch.stack([score.vector[head] @ torch.tanh(units) for units in hidden])
            agrees("additive", paper="the network, pair by pair").outputs(
                weights[head, i], torch.softmax(energies, 0), 1e-13
            )


@pytest.mark.parametrize(
    ("name", "options", "shared", "words"),
    [
        ("mha", {}, {"num_kv_heads": 2}, "num_kv_heads.*2.*mha"),
        ("mqa", {}, {"num_kv_heads": 2}, "num_kv_heads.*2.*gqa"),
        ("gqa", {}, {"num_kv_heads": 3}, "key_value.*3.*divisor"),
        ("linear", {}, {"num_kv_heads": 2}, "num_kv_heads.*2"),
        ("sliding_window", {"window": 0}, {}, "window.*0"),
        ("sliding_window", {"window": 2.5}, {}, "window.*2.5"),
        ("linear", {"chunk": 0}, {}, "chunk.*0"),
        ("additive", {"intermediate_size": -1}, {}, "intermediate_size.*-1"),
        ("rope", {"base": 1.0}, {}, "base.*1 "),
        ("rope", {"fraction": 0.0}, {}, "fraction.*0 "),
        ("rope", {"fraction": 0.4}, {}, "fraction.*0.4"),
    ],
)
def test_a_bad_value_is_refused_by_name_with_what_is_allowed(build, name, options, shared, words):
    with pytest.raises(InvalidValue, match=words):
        build(name, options, hidden_size=16, num_heads=4, **shared)


def test_rotary_positions_are_refused_where_they_have_no_meaning(build):
    with pytest.raises(Incompatible, match=r"rotary: .*'linear' takes no rotary positions"):
        build("linear", hidden_size=16, num_heads=4, rotary=Rotary())
    with pytest.raises(Incompatible, match=r"rotary: .*allowed: None: mechanism 'mha' is configured cross"):
        build("mha", hidden_size=16, num_heads=4, rotary=Rotary(), cross=True)


@pytest.mark.parametrize(
    ("name", "mode", "message"),
    [
        ("linear", {"cross": True}, "cross: True .*allowed: False: mechanism 'linear' attends to its own sequence"),
        ("alignment", {"cross": False}, "cross: False .*allowed: True: mechanism 'alignment' attends to a source"),
        ("gqa", {"cross": True, "causal": True}, "causal: True .*allowed: False where cross"),
        ("gqa", {"cross": True, "shares_kv": True}, "shares_kv: True .*mechanism 'gqa' is configured cross"),
        ("gqa", {"cross": 1}, "cross: 1 .*True or False"),
    ],
)
def test_a_mode_that_a_mechanism_has_not_is_refused_by_name(build, name, mode, message):
    with pytest.raises(InvalidValue, match=message):
        build(name, hidden_size=16, num_heads=4, **mode)


def test_an_unknown_option_is_refused_with_a_near_name(build):
    with pytest.raises(UnknownName, match="did you mean 'window'"):
        build("sliding_window", {"windows": 3}, hidden_size=8)


def test_a_source_is_asked_for_where_it_is_missing_and_refused_where_it_has_no_use(build):
    rows = torch.randn(1, 3, 8, dtype=torch.float64)
    with pytest.raises(InvalidValue, match="source"):
        build("mha", hidden_size=8, cross=True)(rows)
    with pytest.raises(InvalidValue, match="source"):
        build("mha", hidden_size=8)(rows, rows)


def test_a_kernel_can_be_asked_for_by_name_and_given_back(build):
    layer = build("sparsemax", hidden_size=8, num_heads=2)
    rows = torch.randn(1, 3, 8, dtype=torch.float64)
    expected = layer(rows)
    layer.use_kernel("torch_sdpa")
    with pytest.raises(KernelRefused, match="sparsemax"):
        layer(rows)
    layer.use_kernel(None)
    assert torch.equal(layer(rows), expected)


class Dictionary:
    """Keys and values of requests by number; implements the views of a step over them."""

    def __init__(self):
        self.fields = {}

    def begin(self, batch):
        self.batch = batch
        return {"kv": self}

    def append(self, fields):
        for span in self.batch.spans():
            for name, rows in fields.items():
                self.fields.setdefault((span.request, name), []).append(rows[span.start : span.stop])
        return fields

    def rows(self, requests):
        rows = {name: [torch.cat(self.fields[r, name]) for r in requests] for name in ("key", "value")}
        lengths = torch.tensor([len(found) for found in rows["key"]])
        padded = {name: nn.utils.rnn.pad_sequence(found, batch_first=True) for name, found in rows.items()}
        positions = torch.arange(int(lengths.max())).expand(len(requests), -1)
        return Rows(padded, positions, positions < lengths[:, None])


@pytest.mark.parametrize("name", ["gqa", "sliding_window", "alibi"])
def test_prompts_and_new_tokens_of_several_requests_go_together(build, name):
    layer = build(name, hidden_size=16, num_heads=4, num_kv_heads=2, rotary=Rotary(fraction=0.5))
    sequences = [torch.randn(length, 16, dtype=torch.float64) for length in (7, 6, 5)]
    expected = [layer(rows[None])[0] for rows in sequences]
    memory, done, outs = Dictionary(), [0, 0, 0], [[], [], []]
    for lengths in [(4, 1, 2), (1, 3, 1), (1, 1, 1), (1, 1, 1)]:
        batch = RaggedBatch.of(lengths, done, lambda numbers: torch.tensor(numbers, dtype=torch.int64))
        new = [rows[start : start + count] for rows, start, count in zip(sequences, done, lengths, strict=True)]
        out = layer.step(torch.cat(new), batch, memory.begin(batch))
        for request, rows in enumerate(out.split(lengths)):
            outs[request].append(rows)
        done = [start + count for start, count in zip(done, lengths, strict=True)]
    for found, whole in zip(outs, expected, strict=True):
        assert torch.allclose(torch.cat(found), whole[: len(torch.cat(found))], rtol=0, atol=1e-13)


@pytest.mark.parametrize(("name", "scale"), [("nope", None), ("dot", 1.0)])
def test_products_scaled_or_not_are_those_of_torchs_attention(build, agrees, name, scale):
    layer = build(name, hidden_size=16, num_heads=4)

    def theirs(rows):
        parts = (linear(rows).unflatten(-1, (4, 4)).transpose(1, 2) for linear in (layer.query, layer.key, layer.value))
        out = nn.functional.scaled_dot_product_attention(*parts, is_causal=True, scale=scale)
        return layer.output(out.transpose(1, 2).flatten(-2))

    layer.use_kernel("plain")
    oracle = agrees(name, package="torch scaled_dot_product_attention")
    oracle.functions(layer, theirs, torch.randn(2, 5, 16, dtype=torch.float64), tolerance=1e-12)


def test_groups_of_heads_may_stand_beside_their_number():
    mechanism = installed().mechanisms.get("attn-variants/gqa")
    for beside in ({}, {"num_kv_heads": 2}):
        config = configure(mechanism, {"groups": (0, 1, 1)}, hidden_size=12, num_heads=3, **beside)
        assert mechanism.spec(config).heads.group_of == (0, 1, 1)
        mechanism.build(config)
    with pytest.raises(InvalidValue):
        mechanism.build(configure(mechanism, {"groups": (0, 1, 2)}, hidden_size=12, num_heads=3, num_kv_heads=2))
