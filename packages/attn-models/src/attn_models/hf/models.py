"""Configs and models of transformers around attn's decoder."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
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
from attn_models.adapters.state_dict import shared_names
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
"""Fields of models, and the attributes by which transformers knows them."""


class NativeConfig(PreTrainedConfig):  # type: ignore[no-untyped-call]
    """Base class of the configs: the `described` keys of a config.json in attn's layouts, the first of which holds the
    fields of the model's own config. The other attributes follow from it.

    Raises `InvalidValue` and `UnknownName` for fields as the model's own config does. Subclasses name `__init__`, as
    transformers makes one for those that do not.
    """

    described: ClassVar[tuple[str, ...]]
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values", "encoder_last_hidden_state"]

    def __init__(self, **others: Any) -> None:
        vars(self).update({key: others.pop(key, None) for key in self.described})
        own = self.own
        fields = {theirs: getattr(own, ours) for ours, theirs in FIELDS.items() if hasattr(own, ours)}
        for name, value in fields.items():
            if (given := others.pop(name, value)) != value:
                raise InvalidValue.of(name, given, f"{value}, as in the field {self.described[0]}")
        self.use_cache = others.pop("use_cache", True)
        super().__init__(**others)
        vars(self).update(fields)

    def to_dict(self) -> dict[str, Any]:
        """The content of a config.json, without the attributes that follow from its description."""
        values = {name: value for name, value in super().to_dict().items() if name not in FIELDS.values()}
        fields = self.described[0]
        return values | {fields: {**getattr(self, fields), "vocab_size": self.vocab_size}}

    def get_text_config(self, *_given: Any, **_named: Any) -> NativeConfig:
        """This config: transformers takes an attribute `decoder` or `encoder` for another one."""
        return self

    @property
    def own(self) -> Any:
        """The model's own config."""
        return self.read({key: getattr(self, key) for key in self.described})

    @staticmethod
    @abstractmethod
    def read(described: Mapping[str, Any], /) -> Any:
        """The model's own config by the described keys."""


class AttnConfig(NativeConfig):  # type: ignore[no-untyped-call]
    """The config of a decoder of any mechanism; `decoder` holds the fields of `DecoderConfig`."""

    model_type = NativeAdapter.model_type
    described = ("decoder", "requires")
    read = staticmethod(NativeAdapter().from_hf_config)
    __init__ = NativeConfig.__init__

    @classmethod
    def of(cls, config: DecoderConfig, **others: Any) -> AttnConfig:
        """The config of transformers for a decoder's."""
        made: AttnConfig = cls(**config_to_json(config, "decoder"), **others)
        return made


OF_LOSS = ("num_items_in_batch", "shift_labels")
"""Arguments of transformers' models for their loss functions."""
ALLOWED = {"return_dict", "cache_position", *OF_LOSS}
"""Arguments of transformers' models that change no hidden state here."""


def refuse(others: Mapping[str, Any]) -> None:
    """Raise `Incompatible`, naming them, for arguments of transformers' models that would change the result: all that
    are given, except `ALLOWED` ones and token types of zeros, which tokenizers make."""
    given = {name: value for name, value in others.items() if not (name in ALLOWED or value is None or value is False)}
    if "token_type_ids" in given and not bool(given["token_type_ids"].any()):
        del given["token_type_ids"]
    if given:
        raise Incompatible(f"attn's models do not support {', '.join(sorted(given))}")


class Backbone(Decoder):
    """The decoder with the `forward` of transformers' models without a head."""

    def forward(  # type: ignore[override]
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        position_ids: Tensor | None = None,
        *,
        use_cache: bool | None = True,
        **others: Any,
    ) -> BaseModelOutputWithPast:
        """Hidden states [batch, tokens, width] of `input_ids` [batch, tokens], and the cache after them.

        `attention_mask` [batch, cached and new tokens] is 0 where a token is padding, which may come first or last.
        `position_ids` [batch, tokens] count the tokens that are not padding; in one sequence without padding and cache
        they may start anew, for documents end to end, which do not see each other. States are kept only where no
        gradients are. Raises `Incompatible` for arguments that are not supported, `InvalidValue` for masks and
        positions of another shape or content, and caches of another class.
        """
        refuse(others)
        real, cache = real_tokens(input_ids, attention_mask), held_cache(past_key_values)
        lengths = None if position_ids is None else _documents(position_ids, real, cache)
        if lengths is not None:
            return BaseModelOutputWithPast(last_hidden_state=self.hidden(input_ids, lengths))
        if cache is None and (not use_cache or torch.is_grad_enabled()):
            return BaseModelOutputWithPast(last_hidden_state=with_padding_last(self.hidden, input_ids, real))
        cache = StateCache(self, len(input_ids)) if cache is None else cache
        return BaseModelOutputWithPast(last_hidden_state=cache.step(input_ids, real), past_key_values=cache)


