"""Changed copies of a config.json of transformers, to test a loader: each must give equal results or be refused.

Every field of the config is deleted, made null, flipped and varied within its type; fields of other model families, and
every form of rotary position parameters, are added. The meaning of fields is not known here: tests compare the results
with those of transformers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from attn_core.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

Values = dict[str, Any]
SAID = frozenset({"architectures", "transformers_version", "model_type"})
"""Fields that identify a model folder and do not affect the computation."""

OTHER_NAMES = {
    "silu": "gelu",
    "gelu_new": "relu",
    "gelu_pytorch_tanh": "silu",
    "greedy": "group_limited_greedy",
    "softmax": "sigmoid",
    "sigmoid": "softmax",
}
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "rope_theta": 1e4, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}
LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
ROPES: tuple[Values, ...] = (
    LINEAR,
    LINEAR | {"attention_factor": 1.5},
    {"type": "linear", "factor": 2.0},
    {"factor": 2.0},
    {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
    {"rope_type": "longrope", "factor": 2.0},
    YARN,
    YARN | {"original_max_position_embeddings": 16},
    YARN | {"original_max_position_embeddings": 16, "mscale": 0.7, "mscale_all_dim": 0.5},
    YARN | {"attention_factor": 1.5, "beta_fast": 8, "beta_slow": 2, "truncate": False},
    LLAMA3,
    LLAMA3 | {"original_max_position_embeddings": 16},
    {"rope_type": "default"},
    {"rope_type": "default", "rope_theta": 5e3, "partial_rotary_factor": 0.5},
    {"rope_type": "default", "rope_theta": 3e3, "factor": 3.0},
)
"""Rotary position parameters that are the same for all layers."""

FULL, SLIDING = "full_attention", "sliding_attention"
OF_KINDS = {FULL: LINEAR | {"factor": 8.0}, SLIDING: {"rope_type": "default", "rope_theta": 1e3}}
UNSAID = {FULL: {"rope_type": "linear", "factor": 8.0}, SLIDING: {"rope_type": "default"}}
MIXED_ROPES: tuple[Values, ...] = (
    {"rope_parameters": {FULL: OF_KINDS[FULL]}},
    {"rope_parameters": {SLIDING: OF_KINDS[SLIDING]}},
    {"rope_parameters": OF_KINDS, "rope_local_base_freq": 2e3},
    {"rope_parameters": OF_KINDS, "rope_theta": 2e3},
    {"rope_parameters": OF_KINDS, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    {"rope_parameters": UNSAID, "rope_theta": 3e3},
    {"rope_parameters": UNSAID, "rope_local_base_freq": 3e3},
    {"rope_parameters": {FULL: None, SLIDING: None}, "rope_theta": 3e3},
    {"rope_parameters": {FULL: OF_KINDS[FULL], SLIDING: LINEAR}},
    {"rope_parameters": {FULL: OF_KINDS[SLIDING] | {"partial_rotary_factor": 0.5}, SLIDING: OF_KINDS[SLIDING]}},
    {"rope_parameters": {FULL: LLAMA3, SLIDING: YARN}, "original_max_position_embeddings": 16},
    {"rope_parameters": None, "rope_scaling": UNSAID[FULL], "rope_local_base_freq": 3e3, "rope_theta": 5e5},
    {"rope_parameters": None, "rope_local_base_freq": 3e3, "rope_theta": 5e5},
    {"rope_parameters": None, "rope_theta": 5e5},
    {"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 8.0}},
    {"rope_parameters": {FULL: {"type": "linear", "factor": 8.0, "rope_theta": 1e4}, SLIDING: OF_KINDS[SLIDING]}},
    {"rope_parameters": OF_KINDS, "rope_scaling": LINEAR, "rope_local_base_freq": 2e3, "rope_theta": 2e3},
)
"""Rotary position parameters that differ by kind of layer, given in more than one field."""

FOREIGN: Mapping[str, tuple[Any, ...]] = {
    "add_cross_attention": (True,),
    "attention_bias": (True,),
    "attention_multiplier": (2.0,),
    "attn_logit_softcapping": (5.0,),
    "decoder_sparse_step": (2,),
    "final_logit_softcapping": (5.0,),
    "first_k_dense_replace": (0, 2),
    "head_dim": (4, 16),
    "hidden_act": ("gelu", "relu"),
    "hidden_activation": ("gelu",),
    "is_causal": (False, True),
    "is_decoder": (False,),
    "is_encoder_decoder": (True,),
    "logit_scale": (0.5,),
    "mlp_bias": (True,),
    "mlp_only_layers": ([0],),
    "moe_layer_freq": (2,),
    "norm_topk_prob": (True, False, None),
    "num_key_value_heads": (1, 2, 4),
    "original_max_position_embeddings": (16,),
    "output_router_logits": (True,),
    "partial_rotary_factor": (0.5,),
    "pretraining_tp": (2,),
    "qk_layernorm": (True,),
    "query_pre_attn_scalar": (7,),
    "rope_interleave": (True, False),
    "rope_local_base_freq": (1e3,),
    "rope_parameters": ROPES,
    "rope_scaling": ROPES,
    "rope_theta": (5e3,),
    "rotary_dim": (4,),
    "rotary_pct": (0.5,),
    "routed_scaling_factor": (1.0, 2.0, None),
    "scale_attn_by_inverse_layer_idx": (True,),
    "scale_attn_weights": (False,),
    "scale_embedding": (True,),
    "scoring_func": ("softmax", "sigmoid"),
    "sliding_window": (4, None, 0),
    "sliding_window_pattern": (1, 2, 3, 6),
    "tie_word_embeddings": (True, False),
    "topk_method": ("greedy", "noaux_tc", "group_limited_greedy"),
    "use_bidirectional_attention": (True,),
    "use_cache": (False,),
    "use_sliding_window": (True,),
}
"""Fields of other model families, with values that are meaningful there."""


def changes(config: Values, more: Mapping[str, tuple[Any, ...]] = MappingProxyType({})) -> Iterator[tuple[str, Values]]:
    """Changed copies of a config.json, each with a description of the change; `more` are further fields to add."""
    for field in sorted(config.keys() - SAID):
        without = {name: value for name, value in config.items() if name != field}
        yield f"{field} deleted", without
        for value in others(config[field]):
            yield f"{field} {value!r}", config | {field: value}
    yield from added(config)
    yield from added(config, more)
    layers = config.get("num_hidden_layers") or 0
    for kinds in ([FULL], [SLIDING], [SLIDING, FULL], [FULL, SLIDING]):
        each = (kinds * layers)[:layers]
        yield f"layer_types {each}", config | {"layer_types": each}
    for field in sorted({"layer_types", "rope_parameters"} & config.keys()):
        for words, changed in added({name: value for name, value in config.items() if name != field}):
            yield f"without {field}, {words}", changed
    for rope in ROPES:
        if rope.get("rope_type") in ("yarn", "llama3"):
            beside = {"rope_parameters": rope, "original_max_position_embeddings": 20}
            yield f"{beside}", config | beside
    if "layer_types" in config:
        yield from ((f"{mixed}", config | mixed) for mixed in MIXED_ROPES)


def added(config: Values, foreign: Mapping[str, tuple[Any, ...]] = FOREIGN) -> Iterator[tuple[str, Values]]:
    """Copies of the config, each with one value of one field of other families."""
    for field, values in foreign.items():
        for value in values:
            if field not in config or config[field] != value:
                yield f"{field} {value!r} added", config | {field: value}


def others(value: Any) -> Iterator[Any]:
    """Null, and values of the same type as `value` that differ from it; for null, values of several types.

    For an object these are the empty one, and those with one field deleted or changed in this way.
    """
    if value is None:
        yield from (True, 2, 0.5, [])
        return
    yield None
    match value:
        case bool():
            yield not value
        case int():
            yield from sorted({0, 1, value // 2, value + 1, 2 * value} - {value})
        case float():
            yield from sorted({0.0, value / 2, 2 * value} - {value})
        case str():
            yield OTHER_NAMES.get(value, "unheard_of")
        case list():
            yield from ([], value[:-1], value[::-1])
        case dict():
            yield {}
            for name in value:
                yield {key: kept for key, kept in value.items() if key != name}
                yield from (value | {name: other} for other in others(value[name]))


def verdict(theirs: Tensor | None, ours: Callable[[], Tensor], tolerance: float = 1e-4) -> str:
    """What loading a changed config comes to, in words that begin with "equal", "refused", "differs" or "traceback".

    `theirs` is what transformers computes, None where it fails. `ours` is called in either case, as its error must be a
    `UserError` whatever transformers does; it may then come to "refused by both" or "computed here alone".
    """
    try:
        found = ours()
    except UserError:
        return "refused" if theirs is not None else "refused by both"
    except Exception as error:  # noqa: BLE001 -- whatever is no message for people
        return f"traceback: {error!r}"
    if theirs is None:
        return "computed here alone"
    if found.shape != theirs.shape:
        return f"differs: shape {list(found.shape)}, theirs {list(theirs.shape)}"
    apart = (found - theirs).abs().max().item()
    return "equal" if apart < tolerance else f"differs: by {apart:.2g}"


def require_right(what: str, found: Mapping[str, str], equal: int) -> dict[str, int]:
    """The number of changes of the config `what` by the first words of their verdicts.

    Raises `AssertionError` naming the changes that give other numbers or a traceback, or if too few are "equal".
    """
    counts = dict(Counter(words.partition(":")[0] for words in found.values()))
    wrong = {change: words for change, words in found.items() if words.startswith(("differs", "traceback"))}
    if wrong or counts.get("equal", 0) < equal:
        raise AssertionError(f"{what}: {counts}\n" + "\n".join(f"{change}: {words}" for change, words in wrong.items()))
    return counts
