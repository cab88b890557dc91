"""Options of a mechanism: parsing them from text, and building a checked config."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from typing import Any

from attn_core.checks import whole
from attn_core.config import SHARED_FIELDS, MechanismConfig
from attn_core.errors import InvalidValue, UnknownName
from attn_core.mechanism import Capability, Mechanism, require_supported


def option_fields(mechanism: Mechanism) -> dict[str, Any]:
    """The mechanism's own options and their defaults (`dataclasses.MISSING` where there is none)."""
    fields = dataclasses.fields(mechanism.Config)
    return {field.name: field.default for field in fields if field.name not in SHARED_FIELDS}


def configure(mechanism: Mechanism, options: Mapping[str, Any] | None = None, **shared: Any) -> MechanismConfig:
    """Build the config of `mechanism` from the model's `shared` fields and the user's `options`.

    `cross` defaults to True for a mechanism that has no other mode, else to False; `causal` defaults to True, but to
    False for a mechanism that has no causal form and where `cross` is True. Raises `UnknownName` for an option that
    the mechanism does not have, `InvalidValue` for a bad value, and `Undeclared` for a feature that the mechanism does
    not declare: see `require_supported`.
    """
    given = shared | dict(options or {})
    cross = given.get("cross", mechanism.only_cross)
    if shared.get("cross", cross) != cross:
        allowed = f"{shared['cross']}, as required by the layer's place in the model"
        raise InvalidValue.of("cross", cross, allowed).in_mechanism(mechanism.name)
    if not isinstance(cross, bool):
        raise InvalidValue.of("cross", cross, "True or False").in_mechanism(mechanism.name)
    shared = shared | {"cross": cross, "causal": _direction(mechanism, given.get("causal"), cross=cross)}
    known = {field.name for field in dataclasses.fields(mechanism.Config)}
    for name in options or {}:
        if name not in known:
            raise UnknownName.of(f"option of mechanism {mechanism.name!r}", name, option_fields(mechanism))
    values = shared | {name: whole(value) for name, value in (options or {}).items()}
    try:
        config = mechanism.Config(**values)
    except InvalidValue as error:
        raise error.in_mechanism(mechanism.name) from error
    except TypeError as error:
        raise InvalidValue(f"mechanism {mechanism.name!r}: {error}") from error
    require_supported(mechanism, config)
    return config


def parse_options(pairs: Iterable[str] | None, given_by: str = "--option") -> dict[str, Any]:
    """Parse options given as NAME=VALUE pairs; a value that is not valid JSON is text.

    Raises `InvalidValue`, with `given_by` as the field, for a pair without a name or an equals sign.
    """
    options: dict[str, Any] = {}
    for pair in pairs or ():
        name, equals, text = pair.partition("=")
        if not name or not equals:
            raise InvalidValue.of(given_by, pair, "NAME=VALUE")
        try:
            options[name] = json.loads(text)
        except json.JSONDecodeError:
            options[name] = text
    return options


def _direction(mechanism: Mechanism, causal: Any, *, cross: bool) -> bool:
    """`causal`, or its default where it is None; raises `InvalidValue` if it is no bool, or True where `cross`."""
    can_be_causal = mechanism.can(Capability.CAUSAL)
    if causal is not None and not isinstance(causal, bool):
        raise InvalidValue.of("causal", causal, "True or False").in_mechanism(mechanism.name)
    if cross and causal:
        allowed = "False where cross: queries attend to the whole source"
        raise InvalidValue.of("causal", causal, allowed).in_mechanism(mechanism.name)
    if causal is None:
        return can_be_causal and not cross
    return causal
