"""Reads and writes a config.json of transformers: unknown keys, rotary positions, and the keys that families share."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attn_core import AttentionSpec, Heads, Mask
from attn_core.checks import require_flag, require_number, require_whole
from attn_core.errors import CheckpointInvalid, Incompatible, InvalidValue
from attn_core.rotary import rotary_scaling
from attn_schema.decoder import DecoderConfig

from attn_models.adapters.base import inexpressible, needed, require_allowed
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
FULL = "full_attention"
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


def renamed(error: InvalidValue, field: str) -> InvalidValue:
    """The same error for a field of another name."""
    _, _, rest = error.message.partition(f"{error.metadata.get('field', '')}: ")
    return InvalidValue(f"{field}: {rest or error.message}", **error.metadata | {"field": field})


DEFAULT_BASE = 10000.0
# For every supported `rope_type`, the fields of `attn_core`'s scaling and their keys in `rope_parameters`.
ROPE_SCALING_KEYS: Mapping[str, Mapping[str, str]] = {
    "linear": {"factor": "factor"},
    "llama3": {
        "factor": "factor",
        "original_max_position_embeddings": "original_max_position_embeddings",
        "low": "low_freq_factor",
        "high": "high_freq_factor",
    },
    "yarn": {
        "factor": "factor",
        "original_max_position_embeddings": "original_max_position_embeddings",
        "fast": "beta_fast",
        "slow": "beta_slow",
        "attention": "attention_factor",
        "whole_pairs": "truncate",
    },
    "proportional": {"fraction": "partial_rotary_factor", "factor": "factor"},
}
PROPORTIONAL = "proportional"
"""The `rope_type` whose `partial_rotary_factor` is a field of the scaling, and which needs no factor."""
LONGEST = 1 << 53
"""The longest context in tokens whose ratio to another is exact."""
LONG_ROPE_KEYS = {"short": "short_factor", "long": "long_factor", "attention": "attention_factor"}


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary positions: `base` is `rope_theta`, `fraction` the rotated part of a head; `scaling` may be None."""

    base: float = DEFAULT_BASE
    fraction: float = 1.0
    scaling: Mapping[str, Any] | None = None


def read_rope(values: Mapping[str, Any], base: float = DEFAULT_BASE, *, partial: bool = False) -> Rope:
    """The rotary positions of a config.json: an object in transformers 5, keys at the top level in 4.

    `partial` families rotate a part of each head. For the others any `partial_rotary_factor` but 1 is refused, because
    their models ignore it or use it only with some scalings. Raises `InvalidValue` for two descriptions that differ.
    """
    given = one_rope_of(values)
    top_level = {key: values[key] for key in ("rope_theta", "partial_rotary_factor") if values.get(key) is not None}
    context = values.get("max_position_embeddings")
    found = {"rope_theta": base, "original_max_position_embeddings": context, **top_level, **given}
    if not partial:
        require_allowed(found, {"partial_rotary_factor": (1, None)})
    require_one_context(values, given)
    return rope_of(found)


