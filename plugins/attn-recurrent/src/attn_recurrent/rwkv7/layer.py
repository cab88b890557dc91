"""The layers of RWKV-7."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch
from attn_core import LayerState, RaggedBatch
from attn_core.masking import wide
from torch import Tensor, nn
from torch._higher_order_ops.scan import scan
from torch.nn.functional import normalize, relu

from attn_recurrent.sequences import by_heads, in_chunks, pieces, refuse_source

if TYPE_CHECKING:
    from attn_recurrent.rwkv7.config import Rwkv7Config

FASTEST = math.exp(-0.5)
"""Log decays are between 0 and minus this."""
RECEPTANCE, DECAY, KEY, VALUE, RATE, GATE = range(6)
"""Rows of `mixes`: what each projection reads."""


class Rule(NamedTuple):
    """The inputs of the rule at some tokens, [batch, heads, tokens, size]: S_t = e^decay S_{t-1} + key value^T - erased
    (S_{t-1}^T seen)^T, read as o_t = S_t^T query."""

    query: Tensor
    decay: Tensor
    key: Tensor
    value: Tensor
    seen: Tensor
    erased: Tensor


def one_chunk(rule: Rule, memory: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs and memory [batch, heads, size, size] after one chunk of tokens, all pairs of which meet.

    With c_t the sum of log decays, S_t = e^{c_t} (S_0 + Σ_j e^{-c_j} (k_j v_j^T - b_j u_j^T)), where u_t, which is
    S_{t-1}^T κ_t, is the solution of a triangular system.
    """
    total = rule.decay.cumsum(2)
    late = (-total).exp()
    asked = torch.cat([rule.seen * (total - rule.decay).exp(), rule.query * total.exp()], dim=2)
    kept = torch.cat([rule.key * late, rule.erased * late], dim=2)
    tokens = rule.value.shape[2]
    pairs = asked @ kept.transpose(-1, -2)
    (seen_key, seen_erased), (key, erased) = (
        torch.split(part, tokens, dim=-1) for part in torch.split(pairs, tokens, dim=2)
    )
    start, read = torch.split(asked @ memory, tokens, dim=2)
    removed = torch.linalg.solve_triangular(
        seen_erased.tril(-1), start + seen_key.tril(-1) @ rule.value, upper=False, unitriangular=True
    )
    out = read + key.tril() @ rule.value - erased.tril() @ removed
    written = kept.transpose(-1, -2) @ torch.cat([rule.value, -removed], dim=2)
    return out, total[:, :, -1, :, None].exp() * (memory + written)


def scanned(rule: Rule, memory: Tensor) -> tuple[Tensor, Tensor]:
    """The result of `in_chunks` token by token, for graphs of any number of tokens."""

    def one(memory: Tensor, token: list[Tensor]) -> tuple[Tensor, Tensor]:
        query, decay, key, value, seen, erased = (part[..., None] for part in token)
        removed = erased * (memory * seen).sum(-2, keepdim=True)
        memory = memory * decay.exp() + key * value.mT - removed
        return memory, (memory * query).sum(-2)

    after, out = scan(one, memory, list(rule), dim=2)
    return out, after


class LowRank(nn.Module):
    """W₂ f(W₁ x) + b."""

    def __init__(self, width: int, rank: int, activation: nn.Module, *, bias: bool = True) -> None:
        super().__init__()
        self.down, self.activation = nn.Linear(width, rank, bias=False), activation
        self.up = nn.Linear(rank, width, bias=bias)

    def forward(self, rows: Tensor) -> Tensor:
        """Map `rows` [..., width] to [..., width]."""
        mapped: Tensor = self.up(self.activation(self.down(rows)))
        return mapped


def shifted(rows: Tensor, last: Tensor | None) -> Tensor:
    """The token before each of `rows` [batch, tokens, width]; that of the first is `last` [batch, width], zeros if
    None."""
    before = torch.zeros_like(rows[:, :1]) if last is None else last[:, None].to(rows.dtype)
    return torch.cat([before, rows], dim=1)[:, :-1]


