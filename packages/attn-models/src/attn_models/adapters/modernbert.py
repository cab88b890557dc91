"""ModernBERT checkpoints in the layout of Hugging Face's transformers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from attn_core.checks import whole
from attn_core.errors import Incompatible, InvalidValue
from attn_schema.decoder import AttentionChoice, FeedForwardKind

from attn_models.adapters.base import (
    FULL,
    HEADS,
    SLIDING,
    EncoderAdapter,
    StoredTensor,
    listed_layer_types,
    require_allowed,
    required_count,
)
from attn_models.adapters.rope import Rope, rope_parameters, ropes_of_kinds
from attn_models.encoder.config import ModernBertConfig

if TYPE_CHECKING:
    from attn_models.encoder.modernbert import ModernBert

SIZES = {
    "vocab_size": "vocab_size",
    "max_seq_len": "max_position_embeddings",
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "intermediate_size": "intermediate_size",
}
ROPES = {FULL: ("rope_theta", "rope_scaling"), SLIDING: ("local_rope_theta", "local_rope_scaling")}
"""The config fields (base, scaling) for the rotary positions of each kind of layer."""
USUAL = {FULL: {"rope_theta": 160000.0}, SLIDING: {"rope_theta": 10000.0}}
BASES = {FULL: "global_rope_theta", SLIDING: "local_rope_theta"}
"""The keys of the rotary bases in transformers 4."""
GATES: dict[str, FeedForwardKind] = {
    "gelu": "geglu",
    "gelu_new": "geglu_tanh",
    "gelu_pytorch_tanh": "geglu_tanh",
    "silu": "swiglu",
}
HF_GATES = {ours: theirs for theirs, ours in reversed(GATES.items())}
MHA, WINDOW = "attn-variants/mha", "attn-variants/sliding_window"
OUTSIDE = {"embedding": "embeddings.tok_embeddings", "embedding_norm": "embeddings.norm", "norm": "final_norm"}
BLOCK = {
    "attention_norm": "attn_norm",
    "attention.output": "attn.Wo",
    "feed_forward_norm": "mlp_norm",
    "feed_forward.down": "mlp.Wo",
}
JOINED = {
    "attn.Wqkv": ("attention.query", "attention.key", "attention.value"),
    "mlp.Wi": ("feed_forward.gate", "feed_forward.up"),
}
"""Checkpoint tensors that hold several parameters, one after the other."""


class ModernBertAdapter(EncoderAdapter):
    """Pre-norm blocks with gated units, rotary positions and windows (Warner et al. 2024, arXiv 2412.13663)."""

    model_type = "modernbert"
    keys = SIZES
    prefix = "model."
    derived_names = re.compile(HEADS.pattern + r"|^(head|decoder)\.")
    head_names: ClassVar[Mapping[str, str]] = {
        "cls.predictions.transform.dense": "head.dense",
        "cls.predictions.transform.LayerNorm": "head.norm",
        "cls.predictions.bias": "decoder.bias",
    }
    masked_activation = pooled_activation = "gelu"
    head_values: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "classifier_activation": ("gelu",),
        "classifier_pooling": ("cls", "mean"),
        "decoder_bias": (True,),
    }
    head_zeros = re.compile(r"(transform|head)\.(dense|LayerNorm|norm)\.bias$")
    # From `decoder_bias` on: keys for heads, for training, and for kernels with the same results.
    known_keys = frozenset(
        {
            *SIZES.values(),
            *("hidden_activation", "norm_eps", "layer_types", "local_attention", "global_attn_every_n_layers"),
            *("rope_parameters", "rope_scaling", "global_rope_theta", "local_rope_theta"),
            *("norm_bias", "attention_bias", "mlp_bias", "decoder_bias"),
            *("classifier_pooling", "classifier_bias", "classifier_activation", "tie_word_embeddings"),
            *("deterministic_flash_attn", "sparse_prediction", "sparse_pred_ignore_index", "reference_compile"),
            *("repad_logits_with_grad", "position_embedding_type"),
        }
    )

    def from_hf_config(self, values: Mapping[str, Any]) -> ModernBertConfig:
        """Build the encoder config from a ModernBertConfig."""
        biases = dict.fromkeys(("norm_bias", "attention_bias", "mlp_bias"), (False,))
        require_allowed(values, {"hidden_activation": tuple(GATES), "rope_scaling": (None,), **biases})
        sizes: dict[str, Any] = {ours: required_count(values, theirs) for ours, theirs in SIZES.items()}
        kinds = layer_types(values, sizes["num_layers"])
        window = {"window": 2 * (required_count(values, "local_attention", 128, least=2) // 2)}
        local = AttentionChoice(mechanism=WINDOW, options=window)
        return ModernBertConfig(
            **sizes,
            **read_ropes(values),
            pattern=tuple(AttentionChoice(mechanism=MHA) if kind == FULL else local for kind in kinds),
            feed_forward=GATES[values.get("hidden_activation", "gelu")],
            norm_eps=values.get("norm_eps", 1e-5),
        )

    def to_hf_config(self, config: ModernBertConfig) -> dict[str, Any]:
        """The ModernBertConfig, as transformers 5 reads it; raises `Incompatible` for what it cannot express."""
        choices = [config.choice(layer) for layer in range(config.num_layers)]
        windows = {whole(choice.options.get("window")) for choice in choices if choice.mechanism == WINDOW} or {128}
        odd = any(choice.mechanism not in (MHA, WINDOW) for choice in choices)
        if odd or len(windows) > 1 or config.head_dim not in (None, config.hidden_size // config.num_heads):
            rule = (
                "other mechanisms than full attention and one window, and head_dim, cannot be expressed in a modernbert"
            )
            raise Incompatible(f"{rule} config.json")
        ropes = {
            kind: rope_parameters(Rope(base=getattr(config, theta), scaling=getattr(config, scaling)))
            for kind, (theta, scaling) in ROPES.items()
        }
        return {
            "architectures": ["ModernBertModel"],
            "model_type": self.model_type,
            **{theirs: getattr(config, ours) for ours, theirs in SIZES.items()},
            "hidden_activation": HF_GATES[config.feed_forward],
            "norm_eps": config.norm_eps,
            "layer_types": [FULL if choice.mechanism == MHA else SLIDING for choice in choices],
            "local_attention": windows.pop(),
            "rope_parameters": ropes,
            # Null, because the defaults are ids of a vocabulary of 50,368.
            **dict.fromkeys(f"{name}_token_id" for name in ("pad", "bos", "eos", "cls", "sep")),
        }

    def build(self, config: ModernBertConfig) -> ModernBert:
        """Build an encoder with random weights."""
        from attn_models.encoder.modernbert import ModernBert

        return ModernBert(config)

    def tensor_mappings(self, parameters: Sequence[str]) -> list[StoredTensor]:
        """One tensor for each parameter, but one for queries, keys and values, and one for gate and up projections."""
        found, blocks = [], dict[str, None]()
        for name in parameters:
            module, _, leaf = name.rpartition(".")
            if module in OUTSIDE:
                found.append(StoredTensor(f"{OUTSIDE[module]}.{leaf}", (name,)))
                continue
            _, layer, part = module.split(".", 2)
            blocks[layer] = None
            if part in BLOCK:
                found.append(StoredTensor(f"layers.{layer}.{BLOCK[part]}.{leaf}", (name,)))
        for layer in blocks:
            for theirs, parts in JOINED.items():
                ours = tuple(f"blocks.{layer}.{part}.weight" for part in parts)
                found.append(StoredTensor(f"layers.{layer}.{theirs}.weight", ours))
        return found


def layer_types(values: Mapping[str, Any], layers: int) -> list[str]:
    """The kind of each layer: as listed, or full attention in every n-th layer.

    Raises `InvalidValue` for a list with an unknown kind or another length.
    """
    given = listed_layer_types(values, layers, (FULL, SLIDING))
    if given is not None:
        return given
    every = required_count(values, "global_attn_every_n_layers", 3)
    return [SLIDING if layer % every else FULL for layer in range(layers)]


def read_ropes(values: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `ModernBertConfig` for rotary positions.

    transformers 5 has an object for each kind of layer, transformers 4 two keys at the top level. Raises `InvalidValue`
    for any scaling but linear.
    """
    found: dict[str, Any] = {}
    for kind, rope in ropes_of_kinds(values, USUAL, BASES).items():
        if rope.scaling is not None and rope.scaling["kind"] != "linear":
            raise InvalidValue.of(f"rope_parameters.{kind}.rope_type", rope.scaling["kind"], "'default' or 'linear'")
        theta, scaling = ROPES[kind]
        found |= {theta: rope.base, scaling: rope.scaling}
    return found
