from __future__ import annotations

import copy

import pytest
import torch
from attn_core import configure, installed
from attn_core.errors import InvalidValue
from attn_core.kernels.recurrence import RecurrenceDispatcher, Steps
from attn_kernels_triton.backends.recurrence import TritonChunked
from attn_kernels_triton.recurrence import tiles
from attn_kernels_triton.recurrence.compute import by_chunks, by_token
from attn_testing import DictionaryStore
from attn_testing.serving import ragged
from attn_variants.mechanisms.recurrence_scan import recurrent
from bounds import require_close
from torch import Tensor

BATCH, HEADS = 1, 2
KINDS = [(decay, delta_rule) for decay in ("none", "head", "channel") for delta_rule in (False, True)]
SHAPES = [(1, (5, 3)), (16, (16, 16)), (37, (20, 18))]
"""Tokens, and the sizes of keys and values: no chunk, one, and several that nothing fits."""
ROUNDINGS, MORE = 4, 32
"""More for gradients to log decays, sums of differences between what flows to queries and to keys, which nearly cancel,
and for exponentials of large numbers."""
OF_DECAYS = {"fade.0.weight", "fade.1.weight", "fade.1.bias", "fade.weight", "fade_bias", "rate", "step_bias"}
NAMES = ("query", "key", "value", "decay", "strength")


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Chunks of 16 tokens and parts of 16 channels, so that a small problem has several."""
    monkeypatch.setattr(tiles, "CHUNKS", dict.fromkeys(tiles.CHUNKS, 16))
    choices = dict.fromkeys(tiles.SCAN_CHOICES, tiles.ScanChoice(16, 16, 4, 1))
    monkeypatch.setattr(tiles, "SCAN_CHOICES", choices)


def draw(kind: tuple[str, bool], tokens: int, *, sizes=(20, 18), strongest: float = 0.5, batch: int = BATCH) -> Steps:
    """Steps in float64 of numbers that bfloat16 holds, keys of about length one; log decays down to -`strongest`."""
    decay, delta_rule = kind
    generator = torch.Generator().manual_seed(tokens)

    def rows(*size: int, make=torch.randn) -> Tensor:
        return make(batch, tokens, HEADS, *size, generator=generator, dtype=torch.float64).bfloat16().double()

    fades = {"none": None, "head": 1, "channel": sizes[0]}[decay]
    return Steps(
        query=rows(sizes[0]),
        key=(rows(sizes[0]) * sizes[0] ** -0.5).bfloat16().double(),
        value=rows(sizes[1]),
        decay=None if fades is None else -strongest * rows(fades, make=torch.rand),
        strength=rows(make=torch.rand) if delta_rule else None,
    )


def memory(sizes=(20, 18)) -> Tensor:
    """A memory to start from."""
    generator = torch.Generator().manual_seed(5)
    return torch.randn(BATCH, HEADS, *sizes, generator=generator, dtype=torch.float64).bfloat16().double()


def cast(steps: Steps, dtype: torch.dtype, wide: torch.dtype = torch.float32) -> Steps:
    """The steps in another type; log decays and strengths in `wide`."""
    kinds = (dtype, dtype, dtype, wide, wide)
    return Steps(*(None if part is None else part.to(kind) for part, kind in zip(steps, kinds, strict=True)))


def results(compute, steps: Steps, before: Tensor | None) -> dict[str, Tensor]:
    """Outputs, the memory after them, and gradients of a fixed weighted sum of both to everything."""
    leaves = {name: part.detach().requires_grad_() for name, part in zip(NAMES, steps, strict=True) if part is not None}
    if before is not None:
        leaves["before"] = before.detach().requires_grad_()
    out, after = compute(Steps(**{name: leaves.get(name) for name in NAMES}), leaves.get("before"))
    total = sum((part.double() * probe(part)).sum() for part in (out, after))
    found = torch.autograd.grad(total, list(leaves.values()))
    return {"output": out.detach(), "after": after.detach(), **dict(zip(leaves, found, strict=True))}


def probe(tensor: Tensor) -> Tensor:
    """Weights from -1 to 1."""
    return torch.linspace(-1, 1, tensor.numel(), dtype=torch.float64).view_as(tensor)


def require_right(kind, tokens: int, dtype: torch.dtype, before: Tensor | None = None, **drawn) -> None:
    """Fail unless outputs and gradients are nearly as close to float64 as those of the definition in the same type."""
    steps = draw(kind, tokens, **drawn)
    exact = results(recurrent, steps, before)
    plain = results(recurrent, cast(steps, dtype, dtype), None if before is None else before.to(dtype))
    found = results(by_chunks, cast(steps, dtype), None if before is None else before.float())
    for name, truth in exact.items():
        roundings = MORE if name == "decay" or drawn.get("strongest") else ROUNDINGS
        require_close(found[name].to(dtype), plain[name], truth, f"{kind} {tokens} {name}", roundings)


@pytest.mark.sweep(6)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_outputs_memories_and_gradients_are_those_of_the_definition(kind, shape):
    tokens, sizes = shape
    require_right(kind, tokens, torch.float32, memory(sizes), sizes=sizes)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_in_bfloat16_they_are_as_close_to_float64_as_those_of_the_definition(kind):
    require_right(kind, 20, torch.bfloat16, memory())


@pytest.mark.parametrize("kind", [("none", False), ("channel", True)], ids=str)
def test_without_a_memory_before_they_begin_with_an_empty_one(kind):
    require_right(kind, 17, torch.float32)


@pytest.mark.parametrize("kind", [("head", False), ("channel", False), ("channel", True)], ids=str)
@pytest.mark.parametrize("strongest", [50.0, 1e6])
def test_no_strength_of_decay_overflows(kind, strongest):
    require_right(kind, 19, torch.float32, memory((8, 5)), sizes=(8, 5), strongest=strongest)


def test_strengths_of_zero_write_nothing_and_have_a_gradient():
    steps = draw(("head", True), 19, sizes=(8, 5))
    steps = steps._replace(strength=torch.where(torch.arange(19)[:, None] % 3 == 0, 0, steps.strength))
    exact, found = results(recurrent, steps, None), results(by_chunks, cast(steps, torch.float32), None)
    assert exact["strength"][:, 0].abs().max() > 0
    for name, truth in exact.items():
        torch.testing.assert_close(found[name].double(), truth, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("size", [1, 8])
def test_one_decay_for_all_sequences_gets_the_sum_of_their_gradients(size):
    steps = draw(("channel", False), 19, sizes=(8, 5), batch=2)
    steps = steps._replace(decay=steps.decay[:1, :1, :, :size].expand(1, 19, -1, -1))
    exact, found = results(recurrent, steps, None), results(by_chunks, cast(steps, torch.float32), None)
    for name, truth in exact.items():
        assert found[name].shape == truth.shape
        torch.testing.assert_close(found[name].double(), truth, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("tokens", [1, 5])
def test_token_by_token_is_what_is_defined(kind, tokens):
    steps = draw(kind, tokens)
    for before in (None, memory()):
        found = by_token(cast(steps, torch.float32), None if before is None else before.float())
        for one, truth in zip(found, recurrent(steps, before), strict=True):
            torch.testing.assert_close(one.double(), truth, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", [("none", False), ("head", True), ("channel", True)], ids=str)
def test_a_prompt_by_chunks_goes_on_token_by_token(kind):
    steps = cast(draw(kind, 23, sizes=(8, 5)), torch.float32)
    parts = [Steps(*(None if part is None else part[:, cut] for part in steps)) for cut in (slice(20), slice(20, 23))]
    whole, last = by_chunks(steps, None)
    first, between = by_chunks(parts[0], None)
    second, after = by_token(parts[1], between)
    torch.testing.assert_close(torch.cat([first, second], dim=1), whole, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(after, last, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("compute", [by_chunks, by_token])
def test_no_tokens_leave_the_memory_as_it_is(compute):
    steps = cast(draw(("head", True), 0), torch.float32)
    out, after = compute(steps, memory().float())
    assert out.shape == (BATCH, 0, HEADS, 18)
    assert torch.equal(after, memory().float())
    assert not compute(steps, None)[1].any()


def test_heads_before_tokens_and_slices_of_a_larger_tensor_are_read_in_place():
    steps = cast(draw(("channel", True), 19), torch.float32)
    turned = Steps(*(part.transpose(1, 2).contiguous().transpose(1, 2) for part in steps))
    sliced = turned._replace(value=torch.cat([steps.value, steps.value], dim=-1)[..., :18])
    for one, other in zip(by_chunks(sliced, None), by_chunks(steps, None), strict=True):
        assert torch.equal(one, other)


def test_gradients_are_the_same_bit_for_bit_each_time():
    steps = cast(draw(("channel", True), 19), torch.bfloat16)
    first, second = (results(by_chunks, steps, None) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"query": torch.zeros(1, 4, 2, 7)}, "query"),
        ({"value": torch.zeros(1, 3, 2, 5)}, "value"),
        ({"value": torch.zeros(1, 4, 2, 5, dtype=torch.bfloat16)}, "value.dtype"),
        ({"key": torch.zeros(1, 4, 2, 8, dtype=torch.float64)}, "key.dtype"),
        ({"key": torch.zeros(1, 4, 2, 130)}, "key"),
        ({"key": torch.zeros(1, 4, 2, 300, dtype=torch.bfloat16)}, "key"),
        ({"key": torch.zeros(4, 2, 8)}, "key"),
        ({"value": torch.zeros(1, 4, 2, 5, device="meta")}, "value.device"),
        ({"decay": torch.zeros(1, 4, 2, 1, device="meta")}, "decay.device"),
        ({"decay": torch.zeros(3, 4, 2, 1)}, "decay"),
        ({"decay": torch.zeros(1, 4, 2, 5)}, "decay"),
        ({"strength": torch.zeros(1, 4, 3)}, "strength"),
        ({"strength": torch.zeros(1, 4, 2, dtype=torch.int64)}, "strength.dtype"),
    ],
)
@pytest.mark.parametrize("compute", [by_chunks, by_token])
def test_steps_that_programs_would_misread_are_refused_by_name(compute, changed, named):
    good = Steps(torch.zeros(1, 4, 2, 8), torch.zeros(1, 4, 2, 8), torch.zeros(1, 4, 2, 5))
    with pytest.raises(InvalidValue) as refused:
        compute(good._replace(**changed), None)
    assert refused.value.metadata["field"] == named


def test_a_memory_of_another_shape_is_refused():
    good = Steps(torch.zeros(1, 4, 2, 8), torch.zeros(1, 4, 2, 8), torch.zeros(1, 4, 2, 5))
    with pytest.raises(InvalidValue, match="before"):
        by_chunks(good, torch.zeros(1, 2, 5, 8))


NAMED = ["linear", "retnet", "lightning", "gla", "deltanet", "kda"]
PLUGGED = [name for name in installed().mechanisms.names() if name == "gated_deltanet"]
"""Those of plugins, where they are installed: this package needs none of them."""


@pytest.fixture
def handed(monkeypatch):
    """The types of queries, keys, values and log decays that kernels were handed, and of the memory before."""
    seen = []

    def run(self, steps, before, chunk):
        assert len({part.dtype for part in steps[:3]}) == 1
        wide = {part.dtype for part in (*steps[3:], before) if part is not None}
        seen.append((steps.value.dtype, wide))
        return by_chunks(steps, before)

    monkeypatch.setattr(TritonChunked, "run", run)
    return seen


@pytest.mark.parametrize("name", [*NAMED, *PLUGGED])
def test_layers_in_bfloat16_hand_it_on_and_stay_as_close_to_float64_as_those_that_do_not(handed, name):
    mechanism, tokens = installed().mechanisms.get(name), 20
    torch.manual_seed(0)
    layer = mechanism.build(configure(mechanism, hidden_size=32, num_heads=2)).bfloat16()
    rows = torch.randn(1, tokens, 32, generator=torch.Generator().manual_seed(1)).bfloat16()
    plain, exact = copy.deepcopy(layer), copy.deepcopy(layer).double()
    plain.plan = exact.plan = RecurrenceDispatcher(installed().kernels, "plain_chunked")
    found, usual, truth = (learned(one, rows.to(one.query.weight.dtype)) for one in (layer, plain, exact))
    assert handed[0][0] == torch.bfloat16
    assert handed[0][1] <= {torch.float32}
    for part, truth_of in truth.items():
        roundings = (MORE if part in OF_DECAYS else 3) if part != "output" else 2
        require_close(found[part], usual[part], truth_of, f"{name} {part}", roundings)


def learned(layer, rows: Tensor) -> dict[str, Tensor]:
    """The output and the gradients to all weights of a weighted sum of it."""
    out = layer(rows)
    names, weights = zip(*layer.named_parameters(), strict=True)
    found = torch.autograd.grad((out.double() * probe(out)).sum(), weights)
    return {"output": out.detach(), **dict(zip(names, found, strict=True))}


@pytest.mark.parametrize("name", ["retnet", *PLUGGED])
def test_prompts_are_handed_in_bfloat16_single_tokens_and_memories_in_float32(handed, name):
    mechanism = installed().mechanisms.get(name)
    config = configure(mechanism, hidden_size=32, num_heads=2)
    layer = mechanism.build(config).bfloat16()
    store = DictionaryStore({"layer": mechanism.state(config)}, "bfloat16")
    rows, done = torch.randn(2, 24, 32).bfloat16(), [0, 0]
    for request in range(2):
        store.admit(request)
    for lengths in ([18, 5], [1, 6], [1, 1]):
        batch = ragged(lengths, done)
        new = torch.cat([rows[i, d : d + n] for i, (d, n) in enumerate(zip(done, lengths, strict=True))])
        with torch.no_grad():
            layer.step(new, batch, store.view(batch, [0, 1])["layer"])
        done = [a + b for a, b in zip(done, lengths, strict=True)]
    assert handed == [(torch.bfloat16, {torch.float32})] * 3


@pytest.mark.parametrize("name", NAMED)
def test_layers_take_these_kernels_and_compute_the_same(handed, name):
    mechanism = installed().mechanisms.get(name)
    layer = mechanism.build(configure(mechanism, hidden_size=16, num_heads=2))
    rows = torch.randn(1, 19, 16, generator=torch.Generator().manual_seed(1))
    key_padding_mask = torch.arange(19)[None] < 17
    found = [layer(rows, key_padding_mask=key_padding_mask)]
    assert len(handed) == 1
    layer.plan = RecurrenceDispatcher(installed().kernels, "plain_chunked")
    found.append(layer(rows, key_padding_mask=key_padding_mask))
    torch.testing.assert_close(found[0][:, :17], found[1][:, :17], rtol=1e-4, atol=1e-5)
    gradients = [torch.autograd.grad(out[:, :17].square().sum(), list(layer.parameters())) for out in found]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)
