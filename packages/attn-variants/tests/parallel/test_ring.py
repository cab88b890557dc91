"""Context parallelism in one process: the ranks' results together are those of the whole."""

import itertools

import pytest
import torch
from attn_core import AttentionInputs, AttentionSpec, Causal, Full, Heads, Window
from attn_core.distributions import Entmax
from attn_core.errors import Incompatible, InvalidValue
from attn_core.masks import GlobalTokens, PerHead
from attn_core.modifiers import Alibi, RelativeBias, RelativeValues, SoftCap
from attn_variants.compute import plain
from attn_variants.compute.merging import merged, partial
from attn_variants.context_parallel import Contiguous, Striped, attend_parts, pairs_by_step, ring_attend, ulysses_attend

TOKENS = 24
HEADS = Heads(query=4, key_value=2, key_size=6, value_size=5)
SPECS = {
    "full": AttentionSpec(heads=HEADS),
    "causal": AttentionSpec(heads=HEADS, mask=Causal()),
    "window": AttentionSpec(heads=HEADS, mask=Window(left=5), modifiers=(SoftCap(cap=2.0),)),
    "alibi": AttentionSpec(heads=HEADS, mask=Causal(), modifiers=(Alibi(),)),
    "global": AttentionSpec(heads=HEADS, mask=GlobalTokens((0, 7)) & Causal()),
}


def given(batch=2, tokens=TOKENS):
    shapes = {"query": (HEADS.query, 6), "key": (HEADS.key_value, 6), "value": (HEADS.key_value, 5)}
    return {
        name: torch.randn(batch, tokens, *shape, dtype=torch.float64).requires_grad_() for name, shape in shapes.items()
    }


def part_of(rows, at, cut):
    """All queries, and the keys of one cut."""
    return AttentionInputs(
        query=rows["query"],
        key=rows["key"][:, cut],
        value=rows["value"][:, cut],
        query_positions=at,
        key_positions=at[:, cut],
    )