def real_tokens(tokens: Tensor, attention_mask: Tensor | None) -> Tensor:
    """Bool [batch, tokens], False for padding, of the last tokens of `attention_mask`; raises `InvalidValue` for a mask
    of another shape."""
    if attention_mask is None:
        return torch.ones_like(tokens, dtype=torch.bool)
    if attention_mask.ndim != 2 or attention_mask.shape[1] < tokens.shape[1]:
        raise InvalidValue.of("attention_mask", list(attention_mask.shape), "[batch, tokens], 0 for padding")
    return attention_mask[:, -tokens.shape[1] :].bool()


def held_cache(given: Any) -> StateCache | None:
    """The cache that a call goes on from; raises `InvalidValue` for a filled one of another class."""
    if isinstance(given, StateCache) or given is None:
        return given
    if given.get_seq_length():
        raise InvalidValue.of("past_key_values", type(given).__name__, "a StateCache, or none")
    return None


def with_padding_last(run: Callable[[Tensor], Tensor], tokens: Tensor, real: Tensor) -> Tensor:
    """The result [batch, tokens, ...] of `run` for sequences whose padding is moved behind their tokens, which then do
    not see it, and which is moved back in the result."""
    if bool(real.all()):
        return run(tokens)
    order = torch.sort(real.logical_not().int(), dim=1, stable=True).indices
    found = run(tokens.gather(1, order))
    return found.gather(1, torch.argsort(order, dim=1)[..., None].expand_as(found))


def _documents(positions: Tensor, real: Tensor, cache: StateCache | None) -> list[int] | None:
    """The lengths of the documents that positions count, None for one; raises `InvalidValue` for other positions."""
    positions = positions.expand_as(real)
    before = torch.tensor([0] * len(real) if cache is None else cache.contexts, device=real.device)
    counted = real.cumsum(1) - 1 + before[:, None]
    if bool((positions == counted)[real].all()):
        return None
    starts = torch.nonzero(positions[0] == 0)[:, 0]
    lengths: list[int] = torch.diff(starts, append=starts.new_tensor([positions.shape[1]])).tolist()
    several = [number for length in lengths for number in range(length)]
    if cache is None and len(real) == 1 and bool(real.all()) and positions[0].tolist() == several:
        return lengths
    allowed = "the number of each token without padding, or of each document's in one sequence without padding"
    raise InvalidValue.of("position_ids", positions.tolist(), allowed)


