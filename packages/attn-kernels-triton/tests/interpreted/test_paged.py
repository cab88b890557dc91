from __future__ import annotations

import dataclasses
from typing import NamedTuple

import pytest
import torch
from attn_core import AttentionInputs, AttentionSpec, Causal, Full, Heads, Mask, RaggedBatch, Window, installed
from attn_core.batch import RowsInPlace
from attn_core.distributions import Distribution, Softmax, SoftmaxOne, SoftmaxWithSink
from attn_core.errors import InvalidValue, KernelRefused
from attn_core.kernels.attend import PagedAttentionInputs, attend_problem, paged_problem
from attn_core.kernels.dispatch import choose
from attn_core.masks import Prefix
from attn_core.modifiers import Alibi, Modifier, RelativeBias, SoftCap, T5Bias
from attn_core.scores import ScaledDot
from attn_kernels_triton.paged import host_plan
from attn_kernels_triton.paged.attend import attend_rows
from attn_kernels_triton.paged.host_plan import RequestTokens, works
from attn_testing import oracle
from bounds import require_close

BRAIN, HALF = torch.bfloat16, torch.float16
CAUSAL, SOFTMAX = Causal(), Softmax()
POOL = 400


class Step(NamedTuple):
    """A step of requests that compute so many tokens each after so many remembered ones."""

    lengths: tuple[int, ...] = (1, 1)
    contexts: tuple[int, ...] = (40, 130)
    heads: tuple[int, int] = (4, 2)
    sizes: tuple[int, int] = (16, 16)
    dtype: torch.dtype = torch.float32
    mask: Mask = CAUSAL
    modifiers: tuple[Modifier, ...] = ()
    distribution: Distribution = SOFTMAX
    latent: bool = False

    @property
    def spec(self) -> AttentionSpec:
        """The attention."""
        query, shared = self.heads
        heads = Heads(query=query, key_value=shared, key_size=self.sizes[0], value_size=self.sizes[1])
        score = ScaledDot(scale=0.2) if self.latent else ScaledDot()
        return AttentionSpec(
            heads=heads, score=score, mask=self.mask, modifiers=self.modifiers, distribution=self.distribution
        )

    def operands(self) -> PagedAttentionInputs:
        """Random queries and memory; rows of a request lie anywhere, and only those that it can see."""
        generator = torch.Generator().manual_seed(sum(self.contexts))

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64).to(self.dtype)

        batch = RaggedBatch.of(self.lengths, self.contexts, torch.tensor)
        left = self.mask.lookback
        firsts = [0 if left is None else max(0, context - left) for context in self.contexts]
        free, numbers = torch.randperm(POOL, generator=generator), []
        ends = [length + context for length, context in zip(self.lengths, self.contexts, strict=True)]
        longest = max(end - first for end, first in zip(ends, firsts, strict=True))
        for end, first in zip(ends, firsts, strict=True):
            taken, free = free[: end - first], free[end - first :]
            # What stands behind a request's rows may be anything.
            numbers.append(torch.cat([taken, torch.full((longest - len(taken),), -7)]))
        (query, shared), (key_size, value_size) = self.heads, self.sizes
        if self.latent:
            fields = {"latent": normal(POOL, value_size), "rotary_key": normal(POOL, key_size - value_size)}
        else:
            fields = {"key": normal(POOL, shared, key_size), "value": normal(POOL, shared, value_size)}
        return PagedAttentionInputs(
            query=normal(sum(self.lengths), query, key_size),
            batch=batch,
            rows=RowsInPlace(fields, torch.zeros(0), torch.stack(numbers), tuple(firsts)),
            requests=tuple(range(len(self.lengths))),
            parameters={name: normal(*shape) for name, shape in self.spec.weights.items()},
        )


