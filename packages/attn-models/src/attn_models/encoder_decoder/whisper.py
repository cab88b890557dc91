"""Whisper: an encoder of audio and a decoder of text (Radford et al. 2022, arXiv 2212.04356)."""

from __future__ import annotations

from attn_core.errors import InvalidValue
from attn_core.rotary import sinusoidal
from torch import Tensor, arange, nn
from torch.nn.functional import gelu

from attn_models.decoder.layers import initialise
from attn_models.encoder_decoder.config import WhisperConfig
from attn_models.encoder_decoder.transformer import Transformer


class Whisper(Transformer):
    """Two convolutions over the frames of an audio, the second with stride 2, then pre-norm blocks; the decoder's
    position embeddings are learned (section 2.2).

    The source of `forward` and `encode` is `num_frames` frames of `num_mel_bins` numbers, as `LogMel` computes them. A
    shorter audio is extended with silence, which the encoder attends to, so there is no padding mask.
    """

    config: WhisperConfig

    def __init__(self, config: WhisperConfig) -> None:
        super().__init__(config)
        self.convolution = nn.Conv1d(config.num_mel_bins, config.hidden_size, 3, padding=1)
        self.halving = nn.Conv1d(config.hidden_size, config.hidden_size, 3, stride=2, padding=1)
        self.source_positions = nn.Embedding(config.max_encoder_len, config.hidden_size)
        self.positions = nn.Embedding(config.max_seq_len, config.hidden_size)
        if not self.source_positions.weight.is_meta:
            places = arange(config.max_encoder_len)
            self.source_positions.weight.data.copy_(sinusoidal(places, config.hidden_size))
        for module in (self.embedding, self.positions):
            initialise(module)

    @property
    def encoder_features(self) -> tuple[int, int]:
        """The shape (num_frames, num_mel_bins) of one audio's frames; an engine uses it to recognise audio models."""
        return self.config.num_frames, self.config.num_mel_bins

    def _read(self, source: Tensor | None, key_padding_mask: Tensor | None) -> Tensor:
        """The encoder output [batch, max_encoder_len, width] for frames [batch, num_frames, num_mel_bins]."""
        wanted = self.encoder_features
        if source is None or not source.is_floating_point() or source.dim() != 3 or source.shape[1:] != wanted:
            given = "none" if source is None else f"{source.dtype} of shape {list(source.shape)}"
            raise InvalidValue.of("source", given, f"floating-point frames of audio [batch, {wanted[0]}, {wanted[1]}]")
        if key_padding_mask is not None:
            raise InvalidValue.of(
                "key_padding_mask", "a mask", "None: audio is padded with silence, which is not masked"
            )
        frames = gelu(self.convolution(source.to(self.convolution.weight).transpose(1, 2)))
        hidden = self.dropout(gelu(self.halving(frames)).transpose(1, 2) + self.source_positions.weight)
        for block in self.encoder:
            hidden = block(hidden, None)
        normed: Tensor = self.encoder_norm(hidden)
        return normed

    def _embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        embedded: Tensor = self.dropout(self.embedding(tokens) + self.positions(positions))
        return embedded
