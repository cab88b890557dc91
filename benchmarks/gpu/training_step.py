"""A training step of GPT-2 small (Radford et al. 2019) in bfloat16, with attention by us, by torch, and written out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from attn_core import AttentionSpec, Causal, Heads, Operands
from attn_kernels_triton.attention.attend import attend
from timing import seconds
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
SHIPPED = {"layers": 12, "width": 768, "heads": 12, "words": 50304, "length": 1024, "batch": 8}
"""Words are filled up to a multiple of 128."""
SMALL = {"layers": 1, "width": 32, "heads": 2, "words": 128, "length": 32, "batch": 1}


def ours(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Our kernels, over rows [batch, row, head, size]."""
    heads = Heads(query=query.shape[2], key_value=key.shape[2], key_size=query.shape[3], value_size=value.shape[3])
    return attend(AttentionSpec(heads=heads, mask=Causal()), Operands(query=query, key=key, value=value))


def torch_own(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """What torch takes by default."""
    turned = (rows.transpose(1, 2) for rows in (query, key, value))
    return scaled_dot_product_attention(*turned, is_causal=True).transpose(1, 2)


def written_out(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Scores, softmax and sums, one after the other."""
    query, key, value = (rows.transpose(1, 2) for rows in (query, key, value))
    hidden = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).triu(1)
    scores = (query @ key.transpose(2, 3) / math.sqrt(query.shape[3])).masked_fill(hidden, -math.inf)
    return (scores.softmax(-1) @ value).transpose(1, 2)


WAYS: dict[str, Attention] = {"ours": ours, "torch": torch_own, "plain": written_out}


class Block(nn.Module):
    """A layer of GPT-2."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.attention = heads, ours
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.inputs, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.forth = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width))

    def forward(self, rows: Tensor) -> Tensor:
        """Rows [batch, row, width] after the layer."""
        found = self.inputs(self.before(rows)).unflatten(-1, (3, self.heads, -1))
        rows = rows + self.output(self.attention(*found.unbind(2)).flatten(2))
        return rows + self.forth(self.between(rows))


class Model(nn.Module):
    """GPT-2 with the same weights for words that come in and that go out."""

    def __init__(self, layers: int, width: int, heads: int, words: int, length: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.after = nn.LayerNorm(width)

    def forward(self, tokens: Tensor) -> Tensor:
        """The loss of foretelling each token from those before it."""
        rows = self.words(tokens) + self.places.weight[: tokens.shape[1]]
        logits = self.after(self.blocks(rows)) @ self.words.weight.T
        return cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def tables(device: str, *, small: bool) -> Iterator[dict[str, Any]]:
    """The loss of the first step, and the time of one, by each attention; and theirs divided by ours."""
    sizes = dict(SMALL if small else SHIPPED)
    batch = sizes.pop("batch")
    tokens = torch.randint(0, sizes["words"], (batch, sizes["length"]), device=device)
    found = {name: one_way(way, sizes, tokens, device) for name, way in WAYS.items()}
    for name, row in found.items():
        yield {"case": f"GPT-2 small, a step, attention: {name}", **row, "beside_ours": row["ms"] / found["ours"]["ms"]}


def one_way(way: Attention, sizes: dict[str, int], tokens: Tensor, device: str) -> dict[str, float]:
    """Loss and time of steps with one attention; weights are the same for all."""
    torch.manual_seed(0)
    kind = torch.bfloat16 if device == "cuda" else torch.float32
    model = Model(**sizes).to(device, kind)
    for block in model.blocks:
        block.attention = way
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