def same(found, expected, rows):
    assert torch.allclose(found, expected, rtol=0, atol=1e-13)
    upstream = torch.randn_like(expected)
    gradients = (torch.autograd.grad(out, list(rows.values()), upstream) for out in (found, expected))
    for one, other in zip(*gradients, strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("sharding", [Contiguous(1), Contiguous(4), Striped(4), Striped(6)], ids=str)
@pytest.mark.parametrize("name", SPECS)
def test_a_ring_finds_the_outputs_and_gradients_of_the_whole(name, sharding):
    rows = given()
    operands = AttentionInputs(**rows)
    same(ring_attend(SPECS[name], operands, sharding), plain.attend(SPECS[name], operands), rows)


def test_padding_goes_round_with_its_keys_and_a_sequence_of_nothing_else_gives_zeros():
    rows = given(batch=3)
    key_padding_mask = torch.rand(3, TOKENS) > 0.4
    key_padding_mask[2] = False
    operands = AttentionInputs(**rows, key_padding_mask=key_padding_mask)
    found = ring_attend(SPECS["full"], operands, Striped(4))
    assert not found[2].any()
    same(found, plain.attend(SPECS["full"], operands), rows)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", ["full", "causal", "window"])
def test_heads_split_between_ranks_find_the_outputs_and_gradients_of_the_whole(name, ranks):
    rows = given()
    operands = AttentionInputs(**rows)
    same(ulysses_attend(SPECS[name], operands, ranks), plain.attend(SPECS[name], operands), rows)


def test_parts_may_come_in_any_order_and_any_of_them_may_be_empty():
    rows, spec = given(batch=1, tokens=9), SPECS["causal"]
    whole, at = AttentionInputs(**rows), torch.arange(9)[None]
    cuts = [slice(0, 4), slice(4, 4), slice(4, 7), slice(7, 9)]
    parts = [part_of(rows, at, cut) for cut in cuts]
    expected = plain.attend(spec, whole)
    for order in itertools.permutations(parts):
        assert torch.allclose(attend_parts(spec, order), expected, rtol=0, atol=1e-13)


def test_the_logarithm_of_a_merged_sum_is_that_of_the_whole_and_of_nothing_is_minus_infinity():
    rows = given(batch=1, tokens=8)
    scores = torch.einsum("bqgrd,bkgd->bgrqk", rows["query"].unflatten(2, (2, 2)), rows["key"]) * 6**-0.5
    ahead = torch.ones(8, 8, dtype=torch.bool).triu(1)
    at = torch.arange(8)[None]
    parts = [partial(SPECS["causal"], part_of(rows, at, cut)) for cut in (slice(0, 3), slice(3, 8))]
    assert parts[1].sums[..., :3].isneginf().all()
    expected = scores.masked_fill(ahead, -torch.inf).logsumexp(-1).flatten(1, 2)
    assert torch.allclose(merged(*parts).sums, expected, rtol=0, atol=1e-13)
    nothing = merged(parts[1], parts[1])
    assert nothing.sums[..., :3].isneginf().all()
    assert not nothing.out[..., :3, :].any()


@pytest.mark.parametrize(("ranks", "tokens"), [(2, 24), (4, 24), (8, 64)])
def test_stripes_leave_causal_ranks_alike_to_do_and_pieces_do_not(ranks, tokens):
    """Brandon et al. 2023, section 3: every rank meets the triangle of a block in every step, with its diagonal or
    without; in pieces the last rank meets whole blocks while the first idles."""
    size = tokens // ranks
    triangle = size * (size + 1) // 2
    striped, pieces = (pairs_by_step(Causal(), sharding(ranks), tokens) for sharding in (Striped, Contiguous))
    for rank, step in itertools.product(range(ranks), repeat=2):
        assert striped[rank][step] == (triangle if step <= rank else triangle - size)
        assert pieces[rank][step] == (triangle if step == 0 else size * size if step <= rank else 0)
    for counted in (striped, pieces):
        assert sum(map(sum, counted)) == tokens * (tokens + 1) // 2
    waited = [sum(map(max, zip(*counted, strict=True))) for counted in (striped, pieces)]
    assert waited == [ranks * triangle, triangle + (ranks - 1) * size * size]


def test_attention_over_no_part_at_all_is_refused():
    with pytest.raises(Incompatible, match="no part"):
        attend_parts(SPECS["full"], [])


def test_tokens_ranks_and_heads_that_do_not_divide_are_refused():
    operands = AttentionInputs(**given(tokens=10))
    with pytest.raises(InvalidValue, match="tokens: 10"):
        ring_attend(SPECS["full"], operands, Striped(4))
    with pytest.raises(InvalidValue, match="ranks: 0"):
        Contiguous(0)
    for ranks in (0, 3, 4):
        with pytest.raises(InvalidValue, match=f"ranks: {ranks}.*2 key/value heads"):
            ulysses_attend(SPECS["full"], operands, ranks)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"distribution": Entmax(alpha=1.5)}, "entmax"),
        ({"modifiers": (RelativeValues(clip=2),)}, "values"),
        ({"cross": True}, "another sequence"),
    ],
    ids=["entmax", "values", "cross"],
)
def test_attention_whose_parts_cannot_be_merged_is_refused(changed, message):
    spec = AttentionSpec(heads=HEADS, **changed)
    with pytest.raises(Incompatible, match=message):
        ring_attend(spec, AttentionInputs(**given()), Contiguous(2))


@pytest.mark.parametrize(
    "changed",
    [{"modifiers": (Alibi(),)}, {"modifiers": (RelativeBias(clip=2),)}, {"mask": PerHead([Full(), Causal()] * 2)}],
    ids=["alibi", "bias", "mask"],
)
def test_heads_that_differ_are_not_split(changed):
    with pytest.raises(Incompatible, match="heads cannot be split"):
        ulysses_attend(AttentionSpec(heads=HEADS, **changed), AttentionInputs(**given()), 2)


def test_a_part_never_holds_more_scores_than_queries_of_a_rank_by_keys_of_a_rank():
    """What a ring is for: no tensor of all pairs."""
    from torch.utils._python_dispatch import TorchDispatchMode

    largest = [0]

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                largest[0] = max(largest[0], out.numel())
            return out

    operands = AttentionInputs(**{name: rows.detach() for name, rows in given(batch=1, tokens=64).items()})
    with Sizes():
        ring_attend(SPECS["causal"], operands, Striped(8))
    assert largest[0] <= max(HEADS.query * 8 * 8, 64 * HEADS.query * 6)
