"""Configs and models of transformers around attn's decoder."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch
from attn_core.errors import Incompatible, InvalidValue
from attn_schema.decoder import DecoderConfig
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import (
    BaseModelOutputWithPast,
    CausalLMOutputWithPast,
    SequenceClassifierOutputWithPast,
)

from attn_models.adapters.native import NativeAdapter, config_to_json
from attn_models.decoder.decoder import Decoder
from attn_models.hf.cache import StateCache

FIELDS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "max_seq_len": "max_position_embeddings",
    "tie_word_embeddings": "tie_word_embeddings",
    "logit_scale": "logit_scale",
    "final_logit_softcapping": "final_logit_softcapping",
}
"""Fields of the decoder, and the attributes by which transformers knows them."""
USUAL = {"vocab_size": 2, "hidden_size": 1, "num_layers": 1, "num_heads": 1, "max_seq_len": 1}


class AttnConfig(PreTrainedConfig):  # type: ignore[no-untyped-call]
    """The config of a decoder of any mechanism; `decoder` holds the fields of `DecoderConfig`.

    The other attributes follow from it. Raises `InvalidValue` and `UnknownName` for fields of the decoder as its own
    config does.
    """

    model_type = NativeAdapter.model_type
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values"]

    def __init__(self, decoder: dict[str, Any] | None = None, requires: Any = None, **others: Any) -> None:
        read = NativeAdapter().from_hf_config({"decoder": USUAL if decoder is None else decoder, "requires": requires})
        described = config_to_json(read, "decoder")
        fields = {theirs: getattr(read, ours) for ours, theirs in FIELDS.items()}
        for name, value in fields.items():
            if (given := others.pop(name, value)) != value:
                raise InvalidValue.of(name, given, f"{value}, as in the field decoder")
        self.use_cache = others.pop("use_cache", True)
        super().__init__(**others)
        vars(self).update(fields, decoder=described["decoder"], requires=described["requires"])

    def to_dict(self) -> dict[str, Any]:
        """The content of a config.json, without the attributes that follow from `decoder`."""
        values = {name: value for name, value in super().to_dict().items() if name not in FIELDS.values()}
        return values | {"decoder": {**self.decoder, "vocab_size": self.vocab_size}}

    def get_text_config(self, *_given: Any, **_named: Any) -> AttnConfig:
        """This config: transformers takes an attribute `decoder` for another one."""
        return self

    @classmethod
    def of(cls, config: DecoderConfig, **others: Any) -> AttnConfig:
        """The config of transformers for a decoder's."""
        return cls(**config_to_json(config, "decoder"), **others)

    @property
    def decoder_config(self) -> DecoderConfig:
        """The decoder's own config."""
        return NativeAdapter().from_hf_config({"decoder": self.decoder, "requires": self.requires})


REFUSED = ("inputs_embeds", "output_attentions", "output_hidden_states")
"""Arguments of transformers' models that would change the result and are not supported."""


class Backbone(Decoder):
    """The decoder with the `forward` of transformers' models without a head."""

    def forward(  # type: ignore[override]
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        *,
        use_cache: bool | None = True,
        **others: Any,
    ) -> BaseModelOutputWithPast:
        """Hidden states [batch, tokens, width] of `input_ids` [batch, tokens], and the cache after them.

        `attention_mask` [batch, cached and new tokens] is 0 where a token is padding, which may come first or last.
        States are kept only where no gradients are. Raises `Incompatible` for `REFUSED` arguments, `InvalidValue` for
        masks of another shape and caches of another class.
        """
        given = sorted(name for name, value in others.items() if value is not None and name in REFUSED)
        if given:
            raise Incompatible(f"attn's models do not support {', '.join(given)}")
        if attention_mask is not None and attention_mask.ndim != 2:
            raise InvalidValue.of("attention_mask", list(attention_mask.shape), "[batch, tokens], 0 for padding")
        real = torch.ones_like(input_ids) if attention_mask is None else attention_mask[:, -input_ids.shape[1] :]
        cache = past_key_values
        if not isinstance(cache, StateCache) and cache is not None and cache.get_seq_length():
            raise InvalidValue.of("past_key_values", type(cache).__name__, "a StateCache, or none")
        if not isinstance(cache, StateCache) and (not use_cache or torch.is_grad_enabled()):
            return BaseModelOutputWithPast(last_hidden_state=self._whole(input_ids, real.bool()))
        cache = cache if isinstance(cache, StateCache) else StateCache(self, len(input_ids))
        return BaseModelOutputWithPast(last_hidden_state=cache.step(input_ids, real.bool()), past_key_values=cache)

    def _whole(self, tokens: Tensor, real: Tensor) -> Tensor:
        """Hidden states of whole sequences. Padding is moved behind the tokens, which then do not see it."""
        if bool(real.all()):
            return self.hidden(tokens)
        order = torch.sort(real.logical_not().int(), dim=1, stable=True).indices
        hidden = self.hidden(tokens.gather(1, order))
        back = torch.argsort(order, dim=1)[..., None].expand_as(hidden)
        return hidden.gather(1, back)


