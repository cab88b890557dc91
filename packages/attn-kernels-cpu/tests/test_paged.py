"""Attention in C++ to rows of a cache equals attention over all tokens in float64, whatever else is in the batch."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from attn_core import AttentionSpec, Causal, Heads, Paged, RaggedBatch, Window, installed
from attn_core.kernels.attend import PagedAttentionInputs
from attn_core.scores import ScaledDot
from attn_core.states import Field
from attn_core.stores import StoreSize
from attn_kernels_cpu.blocks import CpuLatent, CpuPaged
from torch.nn.functional import scaled_dot_product_attention

pytestmark = pytest.mark.usefixtures("_kernels")

CHUNKS = ((7, 1, 1, 5), (20, 1, 3, 1), (1, 1, 1, 1))
"""The lengths of the chunks of sequences that are computed together."""


@dataclass(frozen=True)
class Texts:
    """Queries, keys and values [tokens, heads, size] of some sequences."""

    spec: AttentionSpec
    rows: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]

    def expected(self, window: int | None) -> list[torch.Tensor]:
        found = []
        for query, key, value in self.rows:
            places = torch.arange(len(query))
            visible = places[:, None] >= places
            if window is not None:
                visible &= places[:, None] - places < window
            operands = (each.double().transpose(0, 1)[None] for each in (query, key, value))
            out = scaled_dot_product_attention(*operands, attn_mask=visible, scale=0.3, enable_gqa=True)
            found.append(out[0].transpose(0, 1))
        return found

    def steps(self, cache: str, window: int | None, asked, dtype: str = "float32") -> list[torch.Tensor]:
        """The outputs of each sequence; in each step only those of the requests that `asked` names are computed."""
        heads, state = self.spec.heads, {"key": Field((2, 32)), "value": Field((2, 32))}
        size = StoreSize(tokens=128, requests=len(self.rows), dtype=dtype, device="cpu")
        store = installed().caches.get(cache).create({"layer": {"kv": Paged(state, window=window)}}, size)
        for name, chunks in enumerate(CHUNKS[: len(self.rows)]):
            store.admit(name)
            store.reserve(name, sum(chunks))
        contexts, found = [0] * len(self.rows), [[] for _ in self.rows]
        for lengths in zip(*CHUNKS[: len(self.rows)], strict=True):
            batch = RaggedBatch.of(lengths, contexts, torch.tensor)
            parts = [
                [each[at : at + n] for each in rows] for rows, at, n in zip(self.rows, contexts, lengths, strict=True)
            ]
            query, key, value = (torch.cat(each) for each in zip(*parts, strict=True))
            view = store.view(batch, range(len(self.rows)))["layer"]["kv"]
            view.append({"key": key, "value": value})
            requests, rows = (
                tuple(asked(batch)),
                (view.in_place if cache in ("paged", "contiguous") else view.coded_in_place)(),
            )
            operands = PagedAttentionInputs(query=query, batch=batch, rows=rows, requests=requests)
            out = torch.split(CpuPaged().run(self.spec, operands), list(lengths))
            assert out[0].shape[1:] == (heads.query, heads.value_size)
            for request in requests:
                found[request].append(out[request])
            contexts = [at + n for at, n in zip(contexts, lengths, strict=True)]
        return [torch.cat(each) if each else torch.empty(0) for each in found]


def texts(window, count=3) -> Texts:
    draw = torch.Generator().manual_seed(3)
    heads = Heads(query=6, key_value=2, key_size=32, value_size=32)
    mask = Causal() if window is None else Causal() & Window(left=window - 1)
    spec = AttentionSpec(heads=heads, score=ScaledDot(scale=0.3), mask=mask)
    rows = [
        tuple(torch.randn(sum(chunks), number, 32, generator=draw) for number in (6, 2, 2)) for chunks in CHUNKS[:count]
    ]
    return Texts(spec, rows)


def everyone(batch):
    return range(batch.requests)


@pytest.mark.parametrize("cache", ["paged", "contiguous"])
@pytest.mark.parametrize("window", [None, 1, 6])
def test_steps_equal_attention_over_whole_sequences(cache, window):
    given = texts(window)
    found = given.steps(cache, window, everyone)
    for got, wanted in zip(found, given.expected(window), strict=True):
        torch.testing.assert_close(got.double(), wanted, rtol=0, atol=2e-6)


def test_a_sequence_has_the_same_bits_alone_and_if_only_others_are_left_out():
    given = texts(None)
    together = given.steps("paged", None, everyone)
    alone = texts(None, 1).steps("paged", None, everyone)
    some = given.steps("paged", None, lambda batch: [0, 2])
    assert torch.equal(together[0], alone[0])
    assert torch.equal(together[0], some[0])
    assert torch.equal(together[2], some[2])


def in_codes(rows):
    """The numbers that the codes of rows [tokens, heads, size] stand for, as PyTorch computes them."""
    specs = {"layer": {"kv": Paged({"rows": Field(rows.shape[1:])})}}
    store = installed().caches.get("int8").create(specs, StoreSize(tokens=128, requests=1))
    store.admit(0)
    store.reserve(0, len(rows))
    view = store.view(RaggedBatch.of([len(rows)], [0], torch.tensor), [0])["layer"]["kv"]
    return view.append({"rows": rows})["rows"]


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize(
    ("cache", "dtype", "rounding"),
    [
        *[("paged", "bfloat16", lambda rows: rows.bfloat16().float()), ("int8", "float32", in_codes)],
        ("float16", "float32", lambda rows: rows.half().float()),
    ],
    ids=["bfloat16", "int8", "float16"],
)
def test_rows_of_fewer_bits_are_read_as_the_numbers_that_they_stand_for(cache, dtype, rounding, window):
    given = texts(window)
    rounded = Texts(given.spec, [(query, rounding(key), rounding(value)) for query, key, value in given.rows])
    for got, wanted in zip(
        given.steps(cache, window, everyone, dtype), rounded.steps("paged", window, everyone), strict=True
    ):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_cached_latents_are_keys_and_values_of_all_heads(window, dtype):
    draw, chunks, kind = torch.Generator().manual_seed(3), (33, 1, 1, 64, 1), getattr(torch, dtype)
    latent, turned = (torch.randn(100, size, generator=draw).to(kind).float() for size in (80, 16))
    query = torch.randn(100, 7, 96, generator=draw)
    # Scores grow from block to block, so that what was summed before is scaled.
    query *= torch.linspace(0.1, 3, 100)[:, None, None]
    mask = Causal() if window is None else Causal() & Window(left=window - 1)
    heads = Heads(query=7, key_value=1, key_size=96, value_size=80)
    spec = AttentionSpec(heads=heads, score=ScaledDot(scale=0.3), mask=mask)
    fields = {"latent": Field((80,)), "rotary_key": Field((16,))}
    size = StoreSize(tokens=128, requests=1, dtype=dtype, device="cpu")
    store = installed().caches.get("paged").create({"layer": {"latent": Paged(fields, window=window)}}, size)
    store.admit(0)
    store.reserve(0, 100)
    found, context = [], 0
    for length in chunks:
        batch, new = RaggedBatch.of([length], [context], torch.tensor), slice(context, context + length)
        view = store.view(batch, [0])["layer"]["latent"]
        view.append({"latent": latent[new], "rotary_key": turned[new]})
        operands = PagedAttentionInputs(query=query[new], batch=batch, rows=view.in_place(), requests=(0,))
        found.append(CpuLatent().run(spec, operands))
        context += length
    joined = torch.cat([latent, turned], -1)[:, None]
    (wanted,) = Texts(spec, [(query, joined, latent[:, None])]).expected(window)
    torch.testing.assert_close(torch.cat(found).double(), wanted, rtol=0, atol=4e-6)