def by_definition(spec: AttentionSpec, operands: PagedAttentionInputs, dtype: torch.dtype) -> torch.Tensor:
    """Outputs of all requests, one after the other, over rows gathered for each."""
    outs, rows, batch = [], operands.rows, operands.batch
    fields = dict(rows.fields)
    if "latent" in fields:
        fields["key"] = torch.cat([fields["latent"], fields["rotary_key"]], dim=-1)[:, None]
        fields["value"] = fields["latent"][:, None]
    for span in batch.spans():
        end = batch.contexts[span.request] + span.stop - span.start
        first = rows.firsts[span.request]
        numbers = rows.kv_indices[span.request, : end - first]
        given = AttentionInputs(
            query=operands.query[None, span.start : span.stop].to(dtype),
            key=fields["key"][None, numbers].to(dtype),
            value=fields["value"][None, numbers].to(dtype),
            query_positions=batch.positions[None, span.start : span.stop],
            key_positions=torch.arange(first, end)[None],
            parameters={name: weight.to(dtype) for name, weight in operands.parameters.items()},
        )
        outs.append(oracle.attend(spec, given)[0])
    return torch.cat(outs)


STEPS = {
    "decoding": Step(),
    "decoding, bfloat16": Step(dtype=BRAIN, contexts=(5, 200)),
    "decoding, float16, one head for all": Step(dtype=HALF, heads=(3, 1)),
    "heads of their own": Step(heads=(2, 2), contexts=(0, 63)),
    "a group of more heads than a tile has rows": Step((1,), (70,), heads=(20, 1)),
    "sizes that are no powers of two": Step(sizes=(20, 24), dtype=BRAIN),
    "window": Step(mask=Window(left=30)),
    "window over several stretches": Step((1,), (190,), heads=(2, 1), mask=Window(left=150)),
    "window of causal": Step(mask=Causal() & Window(left=3, right=9)),
    "soft cap and alibi": Step(modifiers=(SoftCap(cap=1.5), Alibi())),
    "relative biases": Step(modifiers=(RelativeBias(clip=9),)),
    "biases of T5 with a soft cap": Step((3, 1), modifiers=(SoftCap(cap=2.0), T5Bias()), dtype=BRAIN),
    "biases of a chunk of a window": Step((30, 1), (20, 60), mask=Window(left=8), modifiers=(RelativeBias(clip=5),)),
    "sinks": Step(distribution=SoftmaxWithSink()),
    "softmax one of a window": Step(distribution=SoftmaxOne(), mask=Window(left=5)),
    "a chunk of a prompt": Step((40,), (30,)),
    "chunks beside decoding": Step((1, 9, 1, 20), (70, 3, 0, 11), dtype=BRAIN),
    "chunks of a window with sinks": Step((30, 1), (20, 60), mask=Window(left=8), distribution=SoftmaxWithSink()),
    "latents": Step(heads=(4, 1), sizes=(40, 32), latent=True),
    "latents, many heads and a chunk, bfloat16": Step((1, 3), (100, 9), (20, 1), (48, 32), BRAIN, latent=True),
}


@pytest.mark.parametrize("name", STEPS)
def test_rows_are_met_where_they_lie_as_if_they_were_gathered(name):
    step = STEPS[name]
    operands = step.operands()
    exact, plain = (by_definition(step.spec, operands, dtype) for dtype in (torch.float64, step.dtype))
    require_close(attend_rows(step.spec, operands), plain, exact, name)


def test_a_request_computes_the_same_to_the_bit_in_any_company():
    step = Step((1, 1, 1), (20, 190, 7), dtype=BRAIN)
    operands = step.operands()
    together = attend_rows(step.spec, operands)
    for request in range(3):
        alone = dataclasses.replace(
            operands,
            query=operands.query[request : request + 1],
            batch=RaggedBatch.of((1,), step.contexts[request : request + 1], torch.tensor),
            rows=dataclasses.replace(
                operands.rows, kv_indices=operands.rows.kv_indices[request : request + 1], firsts=(0,)
            ),
            requests=(0,),
        )
        assert torch.equal(attend_rows(step.spec, alone)[0], together[request])


@pytest.mark.parametrize("lengths", [(8191,) * 64, (300, 1, 70, 8000), (5,)])
def test_stretches_over_latents_are_about_as_long_whoever_remembers_and_leave_no_key_out(lengths):
    heads = host_plan.Heads(16, 1, 64, wanted=264)
    requests = [RequestTokens(request, request, 1, context) for request, context in enumerate(lengths)]
    (work,) = works(requests, heads, None)
    met = {request: [] for request in range(len(lengths))}
    for item in work.items:
        met[item.request] += range(item.start, item.stop)
    assert met == {request: list(range(context + 1)) for request, context in enumerate(lengths)}
    keys = sum(lengths) + len(lengths)
    assert max(item.stop - item.start for item in work.items) <= 1.6 * max(128, keys / 264)
    assert len(work.items) <= 264 + len(lengths)


