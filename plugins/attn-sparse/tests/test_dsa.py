import attn_sparse.dsa
import pytest
import torch
from attn_core import Step, configure, installed, state_bytes
from attn_core.errors import InvalidValue, UnknownName
from attn_core.rotary import Rotary
from attn_sparse.dsa import selection
from attn_sparse.dsa.selection import choose
from attn_testing import Agreement
from attn_testing.memory import DictionaryStore
from attn_testing.serving import ragged
from torch.utils.flop_counter import FlopCounterMode

DSA = attn_sparse.dsa.Dsa()
SMALL = {"index_heads": 2, "index_size": 4, "top": 3}


def build(options=None, **shared):
    torch.manual_seed(0)
    return DSA.build(configure(DSA, SMALL | (options or {}), **shared)).double()


def turned(rows, position, rotary):
    """A row with its halves turned by position times the frequencies of its pairs."""
    half = len(rows) // 2
    out = rows.clone()
    for i in range(half):
        angle = torch.tensor(position * rotary.base ** (-2 * i / len(rows)), dtype=rows.dtype)
        out[i] = rows[i] * angle.cos() - rows[half + i] * angle.sin()
        out[half + i] = rows[half + i] * angle.cos() + rows[i] * angle.sin()
    return out


def indexed(layer, rows, token, rotary=None):
    """Equation 1 of the paper: the scores of all tokens up to `token`."""
    indexer, size = layer.inner.indexer, SMALL["index_size"]
    found = []
    for past in range(token + 1):
        raw = indexer.key.weight @ rows[past]
        key = (raw - raw.mean()) / (raw.var(correction=0) + 1e-6).sqrt()
        key = key * indexer.norm.weight + indexer.norm.bias
        total = torch.zeros((), dtype=rows.dtype)
        for head in range(SMALL["index_heads"]):
            query = (indexer.query.weight @ rows[token])[head * size : (head + 1) * size]
            pair = (query, key) if rotary is None else (turned(query, token, rotary), turned(key, past, rotary))
            weight = (indexer.weight.weight @ rows[token])[head] / (size * SMALL["index_heads"]) ** 0.5
            total = total + weight * torch.relu(pair[0] @ pair[1])
        found.append(total)
    return torch.stack(found)


def best(scores, top):
    """The largest, the later one of two that are equal."""
    return sorted(range(len(scores)), key=lambda s: (-scores[s].item(), -s))[:top]


def by_loops(layer, rows, top):
    """Equation 2 of the paper for rows [token, width]: one query and one head at a time."""
    heads = layer.spec.heads
    query = (rows @ layer.query.weight.T).view(-1, heads.query, heads.key_size)
    key = (rows @ layer.key.weight.T).view(-1, heads.key_value, heads.key_size)
    value = (rows @ layer.value.weight.T).view(-1, heads.key_value, heads.value_size)
    out = []
    for token in range(len(rows)):
        seen = best(indexed(layer, rows, token), top)
        for head in range(heads.query):
            mine = heads.group_of[head]
            shares = (key[seen, mine] @ query[token, head] / heads.key_size**0.5).softmax(0)
            out.append(shares @ value[seen, mine])
    return torch.stack(out).view(len(rows), -1) @ layer.output.weight.T


@pytest.mark.parametrize("top", [1, 3, 7])
@pytest.mark.parametrize(("heads", "groups"), [(2, 2), (4, 2)])
def test_it_equals_a_loop_over_queries_forward_and_gradient(record_property, top, heads, groups):
    layer = build({"top": top}, hidden_size=8, num_heads=heads, num_kv_heads=groups).eval()
    rows = torch.randn(13, 8, dtype=torch.float64, requires_grad=True)
    expected, out = by_loops(layer, rows, top), layer(rows[None])[0]
    loops = Agreement(record_property, "dsa", paper="equations 1 and 2 in loops")
    loops.outputs(out, expected, 1e-13)
    probe = torch.randn_like(out)
    wanted = [rows, layer.query.weight, layer.key.weight, layer.value.weight]
    ours, theirs = (torch.autograd.grad((made * probe).sum(), wanted) for made in (out, expected))
    loops.gradients(ours, theirs, 1e-12)


