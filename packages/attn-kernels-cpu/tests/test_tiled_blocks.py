"""Whole blocks in tiles of bfloat16 (AMX), rounded or in three parts: attention included, where heads fill tiles and no
window moves."""

from __future__ import annotations

import pytest
import torch
from attn_core import RaggedBatch, installed
from attn_core.stores import StoreSize
from attn_models.decoder.decoder import Decoder
from attn_models.quantization.quantize import quantize_model
from attn_schema.decoder import DecoderConfig

pytestmark = pytest.mark.usefixtures("_tiles")

LLAMA = {
    "vocab_size": 61,
    "max_seq_len": 128,
    "hidden_size": 64,
    "num_layers": 2,
    "num_heads": 6,
    "head_dim": 32,
    "intermediate_size": 112,
    "mechanism": "gqa",
    "num_kv_heads": 2,
    "norm": "rms",
    "feed_forward": "swiglu",
    "positions": "rotary",
}
BLOCKS = {
    "heads of one tile": {},
    "heads of two tiles": {"head_dim": 64, "num_heads": 9, "num_kv_heads": 3},
    "heads that fill no tile": {"head_dim": 48},
    "a window": {"mechanism": "sliding_window", "options": {"window": 20}},
    "a window beside": {"pattern": ["gqa", {"mechanism": "sliding_window", "options": {"window": 20}}]},
}


def packed(fields, kernel="amx_bfloat16_rounded", sick=()):
    """A model; the embeddings of the tokens `sick` are no numbers."""
    torch.manual_seed(11)
    model = Decoder(DecoderConfig.from_plain(LLAMA | fields)).eval()
    with torch.no_grad():
        model.embedding.weight[list(sick)] = float("nan")
    quantize_model(model, kernel.split("_")[1], kernel=kernel)
    return model


def rows_of(model, chunks, tokens, dtype="float32", cache="paged"):
    """Hidden rows of requests, each of which computes the next `chunks[i][r]` tokens in step i."""
    size = StoreSize(tokens=1024, requests=8, dtype=dtype)
    store = installed().caches.get(cache).create(model.state_specs(), size)
    done, found = [0] * len(tokens), [[] for _ in tokens]
    for request in range(len(tokens)):
        assert store.admit(request)
    for lengths in chunks:
        rows = [r for r, length in enumerate(lengths) if length]
        for r in rows:
            assert store.reserve(r, done[r] + lengths[r])
        rows = store.order(rows)
        batch = RaggedBatch.of([lengths[r] for r in rows], [done[r] for r in rows], torch.tensor)
        fed = torch.cat([tokens[r, done[r] : done[r] + lengths[r]] for r in rows])
        with torch.no_grad():
            hidden = model.step(fed, batch, store.view(batch, rows)).split([lengths[r] for r in rows])
        for r, part in zip(rows, hidden, strict=True):
            found[r].append(part)
            done[r] += lengths[r]
    return [torch.cat(parts) for parts in found]


