"""Configs and models of transformers around attn's encoders of text: with BERT's head, and as classifiers."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn
from transformers.modeling_outputs import (
    BaseModelOutput,
    MaskedLMOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)

from attn_models.adapters.native import NativeEncoderAdapter
from attn_models.decoder.layers import initialise
from attn_models.encoder.encoder import Encoder, MaskedHead, PooledClassifier
from attn_models.hf.models import NativeConfig, NativePreTrainedModel, real_tokens, refuse


class AttnEncoderConfig(NativeConfig):  # type: ignore[no-untyped-call]
    """The config of an encoder of any bidirectional mechanism; `encoder` holds the fields of `EncoderConfig`."""

    model_type = NativeEncoderAdapter.model_type
    described = ("encoder", "requires")
    read = staticmethod(NativeEncoderAdapter().from_hf_config)
    __init__ = NativeConfig.__init__


class AttnEncoderModel(NativePreTrainedModel):  # type: ignore[no-untyped-call]
    """An encoder, and the head of a subclass, which gives the logits of an `Output`."""

    config_class = AttnEncoderConfig
    _no_split_modules = ["PostNormBlock"]  # noqa: RUF012 -- declared by transformers
    Output: ClassVar[Any] = BaseModelOutput

    @staticmethod
    def parts(config: AttnEncoderConfig) -> dict[str, nn.Module]:
        """The encoder."""
        return {"model": Encoder(config.own)}

    def scores(self, hidden: Tensor, real: Tensor | None) -> Tensor | None:  # noqa: ARG002 -- here are none
        """The logits of hidden states [batch, tokens, width], in which `real` [batch, tokens] is False for padding."""
        return None

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        labels: Tensor | None = None,
        **others: Any,
    ) -> Any:
        """The hidden states or logits of `input_ids` [batch, tokens], and the loss of `labels`, -100 ignored.

        `attention_mask` [batch, tokens] is 0 for padding. Positions are the encoder's: as BERT's, they count padding,
        which therefore comes last. Raises `Incompatible` for arguments that are not supported, `InvalidValue` for masks
        of another shape and token types of an encoder without any.
        """
        refuse(others)
        real = None if attention_mask is None else real_tokens(input_ids, attention_mask)
        typed = token_type_ids is not None and (self.model.segments is not None or bool(token_type_ids.any()))
        hidden = self.model(input_ids, real, token_type_ids if typed else None)
        logits = self.scores(hidden, real)
        if logits is None:
            return BaseModelOutput(last_hidden_state=hidden)
        return self.Output(loss=self.loss_of(logits, labels, others), logits=logits)


class AttnForMaskedLM(AttnEncoderModel):  # type: ignore[no-untyped-call]
    """An encoder as a masked language model: logits [batch, tokens, vocabulary] by BERT's head."""

    Output = MaskedLMOutput
    cls: Any

    @staticmethod
    def parts(config: AttnEncoderConfig) -> dict[str, nn.Module]:
        """The encoder and the head."""
        encoder = Encoder(config.own)
        return {"model": encoder, "cls": nn.ModuleDict({"predictions": MaskedHead(encoder)})}

    def scores(self, hidden: Tensor, real: Tensor | None) -> Any:  # noqa: ARG002
        """Logits [batch, tokens, vocabulary]."""
        return self.cls["predictions"](hidden, self.model.embedding.weight)


class AttnForTokenClassification(AttnEncoderModel):  # type: ignore[no-untyped-call]
    """An encoder with a linear layer over each token: logits [batch, tokens, labels]."""

    Output = TokenClassifierOutput
    classifier: Any

    @staticmethod
    def parts(config: AttnEncoderConfig) -> dict[str, nn.Module]:
        """The encoder and the layer."""
        classifier = nn.Linear(config.hidden_size, int(config.num_labels or 0))
        initialise(classifier)
        return {"model": Encoder(config.own), "classifier": classifier}

    def scores(self, hidden: Tensor, real: Tensor | None) -> Any:  # noqa: ARG002
        """Logits [batch, tokens, labels]."""
        return self.classifier(hidden)


class AttnEncoderForSequenceClassification(AttnEncoderModel):  # type: ignore[no-untyped-call]
    """An encoder whose hidden states are pooled by additive attention: logits [batch, labels]."""

    Output = SequenceClassifierOutput
    classifier: Any

    @staticmethod
    def parts(config: AttnEncoderConfig) -> dict[str, nn.Module]:
        """The encoder and the pooling classifier."""
        classifier = PooledClassifier(config.hidden_size, int(config.num_labels or 0))
        return {"model": Encoder(config.own), "classifier": classifier}

    def scores(self, hidden: Tensor, real: Tensor | None) -> Any:
        """Logits [batch, labels]."""
        return self.classifier(hidden, real)[:, 0]