@pytest.mark.parametrize("rotary", [None, Rotary(base=100.0)])
def test_the_chosen_tokens_are_the_best_of_the_indexer(rotary):
    layer = build(hidden_size=8, num_heads=2, rotary=rotary).eval()
    rows = torch.randn(11, 8, dtype=torch.float64)
    read = layer.weights(rows[None])[0] > 0
    for token in range(11):
        expected = sorted(best(indexed(layer, rows, token, rotary), 3))
        for head in range(2):
            assert read[head, token].nonzero().flatten().tolist() == expected


@pytest.mark.parametrize("top", [9, 64])
@pytest.mark.parametrize("training", [True, False])
def test_choosing_all_tokens_is_causal_attention(record_property, top, training):
    layer = build({"top": top}, hidden_size=8, num_heads=4, num_kv_heads=2).train(training)
    gqa = installed().mechanisms.get("gqa")
    plain = gqa.build(configure(gqa, hidden_size=8, num_heads=4, num_kv_heads=2)).double()
    plain.load_state_dict({name: value for name, value in layer.state_dict().items() if "inner" not in name})
    rows = torch.randn(2, 9, 8, dtype=torch.float64)
    Agreement(record_property, "dsa", identity="all tokens chosen are gqa").outputs(layer(rows), plain(rows), 1e-14)
    assert torch.allclose(layer.weights(rows), plain.weights(rows), rtol=0, atol=1e-14)


def test_of_equal_scores_the_later_token_wins_however_many_are_computed():
    scores = torch.tensor([[[0.0, 0.0, 2.0, 0.0, 0.0]]])
    allowed = torch.tensor([[[True, True, True, True, False]]])
    assert choose(scores, allowed, 2)[0, 0].tolist() == [False, False, True, True, False]
    assert choose(scores[..., :4], allowed[..., :4], 3)[0, 0].tolist() == [False, True, True, True]


def test_a_query_with_fewer_allowed_tokens_reads_them_all_and_no_other():
    scores = torch.tensor([[[-1.0, 5.0, -2.0, 3.0]]])
    allowed = torch.tensor([[[True, False, True, False]]])
    assert choose(scores, allowed, 3)[0, 0].tolist() == [True, False, True, False]
    assert not choose(scores, torch.zeros_like(allowed), 3).any()


def test_training_changes_no_output():
    layer = build(hidden_size=8, num_heads=2)
    rows = torch.randn(2, 9, 8, dtype=torch.float64)
    assert torch.equal(layer.train()(rows), layer.eval()(rows))


def test_the_indexer_learns_from_the_attention_and_from_nothing_else():
    """Equation 4 of the paper by loops; its gradient is the indexer's, and the loss of the model is everyone else's."""
    layer = build({"align": 2.0}, hidden_size=8, num_heads=2).train()
    rows = torch.randn(1, 7, 8, dtype=torch.float64, requires_grad=True)
    loss = torch.zeros((), dtype=torch.float64)
    weights = layer.weights(rows)[0].detach().mean(0)
    for token in range(7):
        scores = indexed(layer, rows[0].detach(), token)
        seen = best(scores, 3)
        loss = loss + (weights[token, seen] * (weights[token, seen].log() - scores[seen].log_softmax(0))).sum() / 7
    indexer, rest = list(layer.inner.indexer.parameters()), [layer.query.weight, layer.value.weight, rows]
    expected = torch.autograd.grad(2.0 * loss, indexer)
    probe = torch.randn(1, 7, 8, dtype=torch.float64)
    out = layer(rows)
    found = torch.autograd.grad((out * probe).sum() + layer.inner.take_auxiliary_loss(), [*indexer, *rest])
    plain = torch.autograd.grad((layer.eval()(rows) * probe).sum(), rest)
    for mine, other in zip(found, [*expected, *plain], strict=True):
        assert torch.allclose(mine, other, rtol=0, atol=1e-13)


def test_an_indexer_that_learns_chooses_what_the_attention_prefers():
    options = {"index_heads": 4, "index_size": 8}
    layer = build(options | {"top": 24}, hidden_size=8, num_heads=1).train()
    few = build(options | {"top": 4}, hidden_size=8, num_heads=1).eval()
    with torch.no_grad():
        layer.query.weight.mul_(3)
    rows = torch.randn(8, 24, 8, dtype=torch.float64)
    best_keys = layer.weights(rows)[:, 0, -1].topk(4).indices

    def kept():
        few.load_state_dict(layer.state_dict())
        return (few.weights(rows)[:, 0, -1] > 0).gather(-1, best_keys).double().mean().item()

    before = kept()
    optimiser = torch.optim.Adam(layer.inner.indexer.parameters(), lr=0.05)
    for _ in range(100):
        optimiser.zero_grad()
        layer(rows)
        layer.inner.take_auxiliary_loss().backward()
        optimiser.step()
    assert kept() > before + 0.2