def relative(found, expected):
    return ((found.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("kernel", ["amx_bfloat16_rounded", "amx_bfloat16"])
@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("cache", ["paged", "contiguous"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_prompt_at_once_in_chunks_and_token_by_token_gets_the_same_bits(name, cache, dtype, kernel):
    """Tiles of many rows, of few and of one, over whole blocks of keys and parts of them."""
    model, tokens = packed(BLOCKS[name], kernel), torch.arange(90)[None] * 7 % 61
    (whole,) = rows_of(model, [[90]], tokens, dtype, cache)
    for chunks in ([1] * 90, [3, 40, 1, 5, 4, 37], [64, 2, 24]):
        assert torch.equal(rows_of(model, [[n] for n in chunks], tokens, dtype, cache)[0], whole)


@pytest.mark.parametrize("kernel", ["amx_bfloat16_rounded", "amx_bfloat16"])
@pytest.mark.parametrize("name", BLOCKS)
def test_a_request_gets_the_same_bits_alone_and_in_a_crowd(name, kernel):
    """Requests of one token stand beside one another in memory, too, and must not be taken for one."""
    model = packed(BLOCKS[name], kernel)
    tokens = torch.arange(4 * 50).view(4, 50) * 5 % 61
    plan = [[1, 1, 1, 1], [40, 1, 33, 6], [1, 1, 1, 1], [3, 30, 1, 1]]
    crowd = rows_of(model, plan, tokens)
    for request in range(4):
        (alone,) = rows_of(model, [[step[request]] for step in plan], tokens[request][None])
        assert torch.equal(crowd[request], alone)


@pytest.mark.parametrize("kernel", ["amx_bfloat16_rounded", "amx_bfloat16", "amx_int8", "amx_int4"])
def test_the_bits_are_the_same_on_any_number_of_threads(kernel):
    """Few rows are shared out by outputs, and many, from eight tiles a thread on, by rows."""
    model, tokens = packed({"max_seq_len": 512, "intermediate_size": 96}, kernel), torch.arange(400)[None] * 7 % 61
    threads = torch.get_num_threads()
    try:
        found = []
        for count in (1, 3):
            torch.set_num_threads(count)
            found += [rows_of(model, [[400]], tokens)[0], rows_of(model, [[40], [350], [1], [9]], tokens)[0]]
    finally:
        torch.set_num_threads(threads)
    for other in found[1:]:
        assert torch.equal(other, found[0])


def test_what_an_earlier_block_left_in_memory_is_not_read():
    """Columns that fill up a tile are zero, not what lay there: 112 of 128 are in use."""
    tokens = torch.arange(40)[None] % 60
    (expected,) = rows_of(packed({}), [[40]], tokens)
    rows_of(packed({"intermediate_size": 128}, sick=[60]), [[40]], torch.full((1, 40), 60))
    (found,) = rows_of(packed({}), [[40]], tokens)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("steepness", [0.1, 1.0, 4.0])
@pytest.mark.parametrize("name", ["heads of one tile", "heads of two tiles"])
@pytest.mark.parametrize("chunk", [1, 250])
def test_three_parts_lose_nothing_of_float32(name, steepness, chunk):
    """Against float64 logits are as near as those of float32, from flat weights of attention to steep ones."""
    torch.manual_seed(11)
    config = DecoderConfig.from_plain(LLAMA | BLOCKS[name] | {"max_seq_len": 250})
    model, wide = Decoder(config).eval(), Decoder(config).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_((parameter * 3).bfloat16())
        for block in model.blocks:
            block.attention_norm.weight.mul_(steepness)
    wide.load_state_dict(model.state_dict())
    tokens = torch.arange(250)[None] * 7 % 61
    with torch.no_grad():
        exact, plain = wide(tokens)[0], model(tokens)[0]
        quantize_model(model, "bfloat16", kernel="amx_bfloat16")
        found = model.logits(rows_of(model, [[chunk]] * (250 // chunk), tokens)[0])
    assert relative(found, exact) < relative(plain, exact)


@pytest.mark.parametrize("name", BLOCKS)
def test_rounding_to_bfloat16_is_all_that_is_lost(name):
    """Beside the same weights without rounding; one rounding is 2^-9, and a block has a dozen of them."""
    tokens = torch.arange(90)[None] * 7 % 61
    (rounded,) = rows_of(packed(BLOCKS[name]), [[90]], tokens)
    (exact,) = rows_of(packed(BLOCKS[name], "amx_bfloat16"), [[90]], tokens)
    assert 0 < (rounded - exact).norm() / exact.norm() < 0.01


@pytest.mark.parametrize("kernel", ["amx_bfloat16_rounded", "amx_bfloat16"])
def test_what_is_no_number_stays_behind_the_token_that_brought_it(kernel):
    """The tokens before it, whose states others may share, and the other requests of the step get their own bits."""
    tokens = torch.arange(3 * 40).view(3, 40) % 60
    expected = rows_of(packed({}, kernel), [[40, 40, 40]], tokens)
    tokens[1, 20] = 60
    found = rows_of(packed({}, kernel, sick=[60]), [[40, 40, 40]], tokens)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[2], expected[2])
    assert torch.equal(found[1][:20], expected[1][:20])
    assert found[1][20:].isnan().all()
