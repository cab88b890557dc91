"""Steps of one token for each request of a bucket, cut on the device."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from attn_core import AttentionInputs, Window
from attn_core.distributions import SoftmaxWithSink
from attn_core.errors import InvalidValue
from attn_kernels_triton.paged import bucket as buckets
from attn_kernels_triton.paged.bucket import DecodeBucket, DecodeStep, DecodeWork, bucket_of, decode_launches
from attn_testing import oracle
from bounds import require_close
from test_paged import Step

PAGE = 8
POOL_PAGES = 80
NOBODY = -1


class Held(NamedTuple):
    """What a step is asked, and the tensors of it."""

    step: Step
    given: DecodeStep


def held(step: Step, dtype: torch.dtype = torch.int32) -> Held:
    """Random queries and pages that lie anywhere; a context of -1 is no request."""
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(step.dtype)

    (query, shared), (key_size, value_size), rows = step.heads, step.sizes, POOL_PAGES * PAGE
    fields = {"key": normal(rows, shared, key_size), "value": normal(rows, shared, value_size)}
    if step.latent:
        fields = {"latent": normal(rows, value_size), "rotary_key": normal(rows, key_size - value_size)}
    longest = -(-(max(step.contexts) + 1) // PAGE)
    pages = torch.stack([torch.randperm(POOL_PAGES, generator=generator)[:longest] for _ in step.contexts])
    for request, context in enumerate(step.contexts):
        # What stands behind a request's pages is never read.
        pages[request, -(-(context + 1) // PAGE) :] = -7
    contexts = torch.tensor(step.contexts, dtype=dtype)
    parameters = {name: normal(*shape) for name, shape in step.spec.weights.items()}
    asked = normal(len(step.contexts), query, key_size)
    return Held(step, DecodeStep(asked, fields, "plain", pages.to(dtype), PAGE, contexts, parameters))


def by_definition(one: Held, dtype: torch.dtype) -> torch.Tensor:
    """Outputs of all requests, one after the other; zeros of those that are none."""
    step, given = one
    fields = dict(given.fields)
    if step.latent:
        fields["key"] = torch.cat([fields["latent"], fields["rotary_key"]], dim=-1)[:, None]
        fields["value"] = fields["latent"][:, None]
    outs = []
    for request, context in enumerate(step.contexts):
        places = torch.arange(context + 1)
        if context == NOBODY:
            outs.append(torch.zeros(1, step.heads[0], step.sizes[1], dtype=dtype))
            continue
        rows = given.pages[request].long()[places // PAGE] * PAGE + places % PAGE
        whole = AttentionInputs(
            query=given.query[None, request : request + 1].to(dtype),
            key=fields["key"][None, rows].to(dtype),
            value=fields["value"][None, rows].to(dtype),
            query_positions=torch.tensor([[context]]),
            key_positions=places[None],
            parameters={name: weight.to(dtype) for name, weight in given.parameters.items()},
        )
        outs.append(oracle.attend(step.spec, whole)[0])
    return torch.cat(outs)


def computed(one: Held, work: DecodeWork) -> torch.Tensor:
    """Outputs of the programs."""
    out = torch.empty(*one.given.query.shape[:2], one.step.sizes[1], dtype=one.step.dtype)
    for launch in (work.layout(one.given.contexts), *decode_launches(one.step.spec, one.given, work, out)):
        launch.run(out.device)
    return out


def work_of(step: Step, wanted: int) -> DecodeWork:
    """Work for a bucket on a chip that wants so many stretches."""
    device = torch.device("cpu")
    bucket = replace(bucket_of(step.spec, len(step.contexts), step.dtype, device), wanted=wanted)
    return DecodeWork.of(bucket, device)


STEPS = {
    "many stretches of one": (Step(contexts=(300,)), 9),
    "long beside short and nobody": (Step(contexts=(300, NOBODY, 0, 40)), 7),
    "one stretch each": (Step(contexts=(40, 41, 39)), 1),
    "a window": (Step(contexts=(300, 12, 200), mask=Window(left=150)), 6),
    "sinks": (Step(contexts=(200, 3), distribution=SoftmaxWithSink(), dtype=torch.bfloat16), 6),
    "a group of several tiles": (Step(contexts=(130, 20), heads=(20, 1)), 8),
    "latents": (Step(contexts=(200, 60), heads=(4, 1), sizes=(40, 32), latent=True), 5),
}


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_step_that_is_cut_on_the_device_computes_what_is_defined(monkeypatch, name, dtype):
    monkeypatch.setattr(buckets, "SHORTEST", 32)
    step, wanted = STEPS[name]
    one = held(step, dtype)
    exact, plain = (by_definition(one, kind) for kind in (torch.float64, step.dtype))
    require_close(computed(one, work_of(step, wanted)), plain, exact, name)


def test_other_lengths_of_a_bucket_take_the_same_grids_and_pointers(monkeypatch):
    monkeypatch.setattr(buckets, "SHORTEST", 32)
    long, short = held(Step(contexts=(300, 5, 90))), held(Step(contexts=(2, NOBODY, 7)))
    work = work_of(long.step, 6)
    launches = [
        [work.layout(one.given.contexts), *decode_launches(one.step.spec, one.given, work, one.given.query)]
        for one in (long, short)
    ]
    for one, other in zip(*launches, strict=True):
        assert (one.program, one.programs) == (other.program, other.programs)
    first, second = (found[1].call for found in launches)
    assert (first.items.data_ptr(), first.sums.shape) == (second.items.data_ptr(), second.sums.shape)
    for one in (long, short, long):
        exact = by_definition(one, torch.float64)
        require_close(computed(one, work), by_definition(one, torch.float32), exact, str(one.step.contexts))


@pytest.mark.parametrize("contexts", [(4095,) * 3, (70000, 1, 1, 1, -1), (-1, -1), (0,), (5, 5000, 50, 500)])
@pytest.mark.parametrize(("group", "tile", "left"), [(4, 16, None), (128, 64, None), (1, 16, 1000)])
def test_every_key_of_every_row_is_met_once_and_items_have_room(contexts, group, tile, left):
    bucket = DecodeBucket(requests=len(contexts), group=group, owners=2, tile=tile, wanted=40, left=left)
    work = DecodeWork.of(bucket, torch.device("cpu"))
    work.items.fill_(-99)
    work.layout(torch.tensor(contexts)).run(torch.device("cpu"))
    met = {}
    for number, (request, begin, first, rows, start, stop, slot) in enumerate(work.items.tolist()):
        assert begin == request
        assert slot in {-1, number * bucket.owners}
        if rows:
            met.setdefault((request, first, rows), []).append((start, stop, slot))
    for request, context in enumerate(contexts):
        oldest = 0 if left is None else max(0, context - left)
        for first in range(0, group, tile):
            parts = sorted(met.pop((request, first, min(tile, group - first))))
            keys = [key for start, stop, _ in parts for key in range(start, stop)]
            assert keys == list(range(oldest, context + 1))
            merge = work.merges[request * bucket.token_tiles + first // tile].tolist()
            slot, slots = merge[3:]
            assert slots == len(parts)
            if slots > 1:
                assert {part[2] for part in parts} == {slot + step * bucket.owners for step in range(slots)}
            else:
                assert parts[0][2] == -1
    assert not met


def test_programs_have_alike_much_to_do_whoever_remembers():
    bucket = DecodeBucket(requests=4, group=4, owners=8, tile=16, wanted=66, left=None)
    work = DecodeWork.of(bucket, torch.device("cpu"))
    work.layout(torch.tensor([65535, 4095, 4095, 4095])).run(torch.device("cpu"))
    items = work.items[work.items[:, 3] > 0]
    lengths = items[:, 5] - items[:, 4]
    assert lengths.max() < 1.6 * (65536 + 3 * 4096) / bucket.wanted
    assert len(items) >= 0.8 * bucket.wanted


def test_what_a_step_would_misread_is_refused():
    one = held(Step())
    work, out = work_of(one.step, 4), one.given.query
    wrong = {
        "query": one.given._replace(query=out[:1]),
        "page": one.given._replace(page=12),
        "pages": one.given._replace(pages=one.given.pages[:1]),
        "query.stride": one.given._replace(query=out.mT.contiguous().mT),
        "rows.fields": one.given._replace(fields={}),
    }
    for said, given in wrong.items():
        with pytest.raises(InvalidValue, match=f"^{said}"):
            decode_launches(one.step.spec, given, work, out)
    with pytest.raises(InvalidValue, match=r"^contexts"):
        work.layout(one.given.contexts[:1])
