import attn_sparse.moba
import pytest
import torch
from attn_core import Step, configure, installed
from attn_core.errors import InvalidValue
from attn_testing import Agreement

MOBA = attn_sparse.moba.Moba()


def build(options=None, **shared):
    torch.manual_seed(0)
    return MOBA.build(configure(MOBA, options, **shared)).double()


def by_loops(layer, rows, block, top):
    """The paper's section 2 for rows [token, width]: one query and one head at a time."""
    heads = layer.spec.heads
    query = (rows @ layer.query.weight.T).view(-1, heads.query, heads.key_size)
    key = (rows @ layer.key.weight.T).view(-1, heads.key_value, heads.key_size)
    value = (rows @ layer.value.weight.T).view(-1, heads.key_value, heads.value_size)
    out = []
    for token in range(len(rows)):
        for head in range(heads.query):
            mine, q = heads.group_of[head], query[token, head]
            gates = [q @ key[b * block : (b + 1) * block, mine].mean(0) for b in range(token // block)]
            best = sorted(range(len(gates)), key=lambda b: -gates[b].item())[: top - 1]
            seen = [j for j in range(token + 1) if j // block in {*best, token // block}]
            shares = (key[seen, mine] @ q / heads.key_size**0.5).softmax(0)
            out.append(shares @ value[seen, mine])
    return torch.stack(out).view(len(rows), -1) @ layer.output.weight.T


@pytest.mark.parametrize(("block", "top"), [(4, 1), (4, 2), (3, 3), (2, 9), (64, 2)])
@pytest.mark.parametrize(("heads", "groups"), [(2, 2), (4, 2)])
def test_it_equals_a_loop_over_queries_forward_and_gradient(record_property, block, top, heads, groups):
    layer = build({"block": block, "top": top}, hidden_size=8, num_heads=heads, num_kv_heads=groups)
    rows = torch.randn(17, 8, dtype=torch.float64, requires_grad=True)
    expected, out = by_loops(layer, rows, block, top), layer(rows[None])[0]
    loops = Agreement(record_property, "moba", paper="section 2 in loops")
    loops.outputs(out, expected, 1e-13)
    probe = torch.randn_like(out)
    wanted = [rows, layer.query.weight, layer.key.weight, layer.value.weight]
    ours, theirs = (torch.autograd.grad((made * probe).sum(), wanted) for made in (out, expected))
    loops.gradients(ours, theirs, 1e-12)


@pytest.mark.parametrize("options", [{"block": 4, "top": 9}, {"block": 64, "top": 1}])
def test_all_blocks_or_one_that_holds_all_is_causal_attention(record_property, options):
    layer = build(options, hidden_size=8, num_heads=2)
    mha = installed().mechanisms.get("mha")
    plain = mha.build(configure(mha, hidden_size=8, num_heads=2)).double()
    plain.load_state_dict(layer.state_dict())
    rows = torch.randn(2, 30, 8, dtype=torch.float64)
    same = Agreement(record_property, "moba", identity="all blocks are mha")
    same.functions(layer, plain, rows, tolerance=1e-12)
    assert torch.allclose(layer.weights(rows), plain.weights(rows), rtol=0, atol=1e-13)


def test_a_query_reads_at_most_its_blocks():
    layer = build({"block": 4, "top": 2}, hidden_size=8, num_heads=2)
    weights = layer.weights(torch.randn(1, 32, 8, dtype=torch.float64))[0]
    blocks_read = (weights.unflatten(-1, (8, 4)) > 0).any(-1).sum(-1)
    assert blocks_read[:, :4].eq(1).all()
    assert blocks_read[:, 4:].eq(2).all()


def test_weights_read_what_the_output_is_made_of():
    layer = build({"block": 3, "top": 2}, hidden_size=8, num_heads=2)
    rows = torch.randn(2, 13, 8, dtype=torch.float64)
    key_padding_mask = torch.rand(2, 13) > 0.3
    value = (rows @ layer.value.weight.T).view(2, 13, 2, 4)
    read = torch.einsum("bhqk,bkhd->bqhd", layer.weights(rows, key_padding_mask=key_padding_mask), value)
    assert torch.allclose(
        layer(rows, key_padding_mask=key_padding_mask), read.flatten(2) @ layer.output.weight.T, rtol=0, atol=1e-13
    )


def test_the_price_of_the_pairs_grows_with_the_blocks_read_and_not_with_the_length():
    config = configure(MOBA, {"block": 16, "top": 2}, hidden_size=32, num_heads=4)
    one, other = (MOBA.cost(config, Step(remembered=keys - 1)).flops for keys in (1600, 3200))
    assert other - one == 2 * 32 * 100


@pytest.mark.parametrize("option", ["block", "top"])
def test_no_block_is_refused_by_name(option):
    with pytest.raises(InvalidValue, match=f"{option}: 0"):
        configure(MOBA, {option: 0}, hidden_size=8)
