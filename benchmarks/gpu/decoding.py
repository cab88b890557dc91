"""Decoding over a paged cache: correctness on this GPU, and the fraction of the copy bandwidth at which it is read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from attn_core import AttentionInputs, AttentionSpec, Causal, Heads, Mask, RaggedBatch, Window
from attn_core.batch import RowsInPlace, StaticBatch, StaticRows
from attn_core.distributions import Distribution, Softmax, SoftmaxWithSink
from attn_core.kernels.attend import PagedAttentionInputs
from attn_core.modifiers import Alibi, Modifier, SoftCap
from attn_kernels_triton.paged.attend import attend_rows
from attn_kernels_triton.paged.step import attend_step
from attn_variants.kernels.attend import Plain
from codes import DECODED, coded
from timing import copied_per_second, seconds, started
from torch import Tensor

FACTOR, ROUNDINGS = 1.25, 3
CAUSAL, SOFTMAX = Causal(), Softmax()


@dataclass(frozen=True, kw_only=True)
class Step:
    """A step in which each request computes `lengths` new tokens after `contexts` cached ones, of which the first
    `shared` are common to all requests. The cache holds latents (MLA) if the key and value sizes differ."""

    name: str
    lengths: tuple[int, ...]
    contexts: tuple[int, ...]
    heads: tuple[int, int] = (32, 8)
    sizes: tuple[int, int] = (128, 128)
    dtype: torch.dtype = torch.bfloat16
    form: str = "plain"
    mask: Mask = CAUSAL
    modifiers: tuple[Modifier, ...] = ()
    distribution: Distribution = SOFTMAX
    shared: int = 0

    @property
    def latent(self) -> bool:
        """Whether the cache rows are latents and rotary keys (MLA)."""
        return self.sizes[0] != self.sizes[1]

    @property
    def spec(self) -> AttentionSpec:
        """The spec of the attention."""
        (query, shared), (key, value) = self.heads, self.sizes
        heads = Heads(query=query, key_value=shared, key_size=key, value_size=value)
        return AttentionSpec(heads=heads, mask=self.mask, modifiers=self.modifiers, distribution=self.distribution)

    def operands(self, device: str) -> PagedAttentionInputs:
        """Random operands, with each request's rows scattered over the cache."""
        generator = torch.Generator(device).manual_seed(0)
        own = [past + new - self.shared for past, new in zip(self.contexts, self.lengths, strict=True)]
        pool, longest = self.shared + sum(own), self.shared + max(own)

        fields, query = self.drawn(generator, pool)
        numbers = torch.zeros(len(own), longest, dtype=torch.int64, device=device)
        places = torch.randperm(pool, generator=generator, device=device)
        numbers[:, : self.shared] = places[: self.shared]
        for request, part in enumerate(places[self.shared :].split(own)):
            numbers[request, self.shared : self.shared + len(part)] = part
        batch = RaggedBatch.of(self.lengths, self.contexts, partial(torch.tensor, device=device))
        return self.operands_of(batch, RowsInPlace(fields, numbers, numbers, (0,) * len(own), self.form), query)

    def operands_of(self, batch: RaggedBatch, rows: RowsInPlace, query: Tensor) -> PagedAttentionInputs:
        """The operands of all requests, with the learned parameters set to ones."""
        learned = {name: torch.ones(shape, device=query.device) for name, shape in self.spec.weights.items()}
        asked = tuple(range(batch.requests))
        return PagedAttentionInputs(query=query, batch=batch, rows=rows, requests=asked, parameters=learned)

    def drawn(self, generator: torch.Generator, pool: int) -> tuple[dict[str, Tensor], Tensor]:
        """A random cache of `pool` rows, by field, and random queries [tokens, heads, size]."""

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, device=generator.device).to(self.dtype)

        (query, shared), (key, value) = self.heads, self.sizes
        if self.latent:
            fields = {"latent": normal(pool, value), "rotary_key": normal(pool, key - value)}
        elif self.form != "plain":
            sizes = {"key": key, "value": value}
            fields = {}
            for name, size in sizes.items():
                fields |= coded(name, self.form, (pool, shared, size), generator)
        else:
            fields = {"key": normal(pool, shared, key), "value": normal(pool, shared, value)}
        return fields, normal(sum(self.lengths), query, key)


BINARY = (-1, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7)
"""The parent of each token in a binary tree of 16 tokens; -1 for the root."""


