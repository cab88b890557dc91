"""A training step of GPT-2 small (Radford et al. 2019) in bfloat16: with attn's kernels, with torch's, and plain."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from attn_core import AttentionInputs, AttentionSpec, Causal, Heads
from attn_core.kernels.rowwise import Targets
from attn_kernels_triton.attention.attend import attend
from attn_models.losses import linear_cross_entropy
from attn_variants.kernels.attend import Plain
from rowwise import found_by_us
from timing import seconds
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
SHIPPED = {"layers": 12, "width": 768, "heads": 12, "words": 50304, "length": 1024, "batch": 8}
"""The sizes of GPT-2 small; the vocabulary is padded to a multiple of 128."""
SMALL = {"layers": 1, "width": 32, "heads": 2, "words": 128, "length": 32, "batch": 1}


def asked(query: Tensor, key: Tensor, value: Tensor) -> tuple[AttentionSpec, AttentionInputs]:
    """The spec and inputs of causal attention over [batch, tokens, heads, size]."""
    heads = Heads(query=query.shape[2], key_value=key.shape[2], key_size=query.shape[3], value_size=value.shape[3])
    return AttentionSpec(heads=heads, mask=Causal()), AttentionInputs(query=query, key=key, value=value)


def ours(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention with attn's kernels."""
    return attend(*asked(query, key, value))


def torch_own(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention with torch's default SDPA backend."""
    turned = (rows.transpose(1, 2) for rows in (query, key, value))
    return scaled_dot_product_attention(*turned, is_causal=True).transpose(1, 2)


def plain(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The plain computation, which stores all scores."""
    return Plain().run(*asked(query, key, value))


def our_loss(rows: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    """The loss with attn's kernel, which computes the logits in chunks."""
    return linear_cross_entropy(rows, weight, ids, Targets())


def plain_loss(rows: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    """The loss of all logits at once, in float32."""
    return cross_entropy((rows @ weight.T).flatten(0, 1).float(), ids.flatten())


class Way(NamedTuple):
    """The implementations of attention and loss that a step uses."""

    attention: Attention
    loss: Loss


WAYS = {
    "ours": Way(ours, our_loss),
    "torch": Way(torch_own, plain_loss),
    "plain": Way(plain, plain_loss),
    "ours, attention alone": Way(ours, plain_loss),
}


class Block(nn.Module):
    """A transformer block of GPT-2."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.attention = heads, ours
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.inputs, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.forth = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width))

    def forward(self, rows: Tensor) -> Tensor:
        """The hidden states [batch, tokens, width] after the block."""
        found = self.inputs(self.before(rows)).unflatten(-1, (3, self.heads, -1))
        rows = rows + self.output(self.attention(*found.unbind(2)).flatten(2))
        return rows + self.forth(self.between(rows))


class Model(nn.Module):
    """GPT-2 with tied input and output embeddings."""

    def __init__(self, layers: int, width: int, heads: int, words: int, length: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.after, self.loss = nn.LayerNorm(width), our_loss

    def forward(self, tokens: Tensor) -> Tensor:
        """The next-token prediction loss."""
        rows = self.words(tokens) + self.places.weight[: tokens.shape[1]]
        return self.loss(self.after(self.blocks(rows))[:, :-1], self.words.weight, tokens[:, 1:])


def tables(device: str, *, small: bool) -> Iterator[dict[str, Any]]:
    """The loss of the first step and the time of a step; `times_ours` is that time divided by attn's."""
    found_by_us(small)
    sizes = dict(SMALL if small else SHIPPED)
    batch = sizes.pop("batch")
    tokens = torch.randint(0, sizes["words"], (batch, sizes["length"]), device=device)
    found: dict[str, dict[str, float]] = {}
    for name, way in WAYS.items():
        row = found[name] = one_way(way, sizes, tokens, device)
        yield {"case": "GPT-2 small, a step", "way": name, **row, "times_ours": row["ms"] / found["ours"]["ms"]}


def one_way(way: Way, sizes: dict[str, int], tokens: Tensor, device: str) -> dict[str, float]:
    """The loss and time of steps with one set of implementations; the initial weights are the same for all."""
    torch.manual_seed(0)
    kind = torch.bfloat16 if device == "cuda" else torch.float32
    model = Model(**sizes).to(device, kind)
    model.loss = way.loss
    for block in model.blocks:
        block.attention = way.attention
    adam = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device == "cuda")
    losses: list[Tensor] = []

    def step() -> None:
        loss = model(tokens)
        adam.zero_grad()
        loss.backward()
        adam.step()
        losses.append(loss.detach())

    took = seconds(step, device, 10)
    return {"first_loss": float(losses[0]), "ms": 1e3 * took, "tokens_per_second": tokens.numel() / took}
