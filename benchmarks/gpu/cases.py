"""The attention cases that are checked and timed on the GPU, and random operands for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from attn_core import AttentionInputs, AttentionSpec, Causal, Full, Heads, Mask, Window
from attn_core.distributions import Distribution, Softmax, SoftmaxOne, SoftmaxWithSink
from attn_core.dropout import Dropout
from attn_core.kernels.attend import Varlen
from attn_core.masks import BigBird, Prefix, Segments, Strided
from attn_core.modifiers import Alibi, Modifier, RelativeBias, SoftCap, T5Bias
from torch import Tensor

CAUSAL, FULL, SOFTMAX = Causal(), Full(), Softmax()


@dataclass(frozen=True, kw_only=True)
class Case:
    """One attention case. `sizes` are the head sizes of keys and values, `heads` the numbers of query and key heads.

    With `padded`, some keys of each sequence are padding; with `has_positions`, explicit positions 0, 2, 4, ... are
    given.
    """

    name: str
    mask: Mask = CAUSAL
    queries: int = 300
    keys: int = 333
    dtype: str = "bfloat16"
    sizes: tuple[int, int] = (64, 64)
    heads: tuple[int, int] = (4, 2)
    batch: int = 1
    modifiers: tuple[Modifier, ...] = ()
    distribution: Distribution = SOFTMAX
    varlen: Varlen | None = None
    dropout: Dropout | None = None
    padded: bool = False
    has_positions: bool = False

    @property
    def spec(self) -> AttentionSpec:
        """The spec of the attention."""
        (query, key_value), (key_size, value_size) = self.heads, self.sizes
        heads = Heads(query=query, key_value=key_value, key_size=key_size, value_size=value_size)
        return AttentionSpec(heads=heads, mask=self.mask, modifiers=self.modifiers, distribution=self.distribution)

    def operands(self, device: str) -> AttentionInputs:
        """Random operands, N(0, 1)."""
        generator = torch.Generator(device).manual_seed(0)
        dtype: torch.dtype = getattr(torch, self.dtype)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, device=device).to(dtype)

        (query, key_value), (key_size, value_size) = self.heads, self.sizes
        return AttentionInputs(
            query=normal(self.batch, self.queries, query, key_size),
            key=normal(self.batch, self.keys, key_value, key_size),
            value=normal(self.batch, self.keys, key_value, value_size),
            parameters={name: normal(*shape) for name, shape in self.spec.weights.items()},
            varlen=self.varlen,
            dropout=self.dropout,
            **self.said(device),
        )

    def said(self, device: str) -> dict[str, Tensor]:
        """The padding mask and positions of queries and keys, if the case has them."""
        places = 2 * torch.arange(max(self.queries, self.keys), device=device)[None]
        key_padding_mask = (
            torch.arange(self.keys, device=device)[None]
            < self.keys - 7 * torch.arange(self.batch, device=device)[:, None]
        )
        found = {"key_padding_mask": key_padding_mask} if self.padded else {}
        if self.has_positions:
            found |= {"query_positions": places[:, -self.queries :], "key_positions": places[:, -self.keys :]}
        return found


DROPPED = Dropout(probability=0.5, seed=0xFEDCBA9876543210, offset=7)

EVERYTHING: dict[str, Any] = {
    "mask": Window(left=70),
    "modifiers": (SoftCap(cap=20.0), Alibi()),
    "distribution": SoftmaxWithSink(),
}

BANDS_OF_128 = [
    Case(name="128", sizes=(128, 128), queries=512, keys=512),
    Case(name="128, long", sizes=(128, 128), queries=4096, keys=4096, heads=(4, 2)),
    Case(name="128, long window", sizes=(128, 128), queries=4096, keys=4096, heads=(4, 2), mask=Window(left=512)),
    Case(name="everything", **EVERYTHING, sizes=(128, 128)),
]
"""Band masks with head size 128, at lengths that are multiples of a tile and at others."""

BANDS_OF_SIZES = [
    Case(name="full", mask=FULL, batch=2),
    Case(name="float16", dtype="float16"),
    Case(name="float32", dtype="float32", queries=70, keys=99),
    Case(name="256", sizes=(256, 256)),
    Case(name="192 and 128", sizes=(192, 128)),
    Case(name="80", sizes=(80, 80)),
]
"""Band masks with other head sizes and element types."""

BANDS = [
    Case(name="causal"),
    Case(name="one query", queries=1),
    Case(name="one of each", queries=1, keys=1),
    Case(name="more queries than keys", queries=300, keys=99),
    Case(name="window", mask=Window(left=64)),
    Case(name="window to both sides", mask=Window(left=9, right=130)),
    Case(name="soft cap", modifiers=(SoftCap(cap=20.0),)),
    Case(name="alibi", modifiers=(Alibi(),)),
    Case(name="sinks", distribution=SoftmaxWithSink()),
    Case(name="softmax one", distribution=SoftmaxOne(), mask=Window(left=20)),
    Case(name="padded keys", batch=3, padded=True),
    Case(name="positions", mask=Window(left=99), has_positions=True),
]
"""Causal masks and windows with head size 64, at lengths that are not multiples of a tile."""

PACKED = [
    Case(name="packed texts", varlen=Varlen.of((100, 1, 0, 150, 49)), queries=300, keys=300, batch=2),
    Case(name="packed texts after others", varlen=Varlen((100, 1, 199), (200, 33, 100))),
    Case(name="packed texts of 128", varlen=Varlen.of((300, 212)), queries=512, keys=512, sizes=(128, 128)),
    Case(name="packed texts of 256", varlen=Varlen.of((100, 200)), queries=300, keys=300, sizes=(256, 256)),
    Case(name="packed documents", mask=CAUSAL & Segments((100, 1, 150, 82)), queries=333),
    Case(name="packed texts and everything", **EVERYTHING, varlen=Varlen.of((250, 50)), queries=300, keys=300),
]
"""Packed texts (varlen)."""

LISTED = [
    Case(name="prefix", mask=CAUSAL | Prefix(150)),
    Case(name="prefix, 128", mask=CAUSAL | Prefix(150), sizes=(128, 128), queries=512, keys=512),
    Case(name="strides", mask=CAUSAL & Strided(5)),
    Case(name="strides of packed texts", mask=CAUSAL & Strided(5), varlen=Varlen.of((90, 43)), queries=133, keys=133),
    Case(name="heads that differ", mask=BigBird(block=32, random=1, number_of_heads=4)),
    Case(name="a list and positions", mask=CAUSAL & Strided(5), has_positions=True),
]
"""Masks that the kernels process by lists of blocks."""

LEARNED = [
    Case(name="biases of T5", modifiers=(T5Bias(),)),
    Case(name="biases of T5, 128", modifiers=(T5Bias(),), sizes=(128, 128), queries=512, keys=512),
    Case(name="biases over both sides", mask=FULL, modifiers=(SoftCap(cap=20.0), RelativeBias(clip=40)), batch=2),
    Case(name="biases of a list", mask=CAUSAL | Prefix(150), modifiers=(RelativeBias(clip=40),)),
    Case(name="dropout", dropout=Dropout(probability=0.1, seed=1)),
    Case(name="dropout of 128 in a window", mask=Window(left=64), dropout=DROPPED, sizes=(128, 128)),
    Case(name="dropout of packed texts", dropout=DROPPED, varlen=Varlen((100, 1, 199), (200, 33, 100))),
]
"""Learned biases, and dropout of attention weights."""

TINY: dict[str, Any] = {"queries": 20, "keys": 33, "sizes": (16, 16), "dtype": "float16"}
SMALL = {
    "bands_of_128": [Case(name="everything", **{**TINY, **EVERYTHING})],
    "bands_of_sizes": [Case(name="full", **{**TINY, "mask": FULL})],
    "bands": [
        Case(name="causal", **TINY),
        Case(name="padded keys", **TINY, padded=True, batch=2),
        Case(name="positions", **TINY, has_positions=True),
    ],
    "varlen": [Case(name="varlen", varlen=Varlen((7, 13), (20, 13)), **TINY)],
    "listed": [Case(name="prefix", mask=CAUSAL | Prefix(9), **TINY)],
    "learned": [Case(name="biases", modifiers=(T5Bias(),), **TINY), Case(name="dropout", dropout=DROPPED, **TINY)],
}
"""Small cases for Triton's interpreter, which cannot multiply bfloat16."""