class AttnPreTrainedModel(PreTrainedModel):  # type: ignore[no-untyped-call]
    """Base class of the models."""

    config_class = AttnConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    _no_split_modules = ["Block"]  # noqa: RUF012 -- declared by transformers
    supports_gradient_checkpointing = True
    gradient_checkpointing = False

    def __init__(self, config: AttnConfig) -> None:
        super().__init__(config)
        self.model = Backbone(config.decoder_config)
        self._add_head(config)
        self.post_init()  # type: ignore[no-untyped-call]

    def _add_head(self, config: AttnConfig) -> None:
        """Add the modules on top of the decoder."""

    def _init_weights(self, module: nn.Module) -> None:
        """Fill the buffers of a decoder, which no checkpoint holds; its weights were drawn when it was built."""
        if isinstance(module, Decoder):
            usual = torch.get_default_dtype()
            torch.set_default_dtype(torch.float32)
            try:
                fresh = dict(Decoder(module.config).named_buffers()) if any(True for _ in module.buffers()) else {}
            finally:
                torch.set_default_dtype(usual)
            for name, buffer in module.named_buffers():
                buffer.copy_(fresh[name])
        elif module is getattr(self, "score", None):
            nn.init.normal_(module.weight, std=0.02)

    def _set_gradient_checkpointing(
        self,
        enable: bool = True,  # noqa: FBT001, FBT002 -- the signature of transformers
        gradient_checkpointing_func: Callable[..., Any] = checkpoint,
        every_n_layers: int = 1,
    ) -> None:
        """Recompute every n-th block in the backward pass, or none.

        Raises `Incompatible` for blocks that write to others or count what they route.
        """
        config = self.model.config
        if enable and (config.kv_sharing or config.num_experts):
            message = "blocks that share keys and values, or have experts, cannot be recomputed"
            raise Incompatible(f"gradient_checkpointing: {message}")
        for index, block in enumerate(self.model.blocks):
            vars(block).pop("forward", None)
            if enable and index % every_n_layers == 0:
                vars(block)["forward"] = partial(_recomputed, gradient_checkpointing_func, block, block.forward)
        self.gradient_checkpointing = enable

    def get_input_embeddings(self) -> nn.Module:
        """The embedding of tokens."""
        return self.model.embedding  # type: ignore[no-any-return]

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the embedding of tokens."""
        self.model.embedding = value


def _recomputed(
    run: Callable[..., Any], block: nn.Module, forward: Callable[..., Any], *given: Any, **named: Any
) -> Any:
    """The output of a block, by `run`, which recomputes it in the backward pass, while the block is trained."""
    return run(forward, *given, **named) if block.training else forward(*given, **named)


class AttnModel(AttnPreTrainedModel):  # type: ignore[no-untyped-call]
    """The decoder without a head."""

    def forward(self, input_ids: Tensor, *given: Any, **named: Any) -> BaseModelOutputWithPast:
        """The hidden states of tokens; see `Backbone.forward`."""
        out: BaseModelOutputWithPast = self.model(input_ids, *given, **named)
        return out


class AttnForCausalLM(AttnPreTrainedModel, GenerationMixin):  # type: ignore[no-untyped-call]
    """The decoder as a language model."""

    def get_output_embeddings(self) -> nn.Linear:
        """The unembedding; where it is the embedding, a layer with the same parameter."""
        own: nn.Linear | None = self.model.unembedding
        if own is not None:
            return own
        vocabulary, width = self.model.embedding.weight.shape
        tied = nn.Linear(width, vocabulary, bias=False, device="meta")
        tied.weight = self.model.embedding.weight
        return tied

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False

    def prepare_inputs_for_generation(  # type: ignore[override]
        self, input_ids: Tensor, past_key_values: Any = None, attention_mask: Tensor | None = None, **others: Any
    ) -> dict[str, Any]:
        """The arguments of `forward` for the tokens that are not in the cache yet."""
        cached = past_key_values.get_seq_length() if isinstance(past_key_values, StateCache) else 0
        return {
            "input_ids": input_ids[:, cached:],
            "attention_mask": attention_mask,
            "past_key_values": past_key_values,
            "use_cache": others.get("use_cache"),
        }

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        labels: Tensor | None = None,
        *,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **others: Any,
    ) -> CausalLMOutputWithPast:
        """Logits [batch, tokens, vocabulary] of `input_ids` [batch, tokens], and the loss of `labels`, -100 ignored.

        `logits_to_keep` is the number of last tokens whose logits are computed, 0 for all, or their indices.
        """
        known = {name: others.pop(name) for name in ("num_items_in_batch", "shift_labels") if name in others}
        # Where only a loss is wanted, no states are kept unless the call says so.
        cached = bool(self.config.use_cache) and labels is None if use_cache is None else use_cache
        out = self.model(input_ids, attention_mask, past_key_values, use_cache=cached, **others)
        hidden = out.last_hidden_state
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) and logits_to_keep else logits_to_keep
        logits = self.model.logits(hidden[:, kept] if isinstance(kept, (slice, Tensor)) else hidden)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **known)
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=out.past_key_values)


class AttnForSequenceClassification(AttnPreTrainedModel):  # type: ignore[no-untyped-call]
    """The decoder with a linear layer over the last token of a text that is not padding."""

    def _add_head(self, config: AttnConfig) -> None:
        self.num_labels = config.num_labels
        self.score = nn.Linear(config.hidden_size, int(config.num_labels or 0), bias=False)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None, **others: Any
    ) -> SequenceClassifierOutputWithPast:
        """Logits [batch, labels] of texts `input_ids` [batch, tokens], and the loss of `labels`."""
        others.pop("use_cache", None)
        hidden = self.model(input_ids, attention_mask, use_cache=False, **others).last_hidden_state
        real = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        places = torch.arange(input_ids.shape[1], device=input_ids.device)
        last = torch.where(real.bool(), places, 0).amax(1)
        logits = self.score(hidden[torch.arange(len(hidden), device=hidden.device), last])
        loss = None
        if labels is not None:
            loss = self.loss_function(labels=labels, pooled_logits=logits, config=self.config)
        return SequenceClassifierOutputWithPast(loss=loss, logits=logits)
