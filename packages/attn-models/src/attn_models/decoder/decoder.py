"""A language model of causal attention blocks, with any installed mechanism."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, cast

import torch
from attn_core import Fields, RaggedBatch
from attn_core.batch import ModelState
from attn_core.errors import Incompatible, InvalidValue
from attn_core.kernels.block import StackStep
from attn_core.kernels.devices import sent
from attn_core.kernels.rowwise import Targets
from attn_core.models import FindsLargest
from attn_core.rotary import sinusoidal
from attn_core.state_faults import names_wrong_states
from attn_core.stores import ModelSpecs
from attn_schema.decoder import DecoderConfig
from torch import Tensor, nn

from attn_models.attention import LayerAttention, layer_attentions
from attn_models.decoder.block import Block, SharedKeyValues, SharedTokens, build_block
from attn_models.decoder.layers import build_norm, initialise, normed_sum
from attn_models.decoder.packing import drops, packed_rows, packs
from attn_models.losses import capped, linear_cross_entropy, linear_losses, losses, mean_loss


class PredictionModule(nn.Module):
    """h'ᵢ = TRM(M [norm(Emb(tᵢ₊ₖ)); norm(hᵢ)]), from which tᵢ₊ₖ₊₁ is predicted (DeepSeek-V3, arXiv 2412.19437, 2.2).

    M's input begins with the embedding, as in the published weights; the paper writes it second. TRM is a block like
    the decoder's last, with its own keys and values. `norm` precedes the unembedding, which is shared with the decoder.
    """

    def __init__(self, config: DecoderConfig, last: LayerAttention) -> None:
        super().__init__()
        self.token_norm, self.hidden_norm = build_norm(config), build_norm(config)
        self.join = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        own = dataclasses.replace(last, config=dataclasses.replace(last.config, shares_kv=False))
        self.block = build_block(config, own, sparse=config.is_sparse(config.num_layers - 1))
        self.norm = build_norm(config)
        initialise(self.join)

    def forward(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        """The hidden states of depth k, from those of depth k - 1 (`hidden`) and the embeddings of the tokens k
        positions later (`embedded`), all [batch, tokens, width]."""
        joined = self.join(torch.cat([self.token_norm(embedded), self.hidden_norm(hidden)], dim=-1))
        normed: Tensor = self.norm(self.block(joined))
        return normed


class Decoder(nn.Module):
    """Embeddings, blocks, a last norm unless blocks are post-norm, and the unembedding.

    Implements `attn_core.models.LanguageModel`. Tokens are int64. After `quantize_model`, `quantization` is the storage
    of the weights and `head` the unembedding. For context parallelism `places` may be set: a function that returns,
    for the number of tokens given to `forward`, the positions of this rank's tokens, or None if the rank has all of
    them. A subclass with its own blocks overrides `build_block`.
    """

    output_layers: ClassVar[tuple[str, ...]] = ("unembedding",)
    """Names of the layers that map hidden states to logits."""

    takes_lengths: ClassVar[bool] = True
    """Whether `hidden` takes the lengths of documents packed end to end."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        attentions = layer_attentions(config)
        self.config = config
        self.vocab_size = config.vocab_size
        self.max_seq_len = config.max_seq_len
        # Any: an nn.Embedding, or a StoredEmbedding where weights are packed.
        self.embedding: Any = nn.Embedding(config.vocab_size, config.hidden_size)
        learned = config.positions == "learned"
        rows = config.max_seq_len + config.position_offset
        self.positions: Any = nn.Embedding(rows, config.hidden_size) if learned else None
        self.embedding_norm: nn.Module = build_norm(config) if config.embedding_norm else nn.Identity()
        self.dropout: nn.Module = nn.Dropout(config.dropout) if config.dropout else nn.Identity()
        self.blocks = nn.ModuleList(
            self.build_block(config, attention, sparse=config.is_sparse(layer))
            for layer, attention in enumerate(attentions)
        )
        self.norm: nn.Module = build_norm(config) if config.norm_place != "post" else nn.Identity()
        self.unembedding = (
            None
            if config.tie_word_embeddings
            else nn.Linear(config.hidden_size, config.vocab_size, bias=config.unembedding_bias)
        )
        self.head: Any = None
        self.adapted_unembedding: Callable[[], Tensor | None] | None = None
        """The unembedding [vocab_size, width] of an adapter, while one is in use that changes it."""
        self.stack: StackStep | None = None
        self.quantization: str | None = None
        self.places: Callable[[int], Tensor | None] | None = None
        self.predictors = nn.ModuleList(
            PredictionModule(config, attentions[-1]) for _ in range(config.num_nextn_predict_layers)
        )
        self._kv_sharing = [config.source_layer(layer) for layer in range(config.num_layers)]
        self._source_layer_names = [layer_name(source_layer) for source_layer in self._kv_sharing]
        self._specs = {layer_name(i): attention.states for i, attention in enumerate(attentions)}
        self._mechanisms = {layer_name(i): attention.mechanism.name for i, attention in enumerate(attentions)}
        for module in (self.embedding, self.positions, self.unembedding):
            if module is not None:
                initialise(module)
        if config.positions == "sinusoidal" or config.scale_embedding:
            # Multiplied by √width, the embeddings have the scale of the sinusoids that are added to them.
            initialise(self.embedding, config.hidden_size**-0.5)

    def build_block(self, config: DecoderConfig, attention: LayerAttention, *, sparse: bool) -> Block:
        """A new block around the attention of a layer; a `sparse` one has the config's experts as its feed-forward."""
        return build_block(config, attention, sparse=sparse)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [batch, tokens, vocabulary] of whole sequences [batch, tokens]."""
        return self.logits(self.hidden(tokens))

    def hidden(self, tokens: Tensor, lengths: Sequence[int] | None = None) -> Tensor:
        """Hidden states [batch, tokens, width] of whole sequences [batch, tokens]: the input of `logits`.

        With `lengths` each sequence holds documents of these lengths end to end, and each is computed as if it were
        alone. This raises `Incompatible` for models whose layers share keys and values.
        """
        if lengths is None:
            placed = self.embed(tokens, torch.arange(tokens.shape[1], device=tokens.device))
            return cast("Tensor", self.norm(self._through_blocks(placed)))
        self.require_documents()
        positions = sent(torch.cat([torch.arange(length, device="cpu") for length in lengths]), tokens.device)
        hidden = self._through_blocks(self.embed(tokens, positions, longest=max(lengths)), lengths)
        return cast("Tensor", self.norm(hidden))

    def hidden_at(self, tokens: Tensor, kept: Tensor) -> Tensor:
        """Hidden states [places, width] at the places `kept`, bool [batch, tokens], of whole sequences [batch, tokens].

        Where it saves time, neither padding nor what comes after the last place of a sequence is computed, and what
        sequences have in common at their beginning is computed once.
        """
        if not (self._has_own_rows() and packs(self, kept) and bool(kept.any())):
            return self.hidden(tokens)[kept]
        rows = packed_rows(tokens, kept, share=not drops(self))
        hidden = self.embed(rows.tokens, rows.positions, longest=max(rows.lengths))
        return cast("Tensor", self.norm(self._through_blocks(hidden, rows.lengths, rows.shared)[0, rows.asked]))

    def _has_own_rows(self) -> bool:
        """Whether rows are computed as this class does it, without keys and values that layers share."""
        lent = any(source < layer for layer, source in enumerate(self._kv_sharing))
        return not lent and type(self).hidden is Decoder.hidden and type(self).embed is Decoder.embed

    def _through_blocks(
        self, hidden: Tensor, lengths: Sequence[int] | None = None, shared: SharedTokens | None = None
    ) -> Tensor:
        """What leaves the last block, for what enters the first, [batch, tokens, width]; see `Block.forward`."""
        # A tensor, so that compiled blocks work for documents of any lengths.
        documents: dict[str, Any] = {} if lengths is None else {"lengths": torch.tensor(lengths, device="cpu")}
        if shared is not None:
            documents["shared"] = shared
        loans = SharedKeyValues(self._kv_sharing)
        for index, block in enumerate(self._blocks()):
            hidden = block(hidden, loans.of(index, block, hidden), **documents)
        return hidden

    def require_documents(self) -> None:
        """Raise `Incompatible` unless a sequence can hold several documents that are computed independently."""
        if any(source < layer for layer, source in enumerate(self._kv_sharing)):
            raise Incompatible("several documents in one sequence are not supported where layers share keys and values")

    def next_token_loss(
        self,
        tokens: Tensor,
        targets: Tensor,
        ignored: int = -100,
        smoothing: float = 0.0,
        lengths: Sequence[int] | None = None,
    ) -> Tensor:
        """Mean cross-entropy, in nats per token, of the next tokens `targets` [batch, tokens] after `tokens` [batch,
        tokens], over targets that are not `ignored`, with label smoothing by `smoothing`; computed in chunks if there
        are many logits. `lengths` is that of `hidden`."""
        kept = targets != ignored
        # Compute no logits for ignored targets, except on a GPU, where finding them would need a synchronisation.
        some = kept.device.type == "cpu" and not bool(kept.all()) and bool(kept.any())
        if some and lengths is None:
            hidden, targets = self.hidden_at(tokens, kept), targets[kept]
        else:
            hidden = self.hidden(tokens, lengths)
            if some:
                hidden, targets = hidden[kept], targets[kept]
        return self._loss(hidden, targets, Targets(ignored=ignored, smoothing=smoothing))

    def losses_at(self, tokens: Tensor, targets: Tensor, ignored: int = -100) -> Tensor:
        """The cross-entropies [places], in nats and at least float32, of the `targets` [batch, tokens] after `tokens`
        [batch, tokens] that are not `ignored`, row by row; computed in chunks if there are many logits."""
        kept = targets != ignored
        return self._loss(self.hidden_at(tokens, kept), targets[kept], Targets(ignored=ignored), each=True)

    def training_loss(self, tokens: Tensor, targets: Tensor, ignored: int = -100, smoothing: float = 0.0) -> Tensor:
        """`next_token_loss`, and `nextn_predict_loss_weight` times the mean loss of multi-token prediction."""
        if not len(self.predictors):
            return self.next_token_loss(tokens, targets, ignored, smoothing)
        hidden, length, judged = self.hidden(tokens), tokens.shape[1], Targets(ignored=ignored, smoothing=smoothing)
        loss, later = self._loss(hidden, targets, judged), hidden.new_zeros(())
        for depth, predictor in enumerate(self.predictors[: length - 1], start=1):
            known = torch.arange(depth, length, device=tokens.device)
            hidden = predictor(hidden[:, : length - depth], self.embed(tokens[:, depth:], known))
            later = later + self._loss(hidden, targets[:, depth:], judged)
        return loss + self.config.nextn_predict_loss_weight * later / max(len(self.predictors), 1)

    @names_wrong_states
    def step(self, tokens: Tensor, batch: RaggedBatch, state: ModelState) -> Tensor:
        """Hidden states [tokens, width] of the new tokens [tokens] of many requests."""
        hidden = self.embed(tokens, batch.positions)
        states = (state[source_layer] for source_layer in self._source_layer_names)
        done = None if self.stack is None else self.stack.step(hidden, batch, states)
        if done is not None:
            return cast("Tensor", self.norm(done))
        blocks, apart = (
            self._blocks(),
            self.config.norm_place != "post" and type(self).build_block is Decoder.build_block,
        )
        if apart and all(block.joined is None for block in blocks):
            added = None
            for source_layer, block in zip(self._source_layer_names, blocks, strict=True):
                hidden, added = block.step_apart(hidden, added, batch, state[source_layer])
            return normed_sum(self.norm, hidden, cast("Tensor", added))[1]
        for source_layer, block in zip(self._source_layer_names, blocks, strict=True):
            hidden = block.step(hidden, batch, state[source_layer])
        return cast("Tensor", self.norm(hidden))

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [..., vocabulary] of hidden states [..., width]."""
        weight = self._unembedding()
        if weight is None:
            logits: Tensor = self.head(hidden)
        else:
            logits = nn.functional.linear(hidden, weight, getattr(self.unembedding, "bias", None))
        if self.config.logit_scale != 1:
            logits = logits * self.config.logit_scale
        return capped(logits, self.config.final_logit_softcapping)

    def greedy_tokens(self, hidden: Tensor) -> Tensor | None:
        """See `attn_core.models.GreedyHead`; supported by a packed unembedding without a bias or a soft cap, which
        could make logits equal."""
        if (
            isinstance(self.head, FindsLargest)
            and self._unembedding() is None
            and not self.config.unembedding_bias
            and self.config.final_logit_softcapping is None
        ):
            return self.head.largest(hidden)
        return None

    @property
    def batch_invariant(self) -> bool:
        """See `attn_core.models.BatchInvariant`: the fused kernel of all blocks sums each row in a fixed order."""
        return self.stack is not None and self.head is not None

    def take_apart(self, *, unless_composed: bool = False) -> None:
        """Disable the fused kernels of whole blocks, so that each part of a block is computed by itself; with
        `unless_composed` only if one of them is not `BlockStep.composed`."""
        steps = [block.joined for block in self._blocks() if block.joined is not None]
        if unless_composed and all(getattr(step, "composed", False) for step in steps):
            return
        self.stack = None
        for block in self._blocks():
            block.joined = None

    def state_specs(self) -> ModelSpecs:
        """The state specs of every layer, by layer name."""
        return self._specs

    def take_states_of_layers(self) -> None:
        """Update `state_specs` to the layers as they are now, after tensor parallelism split their heads over ranks."""
        layers = (block.attention for block in self._blocks())
        self._specs = {layer_name(i): layer.mechanism.state(layer.mechanism_config) for i, layer in enumerate(layers)}

    def layer_mechanisms(self) -> Mapping[str, str]:
        """The mechanism of each layer by layer name."""
        return self._mechanisms

    def encode(self, source: Tensor) -> Mapping[str, Mapping[str, Fields]]:
        """Always raises `Incompatible`: a decoder has no encoder."""
        raise Incompatible(f"a decoder has no encoder; {len(source)} encoder tokens were given")

    def attention_maps(self, tokens: Tensor, layers: Sequence[int]) -> dict[int, Tensor]:
        """Attention weights [heads, query, key] by layer of one sequence [tokens].

        Raises `InvalidValue` for a layer that does not exist, `Incompatible` for one without attention weights.
        """
        for layer in layers:
            if not 0 <= layer < len(self.blocks):
                raise InvalidValue.of("layers", layer, f"0 to {len(self.blocks) - 1}")
        maps = {}
        hidden = self.embed(tokens[None], torch.arange(len(tokens), device=tokens.device))
        loans = SharedKeyValues(self._kv_sharing)
        for index, block in enumerate(self._blocks()[: max(layers, default=-1) + 1]):
            shared_kv = loans.of(index, block, hidden)
            if index in layers:
                maps[index] = block.weights(hidden, shared_kv)[0]
            hidden = block(hidden, shared_kv)
        return maps

    def embed(self, tokens: Tensor, positions: Tensor, longest: int | None = None) -> Tensor:
        """What enters the first block, [..., width] of tokens [...] at these positions, in sequences of `longest`.

        A family whose blocks take more than one row of this width per token overrides it, and `norm`, which gets what
        leaves the last block.
        """
        if longest is None:
            longest = tokens.shape[1] if tokens.ndim > 1 else 0
        if longest > self.max_seq_len:
            raise InvalidValue.of("tokens", f"{longest} tokens", f"at most the context of {self.max_seq_len} tokens")
        placed = None if self.places is None or tokens.ndim < 2 else self.places(tokens.shape[1])
        positions = positions if placed is None else placed.to(tokens.device)
        hidden: Tensor = self.embedding(tokens)
        if self.config.scale_embedding:
            # Gemma too rounds the factor to the dtype of the weights first.
            hidden = hidden * hidden.new_tensor(math.sqrt(self.config.hidden_size))
        if self.config.embedding_multiplier != 1:
            hidden = hidden * self.config.embedding_multiplier
        if self.config.positions == "sinusoidal":
            sinusoids = sinusoidal(positions, self.config.hidden_size).to(hidden)
            hidden = hidden * math.sqrt(self.config.hidden_size) + sinusoids
        if self.positions is not None:
            hidden = hidden + self.positions(positions + self.config.position_offset)
        dropped: Tensor = self.dropout(self.embedding_norm(hidden))
        return dropped

    def _unembedding(self) -> Tensor | None:
        """The unembedding [vocab_size, width]; None if it is packed."""
        changed = None if self.adapted_unembedding is None else self.adapted_unembedding()
        if changed is not None or self.head is not None:
            return changed
        return cast("Tensor", self.embedding.weight if self.unembedding is None else self.unembedding.weight)

    def _loss(self, hidden: Tensor, ids: Tensor, judged: Targets, *, each: bool = False) -> Tensor:
        """The mean loss of hidden states [..., width], or with `each` all losses [rows] of [rows, width]."""
        weight = self._unembedding()
        if weight is None or self.config.unembedding_bias:
            return (losses if each else mean_loss)(self.logits(hidden), ids, judged)
        capped = dataclasses.replace(judged, cap=self.config.final_logit_softcapping)
        if self.config.logit_scale != 1:
            hidden = hidden * self.config.logit_scale
        return (linear_losses if each else linear_cross_entropy)(hidden, weight, ids, capped)

    def _blocks(self) -> Sequence[Block]:
        return cast("Sequence[Block]", self.blocks)


def layer_name(index: int) -> str:
    """The name under which the states of layer `index` are stored."""
    return f"blocks.{index}"
