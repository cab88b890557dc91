import dataclasses

import pytest
import torch
from attn_core import Heads, installed
from attn_core.kernels.dispatch import choose
from attn_core.kernels.selected import KeyBlocks, SelectedBlocks, SelectedBlocksSpec, selected_blocks_problem
from attn_core.masking import shares
from attn_variants.compute import selected_blocks
from attn_variants.compute.selected_blocks import attend_in_tiles, tiled
from torch.nn.attention import SDPBackend, sdpa_kernel

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
    key_padding_mask = torch.rand(batch, blocks, within) < 0.9
    key_padding_mask[:, 1] = False
    tensors = [part.requires_grad_() for part in (query, key, value)]
    return tensors, best.indices.masked_fill(best.values < 0, -1), places, key_padding_mask


def by_gathering(query, chosen, places, blocks):
    """Every query gathers the keys of its own blocks."""
    sequence = torch.arange(query.shape[0])[:, None, None, None]
    group = torch.arange(query.shape[1])[:, None, None]
    at, within = chosen.clamp(min=0), torch.arange(blocks.key_padding_mask.shape[-1])
    keys, values = (part[sequence, group, at].flatten(3, 4) for part in (blocks.key, blocks.value))
    past = at[..., None] * len(within) + within <= places[:, None, :, None, None]
    allowed = (past & blocks.key_padding_mask[sequence, at] & (chosen >= 0)[..., None]).flatten(3)
    return shares(query @ keys.transpose(-1, -2), allowed[..., None, :]) @ values


@pytest.mark.parametrize("case", CASES)
def test_tiles_give_what_gathering_keys_for_every_query_gives_forward_and_backward(case):
    *sizes, tile = case
    tensors, chosen, places, key_padding_mask = drawn(*sizes)
    blocks = KeyBlocks(*tensors[1:], key_padding_mask)
    ours = attend_in_tiles(tensors[0], chosen, places, blocks, tile)
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
    assert tiles.queries.numel() <= len(lanes) * (queries * top + blocks * tile)


@pytest.mark.parametrize("most", [1, 100, 4000])
def test_pieces_change_nothing(most, monkeypatch):
    tensors, chosen, places, key_padding_mask = drawn(*CASES[0][:-1])
    blocks = KeyBlocks(*tensors[1:], key_padding_mask)

    def run():
        out = selected_blocks.attend_in_pieces(SelectedBlocks(tensors[0], chosen, places), blocks)
        return out, *torch.autograd.grad(out.square().sum(), tensors)

    at_once = run()
    monkeypatch.setattr(selected_blocks, "PIECE", most)
    for piece, one in zip(run(), at_once, strict=True):
        assert torch.allclose(piece, one, rtol=0, atol=1e-12)


def whole_sequences(tokens, within, top, shared):
    """Each query chooses its own block and random earlier ones, among keys that fill the last block with zeros."""
    torch.manual_seed(0)
    blocks = -(-tokens // within)
    query = torch.randn(2, 3, tokens, shared, 4, dtype=torch.float64)
    key, value = (torch.randn(2, 3, blocks, within, size, dtype=torch.float64) for size in (4, 3))
    key_padding_mask = (torch.arange(blocks * within) < tokens).view(blocks, within).expand(2, -1, -1)
    key, value = (rows * key_padding_mask[:, None, ..., None] for rows in (key, value))
    places = torch.arange(tokens).expand(2, -1)
    own = (places // within)[:, None, :, None]
    worth = torch.rand(2, 3, tokens, blocks).masked_fill(torch.arange(blocks) >= own, -1.0)
    best = worth.topk(min(top, blocks) - 1, -1)
    others = best.indices.masked_fill(best.values < 0, -1)
    return SelectedBlocks(query, torch.cat([own.expand(-1, 3, -1, -1), others], -1), places), KeyBlocks(
        key, value, key_padding_mask
    )


@pytest.mark.parametrize("backend", [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH])
@pytest.mark.parametrize("shared", [1, 2])
@pytest.mark.parametrize("tokens", [1, 7, 8, 33, 100])
@pytest.mark.parametrize(("within", "top"), [(8, 3), (5, 1), (4, 9)])
def test_blocks_met_by_all_who_chose_them_give_what_tiles_give(within, top, tokens, shared, backend):
    choices, blocks = whole_sequences(tokens, within, top, shared)
    square = KeyBlocks(blocks.key, torch.cat([blocks.value, blocks.value[..., :1]], -1), blocks.key_padding_mask)
    for met in (blocks, square):
        with sdpa_kernel(backend):
            found = selected_blocks.attend_whole(choices, met)
        assert torch.allclose(found, attend_in_tiles(*choices, met), rtol=0, atol=1e-13)


def test_both_kernels_are_offered_and_whole_blocks_are_for_inference_on_whole_sequences():
    kernels = installed().kernels
    problem = selected_blocks_problem(
        SelectedBlocksSpec(heads=Heads(query=2, key_value=1, key_size=4, value_size=4)), **PLAIN
    )
    assert choose(kernels, problem).name == "selected_blocks_whole"
    for change in ({"gradients": True}, {"padded": True}, {"device": "cuda"}):
        assert choose(kernels, dataclasses.replace(problem, **change)).name == "selected_blocks_tiled"


PLAIN = {"dtype": "float32", "device": "cpu", "gradients": False, "padded": False}
