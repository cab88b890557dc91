"""Whole blocks in C++ say what their parts say one by one, for every way that requests come and go."""

from __future__ import annotations

import pytest
import torch
from attn_core import RaggedBatch, installed
from attn_core.kernels.block import block_problem
from attn_core.stores import StoreSize
from attn_engine import Engine, EngineConfig, Request, SamplingParams, build_engine
from attn_kernels_cpu.invariant import BatchInvariant
from attn_models.decoder.decoder import Decoder
from attn_models.quantization.quantize import quantize_model
from attn_schema.decoder import DecoderConfig

pytestmark = pytest.mark.usefixtures("_kernels")

LLAMA = {
    "vocab_size": 61,
    "max_seq_len": 128,
    "hidden_size": 64,
    "num_layers": 2,
    "num_heads": 4,
    "head_dim": 16,
    "intermediate_size": 96,
    "mechanism": "gqa",
    "num_kv_heads": 2,
    "norm": "rms",
    "feed_forward": "swiglu",
    "positions": "rotary",
}
BLOCKS = {
    "llama": {},
    "interleaved": {"rope_interleave": True},
    "turned in vectors": {"head_dim": 32},
    "half turned": {"head_dim": 32, "partial_rotary_factor": 0.5},
    "one group": {"mechanism": "mqa", "num_kv_heads": None, "num_heads": 5},
    "window": {"mechanism": "sliding_window", "options": {"window": 9}},
    "learned positions": {"mechanism": "mha", "num_kv_heads": None, "positions": "learned"},
    "norms of heads": {"mechanism": "qk_norm", "num_kv_heads": None},
    "norms of outputs": {"norm_place": "both", "feed_forward": "geglu_tanh"},
    "geglu": {"feed_forward": "geglu"},
    "two windows": {
        "pattern": ["gqa", {"mechanism": "sliding_window", "options": {"window": 5}}],
    },
}

WIDE = {"num_heads": 9, "num_kv_heads": 3, "head_dim": 48, "hidden_size": 64}
"""Twelve rows for every four tokens, heads of an odd number of sixteens."""


