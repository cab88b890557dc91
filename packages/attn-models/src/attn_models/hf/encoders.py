"""Configs and models of transformers around attn's encoders of text: with BERT's head, and as classifiers."""

from __future__ import annotations

from typing import Any

from attn_core.errors import InvalidValue
from torch import Tensor, nn
from transformers.modeling_outputs import (
    BaseModelOutput,
    MaskedLMOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)

from attn_models.adapters.native import NativeEncoderAdapter
from attn_models.decoder.layers import initialise
from attn_models.encoder.config import EncoderConfig
from attn_models.encoder.encoder import Encoder, MaskedHead, PooledClassifier
from attn_models.hf.models import NativeConfig, NativePreTrainedModel, real_tokens, refuse


class AttnEncoderConfig(NativeConfig):  # type: ignore[no-untyped-call]
    """The config of an encoder of any bidirectional mechanism; `encoder` holds the fields of `EncoderConfig`."""

    model_type = NativeEncoderAdapter.model_type
    described = ("encoder", "requires")
    __init__ = NativeConfig.__init__

    @property
    def own(self) -> EncoderConfig:
        """The encoder's own config."""
        return NativeEncoderAdapter().from_hf_config({"encoder": self.encoder, "requires": self.requires})


class AttnEncoderModel(NativePreTrainedModel):  # type: ignore[no-untyped-call]
    """An encoder without a head."""

    config_class = AttnEncoderConfig
    cls: Any
    classifier: Any
    _no_split_modules = ["PostNormBlock"]  # noqa: RUF012 -- declared by transformers

    @staticmethod
    def parts(config: AttnEncoderConfig) -> dict[str, nn.Module]:
        """The encoder."""
        return {"model": Encoder(config.own)}

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **others: Any) -> BaseModelOutput:
        """Hidden states [batch, tokens, width] of `input_ids` [batch, tokens]; see `encoded`."""
        return BaseModelOutput(last_hidden_state=self.encoded(input_ids, attention_mask, **others))

    def encoded(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        **others: Any,
    ) -> Tensor:
        """Hidden states [batch, tokens, width]; `attention_mask` [batch, tokens] is 0 for padding.

        Positions are the encoder's: as BERT's, they count padding, which therefore comes last. Raises `Incompatible`
        for arguments that are not supported, `InvalidValue` for masks of another shape, positions, and token types of
        an encoder without any.
        """
        refuse(others)
        if position_ids is not None:
            raise InvalidValue.of("position_ids", "given", "None: an encoder counts the positions itself")
        padding = None if attention_mask is None else real_tokens(input_ids, attention_mask)
        found = token_type_ids is not None and (self.model.segments is not None or bool(token_type_ids.any()))
        hidden: Tensor = self.model(input_ids, padding, token_type_ids if found else None)
        return hidden


class AttnForMaskedLM(AttnEncoderModel):  # type: ignore[no-untyped-call]
    """An encoder as a masked language model."""

    @staticmethod
    def parts(config: AttnEncoderConfig) -> dict[str, nn.Module]:
        """The encoder and BERT's head."""
        encoder = Encoder(config.own)
        return {"model": encoder, "cls": nn.ModuleDict({"predictions": MaskedHead(encoder)})}

    def forward(  # type: ignore[override]
        self, input_ids: Tensor, *given: Any, labels: Tensor | None = None, **others: Any
    ) -> MaskedLMOutput:
        """Logits [batch, tokens, vocabulary] of `input_ids` [batch, tokens], and the loss of `labels`, -100 ignored;
        see `encoded`."""
        logits = self.cls["predictions"](self.encoded(input_ids, *given, **others), self.model.embedding.weight)
        loss = self.loss_of(labels, others, logits=logits, vocab_size=self.config.vocab_size)
        return MaskedLMOutput(loss=loss, logits=logits)


class AttnForTokenClassification(AttnEncoderModel):  # type: ignore[no-untyped-call]
    """An encoder with a linear layer over each token."""

    @staticmethod
    def parts(config: AttnEncoderConfig) -> dict[str, nn.Module]:
        """The encoder and the layer."""
        classifier = nn.Linear(config.hidden_size, int(config.num_labels or 0))
        initialise(classifier)
        return {"model": Encoder(config.own), "classifier": classifier}

    def forward(  # type: ignore[override]
        self, input_ids: Tensor, *given: Any, labels: Tensor | None = None, **others: Any
    ) -> TokenClassifierOutput:
        """Logits [batch, tokens, labels] of `input_ids` [batch, tokens], and the loss of `labels`, -100 ignored; see
        `encoded`."""
        logits = self.classifier(self.encoded(input_ids, *given, **others))
        loss = self.loss_of(labels, others, logits=logits, config=self.config)
        return TokenClassifierOutput(loss=loss, logits=logits)


class AttnEncoderForSequenceClassification(AttnEncoderModel):  # type: ignore[no-untyped-call]
    """An encoder whose hidden states are pooled by additive attention, with a linear layer."""

    @staticmethod
    def parts(config: AttnEncoderConfig) -> dict[str, nn.Module]:
        """The encoder and the pooling classifier."""
        classifier = PooledClassifier(config.hidden_size, int(config.num_labels or 0))
        return {"model": Encoder(config.own), "classifier": classifier}

    def forward(  # type: ignore[override]
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *given: Any,
        labels: Tensor | None = None,
        **others: Any,
    ) -> SequenceClassifierOutput:
        """Logits [batch, labels] of texts `input_ids` [batch, tokens], and the loss of `labels`; see `encoded`."""
        hidden = self.encoded(input_ids, attention_mask, *given, **others)
        real = None if attention_mask is None else attention_mask.bool()
        logits = self.classifier(hidden, real)[:, 0]
        loss = self.loss_of(labels, others, pooled_logits=logits, config=self.config)
        return SequenceClassifierOutput(loss=loss, logits=logits)