def one_rope_of(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """`rope_parameters` or `rope_scaling`, its name in transformers 4; raises `InvalidValue` where they differ."""
    new, old = objects_of(values, "rope_parameters", "rope_scaling").values()
    if new and old and new != old:
        raise InvalidValue.of("rope_scaling", old, "null, or the same as rope_parameters")
    return new or old


def require_one_context(values: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Raises `InvalidValue` for a top-level original context length that differs from the one that the scaling uses."""
    outside, inside = (where.get("original_max_position_embeddings") for where in (values, given))
    if outside is not None and outside != (inside or values.get("max_position_embeddings")):
        allowed = "the value in rope_parameters or, without one there, max_position_embeddings"
        raise InvalidValue.of("original_max_position_embeddings", outside, allowed)


def rope_of(given: Mapping[str, Any]) -> Rope:
    """The rotary positions of an object `rope_parameters`; raises `InvalidValue` for an unknown scaling."""
    kind = given.get("rope_type", given.get("type", "default"))
    base, fraction = given.get("rope_theta", DEFAULT_BASE), given.get("partial_rotary_factor", 1.0)
    require_number("rope_parameters.rope_theta", base, ge=1)
    require_number("rope_parameters.partial_rotary_factor", fraction, ge=0, le=1)
    if kind == "default":
        return Rope(base=base, fraction=fraction)
    if not isinstance(kind, str) or kind not in ROPE_SCALING_KEYS:
        raise InvalidValue.of("rope_parameters.rope_type", kind, ", ".join(["default", *ROPE_SCALING_KEYS]))
    if kind == PROPORTIONAL:
        given, fraction = {"factor": 1.0, "partial_rotary_factor": 1.0, **given}, 1.0
    require_number("rope_parameters.factor", given.get("factor"), ge=1)
    for key in ("mscale", "mscale_all_dim"):
        require_number(f"rope_parameters.{key}", given.get(key), optional=True)
    if "truncate" in given:
        require_flag("rope_parameters.truncate", given["truncate"])
    fields = {field: given[key] for field, key in ROPE_SCALING_KEYS[kind].items() if given.get(key) is not None}
    if kind == "yarn" and "attention" not in fields and given.get("mscale") and given.get("mscale_all_dim"):
        fields["attention"] = mscale(given["factor"], given["mscale"]) / mscale(
            given["factor"], given["mscale_all_dim"]
        )
    return checked_rope(Rope(base=base, fraction=fraction, scaling={"kind": kind, **fields}), ROPE_SCALING_KEYS[kind])


def checked_rope(rope: Rope, keys: Mapping[str, str]) -> Rope:
    """The rotary positions; raises `InvalidValue` with the key, in `keys`, of a field of the scaling that is wrong."""
    try:
        rotary_scaling(rope.scaling)
    except InvalidValue as error:
        field = error.metadata.get("field", "").rpartition(".")[2]
        raise renamed(error, f"rope_parameters.{keys.get(field, field)}") from error
    return rope


def rope_parameters(rope: Rope) -> dict[str, Any]:
    """The object `rope_parameters` of transformers 5; raises `InvalidValue` for a scaling it does not have."""
    plain = {"rope_type": "default", "rope_theta": rope.base, "partial_rotary_factor": rope.fraction}
    if rope.scaling is None:
        return plain
    kind = rope.scaling["kind"]
    if kind not in ROPE_SCALING_KEYS:
        raise InvalidValue.of("rope_scaling.kind", kind, ", ".join(ROPE_SCALING_KEYS))
    return plain | {
        "rope_type": kind,
        **{ROPE_SCALING_KEYS[kind][f]: v for f, v in rope.scaling.items() if f != "kind"},
    }


def long_rope(values: Mapping[str, Any]) -> Rope:
    """The rotary positions of a Phi-3 within its training context; raises `InvalidValue` for any scaling but LongRoPE.

    Beyond that context the model rotates every token by other angles, earlier tokens included.
    """
    given = one_rope_of(values)
    kind = given.get("rope_type", given.get("type", "default"))
    if kind not in ("longrope", "su", "yarn"):
        if kind == "default":
            values_without_context = {
                key: value for key, value in values.items() if key != "original_max_position_embeddings"
            }
            return read_rope(values_without_context, partial=True)
        raise InvalidValue.of("rope_parameters.rope_type", kind, "'default' or 'longrope'")
    plain = read_rope(
        {key: value for key, value in values.items() if key not in ("rope_scaling", "original_max_position_embeddings")}
        | {"rope_parameters": {**given, "rope_type": "default"}},
        partial=True,
    )
    for key in ("original_max_position_embeddings", "max_position_embeddings"):
        require_whole(key, values.get(key), ge=2, le=LONGEST, unit="tokens")
    require_number("rope_parameters.factor", given.get("factor"), optional=True)
    context, longest = values["original_max_position_embeddings"], values["max_position_embeddings"]
    factor = given.get("factor") or longest / context
    stretched = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(context))
    scaling = {
        "kind": "longrope",
        "short": given.get("short_factor"),
        "long": given.get("long_factor"),
        "original_max_position_embeddings": context,
        "length": min(context, longest),
        "attention": given.get("attention_factor") or stretched,
    }
    return checked_rope(Rope(base=plain.base, fraction=plain.fraction, scaling=scaling), LONG_ROPE_KEYS)


def ropes_of_kinds(values: Mapping[str, Any], bases: Mapping[str, tuple[str, float]]) -> dict[str, Rope]:
    """The rotary positions of each kind of layer; a `rope_scaling` applies to the first kind only.

    `bases` are, by kind, the key at the top level that holds the base where `rope_parameters` has none, and the base
    without that key. Raises `InvalidValue` for what transformers ignores or its versions 4 and 5 read differently:
    rotary positions without kinds, a `rope_scaling` beside kinds or without `rope_type`, `truncate` within a kind.
    """
    given, context = objects_of(values, "rope_parameters", "rope_scaling"), values.get("max_position_embeddings")
    nested, stretched = given["rope_parameters"], given["rope_scaling"]
    if nested and stretched:
        raise InvalidValue.of("rope_scaling", stretched, "null beside rope_parameters")
    if nested.keys() - bases:
        raise InvalidValue.of("rope_parameters", nested, f"an object for each of {' and '.join(bases)}")
    require_allowed(stretched, {"type": (stretched.get("rope_type"), None)})
    top_level = {"partial_rotary_factor": (1, None), "original_max_position_embeddings": (None, context)}
    require_allowed(values, top_level)
    by_kind = objects_of(nested, *bases) | ({next(iter(bases)): stretched} if stretched else {})
    found = {}
    for kind, (key, usual) in bases.items():
        base = usual if key not in values else needed(values, key)
        own = {"rope_theta": base, "original_max_position_embeddings": context, **by_kind[kind]}
        try:
            require_allowed(own, {"partial_rotary_factor": (1, None), "truncate": (True,)})
            found[kind] = rope_of(own)
        except InvalidValue as error:
            field = error.metadata.get("field", "").rpartition(".")[2]
            raise renamed(error, f"rope_parameters.{kind}.{field}") from error
    return found


def objects_of(values: Mapping[str, Any], *keys: str) -> dict[str, Mapping[str, Any]]:
    """The objects at these keys, empty where there is none; raises `InvalidValue` for anything else."""
    found = {key: values.get(key) or {} for key in keys}
    for key, given in found.items():
        if not isinstance(given, Mapping):
            raise InvalidValue.of(key, given, "an object")
    return found


def mscale(factor: float, weight: float = 1.0) -> float:
    """YaRN's factor on queries and keys, 0.1 m ln(s) + 1 (arXiv 2309.00071; the weight m is DeepSeek-V2's)."""
    return 0.1 * weight * math.log(factor) + 1 if factor > 1 else 1.0


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


def hf_rope_parameters(config: DecoderConfig) -> dict[str, Any]:
    """The rotary positions that all layers share, as `rope_parameters` of transformers 5."""
    return rope_parameters(
        Rope(base=config.rope_theta, fraction=config.partial_rotary_factor, scaling=config.rope_scaling)
    )
