"""Steps of chunks of any lengths, up to a number of tokens, cut on the device."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import pytest
import torch
from attn_core import AttentionInputs, AttentionSpec, Causal, Heads, Mask, Window
from attn_core.batch import StaticMixedBatch, StaticMixedRows
from attn_core.distributions import Distribution, Softmax, SoftmaxWithSink
from attn_core.errors import InvalidValue
from attn_core.kernels.attend import PagedAttentionInputs
from attn_kernels_triton.paged.mixed import MixedBucket, MixedWork, mixed_bucket_of, mixed_launches
from attn_testing import oracle
from bounds import require_close

PAGE, PAGES = 8, 80
CPU = torch.device("cpu")
CAUSAL, SOFTMAX = Causal(), Softmax()


@dataclass(frozen=True)
class Mixed:
    """Chunks of these requests, (context, tokens), in a bucket of so many tokens and requests."""

    chunks: tuple[tuple[int, int], ...]
    tokens: int = 24
    requests: int = 4
    heads: tuple[int, int] = (4, 2)
    size: int = 20
    mask: Mask = CAUSAL
    distribution: Distribution = SOFTMAX
    dtype: torch.dtype = torch.float32

    @property
    def spec(self) -> AttentionSpec:
        query, shared = self.heads
        heads = Heads(query=query, key_value=shared, key_size=self.size, value_size=self.size)
        return AttentionSpec(heads=heads, mask=self.mask, distribution=self.distribution)

    def rows(self) -> StaticMixedRows:
        """Random rows in pages that lie anywhere; in those of nobody, and behind the last row of each, are NaN."""
        generator = torch.Generator().manual_seed(3)
        order = torch.randperm(PAGES, generator=generator).tolist()
        tables = torch.full((self.requests, PAGES), 1, dtype=torch.int32)
        shape = PAGES * PAGE, self.heads[1], self.size
        fields = {name: torch.full(shape, float("nan"), dtype=self.dtype) for name in ("key", "value")}
        for request, (context, tokens) in enumerate(self.chunks):
            held = context + tokens
            own = torch.tensor([order.pop() for _ in range(-(-held // PAGE))])
            tables[request, : len(own)] = own
            # A tile of keys reads to its end, and what is behind the last row must be numbers.
            rows = (own[:, None] * PAGE + torch.arange(PAGE)).flatten()
            for memory in fields.values():
                memory[rows] = torch.randn(len(rows), *shape[1:], generator=generator).to(self.dtype)
        starts = [0, *torch.tensor([tokens for _, tokens in self.chunks]).cumsum(0).tolist()]
        starts += [starts[-1]] * (self.requests + 1 - len(starts)) + [self.tokens]
        contexts = [context for context, _ in self.chunks] + [-1] * (self.requests + 1 - len(self.chunks))
        slots = torch.zeros(self.tokens, dtype=torch.int64)
        static = {"contexts": torch.tensor(contexts), "query_starts": torch.tensor(starts), "block_size": PAGE}
        return StaticMixedRows(fields, slots, tables, (), **static)

    def operands(self, padding: float = 0.0) -> PagedAttentionInputs:
        """Random queries, of padding all the same number."""
        taken = sum(tokens for _, tokens in self.chunks)
        query = torch.full((self.tokens, self.heads[0], self.size), padding, dtype=self.dtype)
        drawn = torch.randn(taken, *query.shape[1:], generator=torch.Generator().manual_seed(4))
        query[:taken] = drawn.to(self.dtype)
        positions = [place for context, tokens in self.chunks for place in range(context, context + tokens)]
        positions += [0] * (self.tokens - taken)
        parameters = {name: torch.linspace(-1, 1, shape[0]) for name, shape in self.spec.weights.items()}
        batch = StaticMixedBatch(torch.tensor(positions), 4096)
        return PagedAttentionInputs(query=query, batch=batch, rows=self.rows(), requests=(), parameters=parameters)

    def work(self, wanted: int) -> MixedWork:
        sizes = self.tokens, self.requests + 1
        return MixedWork.of(replace(mixed_bucket_of(self.spec, sizes, self.dtype, CPU), wanted=wanted), CPU)


def computed(one: Mixed, work: MixedWork, padding: float = 0.0) -> torch.Tensor:
    operands = one.operands(padding)
    rows, out = operands.rows, torch.full_like(operands.query, float("nan"))
    layout = work.layout(rows.query_starts, rows.contexts)
    for launch in (layout, *mixed_launches(one.spec, operands, rows, work, out)):
        launch.run(CPU)
    return out


def by_definition(one: Mixed, dtype: torch.dtype) -> torch.Tensor:
    operands, outs, begin = one.operands(), [], 0
    for request, (context, tokens) in enumerate(one.chunks):
        places = torch.arange(context + tokens)
        rows = operands.rows.kv_indices[request].long()[places // PAGE] * PAGE + places % PAGE
        whole = AttentionInputs(
            query=operands.query[None, begin : begin + tokens].to(dtype),
            key=operands.rows.fields["key"][None, rows].to(dtype),
            value=operands.rows.fields["value"][None, rows].to(dtype),
            query_positions=places[None, context:],
            key_positions=places[None],
            parameters={name: weight.to(dtype) for name, weight in operands.parameters.items()},
        )
        outs.append(oracle.attend(one.spec, whole)[0])
        begin += tokens
    return torch.cat(outs)


STEPS = {
    "a prompt alone": (Mixed(((0, 24),)), 6),
    "prompts and padding": (Mixed(((0, 7), (0, 12))), 6),
    "a chunk beside single tokens": (Mixed(((40, 13), (90, 1), (3, 1), (0, 1))), 9),
    "a long context that is cut": (Mixed(((200, 9), (0, 5))), 12),
    "a window": (Mixed(((100, 12), (0, 6), (60, 1)), mask=Window(left=30)), 9),
    "sinks in 16 bits": (Mixed(((60, 11), (30, 1)), distribution=SoftmaxWithSink(), dtype=torch.bfloat16), 6),
    "one head of its own": (Mixed(((70, 10), (0, 14)), heads=(2, 2)), 6),
    "a group that no tile holds whole": (Mixed(((30, 5), (8, 1)), tokens=8, heads=(20, 1)), 6),
    "padding alone": (Mixed(()), 6),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_step_of_chunks_that_is_cut_on_the_device_computes_what_is_defined(monkeypatch, name):
    monkeypatch.setattr("attn_kernels_triton.paged.bucket.SHORTEST", 32)
    step, wanted = STEPS[name]
    found = computed(step, step.work(wanted), padding=float("nan"))
    taken = sum(tokens for _, tokens in step.chunks)
    assert not found[taken:].any(), "outputs of padding are zeros"
    if step.chunks:
        exact, plain = (by_definition(step, kind) for kind in (torch.float64, step.dtype))
        require_close(found[:taken], plain, exact, name)


def test_numbers_that_padding_is_given_change_no_bit_of_others(monkeypatch):
    monkeypatch.setattr("attn_kernels_triton.paged.bucket.SHORTEST", 32)
    step, wanted = STEPS["a long context that is cut"]
    assert torch.equal(computed(step, step.work(wanted)), computed(step, step.work(wanted), padding=float("nan")))


def test_other_chunks_of_a_bucket_take_the_same_grids_and_pointers():
    work = Mixed(()).work(6)
    seen = []
    for step, _ in (STEPS["a prompt alone"], STEPS["a chunk beside single tokens"], STEPS["padding alone"]):
        operands = step.operands()
        rows = operands.rows
        launches = [work.layout(rows.query_starts, rows.contexts)]
        launches += mixed_launches(step.spec, operands, rows, work, operands.query)
        attend = launches[1].call
        grids = [(launch.program, launch.programs) for launch in launches]
        seen.append((grids, attend.items.data_ptr(), attend.sums.shape, launches[2].call.merges.data_ptr()))
    assert seen[0] == seen[1] == seen[2]


@pytest.mark.parametrize("left", [None, 100])
@pytest.mark.parametrize("seed", range(3))
def test_every_tile_meets_each_key_once_and_no_lengths_take_more_room_than_there_is(seed, left):
    rng = random.Random(seed)
    bucket = MixedBucket(tokens=96, requests=9, group=4, owners=2, tile=16, wanted=rng.choice((5, 40)), left=left)
    work = MixedWork.of(bucket, CPU)
    for _ in range(4):
        chunks, room = [], bucket.tokens
        while room and len(chunks) < bucket.requests - 1 and rng.random() < 0.9:
            tokens = rng.choice((1, 1, rng.randint(1, room)))
            chunks.append((rng.choice((0, rng.randint(0, 6000))), tokens))
            room -= tokens
        starts = torch.tensor([0, *[tokens for _, tokens in chunks]]).cumsum(0).tolist()
        starts += [starts[-1]] * (bucket.requests - len(starts)) + [bucket.tokens]
        contexts = [context for context, _ in chunks] + [-1] * (bucket.requests - len(chunks))
        work.items.fill_(-7)
        work.merges.fill_(-7)
        work.layout(torch.tensor(starts), torch.tensor(contexts)).run(CPU)
        require_cut(bucket, work, list(zip(contexts, starts, starts[1:], strict=False)))


def require_cut(bucket: MixedBucket, work: MixedWork, spans: list[tuple[int, int, int]]) -> None:
    """Fail unless items and merges are those of these requests: context, first token, and the end."""
    met: dict[tuple[int, int], list[list[int]]] = {}
    for item in work.items.tolist():
        if item[3]:
            met.setdefault((item[0], item[2]), []).append(item)
    merges = {(merge[0], merge[1]): merge for merge in work.merges.tolist() if merge[2]}
    slots: set[int] = set()
    for request, (context, begin, stop) in enumerate(spans):
        rows = (stop - begin) * bucket.group
        for first in range(0, rows, bucket.tile):
            count = min(bucket.tile, rows - first)
            parts = met.pop((request, first))
            assert {(part[1], part[3]) for part in parts} == {(begin, count)}
            last = context + (first + count - 1) // bucket.group + 1 if context >= 0 else 0
            oldest = 0 if bucket.left is None else max(0, context + first // bucket.group - bucket.left)
            keys = [key for part in parts for key in range(part[4], part[5])]
            assert keys == list(range(min(oldest, last), last))
            own = [part[6] for part in parts]
            if len(parts) == 1:
                assert own == [-1]
                continue
            merge = merges.pop((begin, first))
            assert merge[2:] == [count, own[0], len(parts)]
            assert own == [own[0] + place * bucket.owners for place in range(len(parts))]
            assert not slots.intersection(own)
            assert 0 <= own[0] <= own[-1] <= (bucket.slots - 1) * bucket.owners
            slots.update(own)
    assert not met
    assert not merges


def test_what_a_step_would_misread_is_refused():
    step = Mixed(((0, 5),))
    work, operands = step.work(4), step.operands()
    for name, starts, contexts in (("query_starts", 3, 5), ("contexts", 6, 3)):
        with pytest.raises(InvalidValue, match=f"^{name}"):
            work.layout(torch.zeros(starts), torch.zeros(contexts))
    other = PagedAttentionInputs(
        query=operands.query[1:], batch=operands.batch, rows=operands.rows, requests=(), parameters={}
    )
    with pytest.raises(InvalidValue, match=r"^query"):
        mixed_launches(step.spec, other, operands.rows, work, operands.query)
