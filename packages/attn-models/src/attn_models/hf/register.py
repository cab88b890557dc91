"""Registering mechanisms as attention implementations of transformers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attn_core import Mechanism, installed
from attn_core.errors import Incompatible, MissingPackage, UserError

from attn_models.hf.attention import MechanismAttention
from attn_models.hf.masks import whole_mask

PREFIX = "attn_"


def register(prefix: str = PREFIX) -> list[str]:
    """Register every installed mechanism that fits, with its default options; the names, such as "attn_sparsemax".

    One fits that attends within one sequence, says what it computes as an `AttentionSpec`, and has no learned weights
    beside the projections, which are the model's. Raises `MissingPackage` without transformers.
    """
    names = []
    for name in installed().mechanisms.names():
        try:
            names.append(register_mechanism(name, name=f"{prefix}{name.rpartition('/')[2]}"))
        except UserError:
            continue
    return names


def register_mechanism(mechanism: str, options: Mapping[str, Any] | None = None, *, name: str | None = None) -> str:
    """Register one mechanism with these options as the attention implementation `name`, by default attn_MECHANISM.

    Masks are registered with it: without them transformers gives an implementation none, and causality and padding
    are lost without a word. Raises `UnknownName` for a mechanism or option that does not exist, `InvalidValue` for an
    option's bad value, `Incompatible` for a mechanism that does not fit, `MissingPackage` without transformers.
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
    except ImportError as error:
        raise MissingPackage.of("transformers", "running mechanisms inside it") from error
    found: Mechanism = installed().mechanisms.get(mechanism)
    attention = MechanismAttention(found, options or {})
    attention.check()
    chosen = name or PREFIX + found.name
    if "/" in chosen or "|" in chosen or not chosen:
        raise Incompatible(f"{chosen!r} cannot name an implementation: transformers would look for it on its hub")
    AttentionInterface.register(chosen, attention)
    AttentionMaskInterface.register(chosen, whole_mask)
    return chosen
