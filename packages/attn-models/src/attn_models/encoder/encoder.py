"""Bidirectional encoders: BERT's with its heads, the Reformer, and the vision Transformer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import torch
from attn_core import configure, installed
from attn_core.errors import InvalidValue
from torch import Tensor, nn
from torch.nn.functional import linear

from attn_models.attention import recorded_weights, share_biases, share_weights
from attn_models.decoder.layers import ACTIVATIONS, STANDARD, build_feed_forward, build_norm, initialise
from attn_models.encoder.config import (
    ClassifierConfig,
    EncoderConfig,
    EncoderShape,
    ReformerConfig,
    VisionConfig,
    attention_of,
)
from attn_models.encoder.positions import POSITIONS


class Convolution(nn.Module):
    """norm(x + f(c)) for the rows x of the first layer and a convolution c of the embeddings, in which padding is zero
    (He et al. 2020, arXiv 2006.03654, section 5.3)."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        size, kernel = config.hidden_size, config.conv_kernel_size
        self.conv = nn.Conv1d(size, size, kernel, padding=kernel // 2, groups=config.conv_groups)
        self.activation = {"tanh": nn.Tanh, **ACTIVATIONS}[config.conv_act]()
        self.norm = nn.LayerNorm(size, eps=config.norm_eps)

    def forward(self, rows: Tensor, embedded: Tensor, key_padding_mask: Tensor | None) -> Tensor:
        """Rows [batch, tokens, width] of those of the first layer and the embeddings, of the same shape."""
        if key_padding_mask is not None:
            embedded = embedded * key_padding_mask[..., None]
        found: Tensor = self.norm(rows + self.activation(self.conv(embedded.transpose(1, 2)).transpose(1, 2)))
        return found


class EncoderBlock(nn.Module):
    """Base class of blocks: bidirectional attention, a feed-forward, and a norm for each."""

    def __init__(self, config: EncoderShape, layer: int) -> None:
        super().__init__()
        chosen = attention_of(config, layer)
        # Any: a mechanism may build any module that has the methods of AttentionLayer.
        self.attention: Any = chosen.mechanism.build(chosen.config)
        self.attention_norm = build_norm(config.block)
        self.feed_forward = build_feed_forward(config.block)
        self.feed_forward_norm = build_norm(config.block)


def share_among(config: EncoderShape, blocks: Iterable[Any]) -> None:
    """Tie weights between the attention layers of all blocks where their mechanism does so (`share_weights`)."""
    built = [block.attention for block in blocks]
    share_weights((attention_of(config, layer) for layer in range(len(built))), built)


class PostNormBlock(EncoderBlock):
    """norm(x + attention(x)), then norm(x + feed-forward(x)) (Vaswani et al. 2017, section 3.1)."""

    def forward(self, hidden: Tensor, key_padding_mask: Tensor | None, **others: Tensor) -> Tensor:
        """Map `hidden` [batch, tokens, width] to the same shape; `key_padding_mask` [batch, tokens] is True for real
        tokens, and `others` are passed to the attention.
        """
        attended = self.attention(hidden, key_padding_mask=key_padding_mask, **others)
        after: Tensor = self.attention_norm(hidden + attended)
        out: Tensor = self.feed_forward_norm(after + self.feed_forward(after))
        return out


class ReversibleBlock(EncoderBlock):
    """y_1 = x_1 + attention(norm(x_2)), then y_2 = x_2 + feed-forward(norm(y_1)) (Kitaev et al. 2020, equation 9).

    The inputs can be recomputed from the outputs, x_2 = y_2 - feed-forward(norm(y_1)) and so on, but this
    implementation does not do so: training stores the activations as usual.
    """

    def forward(self, one: Tensor, two: Tensor, key_padding_mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """The next values of the two streams, [batch, tokens, width] each; `key_padding_mask` is that of
        `PostNormBlock.forward`."""
        one = one + self.attention(self.attention_norm(two), key_padding_mask=key_padding_mask)
        return one, two + self.feed_forward(self.feed_forward_norm(one))


class PreNormBlock(EncoderBlock):
    """x + attention(norm(x)), then x + feed-forward(norm(x)) (Dosovitskiy et al. 2021, equations 2 and 3)."""

    def forward(self, hidden: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        """See `PostNormBlock.forward`."""
        after = hidden + self.attention(self.attention_norm(hidden), key_padding_mask=key_padding_mask)
        out: Tensor = after + self.feed_forward(self.feed_forward_norm(after))
        return out


class TextEncoder(nn.Module):
    """Base class of encoders of token ids."""

    def attention_maps(self, tokens: Tensor, layers: Sequence[int]) -> dict[int, Tensor]:
        """Attention weights [heads, query, key] by layer of one sequence [tokens].

        Raises `InvalidValue` for a layer that does not exist, `Incompatible` for a mechanism without weights.
        """
        with recorded_weights(self) as maps:
            self(tokens[None])
        for layer in layers:
            if not 0 <= layer < len(maps):
                raise InvalidValue.of("layers", layer, f"0 to {len(maps) - 1}")
        return {layer: maps[layer][0] for layer in layers}


def takes_parses(block: Any) -> bool:
    """Whether the attention of a block takes the tree of each sentence."""
    return bool(block.attention.takes_parses)


class Encoder(TextEncoder):
    """Normalised sum of token, position and segment embeddings, then blocks (Devlin et al. 2019, arXiv 1810.04805)."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.config = config
        self.max_seq_len = config.max_seq_len
        self.size = config.hidden_size
        width = config.embedding_width
        self.embedding = nn.Embedding(config.vocab_size, width)
        self.positions = POSITIONS[config.positions](config) if config.positions in POSITIONS else None
        self.segments = nn.Embedding(config.type_vocab_size, width) if config.type_vocab_size else None
        self.norm = nn.LayerNorm(width, eps=config.norm_eps)
        self.projection = nn.Linear(width, config.hidden_size) if config.embedding_size else None
        self.blocks = nn.ModuleList(PostNormBlock(config, block) for block in range(config.num_blocks))
        share_among(config, self.blocks)
        self.convolution = Convolution(config) if config.conv_kernel_size else None
        if config.shared_biases:
            share_biases([block.attention for block in self.blocks])
        for module in (self.embedding, self.positions, self.segments, self.projection):
            if module is not None:
                initialise(module)

    def forward(
        self,
        tokens: Tensor,
        key_padding_mask: Tensor | None = None,
        segments: Tensor | None = None,
        depths: Tensor | None = None,
        parses: Tensor | None = None,
        global_tokens: Tensor | None = None,
    ) -> Tensor:
        """Hidden states [batch, tokens, width] of token ids [batch, tokens], int64.

        `key_padding_mask` [batch, tokens], bool, is True for real tokens; `segments` [batch, tokens] default to 0;
        `depths` [batch, tokens], in the dependency tree of each sequence, are required if positions are "depth";
        `parses` [batch, tokens], the head of each token in that tree, -1 for the root and padding, go to the layers
        that take them, such as those of `dependency`;
        `global_tokens` [batch, tokens], bool, marks the tokens that Longformer's layers treat as global, such as those
        of a question. Raises `InvalidValue` for more tokens than the context, for segments if the encoder has none, for
        missing depths, and for global tokens if a layer does not support them.
        """
        length = tokens.shape[1]
        if length > self.max_seq_len:
            raise InvalidValue.of("tokens", f"{length} tokens", f"at most the context of {self.max_seq_len} tokens")
        embedded = self.embedding(tokens)
        if self.positions is not None:
            embedded = embedded + self.positions.rows(tokens, key_padding_mask, depths)
        if self.segments is not None:
            embedded = embedded + self.segments(torch.zeros_like(tokens) if segments is None else segments)
        elif segments is not None:
            raise InvalidValue.of(
                "segments", f"the shape {list(segments.shape)}", "None: the encoder has no token types"
            )
        hidden: Tensor = self.norm(embedded)
        hidden = hidden if self.projection is None else self.projection(hidden)
        embedded, others = hidden, {}
        if global_tokens is not None:
            self._require_global_tokens()
            others["global_tokens"] = global_tokens
        for layer, place in enumerate(self.config.repeats or range(len(self.blocks))):
            block = self.blocks[place]
            own = {} if parses is None or not takes_parses(block) else {"parses": parses}
            hidden = block(hidden, key_padding_mask, **others, **own)
            if self.convolution is not None and layer == 0:
                hidden = self.convolution(hidden, embedded, key_padding_mask)
        return hidden

    def _require_global_tokens(self) -> None:
        """Raise `InvalidValue` unless the attention of every layer supports global tokens."""
        for layer, block in enumerate(self.blocks):
            attention: Any = block.attention
            if not attention.takes_global_tokens:
                name = attention_of(self.config, layer).mechanism.name
                raise InvalidValue(f"global_tokens: the attention {name!r} of layer {layer} has none; longformer has")


OF_HEADS = {**ACTIVATIONS, "tanh": nn.Tanh, "swiglu": nn.SiLU, "geglu": nn.GELU, "geglu_tanh": ACTIVATIONS["gelu_tanh"]}
"""The activations of heads; after a gated feed-forward that of its gate."""


class MaskedHead(nn.Module):
    """norm(f(W h + b)) E^T + c for hidden states h, where E is the token embedding (Devlin et al. 2019, arXiv
    1810.04805, section 3.1; W, the norm and c are from the authors' code, as are the names)."""

    def __init__(self, encoder: Any, activation: str | None = None) -> None:
        super().__init__()
        vocabulary, width = encoder.embedding.weight.shape
        norm = nn.LayerNorm(width, eps=encoder.config.norm_eps)
        self.transform = nn.ModuleDict({"dense": nn.Linear(encoder.size, width), "LayerNorm": norm})
        self.activation = OF_HEADS[activation or encoder.config.feed_forward]()
        self.bias = nn.Parameter(norm.weight.new_zeros(vocabulary))

    def forward(self, rows: Tensor, embedding: Tensor) -> Tensor:
        """Logits [..., vocabulary] of hidden states [..., size] by the `embedding` [vocabulary, width]."""
        shaped = self.transform["LayerNorm"](self.activation(self.transform["dense"](rows)))
        return linear(shaped, embedding, self.bias)


class MaskedLanguageModel(nn.Module):
    """An encoder with BERT's head, `cls`, of the names in checkpoints; `activation` is the head's, by default that of
    the feed-forwards."""

    def __init__(self, encoder: Any, activation: str | None = None) -> None:
        super().__init__()
        self.encoder = encoder
        self.vocab_size: int = len(encoder.embedding.weight)
        self.cls = nn.ModuleDict({"predictions": MaskedHead(encoder, activation)})

    def forward(self, tokens: Tensor, key_padding_mask: Tensor | None = None, **others: Tensor | None) -> Tensor:
        """Logits [batch, tokens, vocabulary] of token ids [batch, tokens]; arguments are those of the encoder."""
        return self.logits(self.encoder(tokens, key_padding_mask, **others))

    def logits(self, rows: Tensor) -> Tensor:
        """Logits [..., vocabulary] of the encoder's hidden states [..., size]."""
        logits: Tensor = self.cls["predictions"](rows, self.encoder.embedding.weight)
        return logits


POOLING = "attn-variants/alignment"
"""The mechanism by which a text classifier reads the hidden states."""


class Tagger(nn.Module):
    """softmax(W h + b) for the hidden states h of an encoder (Devlin et al. 2019, arXiv 1810.04805, figure 4d)."""

    output_layers: ClassVar[tuple[str, ...]] = ("classifier",)
    """Names of the layers that map hidden states to logits."""

    def __init__(self, config: ClassifierConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder = Encoder(config.encoder)
        self.classifier = nn.Linear(config.encoder.hidden_size, config.classes)
        initialise(self.classifier)

    def forward(
        self,
        tokens: Tensor,
        key_padding_mask: Tensor | None = None,
        depths: Tensor | None = None,
        parses: Tensor | None = None,
        global_tokens: Tensor | None = None,
    ) -> Tensor:
        """Logits [batch, tokens, classes]; arguments are those of `Encoder.forward`.

        Raises `InvalidValue` without `parses` if a layer takes them, as taggers learn from the trees of sentences.
        """
        if parses is None and any(map(takes_parses, self.encoder.blocks)):
            raise InvalidValue.of("parses", "none", f"the head of every token, {list(tokens.shape)}")
        others = {"depths": depths, "parses": parses, "global_tokens": global_tokens}
        rows = self.encoder(tokens, key_padding_mask, **others)
        scores: Tensor = self.classifier(rows)
        return scores


class PooledClassifier(nn.Linear):
    """softmax(W c + b) for c = Σ α_i h_i, a mean of an encoder's hidden states with weights α = softmax(vᵀ tanh(W_k h_i
    + W_q u)) of Bahdanau's score and a learned query u (Yang et al. 2016, Hierarchical Attention Networks, section
    2.2)."""

    def __init__(self, size: int, classes: int) -> None:
        super().__init__(size, classes)
        self.query = nn.Parameter(torch.randn(size) * STANDARD)
        mechanism = installed().mechanisms.get(POOLING)
        sizes: dict[str, Any] = {"hidden_size": size, "num_heads": 1}
        self.pooling: Any = mechanism.build(configure(mechanism, {}, causal=False, bias=True, **sizes))
        initialise(self)

    def forward(self, rows: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        """Logits [batch, 1, classes] of hidden states [batch, tokens, size]."""
        return super().forward(self.pooling(self._queries(rows), rows, key_padding_mask=key_padding_mask))

    def weights(self, rows: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        """The weights α [batch, tokens] of hidden states [batch, tokens, size]."""
        found: Tensor = self.pooling.weights(self._queries(rows), rows, key_padding_mask=key_padding_mask)
        return found[:, 0, 0]

    def _queries(self, rows: Tensor) -> Tensor:
        return self.query.expand(len(rows), 1, -1)


class TextClassifier(nn.Module):
    """A `PooledClassifier` of the hidden states of an encoder."""

    output_layers: ClassVar[tuple[str, ...]] = ("classifier",)
    """Names of the layers that map hidden states to logits."""

    def __init__(self, config: ClassifierConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder = Encoder(config.encoder)
        self.classifier = PooledClassifier(config.encoder.hidden_size, config.classes)

    def forward(
        self,
        tokens: Tensor,
        key_padding_mask: Tensor | None = None,
        depths: Tensor | None = None,  # noqa: ARG002 -- the arguments of taggers
        parses: Tensor | None = None,  # noqa: ARG002
    ) -> Tensor:
        """Logits [batch, 1, classes]; arguments are those of `Encoder.forward`, but a text has no tree."""
        scores: Tensor = self.classifier(self.encoder(tokens, key_padding_mask), key_padding_mask)
        return scores

    def weights(self, tokens: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        """The weights α [batch, tokens]; arguments are those of `Encoder.forward`."""
        return self.classifier.weights(self.encoder(tokens, key_padding_mask), key_padding_mask)


class FirstTokenClassifier(nn.Module):
    """W f(P h + p) + b for the hidden state h of the first token (Devlin et al. 2019, arXiv 1810.04805, figure 4b; P
    and f, by default tanh, are from the authors' code)."""

    output_layers: ClassVar[tuple[str, ...]] = ("classifier",)
    """Names of the layers that map hidden states to logits."""

    def __init__(self, config: ClassifierConfig, activation: str = "tanh") -> None:
        super().__init__()
        size = config.encoder.hidden_size
        self.config = config
        self.encoder = Encoder(config.encoder)
        self.pooler = nn.ModuleDict({"dense": nn.Linear(size, size)})
        self.activation = OF_HEADS[activation]()
        self.classifier = nn.Linear(size, config.classes)

    def forward(self, tokens: Tensor, key_padding_mask: Tensor | None = None, **others: Tensor | None) -> Tensor:
        """Logits [batch, 1, classes]; arguments are those of `Encoder.forward`."""
        first = self.encoder(tokens, key_padding_mask, **others)[:, :1]
        scores: Tensor = self.classifier(self.activation(self.pooler["dense"](first)))
        return scores

    def weights(self, tokens: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:  # noqa: ARG002
        """The weights [batch, tokens] of the hidden states: all on the first."""
        return (
            (torch.arange(tokens.shape[1], device=tokens.device) == 0).to(self.classifier.weight).expand(tokens.shape)
        )


class AxialPositions(nn.Module):
    """Axial position embeddings: a vector for each row of a grid concatenated with one for each column."""

    def __init__(self, axes: tuple[int, int], widths: tuple[int, int]) -> None:
        super().__init__()
        self.row = nn.Parameter(torch.empty(axes[0], 1, widths[0]))
        self.column = nn.Parameter(torch.empty(1, axes[1], widths[1]))
        for table in (self.row, self.column):
            nn.init.normal_(table, std=STANDARD)

    def forward(self, places: Tensor) -> Tensor:
        """Vectors [tokens, width] of positions [tokens], int64."""
        columns = self.column.shape[1]
        return torch.cat([self.row[places // columns, 0], self.column[0, places % columns]], dim=-1)


class Reformer(nn.Module):
    """Reversible blocks over two streams, which both start with the embeddings, and a norm of their concatenation."""

    def __init__(self, config: ReformerConfig) -> None:
        super().__init__()
        self.config = config
        self.max_seq_len = config.max_seq_len
        self.size = 2 * config.hidden_size
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.positions: nn.Module = nn.Embedding(config.max_seq_len, config.hidden_size)
        if config.axial_pos_shape is not None and config.axial_pos_embds_dim is not None:
            self.positions = AxialPositions(config.axial_pos_shape, config.axial_pos_embds_dim)
        self.blocks = nn.ModuleList(ReversibleBlock(config, layer) for layer in range(config.num_layers))
        share_among(config, self.blocks)
        self.norm = nn.LayerNorm(self.size, eps=config.norm_eps)
        for module in (self.embedding, self.positions):
            initialise(module)

    def forward(self, tokens: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        """Hidden states [batch, tokens, 2 width] of token ids [batch, tokens], int64.

        `key_padding_mask` [batch, tokens], bool, is True for real tokens. Raises `InvalidValue` for more tokens than
        the context.
        """
        length = tokens.shape[1]
        if length > self.max_seq_len:
            raise InvalidValue.of("tokens", f"{length} tokens", f"at most the context of {self.max_seq_len} tokens")
        one = two = self.embedding(tokens) + self.positions(torch.arange(length, device=tokens.device))
        for block in self.blocks:
            one, two = block(one, two, key_padding_mask)
        rows: Tensor = self.norm(torch.cat([one, two], dim=-1))
        return rows


def require_images(images: Tensor, side: int, channels: int) -> None:
    """Raise `InvalidValue` unless `images` is [batch, channels, side, side]."""
    if images.dim() != 4 or images.shape[1:] != (channels, side, side):
        allowed = f"[batch, {channels}, {side}, {side}]"
        raise InvalidValue.of("images", f"the shape {list(images.shape)}", allowed)


class VisionTransformer(nn.Module):
    """z_0 = [x_class; x_1 E; ...; x_N E] + E_pos; L blocks; y = LN(z_L^0) W (Dosovitskiy et al. 2021)."""

    output_layers: ClassVar[tuple[str, ...]] = ("classifier",)
    """Names of the layers that map hidden states to logits."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.config = config
        self.patches = nn.Conv2d(config.channels, config.hidden_size, config.patch, stride=config.patch)
        self.begin = nn.Parameter(torch.empty(1, 1, config.hidden_size))
        self.positions = nn.Parameter(torch.empty(1, config.sequence_length, config.hidden_size))
        self.blocks = nn.ModuleList(PreNormBlock(config, layer) for layer in range(config.num_layers))
        share_among(config, self.blocks)
        self.norm = build_norm(config.block)
        self.classifier = nn.Linear(config.hidden_size, config.classes)
        for weight in (self.begin, self.positions):
            nn.init.normal_(weight, std=STANDARD)

    def forward(self, images: Tensor) -> Tensor:
        """Logits [batch, classes] of images [batch, channels, side, side], floating point.

        Raises `InvalidValue` for images of another shape than the model's.
        """
        require_images(images, self.config.image, self.config.channels)
        words = self.patches(images).flatten(2).transpose(1, 2)
        hidden = torch.cat([self.begin.expand(len(words), -1, -1), words], dim=1) + self.positions
        for block in self.blocks:
            hidden = block(hidden)
        scores: Tensor = self.classifier(self.norm(hidden[:, 0]))
        return scores