class Rwkv7Layer(nn.Module):
    """Time mixing of RWKV-7 (Peng et al. 2025, arXiv 2503.14456).

    Learned: `mixes` [6, hidden_size], how much of the token before each projection reads, `query`, `key`, `value` and
    `output` (`nn.Linear`), the networks `decay`, `rate` and `gate`, `key_scale` ξ, `rate_scale` α, `bonus` ρ, all
    [hidden_size], and the norm of heads, `gain` and `shift`. A model may add `value_mix`, a network for how much of
    the values of its first layer a later one takes.
    """

    no_weight_decay: ClassVar[tuple[str, ...]] = ("mixes",)

    def __init__(self, config: Rwkv7Config) -> None:
        super().__init__()
        width, self.heads, self.chunk, self.eps = config.hidden_size, config.num_heads, config.chunk, config.norm_eps
        ramp = torch.arange(width) / width
        self.mixes = nn.Parameter(torch.stack([1 - ramp**power for power in (0.2, 0.9, 0.7, 0.7, 0.9, 0.2)]))
        self.query, self.key, self.value, self.output = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.decay = LowRank(width, config.decay_rank, nn.Tanh())
        self.rate = LowRank(width, config.rate_rank, nn.Identity())
        self.gate = LowRank(width, config.gate_rank, nn.Sigmoid(), bias=False)
        self.key_scale = nn.Parameter(torch.full((width,), 0.7))
        self.rate_scale = nn.Parameter(torch.ones(width))
        self.bonus = nn.Parameter(torch.full((width,), -0.04))
        self.gain, self.shift = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        self.value_mix: LowRank | None = None
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
        with torch.no_grad():
            self.decay.up.bias.copy_(6 * ramp - 5.5)
            self.rate.up.bias.zero_()

    def forward(self, query: Tensor, source: Tensor | None = None, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """Compute whole sequences, [batch, tokens, hidden_size] to [batch, tokens, hidden_size].

        `key_padding_mask` [batch, tokens], bool, is True for real tokens. Raises `InvalidValue` if a source is given.
        """
        refuse_source(source, "rwkv7")
        return self.mixed(query, None, key_padding_mask=key_padding_mask)[0]

    def step(self, query: Tensor, batch: RaggedBatch, state: LayerState) -> Tensor:
        """Compute the new tokens of many requests, [tokens, hidden_size] to [tokens, hidden_size].

        Reads and replaces the state "memory": "S" [requests, heads, size, size], float32, and "last" [requests,
        hidden_size].
        """
        return self.mixed_step(query, None, batch, state)[0]

    def mixed_step(
        self, query: Tensor, first: Tensor | None, batch: RaggedBatch, state: LayerState
    ) -> tuple[Tensor, Tensor]:
        """Like `step`; takes and returns values [tokens, hidden_size] as `mixed` does."""
        held, width = state["memory"].read(), query.shape[-1]
        together = query if first is None else torch.cat([query, first], dim=-1)
        found, after = [], []
        for rows, requests in pieces(together, batch):
            before = held["S"][requests], held["last"][requests]
            values = None if first is None else rows[..., width:]
            out, value, memory = self.mixed(rows[..., :width], values, *before)
            found.append((out.flatten(0, 1), value.flatten(0, 1)))
            after.append((memory.to(held["S"].dtype), rows[:, -1, :width].to(held["last"].dtype)))
        memories, lasts = zip(*after, strict=True)
        state["memory"].write({"S": torch.cat(memories), "last": torch.cat(lasts)})
        outs, values_of_tokens = zip(*found, strict=True)
        return torch.cat(outs), torch.cat(values_of_tokens)

    def mixed(
        self,
        rows: Tensor,
        first: Tensor | None,
        memory: Tensor | None = None,
        last: Tensor | None = None,
        *,
        key_padding_mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Outputs and the layer's own values [batch, tokens, hidden_size], and the memory after the last token.

        `first` [batch, tokens, hidden_size] are the values of the model's first layer, for `value_mix`; `memory` and
        `last` the state before the first token.
        """
        if key_padding_mask is not None:
            rows = torch.where(key_padding_mask[..., None], rows, 0)
        read = rows[..., None, :] + (shifted(rows, last) - rows)[..., None, :] * self.mixes.to(rows.dtype)
        query, key, value = (
            layer(read[..., place, :])
            for layer, place in ((self.query, RECEPTANCE), (self.key, KEY), (self.value, VALUE))
        )
        own = value
        if self.value_mix is not None and first is not None:
            value = torch.lerp(value, first, self.value_mix(read[..., VALUE, :]).sigmoid())
        rate = wide(self.rate(read[..., RATE, :])).sigmoid()
        decay = -FASTEST * wide(self.decay(read[..., DECAY, :])).sigmoid()
        seen = normalize(by_heads(wide(key) * wide(self.key_scale), self.heads), dim=-1)
        key = wide(key) * (1 + (rate - 1) * wide(self.rate_scale))
        query, value = wide(query), wide(value)
        if key_padding_mask is not None:
            decay, key, value = (torch.where(key_padding_mask[..., None], one, 0) for one in (decay, key, value))
            seen = torch.where(key_padding_mask[:, None, :, None], seen, 0)
        query, decay, key, value, rate = (by_heads(one, self.heads) for one in (query, decay, key, value, rate))
        rule = Rule(query, decay, key, value, seen, seen * rate)
        if memory is None:
            memory = key.new_zeros(key.shape[0], self.heads, key.shape[-1], key.shape[-1])
        memory = memory.to(value.dtype)
        if torch.compiler.is_exporting():
            out, memory = scanned(rule, memory)
        else:
            out, memory = in_chunks(one_chunk, rule, memory, self.chunk)
        gate = self.gate(read[..., GATE, :])
        if key_padding_mask is not None:
            gate = torch.where(key_padding_mask[..., None], gate, 0)
        return self._out(out, rule, gate), own, memory

    def _out(self, read: Tensor, rule: Rule, gate: Tensor) -> Tensor:
        variance, mean = torch.var_mean(read, dim=-1, keepdim=True, correction=0)
        normed = ((read - mean) * torch.rsqrt(variance + self.eps)).transpose(1, 2).flatten(-2)
        normed = normed * wide(self.gain) + wide(self.shift)
        bonus = torch.unflatten(wide(self.bonus), 0, (self.heads, 1, -1))
        now = ((rule.query * bonus * rule.key).sum(-1, keepdim=True) * rule.value).transpose(1, 2).flatten(-2)
        out: Tensor = self.output(((normed + now) * wide(gate)).to(gate.dtype))
        return out


class ChannelMixLayer(nn.Module):
    """Channel mixing of RWKV-7. Learned: `mix` [hidden_size], `up` and `down` (`nn.Linear`)."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.mix = nn.Parameter(1 - torch.arange(width) / width)
        self.up, self.down = nn.Linear(width, inner, bias=False), nn.Linear(inner, width, bias=False)

    def forward(self, query: Tensor, source: Tensor | None = None, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """Compute whole sequences; see `Rwkv7Layer.forward`."""
        refuse_source(source, "rwkv7_channel")
        if key_padding_mask is not None:
            query = torch.where(key_padding_mask[..., None], query, 0)
        return self._mixed(query, None)

    def step(self, query: Tensor, batch: RaggedBatch, state: LayerState) -> Tensor:
        """Compute the new tokens of many requests; reads and replaces "last" [requests, hidden_size] of "memory"."""
        last = state["memory"].read()["last"]
        groups = list(pieces(query, batch))
        outs = [self._mixed(rows, last[requests]).flatten(0, 1) for rows, requests in groups]
        state["memory"].write({"last": torch.cat([rows[:, -1] for rows, _ in groups]).to(last.dtype)})
        return torch.cat(outs)

    def _mixed(self, rows: Tensor, last: Tensor | None) -> Tensor:
        read = rows + (shifted(rows, last) - rows) * self.mix.to(rows.dtype)
        mixed: Tensor = self.down(relu(self.up(read)).square())
        return mixed