def unpacked(fields):
    torch.manual_seed(11)
    model = Decoder(DecoderConfig.from_plain(LLAMA | fields)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
            if parameter.ndim == 1:
                parameter.add_(torch.rand_like(parameter))
    return model


def packed(fields, weights="float32"):
    model = unpacked(fields)
    quantize_model(model, weights)
    return model


def apart(model):
    model.take_apart()
    return model


def store_of(model, cache, dtype="float32", tokens=512):
    return installed().caches.get(cache).create(model.state_specs(), StoreSize(tokens=tokens, requests=8, dtype=dtype))


def steps(model, plan, cache="paged", dtype="float32"):
    """Hidden rows of each step; `plan[i][r]` new tokens of request r in step i."""
    store = store_of(model, cache, dtype)
    torch.manual_seed(1)
    done = [0] * len(plan[0])
    found = []
    for request in range(len(done)):
        store.admit(request)
    for lengths in plan:
        rows = [r for r, length in enumerate(lengths) if length]
        for r in rows:
            assert store.reserve(r, done[r] + lengths[r])
        rows = store.order(rows)
        batch = RaggedBatch.of([lengths[r] for r in rows], [done[r] for r in rows], torch.tensor)
        tokens = torch.randint(61, (sum(lengths),))
        with torch.no_grad():
            found.append(model.step(tokens, batch, store.view(batch, rows)))
        done = [before + length for before, length in zip(done, lengths, strict=True)]
    return found


PLAN = [[5, 1, 0], [1, 20, 3], [1, 1, 1], [7, 1, 1], [1, 1, 1]]


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("cache", ["paged", "shared", "contiguous"])
def test_a_block_says_what_its_parts_say(name, cache):
    model = packed(BLOCKS[name])
    assert all(block.joined is not None for block in model.blocks)
    joined = steps(model, PLAN, cache)
    for one, other in zip(joined, steps(apart(model), PLAN, cache), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_a_block_reads_and_writes_states_in_bfloat16():
    model = packed({})
    joined = steps(model, PLAN, dtype="bfloat16")
    exact = steps(model, PLAN)
    for one, other in zip(joined, exact, strict=True):
        assert 0 < (one - other).norm() / other.norm() < 0.03


@pytest.mark.parametrize("cache", ["int8", "float16"])
def test_a_block_keeps_the_codes_that_the_cache_makes_of_its_rows(cache):
    """Of tokens whose keys and values are ordinary, tiny, zero, no numbers, and too large for a scale."""
    torch.manual_seed(2)
    model = Decoder(DecoderConfig.from_plain(LLAMA | {"num_layers": 1})).eval()
    with torch.no_grad():
        model.blocks[0].attention_norm.weight[5] = 1e10
    quantize_model(model, "float32")
    hidden = torch.randn(6, 64) * torch.tensor([1.0, 1e-20, 1e-6, 0, 1, 0])[:, None]
    hidden[:, 5] = 0
    hidden[4, 7], hidden[5, 5] = torch.nan, 1.0
    batch = RaggedBatch.of([6], [0], torch.tensor)

    def view_of(cache):
        store = store_of(model, cache)
        assert store.admit(0)
        assert store.reserve(0, 6)
        return store.view(batch, [0])["blocks.0"]["kv"]

    rows, codes, wanted = view_of("paged"), view_of(cache), view_of(cache)
    for view in (rows, codes):
        with torch.no_grad():
            assert model.stack.step(hidden.clone(), batch, [{"kv": view}]) is not None
    plain, coded = rows.in_place(), codes.coded_in_place()
    wanted.append({name: memory[plain.slot_mapping] for name, memory in plain.fields.items()})
    for name, memory in wanted.coded_in_place().fields.items():
        kept = coded.fields[name][coded.slot_mapping]
        torch.testing.assert_close(kept, memory[coded.slot_mapping], rtol=0, atol=0, equal_nan=True)
    kept = coded.fields["key.scale" if cache == "int8" else "key.codes"][coded.slot_mapping]
    assert [bool(row.isfinite().all()) for row in kept] == [True] * 4 + [False] * 2


@pytest.mark.parametrize("weights", ["float32", "bfloat16", "int8", "int4"])
def test_a_request_gets_the_same_bits_alone_and_in_a_crowd(weights):
    model = packed(BLOCKS["two windows"], weights)
    torch.manual_seed(1)
    store, lone = store_of(model, "paged"), store_of(model, "paged")
    for request in range(4):
        assert store.admit(request)
        assert store.reserve(request, 40)
    assert lone.admit(0)
    assert lone.reserve(0, 40)
    tokens = torch.randint(61, (4, 30))
    with torch.no_grad():
        for at in range(0, 30, 3):
            batch = RaggedBatch.of([3] * 4, [at] * 4, torch.tensor)
            crowd = model.step(tokens[:, at : at + 3].flatten(), batch, store.view(batch, store.order(range(4))))
            batch = RaggedBatch.of([3], [at], torch.tensor)
            one = model.step(tokens[0, at : at + 3], batch, lone.view(batch, [0]))
            assert torch.equal(crowd[:3], one)


def rows_of(model, tokens, chunks, cache="paged", dtype="float32"):
    """Hidden rows of a prompt in chunks."""
    store, done, found = store_of(model, cache, dtype), 0, []
    assert store.admit(0)
    for chunk in chunks:
        assert store.reserve(0, done + chunk)
        batch = RaggedBatch.of([chunk], [done], torch.tensor)
        with torch.no_grad():
            found.append(model.step(tokens[done : done + chunk], batch, store.view(batch, [0])))
        done += chunk
    return torch.cat(found)


@pytest.mark.parametrize(
    ("cache", "dtype"),
    [*[("paged", "float32"), ("paged", "bfloat16")], *[("int8", "float32"), ("float16", "float32")]],
)
@pytest.mark.parametrize("name", [*BLOCKS, "wide"])
def test_a_prompt_at_once_in_chunks_and_token_by_token_gets_the_same_bits(name, cache, dtype):
    model = packed(WIDE if name == "wide" else BLOCKS[name])
    torch.manual_seed(1)
    tokens = torch.randint(61, (90,))
    whole = rows_of(model, tokens, [90], cache, dtype)
    for chunks in ([1] * 90, [3, 40, 1, 5, 4, 37], [64, 2, 24]):
        assert torch.equal(rows_of(model, tokens, chunks, cache, dtype), whole)


@pytest.mark.parametrize("name", [*BLOCKS, "wide"])
def test_a_batch_invariant_block_has_the_bits_of_its_parts_and_of_training(name):
    fields = WIDE if name == "wide" else BLOCKS[name]
    torch.manual_seed(1)
    tokens = torch.randint(61, (50,))
    policy, served = unpacked(fields).train(), [packed(fields), apart(packed(fields))]
    with BatchInvariant():
        trained = policy.hidden(tokens[None])[0]
        for model in served:
            assert torch.equal(rows_of(model, tokens, [3, 30, *[1] * 17]), trained)


def test_a_batch_invariant_engine_leaves_blocks_to_their_parts_unless_kernels_give_the_same_bits():
    model, config = packed({}), EngineConfig(batch_invariant=True)
    build_engine(model, config=config)
    assert model.stack is not None
    model.blocks[1].joined.composed = False
    build_engine(model, config=config)
    assert model.stack is None
    assert [block.joined for block in model.blocks] == [None] * 2


def test_a_prompt_beside_others_gets_the_bits_it_gets_alone():
    """Whatever neighbours a tile of new tokens has."""
    model = packed(BLOCKS["two windows"])
    torch.manual_seed(1)
    tokens = torch.randint(61, (4, 40))
    lengths = [40, 1, 33, 6]

    def rows_of(requests):
        store = store_of(model, "paged")
        for request in requests:
            assert store.admit(request)
            assert store.reserve(request, lengths[request])
        batch = RaggedBatch.of([lengths[r] for r in requests], [0] * len(requests), torch.tensor)
        fed = torch.cat([tokens[r, : lengths[r]] for r in requests])
        with torch.no_grad():
            return model.step(fed, batch, store.view(batch, store.order(requests)))

    alone = torch.cat([rows_of([request]) for request in range(4)])
    assert torch.equal(rows_of([0, 1, 2, 3]), alone)


def completions(model, requests, **limits):
    store = store_of(model, "shared", tokens=limits.pop("tokens", 512))
    engine = Engine(model, store, None, EngineConfig(**limits))
    for request in requests:
        engine.submit(request)
    found = {request.id: [] for request in requests}
    while not engine.idle:
        for event in engine.step():
            found[event.request_id] += [token.id for token in event.delta.tokens]
    return found


@pytest.mark.parametrize("weights", ["float32", "int8", "int4"])
@pytest.mark.parametrize("limits", [{}, {"max_num_batched_tokens": 5}, {"max_num_batched_tokens": 16, "tokens": 128}])
def test_chunks_prefixes_and_preemption_change_no_token(weights, limits):
    model = packed({}, weights)
    torch.manual_seed(4)
    start = torch.randint(61, (20,)).tolist()
    requests = [
        Request(
            id=str(i),
            token_ids=(*start, *torch.randint(61, (1 + 3 * i,)).tolist()),
            params=SamplingParams(max_new_tokens=12, ignore_eos=True),
            scope="all",
        )
        for i in range(6)
    ]
    alone = {request.id: completions(model, [request])[request.id] for request in requests}
    assert completions(model, requests, **limits) == alone
    assert len({tuple(ids) for ids in alone.values()}) > 1


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"mechanism": "qk_l2_norm", "num_kv_heads": None}, "norm"),
        ({"mechanism": "alibi", "num_kv_heads": None, "positions": "none"}, "modifiers"),
        ({"head_dim": 24, "partial_rotary_factor": 1.0}, "key_size: 24"),
        ({"intermediate_size": 104}, "intermediate_size: 104"),
    ],
)
def test_what_a_block_cannot_compute_it_refuses_and_its_parts_compute(fields, why):
    model = packed(fields)
    kernel = installed().blocks.get("cpu_block")
    assert any(reason.startswith(why) for reason in kernel.refusals(block_problem(model.blocks[0].parts())))
    assert model.blocks[0].joined is None
    assert steps(model, PLAN)[0].isfinite().all()


