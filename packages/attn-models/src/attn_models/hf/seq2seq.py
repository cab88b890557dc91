"""The config and model of transformers around attn's models with an encoder and a decoder."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from attn_core.errors import InvalidValue
from torch import Tensor, nn
from transformers.loss.loss_utils import ForMaskedLMLoss
from transformers.modeling_outputs import BaseModelOutput, Seq2SeqLMOutput

from attn_models.adapters.native import SOURCE
from attn_models.encoder_decoder.encoder_input import EncoderOutput
from attn_models.hf.cache import StateCache
from attn_models.hf.models import (
    NativeConfig,
    NativeGenerationMixin,
    NativePreTrainedModel,
    held_cache,
    real_tokens,
    refuse,
    with_padding_last,
)
from attn_models.loading.models import family_and_config


class AttnSeq2SeqConfig(NativeConfig):  # type: ignore[no-untyped-call]
    """The config of a model with an encoder: `family` is the name of its family, `model` the fields of its config."""

    model_type = SOURCE
    described = ("model", "family", "requires")

    def __init__(self, **others: Any) -> None:
        super().__init__(**others | {"is_encoder_decoder": True})

    @staticmethod
    def read(described: Mapping[str, Any], /) -> Any:
        """The config of the family's model."""
        return family_and_config(described)[1]


class SourceEncoder:
    """The encoder of a model, as `generate` calls it."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **others: Any) -> BaseModelOutput:
        """The output of the encoder for `input_ids` [batch, source]: `last_hidden_state` [batch, source, width], with
        padding moved to the end, and the initial state of a recurrent decoder by name."""
        refuse(others)
        real = real_tokens(input_ids, attention_mask)
        order = torch.sort(real.logical_not().int(), dim=1, stable=True).indices
        encoded = self.model.encoder_output(input_ids.gather(1, order), real.gather(1, order))
        out = BaseModelOutput(last_hidden_state=encoded.memory)
        for name, rows in encoded.start.items():
            out[name] = rows
        return out

    __call__ = forward


class AttnForSeq2SeqLM(NativePreTrainedModel, NativeGenerationMixin):  # type: ignore[no-untyped-call]
    """A model with an encoder and a decoder, as a conditional language model."""

    config_class = AttnSeq2SeqConfig
    # Labels are not shifted: the inputs of the decoder are.
    loss_function = staticmethod(ForMaskedLMLoss)
    _no_split_modules = ["EncoderBlock", "DecoderBlock"]  # noqa: RUF012 -- declared by transformers

    @staticmethod
    def parts(config: AttnSeq2SeqConfig) -> dict[str, nn.Module]:
        """The model."""
        family, own = family_and_config({name: getattr(config, name) for name in config.described})
        return {"model": family.build(own)}

    def get_encoder(self, *_given: Any, **_named: Any) -> SourceEncoder:
        """The encoder."""
        return SourceEncoder(self.model)

    def prepare_decoder_input_ids_from_labels(self, labels: Tensor) -> Tensor:
        """The inputs of the decoder [batch, tokens] whose next tokens are `labels`: these after the start token.

        Raises `InvalidValue` where the config has no start token.
        """
        ids = (getattr(self.config, name, None) for name in ("decoder_start_token_id", "bos_token_id"))
        start = next((token for token in ids if token is not None), None)
        if start is None:
            raise InvalidValue.of("decoder_start_token_id", None, "a token id, or one of bos_token_id")
        filler = getattr(self.config, "pad_token_id", None)
        shifted = torch.cat([labels.new_full((len(labels), 1), start), labels[:, :-1]], dim=1)
        return shifted.masked_fill(shifted == -100, start if filler is None else filler)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        encoder_outputs: Any = None,
        labels: Tensor | None = None,
        **others: Any,
    ) -> Seq2SeqLMOutput:
        """Logits [batch, tokens, vocabulary] of `decoder_input_ids` [batch, tokens] over sources `input_ids` [batch,
        source], or over `encoder_outputs`, and the loss of `labels`, -100 ignored.

        `attention_mask` [batch, source] and `decoder_attention_mask` [batch, cached and new tokens] are 0 for padding.
        Without `decoder_input_ids` they are made of the labels. States are kept only where no gradients are. Raises
        `Incompatible` for arguments that are not supported, `InvalidValue` for masks of another shape, missing tokens
        and caches of another class.
        """
        use_cache, kept = others.pop("use_cache", None), others.pop("logits_to_keep", 0)
        cache = held_cache(others.pop("past_key_values", None))
        refuse(others)
        if decoder_input_ids is None and labels is not None:
            decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
        if encoder_outputs is None and input_ids is not None:
            encoder_outputs = self.get_encoder().forward(input_ids, attention_mask)
        if decoder_input_ids is None or encoder_outputs is None:
            raise InvalidValue.of("decoder_input_ids", None, "tokens of source and target, or labels")
        memory: Tensor = encoder_outputs[0]
        lengths = [memory.shape[1]] * len(memory) if attention_mask is None else attention_mask.sum(1).tolist()
        encoded = EncoderOutput(memory, {name: encoder_outputs[name] for name in list(encoder_outputs)[1:]})
        real = real_tokens(decoder_input_ids, decoder_attention_mask)
        keeps = bool(self.config.use_cache) and labels is None if use_cache is None else use_cache
        if cache is None and (not keeps or torch.is_grad_enabled()):
            source = torch.arange(memory.shape[1]) < torch.tensor(lengths)[:, None]
            run = partial(self.model.hidden, encoded=encoded, key_padding_mask=source.to(memory.device))
            hidden = with_padding_last(run, decoder_input_ids, real)
        else:
            if cache is None:
                cache = StateCache(self.model, len(memory), map(self.model.source_states, encoded.each(lengths)))
            hidden = cache.step(decoder_input_ids, real)
        logits = self.logits_of(hidden, kept)
        loss = self.loss_of(logits, labels, others)
        held: Any = cache
        return Seq2SeqLMOutput(loss=loss, logits=logits, past_key_values=held, encoder_last_hidden_state=memory)