@dataclass(frozen=True, kw_only=True)
class TreeStep(Step):
    """A step that verifies a tree of draft tokens after each of `bases` cached tokens; each node is its own request."""

    bases: tuple[int, ...]
    parents: tuple[int, ...] = BINARY

    @classmethod
    def of(cls, name: str, bases: tuple[int, ...], **more: Any) -> TreeStep:
        """Make the step of a binary tree after each of `bases`."""
        depths = [len(path_of(BINARY, node)) - 1 for node in range(len(BINARY))]
        contexts = tuple(base + depth for base in bases for depth in depths)
        return cls(name=name, lengths=(1,) * len(contexts), contexts=contexts, bases=bases, **more)

    def operands(self, device: str) -> PagedAttentionInputs:
        """Random operands, with each tree's rows scattered over the cache."""
        generator = torch.Generator(device).manual_seed(0)
        held = [base + len(self.parents) for base in self.bases]
        fields, query = self.drawn(generator, sum(held))
        numbers = torch.zeros(len(self.contexts), max(self.contexts) + 1, dtype=torch.int64, device=device)
        paths = []
        for tree, part in enumerate(torch.randperm(sum(held), generator=generator, device=device).split(held)):
            base = self.bases[tree]
            for node in range(len(self.parents)):
                path = path_of(self.parents, node)
                line = numbers[tree * len(self.parents) + node]
                line[:base] = part[:base]
                line[base : base + len(path)] = part[torch.tensor(path, device=device) + base]
                paths.append(tuple(base + place for place in path))
        tensor = partial(torch.tensor, device=device)
        batch = RaggedBatch.of(self.lengths, self.contexts, tensor, paths)
        return self.operands_of(batch, RowsInPlace(fields, numbers, numbers, (0,) * len(paths), self.form), query)


def path_of(parents: tuple[int, ...], node: int) -> list[int]:
    """The path from the root of a tree to a node, the node included."""
    found = [node]
    while parents[found[0]] >= 0:
        found.insert(0, parents[found[0]])
    return found


EVERYTHING: dict[str, Any] = {
    "mask": Window(left=333),
    "modifiers": (SoftCap(cap=20.0), Alibi()),
    "distribution": SoftmaxWithSink(),
}
MANY: dict[str, Any] = {"lengths": (1, 200, 37), "contexts": (900, 0, 300)}
RIGHT = [
    Step(name="tokens that decode", lengths=(1, 1, 1), contexts=(3000, 5, 700)),
    Step(name="chunks of prompts beside tokens", **MANY),
    Step(name="chunks of prompts beside tokens, 64", **MANY, sizes=(64, 64)),
    Step(name="chunks of prompts beside tokens, 256", **MANY, sizes=(256, 256)),
    Step(name="everything", **MANY, **EVERYTHING),
    Step(name="int8", **MANY, form="int8"),
    Step(name="int4", **MANY, form="int4"),
    Step(name="float32", lengths=(1, 9), contexts=(500, 60), heads=(4, 2), sizes=(64, 64), dtype=torch.float32),
    Step(name="20 tokens after a shared prefix", lengths=(1,) * 20, contexts=(4200,) * 20, shared=4096),
    TreeStep.of("trees of 16 tokens", (900, 5, 0)),
    TreeStep.of("trees of 16 tokens, int4", (900, 5, 0), form="int4"),
    Step(name="latents of 16 heads", lengths=(1, 1), contexts=(2000, 77), heads=(16, 1), sizes=(576, 512)),
    Step(name="latents of 128 heads", lengths=(1, 3), contexts=(400, 77), heads=(128, 1), sizes=(576, 512)),
]
SMALL_SIZES: dict[str, Any] = {"heads": (2, 1), "sizes": (16, 16), "dtype": torch.float32}
SMALL = [
    TreeStep.of("small tree", (9,), **SMALL_SIZES),
    Step(name="small", lengths=(1, 3), contexts=(20, 5), **SMALL_SIZES),
    Step(name="small, everything", lengths=(1, 3), contexts=(20, 5), **EVERYTHING, **SMALL_SIZES),
    Step(name="small, int8", lengths=(1, 3), contexts=(20, 5), form="int8", **SMALL_SIZES),
    Step(name="small, int4", lengths=(1,), contexts=(20,), form="int4", **{**SMALL_SIZES, "sizes": (32, 32)}),
]
LATENTS: dict[str, Any] = {"lengths": (1,) * 64, "contexts": (8191,) * 64, "sizes": (576, 512)}
TIMED = [
    Step(name="32 of 4096", lengths=(1,) * 32, contexts=(4095,) * 32),
    Step(name="64 of 4096, a head each", lengths=(1,) * 64, contexts=(4095,) * 64, heads=(8, 8)),
    Step(name="4 of 65536", lengths=(1,) * 4, contexts=(65535,) * 4),
    *(Step(name=f"latents, {heads} heads, 64 of 8192", heads=(heads, 1), **LATENTS) for heads in (16, 32, 128)),
    TreeStep.of("trees of 16 tokens, 32 of 4096", (4096,) * 32),
    Step(name="int8, 64 of 4096", lengths=(1,) * 64, contexts=(4095,) * 64, form="int8"),
    Step(name="int4, 128 of 4096", lengths=(1,) * 128, contexts=(4095,) * 128, form="int4"),
    Step(name="1 of 4096", lengths=(1,), contexts=(4095,)),
    Step(name="64 of 16384, 16128 shared", lengths=(1,) * 64, contexts=(16383,) * 64, shared=16128),
]


