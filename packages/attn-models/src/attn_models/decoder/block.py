"""One decoder block: attention and feed-forward with residual connections."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from attn_core import Capability, Fields, LayerState, RaggedBatch
from attn_core.errors import Incompatible, InternalError
from attn_core.kernels.block import BlockParts, BlockStep
from attn_schema.decoder import DecoderConfig
from torch import Tensor, nn

from attn_models.attention import LayerAttention
from attn_models.decoder.layers import (
    FeedForward,
    GatedFeedForward,
    build_feed_forward,
    build_norm,
    initialise_block,
    normed_sum,
)
from attn_models.decoder.mixture_of_experts import MixtureOfExperts


def require_same_shape(given: Tensor, like: Tensor) -> Tensor:
    """Return `given` if it has the shape of `like`; a different shape could be broadcast without an error.

    Raises `InternalError` with both shapes if they differ.
    """
    if given.shape != like.shape:
        shapes = tuple(given.shape), tuple(like.shape)
        raise InternalError(f"the attention returned the shape {shapes[0]}; needed: {shapes[1]}")
    return given


STATE = "inputs"
FIELD = "x"


def replay_step(layer: Any, inputs: Tensor, batch: RaggedBatch, state: LayerState) -> Tensor:
    """Decode with an `AttentionLayer` that has no incremental `step`, by running it on the whole sequences again.

    `inputs` [tokens, width] are the new tokens of all requests; the result is [tokens, width]. `state` holds the
    `Paged` state "inputs" with the field "x" [width]: the inputs of all tokens so far. Requests are run one by one:
    padding could change the result of a mechanism that depends on the length.
    """
    view = state[STATE]
    view.append({FIELD: inputs})
    outputs = []
    for span in batch.spans():
        rows = view.rows([span.request])
        remembered = (
            rows.fields[FIELD] if rows.key_padding_mask is None else rows.fields[FIELD][rows.key_padding_mask][None]
        )
        outputs.append(layer(remembered)[0, remembered.shape[1] - (span.stop - span.start) :])
    return torch.cat(outputs)


@dataclass(frozen=True, eq=False)
class SharedTokens:
    """The tokens that documents share: `index` [sum of lengths] are the places of each document's tokens among the
    different ones, `first` [different tokens] those of the different ones where they come first in the documents."""

    index: Tensor
    first: Tensor


def attended_documents(layer: Any, rows: Tensor, lengths: Tensor) -> Tensor:
    """The output of a layer for `rows` [batch, tokens, width] that hold documents of these `lengths` [documents] end to
    end, each computed as if it were alone.

    A layer that `takes_lengths` computes them together; other layers are called once per document.
    """
    if layer.takes_lengths:
        together: Tensor = layer(rows, lengths=lengths)
        return together
    return torch.cat([layer(document) for document in torch.split(rows, lengths.tolist(), dim=1)], dim=1)


class Block(nn.Module):
    """x + F(norm(x)) for both sublayers F (pre-norm, arXiv 2002.04745), norm(x + F(x)) (post-norm),
    x + norm(F(norm(x))) (both, Gemma 2, arXiv 2408.00118), or x + norm(F(x)) (after, OLMo 2, arXiv 2501.00656).

    The term that is added to x is multiplied by `residual_multiplier`.
    """

    def __init__(self, config: DecoderConfig, attention: LayerAttention, *, sparse: bool = False) -> None:
        super().__init__()
        self.mechanism = attention.mechanism
        self.incremental = attention.mechanism.can(Capability.INCREMENTAL)
        self.pre_norm = config.norm_place != "post"
        self.fusable = config.norm_place in ("pre", "both") and config.residual_multiplier == 1
        self.multiplier = config.residual_multiplier
        before = config.norm_place != "after"
        self.attention_norm: nn.Module = build_norm(config) if before else nn.Identity()
        # Any: a mechanism may build any module that has the methods of AttentionLayer.
        self.attention: Any = attention.mechanism.build(attention.config)
        self.feed_forward_norm: nn.Module = build_norm(config) if before else nn.Identity()
        self.feed_forward: FeedForward | GatedFeedForward | MixtureOfExperts | nn.Identity = (
            MixtureOfExperts(config, build_feed_forward) if sparse else build_feed_forward(config)
        )
        after = config.norm_place in ("both", "after")
        self.attended_norm: nn.Module = build_norm(config) if after else nn.Identity()
        self.fed_norm: nn.Module = build_norm(config) if after else nn.Identity()
        initialise_block(self, attention, config.num_layers)
        self.dropout = nn.Dropout(config.dropout) if config.dropout else nn.Identity()
        self.joined: BlockStep | None = None

    def forward(
        self,
        hidden: Tensor,
        shared_kv: Fields | None = None,
        lengths: Tensor | None = None,
        shared: SharedTokens | None = None,
    ) -> Tensor:
        """Compute whole sequences, [batch, tokens, width] to [batch, tokens, width]; `shared_kv` are another block's
        keys and values. With `lengths` [documents], int64, on the CPU, each sequence holds documents of these lengths
        end to end, and tokens attend only to their own document. With `shared`, the tokens that documents share are in
        it once.
        """
        entering = self.entering(hidden)
        if lengths is None:
            return self._around(hidden, self.attention(entering, **given(shared_kv)))
        if shared is None:
            return self._around(hidden, attended_documents(self.attention, entering, lengths))
        return self._around(hidden, self.attention(entering, lengths=lengths, shared=(shared.index, shared.first)))

    def project_kv(self, hidden: Tensor) -> Fields:
        """Keys and values for blocks that share them, fields [batch, tokens, ...]; `hidden` [batch, tokens, width]."""
        lent: Fields = self.attention.project_kv(self.entering(hidden))
        return lent

    def step(self, hidden: Tensor, batch: RaggedBatch, state: LayerState) -> Tensor:
        """Compute the new tokens of many requests, [tokens, width] to [tokens, width]; may overwrite `hidden`."""
        if self.joined is not None:
            done = self.joined.step(hidden, batch, state)
            if done is not None:
                return done
        if not self.pre_norm:
            return self._around(hidden, self._attended(hidden, hidden, batch, state))
        after, added = self.step_apart(hidden, None, batch, state)
        return after + added

    def step_apart(
        self, hidden: Tensor, added: Tensor | None, batch: RaggedBatch, state: LayerState
    ) -> tuple[Tensor, Tensor]:
        """Like `step` on `hidden` + `added`, for a pre-norm block; returns two parts whose sum is the result.

        Keeping them apart lets the next norm add them in a fused kernel.
        """
        if added is None:
            entering = self.entering(hidden)
        else:
            hidden, entering = normed_sum(self.attention_norm, hidden, added)
        attended = self._attended(hidden, entering, batch, state)
        after, fed = normed_sum(self.feed_forward_norm, hidden, self.adding(self.attended_norm(attended)))
        return after, self.adding(self.fed_norm(self.feed_forward(fed)))

    def adding(self, rows: Tensor) -> Tensor:
        """The term that a sublayer with this output [..., width] adds to the residual stream."""
        dropped: Tensor = self.dropout(rows)
        return dropped if self.multiplier == 1 else dropped * self.multiplier

    def _attended(self, hidden: Tensor, entering: Tensor, batch: RaggedBatch, state: LayerState) -> Tensor:
        if self.incremental:
            attended = self.attention.step(entering, batch, state)
        else:
            attended = replay_step(self.attention, entering, batch, state)
        return require_same_shape(attended, hidden)

    def parts(self) -> BlockParts | None:
        """The parts of a prepacked block for a fused block kernel; None if no kernel supports its architecture, or for
        a subclass, which may compute something else."""
        if type(self) is not Block:
            return None
        attention = self.attention.parts() if hasattr(self.attention, "parts") else None
        gated = self.feed_forward.parts() if isinstance(self.feed_forward, GatedFeedForward) else None
        first, second = self.attention_norm, self.feed_forward_norm
        if attention is None or gated is None or not self.fusable:
            return None
        if not isinstance(first, nn.RMSNorm) or not isinstance(second, nn.RMSNorm):
            return None
        return BlockParts(
            attention=attention,
            feed_forward=gated,
            attention_gain=first.weight,
            feed_forward_gain=second.weight,
            eps=first.eps or 0.0,
            attended_gain=getattr(self.attended_norm, "weight", None),
            fed_gain=getattr(self.fed_norm, "weight", None),
        )

    def weights(self, hidden: Tensor, shared_kv: Fields | None = None) -> Tensor:
        """Attention weights [batch, heads, query, key] of whole sequences [batch, tokens, width].

        Raises `Incompatible` for a mechanism without attention weights.
        """
        if not self.mechanism.can(Capability.WEIGHTS):
            name = self.mechanism.name
            raise Incompatible(f"mechanism {name!r} returns no attention weights", mechanism=name)
        weights: Tensor = self.attention.weights(self.entering(hidden), **given(shared_kv))
        return weights

    def entering(self, hidden: Tensor) -> Tensor:
        """The input of the attention: `hidden`, normalised in a pre-norm block."""
        normed: Tensor = self.attention_norm(hidden) if self.pre_norm else hidden
        return normed

    def _around(self, hidden: Tensor, attended: Tensor) -> Tensor:
        added = self.adding(self.attended_norm(attended))
        if self.pre_norm:
            after, fed = normed_sum(self.feed_forward_norm, hidden, added)
            return after + self.adding(self.fed_norm(self.feed_forward(fed)))
        _, after = normed_sum(self.attention_norm, hidden, added)
        normed: Tensor = self.feed_forward_norm(after + self.dropout(self.feed_forward(after)))
        return normed


class ParallelBlock(Block):
    """x + attention(norm(x)) + feed_forward(norm'(x)): both sublayers read the input of the block (GPT-J; GPT-NeoX,
    arXiv 2204.06745, section 2.1). With a shared norm both use `attention_norm`; `feed_forward_norm` is the identity.
    """

    def __init__(self, config: DecoderConfig, attention: LayerAttention, *, sparse: bool = False) -> None:
        super().__init__(config, attention, sparse=sparse)
        self.shares_norm = config.norm_place == "parallel_shared"
        if self.shares_norm:
            self.feed_forward_norm = nn.Identity()

    def step_apart(
        self, hidden: Tensor, added: Tensor | None, batch: RaggedBatch, state: LayerState
    ) -> tuple[Tensor, Tensor]:
        """See `Block.step_apart`."""
        if added is None:
            entering = self.entering(hidden)
        else:
            hidden, entering = normed_sum(self.attention_norm, hidden, added)
        return hidden, self._both(hidden, entering, self._attended(hidden, entering, batch, state))

    def _around(self, hidden: Tensor, attended: Tensor) -> Tensor:
        return hidden + self._both(hidden, self.entering(hidden), attended)

    def _both(self, hidden: Tensor, entering: Tensor, attended: Tensor) -> Tensor:
        """The sum of both sublayers, to be added to `hidden`; `entering` is the normalised input of the attention."""
        fed = self.feed_forward(entering if self.shares_norm else self.feed_forward_norm(hidden))
        return self.adding(attended + fed)


class AttentionBlock(Block):
    """x + attention(norm(x)), without a feed-forward: a layer of Mamba-2 (arXiv 2405.21060)."""

    def __init__(self, config: DecoderConfig, attention: LayerAttention, *, sparse: bool = False) -> None:
        super().__init__(config, attention, sparse=sparse)
        self.feed_forward_norm = nn.Identity()

    def step_apart(
        self, hidden: Tensor, added: Tensor | None, batch: RaggedBatch, state: LayerState
    ) -> tuple[Tensor, Tensor]:
        """See `Block.step_apart`."""
        if added is None:
            entering = self.entering(hidden)
        else:
            hidden, entering = normed_sum(self.attention_norm, hidden, added)
        return hidden, self.adding(self._attended(hidden, entering, batch, state))

    def _around(self, hidden: Tensor, attended: Tensor) -> Tensor:
        return hidden + self.adding(attended)


def build_block(config: DecoderConfig, attention: LayerAttention, *, sparse: bool = False) -> Block:
    """The block that `norm_place` and `feed_forward` name."""
    if config.feed_forward == "none":
        return AttentionBlock(config, attention, sparse=sparse)
    kind = ParallelBlock if config.norm_place.startswith("parallel") else Block
    return kind(config, attention, sparse=sparse)


def given(shared_kv: Fields | None) -> dict[str, Fields]:
    """The keyword argument `shared_kv` for a layer that uses another layer's keys and values; empty if it is None."""
    return {} if shared_kv is None else {"shared_kv": shared_kv}


class SharedKeyValues:
    """Keys and values that blocks share, computed once; `kv_sharing[i]` is the block whose own block i uses."""

    def __init__(self, kv_sharing: Sequence[int]) -> None:
        self._kv_sharing = kv_sharing
        self._wanted = {source_layer for layer, source_layer in enumerate(kv_sharing) if source_layer < layer}
        self._lent: dict[int, Fields] = {}

    def of(self, layer: int, block: Block, hidden: Tensor) -> Fields | None:
        """The shared keys and values of block `layer` with input `hidden`; None if it uses its own and no other block
        uses them.
        """
        if layer in self._wanted:
            self._lent[layer] = block.project_kv(hidden)
        return self._lent.get(self._kv_sharing[layer])