def test_pieces_change_nothing(monkeypatch):
    layer = build(hidden_size=8, num_heads=2).train()
    rows = torch.randn(2, 14, 8, dtype=torch.float64, requires_grad=True)
    probe = torch.randn(2, 14, 8, dtype=torch.float64)
    wanted = [rows, layer.key.weight, *layer.inner.indexer.parameters()]

    def run():
        out = layer(rows)
        loss = (out * probe).sum() + layer.inner.take_auxiliary_loss()
        return out, *torch.autograd.grad(loss, wanted)

    whole = run()
    monkeypatch.setattr(selection, "PIECE", 5 * 2 * 2 * 14)
    for piece, one in zip(run(), whole, strict=True):
        assert torch.allclose(piece, one, rtol=0, atol=1e-13)
    with torch.no_grad():
        assert torch.allclose(layer(rows), whole[0], rtol=0, atol=1e-13)


def test_padded_tokens_teach_the_indexer_nothing():
    layer = build(hidden_size=8, num_heads=2).train()
    rows = torch.randn(1, 9, 8, dtype=torch.float64)
    key_padding_mask = torch.tensor([[True] * 6 + [False] * 3])
    wanted = list(layer.inner.indexer.parameters())
    layer(rows, key_padding_mask=key_padding_mask)
    padded = torch.autograd.grad(layer.inner.take_auxiliary_loss(), wanted)
    layer(rows[:, :6])
    alone = torch.autograd.grad(layer.inner.take_auxiliary_loss(), wanted)
    for mine, other in zip(padded, alone, strict=True):
        assert torch.allclose(mine, other, rtol=0, atol=1e-13)


def test_a_token_remembers_one_index_key_besides_its_key_and_value():
    state = DSA.state(configure(DSA, {"index_size": 6}, hidden_size=32, num_heads=4, num_kv_heads=2))
    assert state_bytes(state, tokens=10, dtype="bfloat16") == 10 * 2 * (2 * 2 * 8 + 6)


@pytest.mark.parametrize("remembered", [2, 30])
def test_the_price_of_a_decoding_step_is_what_torch_counts(remembered):
    config = configure(DSA, SMALL, hidden_size=8, num_heads=2)
    layer = build(hidden_size=8, num_heads=2).eval()
    layer.use_kernel("plain")
    store = DictionaryStore({"layer": DSA.state(config)})
    store.admit(0)
    with torch.no_grad():
        layer.step(torch.randn(remembered, 8).double(), *stepped(store, remembered, 0))
        with FlopCounterMode(display=False) as counter:
            layer.step(torch.randn(1, 8).double(), *stepped(store, 1, remembered))
    assert DSA.cost(config, Step(remembered=remembered)).flops == counter.get_total_flops()


def stepped(store, length, context):
    batch = ragged([length], [context])
    return batch, store.view(batch, [0])["layer"]


def test_beyond_top_a_decoded_token_pays_the_same_for_pairs_and_little_more_for_the_index():
    config = configure(DSA, {"top": 64}, hidden_size=32, num_heads=4)
    one, other = (DSA.cost(config, Step(remembered=keys)).flops for keys in (1000, 2000))
    assert other - one == 1000 * 2 * 4 * 33


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top": 0}, "top: 0"),
        ({"index_heads": 1.5}, "index_heads: 1.5"),
        ({"index_size": True}, "index_size: True"),
        ({"align": -1.0}, "align: -1"),
        ({"align": float("nan")}, "align: nan"),
    ],
)
def test_options_out_of_range_are_refused_by_name(options, message):
    with pytest.raises(InvalidValue, match=message):
        configure(DSA, options, hidden_size=8)


def test_an_index_head_that_cannot_turn_is_refused_by_name():
    with pytest.raises(InvalidValue, match="index_size 5"):
        configure(DSA, {"index_size": 5}, hidden_size=8, num_heads=2, rotary=Rotary())


def test_it_refuses_to_look_ahead():
    with pytest.raises(InvalidValue, match="causal: False"):
        build(hidden_size=8, causal=False)


def test_an_unknown_option_is_named():
    with pytest.raises(UnknownName, match="index_top"):
        configure(DSA, {"index_top": 3}, hidden_size=8)
