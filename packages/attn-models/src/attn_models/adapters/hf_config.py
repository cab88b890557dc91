"""Reads and writes a config.json of transformers: names of keys, unknown keys, and the keys that families share."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from attn_core import AttentionSpec, Heads, Mask
from attn_core.errors import CheckpointInvalid, Incompatible, InvalidValue
from attn_schema.decoder import DecoderConfig

from attn_models.adapters.base import (
    FULL,
    EncoderAdapter,
    StateDictAdapter,
    inexpressible,
    renamed,
    require_allowed,
)
from attn_models.attention import layer_attentions

log = logging.getLogger(__name__)

# Keys for training, files, or the use of transformers, which do not change what a forward pass computes.
IGNORED_KEYS = re.compile(
    r"_.*|architectures|requires|(torch_)?dtype|transformers_version|model_type|use_cache|pretraining_tp|problem_type"
    r"|(id2label|label2id|num_labels)|output_\w+|return_dict\w*|is_encoder_decoder|chunk_size_feed_forward|name_or_path"
    r"|initializer_(range|factor|cutoff_factor)|rescale_prenorm_residual|\w+_token_ids?|\w*(dropout(_prob)?|_pdrop)|summary_\w+"
    r"|task_specific_params|gradient_checkpointing|tokenizer_class|finetuning_task|prefix|n_ctx|reorder_and_upcast_attn"
    r"|router_aux_loss_coef|aux_loss_alpha|seq_aux|ep_size|qk_head_dim|max_window_layers|cache_implementation"
    r"|eos_id|bos_id|attn_implementation|flash_attn\w*|unsloth_\w+"
)
# Keys of other families that change the computation, and the values with which they do not.
NEUTRAL_VALUES: Mapping[str, tuple[Any, ...]] = {
    "quantization_config": (None,),
    "sliding_window": (None,),
    "use_sliding_window": (False, None),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "query_pre_attn_scalar": (None,),
    "num_local_experts": (None, 0, 1),
    "num_experts": (None, 0, 1),
    "n_routed_experts": (None, 0),
    "kv_lora_rank": (None,),
    "embedding_multiplier": (None, 1),
    "residual_multiplier": (None, 1),
    "attention_multiplier": (None,),
    "logits_scaling": (None, 1),
    "logit_scale": (None, 1),
    "no_rope_layers": (None, []),
    "use_qk_norm": (False, None),
    "qk_layernorm": (False, None),
    "clip_qkv": (None,),
    "alibi": (False, None),
    "parallel_attn": (False, None),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "rope_interleave": (False, None),
    "moe_layer_freq": (1, None),
    "is_decoder": (True, None),
    "is_causal": (True,),
    "partial_rotary_factor": (1, None),
    "rope_scaling": (None, {}),
}


def adapter_config(adapter: StateDictAdapter | EncoderAdapter, values: Mapping[str, Any], path: Path) -> Any:
    """The config that a config.json at `path` describes, whichever of transformers' names its keys have.

    Raises `InvalidValue` for a key that would change the computation and is not read, and as `from_hf_config`; warns of
    unknown keys.
    """
    plain = without_aliases(values, adapter.aliases)
    check_unread_keys(plain, adapter.known_keys, path)
    return adapter.from_hf_config(plain)


def without_aliases(values: Mapping[str, Any], aliases: Mapping[str, str]) -> dict[str, Any]:
    """The values under the names to which `aliases` refer; raises `InvalidValue` where two names have other values.

    An alias that is null beside its key says nothing.
    """
    plain = {key: value for key, value in values.items() if key not in aliases}
    for alias, key in aliases.items():
        if alias not in values:
            continue
        given, known = values[alias], plain.get(key)
        if known is None:
            plain[key] = given
        elif given is not None and given != known:
            raise InvalidValue.of(alias, given, f"the value {known!r} of {key}, which it is another name of")
    return plain


def check_unread_keys(values: Mapping[str, Any], read: Collection[str], path: Path) -> None:
    """Raises `InvalidValue` for a key outside `read` that would change the computation, and warns of unknown keys."""
    unread = {key: value for key, value in values.items() if key not in read}
    require_allowed(unread, NEUTRAL_VALUES)
    layers = unread.get("layer_types")
    if layers is not None and "sliding_window" in read and "use_sliding_window" not in read:
        # Of a family with one window for all layers; transformers gives it to the listed layers only.
        raise InvalidValue.of("layer_types", layers, "null: sliding_window is that of every layer")
    if layers is not None and not (isinstance(layers, list) and all(kind == FULL for kind in layers)):
        raise InvalidValue.of("layer_types", layers, f"{FULL!r} for every layer")
    unknown = sorted(
        key for key in unread if key not in {*NEUTRAL_VALUES, "layer_types"} and not IGNORED_KEYS.fullmatch(key)
    )
    if unknown:
        log.warning("%s: unknown config keys, which are ignored: %s", path, ", ".join(unknown))


def refused_config(
    path: Path, error: InvalidValue, values: Mapping[str, Any], keys: Mapping[str, str]
) -> CheckpointInvalid:
    """The error for the config.json at `path` with these values, which names the key that holds the field.

    `keys` are a layout's; a field that is itself a key of the file keeps its name.
    """
    field = error.metadata.get("field", "")
    named = renamed(error, keys[field]) if field in keys and field not in values else error
    rule = named.message
    return CheckpointInvalid(f"{path}: {rule}", path=path, rule=rule, field=named.metadata.get("field", ""))


def require_fields(config: DecoderConfig, fields: Mapping[str, Any], layout: str) -> None:
    """Raises `Incompatible` for the fields of the config that differ from `fields`."""
    changed = {name: given for name, value in fields.items() if (given := getattr(config, name)) != value}
    if changed:
        raise inexpressible(changed, layout)


def softmax_heads(config: DecoderConfig, mask: Mask, layout: str) -> Heads:
    """The heads of a decoder whose layers all compute plain softmax attention under `mask`.

    Compares specs, so that any mechanism with such a spec is accepted. Raises `Incompatible` for any other.
    """
    heads: list[Heads] = []
    for attention in layer_attentions(config):
        spec = attention.mechanism.spec(attention.config)
        if spec is None or spec != AttentionSpec(heads=spec.heads, mask=mask, rotary=config.rotary):
            name = attention.mechanism.name
            raise Incompatible(f"mechanism {name!r} cannot be expressed in a {layout} config.json", mechanism=name)
        heads.append(spec.heads)
    if any(other != heads[0] for other in heads) or heads[0].per_group is None:
        raise Incompatible(f"heads that differ between layers cannot be expressed in a {layout} config.json")
    return heads[0]


def common_hf_config(config: DecoderConfig, model_type: str, architecture: str) -> dict[str, Any]:
    """The keys that the config.json files of Llama and of later families have in common."""
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_seq_len,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads or config.num_heads,
        "head_dim": config.head_dim or config.hidden_size // config.num_heads,
        "intermediate_size": config.inner_width,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_word_embeddings,
        "attention_dropout": float(config.attention_dropout),
    }
