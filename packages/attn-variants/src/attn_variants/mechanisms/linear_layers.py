"""Layers of linear attention, the Performer and efficient attention."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from attn_core import Heads, LayerState, RaggedBatch
from attn_core.batch import SlotsInPlace
from attn_core.errors import WrongState
from attn_core.kernels.recurrence import RecurrenceDispatcher, Steps
from attn_core.kernels.recurrent_step import OutputInputs, RecurrentStepInputs
from attn_core.masking import wide
from torch import Generator, Tensor, nn
from torch.nn.functional import pad, relu

from attn_variants.attention.projections import by_heads, fresh_linear, refuse_source
from attn_variants.mechanisms.decode_steps import linear_step
from attn_variants.mechanisms.recurrence_layers import Inputs, Places, Projections, RecurrenceLayer
from attn_variants.mechanisms.recurrence_scan import effective_weights, largest_so_far

EPSILON = 1e-6
"""Added to every denominator, as in the code of Katharopoulos et al. 2020."""


def features(rows: Tensor) -> Tensor:
    """elu(x) + 1, in at least float32.

    Written as e^min(x, 0) + max(x, 0), which is positive for all x; 1 + (e^x - 1) is zero below -17 in float32.
    """
    wide = rows.float() if rows.dtype in {torch.float16, torch.bfloat16} else rows
    return torch.exp(wide.clamp(max=0)) + relu(wide)


def with_ones(values: Tensor, like: Tensor) -> Tensor:
    """Values in the dtype of `like`, with a column of ones appended."""
    return pad(values.to(like.dtype), (0, 1), value=1.0)


def divided(sums: Tensor) -> Tensor:
    """Divide sums [..., value_size + 1] by their last column, plus ε: [..., value_size]; 0 if no key was seen."""
    return sums[..., :-1] / (sums[..., -1:] + EPSILON)


def bidirectional(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Unmasked sums [batch, tokens, heads, value_size + 1], in which every query sees every key."""
    query, key, value = (rows.transpose(1, 2) for rows in (query, key, value))
    sums = torch.matmul(key.transpose(-1, -2), value)
    return torch.matmul(query, sums).transpose(1, 2)


