"""A state with a row per several tokens: the laws hold for a sound mechanism and cache, and find broken ones."""

import dataclasses

import pytest
import torch
from attn_core import Capability, ComputedMechanism, Cost, Field, Paged, Paper
from broken.stores import SoundStore, StoreFamily
from torch import nn

from attn_testing.cache_subject import SPECS, CacheCase
from attn_testing.check import judge
from attn_testing.law import LawBroken
from attn_testing.laws import BatchInvariance, ChunkedPrefill, DecodeEqualsForward, StatesAreRead
from attn_testing.laws.caches import ViewsEqual
from attn_testing.subject import Subject

EVERY = 3


class BlockSums(nn.Module):
    """Each token reads the sum of all complete blocks of three tokens, projected; `early` blocks lack the last."""

    def __init__(self, width, early):
        super().__init__()
        self.value, self.early = nn.Linear(width, width), early

    def forward(self, query, source=None, *, key_padding_mask=None):
        values = self.value(query)
        if key_padding_mask is not None:
            values = values * key_padding_mask[..., None]
        sums = torch.nn.functional.pad(values.cumsum(1), (0, 0, 1, 0))
        return sums[:, torch.arange(1, query.shape[1] + 1) // EVERY * EVERY]

    def step(self, query, batch, state):
        state["open"].append({"value": self.value(query)})
        rows = []
        for request, blocks in enumerate(batch.new_rows(EVERY)):
            seen = state["open"].rows([request])
            real = torch.ones_like(seen.positions[0], dtype=torch.bool)
            real = real if seen.key_padding_mask is None else seen.key_padding_mask[0]
            values, places = seen.fields["value"][0][real], seen.positions[0][real]
            ends = [block * EVERY + EVERY - self.early for block in blocks]
            rows += [values[(places >= end - EVERY + self.early) & (places < end)].sum(0) for end in ends]
        rows = torch.stack(rows) if rows else query.new_zeros(0, query.shape[1])
        state["blocks"].append({"sum": rows})
        found = []
        for span in batch.spans():
            seen = state["blocks"].rows([span.request])
            before = seen.positions[0] <= batch.positions[span.start : span.stop, None]
            found.append((before[..., None] * seen.fields["sum"]).sum(1))
        return torch.cat(found)


class Sums(ComputedMechanism):
    name, summary, equation = "block_sums", "sums of complete blocks", r"\sum V"
    paper = Paper(title="Sums", authors="Nobody", year=2026)
    capabilities = frozenset({Capability.CAUSAL, Capability.INCREMENTAL, Capability.EXACT, Capability.PADDING})
    counts_from_start = True
    early = 0

    def build(self, config):
        return BlockSums(config.hidden_size, self.early)

    def state(self, config):
        width = (config.hidden_size,)
        open_block = Paged({"value": Field(width)}, window=EVERY)
        return {"open": open_block, "blocks": Paged({"sum": Field(width)}, every=EVERY)}

    def cost(self, config, shape):
        flops = 2 * shape.batch * shape.query * config.hidden_size**2
        return Cost(flops=flops, allowed_flops=flops, parameters=config.hidden_size * (config.hidden_size + 1))


class Early(Sums):
    """Closes each block without its last token."""

    early = 1


def test_a_row_that_lacks_a_token_is_found():
    settings = ({"hidden_size": 16, "num_heads": 4},)
    for law in (DecodeEqualsForward, ChunkedPrefill, BatchInvariance, StatesAreRead):
        assert judge(law, Subject(Sums(), settings=settings)).passed
    assert not judge(DecodeEqualsForward, Subject(Early(), settings=settings)).passed


class EveryToken(SoundStore):
    """A store that keeps a row for each token, whatever the spec says."""

    def __init__(self, specs, size):
        plain = {
            layer: {name: dataclasses.replace(spec, every=1) for name, spec in states.items()}
            for layer, states in specs.items()
        }
        super().__init__(plain, size)


def test_a_cache_that_takes_a_row_for_each_token_is_found():
    ViewsEqual().test_views_of_random_traffic_equal_those_of_the_oracle(case(SoundStore))
    with pytest.raises(LawBroken):
        ViewsEqual().test_views_of_random_traffic_equal_those_of_the_oracle(case(EveryToken))


def case(store):
    return CacheCase(StoreFamily(store), SPECS["every"], "every")
