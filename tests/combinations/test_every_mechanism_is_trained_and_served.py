"""From equation to endpoint, for every installed mechanism that a decoder can have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch
from attn_core import Capability, Paged, Slot, installed
from attn_core.errors import Incompatible
from attn_core.reinforce import samples_keys
from attn_engine import Engine, EngineConfig, Request, SamplingParams, ScoringParams, build_engine
from attn_models.decoder.decoder import Decoder
from attn_models.evaluation import IGNORED, next_token_loss
from attn_schema.decoder import DecoderConfig
from attn_train.optimizer import decayed
from attn_train.precision import forward_precision
from attn_train.tasks.packed import require_document_mask
from cases import kind_of
from torch.nn import functional

VOCABULARY, CONTEXT = 32, 96
DRAFT = "mqa"
MECHANISMS = [
    name for name in installed().mechanisms.names() if installed().mechanisms.get(name).can(Capability.CAUSAL)
]
PAPERS = {
    "gpt3": {"band": 9},
    "sparse_transformer": {"stride": 5, "summaries": 2},
    "retnet_lm": {"scale_base": 512},
}
"""Decoders of papers, whose layers differ."""


def every_mechanism(test: Callable[..., None]) -> Callable[..., None]:
    """Of every mechanism and paper; by day of one of each kind, another one for each test."""
    return pytest.mark.sweep(lambda name, **_: kind_of(name))(parametrized(test))


parametrized = pytest.mark.parametrize("name", [*MECHANISMS, *PAPERS])


def decoder(name: str) -> Decoder:
    if name in PAPERS:
        torch.manual_seed(0)
        family = installed().models.get(name)
        sizes = {"vocab_size": VOCABULARY, "max_seq_len": CONTEXT, "hidden_size": 32, "num_layers": 2, "num_heads": 4}
        built: Decoder = family.build(family.configure(sizes | PAPERS[name]))
        return built
    mechanism = installed().mechanisms.get(name)
    torch.manual_seed(0)
    config = DecoderConfig(
        vocab_size=VOCABULARY,
        max_seq_len=CONTEXT,
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        mechanism=name,
        positions="rotary" if mechanism.can(Capability.ROTARY) else "learned",
    )
    return Decoder(config)


@cache
def served(name: str) -> Decoder:
    # In float64, so that batches of other sizes cannot tip a greedy choice.
    return decoder(name).double().eval()


def requests() -> list[Request]:
    generator = torch.Generator().manual_seed(1)
    stems = [torch.randint(VOCABULARY, (20,), generator=generator).tolist() for _ in range(2)]
    asked = []
    for number in range(8):
        tail = torch.randint(VOCABULARY, (1 + 2 * number,), generator=generator).tolist()
        task = SamplingParams(max_new_tokens=4 + number % 3, ignore_eos=True)
        asked.append(Request(id=f"r{number}", token_ids=(*stems[number % 2], *tail), params=task))
    return asked


def tokens(engine: Engine, asked: list[Request], every: int = 0) -> dict[str, list[int]]:
    made: dict[str, list[int]] = {request.id: [] for request in asked}
    waiting = list(asked)
    step = 0
    while waiting or not engine.idle:
        if waiting and (every == 0 or step % every == 0):
            engine.submit(waiting.pop(0))
        for event in engine.step():
            made[event.request_id] += [token.id for token in event.delta.tokens]
            assert event.error is None, event.error
        step += 1
    return made


@every_mechanism
def test_a_request_in_a_crowd_with_chunked_and_shared_prompts_gives_the_tokens_of_the_request_alone(name: str) -> None:
    model, asked = served(name), requests()
    alone = {request.id: tokens(build_engine(model), [request])[request.id] for request in asked}
    # So little room that some must wait and some are thrown out and computed again.
    crowd = build_engine(model, config=EngineConfig(kv_cache="shared", max_num_seqs=4), kv_cache_tokens=128)
    assert tokens(crowd, asked, every=2) == alone
    assert (crowd.stats().running, crowd.stats().waiting, crowd.stats().kv_tokens_used) == (0, 0, 0)


@every_mechanism
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_the_log_probability_of_what_the_engine_sampled_is_that_of_training(name: str, precision: str) -> None:
    """With prompts in chunks, shared prefixes and batches of all sizes: the importance ratio of reinforcement learning
    is 1 before the first update, but for what 16 bits round in another order."""
    model = decoder(name).eval()
    config = EngineConfig(kv_cache="shared", max_num_seqs=8, max_num_batched_tokens=24)
    engine = build_engine(model, config=config)
    params = SamplingParams(max_new_tokens=8, ignore_eos=True, temperature=1.0, seed=5, top_logprobs=0)
    asked, apart = requests(), []
    with forward_precision(precision, torch.device("cpu")):
        told = logprobs(engine, [replace(one, params=params) for one in asked])
    if not samples_keys(model):  # which attends to other keys in training
        model.train()
    for one in asked:
        ids = torch.tensor([[*one.token_ids, *(token for token, _ in told[one.id])]])
        with forward_precision(precision, ids.device):
            trained = model(ids[:, :-1])[0, -8:].log_softmax(-1).gather(1, ids[0, -8:, None])[:, 0]
        sampled = torch.tensor([logprob for _, logprob in told[one.id]])
        apart.append((trained - sampled).abs())
    if precision == "float32":
        assert torch.cat(apart).max() < 2e-6
    else:
        assert torch.cat(apart).mean() < 1e-3


@every_mechanism
def test_a_batch_invariant_engine_and_training_compute_the_same_bits(name: str) -> None:
    """Alone and in a crowd with chunked prompts and shared prefixes, one by one and as a whole sequence."""
    model = decoder(name).eval()
    params = SamplingParams(max_new_tokens=4, ignore_eos=True, temperature=1.0, seed=5, top_logprobs=0)
    asked = [replace(one, params=params) for one in requests()[3:8:2]]
    config = EngineConfig(batch_invariant=True, kv_cache="shared", max_num_seqs=8, max_num_batched_tokens=13)
    crowd = logprobs(build_engine(model, config=config), asked)
    alone = logprobs(build_engine(model, config=config.replace(max_num_batched_tokens=64)), asked[:1])
    assert crowd["r3"] == alone["r3"]
    if not samples_keys(model):  # which attends to other keys in training
        model.train()
    for one in asked:
        ids = torch.tensor([[*one.token_ids, *(token for token, _ in crowd[one.id])]])
        with forward_precision("float32", ids.device, batch_invariant=True):
            trained = model(ids[:, :-1])[0, -4:].log_softmax(-1).gather(1, ids[0, -4:, None])[:, 0]
        assert trained.tolist() == [logprob for _, logprob in crowd[one.id]]


def logprobs(engine: Engine, asked: list[Request]) -> dict[str, list[tuple[int, float]]]:
    """The tokens of each request and their log probabilities."""
    told: dict[str, list[tuple[int, float]]] = {}
    for one in asked:
        engine.submit(one)
    while not engine.idle:
        for event in engine.step():
            assert event.error is None, event.error
            told.setdefault(event.request_id, []).extend((token.id, token.logprob) for token in event.delta.tokens)
    return told


def packs(name: str) -> bool:
    try:
        require_document_mask(served(name))
    except Incompatible:
        return False
    return True


@every_mechanism
def test_documents_packed_into_a_row_are_each_computed_alone_or_packing_is_refused(name: str) -> None:
    """No key, state, convolution or position of one document reaches the next."""
    model = served(name)
    ids = torch.randint(VOCABULARY, (1, 40), generator=torch.Generator().manual_seed(2))
    lengths = [9, 1, 17, 13]
    if not packs(name):
        with pytest.raises(Incompatible, match="document_mask"):
            require_document_mask(model)
        return
    with torch.no_grad():
        packed = model.logits(model.hidden(ids, lengths=lengths))
        alone = torch.cat([model(part) for part in ids.split(lengths, dim=1)], dim=1)
    torch.testing.assert_close(packed, alone, rtol=0, atol=1e-11)
    assert (model(ids) - alone).abs().max() > 1e-6


def test_most_mechanisms_pack_documents() -> None:
    refused = {name for name in MECHANISMS if not packs(name)}
    assert not refused & {"mha", "gqa", "mla", "sliding_window", "mamba2", "gated_deltanet", "kda", "retnet", "linear"}
    assert len(refused) < len(MECHANISMS) / 4


@every_mechanism
def test_weight_decay_reaches_matrices_only(name: str) -> None:
    """No norm, bias, decay rate (A_log), skip (D), sink or share of two tokens, however it is named and stored."""
    model = decoder(name)
    chosen = decayed(model)
    ends = {path.rpartition(".")[2] for path, parameter in model.named_parameters() if parameter in chosen}
    assert not {end for end in ends if end.endswith(("bias", "mixes", "A_log", "sinks"))}
    assert all(parameter.dim() >= 2 and min(parameter.shape) > 1 for parameter in chosen)
    linear = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    assert chosen >= {module.weight for module in linear}


@every_mechanism
def test_the_loss_of_a_padded_batch_is_that_of_its_rows_alone(name: str) -> None:
    """An evaluation depends on no neighbour in a batch, and on no padding."""
    model, lengths = served(name), [20, 11, 5]
    rows = torch.randint(VOCABULARY, (3, 21), generator=torch.Generator().manual_seed(4))
    alone = [next_token_loss(model, row[None, :n], row[None, 1 : n + 1]) for row, n in zip(rows, lengths, strict=True)]
    real = torch.arange(20) < torch.tensor(lengths)[:, None]
    together = next_token_loss(model, rows[:, :-1] * real, rows[:, 1:].masked_fill(~real, IGNORED))
    expected = sum(loss * n for loss, n in zip(alone, lengths, strict=True)) / sum(lengths)
    torch.testing.assert_close(together, expected, rtol=0, atol=1e-11)


@cache
def why_no_trees(name: str) -> str | None:
    return build_engine(served(name)).tree_unsupported_reason


@pytest.mark.sweep(lambda name: kind_of(name))
@pytest.mark.parametrize("name", MECHANISMS)
def test_guesses_in_trees_give_the_tokens_without_a_guess(name: str) -> None:
    """Of whatever attends to rows alone; a mechanism that remembers sums is guessed for in chains."""
    if (reason := why_no_trees(name)) is not None:
        pytest.skip(reason)
    model = served(name)
    task = SamplingParams(max_new_tokens=8, ignore_eos=True)
    words = [Request(id=f"r{number}", token_ids=(*range(number, number + 5),) * 3, params=task) for number in range(2)]
    alone = {request.id: tokens(build_engine(model), [request])[request.id] for request in words}
    engine = build_engine(
        model,
        config=EngineConfig(kv_cache="shared", num_speculative_tokens=4, speculative_tree_width=3),
        draft_model=served(DRAFT),
    )
    assert tokens(engine, words) == alone
    assert engine.stats().draft_tokens > engine.stats().generated_tokens


def test_mechanisms_of_every_family_can_be_guessed_for_in_trees() -> None:
    """Those that cannot are those that remember something of a fixed size, or one row for several tokens."""
    branching = {name for name in MECHANISMS if why_no_trees(name) is None}
    assert {"mha", "gqa", "mla", "sliding_window", "alibi", "nsa", "moba"} <= branching
    fixed = {
        name
        for name in MECHANISMS
        for specs in served(name).state_specs().values()
        if any(isinstance(one, Slot) or (isinstance(one, Paged) and one.every > 1) for one in specs.values())
    }
    assert branching == set(MECHANISMS) - fixed
    assert {"linear", "retnet", "lstmn"} <= fixed


def scores(name: str, cache: str, max_num_batched_tokens: int) -> list[float]:
    engine = build_engine(
        served(name), config=EngineConfig(kv_cache=cache, max_num_seqs=1, max_num_batched_tokens=max_num_batched_tokens)
    )
    engine.submit(Request(id="r", token_ids=requests()[-1].token_ids, params=ScoringParams()))
    found: list[float] = []
    while not engine.idle:
        for event in engine.step():
            assert event.error is None, event.error
            found += [token.logprob for token in event.delta.tokens if token.logprob is not None]
    return found


@pytest.mark.parametrize("name", ["gqa", "mla", "transmla", "attention_sinks", "sliding_window", "compressive"])
def test_with_states_in_few_bits_a_prompt_in_one_step_meets_its_rows_as_one_in_chunks_does(name: str) -> None:
    whole, chunks, exact = (scores(name, *way) for way in (("int4", 256), ("int4", 7), ("shared", 256)))
    assert whole == pytest.approx(chunks, abs=1e-9)
    assert max(abs(a - b) for a, b in zip(whole, exact, strict=True)) > 1e-6, "the codes were not read"


@every_mechanism
def test_the_loss_of_a_text_that_repeats_itself_falls(name: str) -> None:
    model = decoder(name).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    text = (torch.arange(25) * 7 % 11)[None].expand(2, -1)
    losses = []
    for _ in range(20):
        logits = model(text[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.65 * losses[0]