class LinearAttentionLayer(RecurrenceLayer):
    """Linear attention over inputs of `hidden_size`; pairs are computed within chunks of `chunk` tokens.

    Learned: `query`, `key`, `value`, `output` (`nn.Linear`, Glorot-uniform weights, zero biases). Features and sums are
    at least float32 for all input dtypes. The last column of the state is the paper's z.
    """

    def __init__(self, heads: Heads, *, hidden_size: int, causal: bool, bias: bool, chunk: int) -> None:
        super().__init__(heads, hidden_size=hidden_size, bias=bias, chunk=chunk)
        self.causal = causal
        self.step_spec = linear_step(heads) if causal else None

    def steps(self, inputs: Inputs) -> Steps:
        """The features of queries and keys, and values with a column of ones."""
        key = features(inputs.key)
        return Steps(features(inputs.query), key, with_ones(inputs.value, key))

    def attend(self, steps: Steps, computed: torch.dtype) -> Tensor:
        """The sums over all earlier tokens if causal, else over all tokens."""
        return super().attend(steps, computed) if self.causal else bidirectional(*steps[:3])

    def weights(self, query: Tensor, source: Tensor | None = None, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """Attention weights [batch, heads, query, key], by which values enter the outputs; zero for padded keys."""
        steps, _ = self.read(query, source, key_padding_mask)
        pairs = steps.query.transpose(1, 2) @ steps.key.permute(0, 2, 3, 1)
        pairs = pairs.tril() if self.causal else pairs
        return pairs / (pairs.sum(-1, keepdim=True) + EPSILON)

    def finish(self, out: Tensor, projected: Projections) -> Tensor:
        """Divide the sums of values by the sums of ones, and project."""
        return super().finish(divided(out), projected)

    def step_inputs(self, projected: Projections, batch: RaggedBatch, state: SlotsInPlace) -> RecurrentStepInputs:
        """See `RecurrenceLayer`."""
        output = OutputInputs(normalizer_eps=EPSILON)
        return dataclasses.replace(super().step_inputs(projected, batch, state), output=output)


class EfficientLayer(nn.Module):
    """Efficient attention (Shen et al. 2018, arXiv 1812.01243, equation 4) over inputs of `hidden_size`.

    Learned: `query`, `key`, `value`, `output` (`nn.Linear`).
    """

    def __init__(self, heads: Heads, *, hidden_size: int, bias: bool) -> None:
        super().__init__()
        self.heads = heads
        into, out = heads.query * heads.key_size, heads.query * heads.value_size
        self.query = fresh_linear(hidden_size, into, bias=bias)
        self.key = fresh_linear(hidden_size, into, bias=bias)
        self.value = fresh_linear(hidden_size, out, bias=bias)
        self.output = fresh_linear(out, hidden_size, bias=bias)

    def forward(self, query: Tensor, source: Tensor | None = None, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """Compute attention over whole sequences [batch, tokens, hidden_size] -> [batch, tokens, hidden_size].

        `key_padding_mask` [batch, tokens], bool, True where a token is real. Raises `InvalidValue` if a source is
        given.
        """
        refuse_source(source)
        channels, tokens = self._softmaxes(query, key_padding_mask)
        value = wide(self._heads(self.value(query)))
        context = torch.matmul(tokens.transpose(-1, -2), value)
        out = torch.matmul(channels, context).transpose(1, 2)
        projected: Tensor = self.output(out.flatten(-2).to(query.dtype))
        return projected

    def weights(self, query: Tensor, source: Tensor | None = None, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """Attention weights [batch, heads, query, key], which `forward` does not compute."""
        refuse_source(source)
        channels, tokens = self._softmaxes(query, key_padding_mask)
        return torch.matmul(channels, tokens.transpose(-1, -2))

    def _softmaxes(self, rows: Tensor, key_padding_mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Softmax of queries over channels, and of keys over tokens, [batch, heads, tokens, key_size] each."""
        channels = wide(self._heads(self.query(rows))).softmax(-1)
        key = wide(self._heads(self.key(rows)))
        if key_padding_mask is None:
            return channels, key.softmax(-2)
        real = key_padding_mask[:, None, :, None]
        # If no token is real, nothing is masked, so that the softmax gives no NaN.
        tokens = torch.where(real | ~real.any(-2, keepdim=True), key, -torch.inf).softmax(-2)
        return channels, torch.where(real, tokens, 0)

    def _heads(self, rows: Tensor) -> Tensor:
        return by_heads(rows, self.heads.query).transpose(1, 2)


def independent(features: int, size: int, generator: Generator | None = None) -> Tensor:
    """Gaussian directions [features, size], float32, N(0, 1)."""
    return torch.randn(features, size, generator=generator)


def orthogonal(features: int, size: int, generator: Generator | None = None) -> Tensor:
    """Directions [features, size], float32, each distributed as N(0, I) and orthogonal within blocks of `size`.

    The rows of random orthogonal matrices, with the lengths of independent Gaussian vectors (Choromanski et al. 2021,
    arXiv 2009.14794, §3.2 and appendix B); the last block is cut if `size` does not divide `features`.
    """
    blocks = -(-features // size)
    gaussian = torch.randn(blocks, size, size, generator=generator)
    unit, upper = torch.linalg.qr(gaussian)
    # The signs make the directions uniformly distributed, which QR alone does not.
    unit = unit * upper.diagonal(dim1=-2, dim2=-1).sign()[:, None, :]
    lengths = independent(features, size, generator).norm(dim=-1, keepdim=True)
    directions: Tensor = unit.transpose(-1, -2).reshape(-1, size)[:features] * lengths
    return directions


class Memory(NamedTuple):
    """The recurrent state after all earlier tokens.

    `sums` [batch, heads, features, value_size + 1] are scaled relative to the largest log feature `top` [batch, heads];
    `seen` [batch, heads, value_size + 1] is the plain sum of values. If the last entry of `seen`, a count, is zero,
    `top` is undefined.
    """

    sums: Tensor
    seen: Tensor
    top: Tensor


def log_features(rows: Tensor, projection: Tensor) -> Tensor:
    """ω·x - |x|²/2 for x = rows / size^(1/4) and each row ω of `projection` [features, size]."""
    scaled: Tensor = rows * rows.shape[-1] ** -0.25
    return torch.matmul(scaled, projection.transpose(0, 1)) - scaled.square().sum(-1, keepdim=True) / 2


def query_features(logs: Tensor, epsilon: float) -> Tensor:
    """The features of queries, scaled so that the largest of each query is 1, plus ε."""
    return (logs - logs.amax(-1, keepdim=True)).exp() + epsilon


def causal_steps(query: Tensor, log_key: Tensor, value: Tensor, before: Memory | None) -> tuple[Steps, Tensor]:
    """The inputs of the recurrence without ε, and the largest log feature [batch, tokens, heads] up to every token.

    `query` contains features; `log_key` is -inf for padded tokens.
    """
    top = log_key.amax(-1)
    start = torch.full_like(top[:, :1], -torch.inf)
    if before is not None:
        start = torch.where(before.seen[..., -1] > 0, before.top, -torch.inf)[:, None]
    running = largest_so_far(torch.cat([start, top], dim=1))
    known = running[:, :-1] > -torch.inf
    running = torch.where(running > -torch.inf, running, 0)
    earlier, running = running[:, :-1], running[:, 1:]
    decay = torch.where(known, earlier - running, 0)
    return Steps(query, (log_key - running[..., None]).exp(), value, decay[..., None]), running


def causal_sums(
    parts: tuple[Tensor, Tensor, Tensor],
    before: Memory | None,
    *,
    plan: RecurrenceDispatcher,
    chunk: int,
    epsilon: float,
) -> tuple[Tensor, Memory]:
    """The causal sums over earlier keys, and the state after the last.

    `parts` are the features of queries, the log features of keys and the values, as in `causal_steps`; `plan` chooses
    the kernel.
    """
    query, log_key, value = parts
    steps, running = causal_steps(query, log_key, value, before)
    out, sums = plan.run(steps, None if before is None else before.sums, chunk)
    seen = value.cumsum(1) if before is None else value.cumsum(1) + before.seen[:, None]
    out = out + epsilon * query.sum(-1, keepdim=True) * seen
    return out, Memory(sums, seen[:, -1], running[:, -1])


def full_sums(query: Tensor, log_key: Tensor, value: Tensor, epsilon: float) -> Tensor:
    """The sums over all keys, not causal; `query` contains features."""
    key = key_features(log_key, epsilon)
    query, key, value = (rows.transpose(1, 2) for rows in (query, key, value))
    return torch.matmul(query, torch.matmul(key.transpose(-1, -2), value)).transpose(1, 2)


def key_features(log_key: Tensor, epsilon: float) -> Tensor:
    """The features of keys, scaled so that the largest of all keys of a head is 1, plus ε."""
    if not log_key.shape[1]:
        return log_key
    top = log_key.amax((1, 3), keepdim=True)
    return (log_key - torch.where(top > -torch.inf, top, 0)).exp() + epsilon


def pair_sums(query: Tensor, log_key: Tensor, value: Tensor, *, causal: bool, epsilon: float) -> Tensor:
    """The unnormalised attention weights [batch, heads, query, key]."""
    real = value[..., -1].transpose(1, 2)[:, :, None, :]
    if causal:
        steps, _ = causal_steps(query, log_key, value, None)
        extra = epsilon * query.sum(-1).transpose(1, 2)[..., None]
        return (effective_weights(steps) + extra.expand(-1, -1, -1, real.shape[-1]).tril()) * real
    return pairs(query, key_features(log_key, epsilon), causal=False) * real


def pairs(query: Tensor, key: Tensor, *, causal: bool) -> Tensor:
    """Products of features, [batch, heads, query, key]; if causal, those of later keys are zero."""
    products = torch.matmul(query.transpose(1, 2), key.permute(0, 2, 3, 1))
    return products.tril() if causal else products


def normalised(sums: Tensor) -> Tensor:
    """Normalise weights [..., key] to sum to one; rows of zeros stay zeros."""
    total = sums.sum(-1, keepdim=True)
    return sums / torch.where(total > 0, total, 1)


def quotient(sums: Tensor) -> Tensor:
    """Divide sums [..., value_size + 1] by their last column: [..., value_size]; 0 if no key was seen."""
    ones = sums[..., -1:]
    return sums[..., :-1] / torch.where(ones > 0, ones, 1)


class RandomFeatureLayer(LinearAttentionLayer):
    """Linear attention with random features along the directions `projection` [features, key_size].

    The projection is a buffer that is saved with the layer and changed only by the method `redraw`. With the argument
    `redraw` N, new directions are drawn after every N-th update of the weights, counted in the buffer `passes`, from
    torch's global generator.
    """

    projection: Tensor
    passes: Tensor

    def __init__(
        self,
        heads: Heads,
        *,
        features: int,
        epsilon: float,
        redraw: int = 0,
        **sizes: Any,
    ) -> None:
        super().__init__(heads, **sizes)
        self.step_spec = None
        self.epsilon = epsilon
        self.redraw_every = redraw
        self.register_buffer("projection", orthogonal(features, heads.key_size))
        if redraw:
            self.register_buffer("passes", torch.zeros((), dtype=torch.int64))

    def after_update(self, summed: Callable[[Tensor], Tensor]) -> None:  # noqa: ARG002 -- counts need no sum
        """Count an update of the weights, and draw new directions if they are due."""
        if self.redraw_every and self.training:
            self.passes += 1
            if int(self.passes) % self.redraw_every == 0:
                self.redraw()

    def redraw(self, generator: Generator | None = None) -> None:
        """Draw new orthogonal directions, as the paper does at intervals in training.

        Raises `WrongState` in evaluation mode, where outputs must not change.
        """
        if not self.training:
            raise WrongState(
                "performer: random features are not redrawn in evaluation mode; call train() before redraw()"
            )
        features, size = self.projection.shape
        # A new tensor, as a backward pass may still need the old one.
        self.projection = orthogonal(features, size, generator).to(self.projection)

    def finish(self, out: Tensor, projected: Projections) -> Tensor:
        """Divide the sums of values by the sums of ones, and project."""
        found: Tensor = self.output(quotient(out).flatten(-2).to(projected.rows.dtype))
        return found


class ReluFeatureLayer(RandomFeatureLayer):
    """Performer with the features max(ω·x, 0) + ε (Choromanski et al. 2021, §4.2: the generalised kernel)."""

    def steps(self, inputs: Inputs) -> Steps:
        """The features of queries and keys, and values with a column of ones."""
        directions = wide(self.projection).transpose(0, 1)
        query, key = (relu(wide(rows) @ directions) + self.epsilon for rows in (inputs.query, inputs.key))
        return Steps(query, key, with_ones(inputs.value, key))

    def weights(self, query: Tensor, source: Tensor | None = None, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """Attention weights [batch, heads, query, key], by which values enter the outputs; zero for padded keys."""
        steps, _ = self.read(query, source, key_padding_mask)
        return normalised(pairs(steps.query, steps.key, causal=self.causal))


class SoftmaxFeatureLayer(RandomFeatureLayer):
    """Performer with the features e^(ω·x - |x|²/2), which are softmax attention in expectation."""

    def steps(self, inputs: Inputs) -> Steps:
        """The features of queries, log features of keys, and values with a column of ones."""
        projection = wide(self.projection)
        query, key = (log_features(wide(rows), projection) for rows in (inputs.query, inputs.key))
        return Steps(query_features(query, self.epsilon), key, with_ones(inputs.value, key))

    def forward(self, query: Tensor, source: Tensor | None = None, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """Compute attention over whole sequences [batch, tokens, hidden_size] -> [batch, tokens, hidden_size].

        `key_padding_mask` [batch, tokens], bool, True where a token is real. Raises `InvalidValue` if a source is
        given.
        """
        parts = self._masked(query, source, key_padding_mask)
        if not self.causal:
            sums = full_sums(*parts, self.epsilon)
        elif query.shape[1]:
            sums, _ = self._sums(parts, None, self.chunk)
        else:
            sums = parts[2]
        return self.finish(sums, Projections(self, query))

    def weights(self, query: Tensor, source: Tensor | None = None, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """Attention weights [batch, heads, query, key], by which values enter the outputs; zero for padded keys."""
        parts = self._masked(query, source, key_padding_mask)
        return normalised(pair_sums(*parts, causal=self.causal, epsilon=self.epsilon))

    def step(self, query: Tensor, batch: RaggedBatch, state: LayerState) -> Tensor:
        """Compute one engine step over the new rows [tokens, hidden_size] of many requests; returns the same shape.

        Reads and replaces the state "memory": "S" [requests, heads, features, value_size + 1], "seen" [requests, heads,
        value_size + 1] and "top" [requests, heads], all float32; see `Memory`.
        """
        held = state["memory"].read()
        projected = Projections(self, query[None])
        steps, _ = self._steps(projected, Places(batch.positions[None], batch.longest), None, None)
        before = Memory(*(held[name].to(steps.value.dtype) for name in ("S", "seen", "top")))
        if batch.decoding:
            query_rows, key, value = (part.transpose(0, 1) for part in steps[:3])
            sums, after = self._sums((query_rows, key, value), before, 1)
            sums = sums.transpose(0, 1)
        else:
            pieces, memories = [], []
            for span in batch.spans():
                query_rows, key, value = (part[:, span.start : span.stop] for part in steps[:3])
                known = Memory(*(part[span.request, None] for part in before))
                seen, memory = self._sums((query_rows, key, value), known, self.chunk)
                pieces.append(seen)
                memories.append(memory)
            sums = torch.cat(pieces, dim=1)
            after = Memory(*(torch.cat(parts) for parts in zip(*memories, strict=True)))
        kept = zip(("S", "seen", "top"), after, strict=True)
        state["memory"].write({name: part.to(held[name].dtype) for name, part in kept})
        return self.finish(sums, projected)[0]

    def _sums(self, parts: tuple[Tensor, Tensor, Tensor], before: Memory | None, chunk: int) -> tuple[Tensor, Memory]:
        """The causal sums and the state after them; see `causal_sums`."""
        return causal_sums(parts, before, plan=self.plan, chunk=chunk, epsilon=self.epsilon)

    def _masked(
        self, rows: Tensor, source: Tensor | None, key_padding_mask: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The features of queries, log features of keys and values; padded keys are -inf, and their values zero."""
        steps, _ = self.read(rows, source, None)
        if key_padding_mask is None:
            return steps.query, steps.key, steps.value
        real = key_padding_mask[..., None, None]
        return steps.query, torch.where(real, steps.key, -torch.inf), torch.where(real, steps.value, 0)
