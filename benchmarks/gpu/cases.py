"""What is computed on the GPU: attentions by name, and operands for them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from attn_core import (
    Alibi,
    AttentionSpec,
    BigBird,
    Causal,
    Distribution,
    Full,
    Heads,
    Mask,
    Modifier,
    Operands,
    Prefix,
    RelativeBias,
    Segments,
    SoftCap,
    Softmax,
    SoftmaxOne,
    SoftmaxWithSink,
    Strided,
    T5Bias,
    Window,
)
from attn_core.dropout import Dropout
from attn_core.packed import Packed
from torch import Tensor

CAUSAL, FULL, SOFTMAX = Causal(), Full(), Softmax()


@dataclass(frozen=True, kw_only=True)
class Case:
    """One attention over so many queries and keys; sizes are of keys and values, heads of queries and of keys."""

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
    packed: Packed | None = None
    dropout: Dropout | None = None

    @property
    def spec(self) -> AttentionSpec:
        """The attention."""
        (query, key_value), (key_size, value_size) = self.heads, self.sizes
        heads = Heads(query=query, key_value=key_value, key_size=key_size, value_size=value_size)
        return AttentionSpec(heads=heads, mask=self.mask, modifiers=self.modifiers, distribution=self.distribution)

    def operands(self, device: str) -> Operands:
        """Random operands, N(0, 1)."""
        generator = torch.Generator(device).manual_seed(0)
        dtype: torch.dtype = getattr(torch, self.dtype)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, device=device).to(dtype)

        (query, key_value), (key_size, value_size) = self.heads, self.sizes
        return Operands(
            query=normal(self.batch, self.queries, query, key_size),
            key=normal(self.batch, self.keys, key_value, key_size),
            value=normal(self.batch, self.keys, key_value, value_size),
            parameters={name: normal(*shape) for name, shape in self.spec.weights.items()},
            packed=self.packed,
            dropout=self.dropout,
        )


DROPPED = Dropout(probability=0.5, seed=0xFEDCBA9876543210, offset=7)

RIGHT = [
    Case(name="causal"),
    Case(name="full", mask=FULL, batch=2),
    Case(name="float16", dtype="float16"),
    Case(name="float32", dtype="float32", queries=70, keys=99),
    Case(name="128", sizes=(128, 128), queries=512, keys=512),
    Case(name="256", sizes=(256, 256)),
    Case(name="192 and 128", sizes=(192, 128)),
    Case(name="80", sizes=(80, 80)),
    Case(name="one query", queries=1),
    Case(name="one of each", queries=1, keys=1),
    Case(name="window", mask=Window(left=64)),
    Case(name="window to both sides", mask=Window(left=9, right=130)),
    Case(name="soft cap", modifiers=(SoftCap(cap=20.0),)),
    Case(name="alibi", modifiers=(Alibi(),)),
    Case(name="sinks", distribution=SoftmaxWithSink()),
    Case(name="softmax one", distribution=SoftmaxOne(), mask=Window(left=20)),
    Case(name="prefix", mask=CAUSAL | Prefix(150)),
    Case(name="packed documents", mask=CAUSAL & Segments((100, 1, 150, 82)), queries=333),
    Case(name="strides", mask=CAUSAL & Strided(5)),
    Case(name="packed texts", packed=Packed.of((100, 1, 0, 150, 49)), queries=300, keys=300, batch=2),
    Case(name="packed texts after others", packed=Packed((100, 1, 199), (200, 33, 100))),
    Case(name="packed texts of 128", packed=Packed.of((300, 212)), queries=512, keys=512, sizes=(128, 128)),
    Case(name="packed texts of 256", packed=Packed.of((100, 200)), queries=300, keys=300, sizes=(256, 256)),
    Case(name="biases of T5", modifiers=(T5Bias(),)),
    Case(name="biases of T5, 128", modifiers=(T5Bias(),), sizes=(128, 128), queries=512, keys=512),
    Case(name="biases over both sides", mask=FULL, modifiers=(SoftCap(cap=20.0), RelativeBias(clip=40)), batch=2),
    Case(name="biases of a list", mask=CAUSAL | Prefix(150), modifiers=(RelativeBias(clip=40),)),
    Case(name="dropout", dropout=Dropout(probability=0.1, seed=1)),
    Case(name="dropout of 128 in a window", mask=Window(left=64), dropout=DROPPED, sizes=(128, 128)),
    Case(name="dropout of packed texts", dropout=DROPPED, packed=Packed((100, 1, 199), (200, 33, 100))),
    Case(name="heads that differ", mask=BigBird(block=32, random=1, number_of_heads=4)),
]
"""Every feature of every program once, at sizes that are no multiples of a tile."""

SMALL = [
    Case(name="causal", queries=20, keys=33, sizes=(16, 16), dtype="float16"),
    Case(name="packed", packed=Packed((7, 13), (20, 13)), queries=20, keys=33, sizes=(16, 16), dtype="float16"),
    Case(name="biases", modifiers=(T5Bias(),), queries=20, keys=33, sizes=(16, 16), dtype="float16"),
    Case(name="dropout", dropout=DROPPED, queries=20, keys=33, sizes=(16, 16), dtype="float16"),
    Case(name="prefix", mask=CAUSAL | Prefix(9), queries=20, keys=33, sizes=(16, 16), dtype="float16"),
]
"""For the interpreter, which cannot multiply bfloat16."""
