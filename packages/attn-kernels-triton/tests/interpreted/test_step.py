"""Steps of up to a number of tokens, of chunks or of single tokens, cut on the device."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import pytest
import torch
from attn_core import AttentionInputs, AttentionSpec, Causal, Heads, Mask, Window
from attn_core.batch import StaticBatch, StaticRows
from attn_core.distributions import Distribution, Softmax, SoftmaxWithSink
from attn_core.errors import InvalidValue
from attn_core.kernels.attend import PagedAttentionInputs
from attn_kernels_triton.paged.step import Bucket, WorkLists, bucket_of, launches
from attn_testing import oracle
from bounds import require_close

PAGE, PAGES = 8, 80
CPU = torch.device("cpu")
CAUSAL, SOFTMAX = Causal(), Softmax()


@dataclass(frozen=True)
class Step:
    """Chunks of these requests, (context, tokens), in a bucket of so many tokens and requests."""

    chunks: tuple[tuple[int, int], ...]
    tokens: int = 24
    requests: int = 4
    longest_chunk: int = 24
    heads: tuple[int, int] = (4, 2)
    sizes: tuple[int, int] = (20, 20)
    mask: Mask = CAUSAL
    distribution: Distribution = SOFTMAX
    dtype: torch.dtype = torch.float32
    latent: bool = False

    @classmethod
    def decoding(cls, contexts: tuple[int, ...], tokens: int, **parts) -> Step:
        """One token of each request."""
        chunks = tuple((context, 1) for context in contexts)
        return cls(chunks, tokens, requests=tokens, longest_chunk=1, **parts)

    @property
    def spec(self) -> AttentionSpec:
        (query, shared), (key_size, value_size) = self.heads, self.sizes
        heads = Heads(query=query, key_value=shared, key_size=key_size, value_size=value_size)
        return AttentionSpec(heads=heads, mask=self.mask, distribution=self.distribution)

    def rows(self) -> StaticRows:
        """Random rows in pages that lie anywhere; in those of nobody, and behind the last row of each, are NaN."""
        generator = torch.Generator().manual_seed(3)
        order = torch.randperm(PAGES, generator=generator).tolist()
        tables = torch.full((self.requests, PAGES), 1, dtype=torch.int32)
        (key_size, value_size), shared = self.sizes, self.heads[1]
        shapes = {"key": (shared, key_size), "value": (shared, value_size)}
        if self.latent:
            shapes = {"latent": (value_size,), "rotary_key": (key_size - value_size,)}
        fields = {
            name: torch.full((PAGES * PAGE, *shape), torch.nan, dtype=self.dtype) for name, shape in shapes.items()
        }
        for request, (context, tokens) in enumerate(self.chunks):
            held = context + tokens
            own = torch.tensor([order.pop() for _ in range(-(-held // PAGE))])
            tables[request, : len(own)] = own
            # A tile of keys reads to its end, and what is behind the last row must be numbers.
            rows = (own[:, None] * PAGE + torch.arange(PAGE)).flatten()
            for memory in fields.values():
                memory[rows] = torch.randn(len(rows), *memory.shape[1:], generator=generator).to(self.dtype)
        starts, contexts = layout_of(self.chunks, self.tokens, self.requests)
        slots = torch.zeros(self.tokens, dtype=torch.int64)
        static = {"contexts": contexts, "query_starts": starts, "max_query_len": self.longest_chunk}
        return StaticRows(fields, slots, tables, (), block_size=PAGE, **static)

    def operands(self, padding: float = 0.0) -> PagedAttentionInputs:
        """Random queries, of padding all the same number."""
        taken = sum(tokens for _, tokens in self.chunks)
        query = torch.full((self.tokens, self.heads[0], self.sizes[0]), padding, dtype=self.dtype)
        drawn = torch.randn(taken, *query.shape[1:], generator=torch.Generator().manual_seed(4))
        query[:taken] = drawn.to(self.dtype)
        positions = [place for context, tokens in self.chunks for place in range(context, context + tokens)]
        positions += [0] * (self.tokens - taken)
        parameters = {name: torch.linspace(-1, 1, shape[0]) for name, shape in self.spec.weights.items()}
        batch = StaticBatch(torch.tensor(positions), 4096, self.longest_chunk)
        return PagedAttentionInputs(query=query, batch=batch, rows=self.rows(), requests=(), parameters=parameters)

    def work(self, wanted: int) -> WorkLists:
        operands = self.operands()
        return WorkLists.of(replace(bucket_of(self.spec, operands.query, operands.rows), wanted=wanted), CPU)


def layout_of(chunks: tuple[tuple[int, int], ...], tokens: int, requests: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`query_starts` and `contexts` of a step, see `StaticRows`."""
    starts = torch.tensor([0, *[length for _, length in chunks]]).cumsum(0).tolist()
    starts += [starts[-1]] * (requests + 1 - len(starts)) + [tokens]
    contexts = [context for context, _ in chunks] + [-1] * (requests + 1 - len(chunks))
    return torch.tensor(starts), torch.tensor(contexts)