OTHERS = [
    {"norm_place": "after"},
    {"norm_place": "parallel"},
    {"feed_forward": "swiglu_clamped"},
    {"residual_multiplier": 0.5},
]


@pytest.mark.parametrize("fields", OTHERS, ids=lambda fields: "-".join(map(str, fields.values())))
def test_a_block_of_another_architecture_is_computed_by_its_parts(fields):
    model = packed(fields)
    for one, other in zip(steps(model, PLAN), steps(apart(model), PLAN), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_what_is_no_number_stays_with_tokens_that_see_it():
    model = packed({})
    store = store_of(model, "paged")
    assert store.admit(0)
    assert store.reserve(0, 40)
    batch = RaggedBatch.of([40], [0], torch.tensor)
    hidden = torch.randn(40, 64)
    hidden[21, 5] = torch.nan
    out = model.blocks[0].step(hidden, batch, store.view(batch, [0])["blocks.0"])
    assert out[21:].isnan().any(-1).all()
    assert out[:21].isfinite().all()


def test_what_is_no_number_stays_with_its_request():
    model = packed({})
    store = store_of(model, "paged")
    for request in range(2):
        assert store.admit(request)
        assert store.reserve(request, 4)
    batch = RaggedBatch.of([2, 2], [0, 0], torch.tensor)
    hidden = torch.randn(4, 64)
    hidden[1, 5] = torch.nan
    state = store.view(batch, [0, 1])
    out = model.blocks[0].step(hidden, batch, state["blocks.0"])
    assert out[1].isnan().any()
    assert out[[0, 2, 3]].isfinite().all()


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("cache", ["paged", "contiguous"])
def test_all_blocks_in_one_call_give_the_bits_of_one_call_each(name, cache):
    model = packed(BLOCKS[name])
    assert model.stack is not None
    together = steps(model, PLAN, cache)
    model.stack = None
    assert all(torch.equal(one, other) for one, other in zip(together, steps(model, PLAN, cache), strict=True))


def test_blocks_are_not_stacked_where_one_is_computed_by_its_parts():
    model = packed({"pattern": ["mha", "qk_l2_norm"], "mechanism": "mha", "num_kv_heads": None, "num_layers": 4})
    assert [block.joined is not None for block in model.blocks] == [True, False] * 2
    assert model.stack is None
    assert steps(model, PLAN)[0].isfinite().all()


def test_states_that_cannot_be_reached_are_left_to_the_parts_of_all_blocks():
    """Nothing is written before that is known of every block."""
    model = packed({})
    store = store_of(model, "paged")
    assert store.admit(0)
    assert store.reserve(0, 8)
    batch = RaggedBatch.of([8], [0], torch.tensor)
    view = store.view(batch, [0])
    hidden = torch.randn(8, 64)
    kept = hidden.clone()
    with torch.no_grad():
        assert model.stack.step(hidden, batch, [view["blocks.0"], {}]) is None
    assert torch.equal(hidden, kept)
    assert not store.view(batch, [0])["blocks.0"]["kv"].in_place().fields["key"].any()


def test_an_engine_names_the_block_that_gives_no_numbers():
    """Though all blocks were computed in one call."""
    torch.manual_seed(11)
    model = Decoder(DecoderConfig.from_plain(LLAMA | {"num_layers": 4})).eval()
    with torch.no_grad():
        model.blocks[2].feed_forward_norm.weight[5] = torch.nan
    quantize_model(model, "float32")
    engine = Engine(model, store_of(model, "paged"))
    engine.submit(Request(id="x", token_ids=(1, 2, 3), params=SamplingParams(max_new_tokens=4)))
    (event,) = engine.step()
    assert event.delta.finish_reason is None
    assert "blocks.2" in event.error.message
