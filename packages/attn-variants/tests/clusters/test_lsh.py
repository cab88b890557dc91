import pytest
import torch
from attn_core import Shape, configure, installed
from attn_core.errors import UserError
from attn_variants.mechanisms.clusters_layers import HashBuckets, JoinedBuckets


def rows(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def hashed(kind=HashBuckets, **changed):
    options = {"size": 6, "buckets": 4, "chunk": 4, "rounds": 3, "seed": 5, "within": "bucket"}
    return kind(**options | {"duplicates": "corrected"} | changed)


def shared_softmax(query, value, allowed):
    """Attention of queries to themselves as keys of length one; a token sees itself only where it sees nothing else."""
    keys = query / query.norm(dim=-1, keepdim=True)
    scores = query @ keys.mT / query.shape[-1] ** 0.5
    others = allowed & ~torch.eye(query.shape[-2], dtype=torch.bool)
    alone = ~others.any(-1, keepdim=True) & torch.eye(query.shape[-2], dtype=torch.bool)
    return scores.masked_fill(~(others | alone), -torch.inf).softmax(-1) @ value


def test_two_chunks_that_see_each_other_are_full_attention_with_shared_keys(agrees):
    query, value = rows(2, 3, 8, 6), rows(2, 3, 8, 5)
    everything = torch.ones(8, 8, dtype=torch.bool)
    layer, same = hashed(within="chunks"), agrees("lsh", identity="two chunks that see each other are full attention")
    same.functions(
        lambda q, v: layer(q, q, v, None), lambda q, v: shared_softmax(q, v, everything), query, value, tolerance=1e-12
    )


@pytest.mark.parametrize("rounds", [1, 3])
def test_where_chunks_hold_every_bucket_a_token_sees_all_that_ever_shared_its_bucket(rounds):
    layer = hashed(chunk=12, rounds=rounds)
    query, value = rows(2, 2, 12, 6), rows(2, 2, 12, 5)
    bucket = layer.buckets(query)
    met = (bucket[..., :, None] == bucket[..., None, :]).any(2)
    out = layer(query, query, value, None)
    assert torch.allclose(out, shared_softmax(query, value, met), rtol=0, atol=1e-12)


def test_each_pair_is_computed_as_the_definition_says_in_loops(agrees):
    layer = hashed(rounds=2, chunk=2)
    query, value = rows(1, 1, 7, 6), rows(1, 1, 7, 3)
    buckets, out = layer.buckets(query)[0, 0], torch.zeros(7, 3, dtype=torch.float64)
    chunks = []
    for turn in range(2):
        order = sorted(range(7), key=lambda token: (buckets[turn, token].item(), token))
        chunks.append({token: place // 2 for place, token in enumerate(order)})
    for i in range(7):
        seen = set()
        for turn in range(2):
            own = chunks[turn][i]
            near = {own, (own - 1) % 4}
            same = buckets[turn] == buckets[turn, i]
            seen |= {j for j in range(7) if chunks[turn][j] in near and same[j] and j != i}
        places = sorted(seen) or [i]
        keys = query[0, 0, places] / query[0, 0, places].norm(dim=-1, keepdim=True)
        out[i] = (keys @ query[0, 0, i] / 6**0.5).softmax(0) @ value[0, 0, places]
    loops = agrees("lsh", paper="buckets, sorted chunks and rounds in loops")
    loops.outputs(layer(query, query, value, None)[0, 0], out, 1e-12)


def test_the_bucket_is_the_direction_that_is_nearest():
    layer, query = hashed(rounds=2), rows(1, 1, 9, 6)
    for turn in range(2):
        directions = torch.cat([layer.rotations[turn], -layer.rotations[turn]], dim=1)
        for token in range(9):
            nearest = max(range(4), key=lambda b: (query[0, 0, token] @ directions[:, b]).item())
            assert layer.buckets(query)[0, 0, turn, token] == nearest


def test_the_same_seed_gives_the_same_outputs_and_another_does_not():
    query, value = rows(1, 2, 16, 6), rows(1, 2, 16, 6)
    one, same, other = (hashed(seed=seed)(query, query, value, None) for seed in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.allclose(one, other)


def test_the_price_grows_linearly_with_the_length():
    lsh = installed().mechanisms.get("lsh")
    config = configure(lsh, {"chunk": 16}, hidden_size=32, num_heads=4, causal=False)
    prices = [lsh.cost(config, Shape(query=tokens, key=tokens)).flops for tokens in (160, 320)]
    assert prices[1] == 2 * prices[0]


@pytest.mark.parametrize(
    "options",
    [
        *({"buckets": 3}, {"buckets": 0}, {"chunk": 0}, {"rounds": 0}, {"within": "all"}, {"duplicates": "no"}),
        *({"ring": "none"}, {"ring": "rounds"}, {"ring": "rounds", "within": "chunks"}),
    ],
)
def test_a_bad_option_is_refused(options):
    with pytest.raises(UserError):
        configure(installed().mechanisms.get("lsh"), options, hidden_size=32, num_heads=4, causal=False)


def test_the_first_chunk_of_a_round_follows_the_last_of_the_round_before_where_all_are_one_ring():
    options = {"size": 6, "buckets": 4, "chunk": 4, "rounds": 3, "seed": 5, "within": "chunks"}
    layer = JoinedBuckets(**options | {"duplicates": "counted"})
    query, value = rows(1, 1, 12, 6), rows(1, 1, 12, 3)
    buckets = layer.buckets(query)[0, 0]
    ring = [sorted(range(12), key=lambda token: (buckets[turn, token].item(), token)) for turn in range(3)]
    chunks = [order[start : start + 4] for order in ring for start in (0, 4, 8)]
    keys = query[0, 0] / query[0, 0].norm(dim=-1, keepdim=True)
    expected = torch.zeros(12, 3, dtype=torch.float64)
    for i in range(12):
        scores, values = [], []
        for place, chunk in enumerate(chunks):
            for j in chunk + chunks[place - 1] if i in chunk else []:
                scores.append(keys[j] @ query[0, 0, i] / 6**0.5 if j != i else torch.tensor(-torch.inf).double())
                values.append(value[0, 0, j])
        expected[i] = torch.stack(scores).softmax(0) @ torch.stack(values)
    assert torch.allclose(layer(query, query, value, None)[0, 0], expected, rtol=0, atol=1e-12)


@pytest.mark.oracle
@pytest.mark.parametrize("duplicates", ["corrected", "counted"])
@pytest.mark.parametrize(("within", "rounds"), [("bucket", 3), ("chunks", 1), ("chunks", 3)])
def test_outputs_and_gradients_equal_those_of_the_package_reformer_pytorch(
    agrees, monkeypatch, within, rounds, duplicates
):
    from reformer_pytorch.reformer_pytorch import LSHAttention

    tokens = 16
    if within == "chunks" and rounds > 1 and duplicates == "corrected":
        pytest.skip("their chunks of two rounds share no buckets, so that pairs are not counted as here")
    joined = within == "chunks" and rounds > 1
    layer = hashed(kind=JoinedBuckets if joined else HashBuckets, within=within, rounds=rounds, duplicates=duplicates)
    their = LSHAttention(
        bucket_size=4,
        n_hashes=rounds,
        attend_across_buckets=within == "chunks",
        allow_duplicate_attention=duplicates == "counted",
    ).eval()
    # Theirs draws anew in every call; it has as many buckets as chunks, here four.
    drawn = layer.rotations.permute(1, 0, 2)[None]
    monkeypatch.setattr(torch, "randn", lambda *shape, **options: drawn.clone())
    generator = torch.Generator().manual_seed(0)
    query, value = (torch.empty(3, tokens, 6, dtype=torch.float64).normal_(generator=generator) for _ in range(2))
    agrees("lsh", package="reformer-pytorch LSHAttention").functions(
        lambda q, v: layer(q[:, None], q[:, None], v[:, None], None)[:, 0],
        lambda q, v: their(q, v)[0],
        query,
        value,
        tolerance=1e-7,  # theirs adds 1e-9 to the number of meetings
    )