def test_only_the_requests_that_are_asked_for_are_computed():
    step = Step((3, 1), (20, 40))
    operands = step.operands()
    some = attend_rows(step.spec, dataclasses.replace(operands, requests=(1,)))
    assert torch.equal(some[3:], attend_rows(step.spec, operands)[3:])
    assert some[:3].isnan().all()
    assert attend_rows(step.spec, dataclasses.replace(operands, requests=())).isnan().all()


def changed_rows(operands: PagedAttentionInputs, **changes) -> PagedAttentionInputs:
    return dataclasses.replace(operands, rows=dataclasses.replace(operands.rows, **changes))


@pytest.mark.parametrize("outside", [POOL, -1, 2**40])
def test_a_table_that_points_outside_memory_is_refused(outside):
    operands = Step().operands()
    numbers = operands.rows.kv_indices.clone()
    numbers[1, 77] = outside
    with pytest.raises(InvalidValue, match=r"rows.kv_indices\[1, 77\].*0 to 399"):
        attend_rows(Step().spec, changed_rows(operands, kv_indices=numbers))


def test_what_programs_over_pages_would_misread_is_refused_before_they_start():
    step = Step()
    operands, fields = step.operands(), dict(step.operands().rows.fields)
    wrong = {
        "query.dtype": dataclasses.replace(operands, query=operands.query.double()),
        "query": dataclasses.replace(operands, query=operands.query[:1]),
        "positions.device": dataclasses.replace(operands, query=operands.query.to("meta")),
        "rows.kv_indices, firsts": changed_rows(operands, firsts=(0,)),
        "rows.kv_indices": changed_rows(operands, kv_indices=operands.rows.kv_indices[:, :50]),
        "rows.fields": changed_rows(operands, fields={"key": fields["key"]}),
        "rows.form": changed_rows(operands, form="int2"),
        "key.dtype": changed_rows(operands, fields={**fields, "key": fields["key"].half()}),
        "value": changed_rows(operands, fields={**fields, "value": fields["value"][..., :8]}),
        "value.device": changed_rows(operands, fields={**fields, "value": fields["value"].to("meta")}),
        "rows.kv_indices.device": changed_rows(operands, kv_indices=operands.rows.kv_indices.to("meta")),
        "query.stride": dataclasses.replace(operands, query=operands.query.mT.contiguous().mT),
        "value.stride": changed_rows(operands, fields={**fields, "value": fields["value"].mT.contiguous().mT}),
        "requests": dataclasses.replace(operands, requests=(2,)),
    }
    for said, given in wrong.items():
        with pytest.raises(InvalidValue, match=f"^{said}"):
            attend_rows(step.spec, given)
    with pytest.raises(InvalidValue, match=r"^parameters"):
        attend_rows(dataclasses.replace(step.spec, distribution=SoftmaxWithSink()), operands)


@pytest.mark.parametrize("mask", [Full(), Prefix(3), Window(left=4, dilation=2), Window(left=4, right=1)])
def test_masks_that_look_ahead_or_leave_holes_are_refused(mask):
    spec = Step(mask=mask).spec
    reasons = installed().kernels.get("triton_paged").refusals(paged_problem(spec, dtype="float32", device="cpu"))
    assert [reason.partition(":")[0] for reason in reasons] == ["mask"]
    with pytest.raises(InvalidValue, match=r"^mask"):
        attend_rows(spec, Step().operands())


def test_a_paged_kernel_does_not_attend_to_whole_sequences():
    whole = attend_problem(Step().spec, dtype="float32", device="cpu", gradients=False, padded=False)
    (reason,) = installed().kernels.get("triton_paged").refusals(whole)
    assert "attend_paged" in reason
    with pytest.raises(KernelRefused, match="attend_paged"):
        choose(installed().kernels, whole, "triton_paged")