def verdicts(device: str, *, small: bool) -> Iterator[dict[str, Any]]:
    """For each step, the relative error against float64, and whether it is right and deterministic."""
    for step in SMALL if small else RIGHT:
        operands = step.operands(device)
        exact, usual = gathered(step, operands, torch.float64), gathered(step, operands, step.dtype)
        size = float(torch.linalg.vector_norm(exact))
        for way, compute in ways(step).items():
            found, again = (compute(step.spec, operands) for _ in range(2))
            error, own = (float(torch.linalg.vector_norm(part.double() - exact)) / size for part in (found, usual))
            allowed, same = FACTOR * own + ROUNDINGS * torch.finfo(step.dtype).eps, torch.equal(found, again)
            right = error <= allowed and same
            name = f"{way}: {step.name}"
            yield {"case": name, "what": "output", "error": error, "allowed": allowed, "same": same, "right": right}


def ways(step: Step) -> dict[str, Callable[[AttentionSpec, PagedAttentionInputs], Tensor]]:
    """The functions that compute a step: planned on the host and, except for trees and latents, split on the device."""
    planned = {"over pages": attend_rows}
    return planned if step.latent or isinstance(step, TreeStep) else {**planned, "cut on the device": cut_there}


def cut_there(spec: AttentionSpec, operands: PagedAttentionInputs) -> Tensor:
    """The output as a step in a CUDA graph computes it, with eight tokens of padding and pages of one row."""
    batch, rows, padding = operands.batch, operands.rows, 8
    ends = list(accumulate(batch.lengths, initial=0))
    device = operands.query.device
    static = StaticRows(
        rows.fields,
        rows.slot_mapping,
        rows.kv_indices.int(),
        (),
        rows.form,
        block_size=1,
        contexts=torch.tensor([*batch.contexts, -1], device=device),
        query_starts=torch.tensor([*ends, ends[-1] + padding], device=device),
        max_query_len=ends[-1] + padding,
    )
    positions = torch.nn.functional.pad(batch.positions, (0, padding))
    query = torch.nn.functional.pad(operands.query, (0, 0, 0, 0, 0, padding))
    padded = StaticBatch(positions, 1 << 20, static.max_query_len)
    given = replace(operands, query=query, batch=padded, rows=static, requests=())
    return attend_step(spec, given, static)[: ends[-1]]


def gathered(step: Step, operands: PagedAttentionInputs, dtype: torch.dtype) -> Tensor:
    """The plain computation, request by request, on gathered rows."""
    fields, outs = operands.rows.fields, []
    for request, span in enumerate(operands.batch.spans()):
        places = operands.rows.kv_indices[request, : step.contexts[request] + step.lengths[request]]
        if step.latent:
            value = fields["latent"][places, None]
            key = torch.cat([value, fields["rotary_key"][places, None]], dim=-1)
        else:
            key, value = (DECODED[step.form](name, fields, places) for name in ("key", "value"))
        query = operands.query[span.start : span.stop]
        given = AttentionInputs(
            **{name: rows[None].to(dtype) for name, rows in (("query", query), ("key", key), ("value", value))},
            parameters={name: learned.to(dtype) for name, learned in operands.parameters.items()},
        )
        outs.append(Plain().run(step.spec, given)[0])
    return torch.cat(outs)


def tables(device: str, *, small: bool) -> Iterator[dict[str, Any]]:
    """The times of steps, and the fraction of the copy bandwidth at which the cache is read."""
    copied = copied_per_second(device)
    for step in SMALL if small else TIMED:
        operands = step.operands(device)

        def run(operands: PagedAttentionInputs = operands, spec: AttentionSpec = step.spec) -> Tensor:
            return attend_rows(spec, operands)

        took, host = seconds(run, device), started(run, device)
        read = sum(field.nbytes for field in operands.rows.fields.values())
        tree = isinstance(step, TreeStep)
        yield {
            "case": f"over pages: {step.name}",
            "rows": "latents" if step.latent else step.form,
            "tree": tree,
            "heads": step.heads[0],
            "ms": 1e3 * took,
            "start_ms": 1e3 * host,
            "cache_bytes": read,
            "share_of_copy": read / took / copied,
        }