def computed(step: Step, work: WorkLists, padding: float = 0.0) -> torch.Tensor:
    operands = step.operands(padding)
    rows, out = operands.rows, torch.full((step.tokens, step.heads[0], step.sizes[1]), torch.nan, dtype=step.dtype)
    layout = work.layout(rows.query_starts, rows.contexts)
    for launch in (layout, *launches(step.spec, operands, rows, work, out)):
        launch.run(CPU)
    return out


def by_definition(step: Step, dtype: torch.dtype) -> torch.Tensor:
    operands, outs, begin = step.operands(), [], 0
    fields = dict(operands.rows.fields)
    if step.latent:
        fields["key"] = torch.cat([fields["latent"], fields["rotary_key"]], dim=-1)[:, None]
        fields["value"] = fields["latent"][:, None]
    for request, (context, tokens) in enumerate(step.chunks):
        places = torch.arange(context + tokens)
        rows = operands.rows.kv_indices[request].long()[places // PAGE] * PAGE + places % PAGE
        whole = AttentionInputs(
            query=operands.query[None, begin : begin + tokens].to(dtype),
            key=fields["key"][None, rows].to(dtype),
            value=fields["value"][None, rows].to(dtype),
            query_positions=places[None, context:],
            key_positions=places[None],
            parameters={name: weight.to(dtype) for name, weight in operands.parameters.items()},
        )
        outs.append(oracle.attend(step.spec, whole)[0])
        begin += tokens
    return torch.cat(outs)


STEPS = {
    "a prompt alone": (Step(((0, 24),)), 6),
    "prompts and padding": (Step(((0, 7), (0, 12))), 6),
    "a chunk beside single tokens": (Step(((40, 13), (90, 1), (3, 1), (0, 1))), 9),
    "a long context that is cut": (Step(((200, 9), (0, 5))), 12),
    "a window": (Step(((100, 12), (0, 6), (60, 1)), mask=Window(left=30)), 9),
    "sinks in 16 bits": (Step(((60, 11), (30, 1)), distribution=SoftmaxWithSink(), dtype=torch.bfloat16), 6),
    "one head of its own": (Step(((70, 10), (0, 14)), heads=(2, 2)), 6),
    "a group that no tile holds whole": (Step(((30, 5), (8, 1)), tokens=8, heads=(20, 1)), 6),
    "padding alone": (Step(()), 6),
    "one token, many splits": (Step.decoding((300,), 1), 9),
    "single tokens and padding": (Step.decoding((300, 0, 40), 4), 7),
    "single tokens, one split each": (Step.decoding((40, 41, 39), 3), 1),
    "single tokens and a window": (Step.decoding((300, 12, 200), 3, mask=Window(left=150)), 6),
    "single tokens and sinks": (Step.decoding((200, 3), 2, distribution=SoftmaxWithSink(), dtype=torch.bfloat16), 6),
    "single tokens of several tiles": (Step.decoding((130, 20), 2, heads=(20, 1)), 8),
    "latents": (Step.decoding((200, 60), 2, heads=(4, 1), sizes=(40, 32), latent=True), 5),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_step_that_is_cut_on_the_device_computes_what_is_defined(monkeypatch, name):
    monkeypatch.setattr("attn_kernels_triton.paged.step.SHORTEST", 32)
    step, wanted = STEPS[name]
    found = computed(step, step.work(wanted), padding=float("nan"))
    taken = sum(tokens for _, tokens in step.chunks)
    assert not found[taken:].any(), "outputs of padding are zeros"
    if step.chunks:
        exact, plain = (by_definition(step, kind) for kind in (torch.float64, step.dtype))
        require_close(found[:taken], plain, exact, name)


def test_numbers_that_padding_is_given_change_no_bit_of_others(monkeypatch):
    monkeypatch.setattr("attn_kernels_triton.paged.step.SHORTEST", 32)
    step, wanted = STEPS["a long context that is cut"]
    assert torch.equal(computed(step, step.work(wanted)), computed(step, step.work(wanted), padding=float("nan")))


@pytest.mark.parametrize(
    "steps",
    [
        [STEPS[name][0] for name in ("a prompt alone", "a chunk beside single tokens", "padding alone")],
        [Step.decoding(contexts, 3) for contexts in ((300, 5, 90), (2, 7), ())],
    ],
    ids=["chunks", "single tokens"],
)
def test_other_lengths_of_a_bucket_take_the_same_grids_and_pointers(steps):
    work, seen = steps[0].work(6), []
    for step in steps:
        operands = step.operands()
        rows = operands.rows
        found = [work.layout(rows.query_starts, rows.contexts)]
        found += launches(step.spec, operands, rows, work, operands.query)
        attend = found[1].call
        grids = [(launch.program, launch.programs) for launch in found]
        seen.append((grids, attend.items.data_ptr(), attend.sums.shape, found[2].call.merges.data_ptr()))
    assert seen[0] == seen[1] == seen[2]


@pytest.mark.parametrize("left", [None, 100])
@pytest.mark.parametrize("seed", range(3))
def test_every_tile_meets_each_key_once_and_no_lengths_take_more_room_than_there_is(seed, left):
    rng = random.Random(seed)
    sizes = {"tokens": 96, "requests": 9, "group": 4, "owners": 2, "tile": 16, "tile_tokens": 5}
    bucket = Bucket(**sizes, wanted=rng.choice((5, 40)), left=left)
    for _ in range(4):
        chunks, room = [], bucket.tokens
        while room and len(chunks) < bucket.requests - 1 and rng.random() < 0.9:
            tokens = rng.choice((1, 1, rng.randint(1, room)))
            chunks.append((rng.choice((0, rng.randint(0, 6000))), tokens))
            room -= tokens
        require_whole(bucket, tuple(chunks))


@pytest.mark.parametrize("contexts", [(4095,) * 3, (70000, 1, 1, 1), (), (0,), (5, 5000, 50, 500)])
@pytest.mark.parametrize(("group", "tile", "left"), [(4, 16, None), (128, 64, None), (1, 16, 1000)])
def test_every_tile_of_single_tokens_meets_each_key_once_and_has_room(contexts, group, tile, left):
    heads = {"group": group, "owners": 2, "tile": tile, "tile_tokens": 1}
    for tokens in (max(1, len(contexts)), len(contexts) + 2):
        bucket = Bucket(tokens=tokens, requests=tokens + 1, **heads, wanted=40, left=left)
        require_whole(bucket, tuple((context, 1) for context in contexts))


def require_whole(bucket: Bucket, chunks: tuple[tuple[int, int], ...]) -> None:
    """Fail unless the work lists of a step are exactly what its requests and its padding need."""
    work = WorkLists.of(bucket, CPU)
    work.items.fill_(-7)
    work.merges.fill_(-7)
    starts, contexts = layout_of(chunks, bucket.tokens, bucket.requests - 1)
    work.layout(starts, contexts).run(CPU)
    require_cut(bucket, work, list(zip(contexts.tolist(), starts.tolist(), starts[1:].tolist(), strict=False)))


def require_cut(bucket: Bucket, work: WorkLists, spans: list[tuple[int, int, int]]) -> None:
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


def test_programs_have_alike_much_to_do_whoever_remembers():
    sizes = {"tokens": 4, "requests": 5, "group": 4, "owners": 8, "tile": 16, "tile_tokens": 1}
    work = WorkLists.of(Bucket(**sizes, wanted=66, left=None), CPU)
    work.layout(*layout_of(((65535, 1), (4095, 1), (4095, 1), (4095, 1)), 4, 4)).run(CPU)
    items = work.items[work.items[:, 3] > 0]
    lengths = items[:, 5] - items[:, 4]
    assert lengths.max() < 1.6 * (65536 + 3 * 4096) / work.bucket.wanted
    assert len(items) >= 0.8 * work.bucket.wanted


def test_what_a_step_would_misread_is_refused():
    step = Step(((0, 5),))
    work, operands = step.work(4), step.operands()
    rows, query = operands.rows, operands.query
    for name, starts, contexts in (("query_starts", 3, 5), ("contexts", 6, 3)):
        with pytest.raises(InvalidValue, match=f"^{name}"):
            work.layout(torch.zeros(starts), torch.zeros(contexts))
    wrong = {
        "query": (query[1:], rows),
        "query.stride": (query.mT.contiguous().mT, rows),
        "block_size": (query, replace(rows, block_size=12)),
        "kv_indices": (query, replace(rows, kv_indices=rows.kv_indices[1:])),
        "rows.fields": (query, replace(rows, fields={})),
    }
    for name, (other, held) in wrong.items():
        with pytest.raises(InvalidValue, match=f"^{name}"):
            launches(step.spec, replace(operands, query=other), held, work, query)
