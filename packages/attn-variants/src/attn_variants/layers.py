"""Layers of mechanisms by name."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from attn_core import Mechanism, MechanismConfig, configure, installed
from attn_core.config import SHARED_FIELDS
from attn_core.errors import InvalidValue, UnknownName

from attn_variants.display import describe

if TYPE_CHECKING:
    from torch import nn
else:
    nn = Any


def layer(mechanism: str | Mechanism, **options: Any) -> nn.Module:
    """The attention layer of a mechanism, with random weights.

        gqa = attn_variants.layer("gqa", hidden_size=512, num_heads=8, num_kv_heads=2)
        out = gqa(torch.randn(2, 100, 512))  # [batch, query_len, hidden_size]

    Every installed mechanism can be named, from this package or from a plugin; `attn list mechanisms` shows them. The
    layer takes inputs [batch, query_len, hidden_size] and returns the same shape; mechanisms for cross-attention take
    the encoder's output [batch, key_len, hidden_size] as second argument. `forward` also takes a padding mask by
    keyword, bool [batch, key_len], True where a key is real.

    Args:
        mechanism: The name of a mechanism, such as "mha", "gqa", "mla", "sliding_window" or "retnet"; where two
            packages own a name, "package/name".
        **options: The fields of `attn_core.MechanismConfig` (`hidden_size`, `num_heads`, `num_kv_heads`, `head_dim`,
            `causal`, `bias`, `rotary`, `dropout`, ...) and the mechanism's own options, such as `window` of
            "sliding_window"; `attn show NAME` lists them. `causal` is True by default where a mechanism can be
            causal.

    Raises:
        UnknownName: There is no mechanism, or no option, of this name.
        AmbiguousName: Two packages own the name.
        InvalidValue: An option is missing, or has a value that is not allowed.
        Incompatible: Options exclude one another.
    """
    found = installed().mechanisms.get(mechanism) if isinstance(mechanism, str) else mechanism
    if not isinstance(found, Mechanism):
        raise InvalidValue.of("mechanism", mechanism, "the name of a mechanism, or a mechanism")
    config = configured(found, **options)
    module: nn.Module = found.build(config)
    describe(module, found, config)
    return module


def configured(mechanism: Mechanism, **options: Any) -> MechanismConfig:
    """The config of these fields, shared and own ones together; raises as `layer` does."""
    fields = {field.name: field for field in dataclasses.fields(mechanism.Config)}
    for name in options:
        if name not in fields:
            raise UnknownName.of(f"option of mechanism {mechanism.name!r}", name, fields)
    for name, field in fields.items():
        if name not in options and field.default is field.default_factory is dataclasses.MISSING:
            raise InvalidValue(f"mechanism {mechanism.name!r}: {name} must be given", field=name)
    own = {name: value for name, value in options.items() if name not in SHARED_FIELDS}
    return configure(mechanism, own, **{name: options[name] for name in options if name in SHARED_FIELDS})
