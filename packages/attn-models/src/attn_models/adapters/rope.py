"""Rotary positions in every spelling of a config.json of transformers, read and written for all families."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from attn_core.checks import require_flag, require_number, require_whole
from attn_core.errors import InvalidValue
from attn_core.rotary import rotary_scaling
from attn_schema.decoder import DecoderConfig

from attn_models.adapters.base import FULL, SLIDING, needed, objects_of, renamed, require_allowed

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


TOP_LEVEL = {"rope_theta": "rope_theta", "partial_rotary_factor": "partial_rotary_factor"}
"""The fields of `rope_parameters` that transformers 4 has at the top level, and their keys there."""


def read_rope(
    values: Mapping[str, Any],
    base: float = DEFAULT_BASE,
    fraction: float | None = None,
    keys: Mapping[str, str] = TOP_LEVEL,
) -> Rope:
    """The rotary positions of a config.json: an object in transformers 5, keys at the top level in 4.

    `base` and `fraction`, the rotated part of each head, are those of a config.json without them. With None any
    `partial_rotary_factor` but 1 is refused: models of such a family ignore it or use it only with some scalings.
    `keys` are those of both at the top level. Raises `InvalidValue` for two descriptions that differ.
    """
    given = one_rope_of(values)
    top_level = {field: values[key] for field, key in keys.items() if values.get(key) is not None}
    usual = {"rope_theta": base, "original_max_position_embeddings": values.get("max_position_embeddings")}
    found = usual | ({} if fraction is None else {"partial_rotary_factor": fraction}) | top_level | dict(given)
    if fraction is None:
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
            return read_rope(values_without_context, fraction=1.0)
        raise InvalidValue.of("rope_parameters.rope_type", kind, "'default' or 'longrope'")
    plain = read_rope(
        {key: value for key, value in values.items() if key not in ("rope_scaling", "original_max_position_embeddings")}
        | {"rope_parameters": {**given, "rope_type": "default"}},
        fraction=1.0,
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


def ropes_of_kinds(
    values: Mapping[str, Any], usual: Mapping[str, Mapping[str, Any]], bases: Mapping[str, str]
) -> dict[str, Rope]:
    """The rotary positions of each kind of layer: an object for each in transformers 5.

    `usual` are those of a config.json without any, `bases` the keys of the bases at the top level in transformers 4,
    where a `rope_scaling` applies to the first kind only; without `bases`, the family is of transformers 5 alone.
    Raises `InvalidValue` for what transformers ignores or its versions 4 and 5 read differently: rotary positions
    without kinds, a `rope_scaling` without `rope_type`, `truncate` within a kind.
    """
    nested, stretched = objects_of(values, "rope_parameters", "rope_scaling").values()
    context = values.get("max_position_embeddings")
    if (nested.keys() - usual) if bases else (nested and nested.keys() != usual.keys()):
        raise InvalidValue.of("rope_parameters", dict(nested), f"an object for each of {' and '.join(usual)}")
    stretched = {} if stretched == nested else stretched
    if stretched and (nested or not bases):
        raise InvalidValue.of("rope_scaling", stretched, "null beside rope_parameters, which hold it for each kind")
    top_level = {"partial_rotary_factor": (1, None), "original_max_position_embeddings": (None, context)}
    require_allowed(values, top_level if bases else dict.fromkeys((*top_level, "rope_theta"), (None,)))
    by_kind = objects_of(nested, *usual) | ({next(iter(usual)): stretched} if stretched else {})
    found = {}
    for kind, own in by_kind.items():
        told = {"rope_theta": needed(values, bases[kind])} if bases.get(kind) in values else {}
        whole = {"original_max_position_embeddings": context} | (dict(usual[kind]) if bases or not nested else {})
        try:
            require_allowed(own, {"type": (own.get("rope_type"), None)})
            require_allowed(own, {"partial_rotary_factor": (1, None), "truncate": (True,)} if bases else {})
            needed(whole | told | dict(own), "rope_theta")
            found[kind] = rope_of(whole | told | dict(own))
        except InvalidValue as error:
            field = error.metadata.get("field", "").rpartition(".")[2]
            raise renamed(error, f"rope_parameters.{kind}.{field}") from error
    return found


def mscale(factor: float, weight: float = 1.0) -> float:
    """YaRN's factor on queries and keys, 0.1 m ln(s) + 1 (arXiv 2309.00071; the weight m is DeepSeek-V2's)."""
    return 0.1 * weight * math.log(factor) + 1 if factor > 1 else 1.0


def model_rope(config: DecoderConfig) -> Rope:
    """The rotary positions of the layers that have none of their own."""
    return Rope(base=config.rope_theta, fraction=config.partial_rotary_factor, scaling=config.rope_scaling)


def rope_keys_of_kinds(config: DecoderConfig, kinds: Iterable[str]) -> dict[str, Any]:
    """`rope_parameters` with one object for each kind of layer; layers of one kind have the same."""
    found = dict.fromkeys(kinds, model_rope(config))
    for layer in range(config.num_layers):
        options = config.choice(layer).options
        own: dict[str, Any] = options.get("rotary") or {
            key: options[key] for key in ("base", "scaling") if key in options
        }
        if own:
            found[SLIDING if options.get("window") else FULL] = Rope(**{"base": config.rope_theta} | own)
    return {"rope_parameters": {kind: rope_parameters(rope) for kind, rope in found.items()}}