class NativePreTrainedModel(PreTrainedModel):  # type: ignore[no-untyped-call]
    """Base class of the models, of which `parts` are the modules: a model of ours, `model`, and a head."""

    base_model_prefix = "model"
    main_input_name = "input_ids"
    model: Any

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for name, part in self.parts(config).items():
            setattr(self, name, part)
        self._tied_weights_keys = shared_names(self)
        for tensor in (*self.parameters(), *self.buffers()):
            # What has memory has values, which transformers then leaves.
            tensor._is_hf_initialized = not tensor.is_meta  # type: ignore[attr-defined]  # noqa: SLF001
        self.post_init()  # type: ignore[no-untyped-call]

    @staticmethod
    @abstractmethod
    def parts(config: Any) -> dict[str, nn.Module]:
        """New modules of a model of this config, by the names of their attributes."""

    def get_expanded_tied_weights_keys(self, *_given: Any, **_named: Any) -> dict[str, str]:
        """The first name of each parameter that several modules share, by its other names."""
        return dict(self._tied_weights_keys)

    def _init_weights(self, module: nn.Module) -> None:  # noqa: ARG002 -- the first one stands for all
        """Fill what a checkpoint does not hold, such as buffers and a new head, with the values of a new model."""
        tensors = dict((*self.named_parameters(), *self.named_buffers()))
        left = [name for name, tensor in tensors.items() if not getattr(tensor, "_is_hf_initialized", False)]
        if not left:
            return
        usual = torch.get_default_dtype()
        torch.set_default_dtype(torch.float32)
        try:
            with torch.device(self.device):
                fresh = nn.ModuleDict(self.parts(self.config))
        finally:
            torch.set_default_dtype(usual)
        values = dict((*fresh.named_parameters(), *fresh.named_buffers()))
        for name in left:
            tensors[name].copy_(values[name])
            tensors[name]._is_hf_initialized = True  # type: ignore[attr-defined]  # noqa: SLF001

    def loss_of(self, logits: Tensor, labels: Tensor | None, others: Mapping[str, Any]) -> Tensor | None:
        """The loss of `labels`, if there are any, by transformers' function for the class, with its arguments among
        `others`."""
        given = {"logits": logits, "pooled_logits": logits, "vocab_size": self.config.vocab_size, "config": self.config}
        given |= {name: others[name] for name in OF_LOSS if name in others}
        return None if labels is None else self.loss_function(labels=labels, **given)

    def get_input_embeddings(self) -> nn.Module:
        """The embedding of tokens."""
        return self.model.embedding  # type: ignore[no-any-return]

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the embedding of tokens."""
        self.model.embedding = value


class AttnPreTrainedModel(NativePreTrainedModel):  # type: ignore[no-untyped-call]
    """Base class of decoders."""

    config_class = AttnConfig
    _no_split_modules = ["Block"]  # noqa: RUF012 -- declared by transformers
    supports_gradient_checkpointing = True
    gradient_checkpointing = False

    @staticmethod
    def parts(config: AttnConfig) -> dict[str, nn.Module]:
        """The decoder."""
        return {"model": Backbone(config.own)}

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


PASSED = ("attention_mask", "decoder_attention_mask", "encoder_outputs", "use_cache", "logits_to_keep")
"""Arguments that `generate` passes to `forward` as they are."""


class NativeGenerationMixin(GenerationMixin):
    """What models that generate have in common."""

    model: Any
    config: Any

    def get_output_embeddings(self) -> nn.Module | None:
        """The unembedding; where it is the embedding, a layer with the same parameter."""
        own: nn.Module | None = self.model.unembedding
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
        self, input_ids: Tensor, past_key_values: Any = None, **kwargs: Any
    ) -> dict[str, Any]:
        """The arguments of `forward` for the tokens that are not in the cache yet."""
        cached = past_key_values.get_seq_length() if isinstance(past_key_values, StateCache) else 0
        tokens = {"decoder_input_ids" if self.config.is_encoder_decoder else "input_ids": input_ids[:, cached:]}
        kept = {name: kwargs[name] for name in PASSED if kwargs.get(name) is not None}
        return {**tokens, "past_key_values": past_key_values, **kept}

    def logits_of(self, hidden: Tensor, kept: int | Tensor) -> Tensor:
        """Logits of hidden states [batch, tokens, width]: of the `kept` last tokens, 0 for all, or of their indices."""
        chosen = slice(-kept, None) if isinstance(kept, int) and kept else kept
        logits: Tensor = self.model.logits(hidden[:, chosen] if isinstance(chosen, (slice, Tensor)) else hidden)
        return logits


class AttnForCausalLM(AttnPreTrainedModel, NativeGenerationMixin):  # type: ignore[no-untyped-call]
    """The decoder as a language model."""

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
        # Where only a loss is wanted, no states are kept unless the call says so.
        cached = bool(self.config.use_cache) and labels is None if use_cache is None else use_cache
        out = self.model(input_ids, attention_mask, past_key_values, use_cache=cached, **others)
        logits = self.logits_of(out.last_hidden_state, logits_to_keep)
        loss = self.loss_of(logits, labels, others)
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=out.past_key_values)


class AttnForSequenceClassification(AttnPreTrainedModel):  # type: ignore[no-untyped-call]
    """The decoder with a linear layer over the last token of a text that is not padding."""

    score: Any

    @staticmethod
    def parts(config: AttnConfig) -> dict[str, nn.Module]:
        """The decoder and the layer."""
        score = nn.Linear(config.hidden_size, int(config.num_labels or 0), bias=False)
        nn.init.normal_(score.weight, std=0.02)
        return {"model": Backbone(config.own), "score": score}

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
        loss = self.loss_of(logits, labels, others)
        return SequenceClassifierOutputWithPast(loss=loss, logits=logits)
