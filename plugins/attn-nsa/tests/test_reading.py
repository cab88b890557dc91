import pytest
import torch
from attn_core.chosen import Blocks, attend_to_chosen, rows_met, tiled
from attn_core.pairs import shares

CASES = [
    # batch, groups, queries, shared, blocks, within, top, tile
    (2, 2, 37, 3, 5, 8, 3, 64),
    (1, 1, 1, 2, 9, 8, 3, 1),
    (1, 2, 5, 1, 9, 8, 3, 5),
    (2, 1, 70, 2, 9, 4, 12, 16),
]


def drawn(batch, groups, queries, shared, blocks, within, top):
    """Queries at the end of their keys, with random past blocks; a few keys are padding, and block 1 is all of it."""
    torch.manual_seed(0)
    query = torch.randn(batch, groups, queries, shared, 4, dtype=torch.float64)
    key = torch.randn(batch, groups, blocks, within, 4, dtype=torch.float64)
    value = torch.randn(batch, groups, blocks, within, 3, dtype=torch.float64)
    places = (torch.arange(queries) + blocks * within - queries).expand(batch, -1)
    worth = torch.rand(batch, groups, queries, blocks)
    worth = worth.masked_fill(torch.arange(blocks) > places[:, None, :, None] // within, -1.0)
    best = torch.nn.functional.pad(worth, (0, top), value=-1.0).topk(top, -1)
    keep = torch.rand(batch, blocks, within) < 0.9
    keep[:, 1] = False
    tensors = [part.requires_grad_() for part in (query, key, value)]
    return tensors, best.indices.masked_fill(best.values < 0, -1), places, keep


def by_gathering(query, chosen, places, blocks):
    """Every query gathers the keys of its own blocks."""
    sequence = torch.arange(query.shape[0])[:, None, None, None]
    group = torch.arange(query.shape[1])[:, None, None]
    at, within = chosen.clamp(min=0), torch.arange(blocks.keep.shape[-1])
    keys, values = (part[sequence, group, at].flatten(3, 4) for part in (blocks.key, blocks.value))
    past = at[..., None] * len(within) + within <= places[:, None, :, None, None]
    allowed = (past & blocks.keep[sequence, at] & (chosen >= 0)[..., None]).flatten(3)
    return shares(query @ keys.transpose(-1, -2), allowed[..., None, :]) @ values


@pytest.mark.parametrize("case", CASES)
def test_tiles_give_what_gathering_keys_for_every_query_gives_forward_and_backward(case):
    *sizes, tile = case
    tensors, chosen, places, keep = drawn(*sizes)
    blocks = Blocks(*tensors[1:], keep)
    ours = attend_to_chosen(tensors[0], chosen, places, blocks, tile)
    theirs = by_gathering(tensors[0], chosen, places, blocks)
    probe = torch.randn_like(ours)
    assert torch.allclose(ours, theirs, rtol=0, atol=1e-13)
    found, expected = (torch.autograd.grad((out * probe).sum(), tensors) for out in (ours, theirs))
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("case", CASES)
def test_every_choice_has_a_place_of_its_own_beside_others_of_its_block(case):
    *_, queries, _, blocks, _, top, tile = case
    _, chosen, _, _ = drawn(*case[:-1])
    lanes = chosen.flatten(0, 1)
    tiles = tiled(lanes, blocks, tile)
    slots = tiles.slots[tiles.real]
    assert slots.unique().numel() == slots.numel()
    lane, row, _ = tiles.real.nonzero().T
    assert tiles.queries.flatten()[slots].equal(lane * queries + row)
    assert tiles.blocks[slots // tile].equal(lane * blocks + lanes[tiles.real])
    assert tiles.queries.numel() == len(lanes) * rows_met(queries, top, blocks, queries) or tile != min(64, queries)
