"""Requests that begin with the same rows meet these together."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from attn_core import RaggedBatch, Window
from attn_core.distributions import SoftmaxOne, SoftmaxWithSink
from attn_core.kernels.attend import PagedAttentionInputs
from attn_core.modifiers import Alibi, RelativeBias, SoftCap
from attn_engine import EngineConfig, Request, SamplingParams
from attn_engine.build import build_engine
from attn_kernels_triton.paged import cascade, host_plan
from attn_kernels_triton.paged.attend import attend_rows
from attn_kernels_triton.paged.cascade import runs, same_until, shared_prefixes
from bounds import require_close
from engines import model_of
from test_paged import POOL, Step, by_definition

BRAIN = torch.bfloat16


@pytest.fixture(autouse=True)
def worth(monkeypatch):
    """The least of savings pays."""
    monkeypatch.setattr(cascade, "WORTH", 1)


def operands_of(step: Step, groups: list[tuple[int, tuple[int, ...]]], last: tuple[int, ...] = ()):
    """For each group so many rows that its requests share, and for each of these so many rows behind, its own token's
    among them; `last` are lengths of chunks of requests behind, after 20 rows each."""
    generator = torch.Generator().manual_seed(2)
    free = torch.randperm(POOL, generator=generator).tolist()
    lines, lengths = [], []
    for shared, owns in groups:
        together = [free.pop() for _ in range(shared)]
        for own in owns:
            lines.append(together + [free.pop() for _ in range(own)])
            lengths.append(1)
    for length in last:
        lines.append([free.pop() for _ in range(20 + length)])
        lengths.append(length)
    longest = max(map(len, lines))
    contexts = [len(line) - length for line, length in zip(lines, lengths, strict=True)]
    drawn = step._replace(lengths=(1,), contexts=(0,)).operands()
    query = torch.randn(sum(lengths), step.heads[0], step.sizes[0], generator=generator, dtype=torch.float64)
    numbers = torch.tensor([line + [-7] * (longest - len(line)) for line in lines])
    return PagedAttentionInputs(
        query=query.to(step.dtype),
        batch=RaggedBatch.of(lengths, contexts, torch.tensor),
        rows=dataclasses.replace(drawn.rows, kv_indices=numbers, firsts=(0,) * len(lines)),
        requests=tuple(range(len(lines))),
        parameters=drawn.parameters,
    )


STEPS = {
    "two requests": (Step(), [(130, (1, 9))], ()),
    "a tile of few rows and one of many": (Step(), [(70, (3, 1, 2)), (66, (1,) * 12)], ()),
    "more rows than a tile has, bfloat16": (Step(dtype=BRAIN, heads=(8, 1)), [(128, (2,) * 11)], ()),
    "requests without a prefix between and behind": (Step(), [(0, (20,)), (64, (30, 1)), (0, (9,))], ()),
    "one inside of another": (Step(), [(64, (1, 70, 70, 5))], ()),
    "chunks behind": (Step(), [(130, (1, 40))], (30, 3)),
    "heads of their own": (Step(heads=(2, 2)), [(80, (5, 6, 7))], ()),
    "sinks": (Step(distribution=SoftmaxWithSink()), [(70, (1, 3))], ()),
    "softmax one, soft cap and alibi": (
        Step(distribution=SoftmaxOne(), modifiers=(SoftCap(cap=1.5), Alibi())),
        [(70, (1, 3))],
        (),
    ),
    "relative biases": (Step(modifiers=(RelativeBias(clip=9),)), [(64, (2, 5, 1))], ()),
    "sizes that are no powers of two": (Step(sizes=(20, 24), dtype=BRAIN), [(70, (1, 3))], ()),
}


@pytest.mark.parametrize("name", STEPS)
def test_prefixes_that_are_read_together_give_what_is_defined(name, programs):
    step, groups, last = STEPS[name]
    operands = operands_of(step, groups, last)
    exact = by_definition(step.spec, operands, torch.float64)
    plain = by_definition(step.spec, operands, step.dtype)
    found = attend_rows(step.spec, operands)
    require_close(found, plain, exact, name)
    kept = next(iter(host_plan._PREPARED[operands.batch].values())).portions
    assert any(portion.shared for portion in kept)
    assert programs.count("attend_paged") == len(kept) + sum(len(portion.shared) for portion in kept)


def keys_read(step: Step, operands: PagedAttentionInputs) -> int:
    """Keys that the programs of a step read for one key/value head."""
    attend_rows(step.spec, operands)
    kept = next(iter(host_plan._PREPARED[operands.batch].values())).portions
    items = [some for portion in kept for some in (portion.items, *(shared.items for shared in portion.shared))]
    return sum(int((some[:, 5] - some[:, 4]).sum()) for some in items)


def test_what_is_shared_is_read_once_for_as_many_requests_as_fill_a_tile(monkeypatch):
    step = Step(dtype=BRAIN)
    groups = [(128, (4,) * 10)]
    together = keys_read(step, operands_of(step, groups))
    monkeypatch.setattr(cascade, "WORTH", 1 << 40)
    apart = keys_read(step, operands_of(step, groups))
    assert (together, apart) == (128 + 10 * 4, 10 * 132)


def test_what_would_not_pay_is_met_by_each_alone_and_the_device_is_not_asked(monkeypatch):
    step = Step()
    operands = operands_of(step, [(130, (1, 9))])
    monkeypatch.setattr(cascade, "WORTH", 1 << 40)
    monkeypatch.setattr(cascade, "same_until", None)
    require_close(
        attend_rows(step.spec, operands),
        by_definition(step.spec, operands, step.dtype),
        by_definition(step.spec, operands, torch.float64),
        "alone",
    )


@pytest.mark.parametrize(
    ("step", "groups"),
    [
        (Step(mask=Window(left=300)), [(130, (1, 9))]),
        (Step(latent=True, heads=(4, 1), sizes=(24, 16)), [(130, (1, 9))]),
        (Step(heads=(20, 1)), [(130, (1, 9))]),
        (Step(), [(60, (1, 9))]),
        (Step(), [(0, (90, 90))]),
    ],
    ids=["windows", "latents", "groups of more heads than a tile", "short prefixes", "nothing in common"],
)
def test_others_are_computed_as_ever(step, groups):
    operands = operands_of(step, groups)
    require_close(
        attend_rows(step.spec, operands),
        by_definition(step.spec, operands, step.dtype),
        by_definition(step.spec, operands, torch.float64),
        "alone",
    )
    kept = next(iter(host_plan._PREPARED[operands.batch].values())).portions
    assert not any(portion.shared for portion in kept)


def test_the_rows_that_neighbours_have_in_common_are_counted_from_the_first_on():
    rows = operands_of(Step(), [(0, (5,))]).rows
    numbers = torch.tensor([[1, 2, 3, 4], [1, 2, 9, 4], [1, 2, 9, 4], [7, 2, 9, 4]])
    rows = dataclasses.replace(rows, kv_indices=numbers, firsts=(0,) * 4)
    assert same_until(rows, [0, 1, 2], 4) == [2, 4, 0]
    assert same_until(rows, [1], 3) == [3]


@pytest.mark.parametrize(
    ("common", "expected"),
    [
        ({0: 640}, [(0, 2, 640)]),
        ({0: 640, 1: 700, 2: 64}, [(0, 3, 640)]),
        ({0: 64, 1: 6400}, [(1, 2, 6400)]),
        ({0: 640, 2: 640}, [(0, 2, 640), (2, 2, 640)]),
        (dict.fromkeys(range(20), 128), [(0, 16, 128), (16, 5, 128)]),
        ({0: 63}, []),
    ],
    ids=str,
)
def test_a_run_goes_on_for_as_long_as_it_saves_more(common, expected):
    heads = host_plan.Heads(group=4, owners=1, large_tile=64)
    assert runs(common, heads) == expected


def test_requests_that_are_not_asked_for_are_no_part_of_a_run():
    operands = operands_of(Step(), [(130, (1, 9, 4))])
    heads = host_plan.Heads(group=2, owners=2, large_tile=16)
    assert [found.members for found in shared_prefixes(operands, {0, 1, 2}, heads)] == [range(3)]
    assert [found.members for found in shared_prefixes(operands, {1, 2}, heads)] == [range(1, 3)]
    assert shared_prefixes(operands, {0, 2}, heads) == []


def test_an_engine_whose_requests_share_pages_meets_these_once(monkeypatch, few_processors):
    monkeypatch.setattr(cascade, "MULTIPLE", 16)
    met = []
    found_in = cascade.shared_prefixes

    def recorded(*given):
        met.extend(found := found_in(*given))
        return found

    monkeypatch.setattr(host_plan, "shared_prefixes", recorded)
    model = model_of("gqa")
    together = tuple(range(3, 36))
    prompts = {"0": (*together, 1), "1": (*together, 2), "2": (*together, 38, 5)}
    engine = build_engine(
        model, None, EngineConfig(kv_cache="shared", max_num_seqs=4, enforce_eager=True), kv_cache_tokens=512
    )
    params = SamplingParams(max_new_tokens=5, temperature=0)
    written: dict[str, list[int]] = {name: [] for name in prompts}
    for name, prompt in prompts.items():
        engine.submit(Request(id=name, token_ids=prompt, params=params))
        for output in engine.step():
            written[output.request_id] += [token.id for token in output.delta.tokens]
    while not engine.idle:
        for output in engine.step():
            assert output.error is None
            written[output.request_id] += [token.id for token in output.delta.tokens]
    assert {(one.requests, one.keys) for one in met} >= {(3, 32)}
    exact = model.double()
    for name, prompt in prompts.items():
        ids = written[name]
        with torch.no_grad():
            logits = exact(torch.tensor([[*prompt, *ids[:-1]]]))[0, len(prompt) - 1 :]
        assert ids == logits.argmax(-1).tolist()
